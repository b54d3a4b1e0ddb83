"""The exchange scheme: queries stay, and each rank fetches exactly the keys and values that its queries may see.

Forward, per stage: wait for this stage's rows, start fetching the next stage's, compute this stage's blocks, merge.
Backward fetches the same rows again (they were not kept), computes dQ into place and partial dK, dV of the fetched
rows, and sends those straight to their owners, which add them in fp32 in a fixed order (stage, then rank): results
repeat bit for bit. One stage is an all-gather of the needed rows, size-1 stages are a ring.

Sent per rank: needed rows x Hkv x (D + Dv), forward; twice that in the backward. Kept for the backward: q, k, v, out
and lse of the own rows. Transient: two stages of keys and values.

With a layout of one rank there are no further stages, and this is attention on one device; ulysses uses it so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attention.plan import Piece, Plan, Stage
from longspan.comm import ContextParallel, Pending
from longspan.kernels import Block, Kernel, accumulator, add_sinks, for_block, merge_, sinks_backward
from longspan.layout import Span
from longspan.rule import Kind


@dataclass(frozen=True)
class Job:
    """Everything about one call of attention but its tensors."""

    cp: ContextParallel
    plan: Plan
    kernel: Kernel
    scale: float
    softcap: float | None

    def block(self, piece: Piece, device: torch.device) -> tuple[Kernel, Block]:
        """How to compute a piece."""
        mask = piece.mask(device)
        block = Block(scale=self.scale, softcap=self.softcap, mask=mask, causal=piece.kind is Kind.CAUSAL)
        return for_block(self.kernel, mask), block


def exchange_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job) -> Tensor:
    """Attention of the own query rows over everything they may see. q [B, H, rows, D] -> [B, H, rows, Dv]."""
    return _Exchange.apply(q, k, v, sinks, job)


def _take(tensor: Tensor, spans: tuple[Span, ...]) -> Tensor:
    if len(spans) == 1:
        return tensor[:, :, spans[0].start : spans[0].stop]
    if not spans:
        return tensor[:, :, :0]
    return torch.cat([tensor[:, :, span.start : span.stop] for span in spans], 2)


def _shapes(tensors: tuple[Tensor, Tensor], spans: tuple[Span, ...]) -> list[torch.Size]:
    rows = sum(span.size for span in spans)
    return [torch.Size((t.shape[0], t.shape[1], rows, t.shape[3])) for t in tensors]


def _start_fetch(cp: ContextParallel, stage: Stage, k: Tensor, v: Tensor) -> Pending:
    pieces = [[_take(k, spans), _take(v, spans)] for spans in stage.send]
    return cp.start_exchange(pieces, [_shapes((k, v), spans) for spans in stage.fetch])


def _sources(cp: ContextParallel, stage: Stage) -> list[int]:
    """Ranks that fill the stage's buffer, in its order: by distance, as the plan laid it out."""
    by_distance = [(cp.rank - offset) % cp.size for offset in range(1, cp.size)]
    return [source for source in by_distance if stage.fetch[source]]


def _buffer(cp: ContextParallel, stage: Stage, arrived: list[list[Tensor]], k: Tensor, v: Tensor) -> list[Tensor]:
    parts = [arrived[source] for source in _sources(cp, stage)]
    if not parts:
        return [k[:, :, :0], v[:, :, :0]]
    return parts[0] if len(parts) == 1 else [torch.cat(tensors, 2) for tensors in zip(*parts)]


def _rows(tensor: Tensor, batch: Span, rows: Span) -> Tensor:
    return tensor[batch.start : batch.stop, :, rows.start : rows.stop]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: Job) -> Tensor:
        only = job.plan.only_piece(q.shape[0], q.shape[2]) if q.numel() else None
        if only is not None:
            out, lse = _block(job, only, q, [k, v])
        else:
            out, lse = _empty(q, v)
            for stage, keys in _with_keys(job, k, v):
                _compute(job, stage, q, keys, out, lse)
            out = out.to(q.dtype)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.job = job
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        job: Job = ctx.job
        wide = accumulator(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        own = [torch.zeros_like(t, dtype=wide) for t in (k, v)]
        returning: tuple[Stage, Pending] | None = None
        for stage, keys in _with_keys(job, k, v):
            local = stage is job.plan.stages[0]
            partial = own if local else [torch.zeros_like(t, dtype=wide) for t in keys]
            _compute_backward(job, stage, gradient, q, keys, out, lse, (dq, *partial))
            if local:
                continue
            sent = _start_return(job.cp, stage, partial, k, v)
            if returning is not None:
                _add_returned(*returning, own)
            returning = (stage, sent)
        if returning is not None:
            _add_returned(*returning, own)
        dsinks = None if sinks is None else sinks_backward(gradient, out, lse, sinks)
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), dsinks, None


