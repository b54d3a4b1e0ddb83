"""One forward of a split decoder: what is true of the whole batch, and the rules that attention gets instead of masks.

A `Forward` is made from the whole inputs, agreed on by all ranks, and is frozen. It reaches the attention modules in
the data: transformers builds its masks through a registered function, ours answers with a `BoundRule`, and that rides
through the layers as their `attention_mask`, through activation checkpointing and to the recomputation in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from longspan.comm import ContextParallel
from longspan.layout import Span
from longspan.prefix_tree import PrefixTree
from longspan.rule import Rule

HIDDEN = -1e4  # an additive mask's value from which on a key weighs exactly nothing


class MaskTouched(AttributeError, ValueError):
    """A model works on what stands for its mask. An AttributeError for whoever only asks, a refusal for the caller."""


class LazyMask:
    """A mask of the whole sequence that the model above the decoder asked transformers for: the request, and not yet
    the tensor. The decoder's boundary turns it into rules."""

    def __init__(self, original: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.original = original
        self.arguments = arguments  # of the mask function that transformers called

    def tensor(self) -> Any:
        """What the plain model gets (a tensor, or None where its attention needs none)."""
        return self.original(**self.arguments)

    def __getattr__(self, name: str) -> Any:
        raise MaskTouched(
            f"this model works on its attention mask itself (it asked for {name!r}), and under context parallelism "
            "there is none; it is not supported"
        )


class Given:
    """A mask that came with the call instead of being made in the decoder: its rules, one per batch row, and how the
    plain model's own is had. (Not a dataclass: see `Forward`.)"""

    def __init__(self, rules: tuple[Rule, ...], make_mask: Callable[[], Any]) -> None:
        self.rules, self.make_mask = rules, make_mask


class Forward:
    """A whole batch, described: [B, S] tokens, which of them are real, where documents begin, or which prefix tree the
    row is. Never changed once made.

    Not a dataclass: FSDP2 copies the dataclasses among a layer's arguments, and this must stay one object.
    """

    def __init__(
        self,
        cp: ContextParallel,
        *,
        batch: int,
        visible: Tensor | None,
        documents: tuple[tuple[int, ...], ...],
        given: Mapping[str | None, Given],
        scheme: str,
        kernel: str,
        stages: int | None,
        tree: PrefixTree | None = None,
    ) -> None:
        self.cp = cp  # bound to S
        self.batch = batch
        self.visible = visible  # bool [B, S], None where all tokens are real
        self.documents = documents  # first positions per batch row; () is one document
        self.tree = tree  # of every batch row; then there are no documents
        self.given = given  # masks that came with the call, by layer type; None: one for all layers
        self.scheme, self.kernel, self.stages = scheme, kernel, stages
        self.seen: set[int] = set()  # ids of attention modules that attended

    @property
    def length(self) -> int:
        return self.cp.bound.length

    @property
    def idle(self) -> bool:
        """Whether this rank owns no row. It then runs one row that counts nowhere, since models reshape with -1 and
        cannot take none, and joins every exchange with no rows at all."""
        return self.cp.bound.rows(self.cp.rank) == 0

    @property
    def model_rows(self) -> int:
        """Rows that go through the layers here."""
        return max(1, self.cp.bound.rows(self.cp.rank))

    def given_mask(self, layer_type: str | None) -> BoundRule:
        """The mask that came with the call for layers of a type."""
        mask = self.given[layer_type]
        return BoundRule(self, lambda: arranged(mask.rules, (), self.tree), mask.make_mask, given=True)

    def rules(self, mask_function: Callable[..., Any]) -> tuple[Rule, ...]:
        """The Rules, one per batch row, of a mask function that transformers composed in the decoder, where it knows
        neither padding nor documents."""
        return arranged(make_rules(mask_function, self.batch, self.length, self.visible), self.documents, self.tree)


class BoundRule:
    """What a layer's attention may see in this forward. Stands where transformers expects a mask."""

    def __init__(
        self,
        forward: Forward,
        make_rules: Callable[[], tuple[Rule, ...]],
        make_mask: Callable[[], Any],
        *,
        given: bool = False,
    ) -> None:
        self.forward = forward
        self._make_rules = make_rules
        self.given = given  # used as it is by every layer, windows or not, as transformers uses such masks
        self._make_mask = make_mask

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Per batch row. Made when first looked at: models also ask for masks that none of their layers uses."""
        return self._make_rules()

    @cached_property
    def whole_mask(self) -> Any:
        """The model's own mask of the whole sequence, for kernel="model"; made once for all layers that share it."""
        return self._make_mask()

    @cached_property
    def pairs(self) -> int:
        """Visible pairs of the whole sequence, summed over batch rows, per head."""
        everything = Span(0, self.forward.length)
        return sum(rule.pairs(everything, everything) for rule in self.rules)

    def __getattr__(self, name: str) -> Any:
        raise MaskTouched(
            f"this model works on its attention mask itself (it asked for {name!r}), and under context parallelism "
            "there is none; it is not supported"
        )


def arranged(
    rules: tuple[Rule, ...], documents: tuple[tuple[int, ...], ...], tree: PrefixTree | None
) -> tuple[Rule, ...]:
    """Rules of sequences, one per batch row, as they are in rows of documents, or of a prefix tree. Raises ValueError
    for rules that a tree cannot have."""
    if tree is not None:
        if not all(bends(rule) for rule in rules):
            raise ValueError(
                "a mask that is more than causal, windows and chunks cannot follow the paths of a prefix tree"
            )
        return tuple(rule.branched(tree.subtrees) for rule in rules)
    return tuple(rule.packed(starts) for rule, starts in zip(rules, documents)) if documents else rules


def bends(rule: Rule) -> bool:
    """Whether a sequence's rule means the same along the paths of a prefix tree: it is causal, with windows or chunks
    and nothing else."""
    beside = replace(rule, ahead=0, behind=None, chunk_size=None, chunk_origin=0)
    return rule.ahead == 0 and beside == Rule.causal()


def document_starts(position_ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """Where packed documents begin in each row of whole position_ids [B, S]: wherever a position does not follow the
    one before it, as transformers reads it. Rows with one document give ()."""
    breaks = (position_ids[:, 1:] - position_ids[:, :-1] != 1).cpu()
    rows = []
    for row in breaks:
        starts = (row.nonzero()[:, 0] + 1).tolist()
        rows.append((0, *starts) if starts else ())
    return tuple(rows)


def make_rules(mask_function: Callable[..., Any], batch: int, length: int, visible: Tensor | None) -> tuple[Rule, ...]:
    """The Rules, one per batch row, of a mask function that transformers composed, and of real keys [B, S] (None: all).
    Raises ValueError for functions that look something up in tensors that are not whole."""
    rules = tuple(_translate(Rule.bidirectional(), mask_function, row, length) for row in range(batch))
    if visible is None:
        return rules
    return tuple(rule.padded(flags) for rule, flags in zip(rules, visible.cpu().numpy()))


def lazy_rules(mask: LazyMask, batch: int, length: int) -> tuple[Rule, ...]:
    """The Rules of a mask that was asked for above the decoder, on whole tensors."""
    asked = mask.arguments
    sizes = asked["batch_size"], asked["q_length"], asked["kv_length"]
    if sizes != (batch, length, length) or asked.get("q_offset", 0) or asked.get("kv_offset", 0):
        raise ValueError(
            f"a mask of {sizes[0]} x {sizes[1]} queries x {sizes[2]} keys was made for a batch of {(batch, length)}; "
            "cross-attention and caches are not supported under context parallelism"
        )
    visible = asked.get("attention_mask")
    return make_rules(asked["mask_function"], batch, length, None if visible is None else visible.bool())


def tensor_rules(mask: Tensor, batch: int, length: int) -> tuple[Rule, ...]:
    """The Rules of a whole 4-D mask, [B or 1, 1, S, S], bool (True: seen) or additive (0: seen, very negative: not).

    Documents under a causal mask, with keys that nobody sees, become structure; any other pattern is looked up.
    Raises ValueError for masks that differ per head, hold biases, or let a token be seen that sees nothing itself.
    """
    shape = tuple(mask.shape)
    if mask.ndim != 4 or shape[0] not in (1, batch) or shape[2:] != (length, length):
        raise ValueError(f"attention_mask is {shape}, the batch {(batch, length)}; a whole mask is [B or 1, 1, S, S]")
    if shape[1] != 1:
        raise ValueError(f"attention_mask of shape {shape} differs per head, which is not supported")
    if mask.dtype is torch.bool:
        seen = mask[:, 0]
    elif mask.is_floating_point():
        seen = mask[:, 0] == 0
        if not bool((seen | (mask[:, 0] <= HIDDEN)).all()):
            raise ValueError(
                f"attention_mask of shape {shape} holds biases: an additive mask may be 0 where a key is seen and must "
                f"be {HIDDEN:g} or less where it is not"
            )
    else:
        raise ValueError(f"attention_mask of shape {shape} is {mask.dtype}; a 4-D mask is bool or additive")
    rules = tuple(_square_rule(square) for square in seen)
    return rules * batch if len(rules) < batch else rules


def _square_rule(seen: Tensor) -> Rule:
    """The Rule of one row's mask, bool [S, S]."""
    keys = seen.any(0)
    astray = keys & ~seen.any(1)
    if bool(astray.any()):
        raise ValueError(
            f"attention_mask hides every key from token {int(astray.nonzero()[0])}, which others see: attention over "
            "nothing means something else to every attention function"
        )
    order = keys.nonzero()[:, 0]
    starts = order[1:][~seen[order[1:], order[:-1]]]
    rule = Rule.causal().packed(starts.tolist()).padded(keys)
    positions = torch.arange(seen.shape[0], device=seen.device)
    if torch.equal(rule.mask(positions, positions), seen):
        return rule
    copies = {seen.device: seen}

    def looked_up(q: Tensor, k: Tensor) -> Tensor:
        if q.device not in copies:
            copies[q.device] = seen.to(q.device)
        return copies[q.device][q, k]

    return Rule.bidirectional().padded(keys).where(looked_up)


def _made_by(function: Callable[..., Any], maker: Callable[..., Any]) -> bool:
    """Whether `function` is the closure that `maker` returns."""
    return (
        getattr(function, "__module__", None) == maker.__module__
        and getattr(function, "__qualname__", "").split(".<locals>")[0] == maker.__qualname__
        and ".<locals>" in function.__qualname__
    )


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))


