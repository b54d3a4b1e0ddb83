"""The two functions that transformers calls by name: one makes masks, one computes attention.

They are registered once per original backend as `longspan_<backend>` ("longspan_sdpa"), so the name tells what to
delegate to. Outside a split forward both hand everything to that backend unchanged: `generate()`, forwards with a
cache and recomputation of such forwards are the plain model's, bit for bit.

Inside a split forward the mask function returns a BoundRule. It has no argument that could carry the Forward (masks
are made from configs, and models reshape the 2-D mask on its way), so that one hand-over goes through a context
variable, set around the decoder's forward only. Attention never reads the Forward from there: it comes with the rule.

Some models make the decoder's masks above it (image blocks that see each other). While such a model's forward runs,
another context variable lets the mask function answer with the request itself, a LazyMask: the decoder's boundary binds
it, or has the tensor made where the decoder runs whole after all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    eager_mask,
    packed_sequence_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longspan.attention import attend
from longspan.attention.ulysses import HeadSplit, own_heads, split_heads, to_heads
from longspan.models.forward import BoundRule, Forward, LazyMask

PREFIX = "longspan_"
ACTIVE: ContextVar[Forward | None] = ContextVar("longspan_forward", default=None)
LAZY: ContextVar[list[LazyMask] | None] = ContextVar("longspan_lazy_masks", default=None)
COUNTED: ContextVar[list[int] | None] = ContextVar("longspan_counted", default=None)

# Keywords that say nothing about which scores count, or repeat what the rule says already.
NEUTRAL = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "is_causal", "return_dict", "labels",
    "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits", "layer_idx",
    "logits_to_keep", "shift_labels", "padding_mask", "cache", "past_key_values",
}  # fmt: skip
SINKS = ("s_aux", "sinks")


def register(original: str) -> str:
    """Registers the pair of hooks over the backend `original` ("sdpa", "eager", ...); returns its name."""
    name = original if original.startswith(PREFIX) else PREFIX + original
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _attention_over(name.removeprefix(PREFIX)))
        AttentionMaskInterface.register(name, _mask_over(name.removeprefix(PREFIX)))
    return name


@contextmanager
def masks_later(on: bool = True) -> Iterator[list[LazyMask]]:
    """Inside the block, outside split forwards, masks that transformers is asked for are LazyMasks (with on=False: are
    made at once); the list holds all of them."""
    asked: list[LazyMask] = []
    token = LAZY.set(asked if on else None)
    try:
        yield asked
    finally:
        LAZY.reset(token)


@contextmanager
def attention_counted() -> Iterator[list[int]]:
    """Inside the block, outside split forwards, the ids of modules that call for attention are collected."""
    calls: list[int] = []
    token = COUNTED.set(calls)
    try:
        yield calls
    finally:
        COUNTED.reset(token)


def original_attention(module: nn.Module, backend: str) -> Callable[..., Any]:
    """The backend's own attention function; "eager" is each modeling file's own."""
    if backend == "eager":
        file = sys.modules[type(module).__module__]
        if not hasattr(file, "eager_attention_forward"):
            raise ValueError(f"{type(module).__name__} has no eager attention function to delegate to")
        return file.eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[backend]


def _mask_over(backend: str) -> Callable[..., Any]:
    @torch._dynamo.disable
    def longspan_mask(*args: Any, **kwargs: Any) -> Any:
        original = ALL_MASK_ATTENTION_FUNCTIONS[backend]
        forward, later = ACTIVE.get(), LAZY.get()
        if forward is None and later is None:
            return original(*args, **kwargs)
        if args or "mask_function" not in kwargs:
            raise ValueError("this version of transformers builds masks in a way longspan does not know")
        if forward is not None:
            return _bound_rule(forward, original, kwargs)
        mask = LazyMask(original, kwargs)
        if later is not None:
            later.append(mask)
        return mask

    return longspan_mask


def _bound_rule(forward: Forward, original: Callable[..., Any], kwargs: dict[str, Any]) -> BoundRule:
    if None in forward.given:
        return forward.given_mask(None)
    local = forward.model_rows
    q_length = kwargs["q_length"]
    if q_length != local or kwargs.get("q_offset", 0) or kwargs.get("kv_offset", 0):
        raise ValueError(
            f"a mask for {q_length} queries was asked for in a forward of {local} rows per rank; cross-attention and "
            "caches are not supported under context parallelism"
        )

    def make_mask() -> Any:
        if any(forward.documents) and original not in (sdpa_mask, eager_mask):
            raise ValueError(
                f"kernel='model' cannot tell packed documents to {original.__name__}; use kernel='flash', or load the "
                "model with attn_implementation='sdpa'"
            )
        function = kwargs["mask_function"]
        plain = {**kwargs, "q_length": forward.length, "kv_length": forward.length, "attention_mask": forward.visible}
        if any(forward.documents):
            ids = torch.zeros(forward.batch, forward.length, dtype=torch.int64, device=kwargs.get("device", "cpu"))
            for row, starts in enumerate(forward.documents):
                ids[row, list(starts)[1:]] = 1
            function = and_masks(function, packed_sequence_mask_function(ids.cumsum(-1)))
            plain["allow_is_causal_skip"] = False
        return original(**{**plain, "mask_function": function})

    return BoundRule(forward, lambda: forward.rules(kwargs["mask_function"]), make_mask)


def _attention_over(backend: str) -> Callable[..., Any]:
    @torch._dynamo.disable
    def longspan_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if not isinstance(attention_mask, BoundRule):
            if ACTIVE.get() is not None:
                raise ValueError(
                    f"{_name(module)} was given {type(attention_mask).__name__} instead of the mask that longspan "
                    "made: this model builds its own, which does not know of the split"
                )
            if isinstance(attention_mask, LazyMask):
                attention_mask = attention_mask.tensor()
            counted = COUNTED.get()
            if counted is not None:
                counted.append(id(module))
            plain = original_attention(module, backend)
            return plain(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        forward = attention_mask.forward
        options = _understood(module, attention_mask, kwargs)
        if backend != "eager":
            _check_causal(module, attention_mask, kwargs)
        forward.seen.add(id(module))
        if torch.is_autocast_enabled(query.device.type):
            # As torch's own attention does; RoPE may have widened queries and keys only.
            half = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(half), key.to(half), value.to(half)
        if forward.idle:
            query, key, value = query[:, :, :0], key[:, :, :0], value[:, :, :0]
        if forward.kernel == "model":
            plain = original_attention(module, backend)
            out = _model_attention(plain, module, query, key, value, attention_mask, dropout, scaling, kwargs)
        else:
            out = attend(
                query,
                key,
                value,
                cp=forward.cp,
                rule=attention_mask.rules,
                scheme=forward.scheme,
                kernel=forward.kernel,
                stages=forward.stages,
                scale=scaling,
                dropout=dropout,
                **options,
            )
        if forward.idle:
            out = F.pad(out, (0, 0, 0, 1))
        return out.transpose(1, 2).contiguous(), None

    return longspan_attention


def _name(module: nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if layer is None else f" of layer {layer}")


def _understood(module: nn.Module, bound: BoundRule, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of attend() that the model's keywords mean. Raises ValueError for one that nobody would honour."""
    options: dict[str, Any] = {}
    for key, value in kwargs.items():
        if key in NEUTRAL or value is None or value is False:
            continue
        if key == "softcap":
            options["softcap"] = float(value)
        elif key in SINKS:
            options["sinks"] = value
        elif key == "sliding_window" and bound.given:
            continue
        elif key == "sliding_window":
            reach = bound.rules[0].behind if bound.rules else value - 1
            if reach is None or reach + 1 != value:
                raise ValueError(
                    f"{_name(module)} asks for sliding_window={value}, but its mask allows "
                    f"{'any distance' if reach is None else f'{reach + 1} keys'}"
                )
        else:
            raise ValueError(f"{_name(module)} passes {key!r} to attention, which longspan does not support")
    sinks = getattr(module, "sinks", None)
    if isinstance(sinks, Tensor) and "sinks" not in options:
        raise ValueError(f"{_name(module)} has attention sinks but does not pass them to attention")
    return options


