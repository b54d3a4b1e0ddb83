"""Attention calls inside a user's own model, sent through attend().

A planned module runs as it is written; while it runs, three kinds of calls go to `attend` instead:

    F.scaled_dot_product_attention   seen by a torch function mode, however it was imported
    flex_attention                   a plain Python function no mode sees: the names bound to it are bound to a router,
                                     which hands on everything that is not inside a split forward
    the module itself                where it makes neither call and is given q, k and v as its first arguments

Layout of q, k and v in all of them: [B, H, rows, D]. Masks are of the whole sequence and become Rules.

What a call belongs to is a `Call`, one per forward of a trunk. It is found by a context variable, which is set around
the trunk's forward only, or, where activation checkpointing runs a piece of that forward again in the backward, by the
autograd node that asks for it: nodes are numbered as they are made, so the node's number lies between the numbers at
the beginning and at the end of its forward. Several forwards may wait for their backward.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.overrides import TorchFunctionMode

from longspan.attention import attend
from longspan.comm import ContextParallel
from longspan.rule import Index, Rule

# Attention that goes neither through F.scaled_dot_product_attention nor flex_attention.
OTHER_ATTENTION: dict[Any, str] = {
    F.multi_head_attention_forward: "nn.MultiheadAttention",
    torch._native_multi_head_attention: "nn.MultiheadAttention",
    torch._transformer_encoder_layer_fwd: "nn.TransformerEncoderLayer",
    flex_operator: "flex_attention (kept under a name that longspan does not find)",
}


class Call:
    """One forward of a trunk: [batch, length] tokens and who holds which. (Not a dataclass: see `models.forward`.)"""

    def __init__(self, cp: ContextParallel, *, batch: int, kernel: str, stages: int | None) -> None:
        self.cp = cp  # bound to the length
        self.batch = batch
        self.kernel, self.stages = kernel, stages
        self.plain = False  # the trunk ran whole, as in `suspended`
        self.probe = False  # a short forward that only looks whether the plan is complete
        self.trace: dict[tuple[str, int], Tensor] | None = None  # of a probe: what went by, in order
        self.aranges: list[str] = []  # of a probe: where the trunk counted this rank's rows
        self.numbers = (0, 0)  # of the autograd nodes of this forward: from, to (exclusive)
        self._rules: list[tuple[Any, Rule | tuple[Rule, ...], Any]] = []

    @property
    def length(self) -> int:
        return self.cp.bound.length

    @property
    def idle(self) -> bool:
        """No row of the sequence is here; one row that counts nowhere runs in their place."""
        return self.cp.bound.rows(self.cp.rank) == 0

    @property
    def rows(self) -> int:
        """Rows that go through the trunk here."""
        return max(1, self.cp.bound.rows(self.cp.rank))

    def record(self, name: str, tensor: Tensor) -> None:
        """Keeps a tensor of a probe by where it was seen, and the how-manieth it was there."""
        if self.trace is not None:
            count = 0
            while (name, count) in self.trace:
                count += 1
            self.trace[name, count] = tensor.detach()

    def rules(self, key: Any, make: Callable[[], tuple[Rule | tuple[Rule, ...], Any]]) -> Rule | tuple[Rule, ...]:
        """The Rules of a whole mask, made once for all layers that share it. Index functions are compared by identity
        (plans are cached by them), so that equal masks must give the same ones."""
        for known, rules, _ in self._rules:
            if known == key:
                return rules
        rules, keep = make()
        self._rules.append((key, rules, keep))
        return rules


@dataclass
class Place:
    """Where the code runs at the moment: in the trunk (`name` is None) or in a planned attention module."""

    call: Call
    name: str | None = None
    scheme: str = "auto"
    stages: int | None = None
    attended: int = 0  # attention calls that went through attend


PLACE: ContextVar[Place | None] = ContextVar("longspan_place", default=None)


@contextmanager
def inside(place: Place) -> Iterator[None]:
    """Attention calls in the block belong to `place`."""
    watched = PLACE.get() is not None
    token = PLACE.set(place)
    try:
        if watched:
            yield
        else:
            with Watch():
                yield
    finally:
        PLACE.reset(token)


class Watch(TorchFunctionMode):
    """Sends SDPA calls to attend, refuses attention of other kinds, and notes where a probe counts rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = PLACE.get()
        if place is None:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return sdpa(place, *args, **kwargs)
        if func in OTHER_ATTENTION:
            raise ValueError(
                f"{place.name or 'the trunk'} calls {OTHER_ATTENTION[func]}, which longspan cannot send over ranks; "
                "call torch.nn.functional.scaled_dot_product_attention instead"
            )
        result = func(*args, **kwargs)
        if func is torch.arange and place.call.trace is not None and result.numel() == place.call.rows:
            place.call.aranges.append(_caller())
        return result


