"""Which rank owns which positions: integers only, so that ownership is tested without processes.

A layout cuts the positions 0 .. length-1 of a sequence into spans and gives every rank a list of them. Rank r's local
tensor holds its spans one behind the other: row i of rank r is position `positions(r)[i]`. Any length and any size
are allowed, empty ranks included, and there are no pad tokens: shards differ by at most one row.

Balance, as attention pairs of the busiest rank over the mean, for a causal rule: `contiguous` 2 - 1/size, `head_tail`
(rank r owns the r-th piece from the front and the r-th from the back; the zigzag of Brandon et al., "Striped
Attention", 2023, and of Megatron's context parallelism) 1, `per_document` 1 for packed documents too, since each
document is cut head-tail on its own, and `balanced` near 1 for any rule, whose visible keys per position it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


class Span(NamedTuple):
    """Positions (or rows) start, start + 1, .., stop - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def join(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Drops empty spans and joins each span to its predecessor where it begins where that one ends."""
    joined: list[Span] = []
    for span in spans:
        if span.start == span.stop:
            continue
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


@dataclass(frozen=True)
class Layout:
    """The spans of every rank: `spans[rank]`, in the order of that rank's rows.

    Raises ValueError unless the spans cover 0 .. length-1 exactly once.
    """

    length: int
    spans: tuple[tuple[Span, ...], ...]
    name: str = "custom"

    def __post_init__(self) -> None:
        if not self.spans:
            raise ValueError("a layout needs at least one rank")
        reached = 0
        for span in sorted(span for spans in self.spans for span in spans):
            if span.start != reached or span.stop <= span.start:
                raise ValueError(
                    f"layout spans must cover 0..{self.length} exactly once; found {span} where {reached} was due"
                )
            reached = span.stop
        if reached != self.length:
            raise ValueError(f"layout spans end at {reached}, the sequence has {self.length} positions")

    @property
    def size(self) -> int:
        return len(self.spans)

    def rows(self, rank: int) -> int:
        """How many rows rank `rank` holds."""
        return sum(span.size for span in self.spans[rank])

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        return tuple(self.rows(rank) for rank in range(self.size))

    def positions(self, rank: int) -> Positions:
        """Position of each row of `rank`: int64 [rows(rank)]."""
        pieces = [np.arange(span.start, span.stop, dtype=np.int64) for span in self.spans[rank]]
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)

    @cached_property
    def order(self) -> Positions:
        """Positions in rank-then-row order: int64 [length]. `whole[order]` is all shards, one behind the other."""
        return np.concatenate([self.positions(rank) for rank in range(self.size)])

    @cached_property
    def inverse(self) -> Positions:
        """Where each position stands in `order`: int64 [length]. `shards[inverse]` is the sequence again."""
        inverse = np.empty(self.length, dtype=np.int64)
        inverse[self.order] = np.arange(self.length, dtype=np.int64)
        return inverse

    @cached_property
    def owner(self) -> Positions:
        """Rank that owns each position: int64 [length]."""
        return np.repeat(np.arange(self.size, dtype=np.int64), self.row_counts)[self.inverse]

    @cached_property
    def row(self) -> Positions:
        """Row of each position on its owner: int64 [length]."""
        offsets = np.concatenate([[0], np.cumsum(self.row_counts)[:-1]]).astype(np.int64)
        return self.inverse - offsets[self.owner]


def shares(count: int, size: int, *, first: int = 0) -> list[int]:
    """`count` rows over `size` ranks, differing by at most one; the longer shares begin at rank `first`."""
    return [count // size + ((rank - first) % size < count % size) for rank in range(size)]


def contiguous(length: int, size: int) -> Layout:
    """Rank r owns the r-th of `size` pieces."""
    bounds = np.cumsum([0, *shares(length, size)]).tolist()
    return Layout(length, tuple(join([Span(a, b)]) for a, b in zip(bounds, bounds[1:])), "contiguous")


def _head_tail(start: int, counts: Sequence[int]) -> list[list[Span]]:
    """Head and tail spans for each rank; rank r gets counts[r] positions of those from `start` on."""
    heads = [count - count // 2 for count in counts]
    stop = start + sum(counts)
    spans: list[list[Span]] = []
    for rank, count in enumerate(counts):
        head = start + sum(heads[:rank])
        tail = stop - sum(count // 2 for count in counts[: rank + 1])
        spans.append([Span(head, head + heads[rank]), Span(tail, tail + count // 2)])
    return spans


def head_tail(length: int, size: int) -> Layout:
    """Rank r owns the r-th of 2*size pieces from the front and the r-th from the back: equal causal work."""
    return Layout(length, tuple(join(spans) for spans in _head_tail(0, shares(length, size))), "head_tail")


def per_document(length: int, size: int, boundaries: Iterable[int]) -> Layout:
    """Every document cut head-tail on its own: equal causal work within documents.

    `boundaries`: positions at which a document begins (0 may be left out). Documents shorter than 2*size give some
    ranks nothing; the odd rows go round the ranks, so that totals still differ by at most one.
    """
    starts = sorted({0, *(int(b) for b in boundaries)} - {length}) if length else []
    if starts and (starts[0] < 0 or starts[-1] > length):
        raise ValueError(f"document boundaries {starts} do not lie within 0..{length}")
    spans: list[list[Span]] = [[] for _ in range(size)]
    first = 0
    for start, stop in zip(starts, [*starts[1:], length]):
        counts = shares(stop - start, size, first=first)
        first = (first + (stop - start)) % size
        for rank, pieces in enumerate(_head_tail(start, counts)):
            spans[rank] += pieces
    return Layout(length, tuple(join(pieces) for pieces in spans), "per_document")


SPAN_PERCENT = 1  # what one more span costs a rank, in percent of a rank's mean attention
MOST_PIECES = 8


def balanced(counts: Sequence[int] | Positions, size: int) -> Layout:
    """Near-equal attention pairs at equal tokens, in few spans, for any rule.

    `counts`: visible keys of each position, int64 [length] (`Rule.counts`, summed over batch rows). The layout with the
    smallest predicted makespan (the pairs of the busiest rank, with a penalty per span) among contiguous, head_tail,
    and 2 .. 8 pieces per rank dealt out heaviest first to the rank with the least so far. Integers only, and ties go
    to the first: the same on every rank. It is a heuristic; the best of its candidates is what it promises.
    """
    counts = np.asarray(counts, dtype=np.int64)
    length = len(counts)
    before = np.concatenate([[0], np.cumsum(counts)])
    candidates = [contiguous(length, size), head_tail(length, size)]
    candidates += [_dealt(before, size, pieces) for pieces in range(2, MOST_PIECES + 1)]
    best = min(candidates, key=lambda layout: _makespan(layout, before))
    return Layout(length, best.spans, "balanced")


def _makespan(layout: Layout, before: Positions) -> int:
    """In hundredths of a pair, times the number of ranks."""
    pairs = [sum(int(before[span.stop] - before[span.start]) for span in spans) for spans in layout.spans]
    penalty = SPAN_PERCENT * int(before[-1])
    return max(100 * layout.size * work + len(spans) * penalty for work, spans in zip(pairs, layout.spans))


def _dealt(before: Positions, size: int, pieces: int) -> Layout:
    """`pieces` pieces per rank; `before[i]` is the sum of the counts of positions below i."""
    length = len(before) - 1
    bounds = np.cumsum([0, *shares(length, size * pieces)])
    pairs = np.diff(before[bounds])
    held: list[list[int]] = [[] for _ in range(size)]
    work = [0] * size
    for piece in np.argsort(-pairs, kind="stable").tolist():
        rank = min((r for r in range(size) if len(held[r]) < pieces), key=lambda r: work[r])
        held[rank].append(piece)
        work[rank] += int(pairs[piece])
    # A rank's tokens are divided anew among its pieces: equal tokens then need no slivers.
    sizes = [0] * (size * pieces)
    for own, tokens in zip(held, shares(length, size)):
        for piece, share in zip(sorted(own), shares(tokens, pieces)):
            sizes[piece] = share
    bounds = np.cumsum([0, *sizes])
    spans = [join(Span(int(bounds[p]), int(bounds[p + 1])) for p in sorted(own)) for own in held]
    return Layout(length, tuple(spans), "balanced")


def causal_counts(length: int, boundaries: Iterable[int] = ()) -> Positions:
    """Visible keys of each position of causal documents that begin at `boundaries`: int64 [length]."""
    starts = np.array(sorted({0, *(int(b) for b in boundaries)}), dtype=np.int64)
    positions = np.arange(length, dtype=np.int64)
    return positions - starts[np.searchsorted(starts, positions, side="right") - 1] + 1


NAMES = ("contiguous", "head_tail", "per_document", "balanced")


def make(
    name: str,
    length: int,
    size: int,
    boundaries: Iterable[int] = (),
    counts: Sequence[int] | Positions | None = None,
) -> Layout:
    """The layout called `name`. `boundaries`, where documents begin, serve `per_document`; `counts` serve `balanced`,
    whose default are those of causal documents."""
    if name == "contiguous":
        return contiguous(length, size)
    if name == "head_tail":
        return head_tail(length, size)
    if name == "per_document":
        return per_document(length, size, boundaries)
    if name == "balanced":
        return balanced(causal_counts(length, boundaries) if counts is None else counts, size)
    raise ValueError(f"unknown layout {name!r}; choose one of {', '.join(NAMES)}")
