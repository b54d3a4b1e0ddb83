"""Modules that number tokens themselves, from ids, masks or lengths: the positions of the BART, OPT and RoBERTa kin.

Shards cannot: a token's number depends on all before it. Inside a split forward such a module is given the whole batch,
and this rank's rows of what it returns go on. That costs its output for the whole sequence while the call lasts, on
every rank; only decoders that do not take the positions of a whole sequence from outside are run so.

They are known by their interface: a forward that is told how many tokens a cache holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longspan.models.forward import Forward

TOLD = {"cache_length", "past_key_values_length"}


def modules_of(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's modules that number tokens themselves."""
    return [m for m in decoder.modules() if m is not decoder and TOLD & set(inspect.signature(m.forward).parameters)]


@contextmanager
def on_whole_batches(decoder: nn.Module, prepared: Forward, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block the decoder's numbering modules get the whole batch of `arguments` and return this rank's rows.
    Where the caller gave positions, this rank's part of them is in the module's arguments, and it runs as it is."""
    length = prepared.length
    given = arguments.get("position_ids") is not None

    def widen(module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]] | None:
        if given:
            return None
        call = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        positions = call.pop("position_ids", None)
        whole = {name: _whole(module, name, value, prepared, arguments) for name, value in call.items()}
        if positions is not None:
            whole["position_ids"] = _whole_positions(module, positions, prepared)
        return (), whole

    def cut(module: nn.Module, args: Any, out: Any) -> Any:
        if given:
            return out
        if not isinstance(out, Tensor) or out.ndim < 2 or out.shape[-2] != length:
            shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"{type(module).__name__} made {shape} of {length} tokens; it is not supported")
        return out.narrow(-2, 0, 1) if prepared.idle else prepared.cp.cut(out, -2)

    with ExitStack() as stack:
        for module in modules_of(decoder):
            stack.callback(module.register_forward_pre_hook(widen, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(cut).remove)
        yield


def _whole_positions(module: nn.Module, positions: Tensor, prepared: Forward) -> Tensor:
    """Positions that the decoder made: of the whole batch already (from its whole mask), or counted on its rows."""
    rows, length = prepared.model_rows, prepared.length
    if positions.shape[-1] == length != rows:
        return positions
    if positions.shape[-1] != rows or not bool((positions == torch.arange(rows, device=positions.device)).all()):
        raise ValueError(f"{type(module).__name__} is given positions that longspan cannot make whole; not supported")
    counted = torch.arange(length, dtype=positions.dtype, device=positions.device)
    return counted.expand(*positions.shape[:-1], length)


def _whole(module: nn.Module, name: str, value: Any, prepared: Forward, arguments: Mapping[str, Any]) -> Any:
    """The whole-batch counterpart of an argument of a numbering module."""
    rows, length = prepared.model_rows, prepared.length
    if isinstance(value, tuple):  # a shape
        return type(value)((value[0], length, *value[2:])) if value[1:2] == (rows,) else value
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] == length:
        return value
    whole = arguments.get(name)
    if whole is None and name.startswith("input"):
        # Ids, or embeddings of which only the shape is looked at, under whatever name.
        ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
        whole = embeds if value.ndim == 3 else ids if embeds is None else embeds[..., -1]
    if not isinstance(whole, Tensor) or whole.ndim != value.ndim:
        raise ValueError(
            f"{type(module).__name__} numbers tokens from {name}, which longspan cannot make whole; it is not supported"
        )
    return whole
