"""Many token sequences that share prefixes, as one row in which every shared token stands once.

A prefix tree is a trie of token runs. Its nodes are laid out depth-first, a node's own tokens before its children's and
children in the order in which they were first seen, so that every subtree is contiguous. A token's row is its index in
that layout; its place is its index along the path from the root, which is what it was in its sequence. So a sequence's
rows ascend, and `positions[rows[i]]` is 0, 1, 2, ..

Causal attention along the paths is each sequence's own causal attention: `Rule.causal().branched(tree.subtrees)`. The
row has `positions` for position ids; results per row are results per token by `tree.rows`, and a gradient that goes
back through such an index adds up over the sequences that share the token.

Several first tokens make several trees, side by side in the row. A sequence that occurs twice, or is a prefix of
another, adds no rows. (Packing as in PrefixGrouper, Liu et al., 2025, for one level, and OpenPipe's ART for trees.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.layout import Span

Integers = NDArray[np.int64]

# What one more block of attention costs (its call, and the merge of its result), in tokens' worth of the rest of a
# layer, forward and backward. Of accelerators an estimate: some 50 us against 1.5 us per token for 8B parameters at 400
# TFLOP/s. On CPUs 2 to 9 were measured at width 256 (benches/prefix.py --fit), and wider layers make it less.
BLOCK_COST = 32
CPU_BLOCK_COST = 4


class Node(NamedTuple):
    """A run of tokens that belong together: `span` are its own rows, its subtree is rows span.start .. stop - 1,
    `place` is its first token's index along the path, `level` the number of nodes above it; `parent` is -1 for a
    root."""

    span: Span
    stop: int
    parent: int
    place: int
    level: int


class Work(NamedTuple):
    """What a causal forward of one row computes: tokens, visible pairs per head and layer, and at most how many blocks
    of attention."""

    tokens: int
    pairs: int
    blocks: int


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The row. `tokens` and `positions` are int64 [rows]; `ends` are the nodes at which the sequences end."""

    tokens: Integers
    positions: Integers
    nodes: tuple[Node, ...]
    ends: tuple[int, ...]

    @property
    def subtrees(self) -> tuple[Span, ...]:
        """One per node, as `Rule.branched` takes them."""
        return tuple(Span(node.span.start, node.stop) for node in self.nodes)

    @cached_property
    def rows(self) -> tuple[Integers, ...]:
        """Per sequence, the row of each of its tokens: int64 [its length], ascending. Equal sequences share one."""
        paths = {end: self._path(end) for end in set(self.ends)}
        return tuple(paths[end] for end in self.ends)

    def _path(self, node: int) -> Integers:
        pieces = []
        while node >= 0:
            span = self.nodes[node].span
            pieces.append(np.arange(span.start, span.stop, dtype=np.int64))
            node = self.nodes[node].parent
        return np.concatenate(pieces[::-1])

    @property
    def shared(self) -> Work:
        """Of the tree."""
        blocks = sum(node.level + 1 for node in self.nodes)
        return Work(len(self.tokens), int((self.positions + 1).sum()), blocks)

    @property
    def flat(self) -> Work:
        """Of the same sequences one by one."""
        lengths = [self.nodes[end].place + self.nodes[end].span.size for end in self.ends]
        return Work(sum(lengths), sum(length * (length + 1) // 2 for length in lengths), len(lengths))


def block_cost_on(device_type: str) -> int:
    """The cost of a block on a device ("cpu", "cuda"), in tokens."""
    return CPU_BLOCK_COST if device_type == "cpu" else BLOCK_COST


def worth_sharing(tree: PrefixTree, *, pair_cost: float = 0.0, block_cost: float = BLOCK_COST) -> bool:
    """Whether the tree is predicted to be faster than its sequences one by one.

    Costs are in tokens' worth of a layer's work outside attention: `pair_cost` of a visible pair, 1 / (6 hidden) in a
    dense transformer (4 hidden against 24 hidden^2 operations; at 0 the saving in attention is left out, which errs
    towards False), `block_cost` of a block.
    """
    saved = [flat - shared for flat, shared in zip(tree.flat, tree.shared)]
    return saved[0] + pair_cost * saved[1] + block_cost * saved[2] > 0


def prefix_tree(sequences: Sequence[Any], *, block_cost: float = 0.0) -> PrefixTree:
    """The tree of token sequences: integers [length] each, as lists, arrays or CPU tensors.

    `block_cost`: a run is shared by n branches only if the n - 1 copies that this saves have more than n * block_cost
    tokens, so that sequences with nothing but a first token in common are left apart. With 0 everything is shared.

    Comparing takes time in proportion to all tokens. Raises ValueError for no sequences, and for one that is empty.
    """
    if not len(sequences):
        raise ValueError("a prefix tree needs at least one sequence")
    every = [_checked(sequence, i) for i, sequence in enumerate(sequences)]
    nodes: list[Node] = []
    runs: list[Integers] = []
    ends = [-1] * len(every)
    reached = 0
    # Depth-first: sequences that agree up to `place`, and beyond; their tokens before `place` are in `parent`'s path.
    waiting = [(group, 0, -1) for group in reversed(_branches(every, range(len(every)), 0))]
    while waiting:
        group, place, parent = waiting.pop()
        stop = _agree_up_to([every[i] for i in group], place)
        branches = _branches(every, group, stop)
        saved = (len(branches) - 1) * (stop - place)
        if len(branches) > 1 and saved <= block_cost * len(branches):
            waiting += [(branch, place, parent) for branch in reversed(branches)]
            continue
        span = Span(reached, reached + stop - place)
        reached = span.stop
        nodes.append(Node(span, span.stop, parent, place, nodes[parent].level + 1 if parent >= 0 else 0))
        runs.append(every[group[0]][place:stop])
        for branch in reversed(branches):
            if len(every[branch[0]]) > stop:
                waiting.append((branch, stop, len(nodes) - 1))
                continue
            for i in branch:
                ends[i] = len(nodes) - 1
    for i in reversed(range(len(nodes))):
        parent = nodes[i].parent
        if parent >= 0:
            nodes[parent] = nodes[parent]._replace(stop=max(nodes[parent].stop, nodes[i].stop))
    positions = [np.arange(node.place, node.place + node.span.size, dtype=np.int64) for node in nodes]
    return PrefixTree(np.concatenate(runs), np.concatenate(positions), tuple(nodes), tuple(ends))


def _checked(sequence: Any, i: int) -> Integers:
    array = np.asarray(sequence)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"sequence {i} has shape {array.shape}; a sequence is [length], with one token at least")
    if array.dtype.kind not in "iu":
        raise ValueError(f"sequence {i} holds {array.dtype}; tokens are integers")
    return array.astype(np.int64)


def _agree_up_to(group: Sequence[Integers], start: int) -> int:
    """How far all agree, where they agree up to `start`."""
    stop = min(map(len, group))
    for other in group[1:]:
        differ = group[0][start:stop] != other[start:stop]
        if differ.any():
            stop = start + int(differ.argmax())
    return stop


def _branches(every: Sequence[Integers], group: Sequence[int], place: int) -> list[list[int]]:
    """The group by what comes at `place`, in the order first seen; those that end there are a branch too."""
    branches: dict[int | None, list[int]] = {}
    for i in group:
        branches.setdefault(int(every[i][place]) if len(every[i]) > place else None, []).append(i)
    return list(branches.values())
