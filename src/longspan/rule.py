"""Which keys a query may see, as structure instead of a mask.

Everything common is one interval of keys per query. With `q`, `k` positions in the caller's sequence,

    k is visible to q  <=>  low(q) <= k < high(q)  and  k is a visible key  and  index(q, k)

    low(q)  = max(q - behind, first position of q's document, first position of q's chunk)
    high(q) = min(q + ahead + 1, end of q's document, end of q's chunk)

(chunk borders are counted from the beginning of the document; a span of tokens that see each other, such as those of
an image, moves q - behind down to its beginning and q + ahead + 1 up to its end)

causal: ahead = 0; sliding window W: behind = W - 1; bidirectional: neither. Both bounds grow with q, so a rectangle of
queries and keys is classified from its corners. `visible_keys` holds padding (either side, or holes). `index` is any
further condition; it costs an evaluation per block and is the only part that is not structure.

A branched rule is for a prefix tree laid out depth-first (longspan.prefix_tree): tokens that several sequences share
stand once, and every subtree is contiguous. A key is visible only to queries of the innermost subtree that holds it,

    start(k) <= q < stop(k)

which for a query are the tokens on its path from the root. Distances and chunks are counted along that path. Between
rows and path there is one shift per node (row - shift = place on the path), so what a query of node u sees of an
ancestor's own tokens is the interval above, with both bounds shifted: still one interval per node of the path.

A Rule is for one sequence; a batch has one Rule per row, equal rows being planned once. Masks exist for PARTIAL
blocks only, and those are never larger than `TILE` x `TILE`.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.layout import Span, join

TILE = 1024
FAR = 2**62  # further than any position

Index = Callable[[Tensor, Tensor], Tensor]


class Kind(enum.Enum):
    """What a rectangle of queries x keys looks like: nothing visible; everything; a causal square (queries and keys
    are the same span); anything else."""

    EMPTY = "empty"
    FULL = "full"
    CAUSAL = "causal"
    PARTIAL = "partial"


class Block(NamedTuple):
    """A rectangle with something visible in it, in positions or in rows as the context says."""

    q: Span
    k: Span
    kind: Kind


class Corners(NamedTuple):
    """low and high at the first and the last query of a span; for one node of its path in a branched rule."""

    low_first: int
    low_last: int
    high_first: int
    high_last: int


class _Nodes(NamedTuple):
    """The nodes of a tree as arrays [nodes], ascending. A node's own tokens are start .. own_stop - 1, its subtree is
    start .. stop - 1; its token in row r is at place r - shift of its path; parent is -1 for a root."""

    start: NDArray[np.int64]
    own_stop: NDArray[np.int64]
    stop: NDArray[np.int64]
    shift: NDArray[np.int64]
    parent: NDArray[np.int64]

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The node that each position belongs to."""
        return np.searchsorted(self.start, positions, side="right") - 1


def _make_nodes(subtrees: Sequence[Span]) -> _Nodes:
    """The nodes whose subtrees these are. What follows the last one (padding, say) is a tree of its own.

    Raises ValueError unless they ascend from 0, lie within one another or side by side without gaps, and hold their own
    tokens before their children.
    """
    subtrees = [*subtrees, Span(subtrees[-1].stop if subtrees else 0, FAR)]
    parents: list[int] = []
    open_nodes: list[int] = []  # the path to the node before
    for i, span in enumerate(subtrees):
        before = subtrees[i - 1] if i else Span(-1, 0)
        while open_nodes and subtrees[open_nodes[-1]].stop <= span.start:
            open_nodes.pop()
        within = subtrees[open_nodes[-1]].stop if open_nodes else FAR
        if not (before.start < span.start <= before.stop and span.start < span.stop <= within):
            raise ValueError(
                "subtrees must ascend from 0, within one another or side by side without gaps, and hold their own "
                f"tokens before their children; {before} is followed by {span}"
            )
        parents.append(open_nodes[-1] if open_nodes else -1)
        open_nodes.append(i)
    start = np.array([span.start for span in subtrees], dtype=np.int64)
    stop = np.array([span.stop for span in subtrees], dtype=np.int64)
    own_stop = np.minimum(stop, [*start[1:], FAR])
    place = np.zeros_like(start)  # of the node's first token on its path
    for i, parent in enumerate(parents):
        if parent >= 0:
            place[i] = place[parent] + own_stop[parent] - start[parent]
    return _Nodes(start, own_stop, stop, start - place, np.array(parents, dtype=np.int64))


