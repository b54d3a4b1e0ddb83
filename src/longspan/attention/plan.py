"""What one rank computes and fetches, as lists of blocks in row coordinates.

A plan is made once per batch from the layout and the rules, which every rank knows whole, so both ends of every
transfer agree without talking. Stage 0 is the rank's own keys. Each later stage fetches, from a group of source ranks,
only the rows that some query here may see; their rows lie one source behind the other in the stage's key buffer.
Batch rows with equal rules are one run and share their blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.layout import Layout, Span, join
from longspan.rule import Block, Kind, Rule, merge_blocks


@dataclass(frozen=True)
class Piece:
    """One kernel call: query rows x key rows of a stage's buffer, for the batch rows `batch`."""

    batch: Span
    q: Span
    k: Span
    kind: Kind
    first: bool  # nothing was computed for these queries before
    at: tuple[Span, Span] | None = None  # PARTIAL: the positions of q and k
    rule: Rule | None = None  # PARTIAL: what to evaluate there

    def mask(self, device: torch.device) -> Tensor | None:
        """bool [q, k] for a PARTIAL piece, None for the others."""
        if self.rule is None or self.at is None:
            return None
        q, k = (torch.arange(span.start, span.stop, device=device) for span in self.at)
        return self.rule.mask(q, k)


@dataclass(frozen=True)
class Stage:
    """Keys from `sources`, and what to compute with them. `fetch[source]` and `send[rank]` are spans of local rows of
    the owner, for every rank of the group; both empty in stage 0."""

    pieces: tuple[Piece, ...]
    fetch: tuple[tuple[Span, ...], ...] = ()
    send: tuple[tuple[Span, ...], ...] = ()


@dataclass(frozen=True)
class Plan:
    """All stages of one rank."""

    layout: Layout
    rank: int
    rules: tuple[Rule, ...]
    stages: tuple[Stage, ...]

    def only_piece(self, batch: int, rows: int) -> Piece | None:
        """The piece that is all there is to compute, for every batch row and query; then there is nothing to merge."""
        if len(self.stages) == len(self.stages[0].pieces) == 1:
            piece = self.stages[0].pieces[0]
            if (piece.batch, piece.q) == (Span(0, batch), Span(0, rows)):
                return piece
        return None

    @cached_property
    def pairs(self) -> int:
        """Visible pairs of this rank's queries, summed over batch rows, per head."""
        whole = Span(0, self.layout.length)
        counts = {rule: sum(rule.pairs(span, whole) for span in self.layout.spans[self.rank]) for rule in self.rules}
        return sum(counts[rule] for rule in self.rules)


def make_plan(layout: Layout, rank: int, rules: Sequence[Rule], stages: int | None = None) -> Plan:
    """The plan of `rank` for a batch of len(rules) rows.

    `stages`: into how many groups the other ranks are split (1: everything at once, least latency; size-1: one source
    at a time, least memory). None chooses up to 3, so that a fetch can hide behind the computation before it.
    """
    if stages is None:
        stages = min(3, max(1, layout.size - 1))
    check_stages(stages, layout.size)
    # Index functions hold tensors, a whole mask perhaps: only the plans of the batch at hand are kept for those.
    cached = _few_plans if any(rule.index is not None for rule in rules) else _many_plans
    return cached(layout, rank, tuple(rules), stages)


def check_stages(stages: int, size: int) -> None:
    """Raises ValueError unless `size` ranks can fetch in that many stages."""
    limit = max(1, size - 1)
    if not 1 <= stages <= limit:
        raise ValueError(f"stages must lie within 1..{limit} for {size} ranks, got {stages}")


