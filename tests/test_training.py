"""A hundred training steps on the demo's own data and model, shorter rows: one rank against every way of splitting."""

from pathlib import Path

import pytest

from longspan import compare
from longspan.config import load
from longspan.engine.train import train

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
STEPS = 100


def settings(folder, *overrides):
    return load(
        str(DEMO),
        [
            f"folder={folder}",
            "data.sequence_length=256",
            "data.max_documents=60",
            f"train.steps={STEPS}",
            "train.batch_rows=2",
            "train.micro_rows=2",
            "train.threads=1",
            "checkpoint.at_end=false",
            *overrides,
        ],
    )


def body(folder, overrides):
    train(settings(folder, *overrides), progress=False)


SPLITS = {
    "cp 2 ulysses": (2, ["mesh.cp=2", "parallel.scheme=ulysses", "parallel.wrap=ddp"]),
    "cp 2 exchange": (2, ["mesh.cp=2", "parallel.scheme=exchange"]),
    "dp 2 x cp 2": (4, ["mesh.dp=2", "mesh.cp=2", "train.micro_rows=1", "parallel.wrap=ddp"]),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_hundred_steps_equal_one_rank(run_ranks, tmp_path, dtype):
    precision = f"model.dtype={dtype}"
    run_ranks(body, 1, str(tmp_path / "one"), ["mesh.cp=1", precision])
    one = compare.read_run(tmp_path / "one")
    assert len(one.loss) == STEPS and one.loss[-1] < one.loss[0] - 1
    for name, (ranks, overrides) in SPLITS.items():
        folder = tmp_path / name
        run_ranks(body, ranks, str(folder), [*overrides, precision])
        split = compare.read_run(folder)
        if dtype == "float64":
            limits = compare.Tolerance(loss_rtol=1e-9, grad_norm_rtol=1e-9, loss_drift=1e-9, grad_norm_drift=1e-9)
        else:
            limits = compare.Tolerance(loss_rtol=1e-4, grad_norm_rtol=1e-3, loss_drift=1e-5, grad_norm_drift=1e-4)
        verdict = compare.compare(one, split, limits)
        assert not verdict.failure, (name, verdict.failure)
    if dtype == "float32":
        ranks, overrides = SPLITS["cp 2 exchange"]
        run_ranks(body, ranks, str(tmp_path / "again"), [*overrides, precision])
        first, again = compare.read_run(tmp_path / "cp 2 exchange"), compare.read_run(tmp_path / "again")
        assert (first.loss, first.grad_norm) == (again.loss, again.grad_norm)
