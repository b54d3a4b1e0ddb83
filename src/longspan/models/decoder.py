"""The decoder boundary: whole tensors in, this rank's rows through the layers, whole hidden states out.

Whatever stands on top (classification, reward, token heads, a vision tower below) sees whole tensors and works
unmodified. Every per-token argument is cut by the one layout; positions are made on the whole sequence first; the
2-D mask stays whole, as the mask hook needs it so, and keeps transformers from looking for packing in shards.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm import ContextParallel
from longspan.layout import Span
from longspan.models import inputs, numbering, rope
from longspan.models.forward import Forward, Given, arranged, bends, lazy_rules
from longspan.models.hooks import ACTIVE, LAZY, masks_later, register
from longspan.prefix_tree import PrefixTree
from longspan.rule import Rule

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
    attention_modules: int | None = None  # that call for attention in a plain forward, where that was tried
    mixing: tuple[str, ...] = ()  # paths of the decoder's convolutions and recurrent modules, none of which may run
    numbers_itself: bool = False  # the decoder has modules that number tokens (models.numbering)
    suspended: bool = False
    forwards: int = 0  # how many there have been; the same on every rank
    last: dict[str, Any] | None = None
    facts: dict[Any, Any] = field(default_factory=dict)  # what trials of the decoder's beginning have shown

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

    def __init__(
        self,
        inputs: Mapping[str, Any],
        check: Callable[[int, int], None],
        bounds: Mapping[str, Tensor] | None = None,
        tree: PrefixTree | None = None,
    ) -> None:
        self.inputs = inputs
        self.check = check  # (batch, length)
        self.bounds = bounds or {}  # of packed documents (inputs.BOUNDS), for decoders that would not take them
        self.tree = tree  # the batch is this one row, of which outer models know nothing
        self.forward: Forward | None = None
        self.hidden: Tensor | None = None
        self.output_class: Any = None


def parameter_names(module: nn.Module) -> set[str]:
    """Names of the parameters of a module's forward."""
    return set(inspect.signature(module.forward).parameters)


@contextmanager
def hooked(decoder: Any) -> Iterator[None]:
    """Inside the block a plain decoder attends under the hooks' names, for a trial."""
    original = decoder.config._attn_implementation
    try:
        decoder.set_attn_implementation(register(original))
        yield
    finally:
        decoder.set_attn_implementation(original)


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
    whole = _tokens(arguments)
    if whole.ndim != (2 if ids is not None else 3):
        raise ValueError(f"ids are [batch, length], embeddings [batch, length, width]; got {tuple(whole.shape)}")
    return whole.shape[0], whole.shape[1]


def _tokens(arguments: Mapping[str, Any]) -> Tensor:
    """Ids or embeddings, whichever were given."""
    return arguments["input_ids"] if arguments.get("input_ids") is not None else arguments["inputs_embeds"]


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that parallelize() replaced, bound to `module`."""
    return module.__dict__.get(PLAIN) or type(module).forward.__get__(module)


def install(module: nn.Module, forward: Callable[..., Any], state: State) -> None:
    """Puts `forward(module, ..)` in the place of the module's own, keeping its signature. As a bound method it moves
    along when the module is copied, to work on the copy."""
    if "forward" in module.__dict__:
        setattr(module, PLAIN, module.__dict__["forward"])

    # A function of its own for each module: it carries the signature by which trainers choose a batch's columns.
    @functools.wraps(type(module).forward)
    @torch._dynamo.disable(recursive=False)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    setattr(module, STATE, state)
    module.forward = types.MethodType(wrapped, module)  # type: ignore[method-assign]


def uninstall(module: nn.Module) -> None:
    """Undoes install()."""
    module.__dict__.pop("forward", None)
    plain = module.__dict__.pop(PLAIN, None)
    if plain is not None:
        module.forward = plain  # type: ignore[method-assign]
    module.__dict__.pop(STATE, None)


@torch._dynamo.disable(recursive=False)  # what is called inside is compiled; the checks and the hand-over are not
def split_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward that replaces the decoder's."""
    state: State = getattr(self, STATE)
    original = plain_forward(self)
    request: Request | None = kwargs.pop(REQUEST, None)
    arguments = call_arguments(original, args, kwargs)
    if request is not None:
        arguments.update(request.bounds)
        if request.tree is not None:
            arguments["position_ids"] = torch.from_numpy(request.tree.positions)[None].to(_tokens(arguments).device)
    # use_cache=True alone is not generation: wrappers fill it in from the config.
    if state.suspended or (request is None and brings_cache(arguments)):
        if LAZY.get() is None:
            return original(*args, **kwargs)
        with masks_later(False):
            return original(**{**arguments, "attention_mask": inputs.made(arguments.get("attention_mask"))})
    mask = inputs.contents(arguments.get("attention_mask"))
    everything = {**arguments, "attention_mask": mask, **({} if request is None else request.inputs)}
    prepared = state.cp.agree(lambda: _prepare(self, state, arguments, request), everything)
    state.forwards += 1
    local = _local_arguments(prepared, arguments, numbers_itself=state.numbers_itself)
    device = _tokens(arguments).device
    before = random_state(device)
    token = ACTIVE.set(prepared)
    try:
        with ExitStack() as stack:
            stack.enter_context(rope.whole_length(self, prepared.cp))
            stack.enter_context(mixing_refused(self, state.mixing))
            if state.numbers_itself:
                stack.enter_context(numbering.on_whole_batches(self, prepared, arguments))
            outputs = original(**local)
    except Exception as error:
        cause = prepared.cp.first_failure(error, state.forwards)
        if cause is None:
            raise
        raise RuntimeError(cause) from error
    finally:
        ACTIVE.reset(token)
    _check_attention_ran(self, prepared, state.attention_modules)
    if not torch.equal(before, random_state(device)):
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


