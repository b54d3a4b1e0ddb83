"""attend(): the one door to attention over a split sequence.

Local rows in, local rows out; every scheme computes what one rank would on the whole sequence. All arguments are
checked here, from facts that every rank shares, before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longspan import cost
from longspan.attention.exchange import Job, exchange_attention
from longspan.attention.plan import make_plan
from longspan.attention.ulysses import own_heads, split_heads, to_heads
from longspan.comm import ContextParallel
from longspan.kernels import choose
from longspan.layout import contiguous
from longspan.rule import Rule

SCHEMES = ("auto", "ulysses", "exchange")

__all__ = ["SCHEMES", "attend", "choose_scheme"]


@torch._dynamo.disable  # graphs end here: plans and exchanges are made by Python, once per batch
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp: ContextParallel,
    rule: Rule | Sequence[Rule] | None = None,
    scheme: str = "auto",
    kernel: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    stages: int | None = None,
) -> Tensor:
    """Attention over a sequence split by `cp`.

    Args:
        q: [B, H, rows, D], this rank's rows.
        k: [B, Hkv, rows, D]; Hkv divides H. v: [B, Hkv, rows, Dv].
        cp: the group and layout; bound to a length (`cp.bind`), else one tiny collective finds it.
        rule: what may be seen, for all batch rows or one per row. Default: causal.
        scheme: "ulysses", "exchange", or "auto" (whichever sends fewer bytes).
        kernel: "naive", "flash" or "auto".
        scale: of the scores; default D**-0.5. softcap: S -> softcap * tanh(S / softcap). sinks: [H].
        dropout: must be 0: which entries drop depends on the split, so no rank count would equal another.
        stages: exchange only, 1 .. size-1.

    Returns:
        [B, H, rows, Dv] in the dtype of q. Raises ValueError on every rank, before anything is sent.
    """
    _check_shapes(q, k, v, sinks)
    if dropout:
        raise ValueError(f"attention dropout {dropout} would be unlike any one rank's; set attention_dropout=0.0")
    if scheme not in SCHEMES:
        raise ValueError(f"unknown scheme {scheme!r}; choose one of {', '.join(SCHEMES)}")
    rules = _per_batch_row(rule, q.shape[0])
    chosen_kernel = choose(kernel, q, softcap=softcap)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    split = split_heads(q.shape[1], k.shape[1], cp.size)
    cp = cp.bind_rows(q.shape[2])
    layout = cp.bound
    if layout.rows(cp.rank) != q.shape[2]:
        raise ValueError(f"q has {q.shape[2]} rows, rank {cp.rank} owns {layout.rows(cp.rank)}")
    if scheme == "auto":
        scheme = choose_scheme(layout.length, cp.size, q.shape[1], k.shape[1], q.shape[3], v.shape[3], rules)
    if scheme == "exchange" or cp.size == 1:
        plan = make_plan(layout, cp.rank, rules, stages)
        cp.traffic.pairs += plan.pairs
        return exchange_attention(q, k, v, sinks, Job(cp, plan, chosen_kernel, scale, softcap))
    plan = make_plan(contiguous(layout.length, 1), 0, rules)
    cp.traffic.pairs += plan.pairs * split.query[cp.rank].size / q.shape[1]
    q, k, v = to_heads(q, k, v, cp=cp, split=split)
    if sinks is not None:
        sinks = own_heads(sinks, cp=cp, split=split)
    out = exchange_attention(q, k, v, sinks, Job(cp, plan, chosen_kernel, scale, softcap))
    return cp.to_rows(out, split.query)


def choose_scheme(
    length: int, size: int, heads: int, kv_heads: int, width: int, value_width: int, rules: Sequence[Rule]
) -> str:
    """The scheme that sends fewer bytes, from facts that all ranks share."""
    reaches = [rule.longest_path or length / max(1, len(rule.document_starts)) for rule in rules]
    windows = [rule.behind + 1 for rule in rules if rule.behind is not None]
    needed = cost.needed_fraction(
        length=length,
        size=size,
        causal=all(rule.ahead == 0 for rule in rules),
        window=max(windows) if len(windows) == len(rules) else None,
        document=min(reaches, default=None),
    )
    return cost.cheaper_scheme(
        length=length,
        size=size,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        value_width=value_width,
        needed=needed,
    )


def _per_batch_row(rule: Rule | Sequence[Rule] | None, batch: int) -> tuple[Rule, ...]:
    if rule is None:
        rule = Rule.causal()
    rules = (rule,) * batch if isinstance(rule, Rule) else tuple(rule)
    if len(rules) != batch:
        raise ValueError(f"{len(rules)} rules for a batch of {batch} rows; give one for all, or one per row")
    return rules


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k and v are [batch, heads, rows, width]; got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k and v do not fit together: {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks must be one per query head ({q.shape[1]}), got {tuple(sinks.shape)}")
