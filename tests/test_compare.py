"""`longspan compare`: the maths on curves, reading runs and references, exit codes. Nothing here trains."""

import json
import math
import random

import pytest

from longspan import compare
from longspan.cli import main
from longspan.compare import EXACT, TOLERANCES, Curve, drift, relative
from longspan.config import ConfigError

F32 = TOLERANCES["float32"]


def curve(loss, grad_norm=None, *, name="run", steps=None, config=None):
    grad_norm = [1.0] * len(loss) if grad_norm is None else grad_norm
    steps = list(range(1, len(loss) + 1)) if steps is None else steps
    return Curve(name=name, steps=steps, loss=loss, grad_norm=grad_norm, config=config or {})


def write_run(folder, loss, grad_norm=None, *, first=1, dtype="float32", **train):
    folder.mkdir(parents=True, exist_ok=True)
    grad_norm = [1.0] * len(loss) if grad_norm is None else grad_norm
    rows = [
        {"step": first + i, "loss": x, "grad_norm": g, "tokens_per_second": 100.0}
        for i, (x, g) in enumerate(zip(loss, grad_norm))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"folder": str(folder), "model": {"dtype": dtype}, "train": {"precision": "full", **train}}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def run_compare(out, capsys):
    def run(*arguments):
        code = main(["compare", *arguments, "--out", str(out)])
        return code, capsys.readouterr()

    return run


# ---- maths


def test_relative():
    assert relative(2.0, 2.0) == 0
    assert relative(2.0, 2.5) == 0.25
    assert relative(0.0, 0.0) == 0
    assert relative(0.0, 1e-30) == math.inf
    assert math.isnan(relative(1.0, math.nan))


def test_drift():
    assert drift([1.0, 3.0], [1.0, 3.0]) == 0
    assert drift([1.0, 3.0], [1.5, 2.5]) == 0  # cancels
    assert drift([1.0, 3.0], [1.5, 3.5]) == 0.25
    assert drift([-1.0, 3.0], [-0.5, 3.5]) == 0.25  # of the mean magnitude
    assert drift([0.0], [1.0]) == math.inf
    assert math.isnan(drift([1.0], [math.inf]))


def test_equal_curves_are_equal():
    a = curve([5.0, 4.0])
    for tolerance in (*TOLERANCES.values(), EXACT):
        assert compare.compare(a, a, tolerance).equal


def test_the_first_failing_step_is_named():
    a = curve([5.0, 4.0, 3.0], [1.0, 1.0, 1.0])
    b = curve([5.0, 4.0001, 3.1], [1.0, 1.0, 1.1])
    result = compare.compare(a, b, F32)  # 2.5e-5 at step 2 is allowed
    assert not result.equal
    assert "step 3" in result.failure and "loss 3.0 and 3.1" in result.failure and "0.0003" in result.failure
    assert result.loss.worst == 2 and result.loss.max_rel == pytest.approx(1 / 30)


def test_a_wrong_gradient_shows_before_the_loss_does():
    a = curve([5.0, 4.0, 3.0], [1.0, 1.0, 1.0])
    b = curve([5.0, 4.0, 3.1], [1.0, 1.5, 1.0])
    assert "step 2" in (failure := compare.compare(a, b, F32).failure) and "gradient norm" in failure


def test_rounding_passes_where_a_constant_bias_of_the_same_size_fails():
    draw = random.Random(0)
    losses = [5.0 - 0.02 * i for i in range(100)]
    size = 5e-5  # half of what a single step may differ
    noisy = [x * (1 + draw.choice([-size, size]) * 0.5) for x in losses]
    biased = [x * (1 + size) for x in losses]
    assert compare.compare(curve(losses), curve(noisy), F32).equal
    result = compare.compare(curve(losses), curve(biased), F32)
    assert result.loss.first_failure is None and result.loss.max_rel < F32.loss_rtol
    assert result.loss.drift_failed and "mean drift of the loss is 5e-05; allowed: 1e-05" in result.failure


def test_a_bias_in_the_gradient_norm_fails_too():
    a, b = curve([5.0] * 9, [2.0] * 9), curve([5.0] * 9, [2.001] * 9)
    result = compare.compare(a, b, F32)
    assert result.grad_norm.first_failure is None and "mean drift of the gradient norm" in result.failure


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tolerance", [F32, EXACT])
@pytest.mark.parametrize("both", [True, False])
def test_what_is_not_finite_fails(value, tolerance, both):
    a, b = curve([5.0, value if both else 4.0, 3.0]), curve([5.0, value, 3.0])
    result = compare.compare(a, b, tolerance)
    assert "step 2" in result.failure and "not finite" in result.failure