def _translate(rule: Rule, function: Callable[..., Any], row: int, length: int) -> Rule:
    """`rule` and what `function` adds for batch row `row`. Known compositions become structure; any other function of
    the indices becomes an index condition, unless it looks something up in a tensor that is not whole."""
    if function is masking_utils.causal_mask_function:
        return rule.ahead_at_most(0)
    if function is masking_utils.bidirectional_mask_function:
        return rule
    captured = _captured(function) if hasattr(function, "__code__") else {}
    if _made_by(function, masking_utils.and_masks):
        # Documents first, since what is said of positions within them can be read only then; unions before distances.
        first = (masking_utils.packed_sequence_mask_function, masking_utils.or_masks)
        for part in sorted(captured["mask_functions"], key=lambda part: [not _made_by(part, each) for each in first]):
            rule = _translate(rule, part, row, length)
        return rule
    if _made_by(function, masking_utils.or_masks):
        joined = _joined(rule, captured["mask_functions"], row, length)
        if joined is not None:
            return joined
    if _made_by(function, masking_utils.sliding_window_overlay):
        return rule.behind_at_most(int(captured["sliding_window"]) - 1)
    if _made_by(function, masking_utils.sliding_window_bidirectional_overlay):
        return rule.windowed(int(captured["sliding_window"]) + 1)
    if _made_by(function, masking_utils.chunked_overlay):
        return rule.chunked(int(captured["chunk_size"]), int(captured["left_padding"][row]))
    if _made_by(function, masking_utils.packed_sequence_mask_function):
        sequence = captured["packed_sequence_mask"][row]
        if sequence.shape[-1] == length and bool((sequence.diff() >= 0).all()):
            return rule.packed((sequence.diff().nonzero()[:, 0] + 1).tolist())
    if _made_by(function, masking_utils.remap_positions_for_packed_sequence):
        positions, inner = captured["position_ids"][row], captured["mask_function"]
        starts = document_starts(positions[None])[0]
        from_zero = not bool(positions[list(starts or (0,))].any())
        # Within a document positions go up by one: what looks at distances, or counts from 0, says the same of rows.
        if set(starts) <= set(rule.document_starts) and _of_distance(inner, row, from_zero):
            return _translate(rule, inner, row, length)
    _refuse_local_tensors(function, length)
    home = next((tensor.device for _, tensor in tensors_within(function, set()) if tensor.ndim), None)

    def index(q: Tensor, k: Tensor) -> Tensor:
        there = q.device if home is None else home  # where the tensors are that it looks things up in
        found = torch.as_tensor(function(row, 0, q.to(there), k.to(there)))
        return found.to(q.device).expand(torch.broadcast_shapes(q.shape, k.shape))

    return rule.where(index)


