"""Several ranks: where this process stands among them, and starting them on this host.

A rank is told who it is by RANK and WORLD_SIZE (torchrun, or our own `start`), or by SLURM's variables; with
neither it is alone. `start` runs torch's elastic agent with N workers on this host. They find each other by
files in a private folder, and gloo uses the loopback interface, so nothing listens beyond this host.

Each worker leaves a small record of how it ended in that folder (`as_worker`). From the records the launcher
says which rank failed *first* (its peers then fail too, with less telling errors), and after a signal it knows
whether all of them finished their step and saved.

Imports torch only in `start`: `longspan train --help` answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from longspan.config import ConfigError

INTERRUPTED = 130  # exit code after Ctrl-C, by the shell's convention; the state was saved
RECORDS = "LONGSPAN_RECORDS"  # set for workers: the folder for their records
_GRACE = 3600  # seconds that workers have to finish their step and save; a second signal ends them at once


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among its peers."""

    rank: int
    world_size: int
    launched: bool  # by torchrun, SLURM or `start`; False: alone


def place(environment: Mapping[str, str]) -> Place:
    """Where this process stands. `longspan.engine.mesh` reads the same variables when it starts the group."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return Place(rank=rank, world_size=size, launched=True)
    # Only what srun started has these: a batch script that calls longspan by itself is alone.
    size = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if size > 1:
        return Place(rank=int(environment["SLURM_PROCID"]), world_size=size, launched=True)
    return Place(rank=0, world_size=1, launched=False)


# ---- in a worker


def as_worker(run: Callable[[], int], rank: int) -> int:
    """`run()`, leaving a record of how it ended where the launcher asked for one."""
    if RECORDS not in os.environ:
        return run()
    record = Path(os.environ[RECORDS]) / f"rank-{rank}.json"

    def leave(code: int, error: str = "", trace: str = "") -> None:
        record.write_text(json.dumps({"code": code, "error": error, "trace": trace, "time": time.time()}))

    def recording_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave(1, f"{kind.__name__}: {error}", "".join(traceback.format_exception(kind, error, trace)))

    sys.excepthook = recording_hook  # the launcher prints the first error; N tracebacks at once are unreadable
    _end_with_parent()
    try:
        code = run()
    except ConfigError as error:
        leave(2, str(error))
        return 2
    except SystemExit as error:  # of code that a run calls: no excepthook sees it
        leave(error.code if isinstance(error.code, int) else 1, f"SystemExit: {error}", traceback.format_exc())
        raise
    leave(code)
    return code


def _end_with_parent() -> None:
    """Workers sit in sessions of their own, so a killed launcher would leave them running."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- in the launcher


def start(arguments: Sequence[str], workers: int) -> int:
    """Run `python -m longspan ARGUMENTS` as `workers` ranks on this host; the exit code."""
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent's own warnings repeat what is printed here, once per worker.
    agent_log = logging.getLogger("torch.distributed.elastic")
    agent_log.addHandler(logging.NullHandler())
    agent_log.propagate = False

    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        records = Path(folder, "records")
        records.mkdir()
        os.environ[RECORDS] = str(records)
        os.environ["LONGSPAN_RENDEZVOUS"] = f"file://{folder}/ranks"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else the agent listens on a port
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_GRACE)  # read by LaunchConfig
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/agent",
            rdzv_configs={"store_type": "file"},
            max_restarts=0,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=f"{folder}/logs"),
        )
        # -P: a file of the user's that is named like a package must not shadow it.
        command = elastic_launch(config, sys.executable)
        try:
            command("-P", "-m", "longspan", *arguments)
        except SignalException as error:
            return _after_signal(error.sigval, read_records(records), workers)
        except ChildFailedError as error:
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return _report_failure(read_records(records), exit_codes)
    return 0


def read_records(folder: Path) -> dict[int, dict]:
    paths = folder.glob("rank-*.json")
    return {int(path.stem.removeprefix("rank-")): json.loads(path.read_text()) for path in paths}


def _after_signal(number: int, records: Mapping[int, dict], workers: int) -> int:
    saved = [rank for rank, record in records.items() if record["code"] in (0, INTERRUPTED)]
    if len(saved) < workers:
        missing = sorted(set(range(workers)) - set(saved))
        _say(f"stopped by {signal.Signals(number).name}; rank {missing[0]} did not finish its step and save")
        return 128 + number
    return 0 if number == signal.SIGTERM else INTERRUPTED


def _report_failure(records: Mapping[int, dict], exit_codes: Mapping[int, int]) -> int:
    """Print the first failure; the exit code for all."""
    rank, reason, trace, code = first_failure(records, exit_codes)
    if trace:
        print(trace, file=sys.stderr, end="")
    reason = " ".join(reason.split())  # one line, also where a library raised several
    _say(reason if code == 2 else f"rank {rank} failed: {reason}")
    return code


def first_failure(records: Mapping[int, dict], exit_codes: Mapping[int, int]) -> tuple[int, str, str, int]:
    """(rank, reason, traceback, exit code). A rank killed from outside comes first: its peers' errors follow.
    SIGTERM does not count, the agent sends it to whoever still runs."""
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM}
    if killed:
        rank = min(killed)
        name = signal.Signals(killed[rank]).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return rank, f"killed by {name}{hint}", "", 1
    failed = {rank: record for rank, record in records.items() if record["code"] != 0}
    if failed:
        rank = min(failed, key=lambda r: failed[r]["time"])
        record = failed[rank]
        reason = record["error"] or f"exit code {record['code']}"
        return rank, reason, record["trace"], 2 if record["code"] == 2 else 1
    rank = min(exit_codes)
    return rank, f"exit code {exit_codes[rank]}", "", 1


def _say(message: str) -> None:
    print(f"longspan: error: {message}", file=sys.stderr)


# ---- signals in a process that trains


class CtrlC:
    """Ctrl-C asks for what SIGTERM asks for: finish the step, save, end. A second one ends at once."""

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._on)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
