"""score(): log-probabilities, entropy, top tokens, hidden states and logits of whole sequences, in the caller's order.

Sequences of any lengths are laid end to end in one row [1, total], as documents that do not see each other, and that
row is split over the ranks; pad tokens are never computed. Every rank scores its own rows, in chunks, through the
model's own head (`scoring.chunked_fields`); the narrow results are gathered in one collective per dtype, hidden states
and logits only where they were asked for; then they are cut into sequences again.

Sequences that share prefixes make a prefix tree of that row where this is predicted to pay: every shared token is
computed once (`prefix_tree`, `Rule.branched`), and what comes back is indexed by each sequence's rows, whose backward
adds the gradients of shared tokens up. At a branch a row has several targets. A row is scored once for each of its
entries, lines of K targets where the caller gives K per position: the first one of every row stands in the order of
rows, further ones behind. So no row is widened for the sake of another, and the head repeats branches only.

A model that is not split is not trusted to keep documents apart: there, sequences of about one length make a batch,
padded on the right, which causal attention does not see, or of one length only where that cannot be told. One length
at a time is also for split decoders in which a token's position depends on more than its own document (positions
counted by the decoder's own modules or by a model around it, RoPE that looks at the longest one).

Gradients: what comes back is whole and the same on every rank, and the gather's backward hands each rank the gradient
of its own rows (`comm`). So a loss is written as on one rank, computed on every context-parallel rank alike, and after
the trainer's averaging (DDP, FSDP, `cp.reduce_gradients`) every parameter has the plain model's gradient. Nothing
computed from these outputs is to be summed over context-parallel ranks again; sums over data-parallel ranks are
`dp_reduce`'s.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from longspan.comm import ContextParallel
from longspan.layout import Layout, Span, join
from longspan.models import numbering, rope
from longspan.models.causal_lm import head_over, keep_rows, scored_from_rows
from longspan.models.decoder import (
    STATE,
    Request,
    State,
    cannot_branch,
    cannot_number,
    check_dropout,
    hooked,
    layer_rules,
    mixing_modules,
    parameter_names,
    plain_forward,
)
from longspan.models.find import decoder_of, model_within, parent_of
from longspan.models.forward import bends
from longspan.models.inputs import BOUNDS
from longspan.prefix_tree import Integers, PrefixTree, block_cost_on, prefix_tree, worth_sharing
from longspan.rule import Rule
from longspan.scoring import IGNORE, check_targets, chunked_fields

log = logging.getLogger("longspan")
T = TypeVar("T")
PerSequence = list[Tensor] | Tensor  # one tensor per sequence of a list, or [B, S, ..] of a batch
Fused = tuple[Tensor, dict[str, int]]  # fields side by side in the last dimension, and their widths
PADDING = 0.12  # of a plain model's tokens, for the sake of fewer forwards


class TopK(NamedTuple):
    """The most probable tokens of every position, most probable first: [T, k] per sequence."""

    logprobs: PerSequence  # fp32 (fp64 of fp64 models)
    ids: PerSequence  # int64


@dataclass(frozen=True)
class Scores:
    """What `score` returns: whole, in the caller's order, the same on every rank. For a list of sequences every field
    is a list of tensors [T_i, ..]; for a batch it is one tensor [B, S, ..] that holds zeros at padding.

    logprobs: of the targets, in their shape; fp32 (fp64 of fp64 models), as are entropy and top-k log-probabilities.
    entropy: in nats. top_k: see `TopK`. hidden_states: [.., width], what the decoder gives to the head, in its dtype.
    logits: [.., vocabulary] divided by the temperature, in the head's dtype; with logits="local" a list in any case, of
    this rank's rows of each sequence, whose positions in the sequence (for a batch: in its row) are `positions`.
    """

    logprobs: PerSequence
    entropy: PerSequence | None = None
    top_k: TopK | None = None
    hidden_states: PerSequence | None = None
    logits: PerSequence | None = None
    positions: list[Tensor] | None = None


@dataclass(frozen=True)
class Wanted:
    """What is asked of every row."""

    vocabulary: int
    top_k: int
    entropy: bool
    hidden_states: bool
    logits: Literal["whole", "local"] | None
    temperature: float


@dataclass(frozen=True)
class Shared:
    """How a run's sequences lie in a prefix tree. Its entries are lines of K targets of a row: one of every row, in
    order, then a second one of rows that have more than K targets, and so on."""

    tree: PrefixTree
    rows: list[Tensor]  # per sequence: int64 [T_i]
    slots: list[Tensor]  # per sequence: where its targets stand in the flattened entries, int64 [T_i, K]; -1: ignored
    entries: list[Integers]  # the rows that have a first entry (all), a second one, ..; ascending


@dataclass(frozen=True)
class Run:
    """Sequences that go through the decoder together: end to end in one row, one per row of a batch, or as a tree."""

    ids: Tensor  # [B, S]
    targets: Tensor  # [B, S, K]; of a tree [1, entries, K]
    members: tuple[int, ...]  # which sequences
    spans: tuple[Span, ...]  # where each lies in the flattened batch; () for a tree
    bounds: Mapping[str, Tensor]  # of documents, where the row holds several
    shared: Shared | None = None


@dataclass(frozen=True)
class Plan:
    """A call, checked: what runs, and where its sequences lie in the caller's batch."""

    runs: list[Run]
    spans: list[Span]  # of the real tokens of every sequence in its row
    padded: int | None  # S of a batch, None for a list
    trailing: torch.Size  # of the targets behind the token dimension: () or (K,)


