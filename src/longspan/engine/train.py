"""`longspan train`: the loop.

A step takes `batch_rows` rows; each dp rank gets its slice of them, in micro-batches, and all ranks of a cp group
the same. The targets of the whole step are counted first, from the rows themselves, so no rank has to ask another:

    N      = targets of the step, over all dp ranks and micro-batches
    loss_m = sum of the micro-batch's token losses / (N / dp)       on each rank, equal within a cp group
    gradient = average over all ranks of the sum over micro-batches of d loss_m

That average is exactly the gradient of (sum of all token losses) / N. One small all-gather after the last backward
carries losses and counts; from it every rank computes the same step loss, and all agree on whether it is finite.

Random state is a function of (seed, step, dp rank): nothing to save, equal within a cp group, and the same after a
resume. SIGTERM and SIGUSR1 set a flag; ranks agree on it between two steps, save, and return.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
import math
import platform
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longspan.config import Config, ConfigError
from longspan.engine import checkpoint, metrics, optim
from longspan.engine.build import build_model
from longspan.engine.data import load_rows, load_tokenizer
from longspan.engine.mesh import gather_vector, init_mesh, local_device, local_world_size
from longspan.engine.packing import Rows, collate, document_lengths, step_rows
from longspan.engine.process import cpu_threads, numerics, precise, seed_step, stop_signals
from longspan.engine.progress import Progress
from longspan.engine.wrap import compute, resolve_wrap, synchronise, wrap_model
from longspan.models import parallelize, report, separates_documents

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended."""

    folder: str
    step: int
    steps: int
    stopped: bool  # by a signal, before the last step
    loss: float | None  # of the last step; None when there was no step left to do
    seconds: float
    checkpoint: str | None
    export: str | None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What stays the same through a run."""

    config: Config
    mesh: DeviceMesh
    model: PreTrainedModel  # adapted in place
    module: nn.Module  # what is called: the model or a wrapper around it
    optimizer: torch.optim.Optimizer
    rows: Rows
    training_rows: int
    pad_id: int
    weights: int  # active ones, for FLOPs
    separates: bool  # the model reads documents from position_ids

    @property
    def dp(self) -> int:
        return self.mesh["dp"].size()

    @property
    def dp_rank(self) -> int:
        return self.mesh["dp"].get_local_rank()


def train(config: Config, *, progress: bool = True, on_step: Callable[[dict[str, Any]], None] | None = None) -> Summary:
    """Trains as `config` says; every rank calls it. `on_step` gets each step's record, on every rank."""
    started_here = not dist.is_initialized()
    with stop_signals() as stop, numerics(config.train):
        try:
            return _train(config, progress, on_step, stop)
        finally:
            if started_here and dist.is_initialized():
                dist.destroy_process_group()