@torch._dynamo.disable(recursive=False)
def outer_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward that replaces that of a model whose head stays its own: masks made in it are left to the decoder."""
    state: State = getattr(self, STATE)
    original = plain_forward(self)
    if state.suspended or brings_cache(call_arguments(original, args, kwargs)):
        return original(*args, **kwargs)
    check_dropout(self)
    with masks_later():
        return original(*args, **kwargs)


def mixing_modules(decoder: nn.Module) -> tuple[str, ...]:
    """Paths of modules that mix tokens other than by attention."""
    return tuple(path for path, m in decoder.named_modules() if isinstance(m, nn.Conv1d | nn.RNNBase))


@contextmanager
def mixing_refused(decoder: nn.Module, paths: tuple[str, ...]) -> Iterator[None]:
    """Inside the block these modules raise ValueError when they are called."""

    def refuse(module: nn.Module, args: Any) -> None:
        path = next(p for p in paths if decoder.get_submodule(p) is module)
        kind = type(module).__name__
        raise ValueError(f"{type(decoder).__name__} mixes tokens in {path} ({kind}), which is not supported yet")

    with ExitStack() as stack:
        for path in paths:
            stack.callback(decoder.get_submodule(path).register_forward_pre_hook(refuse).remove)
        yield


def check_dropout(model: nn.Module) -> None:
    """Raises ValueError for dropout while training. In the decoder what drops depends on the split; above it each rank
    would drop entries of its own, and their gradients would not be one rank's."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
            raise ValueError(
                f"dropout {module.p} in {name}: what drops depends on the split, so no rank count would equal another; "
                "set the config's dropout probabilities to 0"
            )


def random_state(device: torch.device) -> Tensor:
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
    check_dropout(decoder)
    _check_arguments(arguments, batch, length)
    _check_temperature(decoder, length)
    mask = arguments.get("attention_mask")
    plain = plain_forward(decoder)
    documents = inputs.bounded_documents(arguments, batch, length)
    visible: Tensor | None = None
    given: dict[str | None, Given] = {}
    if isinstance(mask, Tensor) and mask.ndim < 4:
        visible = _visible(mask, batch, length)
        if visible is not None and documents is not None:
            raise ValueError("attention_mask hides tokens and cu_seq_lens_q bounds documents: leave one of them out")
    elif mask is not None:
        backend = state.original_backend
        given = inputs.given_masks(decoder, plain, state.facts, backend, mask, batch, length, documents)
    tree = None if request is None else request.tree
    if tree is not None:
        others = documents is not None or visible is not None or (batch, length) != (1, len(tree.tokens))
        reason = "it has padding, documents or other rows" if others else cannot_branch(decoder, state)
        if reason is not None:
            raise ValueError(f"{type(decoder).__name__} cannot run this batch as a prefix tree: {reason}")
    # transformers reads packing from positions only where there is no mask. Those of a tree jump, and are no packing.
    elif documents is None and not given and not isinstance(mask, Tensor):
        documents = inputs.packed_documents(decoder, plain, state.facts, arguments.get("position_ids"), batch)
    if request is not None:
        request.check(batch, length)
    packed = [*(documents or ()), *(rule.document_starts for each in given.values() for rule in each.rules)]
    if tree is not None:  # of whose nodes "per_document" makes documents
        packed = [tuple(node.span.start for node in tree.nodes)]
    boundaries = sorted({start for row in packed for start in row})
    name = state.layout
    if name == "auto" and tree is not None:
        name = "balanced"
    elif name == "auto":
        # Cutting every document pays only where the pieces are worth a kernel call.
        long_documents = len(boundaries) > 1 and length >= len(boundaries) * state.cp.size * SHORT_PIECE
        name = "per_document" if long_documents else "head_tail"
    counts = None
    if name == "balanced":
        every = [(each.rules, 1) for each in given.values()]
        if not given:
            every = [((rule,) * batch, layers) for rule, layers in layer_rules(decoder, plain, state.facts)]
        counts = sum(layers * _visible_keys(rules, length, visible, documents or (), tree) for rules, layers in every)
    return Forward(
        replace(state.cp, layout=name).bind(length, boundaries, counts),
        batch=batch,
        visible=visible,
        documents=documents or (),
        given=given,
        scheme=state.scheme,
        kernel=state.kernel,
        stages=state.stages,
        tree=tree,
    )


