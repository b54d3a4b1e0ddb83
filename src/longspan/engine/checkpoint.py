"""Checkpoints that are whole or absent, and do not remember the mesh that wrote them.

`<run folder>/checkpoints/step-N` holds weights and optimizer moments by their full names in the format of
torch.distributed.checkpoint, which cuts them anew for the mesh that reads, and `state.json` with the rest: step, rows
consumed, the data's fingerprint, the configuration. There is no schedule and no random state to keep: both are
functions of the step. A checkpoint is written beside its place and renamed once all ranks are done, so a folder
called `step-N` is complete; what a killed run left behind is ignored and cleared by the next save.

Only tensors go into torch's format (moments, not parameter groups), so that loading never unpickles values.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

log = logging.getLogger(__name__)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a run folder, oldest first."""
    found = []
    for path in (folder / "checkpoints").glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and (path / "state.json").exists() and (path / ".metadata").exists():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def save(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, *, state: dict[str, Any], keep: int
) -> Path:
    """Writes `step-N` with N = state["step"], then removes all but the last `keep`; every rank calls it."""
    place = folder / "checkpoints" / f"step-{state['step']}"
    draft = place.with_name(f".{place.name}.unfinished")
    if dist.get_rank() == 0:
        place.parent.mkdir(parents=True, exist_ok=True)
        for left in place.parent.glob(".step-*.unfinished"):
            shutil.rmtree(left)
    dist.barrier()
    tensors = {
        "model": get_model_state_dict(module),
        "moments": get_optimizer_state_dict(module, optimizer)["state"],
    }
    dcp.save(tensors, checkpoint_id=draft)  # returns on all ranks once all have written, or raises on all
    if dist.get_rank() == 0:
        with (draft / "state.json").open("w") as file:
            json.dump(state, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            shutil.rmtree(place)
        draft.rename(place)
        _sync_folder(place.parent)
        for old in checkpoints(folder)[:-keep] if keep > 0 else []:
            shutil.rmtree(old)
    dist.barrier()
    return place


def read_state(path: Path) -> dict[str, Any]:
    """What `save` was given as `state`."""
    return json.loads((path / "state.json").read_text())


def load(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fills module and optimizer in place, whatever mesh they live on."""
    whole = get_optimizer_state_dict(module, optimizer)
    weights = get_model_state_dict(module)
    tensors = {"model": weights, "moments": whole["state"]}
    dcp.load(tensors, checkpoint_id=path)
    whole["state"] = tensors["moments"]
    set_model_state_dict(module, weights)
    # the groups are this run's: rates, betas and decay belong to the configuration
    set_optimizer_state_dict(module, optimizer, whole)


def export(place: Path, module: nn.Module, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """Writes to `place` what `from_pretrained` loads; every rank calls it, rank 0 writes."""
    weights = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        write_weights(place, weights, config, tokenizer=tokenizer)
    dist.barrier()
    return place


def write_weights(
    place: Path,
    weights: Mapping[str, Any],
    config: PretrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Writes a folder that `from_pretrained` and servers load: safetensors with the hub's names, config and tokenizer.
    It appears whole or not at all. weights: a plain model's, whole; dtype: what they are written in, None: as they are.
    """
    given = {name: w.to(dtype) if dtype is not None and w.is_floating_point() else w for name, w in weights.items()}
    # A fresh model without storage, so that nothing of hooks, sharding or wrapping gets into the files.
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype or config.dtype)
    plain.load_state_dict(given, assign=True)
    plain.tie_weights()
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.unfinished")
    shutil.rmtree(draft, ignore_errors=True)
    with no_progress_bar():
        plain.save_pretrained(draft)
    if tokenizer is not None:
        tokenizer.save_pretrained(draft)
    if place.exists():
        shutil.rmtree(place)
    draft.rename(place)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """transformers' own, over saving and loading."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
