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

import dataclasses
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from longspan.config import Config, ConfigError
from longspan.engine import checkpoint, metrics
from longspan.engine.build import build_model
from longspan.engine.core import Engine
from longspan.engine.data import load_rows, load_tokenizer
from longspan.engine.mesh import gather_vector, local_device
from longspan.engine.packing import Rows, collate, document_lengths, step_rows
from longspan.engine.process import seed_step
from longspan.engine.progress import Progress
from longspan.engine.runs import begin, find_checkpoint, session, write_run_files
from longspan.models import report, separates_documents

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
    engine: Engine
    rows: Rows
    training_rows: int
    pad_id: int
    separates: bool  # the model reads documents from position_ids


def train(config: Config, *, progress: bool = True, on_step: Callable[[dict[str, Any]], None] | None = None) -> Summary:
    """Trains as `config` says; every rank calls it. `on_step` gets each step's record, on every rank."""
    with session(deterministic=config.train.deterministic) as stop:
        return _train(config, progress, on_step, stop)


def _train(
    config: Config, progress: bool, on_step: Callable[[dict[str, Any]], None] | None, stop: threading.Event
) -> Summary:
    # All that can be wrong with the configuration shows before the run folder is touched.
    mesh = begin(config)
    rank = dist.get_rank()
    _check(config, mesh["dp"].size())
    tokenizer = load_tokenizer(config.data, trust_remote_code=config.model.trust_remote_code)
    rows, training_rows = load_rows(config.data, tokenizer)
    model = build_model(config.model, tokenizer, sequence_length=config.data.sequence_length)
    separates = separates_documents(model)
    _check_model(config, model, rows, separates=separates)
    engine = Engine(
        model,
        mesh,
        optimizer=config.optimizer,
        parallel=config.parallel,
        precision=config.train.precision,
        activation_checkpointing=config.train.activation_checkpointing,
        steps=config.train.steps,
        packed=False,  # rows are packed already, and one rank is to be the plain model, bit for bit
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    run = _Run(
        config=config, engine=engine, rows=rows, training_rows=training_rows, pad_id=pad or 0, separates=separates
    )
    _try_forward(run)

    folder = Path(config.folder)
    fingerprint = _fingerprint(rows, training_rows)
    newest = find_checkpoint(folder, config.checkpoint.resume)
    consumed = 0
    if newest is not None:
        state = checkpoint.read_state(newest)
        if state["data"] != fingerprint:
            raise ConfigError(
                f"{newest} was trained on other data ({state['data']}; now {fingerprint}); restore the data settings, "
                "take another folder, or set checkpoint.resume = 'never'"
            )
        engine.load_state(newest)
        consumed = state["rows_consumed"]
        log.info("resuming from %s: step %d, %d rows", newest, engine.step, consumed)

    def save() -> Path:
        return engine.save_state(
            folder,
            keep=config.checkpoint.keep,
            rows_consumed=consumed,
            data=fingerprint,
            mesh={"dp": engine.dp, "cp": engine.cp},
            config=dataclasses.asdict(config),
        )

    book = bar = None
    if rank == 0:
        write_run_files(
            folder,
            config,
            engine,
            training_rows=training_rows,
            validation_rows=len(rows) - training_rows,
            dropped_tokens=rows.dropped_tokens,
            dropped_documents=rows.dropped_documents,
        )
        book = metrics.MetricsLog(folder, after_step=engine.step, tensorboard=config.log.tensorboard)
        bar = Progress(engine.step, config.train.steps, shown=progress and config.log.progress)
    begun = time.perf_counter()
    record: dict[str, Any] | None = None
    saved = newest
    stopped = False
    try:
        while engine.step < config.train.steps:
            record = _step(run, consumed)
            step, consumed = engine.step, consumed + config.train.batch_rows
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
    if config.checkpoint.export and engine.step == config.train.steps:
        exported = engine.export_hf(folder / "export", tokenizer)
    return Summary(
        folder=str(folder),
        step=engine.step,
        steps=config.train.steps,
        stopped=stopped,
        loss=record["loss"] if record else None,
        seconds=time.perf_counter() - begun,
        checkpoint=str(saved) if saved else None,
        export=str(exported) if exported else None,
    )


@torch.no_grad()
def _try_forward(run: _Run) -> None:
    """One short forward, so that a model which longspan refuses does so before the run folder exists."""
    if run.engine.cp == 1:
        return
    ids = torch.zeros(1, 2 * run.engine.cp, dtype=torch.int64, device=local_device())
    batch = {"input_ids": ids, "labels": ids, "shift_labels": ids}
    module = run.engine.module
    module.train()
    try:
        with run.engine.computing():
            _loss(run, batch, ids.numel())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if isinstance(module, FSDPModule):
        module.reshard()


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


def _step(run: _Run, consumed: int) -> dict[str, Any]:
    """One optimizer step; returns its record."""
    begun = time.perf_counter()
    config, data, engine = run.config, run.config.data, run.engine
    step = engine.step + 1
    count = config.train.batch_rows
    indices = step_rows(consumed, count, rows=run.training_rows, seed=data.seed, shuffle=data.shuffle)
    targets = int(run.rows.target_counts[indices].sum())
    if targets == 0:
        raise ValueError(f"step {step}: its {count} rows hold no target tokens at all; check the data's masks")
    seed_step(config.train.seed, step, engine.dp_rank)
    share = count // engine.dp
    mine = indices[engine.dp_rank * share : (engine.dp_rank + 1) * share].reshape(-1, config.train.micro_rows)
    work = np.zeros(3)

    def micro_batch(rows: np.ndarray) -> torch.Tensor:
        loss = _loss(run, _batch(run, rows), targets / engine.dp)
        work[:] += _work(run, rows)
        return loss

    losses = engine.accumulate(list(mine), micro_batch)
    loss = float(torch.stack(losses).double().sum())
    sent = gather_vector([loss, metrics.peak_memory_bytes(local_device()), *work])
    everyone = {name: sent[:, column].tolist() for column, name in enumerate(_SENT)}
    # Ranks are numbered dp outermost: the first rank of each cp group speaks for it.
    mean = sum(everyone["loss"][:: engine.cp]) / engine.dp
    if not math.isfinite(mean):
        raise FloatingPointError(
            f"step {step}: loss {mean}; nothing was updated and nothing saved. Lower optimizer.lr, or resume from the "
            "last checkpoint"
        )
    done = engine.optim_step()
    record = {"step": step, "loss": mean, "grad_norm": done.grad_norm, "lr": done.lr, "targets": targets, "rows": count}
    return record | _throughput(run, indices, everyone, seconds=time.perf_counter() - begun)


_SENT = ("loss", "peak_memory", "tokens", "pairs", "bytes")


def _loss(run: _Run, batch: dict[str, torch.Tensor], items: float) -> torch.Tensor:
    """Sum of the whole batch's token losses over `items`."""
    # FSDP2 would round a float tensor to bf16; a Python number passes as it is.
    count = int(items) if float(items).is_integer() else items
    return run.engine.module(**batch, num_items_in_batch=count, use_cache=False).loss


def _batch(run: _Run, indices: np.ndarray | list[int]) -> dict[str, torch.Tensor]:
    device = local_device()
    batch = collate(run.rows, indices, pad_id=run.pad_id, separate=run.separates)
    return {name: values.to(device, non_blocking=True) for name, values in batch.items()}


def _work(run: _Run, indices: np.ndarray) -> tuple[float, float, float]:
    """(tokens, attention pairs of all layers, bytes sent) of this rank in the micro-batch that just ran."""
    if run.engine.cp > 1:
        measured = report(run.engine.model)
        return measured["tokens"], measured["pairs"], measured["bytes_sent"]
    lengths = [length for row in document_lengths(run.rows, indices, separate=run.separates) for length in row]
    return sum(lengths), metrics.layer_pairs(run.engine.model.config.get_text_config(), lengths), 0


@torch.no_grad()
def _validate(run: _Run) -> float:
    """Mean loss per target over the validation rows; each dp rank takes every dp-th, all make equally many calls."""
    held_out = np.arange(run.training_rows, len(run.rows))
    targets = int(run.rows.target_counts[held_out].sum())
    if targets == 0:
        raise ConfigError(f"the {len(held_out)} validation rows hold no target tokens")
    engine = run.engine
    engine.module.eval()
    total = 0.0
    for first in range(0, len(held_out), engine.dp):
        place = first + engine.dp_rank
        batch = _batch(run, [held_out[min(place, len(held_out) - 1)]])
        if place >= len(held_out):
            # Ranks that run out still join every collective, with nothing to predict.
            batch["labels"].fill_(-100)
            batch["shift_labels"].fill_(-100)
        with engine.computing():
            total += float(_loss(run, batch, targets))
    if isinstance(engine.module, FSDPModule):
        engine.module.reshard()
    engine.module.train()
    return float(gather_vector([total])[:: engine.cp, 0].sum())


def _throughput(run: _Run, indices: np.ndarray, everyone: dict[str, list[float]], *, seconds: float) -> dict[str, Any]:
    """The part of a step's record that is about speed, memory and balance."""
    world = dist.get_world_size()
    # padding is no useful work: it counts in `tokens_per_rank` alone
    documents = np.concatenate([run.rows.lengths(row) for row in indices]).tolist()
    tokens = sum(documents)
    device = local_device()
    model = run.engine.model
    bf16 = run.config.train.precision == "bf16" or model.dtype == torch.bfloat16
    peak = metrics.peak_flops(device, torch.bfloat16 if bf16 else model.dtype)
    flops = metrics.step_flops(model, run.engine.weights, tokens, documents)
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
