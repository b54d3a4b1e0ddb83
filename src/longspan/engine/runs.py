"""A run's folder: where it starts from, and what it says of itself beside its metrics."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from longspan.config import AnyConfig, ConfigError
from longspan.engine import checkpoint, metrics
from longspan.engine.core import Engine
from longspan.engine.mesh import gather_vector, local_device
from longspan.engine.wrap import resolve_wrap

log = logging.getLogger(__name__)


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