def test_exact_is_about_bits():
    a = curve([5.0, 0.1 + 0.2])
    assert compare.compare(a, curve([5.0, 0.1 + 0.2]), EXACT).equal
    assert "step 2" in compare.compare(a, curve([5.0, 0.3]), EXACT).failure
    assert not compare.compare(curve([0.0]), curve([-0.0]), EXACT).equal


def test_zero_losses():
    assert compare.compare(curve([0.0, 0.0]), curve([0.0, 0.0]), F32).equal
    assert "step 1" in compare.compare(curve([0.0, 0.0]), curve([1e-9, 0.0]), F32).failure
    lenient = compare.dataclasses.replace(F32, atol=1e-8)
    assert compare.compare(curve([0.0, 0.0]), curve([1e-9, 0.0]), lenient).equal


def test_float64_bounds_are_tight():
    f64 = TOLERANCES["float64"]
    a = curve([5.0, 4.0])
    assert compare.compare(a, curve([5.0 + 1e-10, 4.0 - 1e-10]), f64).equal
    assert "step 1" in compare.compare(a, curve([5.0 + 1e-8, 4.0]), f64).failure


def test_different_steps_cannot_be_compared():
    a = curve([1.0] * 6, name="A", steps=[1, 2, 3, 4, 5, 9])
    b = curve([1.0] * 2, name="B", steps=[1, 4])
    with pytest.raises(ConfigError, match=r"B lacks steps 2-3, 5, 9 of A"):
        compare.compare(a, b, F32)
    with pytest.raises(ConfigError, match=r"B lacks steps 2-3, 5, 9 of A"):
        compare.compare(b, a, F32)
    with pytest.raises(ConfigError, match="no steps"):
        compare.compare(curve([]), curve([]), F32)


def test_default_bounds_follow_the_less_precise_side():
    f64 = {"model": {"dtype": "float64"}, "train": {"precision": "full"}}
    f32 = {"model": {"dtype": "float32"}, "train": {"precision": "full"}}
    bf16 = {"model": {"dtype": "float32"}, "train": {"precision": "bf16"}}
    assert compare.default_tolerance(f64, f64)[0] == "float64"
    assert compare.default_tolerance(f64, f32)[0] == "float32"
    assert compare.default_tolerance(bf16, f64)[0] == "bfloat16"
    assert compare.default_tolerance({}, {})[0] == "float32"


def test_long_runs_show_their_ends_and_their_worst_steps():
    a = curve([5.0] * 1000)
    b = curve([5.0 if i != 500 else 6.0 for i in range(1000)], [1.0 if i != 700 else math.nan for i in range(1000)])
    shown = compare.shown_steps(compare.compare(a, b, F32))
    assert {0, 4, 500, 700, 995, 999} <= set(shown) and len(shown) <= 22
    assert compare.shown_steps(compare.compare(curve([5.0] * 40), curve([5.0] * 40), F32)) == list(range(40))


def test_speed_is_tokens_over_time_without_the_first_step():
    rows = [{"tokens_per_second": s} for s in (1.0, 100.0, 300.0)]
    assert compare.speed(rows) == pytest.approx(150.0)
    assert compare.speed(rows[:1]) == 1.0
    assert compare.speed([]) is None


def test_config_differences():
    a = {"folder": "x", "mesh": {"cp": 1}, "model": {"config": {"hidden_size": 4}}, "log": {"progress": True}}
    b = {"folder": "y", "mesh": {"cp": 2}, "model": {"config": {}}, "log": {"progress": False}}
    assert compare.config_differences(a, b) == ["mesh.cp: 1, 2", "model.config.hidden_size: 4, (none)"]
    assert compare.config_differences(a, {}) == []


# ---- files


