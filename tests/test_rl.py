"""`longspan rl`: the same run at any mesh, resumed as if never stopped, and loud where nothing can be learned."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.config import ConfigError, RLConfig, describe, load, validate
from longspan.rl import loop

ROOT = Path(__file__).parent.parent
TASKS = ROOT / "tests" / "rl_tasks.py"
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
}
SMALL = {
    "model.config": MODEL,
    "model.dtype": "float64",
    "data.source": f"{TASKS}:rows",
    "reward.functions": [f"{TASKS}:thirds"],
    "rollout.prompts": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 4,
    "optimizer.lr": 1e-2,
    "train.steps": 4,
    "train.threads": 1,
    "log.progress": False,
    "checkpoint.at_end": False,
}


def settings(folder, changes):
    def toml(value):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
        return json.dumps(value)

    every = {**SMALL, "folder": str(folder), **changes}
    return [f"{name}={toml(value)}" for name, value in every.items() if name != "model.config"] + [
        f"model.config.{name}={toml(value)}" for name, value in every["model.config"].items()
    ]


def run(folder, changes, send=None):
    """Records of a run. send: (step after which, signal) to this process."""
    config = load(None, settings(folder, changes), kind=RLConfig)
    validate(config)
    records = []

    def on_step(record):
        records.append(record)
        if send is not None and record["step"] == send[0]:
            os.kill(os.getpid(), send[1])

    summary = loop.train(config, progress=False, on_step=on_step)
    return records, summary


def raises(folder, changes):
    try:
        run(folder, changes)
    except (ValueError, RuntimeError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


CURVE = ("reward", "loss", "grad_norm", "entropy", "length", "mismatch_difference", "pass_at_1", "learned_tokens")


def assert_same_curve(one, other, rel=1e-7):
    assert len(one) == len(other)
    for a, b in zip(one, other):
        for name in CURVE:
            if name in a or name in b:
                assert b[name] == pytest.approx(a[name], rel=rel, abs=1e-7), (a["step"], name)


# -- the same run everywhere ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "loss.recipe": "gspo",
            "train.updates": 2,
            "loss.changes": {"kl_coefficient": 0.1, "correction": {"kind": "tis"}, "entropy_coefficient": 0.01},
            "rollout.off_policy_steps": 1,
            "reward.functions": [f"{TASKS}:some", f"{TASKS}:reward"],
        },
        {
            "rollout.environment": f"{TASKS}:Echo",
            "reward.functions": [],
            "rollout.max_new_tokens": 3,
            "rollout.max_tokens": 24,
        },
    ],
    ids=["grpo", "gspo, two updates, one step off-policy", "environment"],
)
def test_a_run_is_the_same_at_every_mesh(run_ranks, tmp_path, changes):
    ((one, _),) = run_ranks(run, 1, tmp_path / "one", {**changes, "mesh.cp": 1})
    for size, more in ((2, {"mesh.cp": 2}), (4, {"mesh.cp": 2, "train.token_budget": 40, "parallel.wrap": "ddp"})):
        for records, _ in run_ranks(run, size, tmp_path / str(size), {**changes, **more}):
            assert_same_curve(one, records)
    expected = 1 if changes.get("rollout.off_policy_steps") else 0
    assert [record["staleness"] for record in one] == [0] + [expected] * 3
    assert all(record["mismatch_difference"] < 1e-5 for record in one if record["staleness"] == 0)
    assert one[-1]["updates"] == changes.get("train.updates", 1) and one[0]["grad_norm"] > 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_that_was_stopped_goes_on_at_another_mesh(run_ranks, tmp_path, ahead):
    changes = {"rollout.off_policy_steps": ahead, "warmup.steps": 2, "loss.changes": {"kl_coefficient": 0.1}}
    ((whole, _),) = run_ranks(run, 1, tmp_path / "whole", {**changes, "mesh.cp": 1})
    stopped = run_ranks(run, 2, tmp_path / "stopped", {**changes, "mesh.cp": 2}, (2, signal.SIGTERM))
    for records, summary in stopped:
        assert summary.stopped and summary.step == 2 and summary.checkpoint.endswith("step-2")
        assert_same_curve(whole[:2], records)
    ((rest, summary),) = run_ranks(run, 1, tmp_path / "stopped", {**changes, "mesh.cp": 1})
    assert not summary.stopped and [record["step"] for record in rest] == [3, 4]
    assert_same_curve(whole[2:], rest)
    lines = (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    samples = [json.loads(line) for line in (tmp_path / "stopped" / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [1, 1, 2, 2, 3, 3, 4, 4] and samples[0]["prompt"].endswith(">")
    # other prompts are another run
    (text,) = run_ranks(raises, 1, tmp_path / "stopped", {**changes, "data.max_rows": 7, "checkpoint.resume": "must"})
    assert "was trained on other prompts" in text


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("dr_grpo", {"length": 8}),
        ("dapo", {"correction": {"kind": "mis", "rejected": "drop"}, "overlong_filter": False}),
        ("rloo", {}),
        ("cispo", {"kl_coefficient": 0.1, "kl_weighted": True, "kl_kind": "k1"}),
        ("sapo", {"options": {"tau_positive": 2.0}}),
        ("gmpo", {}),
        ("reinforce", {"baseline": "batch"}),
        ("importance_sampling", {}),
    ],
)
def test_recipes_run(run_ranks, tmp_path, recipe, changes):
    asked = {"loss.recipe": recipe, "loss.changes": changes, "train.steps": 2, "mesh.cp": 2, "rollout.samples": 0}
    for records, _ in run_ranks(run, 2, tmp_path / "run", asked):
        assert records[-1]["updates"] == 1 and records[-1]["grad_norm"] > 0


def test_dynamic_sampling_draws_again(run_ranks, tmp_path):
    changes = {"loss.dynamic_sampling": True, "loss.max_draws": 8, "rollout.group_size": 2, "train.steps": 3}
    ((records, _),) = run_ranks(run, 1, tmp_path / "run", changes)
    assert all(record["zero_variance"] == 0 for record in records)
    assert max(record["draws"] for record in records) > 1
    assert all(record["completions"] == 8 for record in records)


# -- loud and bounded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward.functions": [f"{TASKS}:nothing"]}, "none of its 16 completions has a reward"),
        ({"reward.functions": [f"{TASKS}:shouts"]}, "none of its 16 completions has a reward"),
        ({"reward.functions": [f"{TASKS}:infinite"]}, "is inf"),
        ({"reward.functions": [f"{TASKS}:absent"]}, "has no function 'absent'"),
        ({"reward.functions": [f"{TASKS}:same"], "loss.dynamic_sampling": True}, "dropped every one of 16 groups"),
        ({"loss.recipe": "dapo", "rollout.max_new_tokens": 1, "train.steps": 30}, "10 steps in a row left no token"),
        ({"optimizer.lr": 1e300, "train.steps": 3}, "the weights have diverged"),
        ({"loss.recipe": "ppo"}, "needs a critic"),
        ({"loss.recipe": "bnpo"}, "no recipe 'bnpo'"),
        ({"loss.recipe": "sft"}, "looks at no reward"),
        ({"rollout.group_size": 1}, "every advantage would be 0"),
        ({"loss.changes": {"kl_coefficient": "0.01"}}, "loss.changes.kl_coefficient = '0.01' is no float"),
        ({"reward.functions": [f"{TASKS}:needs"]}, "needs 'solution'"),
        ({"data.source": f"{TASKS}:rows_of_each_rank"}, "gave other rows on rank(s) [1]"),
        ({"reward.functions": [f"{TASKS}:nothing"], "loss.dynamic_sampling": True}, "has a reward"),
        ({"loss.changes": {"aggregatoin": "token_mean"}}, "aggregatoin"),
        ({"train.token_budget": 6}, "longest sequence may have 7 tokens"),
        ({"warmup.steps": 1, "warmup.answer": "solution"}, "warmup.answer = 'solution'"),
        ({"model.config": {**MODEL, "vocab_size": 60}}, "a prompt holds token id"),
    ],
)
def test_what_cannot_go_on_says_so_on_every_rank(run_ranks, tmp_path, changes, message):
    for text in run_ranks(raises, 2, tmp_path / "run", {"mesh.cp": 2, **changes}):
        assert message in text, text


def test_what_was_drawn_ahead_by_other_settings_is_drawn_anew(run_ranks, tmp_path):
    changes = {"rollout.off_policy_steps": 1, "train.steps": 6}
    run_ranks(run, 1, tmp_path / "run", changes, (2, signal.SIGTERM))
    for more in ({"rollout.off_policy_steps": 0}, {"rollout.group_size": 3}):
        shutil.copytree(tmp_path / "run", tmp_path / "again")
        ((records, _),) = run_ranks(run, 1, tmp_path / "again", {**changes, **more})
        assert [record["step"] for record in records] == [3, 4, 5, 6] and records[0]["staleness"] == 0
        assert records[0]["completions"] == 4 * more.get("rollout.group_size", 4)
        shutil.rmtree(tmp_path / "again")
    kl = {**changes, "loss.changes": {"kl_coefficient": 0.1}}
    assert "was not kept" in run_ranks(raises, 1, tmp_path / "run", kl)[0]
    # what is wrong with a run shows before what it had saved is removed
    never = {**changes, "checkpoint.resume": "never", "reward.functions": [f"{TASKS}:absent"]}
    assert "has no function" in run_ranks(raises, 1, tmp_path / "run", never)[0]
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()


def stale(folder):
    loop.OwnGenerator.update_weights, kept = lambda self, weights, version: None, loop.OwnGenerator.update_weights
    try:
        return raises(folder, {"mesh.cp": 2})
    finally:
        loop.OwnGenerator.update_weights = kept


def test_a_generator_with_old_weights_is_found(run_ranks, tmp_path):
    for text in run_ranks(stale, 2, tmp_path / "run"):
        assert "does not draw from the trained policy" in text


def test_equal_rewards_update_nothing_and_the_run_goes_on(run_ranks, tmp_path):
    ((records, _),) = run_ranks(run, 1, tmp_path / "run", {"reward.functions": [f"{TASKS}:same"], "train.steps": 2})
    assert [(r["updates"], r["zero_variance"], r["pass_at_1"]) for r in records] == [(0, 1.0, 1.0)] * 2


# -- the configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.top_p": 0.9}, "rollout.top_p = 0.9: a sampler that renormalises"),
        ({"rollout.top_k": 20}, "rollout.top_k = 20"),
        ({"rollout.generator": "vllm"}, "needs rollout.urls"),
        ({"rollout.urls": ["http://127.0.0.1:1"]}, "asks no server"),
        ({"rollout.temperature": 0.0}, "expected more than 0"),
        ({"reward.functions": []}, "no reward"),
        ({"reward.weights": [1.0, 2.0]}, "2 reward.weights for 1"),
        ({"train.updates": 3}, "rollout.prompts = 4 is not divisible by train.updates = 3"),
        ({"data.source": "no_task.py:rows"}, "no such file: no_task.py"),
        ({"rollout.off_policy_steps": 2}, "is not one of 0, 1"),
        ({"train.batch_rows": 2}, "unknown key 'train.batch_rows'"),
        ({"reward.functions": "task.py:reward"}, "expected a list"),
        ({"train.evaluate_every": 2}, "holds out nothing"),
        ({"reward.overlong_buffer": 2, "rollout.environment": "task.py:Echo"}, "drop one"),
        ({"data.source": "task.py"}, "name the function, task.py:rows"),
    ],
)
def test_impossible_configurations(tmp_path, changes, message):
    with pytest.raises(ConfigError) as raised:
        validate(load(None, settings(tmp_path, changes), kind=RLConfig), 1)
    assert message in str(raised.value)


def test_help_lists_every_key():
    text = describe(RLConfig)
    for name in ("rollout.group_size", "loss.recipe", "reward.functions", "warmup.steps", "train.token_budget"):
        assert f"  {name} = " in text


# -- examples ------------------------------------------------------------------------------------------------------


def example(name, folder, overrides):
    os.chdir(ROOT)
    config = load(f"examples/{name}", [f"folder={folder}", "train.threads=1", *overrides], kind=RLConfig)
    records = []
    loop.train(config, progress=False, on_step=records.append)
    return records


def test_copying_is_learned_from_rewards(run_ranks, tmp_path):
    records, _ = run_ranks(example, 2, "rl_copy.toml", tmp_path / "copy", [])
    rewards = [record["reward"] for record in records]
    assert sum(rewards[-10:]) / 10 >= sum(rewards[:10]) / 10 + 0.25
    assert max(record["mismatch_difference"] for record in records) < 1e-5
    assert max(record["probe_difference"] for record in records) < 1e-5


def test_a_needle_on_another_rank_gives_the_curve_of_one_rank(run_ranks, tmp_path):
    short = ["warmup.steps=8", "warmup.rows=8", "train.steps=4", "rollout.prompts=4", "checkpoint.at_end=false"]
    (one,) = run_ranks(example, 1, "rl_needle.toml", tmp_path / "one", [*short, "mesh.cp=1"])
    for records in run_ranks(example, 2, "rl_needle.toml", tmp_path / "two", short):
        assert_same_curve(one, records)
        # each sequence is on both ranks
        assert all(abs(a - b) <= 64 for record in records for a, b in [record["tokens_per_rank"]])


@pytest.mark.parametrize("ranks", [2, 4])
def test_five_steps_from_the_command_line(tmp_path, ranks):
    command = [sys.executable, "-m", "longspan", "rl", "examples/rl_copy.toml", "--nproc", str(ranks)]
    small = ["train.steps=5", "warmup.steps=2", "rollout.prompts=4", "train.threads=1", f"folder={tmp_path / 'run'}"]
    done = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 5: reward" in done.stdout and "run folder" in done.stdout
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["mesh"] == {"dp": ranks // 2, "cp": 2}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5 and "NaN" not in "".join(lines)