def _train(
    config: Config, progress: bool, on_step: Callable[[dict[str, Any]], None] | None, stop: threading.Event
) -> Summary:
    # All that can be wrong with the configuration shows before the run folder is touched.
    mesh = init_mesh(config.mesh.dp, config.mesh.cp)
    rank = dist.get_rank()
    if rank > 0:
        logging.getLogger("longspan").setLevel(logging.ERROR)  # notes and warnings are the same everywhere
    torch.set_num_threads(cpu_threads(config.train.threads, local_world_size()))
    _check(config, mesh["dp"].size())
    tokenizer = load_tokenizer(config.data, trust_remote_code=config.model.trust_remote_code)
    rows, training_rows = load_rows(config.data, tokenizer)
    model = build_model(config.model, tokenizer, sequence_length=config.data.sequence_length)
    separates = separates_documents(model)
    _check_model(config, model, rows, separates=separates)
    plain_config = copy.deepcopy(model.config)
    run = _prepare(config, mesh, model, rows, training_rows, tokenizer, separates=separates)
    _try_forward(run)

    folder = Path(config.folder)
    fingerprint = _fingerprint(rows, training_rows)
    newest = _find_checkpoint(folder, config)
    step, consumed = 0, 0
    if newest is not None:
        state = checkpoint.read_state(newest)
        if state["data"] != fingerprint:
            raise ConfigError(
                f"{newest} was trained on other data ({state['data']}; now {fingerprint}); restore the data settings, "
                "take another folder, or set checkpoint.resume = 'never'"
            )
        checkpoint.load(newest, run.module, run.optimizer)
        step, consumed = state["step"], state["rows_consumed"]
        log.info("resuming from %s: step %d, %d rows", newest, step, consumed)

    def save() -> Path:
        state = {
            "step": step,
            "rows_consumed": consumed,
            "data": fingerprint,
            "mesh": {"dp": run.dp, "cp": mesh["cp"].size()},
            "config": dataclasses.asdict(config),
        }
        return checkpoint.save(folder, run.module, run.optimizer, state=state, keep=config.checkpoint.keep)

    book = bar = None
    if rank == 0:
        _write_run_files(folder, config, run)
        book = metrics.MetricsLog(folder, after_step=step, tensorboard=config.log.tensorboard)
        bar = Progress(step, config.train.steps, shown=progress and config.log.progress)
    begun = time.perf_counter()
    record: dict[str, Any] | None = None
    saved = newest
    stopped = False
    try:
        while step < config.train.steps:
            record = _step(run, step + 1, consumed)
            step, consumed = step + 1, consumed + config.train.batch_rows
            if config.train.validate_every and step % config.train.validate_every == 0:
                record["validation_loss"] = _validate(run)
            if book is not None and bar is not None:
                book.write(record)
                bar.update(record)
            if on_step is not None:
                on_step(record)
            stopped = bool(gather_vector([stop.is_set()]).any()) and step < config.train.steps
            last = step == config.train.steps
            due = config.checkpoint.every and step % config.checkpoint.every == 0
            if due or stopped or (last and config.checkpoint.at_end):
                saved = save()
            if stopped:
                log.info("a signal asked to stop: saved %s", saved)
                break
    finally:
        if book is not None and bar is not None:
            bar.close()
            book.close()
    exported = None
    if config.checkpoint.export and step == config.train.steps:
        exported = checkpoint.export(folder, run.module, plain_config, tokenizer)
    return Summary(
        folder=str(folder),
        step=step,
        steps=config.train.steps,
        stopped=stopped,
        loss=record["loss"] if record else None,
        seconds=time.perf_counter() - begun,
        checkpoint=str(saved) if saved else None,
        export=str(exported) if exported else None,
    )


