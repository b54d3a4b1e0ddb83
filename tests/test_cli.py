"""The `longspan` command: mistakes cost one line and nothing else; ranks are started, stopped and reported on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from longspan import launch
from longspan.cli import main
from longspan.config import ConfigError

TOML = """
folder = "run"
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
initializer_range = 0.1
[mesh]
cp = 2
[data]
source = "text.txt"
sequence_length = 128
[train]
steps = 3
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    (tmp_path / "tiny.toml").write_text(TOML)
    return tmp_path


def longspan(*arguments, module="longspan", **options):
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


def steps(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


# ---- without training


MISTAKES = [
    (["train"], "no configuration"),
    (["trian", "tiny.toml"], "'trian'"),
    (["train", "none.toml"], "none.toml"),
    (["train", "tiny.toml", "other.toml"], "other.toml"),
    (["train", "tiny.toml", "train.step=3", "--nproc", "2"], "'train.steps'"),
    (["train", "tiny.toml"], "--nproc 2"),  # cp = 2 on one rank
    (["train", "tiny.toml", "--nproc", "3"], "3 ranks"),
    (["train", "tiny.toml", "--nproc", "0"], "--nproc 0"),
    (["train", "tiny.toml", "--nproc", "two"], "--nproc"),
    (["train", "tiny.toml", "--bogus"], "--bogus"),
    (["train", "tiny.toml", "data.source=gone.txt", "--nproc", "2"], "gone.txt"),
    (["compare", "tiny.toml", "--a", "mesh.cp=1", "--b", "parallel.scheme=x"], "parallel.scheme"),
]


@pytest.mark.parametrize(("arguments", "part"), MISTAKES)
def test_mistakes(here, capsys, arguments, part):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("longspan: error: ") and printed.err.count("\n") == 1
    assert part in printed.err
    assert sorted(path.name for path in here.iterdir()) == ["text.txt", "tiny.toml"]


def test_options_may_stand_anywhere(here, capsys):
    assert main(["train", "--dry-run", "tiny.toml", "--nproc", "2", "train.steps=9"]) == 0
    printed = capsys.readouterr().out
    assert '"steps": 9' in printed and "dp 1 x cp 2" in printed
    assert not (here / "run").exists()


def test_what_needs_no_torch_does_not_wait_for_it(here):
    for arguments in (["--help"], ["--version"], ["train", "--help"], ["compare", "--help"]):
        code = f"import sys, longspan.cli as c\ntry: c.main({arguments!r})\nfinally: print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.endswith("False\n"), done.stderr
        assert "longspan" in done.stdout


def test_place():
    assert launch.place({}) == launch.Place(rank=0, world_size=1, launched=False)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4"}
    assert launch.place(torchrun) == launch.Place(rank=3, world_size=4, launched=True)
    srun = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert launch.place(srun) == launch.Place(rank=1, world_size=2, launched=True)
    assert launch.place(srun | torchrun).world_size == 4
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}  # outside of srun: one process, not one of eight
    assert launch.place(batch_script).launched is False


def test_nproc_under_a_launcher_is_refused(here, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "tiny.toml", "--nproc", "2"]) == 2
    assert "error: rank 1: --nproc 2" in capsys.readouterr().err


def test_the_first_failure_is_the_one_reported():
    def record(code, at, error=""):
        return {"code": code, "time": at, "error": error, "trace": ""}

    records = {0: record(1, 9.0, "peer closed"), 1: record(1, 8.0, "ValueError: bad row"), 2: record(0, 7.0)}
    assert launch.first_failure(records, {0: 1, 1: 1}) == (1, "ValueError: bad row", "", 1)
    # A killed rank leaves no record; SIGTERM is what the launcher sends to those that are left.
    assert launch.first_failure(records, {0: 1, 2: -9, 3: -15})[:2] == (2, "killed by SIGKILL (out of memory?)")
    assert launch.first_failure({0: record(2, 1.0, "no")}, {0: 2, 1: -15}) == (0, "no", "", 2)
    assert launch.first_failure({}, {1: 3}) == (1, "exit code 3", "", 1)


def test_a_worker_leaves_a_record(tmp_path, monkeypatch):
    monkeypatch.setenv(launch.RECORDS, str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def refuse():
        raise ConfigError("no such thing")

    assert launch.as_worker(lambda: 0, 0) == 0
    assert launch.as_worker(refuse, 1) == 2
    codes = {rank: (r["code"], r["error"]) for rank, r in launch.read_records(tmp_path).items()}
    assert codes == {0: (0, ""), 1: (2, "no such thing")}


def test_ctrl_c_asks_to_stop(monkeypatch):
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        with launch.CtrlC() as ctrl_c:
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # the second one ends at once
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [True] and ctrl_c.pressed


# ---- with training


def test_compare_one_rank_with_two(here):
    arguments = ["compare", "tiny.toml", "model.dtype=float64", "--a", "mesh.cp=1", "--out", "out"]
    code, out, err = finish(longspan(*arguments))
    assert code == 0, out + err
    assert "EQUAL over 3 steps" in out and "mesh.cp: 1, 2" in out and "float64" in out
    assert steps(here / "out/a") == steps(here / "out/b") == [1, 2, 3]
    assert sorted(path.name for path in (here / "out").iterdir()) == ["a", "b", "compare.json", "compare.png"]
    assert not (here / "out/a/checkpoints").exists()
    assert json.loads((here / "out/compare.json").read_text())["loss"]["max_rel"] < 1e-9


def test_sigterm_finishes_the_step_saves_and_exits_0(here):
    process = longspan("train", "tiny.toml", "--nproc", "2", "train.steps=100000")
    deadline = time.monotonic() + 90
    while not steps(here / "run") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 0, out + err
    done = steps(here / "run")
    assert 0 < done[-1] < 100000 and done == list(range(1, done[-1] + 1))
    assert [path.name for path in (here / "run/checkpoints").iterdir()] == [f"step-{done[-1]}"]
    assert "stopped by a signal" in out and "Traceback" not in err


def test_what_only_a_worker_can_find_out(here):
    code, out, err = finish(longspan("train", "tiny.toml", "--nproc", "2", "model.config.model_type=nonesuch"))
    assert code == 2, out + err
    assert err.startswith("longspan: error: ") and err.count("\n") == 1 and "nonesuch" in err
    assert not (here / "run").exists()
    code, out, err = finish(longspan("train", "tiny.toml", "--nproc", "2", "model.config.attention_dropout=0.1"))
    assert code == 2 and "dropout 0.1" in err and err.count("\n") == 1, out + err
    assert not (here / "run").exists()


def test_under_torchrun(here):
    command = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--local-addr", "127.0.0.1", "-m", "longspan", "train", "tiny.toml"]
    interface = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    code, out, err = finish(longspan(*command, module="torch.distributed.run", env=os.environ | interface))
    assert code == 0, out + err
    assert steps(here / "run") == [1, 2, 3]
    assert out.count("step 3: loss") == 1 and "run folder: run" in out
