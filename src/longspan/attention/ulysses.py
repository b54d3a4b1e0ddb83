"""The ulysses scheme: all-to-all to the whole sequence and some heads, attention there, all-to-all back.

(Jacobs et al., "DeepSpeed Ulysses", 2023.) Any head count serves: query heads are dealt out evenly, the first ranks
getting one more; each rank gets the key heads that its query heads read, copies included, and the backward sums the
gradients of copies. A rank may get no head at all.

Sent per rank, forward: rows x (H + copies x Hkv) x (D + Dv) x (size-1)/size; the same backward. Attention per head is
bitwise what one rank computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.comm import ContextParallel
from longspan.layout import Span, shares


@dataclass(frozen=True)
class HeadSplit:
    """Which query and key heads each rank gets."""

    query: tuple[Span, ...]
    key: tuple[Span, ...]
    groups: int  # query heads per key head in the whole model

    def aligned(self, rank: int) -> bool:
        """Whether the rank's query heads read its key heads in equal groups (so that kernels may group them)."""
        query, key = self.query[rank], self.key[rank]
        return key.size <= 1 or query.size == key.size * self.groups

    def key_of_query(self, rank: int) -> list[int]:
        """For each of the rank's query heads, which of the rank's key heads it reads."""
        return [h // self.groups - self.key[rank].start for h in range(self.query[rank].start, self.query[rank].stop)]


def split_heads(heads: int, kv_heads: int, size: int) -> HeadSplit:
    """Deals out query heads; key heads follow. Raises ValueError unless kv_heads divides heads."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly")
    groups = heads // kv_heads
    bounds = [0]
    for share in shares(heads, size):
        bounds.append(bounds[-1] + share)
    query = tuple(Span(a, b) for a, b in zip(bounds, bounds[1:]))
    key = tuple(Span(q.start // groups, -(-q.stop // groups)) if q.size else Span(0, 0) for q in query)
    return HeadSplit(query, key, groups)


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, *, cp: ContextParallel, split: HeadSplit, expand: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Own rows, all heads -> all rows, this rank's heads; one all-to-all. Key heads are repeated per query head where
    the groups are uneven, or always with `expand`."""
    q, k, v = cp.to_heads([q, k, v], [split.query, split.key, split.key])
    if expand or not split.aligned(cp.rank):
        index = torch.tensor(split.key_of_query(cp.rank), dtype=torch.int64, device=k.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    return q, k, v


def own_heads(per_head: Tensor, *, cp: ContextParallel, split: HeadSplit) -> Tensor:
    """This rank's part of a per-head tensor such as attention sinks, along dimension 0."""
    span = split.query[cp.rank]
    return per_head[span.start : span.stop]