def test_reading_a_run(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, [5.0, 4.0, 3.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "validation_loss": 9.0}\n')  # no training step
        file.write('{"step": 3, "loss": 2.5, "grad_norm": 1.0, "tokens_per_second": 100.0}\n')  # after a resume
        file.write('{"step": 4, "loss"')  # killed while writing
    read = compare.read_run(folder)
    assert (read.steps, read.loss, read.tokens_per_second) == ([1, 2, 3], [5.0, 4.0, 2.5], pytest.approx(100.0))
    assert read.config["model"] == {"dtype": "float32"}
    (folder / "metrics.jsonl").write_text("not json\n{}\n")
    with pytest.raises(ConfigError, match="line 1"):
        compare.read_run(folder)


def test_a_reference_keeps_every_bit(tmp_path):
    values = [math.pi, 1 / 3, 5e-324, 1.7976931348623157e308]
    path = tmp_path / "reference.json"
    compare.write_reference(curve(values, values, config={"model": {"dtype": "float64"}}), path)
    read = compare.read_reference(path)
    assert read.loss == read.grad_norm == values and read.config == {"model": {"dtype": "float64"}}
    assert {"versions", "config_sha256"} <= json.loads(path.read_text()).keys()
    for text in ("[]", "{}", "nothing"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no reference"):
            compare.read_reference(path)


# ---- the command


def test_equal_runs(tmp_path, out, run_compare):
    a = write_run(tmp_path / "a", [5.0, 4.0, 3.0])
    b = write_run(tmp_path / "b", [5.00001, 3.99999, 3.0], seed=1)
    code, printed = run_compare(a, b)
    assert code == 0
    assert "EQUAL over 3 steps" in printed.out and "train.seed: (none), 1" in printed.out
    assert "4.00000000" in printed.out and "100 tokens/s" in printed.out
    report = json.loads((out / "compare.json").read_text())
    assert report["equal"] and report["a"]["loss"] == [5.0, 4.0, 3.0]
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert str(out / "compare.png") in printed.out and str(out / "compare.json") in printed.out


def test_different_runs(tmp_path, out, run_compare):
    a = write_run(tmp_path / "a", [5.0, 4.0, 3.0])
    b = write_run(tmp_path / "b", [5.0, 4.1, math.nan])
    code, printed = run_compare(a, b)
    assert code == 1
    assert "DIFFERENT: step 2 is the first to fail" in printed.out
    assert not json.loads((out / "compare.json").read_text())["equal"]
    assert (out / "compare.png").exists()


def test_bounds_from_the_command_line(tmp_path, run_compare):
    a = write_run(tmp_path / "a", [5.0, 4.0, 3.0])
    b = write_run(tmp_path / "b", [5.0, 4.0000001, 3.0])
    assert run_compare(a, b)[0] == 0
    assert run_compare(a, a, "--exact")[0] == 0
    assert run_compare(a, b, "--exact")[0] == 1
    assert run_compare(a, b, "--rtol", "1e-9")[0] == 1
    assert run_compare(a, b, "--rtol", "1e-9", "--atol", "1e-6")[0] == 0
    assert run_compare(a, b, "--drift", "1e-12")[0] == 1


def test_some_steps_only(tmp_path, run_compare):
    a = write_run(tmp_path / "a", [5.0, 4.0, 3.0])
    b = write_run(tmp_path / "b", [5.0, 4.0, 9.0, 8.0])
    assert run_compare(a, b, "--steps", "2")[0] == 0
    code, printed = run_compare(a, b)
    assert code == 2 and "lacks steps 4" in printed.err


def test_export_then_compare_with_it(tmp_path, run_compare):
    a = write_run(tmp_path / "a", [5.0, 1 / 3, 3.0])
    reference = str(tmp_path / "ref" / "reference.json")
    code, printed = run_compare(a, "--export", reference)
    assert code == 0 and reference in printed.out and "verdict" not in printed.out
    assert run_compare(reference, a, "--exact")[0] == 0


def test_mistakes_are_one_line_and_nothing_is_written(tmp_path, out, run_compare):
    a = write_run(tmp_path / "a", [5.0, 4.0])
    later = write_run(tmp_path / "later", [5.0, 4.0], first=3)
    toml = tmp_path / "x.toml"
    toml.write_text('[model.config]\nmodel_type = "llama"\n[train]\nsteps = 9\n')
    for arguments, part in [
        ([], "one or two sides"),
        ([a, a, a], "one or two sides"),
        ([a, str(tmp_path)], "not a run folder"),
        ([a, "no.toml"], "no such file"),
        ([a, "no.json"], "no such file"),
        ([a, later], "lacks steps"),
        ([a, a, "--exact", "--rtol", "1"], "--exact"),
        ([a, a, "--rtol", "-1"], "--rtol"),
        ([a, a, "--steps", "0"], "--steps"),
        ([a, a, "--a", a], "--a takes key=value"),
        ([a, a, "--a-nproc", "2"], "--a-nproc"),
        ([a, a, "--bogus"], "--bogus"),
        ([str(toml), "train.step=3"], "'train.steps'"),
        ([str(toml), "mesh.cp=2", "--b-nproc", "3"], "3 ranks"),
    ]:
        code, printed = run_compare(*arguments)
        assert code == 2, arguments
        assert printed.err.startswith("longspan: error: ") and printed.err.count("\n") == 1
        assert part in printed.err
    assert not out.exists()


def test_a_shorter_schedule_beside_a_stored_run_is_refused(tmp_path, run_compare):
    a = tmp_path / "a"
    write_run(a, [5.0, 4.0])
    (a / "config.json").write_text(json.dumps({"train": {"steps": 30}, "optimizer": {"schedule": "cosine"}}))
    toml = tmp_path / "x.toml"
    toml.write_text('[model.config]\nmodel_type = "llama"\n')
    code, printed = run_compare(str(a), str(toml), "--steps", "2")
    assert code == 2 and "cosine" in printed.err and "train.steps=30" in printed.err
