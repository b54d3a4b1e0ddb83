"""parallelize(model, mesh, plan=..): models of one's own, adapted by a table of module names and words.

    longspan.parallelize(model, mesh["cp"], plan={"trunk": "split_sequence", "trunk.layers.*.attn": "attention"})

A pattern (fnmatch over `named_modules()`, name by name, so that `*` stands for one; "" is the root) maps to one word or
several:

    split_sequence   the trunk: gets whole tensors, runs on this rank's rows, hands out whole tensors
    gather           inside a trunk: this module's output [B, rows, ..] becomes whole, and what follows works on whole
                     tensors, the same on every rank; the trunk's own output is then handed out as it is
    attention        attention calls in this module go through attend(); also "ulysses" and "exchange", by scheme

and to what `register_style` added. The trunk sees positions only in its arguments, so that position-dependent code must
get them from there. Whether it does, and whether anything else in it looks beyond its rows, is tried out: the first
forward of each kind runs the first few tokens both ways, and compares every module's inputs and outputs. What differs
raises, before anything of the batch is sent.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map

from longspan.comm import ContextParallel
from longspan.models.decoder import STATE, call_arguments, random_state
from longspan.models.own_attention import (
    PLACE,
    Call,
    Place,
    inner,
    inner_arguments,
    inner_options,
    inside,
    node_number,
    recomputed,
    release_flex,
    route_flex,
)

Around = Callable[..., Any]  # around(context, forward, /, *args, **kwargs)
Undo = Callable[[nn.Module], None]
Style = Callable[[nn.Module, "Context"], Undo | None]
Words = str | Sequence[str]

AROUND = "_longspan_around"
UNDO = "_longspan_undo"
ATTENTION = ("attention", "ulysses", "exchange")
WHOLE = -1  # in the place of the dimension that counts tokens: a mask of the whole sequence, which is not cut


@dataclass
class OwnState:
    """What parallelize() decided for a model of one's own, what it learned of it, and its last forward."""

    cp: ContextParallel
    scheme: str = "auto"
    kernel: str = "auto"
    stages: int | None = None
    unverified: bool = False
    suspended: bool = False
    last: dict[str, Any] | None = None
    inner_gather: set[str] = field(default_factory=set)  # trunks with a "gather" inside
    compute_themselves: set[str] = field(default_factory=set)  # attention modules that call no attention of torch's
    verified: set[Any] = field(default_factory=set)  # kinds of forwards that were tried out
    calls: list[weakref.ref[Call]] = field(default_factory=list)  # forwards whose backward may still come

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnState:
        # Process groups cannot be copied: a copied model uses the same one. Its forwards are its own.
        copied = OwnState(self.cp, self.scheme, self.kernel, self.stages, self.unverified)
        copied.inner_gather, copied.compute_themselves = set(self.inner_gather), set(self.compute_themselves)
        return copied


@dataclass
class Context:
    """What a style is given: the module's name, and the means to change what the module does."""

    module: nn.Module
    name: str
    state: OwnState

    def wrap(self, around: Around) -> None:
        """Makes the module run `around(context, forward, *args, **kwargs)`, where `forward` is what ran before. Bound
        to the module, it moves along when the model is copied. unparallelize() undoes it."""
        stack = self.module.__dict__.setdefault(AROUND, [self.module.__dict__.get("forward")])
        stack.append((around, self))
        self.module.forward = types.MethodType(_running(self.module), self.module)  # type: ignore[method-assign]

    def call(self) -> Call | None:
        """The forward of the trunk that the code runs in, or is run again for in the backward. None outside."""
        place = PLACE.get()
        if place is not None:
            return place.call
        call = recomputed(self.state.calls, self.name)
        return None if call is None or call.plain else call

    def attention(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        scheme: str = "auto",
        stages: int | None = None,
    ) -> Any:
        """Runs `forward(*args, **kwargs)` with its attention calls sent through attend()."""
        call = self.call()
        if call is None:
            return forward(*args, **kwargs)
        place = Place(call, self.name, scheme, stages)
        themselves = self.state.compute_themselves
        with inside(place):
            if self.name not in themselves or call.cp.size == 1:
                out = forward(*args, **kwargs)
                if place.attended:
                    return out
            arguments = inner_arguments(forward, args, kwargs)
            if arguments is None:
                raise ValueError(
                    f"the plan names {self.name or 'the root'} for attention, but it neither calls "
                    "scaled_dot_product_attention or flex_attention nor is called as f(q, k, v, ..)"
                )
            themselves.add(self.name)
            # A probe on one rank keeps what the module itself computed: attend() is compared with it.
            options = inner_options(place, self.module, arguments)
            return out if call.cp.size == 1 else inner(place, arguments, options)


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    return module.__dict__[AROUND][0] or type(module).forward.__get__(module)