def layer_rules(decoder: Any, plain: Callable[..., Any], facts: dict[Any, Any]) -> tuple[tuple[Rule, int], ...]:
    """The rules that the decoder's layers give a sequence of its own, and how many layers have each: by the config's
    layer types, where it has some; else every mask that the decoder asks for counts once. Raises ValueError for
    decoders that cannot be tried."""
    if "layer rules" not in facts:
        asked, _ = inputs.trial(decoder, plain)
        rules = list(dict.fromkeys(lazy_rules(mask, 1, inputs.TRIAL)[0] for mask in asked))
        types = list(getattr(decoder.config, "layer_types", None) or ())
        layers = [types.count(_layer_type(rule)) for rule in rules]
        if not any(layers):
            layers = [1] * len(rules)
        facts["layer rules"] = tuple((rule, count) for rule, count in zip(rules, layers) if count)
    return facts["layer rules"]


def _layer_type(rule: Rule) -> str:
    if rule.chunk_size is not None:
        return "chunked_attention"
    return "full_attention" if rule.behind is None else "sliding_attention"


def cannot_number(decoder: Any, state: State) -> str | None:
    """Why what a token's position means in the decoder may depend on more than its own document; None where it is the
    number that it is given at the boundary."""
    if state.numbers_itself:
        return "its own modules number tokens"
    return "the angles of its RoPE depend on the longest position in the row" if rope.modules_of(decoder) else None


def cannot_branch(decoder: Any, state: State) -> str | None:
    """Why the decoder cannot run a row that is a prefix tree; None where it can."""
    reason = cannot_number(decoder, state)
    if reason is not None:
        return reason
    if state.kernel == "model":
        return "kernel='model' uses the model's own masks, which know of no tree"
    try:
        rules = layer_rules(decoder, plain_forward(decoder), state.facts)
    except ValueError as error:
        return str(error)
    return None if all(bends(rule) for rule, _ in rules) else "its masks are more than causal, windows and chunks"


def _visible_keys(
    rules: tuple[Rule, ...],
    length: int,
    visible: Tensor | None,
    documents: tuple[tuple[int, ...], ...],
    tree: PrefixTree | None,
) -> Any:
    """How many keys each position sees, summed over batch rows: int64 [S]. Conditions that are no structure are left
    out, as they would have to be evaluated: balance needs no more."""
    if visible is not None:
        rules = tuple(rule.padded(flags) for rule, flags in zip(rules, visible.cpu().numpy()))
    whole = Span(0, length)
    rows = Counter(replace(rule, index=None) for rule in arranged(rules, documents, tree))
    return sum(times * rule.counts(whole, whole) for rule, times in rows.items())


def _check_temperature(decoder: Any, length: int) -> None:
    """Refuses attention that scales queries by the rows it counts itself, from where on the scale is not 1."""
    floor = getattr(decoder.config, "floor_scale", 0)
    if getattr(decoder.config, "attn_temperature_tuning", False) and length >= floor:
        raise ValueError(
            f"{type(decoder).__name__} tunes its attention's temperature by rows that it counts itself, which on "
            f"shards are not positions: another scale from floor_scale = {floor} on; the batch has "
            f"{length} tokens. Not supported, unless the config's attn_temperature_tuning is off"
        )


