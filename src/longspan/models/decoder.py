"""The decoder boundary: whole tensors in, this rank's rows through the layers, whole hidden states out.

Whatever stands on top (classification, reward, token heads, a vision tower below) sees whole tensors and works
unmodified. Every per-token argument is cut by the one layout; positions are made on the whole sequence first; the
2-D mask stays whole, as the mask hook needs it so, and keeps transformers from looking for packing in shards.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm import ContextParallel
from longspan.models.forward import Forward, document_starts
from longspan.models.hooks import ACTIVE

# Arguments with a token dimension, and which it is.
PER_TOKEN = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,
    "token_type_ids": 1,
    "mm_token_type_ids": 1,
    "per_layer_inputs": 1,
}
CACHES = ("cache", "past_key_values")
WHOLE_OUTPUTS = ("last_hidden_state", "hidden_states", "router_logits")
SHORT_PIECE = 64  # mean rows of a document per rank, below which layout="auto" does not cut every document
REQUEST = "longspan_request"
STATE = "_longspan"
PLAIN = "_longspan_plain_forward"


@dataclass
class State:
    """What parallelize() decided for a model, and its last forward."""

    cp: ContextParallel
    scheme: str
    layout: str
    kernel: str
    stages: int | None
    logits: str
    backend: str  # the hook's name: "longspan_sdpa"
    original_backend: str
    suspended: bool = False
    last: dict[str, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return replace(self, last=None)  # process groups cannot be copied: a copied model uses the same one


@contextmanager
def plainly(state: State) -> Iterator[None]:
    """Inside the block the decoder runs whole."""
    before, state.suspended = state.suspended, True
    try:
        yield
    finally:
        state.suspended = before


class Request:
    """What a causal-LM head asks of the decoder: its hidden states local, and its own checks agreed on together with
    the decoder's. The rest comes back in it. (Not a dataclass: see `Forward`.)"""

    def __init__(self, inputs: Mapping[str, Any], check: Callable[[int, int], None]) -> None:
        self.inputs = inputs
        self.check = check  # (batch, length)
        self.forward: Forward | None = None
        self.hidden: Tensor | None = None
        self.output_class: Any = None


def parameter_names(module: nn.Module) -> set[str]:
    """Names of the parameters of a module's forward."""
    return set(inspect.signature(module.forward).parameters)


def call_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, those left out not included."""
    bound = inspect.signature(function).bind_partial(*args, **kwargs)
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise ValueError(f"longspan needs named arguments; {len(value)} extra positional ones were given")
        else:
            arguments[name] = value
    return arguments


def brings_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether this call goes on from a cache, as in generation."""
    return any(arguments.get(name) is not None for name in CACHES)