@dataclass(frozen=True)
class Rule:
    """Visibility for one sequence. Build it with `causal()` or `bidirectional()` and refine it:

    >>> Rule.causal().windowed(512).packed([0, 700, 701]).padded(visible)

    Frozen and hashable; equal structure compares equal (index functions by identity).
    """

    behind: int | None = None
    ahead: int | None = None
    document_starts: tuple[int, ...] = ()  # ascending, first is 0; () is one document
    chunk_size: int | None = None
    chunk_origin: int = 0  # chunk borders lie at the document's first position + origin + n * size
    together: tuple[Span, ...] = ()  # ascending: their tokens see each other, whatever `behind` and `ahead` say
    together_behind: int | None = None  # as far back only
    visible_keys: tuple[Span, ...] | None = None  # None: all
    index: Index | None = None
    subtrees: tuple[Span, ...] = ()  # one per node of a tree laid out depth-first; () is one sequence

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")
        for name in ("behind", "ahead"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        starts = self.document_starts
        if starts and (starts[0] != 0 or any(a >= b for a, b in zip(starts, starts[1:]))):
            raise ValueError(f"document_starts must ascend from 0, got {starts[:8]}")
        if self.subtrees:
            if starts or self.together:
                raise ValueError("a tree's rule has no documents (give each a root) and no spans that see each other")
            _ = self._nodes

    @staticmethod
    def causal() -> Rule:
        """A query sees keys at and before its own position."""
        return Rule(ahead=0)

    @staticmethod
    def bidirectional() -> Rule:
        """A query sees every key."""
        return Rule()

    def windowed(self, window: int) -> Rule:
        """Keys at distance q - k < window only; a bidirectional rule also gets k - q < window."""
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        return self.behind_at_most(window - 1).ahead_at_most(window - 1)

    def behind_at_most(self, distance: int) -> Rule:
        """Keys at q - k <= distance only."""
        nearer = distance if self.behind is None else min(self.behind, distance)
        if not self.together:
            return replace(self, behind=nearer)
        within = distance if self.together_behind is None else min(self.together_behind, distance)
        return replace(self, behind=nearer, together_behind=within)

    def ahead_at_most(self, distance: int) -> Rule:
        """Keys at k - q <= distance only; 0 is causal."""
        if self.together:
            raise ValueError("limit how far ahead a query sees before joining spans, not after")
        return replace(self, ahead=distance if self.ahead is None else min(self.ahead, distance))

    def joined(self, spans: Iterable[Span]) -> Rule:
        """The tokens of each span also see each other, beyond the distances set so far (those set later hold for them
        too). The spans must not overlap; documents and chunks still part them."""
        if self.together:
            raise ValueError("this rule has spans that see each other already")
        ordered = tuple(sorted(span for span in spans if span.size > 1))
        if any(a.stop > b.start for a, b in zip(ordered, ordered[1:])):
            raise ValueError(f"spans that see each other must not overlap, got {ordered[:8]}")
        return replace(self, together=ordered)

    def packed(self, starts: Iterable[int]) -> Rule:
        """Documents that do not see each other; `starts` are their first positions (0 may be left out)."""
        merged = tuple(sorted({0, *(int(s) for s in starts), *self.document_starts}))
        return replace(self, document_starts=merged if len(merged) > 1 else ())

    def chunked(self, size: int, origin: int = 0) -> Rule:
        """Queries see keys of their own chunk only; borders lie at the document's start + origin + n * size."""
        if self.chunk_size is not None:
            raise ValueError(f"this rule has chunks of {self.chunk_size} already")
        return replace(self, chunk_size=size, chunk_origin=origin)

    def branched(self, subtrees: Iterable[Span]) -> Rule:
        """Keys on the query's path through a tree only; distances and chunks, set before or later, count along it.

        `subtrees` are the nodes' in depth-first order, each beginning with the node's own tokens. Padding and index
        functions keep counting rows. Raises ValueError for spans that are no tree, and for rules with documents.
        """
        if self.subtrees:
            raise ValueError("this rule has a tree already")
        return replace(self, subtrees=tuple(subtrees))

    def padded(self, visible: Tensor | NDArray[np.bool_] | Sequence[int]) -> Rule:
        """Keys where `visible` (bool or 0/1, [length]) is false are seen by nobody."""
        flags = np.asarray(visible.cpu() if isinstance(visible, Tensor) else visible).astype(bool)
        if self.visible_keys is not None:
            before = np.zeros_like(flags)
            for span in self.visible_keys:
                before[span.start : span.stop] = True
            flags &= before
        if flags.all():
            return replace(self, visible_keys=None)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
        spans = tuple(Span(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2]))
        return replace(self, visible_keys=spans)

    def where(self, index: Index) -> Rule:
        """Adds any condition: `index(q, k)` gets int64 positions that broadcast and returns bool."""
        if self.index is None:
            return replace(self, index=index)
        first = self.index
        return replace(self, index=lambda q, k: first(q, k) & index(q, k))

    # -- geometry ----------------------------------------------------------------------------------------------

    @cached_property
    def _nodes(self) -> _Nodes:
        return _make_nodes(self.subtrees)

    @property
    def longest_path(self) -> int | None:
        """Tokens on the longest path of a branched rule, None for the others."""
        return int((self._nodes.own_stop - self._nodes.shift)[:-1].max()) if self.subtrees else None

    def bounds(self, q: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """low and high (exclusive) of the interval each query sees, before visible_keys and index; of a branched rule,
        in places on the query's path."""
        low = np.zeros_like(q) if self.behind is None else np.maximum(q - self.behind, 0)
        high = np.full_like(q, FAR) if self.ahead is None else q + self.ahead + 1
        if self.together:
            edges = np.array([(span.start, span.stop) for span in self.together], dtype=np.int64)
            at = np.searchsorted(edges[:, 0], q, side="right") - 1
            inside = (at >= 0) & (q < edges[at, 1])
            first = edges[at, 0] if self.together_behind is None else np.maximum(edges[at, 0], q - self.together_behind)
            low = np.where(inside, np.minimum(low, first), low)
            high = np.where(inside, np.maximum(high, edges[at, 1]), high)
        origin: NDArray[np.int64] | int = self.chunk_origin
        if self.document_starts:
            starts = np.array([*self.document_starts, FAR], dtype=np.int64)
            document = np.searchsorted(starts, q, side="right") - 1
            low, high = np.maximum(low, starts[document]), np.minimum(high, starts[document + 1])
            origin = starts[document] + self.chunk_origin
        if self.chunk_size is not None:
            first = (q - origin) // self.chunk_size * self.chunk_size + origin
            low, high = np.maximum(low, first), np.minimum(high, first + self.chunk_size)
        return low, high

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """The naive twin of everything below: bool [len(q), len(k)] for positions q and k (int64, any order)."""
        if self.subtrees:
            seen = self._branched_mask(q, k)
        else:
            low, high = (torch.from_numpy(b).to(q.device) for b in self.bounds(q.cpu().numpy()))
            seen = (k[None, :] >= low[:, None]) & (k[None, :] < high[:, None])
        if self.visible_keys is not None:
            visible = torch.zeros_like(k, dtype=torch.bool)
            for span in self.visible_keys:
                visible |= (k >= span.start) & (k < span.stop)
            seen &= visible[None, :]
        if self.index is not None:
            seen = seen & self.index(q[:, None], k[None, :])
        return seen

    def _branched_mask(self, q: Tensor, k: Tensor) -> Tensor:
        """The part of `mask` that is in bounds and in the tree."""
        queries, keys, nodes = q.cpu().numpy()[:, None], k.cpu().numpy()[None, :], self._nodes
        node = nodes.at(keys)
        low, high = self.bounds(queries - nodes.shift[nodes.at(queries)])
        place = keys - nodes.shift[node]
        in_subtree = (nodes.start[node] <= queries) & (queries < nodes.stop[node])
        return torch.from_numpy((low <= place) & (place < high) & in_subtree).to(q.device)

    def _span_mask(self, q: Span, k: Span) -> Tensor:
        return self.mask(torch.arange(q.start, q.stop), torch.arange(k.start, k.stop))

    def _keys_within(self, k: Span) -> list[Span]:
        """Visible parts of a key span."""
        if self.visible_keys is None:
            return [k] if k.size else []
        cut = (Span(max(k.start, s.start), min(k.stop, s.stop)) for s in self.visible_keys)
        return [span for span in cut if span.start < span.stop]

    def classify(self, q: Span, k: Span) -> Kind:
        """What the rectangle q x k looks like. EMPTY, FULL and CAUSAL are certain; PARTIAL may hold any pattern."""
        if q.size < 1 or k.size < 1:
            return Kind.EMPTY
        if not self.subtrees:
            return self._classify(q, k, self._corners([q])[0][0])
        kinds = set()
        pieces = _cut(q, [start for start, _ in self._sections(q)])
        for piece, corners in zip(pieces, self._corners(pieces)):
            # On the path and in reach; whatever else there is of k is not visible.
            parts = [(Span(max(k.start, at.low_first), min(k.stop, at.high_last)), at) for at in corners]
            parts = [(part, at) for part, at in parts if part.start < part.stop]
            kinds |= {self._classify(piece, part, at) for part, at in parts}
            if sum(part.size for part, _ in parts) < k.size:
                kinds.add(Kind.EMPTY)
        return kinds.pop() if len(kinds) == 1 else Kind.PARTIAL

    def _corners(self, pieces: Sequence[Span]) -> list[list[Corners]]:
        """The bounds at the first and last query of each piece; they grow in between. In a tree, where a piece lies
        within one node, those of every node on its path that is in reach, from the piece's own up to the root's."""
        ends = np.array([[piece.start, piece.stop - 1] for piece in pieces], dtype=np.int64).reshape(-1)
        if not self.subtrees:
            return [[corners] for corners in _corners_of(*self.bounds(ends))]
        nodes = self._nodes
        at = nodes.at(ends)
        start, own_stop, _, shift, parent = (column.tolist() for column in nodes)
        every = []
        for node, plain in zip(at[::2].tolist(), _corners_of(*self.bounds(ends - nodes.shift[at]))):
            along_path = []
            while node >= 0 and plain.low_first + shift[node] < own_stop[node]:
                low_first, low_last, high_first, high_last = (bound + shift[node] for bound in plain)
                low_first, high_last = max(low_first, start[node]), min(high_last, own_stop[node])
                along_path.append(Corners(low_first, low_last, high_first, high_last))
                node = parent[node]
            every.append(along_path)
        return every

    def _classify(self, q: Span, k: Span, at: Corners) -> Kind:
        visible = self._keys_within(k)
        if not visible or visible[-1].stop <= at.low_first or visible[0].start >= at.high_last:
            return Kind.EMPTY
        if self.index is not None:
            seen = self._span_mask(q, k)
            if not seen.any():
                return Kind.EMPTY
            if seen.all():
                return Kind.FULL
            if q == k and torch.equal(seen, torch.ones_like(seen).tril()):
                return Kind.CAUSAL
            return Kind.PARTIAL
        if visible != [k]:
            return Kind.PARTIAL
        if at.low_last <= k.start and at.high_first >= k.stop:
            return Kind.FULL
        causal = self.ahead == 0 and not self._within(q)
        if q == k and causal and at.low_last <= k.start and at.high_last >= k.stop:
            return Kind.CAUSAL
        return Kind.PARTIAL

    def _within(self, q: Span) -> list[int]:
        """Where spans that see each other begin or end inside q, and q's beginning if one covers it."""
        first = bisect.bisect_right(self.together, q.start, key=lambda span: span.stop)
        last = bisect.bisect_left(self.together, q.stop, key=lambda span: span.start)
        return [max(edge, q.start) for span in self.together[first:last] for edge in span]

    def pairs(self, q: Span, k: Span) -> int:
        """Exactly how many (query, key) pairs of the rectangle are visible. O(q + k) unless there is an index."""
        return int(self.counts(q, k).sum())

    def counts(self, q: Span, k: Span) -> NDArray[np.int64]:
        """How many keys of k each query of q sees: int64 [q.size]. O(q + k), in a tree q times the nodes on its path;
        with an index, O(q k)."""
        found = np.zeros(max(q.size, 0), dtype=np.int64)
        if q.size < 1 or k.size < 1:
            return found
        if self.index is not None:
            for a in _tiles(q):
                for b in _tiles(k):
                    found[a.start - q.start : a.stop - q.start] += self._span_mask(a, b).sum(1).numpy()
            return found
        parts = self._keys_within(k)
        for piece, low, high in self._intervals(q):
            here = found[piece.start - q.start : piece.stop - q.start]
            for part in parts:
                here += np.maximum(np.minimum(high, part.stop) - np.maximum(low, part.start), 0)
        return found

    def _intervals(self, q: Span) -> Iterator[tuple[Span, NDArray[np.int64], NDArray[np.int64]]]:
        """low and high of every query: of q at once, or in a tree per piece and node on its path."""
        queries = np.arange(q.start, q.stop, dtype=np.int64)
        if not self.subtrees:
            yield (q, *self.bounds(queries))
            return
        nodes = self._nodes
        at = nodes.at(queries)
        lows, highs = self.bounds(queries - nodes.shift[at])
        for piece in _cut(q, [start for start, _ in self._sections(q)]):
            here = slice(piece.start - q.start, piece.stop - q.start)
            node = int(at[here.start])
            while node >= 0:
                low = np.maximum(lows[here] + nodes.shift[node], nodes.start[node])
                yield piece, low, np.minimum(highs[here] + nodes.shift[node], nodes.own_stop[node])
                node = int(nodes.parent[node])

    def blocks(self, queries: Sequence[Span], keys: Sequence[Span]) -> Iterator[Block]:
        """Cuts the rectangles of queries x keys into blocks that cover exactly their visible pairs, PARTIAL ones at
        most TILE wide. Neither list overlaps itself; `keys` ascend. Of many keys, only those in reach are looked at.

        Queries are cut where their document, chunk or node begins, and to a fraction of a window; the keys of such a
        piece are a band whose middle is FULL, whose lower edge (window) and upper edge (causal) are squares. In a tree
        that is so for each node on the piece's path.
        """
        stops = [k.stop for k in keys]
        pieces = [piece for q in queries for piece in self._query_pieces(q)]
        for piece, corners in zip(pieces, self._corners(pieces)):
            for at in corners:
                for i in range(bisect.bisect_right(stops, at.low_first), len(keys)):
                    k = keys[i]
                    if k.start >= at.high_last:
                        break
                    for part in self._keys_within(Span(max(k.start, at.low_first), min(k.stop, at.high_last))):
                        for area in self._areas(piece, part, at):
                            yield from self._settle(piece, area, at)

    def _areas(self, q: Span, k: Span, at: Corners) -> list[Span]:
        """The keys k of a query piece, cut where the piece's band begins and ends to be FULL."""
        if self.index is not None:
            return [k]
        if self.ahead == 0 and k.start <= q.start and k.stop == q.stop >= at.low_last:
            # the causal square as one piece, so that kernels may use their own causal path
            return [*_cut(Span(k.start, q.start), [at.low_last]), Span(q.start, k.stop)]
        return _cut(k, [at.low_last, at.high_first])

    def _settle(self, q: Span, k: Span, at: Corners) -> Iterator[Block]:
        """Emits q x k as one block, or as tiles where it is PARTIAL (or can be classified only by evaluation)."""
        small = q.size <= TILE and k.size <= TILE
        if self.index is None or small:
            kind = self._classify(q, k, at)
            if kind is Kind.EMPTY:
                return
            if kind is not Kind.PARTIAL or small:
                yield Block(q, k, kind)
                return
        for a in _tiles(q):
            for b in _tiles(k):
                kind = self.classify(a, b)
                if kind is not Kind.EMPTY:
                    yield Block(a, b, kind)

    def _sections(self, q: Span) -> list[tuple[int, int]]:
        """The documents or nodes that q touches: their first position in q, and where their count begins."""
        if not q.size:
            return []
        if self.subtrees:
            nodes = self._nodes
            first, last = nodes.at(np.array([q.start, q.stop - 1])).tolist()
            starts, origins = (column[first : last + 1].tolist() for column in (nodes.start, nodes.shift))
        else:
            first = bisect.bisect_right(self.document_starts, q.start)
            last = bisect.bisect_left(self.document_starts, q.stop)
            starts = [self.document_starts[first - 1] if first else 0, *self.document_starts[first:last]]
            origins = starts
        return [(max(start, q.start), origin) for start, origin in zip(starts, origins)]

    def _query_pieces(self, q: Span) -> Iterator[Span]:
        sections = self._sections(q)
        cuts = [*(start for start, _ in sections), *self._within(q)]
        if self.chunk_size is not None:
            for (start, origin), stop in zip(sections, [*(start for start, _ in sections[1:]), q.stop]):
                border = start + (origin + self.chunk_origin - start) % self.chunk_size
                cuts = [*cuts, *range(border, stop, self.chunk_size)]
        # Half a window: the two masked edges then cost as much as the unmasked middle, in few calls.
        reach = max(128, min(TILE, ((self.behind or 0) + 1) // 2))
        for piece in _cut(q, sorted(set(cuts))):
            if self.behind is not None and piece.size > reach:
                yield from _tiles(piece, reach)
            else:
                yield piece


def _corners_of(low: NDArray[np.int64], high: NDArray[np.int64]) -> list[Corners]:
    """From the bounds at first and last queries, in turn."""
    return list(map(Corners, low[::2].tolist(), low[1::2].tolist(), high[::2].tolist(), high[1::2].tolist()))


def _tiles(span: Span, size: int = TILE) -> list[Span]:
    return [Span(a, min(a + size, span.stop)) for a in range(span.start, span.stop, size)]


def _cut(span: Span, at: Sequence[int]) -> list[Span]:
    """The span cut at the given positions that lie inside it."""
    marks = [span.start, *sorted({p for p in at if span.start < p < span.stop}), span.stop]
    return [Span(a, b) for a, b in zip(marks, marks[1:]) if a < b]


def merge_blocks(blocks: Iterable[Block]) -> list[Block]:
    """Joins blocks in row coordinates into as few as possible (fewer, larger kernel calls).

    FULL blocks side by side become one; a causal square, the rectangle beneath it and the next square become one
    causal square, which is right because rows ascend in position within the same rank.
    """
    blocks = list(blocks)
    full = [b for b in blocks if b.kind is Kind.FULL]
    rest = [b for b in blocks if b.kind is not Kind.FULL]
    full = _join_side_by_side(full, along_keys=True)
    full = _join_side_by_side(full, along_keys=False)
    squares = sorted((b for b in rest if b.kind is Kind.CAUSAL), key=lambda b: b.q)
    partial = [b for b in rest if b.kind is Kind.PARTIAL]
    joined: list[Block] = []
    available = set(full)
    for square in squares:
        while joined and joined[-1].q.stop == square.q.start and joined[-1].k.stop == square.k.start:
            bridge = Block(square.q, joined[-1].k, Kind.FULL)
            if bridge not in available:
                break
            available.remove(bridge)
            last = joined.pop()
            square = Block(Span(last.q.start, square.q.stop), Span(last.k.start, square.k.stop), Kind.CAUSAL)
        joined.append(square)
    return sorted([*joined, *available, *partial], key=lambda b: (b.q, b.k))


def _join_side_by_side(blocks: list[Block], *, along_keys: bool) -> list[Block]:
    across = [(b.q, b.k) if along_keys else (b.k, b.q) for b in blocks]
    joined: dict[Span, list[Span]] = {}
    for fixed, moving in sorted(across):
        joined.setdefault(fixed, []).append(moving)
    result = []
    for fixed, spans in joined.items():
        for moving in join(spans):
            q, k = (fixed, moving) if along_keys else (moving, fixed)
            result.append(Block(q, k, Kind.FULL))
    return result