def _check_arguments(arguments: Mapping[str, Any], batch: int, length: int) -> None:
    """Every tensor must be known, and per token where it is to be cut."""
    for name, value in arguments.items():
        if name == "attention_mask" or name in inputs.BOUNDS + inputs.LONGEST:
            continue
        if isinstance(value, Mapping | list | tuple):
            raise ValueError(f"{name} of type {type(value).__name__} is not supported under context parallelism")
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if name not in PER_TOKEN:
            raise ValueError(
                f"the decoder was given {name} of shape {tuple(value.shape)}; longspan does not know whether it is per "
                f"token (known: {', '.join(PER_TOKEN)}, attention_mask)"
            )
        if value.shape[PER_TOKEN[name]] != length:
            raise ValueError(f"{name} has {value.shape[PER_TOKEN[name]]} tokens, the batch has {length}")
    positions = arguments.get("position_ids")
    if positions is not None and (positions.ndim not in (2, 3) or positions.shape[-2] not in (1, batch)):
        raise ValueError(
            f"position_ids are [B, S] or, with several rows per token, [rows, B, S] for B = {batch} and S = {length}; "
            f"got {tuple(positions.shape)}"
        )


def _visible(mask: Tensor, batch: int, length: int) -> Tensor | None:
    """Which tokens are real, bool [B, S]; None where all are."""
    if tuple(mask.shape) != (batch, length):
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, the batch is {(batch, length)}")
    visible = mask.bool()
    return None if bool(visible.all()) else visible


def _local_arguments(prepared: Forward, arguments: dict[str, Any], *, numbers_itself: bool = False) -> dict[str, Any]:
    """The decoder's arguments on this rank: per-token tensors cut, positions made (unless its own modules number
    tokens), the mask whole or bound."""
    cp = prepared.cp
    dropped = (*CACHES, *inputs.BOUNDS, *inputs.LONGEST, "cache_position")
    local = {k: v for k, v in arguments.items() if k not in dropped}
    device = _tokens(arguments).device
    if numbers_itself:
        if any(prepared.documents) and local.get("position_ids") is None:
            raise ValueError("this decoder numbers tokens itself; pass position_ids that restart with each document")
    elif local.get("position_ids") is None:
        local["position_ids"] = torch.arange(prepared.length, device=device)[None]
        if any(prepared.documents):
            # As each document alone has them. Plain flash attention goes on counting, which RoPE cannot tell.
            begins = torch.zeros(prepared.batch, prepared.length, dtype=torch.int64, device=device)
            for row, starts in zip(begins, prepared.documents):
                row[list(starts)] = torch.tensor(starts, dtype=torch.int64, device=device)
            local["position_ids"] = local["position_ids"] - begins.cummax(-1).values
    for name, dim in PER_TOKEN.items():
        if isinstance(local.get(name), Tensor):
            local[name] = local[name].narrow(dim, 0, 1) if prepared.idle else cp.cut(local[name], dim)
    visible = prepared.visible
    if visible is None:
        # Where one mask was given for all layers, the hook answers with that whenever one is asked for.
        visible = torch.ones(prepared.batch, prepared.length, dtype=torch.bool, device=device)
    by_type = {kind: prepared.given_mask(kind) for kind in prepared.given if kind is not None}
    local["attention_mask"] = by_type or visible
    local["use_cache"] = False
    return local


def _check_attention_ran(decoder: nn.Module, prepared: Forward, expected: int | None) -> None:
    """Where no plain forward was tried (weights on the meta device), one attention module per layer is expected."""
    if expected is None:
        expected = getattr(decoder.config, "num_hidden_layers", None)
    if not prepared.seen or (expected is not None and len(prepared.seen) != expected):
        raise ValueError(
            f"{len(prepared.seen)} attention modules of {type(decoder).__name__} went through longspan, but it has "
            f"{expected}: the others would have attended within a shard only; this model is not supported"
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
    if local.ndim >= 4 and local.shape[1:3] == (prepared.batch, rows):  # several streams
        return prepared.cp.gather(local[:, :, :0] if prepared.idle else local, 2)
    if local.ndim >= 1 and local.shape[0] == prepared.batch * rows:
        by_row = local.unflatten(0, (prepared.batch, rows))
        return prepared.cp.gather(by_row[:, :0] if prepared.idle else by_row, 1).flatten(0, 1)
    raise ValueError(f"an output of shape {tuple(local.shape)} is not {prepared.batch} x {rows} rows")