def score(
    model: nn.Module,
    sequences: Tensor | Sequence[Tensor | Sequence[int]],
    targets: Tensor | Sequence[Tensor | Sequence[int]] | None = None,
    *,
    attention_mask: Tensor | None = None,
    top_k: int = 0,
    entropy: bool = False,
    hidden_states: bool = False,
    logits: Literal["whole", "local", False] = False,
    temperature: float = 1.0,
    share_prefixes: bool = True,
) -> Scores:
    """Scores whole sequences under a causal LM, parallelized or not; every rank of the group calls it alike.

    Args:
        model: a Hugging Face causal LM, also inside DDP, PEFT or torch.compile, in train or eval mode.
        sequences: token ids, a batch [B, S], or a list of 1-D tensors or lists of any lengths from 1 on.
        targets: what to predict *at* each position, in the shape of the sequences, or with several targets per position
            [.., K]. No shift: entry t is scored by log p(targets[t] | input[: t + 1]). -100: exactly 0 and no gradient.
            Default: the next token, and -100 at each sequence's last.
        attention_mask: of a batch, 1 for real tokens, with padding on either side (none within).
        top_k: how many most probable tokens of each position to return.
        entropy: of each position's distribution.
        hidden_states: the decoder's output; costs its gather.
        logits: "whole" (gathered: tokens x vocabulary on every rank), "local" (this rank's rows), or False.
        temperature: divides the logits before everything else.
        share_prefixes: compute prefixes that sequences have in common once, where that is predicted to pay and the
            split model can; otherwise (a model that is not split, above all) they are computed with every sequence.

    A sequence's values do not depend on what is scored beside it, on padding or on the split: they are those of the
    sequence alone in the plain model, over the `config.vocab_size` tokens (logits of a padded output table are left
    out). Raises ValueError on every rank, before anything is sent, for what cannot be so.
    """
    inner = model_within(model)
    adapted: Any = getattr(inner, STATE, None)
    split: State | None = adapted if isinstance(adapted, State) and not adapted.suspended else None
    options = top_k, entropy, hidden_states, logits, temperature
    given: dict[str, Any] = {"options": repr((*options, share_prefixes))}

    def planned() -> tuple[Plan, Wanted]:
        _check_model(model, inner, adapted, split)
        wanted = _wanted(inner, *options)
        device = inner.get_input_embeddings().weight.device
        parts, spans = _parts(sequences, attention_mask, device)
        labels = _check_count(_labels(parts, spans, targets, sequences))
        given.update(sequences=parts, targets=labels)  # compared over the ranks as what they mean
        _check_tokens(inner, parts, labels, wanted)
        padded = sequences.shape[1] if isinstance(sequences, Tensor) else None
        flat = [each.reshape(len(each), -1) for each in labels]
        tree = _tree(inner, split, parts) if share_prefixes and split is not None else None
        runs = [_tree_run(tree, flat)] if tree is not None else _runs(inner, split, parts, flat)
        return Plan(runs, spans, padded, labels[0].shape[1:]), wanted

    plan, wanted = planned() if split is None else split.cp.agree(planned, given, "calls of score")
    # The model's own forward, not the split one, does what stands around its decoder.
    original = inner.forward if adapted is None else plain_forward(inner)

    def scored(*args: Any, **kwargs: Any) -> list[list[Fused]]:
        return [_run(inner, original, run, wanted) for run in plan.runs]

    # Through the model as it was given, so that DDP and FSDP prepare for the backward. They hook what it returns, which
    # is cut into sequences only outside: hooks and views do not go together.
    with _forward_answered(inner, scored):
        ran = model(input_ids=plan.runs[0].ids)
    return _scores(plan, wanted, _collect(plan.runs, ran))


