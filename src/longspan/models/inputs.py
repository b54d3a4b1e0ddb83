"""What a call says about visibility, in any of the forms transformers takes it: packed positions, bounds of documents,
whole masks, masks by layer type, masks asked for above the decoder.

What a decoder makes of positions and of masks is its own code's business. It is found out by a trial: the plain decoder
runs on a few tokens up to its first layer, which costs no weights and no collective, once per form of input.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from longspan.models import rope
from longspan.models.forward import Given, LazyMask, document_starts, lazy_rules, tensor_rules, tensors_within
from longspan.models.hooks import masks_later
from longspan.rule import Rule

# Packed documents as flash attention takes them: bounds in the flattened batch, and the longest document.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
LONGEST = ("max_length_q", "max_length_k")
TRIAL = 8  # tokens of a trial

Documents = tuple[tuple[int, ...], ...]  # first positions per batch row; () is one document


class _Reached(Exception):
    """Ends a trial at the first layer, with what the layer was given."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__("the trial reached the first layer")
        self.given = given


@torch.no_grad()
def trial(
    decoder: Any, plain: Callable[..., Any], length: int = TRIAL, **inputs: Any
) -> tuple[list[LazyMask], list[Any]]:
    """Runs `plain`, the decoder's own forward, on one row of `length` zero embeddings up to its first layer. Returns
    the masks it asked for and what it gave to the layer. Raises ValueError where the decoder fails."""

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Reached([*args, *kwargs.values()])

    weight = decoder.get_input_embeddings().weight
    embeds = torch.zeros(1, length, weight.shape[1], dtype=weight.dtype, device=weight.device)
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    # First among hooks: where parameters are sharded, nothing of the layer is gathered.
    handles = [layer.register_forward_pre_hook(stop, prepend=True, with_kwargs=True) for layer in layers]
    tokens = {"inputs_embeds": embeds}
    if "per_layer_inputs" in inspect.signature(plain).parameters:  # looked up from ids, beside the embeddings
        tokens = {"input_ids": embeds[..., 0].long()}
    try:
        with masks_later() as asked, rope.unchanged(decoder):
            plain(**tokens, use_cache=False, **inputs)
    except _Reached as reached:
        return asked, reached.given
    except (AttributeError, KeyError, TypeError, RuntimeError, IndexError, ValueError) as error:
        raise ValueError(f"{type(decoder).__name__} does not take {', '.join(inputs)} of this form: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    raise ValueError(f"{type(decoder).__name__} has no layers that longspan knows; {', '.join(inputs)} cannot be tried")


# -- packed documents ------------------------------------------------------------------------------------------


def packed_documents(
    decoder: Any, plain: Callable[..., Any], facts: dict[Any, Any], positions: Tensor | None, batch: int
) -> Documents | None:
    """The documents that the plain decoder reads from position_ids, [B, S] or [rows, B, S], where it has no mask.

    Raises ValueError for [B, S] that do not go up by one everywhere, if the decoder does not read documents from them:
    with one attention backend or another they may be documents all the same.
    """
    if positions is None or bool((positions.diff() == 1).all()):
        return None
    count = positions.shape[0] if positions.ndim == 3 else 0
    if ("packing", count) not in facts:
        facts["packing", count] = packing_row(decoder, plain, count, positions.device)
    row = facts["packing", count]
    if row is None and count == 0:
        raise ValueError(
            f"position_ids that restart would not separate documents in {type(decoder).__name__}; pass cu_seq_lens_q "
            "and cu_seq_lens_k to separate them, or an attention_mask of ones to leave them together"
        )
    if row is None:
        return None
    read = positions[row] if count else positions
    return document_starts(read.expand(batch, -1))


def packing_row(decoder: Any, plain: Callable[..., Any], count: int, device: torch.device) -> int | None:
    """Which of `count` rows of position_ids (0: there is only one) the decoder reads documents from; None: none."""
    length = TRIAL + count
    positions = torch.arange(length, device=device).repeat(max(1, count), 1, 1)
    for row in range(max(1, count)):
        positions[row, :, row + 2 :] -= row + 2  # each row restarts at another token
    asked, _ = trial(decoder, plain, length, position_ids=positions if count else positions[0])
    found = {rule.document_starts for mask in asked for rule in lazy_rules(mask, 1, length)}
    read: dict[tuple[int, ...], int | None] = {(): None, **{(0, row + 2): row for row in range(max(1, count))}}
    if len(found) != 1 or not found <= set(read):
        raise ValueError(
            f"{type(decoder).__name__} does not tell which documents it reads from position_ids; pass cu_seq_lens_q "
            "and cu_seq_lens_k instead"
        )
    return read[found.pop()]


def bounded_documents(arguments: Mapping[str, Any], batch: int, length: int) -> Documents | None:
    """The documents that cu_seq_lens_q and cu_seq_lens_k bound: integers [documents + 1] that ascend from 0 to B * S in
    the flattened batch. Raises ValueError where they say something else, or position_ids contradict them."""
    bounds = [arguments.get(name) for name in BOUNDS]
    longest = [arguments.get(name) for name in LONGEST]
    if all(each is None for each in bounds):
        if any(each is not None for each in longest):
            raise ValueError(f"{' and '.join(LONGEST)} say nothing without {' and '.join(BOUNDS)}")
        return None
    for name, each in zip(BOUNDS, bounds):
        if not isinstance(each, Tensor) or each.ndim != 1 or each.is_floating_point() or each.dtype is torch.bool:
            raise ValueError(f"{' and '.join(BOUNDS)} go together, each a list of integers; {name} is {_kind(each)}")
    q, k = (each.tolist() for each in bounds)  # type: ignore[union-attr]
    if q != k:
        raise ValueError(f"{' and '.join(BOUNDS)} differ; a document's queries see its own keys")
    total = batch * length
    if len(q) < 2 or q[0] != 0 or q[-1] != total or any(a >= b for a, b in zip(q, q[1:])):
        raise ValueError(f"{BOUNDS[0]} must ascend from 0 to the {total} tokens of the batch, got {_few(q)}")
    missing = sorted(set(range(0, total, length)) - set(q))
    if missing:
        raise ValueError(f"{BOUNDS[0]} must hold where every batch row of {length} tokens begins, lacks {missing[0]}")
    widest = max(b - a for a, b in zip(q, q[1:]))
    for name, each in zip(LONGEST, longest):
        if each is not None and int(each) < widest:
            raise ValueError(f"{name} is {int(each)}, but a document has {widest} tokens")
    documents = tuple(
        tuple(start - row * length for start in q[:-1] if row * length <= start < (row + 1) * length)
        for row in range(batch)
    )
    documents = tuple(starts if len(starts) > 1 else () for starts in documents)
    _check_agreement(arguments.get("position_ids"), documents, batch)
    return documents


def _check_agreement(positions: Tensor | None, documents: Documents, batch: int) -> None:
    """position_ids of one row per token restart exactly where documents begin; of several, there and elsewhere."""
    if positions is None:
        return
    for grid in positions if positions.ndim == 3 else [positions]:
        for row, (breaks, starts) in enumerate(zip(document_starts(grid.expand(batch, -1)), documents)):
            agree = set(starts) <= set(breaks) if positions.ndim == 3 else starts == breaks
            if not agree:
                raise ValueError(
                    f"in batch row {row} documents begin at {_few(starts or (0,))} by {BOUNDS[0]}, and at "
                    f"{_few(breaks or (0,))} by position_ids"
                )


# -- masks that come with the call -----------------------------------------------------------------------------


def given_masks(
    decoder: Any,
    plain: Callable[..., Any],
    facts: dict[Any, Any],
    backend: str,
    mask: Any,
    batch: int,
    length: int,
    documents: Documents | None,
) -> dict[str | None, Given]:
    """The rules of masks that transformers would use as they are: by layer type, or under None one for all layers; {}
    for a mask that the plain decoder would not get to see.

    `backend` is the model's own attention ("sdpa"); `documents` are those of `bounded_documents`.
    Raises ValueError for what is not such a mask, and where the decoder would not hand it to its layers as it is.
    """
    entries: dict[str | None, Any] = dict(mask) if isinstance(mask, Mapping) else {None: mask}
    given = {kind: _given(decoder, backend, each, batch, length, documents) for kind, each in entries.items()}
    if isinstance(mask, LazyMask) and _skipped(mask, given[None].rules, length):
        return {}
    form = None if None in entries else tuple(sorted(map(str, entries)))
    if ("hands on", form) not in facts:
        _check_hands_on(decoder, plain, form)
        facts["hands on", form] = True
    return given


def _given(decoder: Any, backend: str, mask: Any, batch: int, length: int, documents: Documents | None) -> Given:
    if isinstance(mask, Tensor):
        rules = tensor_rules(mask, batch, length)
        if backend not in ("sdpa", "eager") or (backend == "eager" and mask.dtype is torch.bool):
            raise ValueError(f"attention {backend!r} does not take {mask.dtype} masks [B, 1, S, S] for what they are")
        make_mask: Callable[[], Any] = lambda: mask  # noqa: E731
    elif isinstance(mask, LazyMask):
        if mask.original not in (sdpa_mask, eager_mask):
            raise ValueError(
                f"masks made above {type(decoder).__name__} are not supported with attention {backend!r}; load the "
                "model with attn_implementation='sdpa'"
            )
        rules, make_mask = lazy_rules(mask, batch, length), mask.tensor
    elif mask is None:
        if backend != "sdpa" or not getattr(decoder.config, "is_causal", True):
            raise ValueError(f"a layer type without a mask means something else to attention {backend!r} than causal")
        rules, make_mask = (Rule.causal(),) * batch, lambda: None
    else:
        raise ValueError(f"attention_mask must be a tensor, or tensors by layer type, got {type(mask).__name__}")
    if documents is None:
        return Given(rules, make_mask)
    if isinstance(mask, Tensor):
        raise ValueError(f"give either a mask {tuple(mask.shape)} or {BOUNDS[0]}, not both")

    def refuse() -> Any:
        raise ValueError(f"kernel='model' cannot add {BOUNDS[0]} to masks made above the decoder; use kernel='flash'")

    return Given(tuple(rule.packed(starts) for rule, starts in zip(rules, documents)), refuse)


def _skipped(mask: LazyMask, rules: tuple[Rule, ...], length: int) -> bool:
    """Whether the plain model gets no tensor, because its attention is causal anyway: then its decoder makes its own
    masks."""
    size = mask.arguments.get("local_size")
    causal = all(rule in (Rule.causal(), Rule.causal().windowed(size or 1)) for rule in rules)
    skips = mask.original is sdpa_mask and mask.arguments.get("allow_is_causal_skip", True)
    return bool(skips and causal and (size is None or length < size))


def _check_hands_on(decoder: Any, plain: Callable[..., Any], types: tuple[str, ...] | None) -> None:
    """Raises ValueError unless the decoder hands a 4-D mask (or one of a dictionary of them) to its layers as it is."""
    missing = set(getattr(decoder.config, "layer_types", None) or ()) - set(types or ())
    if types is not None and missing:
        raise ValueError(f"attention_mask has no mask for layers of type {', '.join(sorted(missing))}")
    device = decoder.get_input_embeddings().weight.device
    masks = [torch.ones(1, 1, TRIAL, TRIAL, dtype=torch.bool, device=device) for _ in types or (None,)]
    asked, reached = trial(decoder, plain, attention_mask=masks[0] if types is None else dict(zip(types, masks)))
    if asked or not any(value is mask for value in reached for mask in masks):
        raise ValueError(
            f"{type(decoder).__name__} does not hand {'a 4-D mask' if types is None else 'masks by layer type'} to its "
            "layers as it is; not supported"
        )


def contents(mask: Any) -> Any:
    """What of an attention_mask ranks must agree on: a LazyMask's tensors, anything else as it is."""
    if isinstance(mask, Mapping):
        return {kind: contents(each) for kind, each in mask.items()}
    if isinstance(mask, LazyMask):
        looked_up = tensors_within(mask.arguments["mask_function"], set())
        return [mask.arguments.get("attention_mask"), *(tensor for _, tensor in looked_up)]
    return mask


def made(mask: Any) -> Any:
    """An attention_mask as the plain model gets it: with its LazyMasks made."""
    if isinstance(mask, Mapping):
        return {kind: made(each) for kind, each in mask.items()}
    return mask.tensor() if isinstance(mask, LazyMask) else mask


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _few(values: Any) -> str:
    return f"{list(values[:8])}{'..' if len(values) > 8 else ''}"