def _caller() -> str:
    """File and line of the model's code that is running."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "longspan.")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# -- which forward a recomputation belongs to ------------------------------------------------------------------


def node_number() -> int:
    """The number that the next autograd node of this thread gets."""
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view(0).grad_fn
    assert node is not None
    return node._sequence_nr()


def recomputed(calls: Sequence[weakref.ref[Call]], name: str) -> Call | None:
    """The forward that a piece of code, running in a backward, is run again for. None outside of a backward."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number = node._sequence_nr()
    for reference in calls:
        call = reference()
        if call is not None and call.numbers[0] <= number < call.numbers[1]:
            return call
    raise ValueError(
        f"{name} runs in a backward, and no forward of its trunk is known that it could belong to; checkpoints inside "
        "of reentrant checkpoints are not supported (use_reentrant=False is)"
    )


# -- the calls -------------------------------------------------------------------------------------------------


def sdpa(
    place: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention on this rank's rows, [B, H, rows, D]. `attn_mask`: bool, of the
    whole sequence: [S, S], [1, 1, S, S] or [B, 1, S, S]."""
    if attn_mask is not None and is_causal:
        raise ValueError(f"{place.name} gives attention both a mask and is_causal=True")
    rule: Rule | tuple[Rule, ...] = Rule.causal() if is_causal else Rule.bidirectional()
    if attn_mask is not None:
        rule = _rules_of_mask(place, attn_mask)
    return _attend(
        place, "scaled_dot_product_attention", query, key, value, rule=rule, scale=scale, dropout=dropout_p,
        grouped=enable_gqa,
    )  # fmt: skip


def flex(
    place: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Tensor:
    """torch's flex_attention on this rank's rows, [B, H, rows, D], with a block_mask of the whole sequence."""
    refused = {
        "score_mod": score_mod, "return_lse": return_lse, "return_aux": return_aux, "kernel_options": kernel_options
    }  # fmt: skip
    for name, given in refused.items():
        if given is not None and given is not False:
            raise ValueError(f"{place.name} gives flex_attention {name}, which longspan does not support")
    rule: Rule | tuple[Rule, ...] = Rule.bidirectional()
    if block_mask is not None:
        rule = _rules_of_block_mask(place, block_mask)
    return _attend(place, "flex_attention", query, key, value, rule=rule, scale=scale, grouped=enable_gqa)


KNOWN_KEYWORDS = {
    "is_causal": "causal", "causal": "causal", "scale": "scale", "softmax_scale": "scale", "scaling": "scale",
    "softcap": "softcap", "sinks": "sinks", "s_aux": "sinks", "dropout": "dropout", "dropout_p": "dropout",
    "enable_gqa": "grouped",
}  # fmt: skip


def inner_arguments(forward: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any] | None:
    """All arguments of a call f(q, k, v, ..) by name, defaults included, q, k and v first; None for other calls."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        else:
            arguments[name] = value
    first = list(arguments.values())[:3]
    if len(first) < 3 or not all(isinstance(each, Tensor) and each.ndim == 4 for each in first):
        return None
    return arguments


def inner_options(place: Place, module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the arguments of an attention module that computes attention itself (see `inner_arguments`) mean. Raises
    ValueError for one that nobody would honour."""
    options: dict[str, Any] = {"grouped": True}
    for name, value in list(arguments.items())[3:]:
        if name not in KNOWN_KEYWORDS:
            if value is not None and value is not False and not (isinstance(value, tuple | dict) and not value):
                raise ValueError(
                    f"{place.name} is given {name!r}, which longspan does not know (it knows "
                    f"{', '.join(KNOWN_KEYWORDS)}); nothing that could change the result is dropped"
                )
        elif value is not None and KNOWN_KEYWORDS[name] != "grouped":
            options[KNOWN_KEYWORDS[name]] = value
    causal = options.pop("causal", None)
    if causal is None:
        causal = getattr(module, "is_causal", getattr(module, "causal", None))
    if causal is None:
        raise ValueError(
            f"{place.name} computes attention itself and says nowhere whether it is causal: call it with is_causal=.., "
            "or set its attribute is_causal"
        )
    return {**options, "rule": Rule.causal() if causal else Rule.bidirectional()}


def inner(place: Place, arguments: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """attend() in the place of such a module."""
    q, k, v = list(arguments.values())[:3]
    return _attend(place, "attention", q, k, v, **options)


def _attend(
    place: Place,
    what: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: Rule | tuple[Rule, ...],
    grouped: bool,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    call = place.call
    if place.name is None:
        raise ValueError(
            f"the trunk calls {what} outside of the modules that the plan names for attention; it would attend within "
            f"this rank's rows only. Add the calling module to the plan ({_caller()})"
        )
    if q.ndim != 4 or any(each.ndim != 4 or each.shape[2] != call.rows for each in (q, k, v)):
        raise ValueError(
            f"{place.name} calls {what} with tensors other than [batch, heads, rows, width] of this rank's rows; "
            "cross-attention, caches and attention over other dimensions are not supported in a plan"
        )
    if not grouped and q.shape[1] != k.shape[1]:
        raise ValueError(f"{place.name} has {q.shape[1]} query heads, {k.shape[1]} key heads and no enable_gqa=True")
    if dropout:
        raise ValueError(f"{place.name} has attention dropout {dropout}, unlike any one rank's; set it to 0")
    if torch.is_autocast_enabled(q.device.type):
        half = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(half), k.to(half), v.to(half)
    for letter, each in zip("qkv", (q, k, v)):
        call.record(f"the {letter} of {place.name}", each)
    place.attended += 1
    if call.idle:
        q, k, v = q[:, :, :0], k[:, :, :0], v[:, :, :0]
    out = attend(
        q, k, v, cp=call.cp, rule=rule, scheme=place.scheme, kernel=call.kernel, scale=scale, softcap=softcap,
        sinks=sinks, stages=place.stages or call.stages,
    )  # fmt: skip
    return F.pad(out, (0, 0, 0, 1)) if call.idle else out


# -- whole masks -----------------------------------------------------------------------------------------------


class _Looked:
    """Holds what an index function looks up. Plans, and with them index functions, stay in a cache; masks of whole
    sequences must not, so that the function holds this weakly and the Call holds it."""

    def __init__(self, look: Index) -> None:
        self.look = look


def _weakly(looked: _Looked) -> Index:
    reference = weakref.ref(looked)

    def index(q: Tensor, k: Tensor) -> Tensor:
        held = reference()
        if held is None:
            raise RuntimeError("a mask was looked up after its forward was gone")
        return held.look(q, k)

    return index


def _covers(call: Call, shape: Sequence[int]) -> bool:
    """Whether the last two dimensions are of the whole sequence. A probe takes the beginning of longer masks."""
    if call.probe:
        return min(shape[-2:]) >= call.length
    return tuple(shape[-2:]) == (call.length, call.length)


def _rules_of_mask(place: Place, mask: Tensor) -> Rule | tuple[Rule, ...]:
    call = place.call
    if mask.dtype is not torch.bool:
        raise ValueError(f"{place.name} adds a mask of {mask.dtype} to its scores; only bool masks are supported")
    batch, heads = (1, 1) if mask.ndim == 2 else (mask.shape[0], mask.shape[1]) if mask.ndim == 4 else (0, 0)
    if heads != 1 or batch not in (1, call.batch) or not _covers(call, mask.shape):
        raise ValueError(
            f"{place.name} has an attention mask that is not [S, S], [1, 1, S, S] or [batch, 1, S, S] of the whole "
            f"sequence of {call.length} tokens; hand masks through the split module's arguments (they pass whole), or "
            "use is_causal"
        )
    table = (mask[None] if mask.ndim == 2 else mask.squeeze(1)).detach()

    def make() -> tuple[Rule | tuple[Rule, ...], Any]:
        tables = [(each, each.cpu()) for each in table]

        def look(pair: tuple[Tensor, Tensor]) -> Index:
            return lambda q, k: pair[0][q, k] if q.device == pair[0].device else pair[1][q.cpu(), k.cpu()].to(q.device)

        looked = [_Looked(look(pair)) for pair in tables]
        rules = tuple(Rule.bidirectional().where(_weakly(each)) for each in looked)
        return (rules[0] if batch == 1 else rules), looked

    # The Call keeps the tables, so that no other tensor gets this address while it lives.
    version = 0 if mask.is_inference() else mask._version
    key = (table.data_ptr(), tuple(table.shape), table.stride(), version)
    return call.rules(key, make)


def _rules_of_block_mask(place: Place, block_mask: BlockMask) -> Rule | tuple[Rule, ...]:
    call = place.call
    batch, heads = block_mask.shape[:2]
    if heads != 1:
        raise ValueError(f"{place.name} has a block_mask for each of {heads} heads; only H=None or 1 is supported")
    if batch not in (1, call.batch) or not _covers(call, block_mask.shape):
        raise ValueError(
            f"{place.name} has a block_mask that is not of the whole sequence of {call.length} tokens; make it outside "
            "of the split module for the whole length"
        )
    device = block_mask.kv_num_blocks.device  # where what mask_mod looks up lies
    function = block_mask.mask_mod

    def make() -> tuple[Rule | tuple[Rule, ...], Any]:
        def look(row: int) -> Index:
            here = (torch.tensor(row, device=device), torch.tensor(0, device=device))
            # As torch evaluates it: a function of single positions, never of ranges of them.
            each = torch.vmap(lambda q, k: function(*here, q, k))

            def index(q: Tensor, k: Tensor) -> Tensor:
                shape = torch.broadcast_shapes(q.shape, k.shape)
                flat = (p.expand(shape).reshape(-1).to(device) for p in (q, k))
                return each(*flat).view(shape).to(q.device)

            return index

        looked = [_Looked(look(row)) for row in range(batch)]
        rules = tuple(Rule.bidirectional().where(_weakly(each)) for each in looked)
        return (rules[0] if batch == 1 else rules), (looked, function)

    return call.rules((id(function), batch), make)


# -- flex_attention's names ------------------------------------------------------------------------------------

_USERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # trunks that need the router
_BOUND: list[tuple[dict[str, Any], str, Any]] = []  # namespaces, names and what they were bound to


def _router(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(flex_attention)
    def routed(*args: Any, **kwargs: Any) -> Any:
        place = PLACE.get()
        return original(*args, **kwargs) if place is None else flex(place, *args, **kwargs)

    return routed


def _is_flex(value: Any) -> bool:
    if value is flex_attention:
        return True
    return type(value) is types.FunctionType and value.__dict__.get("_torchdynamo_orig_callable") is flex_attention


def route_flex(trunk: nn.Module) -> None:
    """Binds every global name of flex_attention, compiled or not, and every attribute of the trunk's modules that is
    it, to a router, once. A name that is missed leads to the operator, which `Watch` refuses."""
    if trunk in _USERS:
        return
    _USERS.add(trunk)
    spaces = [vars(module) for module in trunk.modules()]
    if not _BOUND:  # what is imported from now on finds the router
        spaces += [vars(module) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    for space in spaces:
        if space is globals():
            continue
        for name, value in list(space.items()):
            if _is_flex(value):
                _BOUND.append((space, name, value))
                space[name] = _router(value)


def release_flex(trunk: nn.Module) -> None:
    """Undoes route_flex() when no trunk needs it any more."""
    _USERS.discard(trunk)
    if not _USERS:
        for space, name, value in _BOUND:
            space[name] = value
        _BOUND.clear()