def dp_reduce(value: Tensor, mesh: DeviceMesh | dist.ProcessGroup | None) -> Tensor:
    """The sum of `value` over data-parallel ranks, the same on all of them. Differentiable.

    mesh: `mesh["dp"]`, a mesh that has an axis "dp", a process group, or None (one rank). Never a context-parallel
    group: what is computed from whole outputs is the same on its ranks, and is not summed over them.

    The convention: afterwards gradients are averaged over data-parallel ranks, so what is trained is the mean of their
    losses. One rank's value takes part in all of these losses through the sum, so the backward sums the gradients over
    the same ranks, and every one of them must run it. Where every rank computes the same loss L of the sum, each rank's
    value gets ranks x dL/dsum, and after the averaging every parameter has the gradient of L. Where a rank's loss has
    terms of its own beside the sum, the gradient is that of the mean of the losses, exactly. A `value` without a
    gradient (a count) is only summed.

    Raises ValueError for a context-parallel mesh.
    """
    group = _dp_group(mesh)
    return value if mesh is None or dist.get_world_size(group) == 1 else _SumOverRanks.apply(value, group)


def check_loss(loss: T, group: Any) -> T:
    """Returns `loss` (a tensor, or nested ones). Raises ValueError on every rank, naming those that differ, unless it
    is bit for bit the same on all context-parallel ranks, as gradients require. For debugging: one tiny collective.

    group: the parallelized model, a ContextParallel, or the context-parallel mesh or process group.
    """
    if isinstance(group, nn.Module):
        state = getattr(model_within(group), STATE, None)
        group = None if state is None else state.cp
    cp = group if isinstance(group, ContextParallel) else ContextParallel(group)
    same = ContextParallel(cp.mesh)  # whatever the model's check_batch: this is what is asked for
    same.agree(lambda: None, {"loss": loss}, "losses")
    return loss


# -- what runs -------------------------------------------------------------------------------------------------


