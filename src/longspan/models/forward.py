"""One forward of a split decoder: what is true of the whole batch, and the rules that attention gets instead of masks.

A `Forward` is made from the whole inputs, agreed on by all ranks, and is frozen. It reaches the attention modules in
the data: transformers builds its masks through a registered function, ours answers with a `BoundRule`, and that rides
through the layers as their `attention_mask`, through activation checkpointing and to the recomputation in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from longspan.comm import ContextParallel
from longspan.layout import Span
from longspan.rule import Rule


class Forward:
    """A whole batch, described: [B, S] tokens, which of them are real, where documents begin. Never changed once made.

    Not a dataclass: FSDP2 copies the dataclasses among a layer's arguments, and this must stay one object.
    """

    def __init__(
        self,
        cp: ContextParallel,
        *,
        batch: int,
        visible: Tensor | None,
        documents: tuple[tuple[int, ...], ...],
        scheme: str,
        kernel: str,
        stages: int | None,
    ) -> None:
        self.cp = cp  # bound to S
        self.batch = batch
        self.visible = visible  # bool [B, S], None where all tokens are real
        self.documents = documents  # first positions per batch row; () is one document
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

    @cached_property
    def visible_flags(self) -> list[Any]:
        return [None] * self.batch if self.visible is None else list(self.visible.cpu().numpy())


class BoundRule:
    """What a layer's attention may see in this forward. Stands where transformers expects a mask."""

    def __init__(self, forward: Forward, rules: tuple[Rule, ...], make_mask: Callable[[], Any]) -> None:
        self.forward = forward
        self.rules = rules  # per batch row
        self._make_mask = make_mask

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
        raise AttributeError(
            f"this model works on its attention mask itself (it asked for {name!r}), and under context parallelism "
            "there is none; it is not supported"
        )


def document_starts(position_ids: Tensor) -> tuple[tuple[int, ...], ...]:
    """Where packed documents begin in each row of whole position_ids [B, S]: wherever a position does not follow the
    one before it, as transformers reads it. Rows with one document give ()."""
    breaks = (position_ids[:, 1:] - position_ids[:, :-1] != 1).cpu()
    rows = []
    for row in breaks:
        starts = (row.nonzero()[:, 0] + 1).tolist()
        rows.append((0, *starts) if starts else ())
    return tuple(rows)


def make_rules(forward: Forward, mask_function: Callable[..., Any]) -> tuple[Rule, ...]:
    """The Rules, one per batch row, of a mask function that transformers composed."""
    rules = []
    for row in range(forward.batch):
        rule = _translate(Rule.bidirectional(), mask_function, row, forward.length)
        if forward.documents and forward.documents[row]:
            rule = rule.packed(forward.documents[row])
        flags = forward.visible_flags[row]
        rules.append(rule if flags is None else rule.padded(flags))
    return tuple(rules)


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
        for part in captured["mask_functions"]:
            rule = _translate(rule, part, row, length)
        return rule
    if _made_by(function, masking_utils.sliding_window_overlay):
        return rule.behind_at_most(int(captured["sliding_window"]) - 1)
    if _made_by(function, masking_utils.sliding_window_bidirectional_overlay):
        return rule.windowed(int(captured["sliding_window"]) + 1)
    if _made_by(function, masking_utils.chunked_overlay):
        return rule.chunked(int(captured["chunk_size"]), int(captured["left_padding"][row]))
    _refuse_local_tensors(function, length)

    def index(q: Tensor, k: Tensor) -> Tensor:
        return torch.as_tensor(function(row, 0, q, k)).expand(torch.broadcast_shapes(q.shape, k.shape))

    return rule.where(index)


def _refuse_local_tensors(function: Callable[..., Any], length: int) -> None:
    for name, tensor in _tensors_within(function, set()):
        if tensor.ndim and length not in tensor.shape:
            raise ValueError(
                f"the model's mask function {getattr(function, '__qualname__', function)} looks up {name} of shape "
                f"{tuple(tensor.shape)}, which does not cover the whole sequence of {length} tokens; such masks are "
                "not supported under context parallelism"
            )


def _tensors_within(value: Any, visited: set[int], name: str = "") -> Iterable[tuple[str, Tensor]]:
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_within(item, visited, name)
    elif callable(value) and hasattr(value, "__code__"):
        for key, item in _captured(value).items():
            yield from _tensors_within(item, visited, key)