def _prepare(
    config: Config,
    mesh: DeviceMesh,
    model: PreTrainedModel,
    rows: Rows,
    training_rows: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    separates: bool,
) -> _Run:
    """Adapts the model to cp, wraps it for dp, and makes the optimizer over what came out."""
    weights = metrics.active_weights(model)
    if config.train.activation_checkpointing:
        _recompute_blocks(model)
    parallel = config.parallel
    try:
        model = parallelize(
            model,
            mesh["cp"],
            scheme=parallel.scheme,
            layout=parallel.layout,
            kernel=parallel.kernel,
            logits="none",
            stages=parallel.stages or None,
            check_batch=parallel.check_batch,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    module = wrap_model(model, mesh, wrap=config.parallel.wrap, precision=config.train.precision)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return _Run(
        config=config,
        mesh=mesh,
        model=model,
        module=module,
        optimizer=optim.build_optimizer(module, config.optimizer),
        rows=rows,
        training_rows=training_rows,
        pad_id=pad or 0,
        weights=weights,
        separates=separates,
    )


@torch.no_grad()
def _try_forward(run: _Run) -> None:
    """One short forward, so that a model which longspan refuses does so before the run folder exists."""
    if run.mesh["cp"].size() == 1:
        return
    ids = torch.zeros(1, 2 * run.mesh["cp"].size(), dtype=torch.int64, device=local_device())
    batch = {"input_ids": ids, "labels": ids, "shift_labels": ids}
    run.module.train()
    try:
        _loss(run, batch, ids.numel())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if isinstance(run.module, FSDPModule):
        run.module.reshard()


def _recompute_blocks(model: PreTrainedModel) -> None:
    """Activation checkpointing of each block, under whichever name this transformers has it."""
    options: dict[str, Any] = {"use_reentrant": False}
    if model.dtype == torch.float64:
        # The recomputation runs inside backward(), where no function mode is active.
        options["context_fn"] = lambda: (nullcontext(), precise(torch.float64))
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


def _check(config: Config, dp: int) -> None:
    """What only the mesh, or two keys together, show to be impossible."""
    train = config.train
    unit = dp * train.micro_rows
    if train.batch_rows % unit:
        raise ConfigError(
            f"train.batch_rows = {train.batch_rows} is not a multiple of dp * train.micro_rows = "
            f"{dp} * {train.micro_rows}; set it to {-(-train.batch_rows // unit) * unit}"
        )
    if train.validate_every and not config.data.validation_rows:
        raise ConfigError("train.validate_every is set, but data.validation_rows = 0 holds no rows out")
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("log.tensorboard needs the `tensorboard` package: pip install 'longspan[tensorboard]'")


def _check_model(config: Config, model: PreTrainedModel, rows: Rows, *, separates: bool) -> None:
    table: Any = model.get_input_embeddings()
    largest = int(rows.ids.max())
    if largest >= table.num_embeddings:
        raise ConfigError(
            f"the data holds token id {largest}, but the model's vocabulary is {table.num_embeddings}; "
            "raise vocab_size or change the tokenizer"
        )
    if int(np.diff(rows.offsets).max(initial=0)) > 1 and not separates:
        raise ConfigError(
            f"the rows hold several documents, and {type(model).__name__} does not read them from position_ids: they "
            "would see each other on one rank; set data.packing = 'none'"
        )
    if getattr(model.config, "output_router_logits", False) and config.train.batch_rows > config.train.micro_rows:
        raise ConfigError(
            f"output_router_logits adds a mean over each of {config.train.batch_rows // config.train.micro_rows} "
            "micro-batches to the loss, so it would depend on how the step is cut; set it to false, or "
            "train.micro_rows = train.batch_rows"
        )


def _step(run: _Run, step: int, consumed: int) -> dict[str, Any]:
    """One optimizer step; returns its record."""
    begun = time.perf_counter()
    config, data = run.config, run.config.data
    count = config.train.batch_rows
    indices = step_rows(consumed, count, rows=run.training_rows, seed=data.seed, shuffle=data.shuffle)
    targets = int(run.rows.target_counts[indices].sum())
    if targets == 0:
        raise ValueError(f"step {step}: its {count} rows hold no target tokens at all; check the data's masks")
    seed_step(config.train.seed, step, run.dp_rank)
    share = count // run.dp
    mine = indices[run.dp_rank * share : (run.dp_rank + 1) * share].reshape(-1, config.train.micro_rows)
    loss, work = _accumulate(run, mine, targets / run.dp)
    sent = gather_vector([loss, metrics.peak_memory_bytes(local_device()), *work])
    everyone = {name: sent[:, column].tolist() for column, name in enumerate(_SENT)}
    # Ranks are numbered dp outermost: the first rank of each cp group speaks for it.
    cp = run.mesh["cp"].size()
    mean = sum(everyone["loss"][::cp]) / run.dp
    norm = optim.gradient_norm(run.module)
    if not (math.isfinite(mean) and math.isfinite(norm)):
        raise FloatingPointError(
            f"step {step}: loss {mean}, gradient norm {norm}; nothing was updated and nothing saved. "
            "Lower optimizer.lr, or resume from the last checkpoint"
        )
    limit = config.optimizer.max_grad_norm
    if limit > 0:
        optim.scale_gradients(run.module, min(1.0, limit / (norm + 1e-6)))
    rate = optim.learning_rate(step, config.train.steps, config.optimizer)
    optim.set_learning_rate(run.optimizer, rate)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    record = {"step": step, "loss": mean, "grad_norm": norm, "lr": rate, "targets": targets, "rows": count}
    return record | _throughput(run, indices, everyone, seconds=time.perf_counter() - begun)


_SENT = ("loss", "peak_memory", "tokens", "pairs", "bytes")


def _accumulate(run: _Run, micro_batches: np.ndarray, items: float) -> tuple[float, np.ndarray]:
    """Forward and backward of this rank's micro-batches: (sum of their losses, [tokens, pairs, bytes] of its work)."""
    run.module.train()
    losses: list[torch.Tensor] = []
    work = np.zeros(3)
    for number, indices in enumerate(micro_batches):
        batch = _batch(run, indices)
        with synchronise(run.module, last=number == len(micro_batches) - 1):
            loss = _loss(run, batch, items)
            loss.backward()
        losses.append(loss.detach().double())
        work += _work(run, indices)
    return float(torch.stack(losses).sum()), work


def _loss(run: _Run, batch: dict[str, torch.Tensor], items: float) -> torch.Tensor:
    """Sum of the whole batch's token losses over `items`."""
    # FSDP2 would round a float tensor to bf16; a Python number passes as it is.
    count = int(items) if float(items).is_integer() else items
    with compute(run.module, run.config.train.precision), precise(run.model.dtype):
        return run.module(**batch, num_items_in_batch=count, use_cache=False).loss


def _batch(run: _Run, indices: np.ndarray | list[int]) -> dict[str, torch.Tensor]:
    device = local_device()
    batch = collate(run.rows, indices, pad_id=run.pad_id, separate=run.separates)
    return {name: values.to(device, non_blocking=True) for name, values in batch.items()}


def _work(run: _Run, indices: np.ndarray) -> tuple[float, float, float]:
    """(tokens, attention pairs of all layers, bytes sent) of this rank in the micro-batch that just ran."""
    if run.mesh["cp"].size() > 1:
        measured = report(run.model)
        return measured["tokens"], measured["pairs"], measured["bytes_sent"]
    lengths = [length for row in document_lengths(run.rows, indices, separate=run.separates) for length in row]
    return sum(lengths), metrics.layer_pairs(run.model.config.get_text_config(), lengths), 0


@torch.no_grad()
def _validate(run: _Run) -> float:
    """Mean loss per target over the validation rows; each dp rank takes every dp-th, all make equally many calls."""
    held_out = np.arange(run.training_rows, len(run.rows))
    targets = int(run.rows.target_counts[held_out].sum())
    if targets == 0:
        raise ConfigError(f"the {len(held_out)} validation rows hold no target tokens")
    run.module.eval()
    total = 0.0
    for first in range(0, len(held_out), run.dp):
        place = first + run.dp_rank
        batch = _batch(run, [held_out[min(place, len(held_out) - 1)]])
        if place >= len(held_out):
            # Ranks that run out still join every collective, with nothing to predict.
            batch["labels"].fill_(-100)
            batch["shift_labels"].fill_(-100)
        total += float(_loss(run, batch, targets))
    if isinstance(run.module, FSDPModule):
        run.module.reshard()
    run.module.train()
    return float(gather_vector([total])[:: run.mesh["cp"].size(), 0].sum())


def _throughput(run: _Run, indices: np.ndarray, everyone: dict[str, list[float]], *, seconds: float) -> dict[str, Any]:
    """The part of a step's record that is about speed, memory and balance."""
    world = dist.get_world_size()
    # padding is no useful work: it counts in `tokens_per_rank` alone
    documents = np.concatenate([run.rows.lengths(row) for row in indices]).tolist()
    tokens = sum(documents)
    device = local_device()
    bf16 = run.config.train.precision == "bf16" or run.model.dtype == torch.bfloat16
    peak = metrics.peak_flops(device, torch.bfloat16 if bf16 else run.model.dtype)
    flops = metrics.step_flops(run.model, run.weights, tokens, documents)
    pairs = everyone["pairs"]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_rank": tokens / seconds / world,
        "flops": flops,
        "mfu": flops / seconds / world / peak if peak else None,
        "peak_memory_bytes": int(max(everyone["peak_memory"])),
        "tokens_per_rank": everyone["tokens"],
        "pairs_per_rank": pairs,
        "bytes_per_rank": everyone["bytes"],
        "imbalance": max(pairs) * world / sum(pairs) if sum(pairs) else 1.0,
    }