def _wanted(model: Any, top_k: int, entropy: bool, hidden_states: bool, logits: Any, temperature: float) -> Wanted:
    if logits not in (False, "whole", "local"):
        raise ValueError(f'logits are "whole", "local" or False, got {logits!r}')
    if not (isinstance(temperature, int | float) and math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a positive number, got {temperature!r}")
    vocabulary = min(model.get_output_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    if not 0 <= top_k <= vocabulary:
        raise ValueError(f"top_k must lie between 0 and the vocabulary of {vocabulary}, got {top_k}")
    return Wanted(vocabulary, top_k, entropy, hidden_states, logits or None, float(temperature))


def _check_model(model: nn.Module, inner: Any, adapted: Any, split: State | None) -> None:
    if adapted is not None and not isinstance(adapted, State):
        raise ValueError("score() is not for models adapted by a plan: their forward is their own")
    if not isinstance(inner, PreTrainedModel) or not scored_from_rows(inner):
        raise ValueError(
            f"score() runs Hugging Face causal LMs that leave their loss to loss_function, not {type(inner).__name__}"
        )
    for module in model.modules():
        if module is inner:
            break
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("score() does not support PEFT's prompt learning, which adds tokens to every sequence")
    if split is not None:
        check_dropout(inner)
        if split.cp.gradient == "sum":
            raise ValueError(
                "score() goes with gradient='mean': what a loss computes from whole outputs is computed on every rank, "
                "and gradients that are summed would count it once per rank"
            )


def _tokens(value: Any, device: torch.device) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool):
        raise ValueError(f"tokens are integers, got {tensor.dtype}")
    return tensor.to(device=device, dtype=torch.int64)


def _parts(sequences: Any, mask: Tensor | None, device: torch.device) -> tuple[list[Tensor], list[Span]]:
    """The real tokens of every sequence, int64 [T_i], and where they lie in its row."""
    if isinstance(sequences, Tensor):
        if sequences.ndim != 2:
            raise ValueError(f"a batch is [B, S], got {tuple(sequences.shape)}; give sequences of their own as a list")
        spans = _real(mask, *sequences.shape)
        rows = [row[a:b] for row, (a, b) in zip(_tokens(sequences, device), spans)]
    elif isinstance(sequences, Sequence) and not isinstance(sequences, str):
        if mask is not None:
            raise ValueError("attention_mask belongs to a batch [B, S]; sequences of a list have no padding")
        rows = [_tokens(each, device) for each in sequences]
        for i, row in enumerate(rows):
            if row.ndim != 1:
                raise ValueError(f"sequences[{i}] has {row.ndim} dimensions, a sequence has one")
        spans = [Span(0, len(row)) for row in rows]
    else:
        raise ValueError(f"sequences are a batch [B, S] or a list of sequences, got {type(sequences).__name__}")
    empty = [i for i, row in enumerate(rows) if not len(row)]
    if empty or not rows:
        raise ValueError(f"sequence {empty[0]} has no token" if rows else "there is no sequence to score")
    return rows, spans


def _real(mask: Tensor | None, batch: int, length: int) -> list[Span]:
    """Which tokens of every row of a batch are real."""
    if mask is None:
        return [Span(0, length)] * batch
    if tuple(mask.shape) != (batch, length):
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, the batch is {(batch, length)}")
    spans = []
    for i, row in enumerate(mask.bool().cpu()):
        at = row.nonzero()[:, 0].tolist()
        span = Span(at[0], at[-1] + 1) if at else Span(0, 0)
        if span.size != len(at):
            raise ValueError(
                f"attention_mask of row {i} hides tokens between others; only padding at the ends is known"
            )
        spans.append(span)
    return spans


def _labels(parts: list[Tensor], spans: list[Span], targets: Any, sequences: Any) -> list[Tensor]:
    """Targets of the real tokens of every sequence, int64 [T_i] or [T_i, K]."""
    device = parts[0].device
    if targets is None:
        return [F.pad(part[1:], (0, 1), value=IGNORE) for part in parts]
    if isinstance(sequences, Tensor):
        if not isinstance(targets, Tensor) or targets.ndim not in (2, 3) or targets.shape[:2] != sequences.shape:
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise ValueError(f"targets of a batch {tuple(sequences.shape)} are [B, S] or [B, S, K], got {shape}")
        rows = list(_tokens(targets, device))
        for i, (row, (start, stop)) in enumerate(zip(rows, spans)):
            if bool((row[:start] != IGNORE).any() or (row[stop:] != IGNORE).any()):
                raise ValueError(f"targets of row {i} are not {IGNORE} at tokens that attention_mask hides")
        return [row[start:stop] for row, (start, stop) in zip(rows, spans)]
    if isinstance(targets, Tensor) or not isinstance(targets, Sequence) or len(targets) != len(parts):
        count = len(targets) if isinstance(targets, Sequence) else type(targets).__name__
        raise ValueError(f"{len(parts)} sequences need a list of as many targets, got {count}")
    rows = [_tokens(each, device) for each in targets]
    for i, (row, part) in enumerate(zip(rows, parts)):
        if row.ndim not in (1, 2) or len(row) != len(part):
            raise ValueError(f"targets[{i}] are {tuple(row.shape)}, its sequence has {len(part)} tokens")
        if row.shape[1:] != rows[0].shape[1:]:
            raise ValueError(f"targets[{i}] are {tuple(row.shape)}, targets[0] {tuple(rows[0].shape)}: K must be one")
    return rows


def _check_count(labels: list[Tensor]) -> list[Tensor]:
    if labels[0].shape[1:] == (0,):
        raise ValueError("targets are [.., K] with K = 0: there is nothing to score")
    return labels


def _check_tokens(model: Any, parts: list[Tensor], labels: list[Tensor], wanted: Wanted) -> None:
    known = model.get_input_embeddings().weight.shape[0]
    for i, (part, label) in enumerate(zip(parts, labels)):
        if bool(((part < 0) | (part >= known)).any()):
            raise ValueError(
                f"sequence {i} has tokens from {int(part.min())} to {int(part.max())}, outside 0..{known - 1}"
            )
        check_targets(label, wanted.vocabulary, f"targets[{i}]")


def _not_packed(model: Any, state: State) -> str | None:
    """Why a token's position may depend on more than its own document; None where longspan counts positions at the
    decoder's boundary, and nobody above or within the decoder does."""
    decoder = decoder_of(model)
    reason = cannot_number(decoder, state)
    if reason is not None:
        return reason
    return None if parent_of(model, decoder)[0] is model else "a model around its decoder numbers tokens"


def packs(model: nn.Module) -> bool:
    """Whether `score` runs all its sequences in one forward of the decoder. Where it does not, ranks with other
    sequences run it another number of times, which FSDP cannot."""
    inner = model_within(model)
    state = getattr(inner, STATE, None)
    return isinstance(state, State) and _not_packed(inner, state) is None


def shared_tree(model: nn.Module, parts: list[Tensor]) -> PrefixTree | None:
    """The prefix tree as which `score` would run these sequences, None where it would not."""
    inner = model_within(model)
    state = getattr(inner, STATE, None)
    return _tree(inner, state, parts) if isinstance(state, State) else None


def _tree(model: Any, state: State, parts: list[Tensor]) -> PrefixTree | None:
    """The prefix tree of the sequences, where that is predicted to be faster and the model can. Where it only cannot,
    that is said once."""
    if len(parts) < 2 or state.facts.get("told not to share"):
        return None
    decoder = decoder_of(model)
    reason = _not_packed(model, state) or cannot_branch(decoder, state)
    full = 1.0  # the part of the layers that see everything before: what a shared pair saves elsewhere is left out
    if reason is None:
        rules = layer_rules(decoder, plain_forward(decoder), state.facts)
        full = sum(layers for rule, layers in rules if rule == Rule.causal()) / sum(layers for _, layers in rules)
    weight = model.get_input_embeddings().weight
    pair_cost = full / (6 * weight.shape[1])
    # Each rank has a part of a block, and only its share of the tokens.
    block_cost = block_cost_on(weight.device.type) * state.cp.size
    tree = prefix_tree([part.cpu() for part in parts], block_cost=block_cost)
    if not worth_sharing(tree, pair_cost=pair_cost, block_cost=block_cost):
        return None
    if reason is None:
        return tree
    state.facts["told not to share"] = True
    if state.cp.rank == 0:
        saved = 1 - tree.shared.tokens / tree.flat.tokens
        log.warning(
            f"score: {saved:.0%} of the tokens are in prefixes that sequences share, and {type(model).__name__} "
            f"computes them once per sequence: {reason}"
        )
    return None


def _tree_run(tree: PrefixTree, labels: list[Tensor]) -> Run:
    """All sequences as one row. labels: [T_i, K]"""
    device, count, width = labels[0].device, len(tree.tokens), labels[0].shape[1]
    rows = [torch.from_numpy(each).to(device) for each in tree.rows]
    wanted = torch.cat(labels)
    scored = wanted != IGNORE
    # Every target of a row once, by row and then by target.
    base = int(wanted.max().clamp(min=0)) + 1
    keys, which = torch.unique((torch.cat(rows)[:, None] * base + wanted)[scored], return_inverse=True)
    row, target = keys // base, keys % base
    per_row = torch.bincount(row, minlength=count)
    nth = torch.arange(len(keys), device=device) - (per_row.cumsum(0) - per_row)[row]
    again, column = nth // width, nth % width
    more = torch.unique((again * count + row)[again > 0])  # the entries behind the first ones
    entry = torch.where(again == 0, row, count + torch.searchsorted(more, again * count + row))
    targets = wanted.new_full((count + len(more), width), IGNORE)
    targets[entry, column] = target
    slots = torch.full_like(wanted, -1)
    slots[scored] = (entry * width + column)[which]
    further = more.cpu().numpy()
    entries = [np.arange(count, dtype=np.int64)]
    entries += [further[further // count == n] % count for n in range(1, int(per_row.max() + width - 1) // width)]
    shared = Shared(tree, rows, list(slots.split([len(each) for each in rows])), entries)
    ids = torch.from_numpy(tree.tokens).to(device)[None]
    return Run(ids, targets[None], tuple(range(len(rows))), (), {}, shared)


def _runs(model: Any, state: State | None, parts: list[Tensor], labels: list[Tensor]) -> list[Run]:
    """All sequences in one row, or those of about one length in a batch. labels: [T_i, K]"""
    if state is not None and _not_packed(model, state) is None:
        lengths = [len(part) for part in parts]
        ends = [0, *itertools.accumulate(lengths)]
        spans = tuple(Span(a, b) for a, b in zip(ends, ends[1:]))
        ids = torch.cat(parts)[None]
        bounds = dict.fromkeys(BOUNDS, torch.tensor(ends, device=ids.device).int()) if len(parts) > 1 else {}
        return [Run(ids, torch.cat(labels)[None], tuple(range(len(parts))), spans, bounds)]
    groups = _by_length(parts, 0.0)
    looser = _by_length(parts, PADDING) if state is None else groups
    if len(looser) < len(groups) and _may_pad(model):
        groups = looser
    runs = []
    for members in groups:
        longest = max(len(parts[i]) for i in members)
        # With the last token again, since some models take what their config calls padding for a mistake.
        ids = torch.stack([torch.cat([parts[i], parts[i][-1:].expand(longest - len(parts[i]))]) for i in members])
        pads = [(0, 0, 0, longest - len(parts[i])) for i in members]
        targets = torch.stack([F.pad(labels[i], pad, value=IGNORE) for i, pad in zip(members, pads)])
        spans = tuple(Span(n * longest, n * longest + len(parts[i])) for n, i in enumerate(members))
        runs.append(Run(ids, targets, members, spans, {}))
    return runs


def _by_length(parts: list[Tensor], padding: float) -> list[tuple[int, ...]]:
    """Groups of sequences, each padded to its longest by at most that fraction of its tokens; equal ones together."""
    groups: list[list[int]] = []
    real = 0
    for i in sorted(range(len(parts)), key=lambda i: -len(parts[i])):
        longest = len(parts[groups[-1][0]]) if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= (1 + padding) * (real + len(parts[i])):
            groups[-1].append(i)
            real += len(parts[i])
        else:
            groups.append([i])
            real = len(parts[i])
    return [tuple(group) for group in groups]


def _may_pad(model: Any) -> bool:
    """Whether a plain model is known to compute a sequence alike with padding on its right: causal attention is all
    that mixes tokens, and they are numbered from 0 whatever the row holds."""
    decoder = decoder_of(model)
    numbered = "position_ids" in parameter_names(decoder) and not numbering.modules_of(decoder)
    if not numbered or rope.modules_of(decoder) or mixing_modules(decoder) or parent_of(model, decoder)[0] is not model:
        return False
    with hooked(decoder):
        try:
            rules = layer_rules(decoder, plain_forward(decoder), {})
        except ValueError:
            return False
    return all(bends(rule) for rule, _ in rules)


@contextmanager
def _forward_answered(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """`model.forward` is `function` inside the block."""
    had, before = "forward" in model.__dict__, model.__dict__.get("forward")
    model.forward = torch._dynamo.disable(function, recursive=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if had:
            model.__dict__["forward"] = before


def _run(model: Any, original: Callable[..., Any], run: Run, wanted: Wanted) -> list[Fused]:
    """All fields of a run, whole [B, S, ..], or of every entry [1, entries, ..]; local logits of this rank's rows, and
    their places in the flat batch."""
    shared = run.shared
    tree = None if shared is None else shared.tree
    request = Request(inputs={}, check=lambda batch, length: None, bounds=run.bounds, tree=tree)
    keep_rows(model, original, request, {"input_ids": run.ids})
    if request.hidden is None:
        raise ValueError(f"{type(model).__name__} did not ask its decoder for hidden states")
    batch, length = run.ids.shape
    cp = ContextParallel(None, "contiguous").bind(length) if request.forward is None else request.forward.cp
    hidden = request.hidden
    head = head_over(model, original, request)
    scored, per_entry = (cp, hidden) if shared is None else _per_entry(cp, hidden, shared.entries)
    targets = scored.cut(run.targets.to(hidden.device), 1)
    local = chunked_fields(
        per_entry,
        targets,
        head,
        vocabulary=wanted.vocabulary,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        entropy=wanted.entropy,
    )
    fields = _gather_together(scored, local)
    if wanted.hidden_states:
        fields.append((cp.gather(hidden, 1), {"hidden_states": hidden.shape[-1]}))
    if wanted.logits:
        logits = head(hidden)
        if logits.shape[-1] > wanted.vocabulary:
            logits = logits[..., : wanted.vocabulary].contiguous()
        if wanted.temperature != 1:
            logits = logits / wanted.temperature
        fields.append((cp.gather(logits, 1) if wanted.logits == "whole" else logits, {"logits": logits.shape[-1]}))
    if wanted.logits == "local":
        rows = torch.from_numpy(cp.bound.positions(cp.rank)).to(hidden.device)
        places = rows + length * torch.arange(batch, device=hidden.device)[:, None]
        fields.append((places[..., None], {"places": 1}))
    return fields


def _per_entry(cp: ContextParallel, hidden: Tensor, entries: list[Integers]) -> tuple[ContextParallel, Tensor]:
    """The group bound to entries, each on the rank that has its row, and the hidden rows [1, rows, width] of those of
    this rank."""
    if len(entries) == 1:
        return cp, hidden
    layout = cp.bound
    starts = [0, *itertools.accumulate(len(each) for each in entries)]
    spans = [
        join(
            Span(start + int(np.searchsorted(rows, span.start)), start + int(np.searchsorted(rows, span.stop)))
            for start, rows in zip(starts, entries)
            for span in own
        )
        for own in layout.spans
    ]
    owned = [rows[layout.owner[rows] == cp.rank] for rows in entries]
    owned = [rows[np.argsort(layout.row[rows])] for rows in owned]
    taken = _take(hidden[0], [torch.from_numpy(layout.row[rows]).to(hidden.device) for rows in owned])
    return replace(cp, layout=Layout(starts[-1], tuple(spans), layout.name)), torch.cat(taken)[None]


def _gather_together(cp: ContextParallel, local: Mapping[str, Tensor]) -> list[Fused]:
    """Fields [B, rows, n] gathered to [B, S, n], all of one dtype in one collective."""
    gathered: list[Fused] = []
    for dtype in dict.fromkeys(field.dtype for field in local.values()):
        fields = {name: field for name, field in local.items() if field.dtype is dtype}
        widths = {name: field.shape[-1] for name, field in fields.items()}
        gathered.append((cp.gather(torch.cat(list(fields.values()), -1), 1), widths))
    return gathered


def _collect(runs: list[Run], ran: list[list[Fused]]) -> dict[str, list[Tensor]]:
    """Every field by sequence, in the caller's order. Local logits come with their positions in the sequence."""
    count = sum(len(run.members) for run in runs)
    fields: dict[str, list[Tensor]] = {}
    for run, fused in zip(runs, ran):
        whole: dict[str, Tensor] = {}
        for together, widths in fused:
            whole.update(zip(widths, together.flatten(0, 1).split(list(widths.values()), -1)))
        cut = _cut(run, whole) if run.shared is None else _cut_tree(run.shared, whole)
        for name, values in cut.items():
            for i, value in zip(run.members, values):
                fields.setdefault(name, [value] * count)[i] = value
    return fields


def _cut(run: Run, whole: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Fields of a flattened batch by sequence."""
    places = whole.pop("places", None)
    logits = whole.pop("logits") if places is not None else None
    cut = {name: [value[start:stop] for start, stop in run.spans] for name, value in whole.items()}
    if places is not None and logits is not None:
        inside = [(places[:, 0] >= start) & (places[:, 0] < stop) for start, stop in run.spans]
        cut["places"] = [places[own, 0] - start for own, (start, _) in zip(inside, run.spans)]
        cut["logits"] = [logits[own] for own in inside]
    return cut


def _cut_tree(shared: Shared, whole: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Fields of a tree's entries and rows by sequence."""
    count = len(shared.tree.tokens)
    places = whole.pop("places", None)
    logits = whole.pop("logits") if places is not None else None
    scored = whole.pop("logprobs").reshape(-1)
    width = shared.slots[0].shape[1]
    columns = _take(scored, [slots[:, k].clamp(min=0) for slots in shared.slots for k in range(width)])
    picked = [torch.stack(columns[i : i + width], -1) for i in range(0, len(columns), width)]
    cut = {"logprobs": [each.masked_fill(slots < 0, 0.0) for each, slots in zip(picked, shared.slots)]}
    for name, value in whole.items():
        cut[name] = _take(value[:count], shared.rows)
    if places is not None and logits is not None:
        local = torch.full((count,), -1, device=places.device)
        local[places[:, 0]] = torch.arange(len(places), device=places.device)
        held = [local[rows] for rows in shared.rows]
        cut["places"] = [(own >= 0).nonzero()[:, 0] for own in held]
        cut["logits"] = _take(logits, [own[own >= 0] for own in held])
    return cut


def _take(rows: Tensor, groups: list[Tensor]) -> list[Tensor]:
    """rows[group] for every group, whose gradients add up in the order of the groups."""
    return list(_Take.apply(rows, *groups))


class _Take(torch.autograd.Function):
    """Rows [n, ..] by groups of indices. A group names no row twice (or with gradients of 0), and groups are added one
    after the other: sums repeat bit for bit, on every device. In fp32 at least."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *groups: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.groups, ctx.shape, ctx.dtype = groups, rows.shape, rows.dtype
        return tuple(rows.index_select(0, group) for group in groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [(group, each) for group, each in zip(ctx.groups, gradients) if each is not None]
        if not given:
            return (None,) * (1 + len(ctx.groups))
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total = given[0][1].new_zeros(ctx.shape, dtype=wide)
        for group, each in given:
            total.index_add_(0, group, each.to(wide))
        return (total.to(ctx.dtype), *(None for _ in ctx.groups))


# -- what comes back -------------------------------------------------------------------------------------------


def _scores(plan: Plan, wanted: Wanted, fields: dict[str, list[Tensor]]) -> Scores:
    def whole(name: str) -> PerSequence | None:
        if name not in fields or plan.padded is None:
            return fields.get(name)
        rows = []
        for row, (start, stop) in zip(fields[name], plan.spans):
            rows.append(F.pad(row, (*[0, 0] * (row.ndim - 1), start, plan.padded - stop)))
        return torch.stack(rows)

    fields = dict(fields)
    if not plan.trailing:
        fields["logprobs"] = [each.squeeze(-1) for each in fields["logprobs"]]
    if wanted.entropy:
        fields["entropy"] = [each.squeeze(-1) for each in fields["entropy"]]
    top = None
    if wanted.top_k:
        fields["top_ids"] = [each.long() for each in fields["top_ids"]]
        top = TopK(cast(PerSequence, whole("top")), cast(PerSequence, whole("top_ids")))
    positions = None
    if wanted.logits == "local":
        positions = [place + span.start for place, span in zip(fields["places"], plan.spans)]
    return Scores(
        logprobs=cast(PerSequence, whole("logprobs")),
        entropy=whole("entropy"),
        top_k=top,
        hidden_states=whole("hidden_states"),
        logits=fields["logits"] if wanted.logits == "local" else whole("logits"),
        positions=positions,
    )


# -- over data-parallel ranks ----------------------------------------------------------------------------------


def _dp_group(mesh: DeviceMesh | dist.ProcessGroup | None) -> Any:
    if not isinstance(mesh, DeviceMesh):
        return mesh
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "dp" in names:
        mesh = mesh["dp"]
    if mesh.ndim != 1 or mesh.mesh_dim_names == ("cp",):
        raise ValueError(
            f"dp_reduce sums over data-parallel ranks, mesh['dp']; got a mesh of {names or mesh.ndim} axes"
        )
    return mesh.get_group()


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; so is its backward, since every rank's loss may use the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
