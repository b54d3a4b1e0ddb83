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

from typing import Any

import torch
from torch import Tensor

from longspan.attention.plan import Plan, Stage
from longspan.comm import ContextParallel, Pending
from longspan.kernels import Kernel, accumulator, add_sinks, for_block, merge_, sinks_backward
from longspan.layout import Span


def exchange_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    cp: ContextParallel,
    plan: Plan,
    kernel: Kernel,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of the own query rows over everything they may see. q [B, H, rows, D] -> [B, H, rows, Dv]."""
    return _Exchange.apply(q, k, v, sinks, cp, plan, kernel, scale, softcap)


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
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cp: ContextParallel,
        plan: Plan,
        kernel: Kernel,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        options = {"scale": scale, "softcap": softcap}
        out, lse = _empty(q, v)
        pending = None
        for index, stage in enumerate(plan.stages):
            keys = [k, v] if pending is None else _buffer(cp, stage, pending.wait(), k, v)
            following = plan.stages[index + 1] if index + 1 < len(plan.stages) else None
            pending = _start_fetch(cp, following, k, v) if following else None
            out, lse = _compute(q, keys, stage, kernel, options, out, lse, alone=len(plan.stages) == 1)
        out = out.to(q.dtype)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.cp, ctx.plan, ctx.kernel, ctx.options = cp, plan, kernel, options
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        cp, plan = ctx.cp, ctx.plan
        wide = accumulator(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        pending, returning = None, None
        for index, stage in enumerate(plan.stages):
            keys = [k, v] if pending is None else _buffer(cp, stage, pending.wait(), k, v)
            following = plan.stages[index + 1] if index + 1 < len(plan.stages) else None
            pending = _start_fetch(cp, following, k, v) if following else None
            if index == 0:
                _compute_backward(gradient, q, keys, out, lse, stage, ctx.kernel, ctx.options, dq, dk, dv)
                continue
            partial = [torch.zeros_like(t, dtype=wide) for t in keys]
            _compute_backward(gradient, q, keys, out, lse, stage, ctx.kernel, ctx.options, dq, *partial)
            sent_back = _start_return(cp, stage, partial, k, v)
            if returning is not None:
                _add_returned(*returning, dk, dv)
            returning = (sent_back, stage)
        if returning is not None:
            _add_returned(*returning, dk, dv)
        dsinks = None if sinks is None else sinks_backward(gradient, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None, None


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out 0 and lse -inf: nothing seen yet."""
    wide = accumulator(q.dtype)
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=wide, device=q.device)
    return out, torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)


def _compute(
    q: Tensor,
    keys: list[Tensor],
    stage: Stage,
    kernel: Kernel,
    options: dict[str, Any],
    out: Tensor,
    lse: Tensor,
    *,
    alone: bool,
) -> tuple[Tensor, Tensor]:
    k, v = keys
    everything = Span(0, q.shape[0]), Span(0, q.shape[2])
    if alone and q.numel() and len(stage.pieces) == 1 and (stage.pieces[0].batch, stage.pieces[0].q) == everything:
        piece = stage.pieces[0]
        mask = piece.mask(q.device)
        k, v = _rows(k, piece.batch, piece.k), _rows(v, piece.batch, piece.k)
        return for_block(kernel, mask).forward(q, k, v, mask=mask, causal=piece.causal, **options)
    if not q.numel():
        return out, lse
    for piece in stage.pieces:
        mask = piece.mask(q.device)
        block_out, block_lse = for_block(kernel, mask).forward(
            _rows(q, piece.batch, piece.q),
            _rows(k, piece.batch, piece.k),
            _rows(v, piece.batch, piece.k),
            mask=mask,
            causal=piece.causal,
            **options,
        )
        out_rows, lse_rows = _rows(out, piece.batch, piece.q), _rows(lse, piece.batch, piece.q)
        if piece.first:
            out_rows.copy_(block_out)
            lse_rows.copy_(block_lse)
        else:
            merge_(out_rows, lse_rows, block_out, block_lse)
    return out, lse


def _compute_backward(
    gradient: Tensor,
    q: Tensor,
    keys: list[Tensor],
    out: Tensor,
    lse: Tensor,
    stage: Stage,
    kernel: Kernel,
    options: dict[str, Any],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Adds the stage's blocks to dq, dk and dv in place."""
    if not q.numel():
        return
    k, v = keys
    for piece in stage.pieces:
        mask = piece.mask(q.device)
        batch, q_rows, k_rows = piece.batch, piece.q, piece.k
        block = for_block(kernel, mask).backward(
            _rows(gradient, batch, q_rows),
            _rows(q, batch, q_rows),
            _rows(k, batch, k_rows),
            _rows(v, batch, k_rows),
            _rows(out, batch, q_rows),
            _rows(lse, batch, q_rows),
            mask=mask,
            causal=piece.causal,
            **options,
        )
        for total, part, rows in zip((dq, dk, dv), block, (q_rows, k_rows, k_rows)):
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


def _add_returned(pending: Pending, stage: Stage, dk: Tensor, dv: Tensor) -> None:
    for spans, tensors in zip(stage.send, pending.wait()):
        for total, part in zip((dk, dv), tensors):
            at = 0
            for span in spans:
                total[:, :, span.start : span.stop].add_(part[:, :, at : at + span.size])
                at += span.size