def _make_plan(layout: Layout, rank: int, rules: tuple[Rule, ...], stages: int) -> Plan:
    runs = _runs(rules)
    touched = {batch: np.zeros(layout.row_counts[rank], dtype=bool) for batch, _ in runs}
    planned = [Stage(_pieces(layout, rank, (rank,), runs, None, touched))]
    offsets = list(range(1, layout.size))
    for i in range(stages):
        group = offsets[i * len(offsets) // stages : (i + 1) * len(offsets) // stages]
        sources = tuple((rank - offset) % layout.size for offset in group)
        fetch: list[tuple[Span, ...]] = [()] * layout.size
        send: list[tuple[Span, ...]] = [()] * layout.size
        for offset in group:
            source, receiver = (rank - offset) % layout.size, (rank + offset) % layout.size
            fetch[source] = _needed(layout, rank, source, runs)
            send[receiver] = _needed(layout, receiver, rank, runs)
        pieces = _pieces(layout, rank, sources, runs, fetch, touched)
        if group:
            planned.append(Stage(pieces, tuple(fetch), tuple(send)))
    return Plan(layout, rank, rules, tuple(planned))


_many_plans = lru_cache(maxsize=64)(_make_plan)
_few_plans = lru_cache(maxsize=4)(_make_plan)


def _runs(rules: tuple[Rule, ...]) -> list[tuple[Span, Rule]]:
    """Neighbouring batch rows with equal rules."""
    runs: list[tuple[Span, Rule]] = []
    for row, rule in enumerate(rules):
        if runs and runs[-1][1] == rule:
            runs[-1] = (Span(runs[-1][0].start, row + 1), rule)
        else:
            runs.append((Span(row, row + 1), rule))
    return runs


def _rows_of(layout: Layout, rank: int, positions: Span) -> Span:
    start = int(layout.row[positions.start])
    return Span(start, start + positions.size)


def _blocks(layout: Layout, rank: int, source: int, rule: Rule) -> list[Block]:
    """Blocks of rank's queries against source's keys, in positions."""
    return list(rule.blocks(layout.spans[rank], sorted(layout.spans[source])))


def _needed(layout: Layout, rank: int, source: int, runs: list[tuple[Span, Rule]]) -> tuple[Span, ...]:
    """Rows of `source` that some query of `rank` may see."""
    spans = sorted(
        {_rows_of(layout, source, block.k) for _, rule in runs for block in _blocks(layout, rank, source, rule)}
    )
    merged: list[Span] = []
    for span in spans:
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return join(merged)


def _pieces(
    layout: Layout,
    rank: int,
    sources: Sequence[int],
    runs: list[tuple[Span, Rule]],
    fetch: Sequence[tuple[Span, ...]] | None,
    touched: dict[Span, NDArray[np.bool_]],
) -> tuple[Piece, ...]:
    """Kernel calls against the keys of `sources`, in the coordinates of their common buffer."""
    pieces: list[Piece] = []
    for batch, rule in runs:
        regular: list[Block] = []
        partial: list[tuple[Block, tuple[Span, Span]]] = []
        offset = 0
        for source in sources:
            buffer = None if fetch is None else _Buffer(fetch[source], offset)
            for block in _blocks(layout, rank, source, rule):
                k = _rows_of(layout, source, block.k)
                if buffer is not None:
                    k = buffer.place(k)
                moved = Block(_rows_of(layout, rank, block.q), k, block.kind)
                if block.kind is Kind.PARTIAL:
                    partial.append((moved, (block.q, block.k)))
                else:
                    regular.append(moved)
            if fetch is not None:
                offset += sum(span.size for span in fetch[source])
        found = [(block, None) for block in merge_blocks(regular)] + [(b, at) for b, at in partial]
        for block, at in found:
            seen = touched[batch][block.q.start : block.q.stop]
            first = not seen.any()
            seen[:] = True
            pieces.append(Piece(batch, block.q, block.k, block.kind, first, at, rule if at else None))
    return tuple(pieces)


class _Buffer:
    """Where a source's fetched rows stand in a stage's key buffer, from `offset` on."""

    def __init__(self, fetched: Sequence[Span], offset: int) -> None:
        self.starts = [span.start for span in fetched]
        ends = accumulate((span.size for span in fetched), initial=offset)
        self.moves = [end - span.start for span, end in zip(fetched, ends)]

    def place(self, rows: Span) -> Span:
        move = self.moves[bisect_right(self.starts, rows.start) - 1]
        return Span(rows.start + move, rows.stop + move)
