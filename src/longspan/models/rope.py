"""RoPE whose angles depend on the longest position of the whole sequence ("dynamic", "longrope").

Such a module looks at the largest position it is given. Inside a split forward it is given one more token, at the
largest position that any rank has; that token's angles are dropped again. So nothing whole is computed, and what the
module keeps between calls is what the plain model's keeps. This costs one tiny collective per call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from longspan.comm import ContextParallel

WHOLE_TYPES = ("dynamic", "longrope")


def modules_of(decoder: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder's RoPE modules that look at the longest position, with their paths."""
    found = []
    for path, module in decoder.named_modules():
        kinds = getattr(module, "rope_type", None)
        if any(kind in WHOLE_TYPES for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,))):
            found.append((path, module))
    return found


def check(decoder: Any) -> None:
    """Raises ValueError where RoPE of such a type is configured, but its module would be out of reach of
    `whole_length`: of a kind of its own, or inside a layer that the backward may run again."""
    config = decoder.config
    wanted = sorted(types_in(config) & set(WHOLE_TYPES))
    modules = modules_of(decoder)
    if wanted and not modules:
        raise ValueError(f"{type(decoder).__name__} has RoPE of type {wanted[0]!r} in a form longspan does not know")
    layers = [path for path, module in decoder.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    for path, module in modules:
        inside = any(path.startswith(layer + ".") for layer in layers)
        if inside or "position_ids" not in inspect.signature(module.forward).parameters:
            raise ValueError(
                f"{path} of {type(decoder).__name__} has RoPE of a type whose angles depend on the longest position of "
                "the whole sequence, inside a layer or without position_ids; it is not supported"
            )


def types_in(config: Any) -> set[str]:
    """All RoPE types a config names."""
    found: set[str] = set()
    for source in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        for entry in [source, *(source.values() if isinstance(source, dict) else ())]:
            if isinstance(entry, dict):
                found |= {str(entry[key]) for key in ("rope_type", "type") if key in entry}
    return found


@contextmanager
def whole_length(decoder: nn.Module, cp: ContextParallel) -> Iterator[None]:
    """Inside the block the decoder's RoPE modules see the longest position of the whole sequence."""

    def lengthen(module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
        call = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        positions: Tensor = call["position_ids"]
        longest = max(each[0] for each in cp.all_gather_integers([int(positions.max())]))
        last = positions.new_full((*positions.shape[:-1], 1), longest)
        return (), {**call, "position_ids": torch.cat([positions, last], -1)}

    def shorten(module: nn.Module, args: Any, out: Any) -> Any:
        return tuple(each[..., :-1, :] for each in out) if isinstance(out, tuple) else out[..., :-1, :]

    with ExitStack() as stack:
        for _, module in modules_of(decoder):
            stack.callback(module.register_forward_pre_hook(lengthen, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(shorten).remove)
        yield


@contextmanager
def unchanged(decoder: nn.Module) -> Iterator[None]:
    """What the decoder's RoPE modules keep between calls is afterwards what it was before the block."""
    kept = [
        (module, dict(vars(module)), {name: None if b is None else b.clone() for name, b in module._buffers.items()})
        for _, module in modules_of(decoder)
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).update(attributes)
            module._buffers.update(buffers)