def _check_causal(module: nn.Module, bound: BoundRule, kwargs: dict[str, Any]) -> None:
    """Raises ValueError where a causal mask and a module that is not causal meet. Eager attention always gets the mask;
    others are left to know by themselves that a batch without padding is causal."""
    causal = kwargs.get("is_causal") if kwargs.get("is_causal") is not None else getattr(module, "is_causal", True)
    if causal is False and all(rule.ahead == 0 for rule in bound.rules):
        raise ValueError(
            f"{_name(module)} says is_causal=False, and its mask is causal: of a batch without padding the plain model "
            "makes no such mask, and every token would see every other; not supported"
        )


class _SomeHeads:
    """A view of an attention module whose per-head attributes are this rank's: original attention functions read
    `num_key_value_groups` and `sinks` from the module."""

    def __init__(self, module: nn.Module, sinks: Tensor | None) -> None:
        self._module = module
        self.num_key_value_groups = 1  # keys arrive repeated, one per query head
        if sinks is not None:
            self.sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _model_attention(
    plain: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bound: BoundRule,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """ulysses around the model's own attention function, with its own whole mask and keywords. [B, H, rows, Dv]"""
    if dropout:
        raise ValueError(f"{_name(module)} has attention dropout {dropout}, unlike any one rank's; set it to 0")
    forward = bound.forward
    cp = forward.cp
    split = split_heads(query.shape[1], key.shape[1], cp.size)
    q, k, v = to_heads(query, key, value, cp=cp, split=split, expand=True)
    kwargs = {name: _cut_heads(value, forward, split) if name in SINKS else value for name, value in kwargs.items()}
    sinks = getattr(module, "sinks", None)
    view = _SomeHeads(module, _cut_heads(sinks, forward, split) if isinstance(sinks, Tensor) else None)
    cp.traffic.pairs += bound.pairs * split.query[cp.rank].size / query.shape[1]
    if q.shape[1] == 0:
        return cp.to_rows(v, split.query)
    kwargs.pop("position_ids", None)  # this rank's; some backends would read packing from them
    out, _ = plain(view, q, k, v, bound.whole_mask, dropout=dropout, scaling=scaling, **kwargs)
    return cp.to_rows(out.transpose(1, 2), split.query)


def _cut_heads(per_head: Tensor | None, forward: Forward, split: HeadSplit) -> Tensor | None:
    return None if per_head is None else own_heads(per_head, cp=forward.cp, split=split)