def _joined(rule: Rule, parts: tuple[Callable[..., Any], ...], row: int, length: int) -> Rule | None:
    """`rule`, which knows documents at most, and a union: distances, or blocks of tokens that see each other. None
    where that is no structure: other unions, blocks in several pieces."""
    documents = Rule.bidirectional().packed(rule.document_starts)
    if rule != documents or len(parts) != 2 or not _made_by(parts[1], masking_utils.blockwise_overlay):
        return None
    base = _translate(documents, parts[0], row, length)
    if replace(base, behind=None, ahead=None) != documents:
        return None
    blocks = _captured(parts[1])["block_sequence_ids"][row].cpu()
    if blocks.shape[-1] != length:
        return None
    edges = [0, *(blocks.diff().nonzero()[:, 0] + 1).tolist(), length]
    runs = [(int(blocks[start]), Span(start, stop)) for start, stop in zip(edges, edges[1:])]
    seen = [block for block, _ in runs if block >= 0]
    if len(seen) != len(set(seen)):
        return None
    return base.joined(span for block, span in runs if block >= 0)


def _of_distance(function: Callable[..., Any], row: int, from_zero: bool) -> bool:
    """Whether a mask function looks at q - k only, or (`from_zero`) at chunks counted from position 0."""
    if function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        return True
    if _made_by(function, masking_utils.and_masks):
        return all(_of_distance(part, row, from_zero) for part in _captured(function)["mask_functions"])
    if _made_by(function, masking_utils.chunked_overlay):
        return from_zero and int(_captured(function)["left_padding"][row]) == 0
    return any(
        _made_by(function, maker)
        for maker in (masking_utils.sliding_window_overlay, masking_utils.sliding_window_bidirectional_overlay)
    )


def _refuse_local_tensors(function: Callable[..., Any], length: int) -> None:
    for name, tensor in tensors_within(function, set()):
        if tensor.ndim and length not in tensor.shape:
            raise ValueError(
                f"the model's mask function {getattr(function, '__qualname__', function)} looks up {name} of shape "
                f"{tuple(tensor.shape)}, which does not cover the whole sequence of {length} tokens; such masks are "
                "not supported under context parallelism"
            )


def tensors_within(value: Any, visited: set[int], name: str = "") -> Iterable[tuple[str, Tensor]]:
    """All tensors that a function can look things up in, with the names they go by."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_within(item, visited, name)
    elif isinstance(value, partial):
        yield from tensors_within([value.func, *value.args, *value.keywords.values()], visited, name)
    elif callable(value) and hasattr(value, "__code__"):
        for key, item in _captured(value).items():
            yield from tensors_within(item, visited, key)
        yield from tensors_within(list(value.__defaults__ or ()), visited, name)
    elif callable(value) and not isinstance(value, type):
        owner = getattr(value, "__self__", value)  # a method's, or an object that is called itself
        inside = getattr(owner, "__dict__", {}).values()
        yield from tensors_within([getattr(value, "__func__", None), *inside], visited, name)