def _fingerprint(rows: Rows, training_rows: int) -> str:
    """Says whether two runs train on the same rows."""
    digest = hashlib.sha256()
    for array in (rows.ids, rows.targets, rows.pieces[:, 0], rows.offsets):
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{training_rows} of {len(rows)} rows, {digest.hexdigest()[:16]}"


def _find_checkpoint(folder: Path, config: Config) -> Path | None:
    """The checkpoint to start from, agreed on by all ranks."""
    found = checkpoint.checkpoints(folder)
    step = int(found[-1].name.removeprefix("step-")) if found else -1
    step = int(gather_vector([step])[0, 0])
    if config.checkpoint.resume == "never":
        if dist.get_rank() == 0 and found:
            log.warning("checkpoint.resume = 'never': removing %d checkpoints in %s", len(found), folder)
            shutil.rmtree(folder / "checkpoints")
        return None
    if step < 0 and config.checkpoint.resume == "must":
        raise ConfigError(f"checkpoint.resume = 'must', but {folder / 'checkpoints'} holds no complete checkpoint")
    return folder / "checkpoints" / f"step-{step}" if step >= 0 else None


def _write_run_files(folder: Path, config: Config, run: _Run) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    about = {
        "world_size": dist.get_world_size(),
        "mesh": {"dp": run.dp, "cp": run.mesh["cp"].size()},
        "wrap": resolve_wrap(run.config.parallel.wrap),
        "device": local_device().type,
        "parameters": metrics.parameter_count(run.model),
        "training_rows": run.training_rows,
        "validation_rows": len(run.rows) - run.training_rows,
        "dropped_tokens": run.rows.dropped_tokens,
        "dropped_documents": run.rows.dropped_documents,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")
