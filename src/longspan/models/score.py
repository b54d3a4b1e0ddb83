"""score(): log-probabilities, entropy, top tokens, hidden states and logits of whole sequences, in the caller's order.

Sequences of any lengths are laid end to end in one row [1, total], as documents that do not see each other, and that
row is split over the ranks; pad tokens are never computed. Every rank scores its own rows, in chunks, through the
model's own head (`scoring.chunked_fields`); the narrow results are gathered in one collective per dtype, hidden states
and logits only where they were asked for; then they are cut into sequences again.

A model that is not split is not trusted to keep documents apart: there, sequences of one length make a batch, and
lengths run one after the other. The same for split decoders in which a token's position depends on more than its own
document (positions counted by the decoder's own modules or by a model around it, RoPE that looks at the longest one).

Gradients: what comes back is whole and the same on every rank, and the gather's backward hands each rank the gradient
of its own rows (`comm`). So a loss is written as on one rank, computed on every context-parallel rank alike, and after
the trainer's averaging (DDP, FSDP, `cp.reduce_gradients`) every parameter has the plain model's gradient. Nothing
computed from these outputs is to be summed over context-parallel ranks again; sums over data-parallel ranks are
`dp_reduce`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from longspan.comm import ContextParallel
from longspan.layout import Span
from longspan.models import rope
from longspan.models.causal_lm import head_over, keep_rows, scored_from_rows
from longspan.models.decoder import STATE, Request, State, check_dropout, plain_forward
from longspan.models.find import decoder_of, model_within, parent_of
from longspan.models.inputs import BOUNDS
from longspan.scoring import IGNORE, check_targets, chunked_fields

T = TypeVar("T")
PerSequence = list[Tensor] | Tensor  # one tensor per sequence of a list, or [B, S, ..] of a batch
Fused = tuple[Tensor, dict[str, int]]  # fields side by side in the last dimension, and their widths


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
class Run:
    """Sequences that go through the decoder together, end to end in the flattened batch."""

    ids: Tensor  # [B, S]
    targets: Tensor  # [B, S, K]
    bounds: dict[str, Tensor]  # of documents, where the row holds several
    members: tuple[int, ...]  # which sequences
    lengths: tuple[int, ...]


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
    share_prefixes: bool = False,
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
        share_prefixes: not available yet.

    A sequence's values do not depend on what is scored beside it, on padding or on the split: they are those of the
    sequence alone in the plain model, over the `config.vocab_size` tokens (logits of a padded output table are left
    out). Raises ValueError on every rank, before anything is sent, for what cannot be so.
    """
    inner = model_within(model)
    adapted: Any = getattr(inner, STATE, None)
    split: State | None = adapted if isinstance(adapted, State) and not adapted.suspended else None
    options = top_k, entropy, hidden_states, logits, temperature, share_prefixes
    given: dict[str, Any] = {"options": repr(options)}

    def planned() -> tuple[Plan, Wanted]:
        _check_model(model, inner, adapted, split)
        wanted = _wanted(inner, *options)
        device = inner.get_input_embeddings().weight.device
        parts, spans = _parts(sequences, attention_mask, device)
        labels = _check_count(_labels(parts, spans, targets, sequences))
        given.update(sequences=parts, targets=labels)  # compared over the ranks as what they mean
        _check_tokens(inner, parts, labels, wanted)
        packs = split is not None and _packs(inner, split)
        padded = sequences.shape[1] if isinstance(sequences, Tensor) else None
        flat = [each.reshape(len(each), -1) for each in labels]
        return Plan(_runs(parts, flat, packs=packs), spans, padded, labels[0].shape[1:]), wanted

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


def _wanted(
    model: Any, top_k: int, entropy: bool, hidden_states: bool, logits: Any, temperature: float, share_prefixes: bool
) -> Wanted:
    if logits not in (False, "whole", "local"):
        raise ValueError(f'logits are "whole", "local" or False, got {logits!r}')
    if not (isinstance(temperature, int | float) and math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a positive number, got {temperature!r}")
    vocabulary = min(model.get_output_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    if not 0 <= top_k <= vocabulary:
        raise ValueError(f"top_k must lie between 0 and the vocabulary of {vocabulary}, got {top_k}")
    if share_prefixes:
        raise ValueError("share_prefixes=True is not available yet; shared prefixes are computed with every sequence")
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


def _packs(model: Any, state: State) -> bool:
    """Whether a token's position is counted within its document: by longspan at the decoder's boundary, and by nobody
    above or within it."""
    decoder = decoder_of(model)
    return not state.numbers_itself and not rope.modules_of(decoder) and parent_of(model, decoder)[0] is model


def _runs(parts: list[Tensor], labels: list[Tensor], *, packs: bool) -> list[Run]:
    """All sequences in one row, or those of each length in a batch. labels: [T_i, K]"""
    if packs:
        groups = [tuple(range(len(parts)))]
    else:
        by_length: dict[int, list[int]] = {}
        for i, part in enumerate(parts):
            by_length.setdefault(len(part), []).append(i)
        groups = [tuple(members) for members in by_length.values()]
    runs = []
    for members in groups:
        lengths = tuple(len(parts[i]) for i in members)
        batch = 1 if packs else len(members)
        ids = torch.cat([parts[i] for i in members])
        bounds: dict[str, Tensor] = {}
        if packs and len(members) > 1:
            starts = torch.tensor([0, *lengths], device=ids.device).cumsum(0).int()
            bounds = dict.fromkeys(BOUNDS, starts)
        targets = torch.cat([labels[i] for i in members])
        runs.append(Run(ids.view(batch, -1), targets.view(batch, -1, targets.shape[-1]), bounds, members, lengths))
    return runs


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
    """All fields of a run, whole [B, S, ..]; local logits of this rank's rows, and their places in the flat batch."""
    request = Request(inputs={}, check=lambda batch, length: None, bounds=run.bounds)
    keep_rows(model, original, request, {"input_ids": run.ids})
    if request.hidden is None:
        raise ValueError(f"{type(model).__name__} did not ask its decoder for hidden states")
    batch, length = run.ids.shape
    cp = ContextParallel(None, "contiguous").bind(length) if request.forward is None else request.forward.cp
    hidden = request.hidden
    head = head_over(model, original, request)
    targets = cp.cut(run.targets.to(hidden.device), 1)
    local = chunked_fields(
        hidden,
        targets,
        head,
        vocabulary=wanted.vocabulary,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        entropy=wanted.entropy,
    )
    fields = _gather_together(cp, local)
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

    def put(name: str, i: int, value: Tensor) -> None:
        fields.setdefault(name, [value] * count)[i] = value

    for run, fused in zip(runs, ran):
        whole: dict[str, Tensor] = {}
        for together, widths in fused:
            whole.update(zip(widths, together.flatten(0, 1).split(list(widths.values()), -1)))
        places = whole["places"][:, 0] if "places" in whole else None
        start = 0
        for i, length in zip(run.members, run.lengths):
            for name, field in whole.items():
                if places is None or name not in ("logits", "places"):
                    put(name, i, field[start : start + length])
                    continue
                inside = (places >= start) & (places < start + length)
                put(name, i, places[inside] - start if name == "places" else field[inside])
            start += length
    return fields


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
