"""What every program's run has in common: how it begins and ends, where it starts from, what it says of itself."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh

from longspan.config import AnyConfig, ConfigError
from longspan.engine import checkpoint, metrics
from longspan.engine.core import Engine
from longspan.engine.mesh import gather_vector, init_mesh, local_device, local_world_size
from longspan.engine.process import cpu_threads, numerics, stop_signals
from longspan.engine.wrap import resolve_wrap

log = logging.getLogger(__name__)


@contextmanager
def session(*, deterministic: bool) -> Iterator[threading.Event]:
    """Around a run: the event that signals set, numerics, and the end of a process group that began in it."""
    started_here = not dist.is_initialized()
    with stop_signals() as stop, numerics(deterministic=deterministic):
        try:
            yield stop
        finally:
            if started_here and dist.is_initialized():
                dist.destroy_process_group()


def begin(config: AnyConfig) -> DeviceMesh:
    """The mesh; one rank that speaks, and threads."""
    mesh = init_mesh(config.mesh.dp, config.mesh.cp)
    if dist.get_rank() > 0:
        logging.getLogger("longspan").setLevel(logging.ERROR)  # notes and warnings are the same everywhere
    torch.set_num_threads(cpu_threads(config.train.threads, local_world_size()))
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("log.tensorboard needs the `tensorboard` package: pip install 'longspan[tensorboard]'")
    return mesh


def find_checkpoint(folder: Path, resume: str) -> Path | None:
    """The checkpoint to start from, agreed on by all ranks. resume: `checkpoint.resume`."""
    found = checkpoint.checkpoints(folder)
    step = int(found[-1].name.removeprefix("step-")) if found else -1
    step = int(gather_vector([step])[0, 0])
    if resume == "never":
        if dist.get_rank() == 0 and found:
            log.warning("checkpoint.resume = 'never': removing %d checkpoints in %s", len(found), folder)
            shutil.rmtree(folder / "checkpoints")
        return None
    if step < 0 and resume == "must":
        raise ConfigError(f"checkpoint.resume = 'must', but {folder / 'checkpoints'} holds no complete checkpoint")
    return folder / "checkpoints" / f"step-{step}" if step >= 0 else None


def write_run_files(folder: Path, config: AnyConfig, engine: Engine, **more: Any) -> None:
    """`config.json`, and `run.json` about the ranks, the model and versions."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    about = {
        "world_size": dist.get_world_size(),
        "mesh": {"dp": engine.dp, "cp": engine.cp},
        "wrap": resolve_wrap(config.parallel.wrap),
        "device": local_device().type,
        "parameters": metrics.parameter_count(engine.model),
        **more,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")