def _running(module: nn.Module) -> Callable[..., Any]:
    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        run = _plain_forward(self)
        for around, context in self.__dict__[AROUND][1:]:
            run = functools.update_wrapper(functools.partial(around, context, run), run)
        return run(*args, **kwargs)

    return forward


# -- styles ----------------------------------------------------------------------------------------------------

STYLES: dict[str, Style] = {}


def register_style(name: str, style: Style) -> None:
    """Adds a word for plans: `style(module, context)` installs itself on the module, as a rule by `context.wrap`, and
    may return a function of the module that undoes what it did beyond that. Raises ValueError for a word in use."""
    if STYLES.get(name, style) is not style:
        raise ValueError(f"there is a style {name!r} already")
    STYLES[name] = style


def _attention_style(scheme: str | None) -> Style:
    def around(context: Context, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return context.attention(forward, args, kwargs, scheme=scheme or context.state.scheme)

    return lambda module, context: context.wrap(around)


def _gather_around(context: Context, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    out = forward(*args, **kwargs)
    call = context.call()
    return out if call is None else _whole_outputs(call, out, context.name)


def _split_style(module: nn.Module, context: Context) -> Undo:
    context.wrap(_split_around)
    return release_flex


register_style("split_sequence", _split_style)
register_style("gather", lambda module, context: context.wrap(_gather_around))
register_style("attention", _attention_style(None))
register_style("ulysses", _attention_style("ulysses"))
register_style("exchange", _attention_style("exchange"))


# -- parallelize -----------------------------------------------------------------------------------------------


def parallelize(model: nn.Module, state: OwnState, plan: Mapping[str, Words]) -> None:
    """Installs the plan, whole or not at all (in a group of one rank: not). Raises ValueError for a plan that could not
    equal one rank."""
    words = _resolve(model, plan)
    trunks = [name for name, styles in words.items() if "split_sequence" in styles]
    _check_plan(words, trunks)
    if state.cp.size == 1:
        return
    for trunk in trunks:
        _check_trunk(trunk, model.get_submodule(trunk), unverified=state.unverified)
        if any("gather" in styles and _within(name, trunk) for name, styles in words.items()):
            state.inner_gather.add(trunk)
    last = {"gather": 1, "split_sequence": 2}  # a trunk's cut is outermost, then its gather
    try:
        for name, styles in words.items():
            module = model.get_submodule(name)
            for word in sorted(styles, key=lambda word: last.get(word, 0)):
                undo = STYLES[word](module, Context(module, name, state))
                if undo is not None:
                    module.__dict__.setdefault(UNDO, []).append(undo)
    except BaseException:
        unparallelize(model)
        raise
    setattr(model, STATE, state)


def unparallelize(model: nn.Module) -> None:
    """Undoes parallelize()."""
    for module in model.modules():
        for undo in reversed(module.__dict__.pop(UNDO, [])):
            undo(module)
        if AROUND in module.__dict__:
            plain = module.__dict__.pop(AROUND)[0]
            module.__dict__.pop("forward", None)
            if plain is not None:
                module.forward = plain  # type: ignore[method-assign]
    model.__dict__.pop(STATE, None)


@contextmanager
def plainly(state: OwnState) -> Iterator[None]:
    """Inside the block the model runs whole."""
    before, state.suspended = state.suspended, True
    try:
        yield
    finally:
        state.suspended = before


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _within(name: str, outer: str) -> bool:
    return outer == "" or name == outer or name.startswith(outer + ".")


def _resolve(model: nn.Module, plan: Mapping[str, Words]) -> dict[str, list[str]]:
    """The words of each module that any pattern matches, in the plan's order."""
    words: dict[str, list[str]] = {}
    for pattern, given in plan.items():
        styles = [given] if isinstance(given, str) else list(given)
        for style in styles:
            if style not in STYLES:
                raise ValueError(f"unknown style {style!r} for {pattern!r}; choose one of {', '.join(STYLES)}")
        matched = [name for name, _ in model.named_modules() if _matches(name, pattern)]
        if not matched:
            names = [name for name, _ in model.named_modules()][1:9]
            raise ValueError(
                f"no module of {type(model).__name__} is called {pattern!r}; it has {', '.join(names)}, .."
            )
        for name in matched:
            known = words.setdefault(name, [])
            known += [style for style in styles if style not in known]
    return words


def _check_plan(words: Mapping[str, list[str]], trunks: list[str]) -> None:
    if not trunks:
        raise ValueError("the plan names no module for split_sequence, so nothing would be split")
    for trunk in trunks:
        for other in trunks:
            if other != trunk and _within(other, trunk):
                raise ValueError(f"split_sequence of {other!r} lies inside that of {trunk or 'the root'!r}")
    for name, styles in words.items():
        inside_trunk = any(_within(name, trunk) for trunk in trunks)
        for word in ("gather", *ATTENTION):
            if word in styles and not inside_trunk:
                raise ValueError(f"{name or 'the root'!r} is planned for {word}, but lies in no split_sequence module")
        schemes = [word for word in styles if word in ATTENTION]
        if len(schemes) > 1:
            raise ValueError(f"{name or 'the root'!r} is planned for {' and '.join(schemes)}; choose one")


def _check_trunk(trunk: str, module: nn.Module, *, unverified: bool) -> None:
    """Refuses by type what mixes tokens in ways that the plan cannot express."""
    for name, child in module.named_modules(prefix=trunk):
        kind = type(child).__name__
        if isinstance(child, nn.MultiheadAttention):
            raise ValueError(f"{name} is a {kind}, which is not supported; call F.scaled_dot_product_attention instead")
        if "_orig_mod" in child._modules or child._compiled_call_impl is not None:
            raise ValueError(f"{name} is compiled; inside a split module attention calls must be seen as they run")
        if not unverified and isinstance(child, nn.RNNBase | _ConvNd):
            raise ValueError(
                f"{name} ({kind}) mixes tokens across the borders of shards, which is not supported; if its dimension "
                "is not that of tokens, pass unverified=True and compare outputs yourself"
            )


# -- the trunk -------------------------------------------------------------------------------------------------


def _split_around(context: Context, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The trunk's forward: whole in, this rank's rows through it, whole out."""
    state = context.state
    if PLACE.get() is not None:
        raise ValueError(f"{context.name or 'the root'} is called inside a split forward; it would be split twice")
    if state.suspended:
        call = Call(ContextParallel(), batch=0, kernel=state.kernel, stages=None)
        call.plain = True
        with _numbered(state, call):
            return _kept(call, forward(*args, **kwargs))
    arguments = call_arguments(_plain_forward(context.module), args, kwargs)
    call, dims = state.cp.agree(lambda: _prepare(context, arguments), arguments)
    route_flex(context.module)
    words = [(path, leaf) for path, leaf in _leaves(arguments) if isinstance(leaf, bool | str | None)]
    kind = (context.name, context.module.training, str(dims), str(words))
    if not state.unverified and kind not in state.verified:
        _verify(context, forward, arguments, dims, call)
        state.verified.add(kind)
    with _numbered(state, call):
        out = _kept(call, _run(context, forward, call, _local(call, arguments, dims)))
    traffic = call.cp.traffic
    state.last = {
        "tokens": call.batch * call.cp.bound.rows(call.cp.rank),
        "pairs": traffic.pairs,
        "layout": call.cp.bound.name,
        "traffic": traffic,
    }
    return out


@contextmanager
def _numbered(state: OwnState, call: Call) -> Iterator[None]:
    """Notes which autograd nodes the block makes, so that recomputation in the backward finds its forward."""
    if not torch.is_grad_enabled():
        yield
        return
    state.calls[:] = [reference for reference in state.calls if reference() is not None]
    state.calls.append(weakref.ref(call))
    first = node_number()
    yield
    call.numbers = (first, node_number())


def _kept(call: Call, out: Any) -> Any:
    """Lets the graph keep its Call alive, no longer than itself."""
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            cast(dict[str, Any], leaf.grad_fn.metadata)["longspan"] = call
    return out


def _run(context: Context, forward: Callable[..., Any], call: Call, local: Mapping[str, Any]) -> Any:
    """The trunk on local (or, in the first half of a probe, whole short) arguments; its outputs whole."""
    device = next(leaf.device for leaf in tree_leaves(dict(local)) if isinstance(leaf, Tensor))
    before = random_state(device)
    with inside(Place(call)):
        out = forward(**local)
    if not torch.equal(before, random_state(device)):
        raise ValueError(
            f"{context.name or 'the root'} drew random numbers (dropout, noise, layer drop): what they fall on depends "
            "on the split, so no rank count would equal another"
        )
    if context.name not in context.state.inner_gather:
        return _whole_outputs(call, out, context.name)
    for path, leaf in tree_leaves_with_path(out):
        if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[:2] == (call.batch, call.rows) != (
            call.batch, call.length):  # fmt: skip
            raise ValueError(
                f"output{_path(path)} of {context.name or 'the root'} is still of this rank's rows: the plan's gather "
                "is not on its way"
            )
    return out


def _prepare(context: Context, arguments: Mapping[str, Any]) -> tuple[Call, dict[str, int | None]]:
    """Checks whole arguments and describes them: the Call, and by path which dimension of a tensor counts tokens (None:
    passes as it is; WHOLE: a mask of the whole sequence). What can be wrong raises here, before anything is sent."""
    state, name = context.state, context.name or "the root"
    if context.module.training:
        for path, module in context.module.named_modules(prefix=context.name):
            if isinstance(module, _DropoutNd) and module.p > 0:
                raise ValueError(f"dropout {module.p} in {path}: what drops depends on the split; set it to 0")
            if isinstance(module, _BatchNorm):
                raise ValueError(f"{path} takes statistics over tokens, which a shard does not have; not supported")
    leaves = list(_leaves(arguments))
    for path, leaf in leaves:
        plain = isinstance(leaf, bool | int | float | str | None | Tensor | BlockMask | torch.dtype | torch.device)
        if not plain and not callable(leaf):
            raise ValueError(f"{path} of type {type(leaf).__name__} may hide tensors; hand {name} tensors themselves")
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    first = next((leaf for _, leaf in tensors if leaf.ndim > 1), None)
    if first is None or first.shape[1] == 0:
        raise ValueError(
            f"{name} got no tensor [batch, length, ..] of at least one token, so there is nothing to split"
        )
    length = first.shape[1]
    # What all rows share, such as positions, is [1, S]; the first that is not tells the batch size.
    rows = (leaf.shape[0] for _, leaf in tensors if leaf.ndim > 1 and leaf.shape[1] == length)
    batch = next((count for count in rows if count != 1), 1)
    dims = {path: _token_dim(path, leaf, batch, length) for path, leaf in tensors}
    cp = state.cp.bind(length)
    return Call(cp, batch=batch, kernel=state.kernel, stages=state.stages), dims


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in tree_leaves_with_path(dict(tree), is_leaf=lambda each: isinstance(each, BlockMask)):
        yield _path(path).removeprefix("."), leaf


def _path(keys: Sequence[Any]) -> str:
    parts = [f"[{key.idx}]" if hasattr(key, "idx") else f".{getattr(key, 'key', key)}" for key in keys]
    return "".join(parts)


def _is_mask(leaf: Tensor, length: int) -> bool:
    return leaf.dtype is torch.bool and leaf.ndim > 1 and tuple(leaf.shape[-2:]) == (length, length)


def _token_dim(path: str, leaf: Tensor, batch: int, length: int) -> int | None:
    """Which dimension of an argument counts tokens: the second of [B, S, ..], else the only one of size S."""
    if _is_mask(leaf, length):
        # [B, S] flags of as many rows as tokens look like a mask as well.
        if leaf.ndim == 2 and batch == length:
            raise ValueError(f"{path} may be a mask [S, S] or flags [B, S]; give masks as [1, 1, S, S]")
        return WHOLE
    candidates = [dim for dim, size in enumerate(leaf.shape) if size == length]
    if 1 in candidates and (0 not in candidates or leaf.shape[0] in (1, batch)):
        return 1
    if len(candidates) > 1:
        raise ValueError(
            f"{path} of shape {tuple(leaf.shape)} has several dimensions of {length}, and it is unclear which counts "
            "tokens; masks of the whole sequence must be bool"
        )
    return candidates[0] if candidates else None


def _mapped(arguments: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    changed = [change(path, leaf) for path, leaf in _leaves(arguments)]
    replacements = iter(changed)
    return tree_map(lambda leaf: next(replacements), dict(arguments), is_leaf=lambda each: isinstance(each, BlockMask))


def _local(call: Call, arguments: Mapping[str, Any], dims: Mapping[str, int | None]) -> dict[str, Any]:
    """This rank's rows of every per-token argument; a rank without rows gets one that counts nowhere."""

    def cut(path: str, leaf: Any) -> Any:
        dim = dims.get(path)
        if dim is None or dim == WHOLE:
            return leaf
        return leaf.narrow(dim, 0, 1) if call.idle else call.cp.cut(leaf, dim)

    return _mapped(arguments, cut)


def _whole_outputs(call: Call, out: Any, name: str) -> Any:
    """Every tensor [B, rows, ..] of an output, whole; other tensors raise ValueError, since they may differ by rank."""
    expected = (call.batch, call.rows)
    for path, leaf in tree_leaves_with_path(out):
        if isinstance(leaf, Tensor) and (leaf.ndim < 2 or tuple(leaf.shape[:2]) != expected):
            raise ValueError(
                f"output{_path(path)} of {name or 'the root'} is not [batch, rows, ..], so it cannot be made whole; "
                "gather earlier in the plan and compute it from whole tensors"
            )
    if call.cp.size == 1:
        return out
    return tree_map(
        lambda leaf: call.cp.gather(leaf[:, :0] if call.idle else leaf, 1) if isinstance(leaf, Tensor) else leaf, out
    )


# -- the probe -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _verify(
    context: Context,
    forward: Callable[..., Any],
    arguments: Mapping[str, Any],
    dims: Mapping[str, int | None],
    call: Call,
) -> None:
    """Runs the first few tokens on one rank and on all, and compares what every module was given and gave.

    Finds whatever looks beyond its rows without the plan knowing: positions counted inside, attention written out by
    hand, convolutions, means over tokens. Buffers are as before afterwards. Raises ValueError on every rank.
    """
    state, module, name = context.state, context.module, context.name or "the root"
    # Every rank gets a few rows, and not all as many.
    length = min(call.length, 4 * state.cp.size + 1)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def attempt(cp: ContextParallel, given: Mapping[str, Any]) -> Call:
        tried = Call(cp.bind(length), batch=call.batch, kernel=call.kernel, stages=call.stages)
        tried.probe, tried.trace = True, {}
        try:
            with _recorded(module, context.name, tried):
                local = given if cp.size == 1 else _local(tried, given, dims)
                out = _run(context, forward, tried, local)
        except ValueError:
            raise
        except Exception as error:
            where = "on one rank" if cp.size == 1 else "on this rank's rows"
            raise ValueError(
                f"{name} fails on the first {length} tokens {where}, where it was tried out: {error} (code that cannot "
                "run so short a sequence can be left untried with unverified=True)"
            ) from error
        for path, leaf in tree_leaves_with_path(out):
            if isinstance(leaf, Tensor):
                tried.record(f"output{_path(path)} of {name}", leaf)
        return tried

    try:
        short = state.cp.agree(lambda: _mapped(arguments, lambda path, leaf: _shortened(leaf, dims.get(path), length)))
        one = state.cp.agree(lambda: attempt(ContextParallel(), short))
        split = attempt(state.cp, short)
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
    state.cp.agree(lambda: _compare(one, split, name))


def _shortened(leaf: Any, dim: int | None, length: int) -> Any:
    if isinstance(leaf, BlockMask):
        batch, heads = leaf.shape[:2]
        return create_block_mask(leaf.mask_mod, batch, heads, length, length, device=leaf.kv_num_blocks.device)
    if dim is None:
        return leaf
    return leaf[..., :length, :length] if dim == WHOLE else leaf.narrow(dim, 0, length)


@contextmanager
def _recorded(module: nn.Module, name: str, call: Call) -> Iterator[None]:
    """Records the tensors that go into and come out of every module inside `module`."""

    def record(what: str, values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                call.record(what, leaf)

    handles = []
    for path, child in module.named_modules(prefix=name):
        if child is not module:
            handles += [
                child.register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: record(f"the input of {path}", (args, kwargs)), with_kwargs=True
                ),
                child.register_forward_hook(lambda _, args, out, path=path: record(f"the output of {path}", out)),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare(one: Call, split: Call, name: str) -> None:
    """Raises ValueError for the first thing that differs between the two halves of a probe."""
    assert one.trace is not None and split.trace is not None
    tolerance = 0.0
    for key, whole in one.trace.items():
        local = split.trace.get(key)
        if local is None:
            continue
        expected, found = _matched(one, split, whole, local, final=key[0].startswith("output"))
        if expected is None or found is None:
            continue
        if not whole.is_floating_point():
            same = torch.equal(expected, found)
        else:
            tolerance = max(tolerance, _tolerance(whole))
            scale = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()) if expected.numel() else 0.0
            same = torch.allclose(found, expected, rtol=0.0, atol=tolerance * scale, equal_nan=True)
        if not same:
            counted = f" (it counts its rows with torch.arange at {split.aranges[0]})" if split.aranges else ""
            raise ValueError(
                f"{key[0]} is not what it is on one rank, on the first {one.length} tokens of {name}: before it, "
                "something numbers tokens by itself or looks at other tokens outside of planned attention"
                f"{counted}. Hand positions in through the split module's arguments, and name all attention in the plan"
            )


def _matched(
    one: Call, split: Call, whole: Tensor, local: Tensor, *, final: bool
) -> tuple[Tensor | None, Tensor | None]:
    """This rank's part of a whole tensor beside the local one; (None, None) where they cannot be set side by side."""
    if final:
        if whole.shape != local.shape:
            raise ValueError(f"an output is of shape {tuple(whole.shape)} on one rank, else {tuple(local.shape)}")
        return whole, local
    if split.idle or whole.ndim != local.ndim or whole.dtype != local.dtype:
        return None, None
    flat = one.batch * one.length
    if whole.ndim and (whole.shape[0], local.shape[0]) == (flat, one.batch * split.rows) and flat != one.length:
        whole, local = whole.unflatten(0, (one.batch, -1)), local.unflatten(0, (one.batch, -1))
    for dim in (1, 2, 0):
        if dim < whole.ndim and (whole.shape[dim], local.shape[dim]) == (one.length, split.rows):
            cut = split.cp.cut(whole, dim)
            if cut.shape == local.shape:
                return cut, local
    return None, None


def _tolerance(tensor: Tensor) -> float:
    """How far rounding alone takes two right results apart, relative to the largest value."""
    if tensor.dtype is torch.float64:
        return 1e-6  # models widen some things to fp32 only
    if tensor.dtype is torch.float32:
        return 1e-4 if tensor.device.type == "cpu" else 1e-3  # tf32
    return 5e-2