def sizes(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Batch and length of a whole batch. Raises ValueError unless one of input_ids and inputs_embeds is given."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    whole: Tensor = ids if ids is not None else embeds  # type: ignore[assignment]
    if whole.ndim != (2 if ids is not None else 3):
        raise ValueError(f"ids are [batch, length], embeddings [batch, length, width]; got {tuple(whole.shape)}")
    return whole.shape[0], whole.shape[1]


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that parallelize() replaced, bound to `module`."""
    return module.__dict__.get(PLAIN) or type(module).forward.__get__(module)


def install(module: nn.Module, forward: Callable[..., Any], state: State) -> None:
    """Puts `forward(module, ..)` in the place of the module's own, keeping its signature. As a bound method it moves
    along when the module is copied, to work on the copy."""
    if "forward" in module.__dict__:
        setattr(module, PLAIN, module.__dict__["forward"])
    wrapped = functools.wraps(type(module).forward)(forward)
    setattr(module, STATE, state)
    module.forward = types.MethodType(wrapped, module)  # type: ignore[method-assign]


def uninstall(module: nn.Module) -> None:
    """Undoes install()."""
    module.__dict__.pop("forward", None)
    plain = module.__dict__.pop(PLAIN, None)
    if plain is not None:
        module.forward = plain  # type: ignore[method-assign]
    module.__dict__.pop(STATE, None)


def split_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward that replaces the decoder's."""
    state: State = getattr(self, STATE)
    original = plain_forward(self)
    request: Request | None = kwargs.pop(REQUEST, None)
    arguments = call_arguments(original, args, kwargs)
    # use_cache=True alone is not generation: wrappers fill it in from the config.
    if state.suspended or (request is None and brings_cache(arguments)):
        return original(*args, **kwargs)
    inputs = {**arguments, **({} if request is None else request.inputs)}
    prepared = state.cp.agree(lambda: _prepare(self, state, arguments, request), inputs)
    local = _local_arguments(prepared, arguments)
    device = local["attention_mask"].device
    before = _random_state(device)
    token = ACTIVE.set(prepared)
    try:
        outputs = original(**local)
    finally:
        ACTIVE.reset(token)
    _check_attention_ran(self, prepared)
    if not torch.equal(before, _random_state(device)):
        raise ValueError(
            f"{type(self).__name__} drew random numbers (dropout, router jitter, layer drop): what they fall on "
            "depends on the split, so no rank count would equal another; set the config's dropout and jitter to 0"
        )
    traffic = prepared.cp.traffic
    state.last = {
        "tokens": prepared.batch * prepared.cp.bound.rows(prepared.cp.rank),
        "pairs": traffic.pairs,
        "layout": prepared.cp.bound.name,
        "traffic": traffic,
    }
    return _whole_outputs(prepared, outputs, request)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _prepare(decoder: nn.Module, state: State, arguments: dict[str, Any], request: Request | None) -> Forward:
    """Checks a whole batch and describes it. Everything that can be wrong raises here, before anything is sent."""
    batch, length = sizes(arguments)
    backend = decoder.config._attn_implementation  # type: ignore[union-attr]
    if backend != state.backend:
        raise ValueError(
            f"the attention backend was changed to {backend!r} after parallelize(); call unparallelize() first, "
            "change it, then parallelize() again"
        )
    if decoder.training:
        for name, module in decoder.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                raise ValueError(
                    f"dropout {module.p} in {name}: what drops depends on the split, so no rank count would equal "
                    "another; set the config's dropout probabilities to 0"
                )
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or name == "attention_mask":
            if isinstance(value, Mapping | list | tuple):
                raise ValueError(f"{name} of type {type(value).__name__} is not supported under context parallelism")
            continue
        if value.ndim == 0:
            continue
        if name not in PER_TOKEN:
            raise ValueError(
                f"the decoder was given {name} of shape {tuple(value.shape)}; longspan does not know whether it is per "
                f"token (known: {', '.join(PER_TOKEN)}, attention_mask)"
            )
        if value.shape[PER_TOKEN[name]] != length:
            raise ValueError(f"{name} has {value.shape[PER_TOKEN[name]]} tokens, the batch has {length}")
    visible = _visible(arguments.get("attention_mask"), batch, length)
    positions = arguments.get("position_ids")
    documents: tuple[tuple[int, ...], ...] = ()
    if positions is not None and arguments.get("attention_mask") is None:
        if positions.ndim > 2:
            raise ValueError("position_ids with several rows per token (multimodal) are not supported yet")
        # transformers reads packing from positions only where there is no 2-D mask.
        documents = document_starts(positions.expand(batch, -1) if positions.shape[0] != batch else positions)
    if request is not None:
        request.check(batch, length)
    boundaries = sorted({start for row in documents for start in row})
    name = state.layout
    if name == "auto":
        # Cutting every document pays only where the pieces are worth a kernel call.
        long_documents = len(boundaries) > 1 and length >= len(boundaries) * state.cp.size * SHORT_PIECE
        name = "per_document" if long_documents else "head_tail"
    return Forward(
        replace(state.cp, layout=name).bind(length, boundaries),
        batch=batch,
        visible=visible,
        documents=documents,
        scheme=state.scheme,
        kernel=state.kernel,
        stages=state.stages,
    )


def _visible(mask: Any, batch: int, length: int) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be [batch, length] under context parallelism, got {shape}")
    if tuple(mask.shape) != (batch, length):
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, the batch is {(batch, length)}")
    visible = mask.bool()
    return None if bool(visible.all()) else visible


def _local_arguments(prepared: Forward, arguments: dict[str, Any]) -> dict[str, Any]:
    """The decoder's arguments on this rank: per-token tensors cut, positions made, the mask whole."""
    cp = prepared.cp
    local = {k: v for k, v in arguments.items() if k not in CACHES and k != "cache_position"}
    whole = local["input_ids"] if local.get("input_ids") is not None else local["inputs_embeds"]
    if local.get("position_ids") is None:
        local["position_ids"] = torch.arange(prepared.length, device=whole.device)[None]
    for name, dim in PER_TOKEN.items():
        if isinstance(local.get(name), Tensor):
            local[name] = local[name].narrow(dim, 0, 1) if prepared.idle else cp.cut(local[name], dim)
    visible = prepared.visible
    if visible is None:
        visible = torch.ones(prepared.batch, prepared.length, dtype=torch.bool, device=whole.device)
    local["attention_mask"] = visible
    local["use_cache"] = False
    return local


def _check_attention_ran(decoder: nn.Module, prepared: Forward) -> None:
    layers = getattr(decoder.config, "num_hidden_layers", None)
    if not prepared.seen or (layers is not None and len(prepared.seen) != layers):
        raise ValueError(
            f"{len(prepared.seen)} attention modules of {type(decoder).__name__} went through longspan, but it has "
            f"{layers} layers: the others would have attended within a shard only; this model is not supported"
        )


def _whole_outputs(prepared: Forward, outputs: Any, request: Request | None) -> Any:
    """The decoder's outputs with every per-token tensor whole; last_hidden_state stays local for a causal-LM head."""
    if isinstance(outputs, tuple):
        raise ValueError("return_dict=False is not supported by the decoder under context parallelism")
    changed: dict[str, Any] = {}
    for name, value in outputs.items():
        if value is None or (name in CACHES):
            continue
        if name not in WHOLE_OUTPUTS:
            raise ValueError(f"longspan cannot make the decoder's output {name!r} whole")
        if name == "last_hidden_state" and request is not None:
            changed[name] = value[:, :0] if prepared.idle else value
        elif isinstance(value, tuple):
            changed[name] = tuple(None if each is None else _whole(prepared, each) for each in value)
        else:
            changed[name] = _whole(prepared, value)
    whole = type(outputs)(**changed)
    if request is not None:
        request.forward, request.hidden = prepared, whole.last_hidden_state
    return whole


def _whole(prepared: Forward, local: Tensor) -> Tensor:
    """[B, rows, ..] or, as routers give them, [B * rows, ..], gathered to whole in the same form."""
    rows = prepared.model_rows
    if local.ndim >= 3 and local.shape[:2] == (prepared.batch, rows):
        return prepared.cp.gather(local[:, :0] if prepared.idle else local, 1)
    if local.ndim >= 1 and local.shape[0] == prepared.batch * rows:
        by_row = local.unflatten(0, (prepared.batch, rows))
        return prepared.cp.gather(by_row[:, :0] if prepared.idle else by_row, 1).flatten(0, 1)
    raise ValueError(f"an output of shape {tuple(local.shape)} is not {prepared.batch} x {rows} rows")
