"""What a model answers to a case, whether two answers are equal, and where and why they part.

Compared: the loss, whole logits, hidden states after every layer, and every parameter's gradient. An answer is one
training forward with labels and its backward, and one evaluating forward without labels: the two doors that trainers
use, of which the first never has whole logits.

The cause is found by experiment, on the plain model: each suspected fault is committed on purpose (mask dropped,
positions counted per shard, attention within shards, labels shifted within shards), and the one that reproduces the
split model's wrong answer is named.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.checks.cases import Case
from longspan.layout import Layout
from longspan.models.causal_lm import scored_from_rows
from longspan.models.find import model_within
from longspan.scoring import IGNORE, shift_left

LOSS = 1e-5
LOGITS = 1e-4
GRADIENT = 1e-5
FLOOR = 1e-3  # of the largest gradient: one below is compared on that scale, being rounding of larger terms
EXPLAINS = 0.05  # a suspected fault explains an answer that it meets to this part of the answer's error
RECURRENT = ("linear", "mamba", "conv", "recurrent", "rwkv", "ssm", "moving")


@dataclass
class Answer:
    """What a model made of a case; tensors whole, on every rank."""

    loss: float | None
    logits: Tensor | None
    hidden: tuple[Tensor, ...] | None
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Finding:
    """One case on one number of ranks. Errors are relative to the size of what is compared (loss, logits, hidden
    states: at least 1); nan where there is nothing to compare."""

    case: str
    ranks: int
    scheme: str
    layout: str
    status: str  # equal, different, refused, failed
    reason: str = ""
    loss: float = math.nan
    logits: float = math.nan
    hidden: float = math.nan
    gradient: float = math.nan
    layer: str | None = None  # the first that differs
    position: tuple[int, int] | None = None  # batch row and token, the first that differs there
    parameter: str | None = None  # the first whose gradient differs
    cause: str | None = None  # mask, position, attention, state, head, gradient, scale


# ---- answers


def answer(model: nn.Module, case: Case, after_backward: Callable[[], None]) -> Answer:
    """The model's answer to the case as it stands, plain or split. Gradients of the model are overwritten."""
    model.train()
    model.zero_grad(set_to_none=True)
    out = model(**case.inputs, **_quiet(model))
    loss = getattr(out, "loss", None)
    if loss is not None:
        loss.backward()
        after_backward()
    logits, hidden = _evaluated(model, case.unlabelled)
    return Answer(None if loss is None else float(loss.detach()), logits, hidden, _gradients(model))


def truth(model: nn.Module, case: Case, after_backward: Callable[[], None]) -> Answer:
    """The plain model's answer; for packed documents each document's on its own, put together."""
    if not case.documents:
        return answer(model, case, after_backward)
    ids, labels = case.inputs["input_ids"], case.inputs["labels"]
    pieces = list(zip(ids.split(case.documents, 1), labels.split(case.documents, 1)))
    count = max(1, int((labels != IGNORE).sum()))
    model.train()
    model.zero_grad(set_to_none=True)
    total = 0.0
    for piece, targets in pieces:
        here = int((targets != IGNORE).sum())  # none of them at a document's first token
        if here:
            # Only the head's loss: what a model adds to it (a router's) is per row, not per document.
            loss = _loss_of_head(model, piece, targets) * here / count
            loss.backward()
            total += float(loss.detach())
    after_backward()
    alone = [_evaluated(model, {"input_ids": piece}) for piece, _ in pieces]
    hidden = None
    if all(h is not None for _, h in alone):
        hidden = tuple(torch.cat(layer, 1) for layer in zip(*(h for _, h in alone if h is not None)))
    whole = None if alone[0][0] is None else torch.cat([x for x, _ in alone if x is not None], 1)
    return Answer(total, whole, hidden, _gradients(model))