def _with_keys(job: Job, k: Tensor, v: Tensor) -> Iterator[tuple[Stage, list[Tensor]]]:
    """Each stage with its keys and values; the next stage's are in flight while the caller computes."""
    pending = None
    for stage, following in zip(job.plan.stages, [*job.plan.stages[1:], None]):
        keys = [k, v] if pending is None else _buffer(job.cp, stage, pending.wait(), k, v)
        pending = None if following is None else _start_fetch(job.cp, following, k, v)
        yield stage, keys


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out 0 and lse -inf: nothing seen yet."""
    wide = accumulator(q.dtype)
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=wide, device=q.device)
    return out, torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)


def _block(job: Job, piece: Piece, q: Tensor, keys: list[Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse of one piece."""
    kernel, block = job.block(piece, q.device)
    return kernel.forward(_rows(q, piece.batch, piece.q), *(_rows(t, piece.batch, piece.k) for t in keys), block)


def _compute(job: Job, stage: Stage, q: Tensor, keys: list[Tensor], out: Tensor, lse: Tensor) -> None:
    """Merges the stage's blocks into out and lse, in place."""
    if not q.numel():
        return
    for piece in stage.pieces:
        block_out, block_lse = _block(job, piece, q, keys)
        out_rows, lse_rows = _rows(out, piece.batch, piece.q), _rows(lse, piece.batch, piece.q)
        if piece.first:
            out_rows.copy_(block_out)
            lse_rows.copy_(block_lse)
        else:
            merge_(out_rows, lse_rows, block_out, block_lse)


def _compute_backward(
    job: Job,
    stage: Stage,
    gradient: Tensor,
    q: Tensor,
    keys: list[Tensor],
    out: Tensor,
    lse: Tensor,
    totals: tuple[Tensor, ...],
) -> None:
    """Adds the stage's blocks to the totals dq, dk and dv in place."""
    if not q.numel():
        return
    for piece in stage.pieces:
        batch, q_rows, k_rows = piece.batch, piece.q, piece.k
        kernel, block = job.block(piece, q.device)
        parts = kernel.backward(
            _rows(gradient, batch, q_rows),
            _rows(q, batch, q_rows),
            *(_rows(t, batch, k_rows) for t in keys),
            _rows(out, batch, q_rows),
            _rows(lse, batch, q_rows),
            block,
        )
        for total, part, rows in zip(totals, parts, (q_rows, k_rows, k_rows)):
            _rows(total, batch, rows).add_(part)


def _start_return(cp: ContextParallel, stage: Stage, partial: list[Tensor], k: Tensor, v: Tensor) -> Pending:
    """Sends partial dK and dV to the owners, in the dtype of k: one rounding per contribution."""
    pieces: list[list[Tensor]] = [[t[:, :, :0].to(k.dtype) for t in partial] for _ in range(cp.size)]
    at = 0
    for source in _sources(cp, stage):
        rows = sum(span.size for span in stage.fetch[source])
        pieces[source] = [t[:, :, at : at + rows].to(k.dtype) for t in partial]
        at += rows
    return cp.start_exchange(pieces, [_shapes((k, v), spans) for spans in stage.send])


def _add_returned(stage: Stage, pending: Pending, own: list[Tensor]) -> None:
    for spans, tensors in zip(stage.send, pending.wait()):
        for total, part in zip(own, tensors):
            at = 0
            for span in spans:
                total[:, :, span.start : span.stop].add_(part[:, :, at : at + span.size])
                at += span.size