def _loss_of_head(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a document's targets, by the model's own code where that is not the usual one."""
    if not scored_from_rows(model_within(model)):
        return model(input_ids=ids, labels=targets, **_quiet(model)).loss
    logits = model(input_ids=ids, **_quiet(model)).logits
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, shift_left(targets).flatten(), ignore_index=IGNORE)


def _quiet(model: nn.Module) -> dict[str, Any]:
    inner = getattr(model, "module", model)
    return {"use_cache": False} if "use_cache" in inspect.signature(inner.forward).parameters else {}


@torch.no_grad()
def _evaluated(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor | None, tuple[Tensor, ...] | None]:
    model.eval()
    out = model(**inputs, **_quiet(model), output_hidden_states=True)
    logits = getattr(out, "logits", None)
    hidden = getattr(out, "hidden_states", None)
    tokens = next(v.shape[:2] for v in inputs.values() if isinstance(v, Tensor))
    layers = tuple(h for h in hidden or () if isinstance(h, Tensor) and h.ndim >= 3 and h.shape[:2] == tokens)
    return (logits if isinstance(logits, Tensor) else None), (layers or None)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            found[name] = (gradient.to_local() if hasattr(gradient, "to_local") else gradient).detach().clone()
    return found


# ---- comparing


def compare(case: Case, true: Answer, split: Answer) -> dict[str, Any]:
    """Errors of the split answer and where it first parts from the true one, as fields of a Finding."""
    real = case.real()
    found: dict[str, Any] = {
        "loss": _loss_error(true.loss, split.loss),
        "logits": _error(true.logits, split.logits, real),
        "hidden": math.nan,
    }
    parameter, found["gradient"] = _gradient_error(true.gradients, split.gradients)
    different = not (_within(found["loss"], LOSS) and _within(found["logits"], LOGITS))
    different |= not _within(found["gradient"], GRADIENT)
    if true.hidden is not None and split.hidden is not None and len(true.hidden) == len(split.hidden):
        errors = [_error(a, b, real) for a, b in zip(true.hidden, split.hidden)]
        found["hidden"] = max(errors, default=math.nan)
        first = next((i for i, error in enumerate(errors) if not _within(error, LOGITS)), None)
        if first is not None:
            different = True
            found["layer"] = "the embeddings" if first == 0 else f"layer {first - 1}"
            found["position"] = _first_position(true.hidden[first], split.hidden[first], real)
    if "position" not in found and not _within(found["logits"], LOGITS):
        found["layer"] = "the head" if true.hidden is not None else None
        found["position"] = _first_position(true.logits, split.logits, real)
    if not _within(found["gradient"], GRADIENT):
        found["parameter"] = parameter
    found["status"] = "different" if different else "equal"
    return found


def _within(error: float, bound: float) -> bool:
    """nan stands for nothing to compare; an error that is infinite is beyond any bound."""
    return math.isnan(error) or error <= bound


def _loss_error(true: float | None, split: float | None) -> float:
    if true is None and split is None:
        return math.nan
    if true is None or split is None or not math.isfinite(split):
        return math.inf
    return abs(split - true) / max(1.0, abs(true))


def _apart(true: Tensor, split: Tensor, real: Tensor | None) -> Tensor:
    """|split - true| per token [B, S], 0 at padding, inf where the split answer is not finite."""
    difference = (split.double() - true.double()).abs().flatten(2).amax(-1)
    difference = torch.where(difference.isfinite(), difference, torch.full_like(difference, math.inf))
    return difference if real is None else difference.masked_fill(~real, 0.0)


def _error(true: Tensor | None, split: Tensor | None, real: Tensor | None) -> float:
    if true is None and split is None:
        return math.nan
    if true is None or split is None or true.shape != split.shape:
        return math.inf
    if true.ndim < 3 or (real is not None and true.shape[:2] != real.shape):
        real = None
        true, split = (t.reshape(1, 1, -1) for t in (true, split))
    scale = max(1.0, float((true.abs() if real is None else true[real].abs()).max()))
    return float(_apart(true, split, real).max()) / scale


def _first_position(true: Tensor | None, split: Tensor | None, real: Tensor | None) -> tuple[int, int] | None:
    if true is None or split is None or true.ndim < 3 or true.shape != split.shape:
        return None
    apart = _apart(true, split, real)
    bad = (apart > LOGITS * max(1.0, float(true.abs().max()))).nonzero()
    return None if not len(bad) else (int(bad[0, 0]), int(bad[0, 1]))


def _gradient_error(true: dict[str, Tensor], split: dict[str, Tensor]) -> tuple[str | None, float]:
    """The first parameter beyond the bound and the largest relative error."""
    if set(true) != set(split):
        return min(set(true) ^ set(split)), math.inf
    if not true:
        return None, math.nan
    floor = FLOOR * max(float(g.norm()) for g in true.values())
    first, worst = None, 0.0
    for name, reference in true.items():
        apart = float((split[name].double() - reference.double()).norm())
        error = apart / max(float(reference.norm()), floor, 1e-30) if math.isfinite(apart) else math.inf
        if error > GRADIENT and first is None:
            first = name
        worst = max(worst, error)
    return first, worst


# ---- the cause


def diagnose(
    model: nn.Module, case: Case, layout: Layout, true: Answer, split: Answer, found: dict[str, Any]
) -> tuple[str, str]:
    """(cause, an explanation in words) of a difference. `model` must be plain at the time; runs it some more times."""
    if _within(found["logits"], LOGITS) and _within(found["hidden"], LOGITS):
        return _cause_behind_outputs(case, layout, true, split, found)
    state = _recurrent_layer(model, found.get("layer"))
    if state:
        return (
            "state",
            f"{found['layer']} is of type {state}: what it carries from token to token stops at a shard's end",
        )
    if found.get("layer") == "the head":
        return "head", "the hidden states are equal and the logits are not"
    suspects = {
        "mask": _without_mask,
        "window": _without_windows,
        "position": _positions_per_shard,
        "attention": _attention_within_shards,
    }
    words = {
        "mask": "leaving out the mask (padding or documents) gives the same wrong answer",
        "window": "leaving out sliding windows or chunks gives the same wrong answer",
        "position": "counting positions from 0 in every shard gives the same wrong answer",
        "attention": "attending only within each shard gives the same wrong answer",
    }
    target = split.hidden[-1] if split.hidden is not None else split.logits
    base = true.hidden[-1] if true.hidden is not None else true.logits
    real = case.real()
    error = _error(base, target, real)
    best, left = None, math.inf
    for name, commit in suspects.items():
        wrong = commit(model, case, layout)
        if wrong is None:
            continue
        guess = wrong.hidden[-1] if wrong.hidden is not None and split.hidden is not None else wrong.logits
        distance = _error(guess, target, real) / error
        if distance < left and _error(base, guess, real) > LOGITS:
            best, left = name, distance
    if best is not None and left < EXPLAINS:
        return ("mask" if best == "window" else best), words[best]
    if found.get("layer") == "the embeddings":
        return "position", "the embeddings differ: positions or ids were cut wrongly"
    where = found.get("layer") or "some layer"
    return "mask", f"the attention of {where} saw other keys than one rank's, in no way that was tried"


def _recurrent_layer(model: nn.Module, layer: str | None) -> str | None:
    if layer is None or not layer.startswith("layer "):
        return None
    index = int(layer.removeprefix("layer "))
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    kind = kinds[index] if index < len(kinds) else ""
    if any(word in kind for word in RECURRENT):
        return str(kind)
    for path, module in model.named_modules():
        parts = path.split(".")
        if str(index) in parts and isinstance(module, nn.Conv1d | nn.RNNBase):
            return type(module).__name__
    return None


def _cause_behind_outputs(
    case: Case, layout: Layout, true: Answer, split: Answer, found: dict[str, Any]
) -> tuple[str, str]:
    if not _within(found["loss"], LOSS):
        local = _loss_of_local_shift(case, layout, true)
        if local is not None and split.loss is not None and abs(local - split.loss) <= 1e-4 * max(1.0, abs(local)):
            return "head", "the logits are equal; shifting labels within each shard gives the same wrong loss"
        return "head", f"the logits are equal and the loss is not: {split.loss} for {true.loss}"
    ratios = [
        float((split.gradients[n].double() * g.double()).sum() / g.double().square().sum().clamp_min(1e-300))
        for n, g in true.gradients.items()
        if n in split.gradients and float(g.norm()) > 0
    ]
    if ratios and max(ratios) - min(ratios) < 1e-3 and abs(ratios[0] - 1) > 1e-3:
        return "scale", f"every gradient is {ratios[0]:.4g} times the true one"
    return "gradient", "outputs are equal and gradients are not: some of what flows back to other ranks is lost"


def _loss_of_local_shift(case: Case, layout: Layout, true: Answer) -> float | None:
    labels = case.inputs.get("labels")
    if true.logits is None or true.logits.ndim != 3 or not isinstance(labels, Tensor) or labels.ndim != 2:
        return None
    order = torch.from_numpy(layout.order).to(labels.device)
    parts = labels[:, order].split(list(layout.row_counts), 1)
    targets = torch.cat([shift_left(part) for part in parts], 1)
    logits = true.logits[:, order].double()
    return float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE))


# Each of these commits one fault on the plain model, or returns None where the case cannot show it.


def _evaluate(model: nn.Module, inputs: dict[str, Any]) -> Answer | None:
    try:
        logits, hidden = _evaluated(model, inputs)
    except (RuntimeError, ValueError, TypeError, IndexError):  # a model that takes no such input cannot be asked
        return None
    return Answer(None, logits, hidden, {})


def _ones(case: Case) -> Tensor:
    ids: Tensor = case.inputs["input_ids"]
    return torch.ones(ids.shape[:2], dtype=torch.int64, device=ids.device)


def _without_mask(model: nn.Module, case: Case, layout: Layout) -> Answer | None:
    # A mask of ones keeps the plain model from looking for packed documents.
    return _evaluate(model, {**case.unlabelled, "attention_mask": _ones(case)})


def _without_windows(model: nn.Module, case: Case, layout: Layout) -> Answer | None:
    ids: Tensor = case.inputs["input_ids"]
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()[None, None]
    real = case.real()
    if real is not None:
        seen = seen & real[:, None, None, :]
    if case.documents:
        number = torch.repeat_interleave(torch.arange(len(case.documents)), torch.tensor(case.documents))
        seen = seen & (number[:, None] == number[None, :]).to(ids.device)
    # A query that sees nothing (padding) sees itself: some kernels answer NaN otherwise.
    seen = seen | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
    return _evaluate(model, {**case.unlabelled, "attention_mask": seen})


def _positions_per_shard(model: nn.Module, case: Case, layout: Layout) -> Answer | None:
    ids: Tensor = case.inputs["input_ids"]
    rows = torch.from_numpy(layout.row).to(ids.device)[None].expand(ids.shape[0], -1)
    mask = case.inputs.get("attention_mask")
    return _evaluate(
        model, {**case.unlabelled, "position_ids": rows, "attention_mask": _ones(case) if mask is None else mask}
    )


def _attention_within_shards(model: nn.Module, case: Case, layout: Layout) -> Answer | None:
    ids: Tensor = case.inputs["input_ids"]
    mask = case.inputs.get("attention_mask")
    mask = _ones(case) if mask is None else mask
    positions = case.inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
    answers = []
    for rank in range(layout.size):
        own = torch.from_numpy(layout.positions(rank)).to(ids.device)
        if not len(own):
            continue
        part = {"input_ids": ids[:, own], "position_ids": positions[:, own], "attention_mask": mask[:, own]}
        answers.append(_evaluate(model, part))
    if any(a is None or a.logits is None for a in answers):
        return None
    back = torch.from_numpy(layout.inverse).to(ids.device)

    def whole(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(parts), 1)[:, back]

    known = [a for a in answers if a is not None]
    hidden = None
    if all(a.hidden is not None for a in known):
        hidden = tuple(whole(layer) for layer in zip(*(a.hidden or () for a in known)))
    return Answer(None, whole(a.logits for a in known if a.logits is not None), hidden, {})


def worst(findings: list[Finding]) -> Finding:
    """One finding from those of all ranks, which must agree: the worst status, with the largest errors."""
    order = ["equal", "refused", "different", "failed"]
    base = max(findings, key=lambda f: order.index(f.status))
    errors: dict[str, Any] = {
        name: max((v for f in findings if not math.isnan(v := getattr(f, name))), default=math.nan)
        for name in ("loss", "logits", "hidden", "gradient")
    }
    return replace(base, **errors)
