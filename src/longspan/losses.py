"""Losses of supervised and reinforcement learning: pure functions of whole per-token tensors, to sums and counts.

A step's tokens lie flat: sequences end to end, [tokens], with `lengths` saying where each ends. Sequences are whole and
in the caller's order; how a model computed them is not known here. What a loss may use beside the log-probabilities
is data, fixed before the forward (`Tokens`). Per token t of sequence i, in the formulas below:

    lp   log pi_theta(t), the one input with a gradient (and the entropy, for its bonus)
    old  the trainer's log-probability before the step          q    the generator's, while sampling
    ref  a reference model's                                    A    the advantage
    m    is the token learned from                              n_i  sum of m over sequence i
    r    exp(lp - old), the ratio                               k    exp(old - q), the mismatch;  sg  stop-gradient

Order of events, which makes a step's gradient independent of how it is cut into micro-batches and spread over ranks:

    1. `filtered` takes tokens out: masked, of a truncated sequence (if the recipe says so), with a generator
       log-probability that is not finite, rejected by the correction (if the recipe says so). A token that leaves,
       leaves numerator and denominator, and counts in no n_i.
    2. `count` counts what is left, over all micro-batches of this rank, before the first backward. The caller adds
       the counts over data-parallel ranks (never over context-parallel peers, which hold the same sequences).
    3. `policy_loss` gives each micro-batch's sum. Loss = sum / `denominator(recipe, counts)`.

Ratios are exponentials of log ratios bounded to +-20: beyond, a ratio is constant, so neither it nor a gradient
overflows. Importance weights are truncated in log space, before the exponential.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # e^20 = 5e8; a step whose ratios get there is broken, but must not turn into NaN

Level = Literal["token", "sequence", "sequence_token", "product"]
Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"]
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length")


# -- flat tokens ---------------------------------------------------------------------------------------------------


def flatten(values: Sequence[Tensor] | Tensor) -> Tensor:
    """Per-sequence tensors [T_i] (or the rows of [N, T]) end to end: [tokens]; floating ones in fp32 at least."""
    flat = torch.cat(list(values)) if len(values) else torch.zeros(0)
    return flat.to(torch.promote_types(flat.dtype, torch.float32)) if flat.is_floating_point() else flat


def sequence_sum(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[tokens] -> [sequences]. One sum per sequence, not a scatter: on a GPU the order of additions stays fixed."""
    if not lengths:
        return values[:0] if values.is_floating_point() else values[:0].long()  # still part of the graph
    return torch.stack([part.sum() for part in values.split(list(lengths))])


def spread(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """A sequence's value on each of its tokens: [sequences] -> [tokens]"""
    if not lengths:
        return values[:0]
    return torch.cat([value.expand(length) for value, length in zip(values.unbind(), lengths)])


def sequence_mean(values: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mean over a sequence's tokens in the mask, 0 where there are none: [tokens] -> [sequences]"""
    return sequence_sum(torch.where(mask, values, 0.0), lengths) / sequence_sum(mask, lengths).clamp(min=1)


@dataclass(frozen=True)
class Tokens:
    """What is known of some whole sequences before the forward. Make it with `tokens`.

    Args:
        mask: bool [tokens], m.
        lengths: tokens of each sequence, in order; their sum is the number of tokens.
        advantages, old, generator, reference: floating [tokens]; only what the recipe uses is needed.
        weights: floating [tokens], of `sft`. They scale the loss and never the count: a token that should not count
            belongs out of the mask.
        truncated: bool [sequences], the generator ran into its length limit.
    """

    mask: Tensor
    lengths: tuple[int, ...]
    advantages: Tensor | None = None
    old: Tensor | None = None
    generator: Tensor | None = None
    reference: Tensor | None = None
    weights: Tensor | None = None
    truncated: Tensor | None = None

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool or self.mask.dim() != 1 or sum(self.lengths) != len(self.mask):
            raise ValueError(
                f"the mask must be flat bools of {sum(self.lengths)} tokens (the sum of the lengths), got "
                f"{self.mask.dtype} {list(self.mask.shape)}"
            )
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is not None and (value.shape != self.mask.shape or not value.is_floating_point()):
                raise ValueError(
                    f"{name} must be floating and flat like the mask, [{len(self.mask)}], got {value.dtype} "
                    f"{list(value.shape)}"
                )
            if value is not None and value.requires_grad:
                raise ValueError(f"{name} is data and carries no gradient; pass {name}.detach()")
        ends = self.truncated
        if ends is not None and (ends.shape != (len(self.lengths),) or ends.dtype != torch.bool):
            raise ValueError(
                f"truncated holds one bool per sequence, [{len(self.lengths)}], got {ends.dtype} {list(ends.shape)}"
            )


PER_TOKEN = ("advantages", "old", "generator", "reference", "weights")


def tokens(
    mask: Sequence[Tensor] | Tensor,
    *,
    advantages: Sequence[Tensor] | Tensor | None = None,
    old: Sequence[Tensor] | Tensor | None = None,
    generator: Sequence[Tensor] | Tensor | None = None,
    reference: Sequence[Tensor] | Tensor | None = None,
    weights: Sequence[Tensor] | Tensor | None = None,
    truncated: Tensor | None = None,
) -> Tokens:
    """Flat `Tokens` from one tensor [T_i] per sequence, or from padded [N, T].

    The mask is bool, or 0 and 1. `advantages` may also be one number per sequence, [N], which every token of the
    sequence gets. Raises ValueError for other masks and for lengths that differ from the mask's.
    """
    lengths = tuple(len(row) for row in mask)
    flat_mask = flatten(mask)
    if flat_mask.dtype != torch.bool:
        if bool(((flat_mask != 0) & (flat_mask != 1)).any()):
            raise ValueError("a mask is 0 or 1; fractions belong into weights, which do not change what is counted")
        flat_mask = flat_mask.bool()

    given = {"advantages": advantages, "old": old, "generator": generator, "reference": reference, "weights": weights}
    flat: dict[str, Tensor] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "advantages" and isinstance(value, Tensor) and value.shape == (len(lengths),):
            flat[name] = spread(value.to(torch.promote_types(value.dtype, torch.float32)), lengths)
            continue
        theirs = tuple(len(row) for row in value)
        if theirs != lengths:
            raise ValueError(f"{name} has sequences of {list(theirs)} tokens, the mask of {list(lengths)}")
        flat[name] = flatten(value)
    return Tokens(flat_mask, lengths, truncated=None if truncated is None else truncated.bool(), **flat)


def _need(value: Tensor | None, what: str, who: str) -> Tensor:
    if value is None:
        raise ValueError(f"{who} needs {what}, which was not given")
    return value


# -- token losses --------------------------------------------------------------------------------------------------
#
# One signature: (data, lp, options) -> (loss [tokens], clipped bool [tokens]). `clipped` marks tokens whose gradient
# the loss cut off. The data is filtered and clean (`policy_loss` sees to it): outside the mask everything is 0.
# A loss with one value per sequence gives it to each of its tokens, so "sequence_mean_token_mean" is its plain mean
# over sequences.

TokenLoss = Callable[..., Any]


def log_ratio(t: Tokens, logprobs: Tensor, level: Level = "token") -> Tensor:
    """log of the importance ratio, [tokens], bounded to +-LOG_RATIO_LIMIT.

    token: lp - old (PPO). sequence: its mean over the sequence, on every token (GSPO, arXiv 2507.18071).
    sequence_token: that value, with each token's own gradient (GSPO-token, the same paper); equal to "sequence" in
    gradient where a sequence's tokens share one advantage and one weight. product: the sum over the sequence (RLOO in
    TRL: the ratio of whole-sequence probabilities).
    """
    difference = torch.where(t.mask, logprobs - _need(t.old, "old log-probabilities", "a ratio"), 0.0)
    if level == "sequence":
        difference = spread(sequence_mean(difference, t.mask, t.lengths), t.lengths)
    elif level == "sequence_token":
        mean = spread(sequence_mean(difference.detach(), t.mask, t.lengths), t.lengths)
        difference = mean + (logprobs - logprobs.detach())
    elif level == "product":
        difference = spread(sequence_sum(difference, t.lengths), t.lengths)
    elif level != "token":
        raise ValueError(f"unknown ratio level {level!r}; choose token, sequence, sequence_token or product")
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _unclipped(losses: Tensor) -> tuple[Tensor, Tensor]:
    return losses, torch.zeros_like(losses, dtype=torch.bool)


def sft(t: Tokens, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """-w lp, cross entropy; w = 1 without weights."""
    return _unclipped(-logprobs if t.weights is None else -t.weights * logprobs)


def reinforce(t: Tokens, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """-A lp (Williams 1992)."""
    return _unclipped(-_need(t.advantages, "advantages", "reinforce") * logprobs)


def importance_sampling(t: Tokens, logprobs: Tensor, *, level: Level = "token") -> tuple[Tensor, Tensor]:
    """-A r: REINFORCE's gradient, weighted by the ratio (tinker's `importance_sampling`, where old is q)."""
    return _unclipped(
        -_need(t.advantages, "advantages", "importance_sampling") * torch.exp(log_ratio(t, logprobs, level))
    )


def ppo_clip(
    t: Tokens,
    logprobs: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
    level: Level = "token",
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347; unequal bounds: DAPO, 2503.14476).

    dual_clip c > 1: for A < 0, at most -c A (arXiv 1912.09729). ratio_cap: r is capped in the unclipped term (TRL's
    `delta`), which for A < 0 stops the gradient above it too. `level`: see `log_ratio`.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip bounds the loss of negative advantages and must exceed 1, got {dual_clip}")
    advantages = _need(t.advantages, "advantages", "ppo_clip")
    ratio = torch.exp(log_ratio(t, logprobs, level))
    plain = (ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)) * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = bounded < plain
    gain = torch.where(clipped, bounded, plain)
    if ratio_cap is not None:
        clipped = clipped | ((ratio > ratio_cap) & (advantages < 0))
    if dual_clip is not None:
        floor = dual_clip * advantages
        beyond = (advantages < 0) & (gain < floor)
        gain, clipped = torch.where(beyond, floor, gain), clipped | beyond
    return -gain, clipped


def cispo(t: Tokens, logprobs: Tensor, *, low: float = 0.0, high: float = 5.0) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, low, high)) A lp (MiniMax-M1, arXiv 2506.13585). Every token keeps a gradient.

    Convention: `low` and `high` bound r itself, as in TRL ([0, 5]), ART and tinker ([0, 4]); verl and slime mean
    [1 - e, 1 + e] by their numbers.
    """
    ratio = torch.exp(log_ratio(t, logprobs.detach()))
    losses = -ratio.clamp(low, high) * _need(t.advantages, "advantages", "cispo") * logprobs
    return losses, (ratio < low) | (ratio > high)


def sapo(
    t: Tokens, logprobs: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> tuple[Tensor, Tensor]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (SAPO, arXiv 2511.20347): a soft gate for the clip,
    of slope 1 at r = 1."""
    advantages = _need(t.advantages, "advantages", "sapo")
    tau = torch.where(advantages > 0, advantages.new_tensor(tau_positive), tau_negative)  # of two floats: fp32
    ratio = torch.exp(log_ratio(t, logprobs))
    return _unclipped(-(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages)


def gmpo(
    t: Tokens, logprobs: Tensor, *, log_clip_low: float = 0.4, log_clip_high: float = 0.4
) -> tuple[Tensor, Tensor]:
    """-A_i exp((1/n_i) sum_t d), the geometric mean of clipped token ratios (GMPO, arXiv 2507.20673).

    d is lp - old, or its clip to [-log_clip_low, log_clip_high] where that lowers the objective: above for A > 0,
    below for A < 0. Bounds are in log space, as in the paper (e^-0.4, e^0.4). A_i is the mean advantage.
    """
    advantages = _need(t.advantages, "advantages", "gmpo")
    difference = log_ratio(t, logprobs)
    bounded = difference.clamp(-log_clip_low, log_clip_high)
    clipped = bounded * advantages.sign() < difference * advantages.sign()
    mean = sequence_mean(torch.where(clipped, bounded, difference), t.mask, t.lengths)
    return spread(-sequence_mean(advantages, t.mask, t.lengths) * torch.exp(mean), t.lengths), clipped


LOSSES: dict[str, TokenLoss] = {
    function.__name__: function for function in (sft, reinforce, importance_sampling, ppo_clip, cispo, sapo, gmpo)
}


# -- penalties and corrections -------------------------------------------------------------------------------------


def kl(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimators of KL(theta || reference) from theta's own samples, [tokens] (J. Schulman, "Approximating KL
    Divergence", 2020). With d = lp - ref:

        k1  d                   unbiased, noisy. As a loss its expected gradient is zero, unless weighted by r.
        k2  d^2 / 2             biased; its gradient is the KL's.
        k3  exp(-d) + d - 1     unbiased, never negative; as a loss its gradient is that of KL(reference || theta).

    In k3, d is bounded below by -LOG_RATIO_LIMIT.
    """
    difference = logprobs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        difference = difference.clamp(min=-LOG_RATIO_LIMIT)
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {kind!r}; choose k1, k2 or k3")


CORRECTION_BOUNDS = {"none": (0.0, math.inf), "tis": (0.0, 2.0), "mis": (0.0, 3.0), "icepop": (0.5, 5.0)}


@dataclass(frozen=True)
class Correction:
    """Weights for samples whose generator (q) is not quite the trainer (old): k = exp(old - q), never with a gradient.

        tis      min(k, high)                     truncated importance sampling (E. Ionides 2008; F. Yao et al. 2025)
        mis      k where low <= k <= high, else 0 masked importance sampling (J. Liu et al. 2025); low is 0 by default
        icepop   the same formula, two-sided      IcePop (Ling team 2025); [0.5, 5] by default

    level: "token" takes each token's k, "sequence" their product over the sequence, "sequence_mean" the geometric mean.

    rejected: what becomes of tokens that mis and icepop weigh 0. "zero": they still count in the denominators, which
    is what an importance weight of 0 means and what NeMo-RL, OpenRLHF, slime and TRL do. "drop": they leave the
    denominators and every n_i; as that must be known before the forward, it needs `old` as data.
    """

    kind: Literal["none", "tis", "mis", "icepop"] = "none"
    level: Literal["token", "sequence", "sequence_mean"] = "token"
    low: float | None = None
    high: float | None = None
    rejected: Literal["zero", "drop"] = "zero"

    def __post_init__(self) -> None:
        if self.kind not in CORRECTION_BOUNDS:
            raise ValueError(f"unknown correction {self.kind!r}; choose one of {', '.join(CORRECTION_BOUNDS)}")
        if self.level not in ("token", "sequence", "sequence_mean"):
            raise ValueError(f"unknown level {self.level!r} of a correction; choose token, sequence or sequence_mean")
        if self.rejected not in ("zero", "drop"):
            raise ValueError(f'rejected is "zero" or "drop", got {self.rejected!r}')
        if self.kind == "tis" and self.low:
            raise ValueError("tis truncates from above only and takes no low; mis and icepop do")
        low, high = self.bounds
        if not 0 <= low < high:
            raise ValueError(f"a correction needs 0 <= low < high, got [{low}, {high}]")

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = CORRECTION_BOUNDS[self.kind]
        return (low if self.low is None else self.low), (high if self.high is None else self.high)

    @property
    def drops(self) -> bool:
        return self.kind in ("mis", "icepop") and self.rejected == "drop"


def correction_weights(
    correction: Correction, log_mismatch: Tensor, mask: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(weights, accepted) of log k = old - q, all [tokens]; see `Correction`."""
    logs = torch.where(mask, log_mismatch.detach(), 0.0)
    if correction.kind == "none":
        return torch.ones_like(logs), torch.ones_like(mask)
    if correction.level == "sequence":
        logs = spread(sequence_sum(logs, lengths), lengths)
    elif correction.level == "sequence_mean":
        logs = spread(sequence_mean(logs, mask, lengths), lengths)
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in correction.bounds)
    if correction.kind == "tis":
        return torch.exp(logs.clamp(max=min(high, LOG_RATIO_LIMIT))), torch.ones_like(mask)
    accepted = (logs >= low) & (logs <= high)
    return torch.where(accepted, torch.exp(logs.clamp(max=min(high, LOG_RATIO_LIMIT))), 0.0), accepted


# -- recipes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A combination of advantage, token loss, correction, penalties and aggregation; `preset` has the known ones.

    Args:
        baseline, leave_one_out, scale, std_epsilon, unbiased: of `group_advantages`; baseline "gae" for advantages
            that the caller computes with `gae`.
        loss: a name of `LOSSES`, or your own function (data: Tokens, lp [tokens]) -> loss [tokens]; it sees filtered
            data, with `old` set to the anchor and everything outside the mask 0.
        options: keyword arguments of the loss.
        anchor: the denominator of ratios. "old": `data.old`. "generator": q itself, no correction needed or
            possible. "current": sg(lp), for one update per batch, where ratios are 1 and only gradients flow.
        correction: weighs the token loss (not the penalties).
        kl_coefficient: times `kl(kl_kind, lp, ref)` (times r with kl_weighted: the estimator over samples of the
            anchor, as TRL does by default) is added to the token loss.
        entropy_coefficient: times the entropy is subtracted.
        aggregation: see `aggregate`; `length` is L of "fixed_length".
        overlong_filter: tokens of truncated sequences are filtered (DAPO).
    """

    loss: str | TokenLoss = "ppo_clip"
    options: Mapping[str, Any] = field(default_factory=dict)
    baseline: Literal["group", "batch", "none", "gae"] = "group"
    leave_one_out: bool = False
    scale: Literal["group", "batch", "none"] = "group"
    std_epsilon: float = 1e-4
    unbiased: bool = True
    anchor: Literal["old", "generator", "current"] = "old"
    correction: Correction = Correction()
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    kl_coefficient: float = 0.0
    kl_weighted: bool = False
    entropy_coefficient: float = 0.0
    aggregation: Aggregation = "token_mean"
    length: int | None = None
    overlong_filter: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.loss, str):
            if self.loss not in LOSSES:
                raise ValueError(
                    f"unknown loss {self.loss!r}; choose one of {', '.join(sorted(LOSSES))}, or a function"
                )
            known = [
                p.name for p in inspect.signature(LOSSES[self.loss]).parameters.values() if p.kind == p.KEYWORD_ONLY
            ]
            unknown = sorted(set(self.options) - set(known))
            if unknown:
                raise ValueError(
                    f"{self.loss} has no option {', '.join(unknown)}; it takes {', '.join(known) or 'none'}"
                )
        for name, choices in (
            ("baseline", ("group", "batch", "none", "gae")),
            ("scale", ("group", "batch", "none")),
            ("anchor", ("old", "generator", "current")),
            ("kl_kind", ("k1", "k2", "k3")),
            ("aggregation", AGGREGATIONS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        if self.baseline != "gae":
            _check_statistics(self.baseline, self.leave_one_out, self.scale)
        elif self.leave_one_out or self.scale != "none":
            raise ValueError("baseline 'gae' takes scale='none' and no leave_one_out; see `whiten`")
        if (self.aggregation == "fixed_length") != (self.length is not None):
            raise ValueError('aggregation "fixed_length" needs length, the constant it divides by; others take none')
        if self.length is not None and self.length < 1:
            raise ValueError(f"length is a number of tokens, got {self.length}")
        if self.anchor == "generator" and self.correction.kind != "none":
            raise ValueError(
                "with anchor 'generator' the ratio already corrects the mismatch; leave the correction out"
            )
        if self.anchor == "current" and self.correction.drops:
            raise ValueError(
                "a correction that drops tokens from the denominators needs the trainer's log-probabilities before the "
                "forward; use anchor 'old', or rejected='zero'"
            )
        if self.kl_weighted and self.anchor == "current":
            raise ValueError("kl_weighted needs a ratio that is not 1: anchor 'old' or 'generator'")
        if self.kl_kind == "k1" and self.kl_coefficient and not self.kl_weighted:
            raise ValueError(
                "k1 alone has zero expected gradient as a loss; use k2, k3, kl_weighted, or the rewards (`kl_rewards`)"
            )

    def advantages(self, rewards: Tensor, group: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`group_advantages` with this recipe's parameters."""
        if self.baseline == "gae":
            raise ValueError("this recipe takes advantages from `gae`, which needs values and per-token rewards")
        return group_advantages(
            rewards,
            group,
            baseline=self.baseline,
            leave_one_out=self.leave_one_out,
            scale=self.scale,
            std_epsilon=self.std_epsilon,
            unbiased=self.unbiased,
        )


_SEQUENCES: Aggregation = "sequence_mean_token_mean"
PRESETS: dict[str, dict[str, Any]] = {
    "sft": {"loss": "sft", "baseline": "none", "scale": "none", "anchor": "current"},
    "reinforce": {"loss": "reinforce", "baseline": "none", "scale": "none", "anchor": "current"},
    "importance_sampling": {"loss": "importance_sampling", "scale": "none", "anchor": "generator"},
    "ppo": {"loss": "ppo_clip", "baseline": "gae", "scale": "none"},
    "grpo": {"loss": "ppo_clip", "aggregation": _SEQUENCES},
    "dr_grpo": {"loss": "ppo_clip", "scale": "none", "aggregation": "fixed_length"},
    "dapo": {"loss": "ppo_clip", "options": {"clip_low": 0.2, "clip_high": 0.28}, "overlong_filter": True},
    "rloo": {
        "loss": "ppo_clip",
        "options": {"level": "product"},
        "leave_one_out": True,
        "scale": "none",
        "aggregation": _SEQUENCES,
    },
    "gspo": {
        "loss": "ppo_clip",
        "options": {"clip_low": 3e-4, "clip_high": 4e-4, "level": "sequence"},
        "aggregation": _SEQUENCES,
    },
    "gspo_token": {
        "loss": "ppo_clip",
        "options": {"clip_low": 3e-4, "clip_high": 4e-4, "level": "sequence_token"},
        "aggregation": _SEQUENCES,
    },
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo", "aggregation": _SEQUENCES},
    "gmpo": {"loss": "gmpo", "aggregation": _SEQUENCES},
}
REFUSED = {
    "bnpo": "it divides by the tokens of each micro-batch, so the gradient depends on how a step is cut and spread "
    "over ranks; take aggregation 'token_mean', which is bnpo with the whole step as one micro-batch",
    "dpo": "it compares pairs of sequences and is the function losses.dpo",
}


def preset(name: str, **changes: Any) -> Recipe:
    """The recipe of that name with `changes` to its fields; "dr_grpo" needs length=.

    Penalties are off in all of them (no reference model needed): set kl_coefficient and entropy_coefficient. `options`
    given here are merged into the preset's. Raises ValueError for unknown names, with the list.
    """
    if name in REFUSED:
        raise ValueError(f"no recipe {name!r}: {REFUSED[name]}")
    if name not in PRESETS:
        raise ValueError(f"unknown recipe {name!r}; choose one of {', '.join(sorted(PRESETS))}")
    known = PRESETS[name]
    options = {**known.get("options", {}), **changes.pop("options", {})}
    return Recipe(**{**known, **changes, "options": options})


# -- filters, counts, the loss -------------------------------------------------------------------------------------


def _eligible(recipe: Recipe, t: Tokens) -> Tensor:
    """The mask before the correction: learned from, not overlong, with a finite generator log-probability."""
    keep = t.mask
    if recipe.overlong_filter:
        truncated = _need(t.truncated, "truncated (which sequences hit the length limit)", "overlong_filter")
        keep = keep & ~spread(truncated, t.lengths)
    if t.generator is not None:
        keep = keep & torch.isfinite(t.generator)
    return keep


def filtered(recipe: Recipe, t: Tokens) -> Tokens:
    """The tokens that numerator and denominator are made of: the same data under the final mask."""
    keep = _eligible(recipe, t)
    if recipe.correction.drops:
        old = _need(t.old, "old log-probabilities", "a correction that drops tokens")
        generator = _need(t.generator, "generator log-probabilities", "a correction")
        keep = keep & correction_weights(recipe.correction, old - generator, keep, t.lengths)[1]
    return replace(t, mask=keep)


@dataclass(frozen=True)
class Counts:
    """What denominators are made of; adds up over micro-batches and data-parallel ranks."""

    tokens: int = 0
    sequences: int = 0  # with at least one token left

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.tokens + other.tokens, self.sequences + other.sequences)


def count(recipe: Recipe, step: Iterable[Tokens]) -> Counts:
    """Counts of all micro-batches of a step, after filtering. Needs no forward; call it before the first backward."""
    total = Counts()
    for t in step:
        kept = sequence_sum(filtered(recipe, t).mask, t.lengths)
        total += Counts(int(kept.sum()), int((kept > 0).sum()))
    return total


def denominator(recipe: Recipe, counts: Counts) -> int:
    """What a step's loss sums are divided by. Where nothing is left it is 1: every sum is then exactly 0."""
    if recipe.aggregation == "token_mean":
        value = counts.tokens
    elif recipe.aggregation == "fixed_length":
        value = counts.sequences * (recipe.length or 0)
    else:
        value = counts.sequences
    return max(1, value)


def aggregate(losses: Tensor, mask: Tensor, lengths: Sequence[int], how: Aggregation) -> Tensor:
    """The numerator of an aggregation: losses [tokens] -> scalar. N tokens and S sequences are left in the whole step.

        token_mean                (1/N) sum over all tokens                       DAPO, CISPO
        sequence_mean_token_mean  (1/S) sum_i (1/n_i) sum_t                       GRPO, GSPO
        sequence_mean_token_sum   (1/S) sum_i sum_t
        fixed_length              (1/(S L)) sum over all tokens, L a constant     Dr.GRPO, arXiv 2503.20783

    A plain sum is token_mean's numerator, over 1.
    """
    losses = torch.where(mask, losses, 0.0)
    if how == "sequence_mean_token_mean":
        losses = losses / spread(sequence_sum(mask, lengths).clamp(min=1), lengths)
    elif how not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {how!r}; choose one of {', '.join(AGGREGATIONS)}")
    return losses.sum()


@dataclass(frozen=True)
class LossSums:
    """loss: scalar with a gradient, to be divided by `denominator`. metrics: fp64 scalars that add up over
    micro-batches and data-parallel ranks, for `summarize`; the keys depend on the fields that `Tokens` has."""

    loss: Tensor
    metrics: dict[str, Tensor]


def _clean(mask: Tensor, value: Tensor | None) -> Tensor | None:
    """0 outside the mask, where anything may stand: even times 0, a NaN would reach the gradient."""
    return None if value is None else torch.where(mask, value, 0.0)


def policy_loss(recipe: Recipe, t: Tokens, logprobs: Tensor, entropy: Tensor | None = None) -> LossSums:
    """The sum of a recipe's loss over some whole sequences.

    logprobs and entropy: floating [tokens] (`flatten` makes them from lists), computed in fp32 at least. Raises
    ValueError where shapes differ or the recipe needs data that `t` lacks. A log-probability of -inf inside the mask
    gives a loss that is not finite: that is for the caller's guard to see.
    """
    for name, value in (("logprobs", logprobs), ("entropy", entropy)):
        if value is not None and value.shape != t.mask.shape:
            raise ValueError(f"{name} must be flat like the mask, [{len(t.mask)}], got {list(value.shape)}")
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    eligible = _eligible(recipe, t)
    mask = filtered(recipe, t).mask

    # The sequences' mismatch is over all eligible tokens, those that the correction rejects included.
    mismatch = None
    if t.generator is not None:
        trainer = t.old if t.old is not None and recipe.anchor == "old" else logprobs.detach()
        mismatch = _clean(eligible, trainer - t.generator)
    if recipe.correction.kind != "none":
        mismatch = _need(mismatch, "generator log-probabilities", "a correction")
        if recipe.anchor == "old":
            _need(t.old, "old log-probabilities", "a correction with anchor 'old'")

    logprobs = cast(Tensor, _clean(mask, logprobs))
    anchors = {"old": t.old, "generator": t.generator, "current": logprobs.detach()}
    fields: dict[str, Any] = {name: _clean(mask, getattr(t, name)) for name in PER_TOKEN}
    data = replace(t, **{**fields, "mask": mask, "old": _clean(mask, anchors[recipe.anchor])})
    function = LOSSES[recipe.loss] if isinstance(recipe.loss, str) else recipe.loss
    result = function(data, logprobs, **recipe.options)
    losses, clipped = result if isinstance(result, tuple) else _unclipped(result)
    if losses.shape != mask.shape:
        raise ValueError(f"a token loss returns one value per token, [{len(mask)}], got {list(losses.shape)}")

    accepted = torch.ones_like(mask)
    if mismatch is not None:
        weights, accepted = correction_weights(recipe.correction, mismatch, eligible, t.lengths)
        losses = losses * weights
    if recipe.kl_coefficient:
        penalty = kl(recipe.kl_kind, logprobs, _need(data.reference, "reference log-probabilities", "a KL penalty"))
        if recipe.kl_weighted:
            penalty = penalty * torch.exp(log_ratio(data, logprobs))
        losses = losses + recipe.kl_coefficient * penalty
    if recipe.entropy_coefficient:
        bonus = cast(Tensor, _clean(mask, _need(entropy, "the entropy of the forward", "an entropy bonus")))
        losses = losses - recipe.entropy_coefficient * bonus
    sums = metrics(data, logprobs, entropy, clipped, mismatch, eligible, accepted)
    return LossSums(aggregate(losses, mask, t.lengths, recipe.aggregation), sums)


# -- metrics -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def metrics(
    t: Tokens,
    logprobs: Tensor,
    entropy: Tensor | None,
    clipped: Tensor,
    mismatch: Tensor | None,
    eligible: Tensor,
    accepted: Tensor,
) -> dict[str, Tensor]:
    """Sums over filtered, clean tokens (mismatch: over the eligible), fp64 scalars; `summarize` makes means of them."""

    def total(values: Tensor, mask: Tensor = t.mask) -> Tensor:
        return torch.where(mask, values.double(), 0.0).sum()

    sums = {"tokens": total(torch.ones_like(logprobs)), "clipped": total(clipped), "logprob": total(logprobs)}
    if t.old is not None:
        log = log_ratio(t, logprobs).double()
        sums["ratio"] = total(log.exp())
        sums["approx_kl"] = total(torch.expm1(log) - log)  # k3 of KL(old || theta)
    if t.reference is not None:
        sums["reference_kl"] = total(kl("k3", logprobs, t.reference))
    if entropy is not None:
        sums["entropy"] = total(entropy)
    if mismatch is not None:
        log = mismatch.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        sums["mismatch_tokens"] = total(torch.ones_like(log), eligible)
        sums["mismatch_difference"] = total(log.abs(), eligible)
        sums["mismatch_k3"] = total(torch.expm1(log) - log, eligible)  # of KL(generator || trainer)
        sums["mismatch_weight"] = total(log.exp(), eligible)
        sums["mismatch_square"] = total((2 * log).exp(), eligible)
        sums["rejected"] = total(~accepted, eligible)
    return sums


def summarize(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Means per token from summed metrics: ratio, clipped (fraction), approx_kl, reference_kl, entropy, logprob.

    Over tokens with a generator log-probability, those that the correction rejected included: mismatch_difference (of
    |old - q|, each at most 20), mismatch_k3, mismatch_weight (of k), rejected (fraction), and effective_samples, which
    is (sum k)^2 / sum k^2 as a fraction of those tokens. `tokens` is the count. Means over no token are NaN.
    """
    values = {name: float(value) for name, value in sums.items()}
    count = values.pop("tokens")
    paired = values.pop("mismatch_tokens", 0.0)
    square = values.pop("mismatch_square", 0.0)
    out = {"tokens": count}
    for name, value in values.items():
        over = paired if name.startswith("mismatch") or name == "rejected" else count
        out[name] = value / over if over else math.nan
    if "mismatch_weight" in values:
        out["effective_samples"] = values["mismatch_weight"] ** 2 / (square * paired) if paired else math.nan
    return out


# -- rewards and advantages ----------------------------------------------------------------------------------------


def soft_punishment(lengths: Tensor, maximum: int, buffer: int, factor: float = 1.0) -> Tensor:
    """DAPO's reward for long answers (arXiv 2503.14476): 0 up to maximum - buffer tokens, then falling
    linearly to -factor at the maximum, and -factor beyond. lengths [n] -> [n]; add it to the rewards."""
    if not 0 < buffer <= maximum:
        raise ValueError(f"soft punishment needs 0 < buffer <= maximum, got buffer {buffer}, maximum {maximum}")
    return ((maximum - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0) * factor


def _scored(rewards: Tensor) -> Tensor:
    if bool(torch.isinf(rewards).any()):
        raise ValueError("a reward is infinite; an answer that could not be scored has the reward NaN")
    return ~torch.isnan(rewards)


def _groups(rewards: Tensor, group: Tensor | None) -> list[Tensor]:
    """Indices of each group's scored members."""
    scored = _scored(rewards)
    if group is None:
        raise ValueError("statistics by group need the group of each reward")
    if group.shape != rewards.shape:
        raise ValueError(f"group is shaped like the rewards, {list(rewards.shape)}, got {list(group.shape)}")
    return [((group == g) & scored).nonzero().flatten() for g in group.unique()]


def informative(rewards: Tensor, group: Tensor) -> Tensor:
    """bool [n]: the scored rewards of the sequence's group differ, so they teach something. DAPO's dynamic sampling
    refills the batch with groups that do."""
    out = torch.zeros_like(rewards, dtype=torch.bool)
    for members in _groups(rewards, group):
        values = rewards[members]
        out[members] = bool(len(values) and values.max() > values.min())
    return out


def _check_statistics(baseline: str, leave_one_out: bool, scale: str) -> None:
    if baseline not in ("group", "batch", "none") or scale not in ("group", "batch", "none"):
        raise ValueError(f"baseline and scale are group, batch or none; got {baseline!r} and {scale!r}")
    if leave_one_out and baseline == "none":
        raise ValueError("leave_one_out is about the baseline, and there is none")
    # A std near 0 is harmless only where the same rewards' mean was subtracted before.
    if scale != "none" and baseline not in ("group", scale):
        raise ValueError(
            f"scale {scale!r} needs baseline 'group' or {scale!r}, got {baseline!r}; scale='none' divides by nothing"
        )


def kl_rewards(t: Tokens, coefficient: float) -> Tensor:
    """-coefficient * sum_t (old - ref), [sequences]: the KL penalty as a part of the reward (k1; RLOO), to be added to
    the rewards before advantages are computed."""
    old = _need(t.old, "old log-probabilities", "a KL reward")
    difference = kl("k1", old, _need(t.reference, "reference log-probabilities", "a KL reward"))
    return -coefficient * sequence_sum(torch.where(t.mask, difference, 0.0), t.lengths)


def group_advantages(
    rewards: Tensor,
    group: Tensor | None = None,
    *,
    baseline: Literal["group", "batch", "none"] = "group",
    leave_one_out: bool = False,
    scale: Literal["group", "batch", "none"] = "group",
    std_epsilon: float = 1e-4,
    unbiased: bool = True,
) -> tuple[Tensor, Tensor]:
    """(advantages floating [n], scored bool [n]) of rewards [n]: (R - mean) / (std + std_epsilon).

    Args:
        rewards: of *all* answers of the step, on all ranks ("batch" would otherwise depend on the ranks). NaN where an
            answer could not be scored: it has no vote in any mean or std, its advantage is 0 and its tokens belong
            out of the mask.
        group: int64 [n], which answers share a prompt.
        baseline: whose mean is subtracted (GRPO: the group's, arXiv 2402.03300), or none.
        leave_one_out: the mean of the *others* (RLOO, arXiv 2402.14740); n/(n-1) times the plain difference.
        scale: whose std divides; "none" in Dr.GRPO and RLOO. "batch" with a baseline by group: the std of all rewards,
            as in TRL's `scale_rewards`.
        unbiased: std over n - 1, as in TRL (1e-4) and verl (1e-6).

    Where all rewards are equal, and where only one is scored and a mean is subtracted, the advantage is exactly 0.
    """
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    scored = _scored(rewards)
    exact = rewards.double()
    out = torch.zeros_like(exact)
    everyone = [scored.nonzero().flatten()]
    _check_statistics(baseline, leave_one_out, scale)

    for members in _groups(rewards, group) if baseline == "group" else everyone:
        values = exact[members]
        if baseline == "none":
            out[members] = values
        elif len(values) > 1 and values.max() > values.min():  # equal rewards would leave rounding, over epsilon
            others = len(values) / (len(values) - 1) if leave_one_out else 1.0
            out[members] = (values - values.mean()) * others
    if scale != "none":
        for members in _groups(rewards, group) if scale == "group" else everyone:
            values = exact[members]
            if len(values) > 1:
                out[members] = out[members] / (values.std(correction=int(unbiased)) + std_epsilon)
    return out.to(dtype), scored


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) by generalized advantage estimation (arXiv 1506.02438), [tokens] each, 0 outside the mask.

        delta_t = r_t + gamma V_next - V_t,   A_t = delta_t + gamma lam A_next,   returns = A + V

    `next` is the sequence's next token *in the mask*: tokens that the policy did not choose are skipped. After the
    last one V is 0, or `last_values` [sequences] for sequences cut short. Data, without gradients. Raises ValueError
    for a reward outside the mask, which no token would get.
    """
    if bool((rewards[~mask] != 0).any()):
        raise ValueError("a reward lies on a token outside the mask; put it on the last token that the policy chose")
    r, v, m = rewards.double().tolist(), values.detach().double().tolist(), mask.tolist()
    last = [0.0] * len(lengths) if last_values is None else last_values.double().tolist()
    out = [0.0] * len(r)
    stop = 0
    for length, value in zip(lengths, last):
        start, stop, advantage = stop, stop + length, 0.0
        for at in range(stop - 1, start - 1, -1):
            if m[at]:
                advantage = r[at] + gamma * value - v[at] + gamma * lam * advantage
                out[at], value = advantage, v[at]
    advantages = torch.tensor(out, dtype=values.dtype, device=values.device)
    return advantages, torch.where(mask, advantages + values.detach(), 0.0)


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over the mask, 0 outside. Give it the whole step's tokens of all ranks."""
    inside = values[mask].double()
    if len(inside) < 2:
        return torch.zeros_like(values)
    white = (values.double() - inside.mean()) / torch.sqrt(inside.var() + epsilon)
    return torch.where(mask, white, 0.0).to(values.dtype)


# -- pairs ---------------------------------------------------------------------------------------------------------


def dpo(
    t: Tokens, logprobs: Tensor, pairs: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, margins, counted), all [pairs], of pairs int64 [pairs, 2]: indices of the chosen and rejected sequence.

        margin = beta (sum_t (lp - ref) of the chosen - sum_t (lp - ref) of the rejected)
        loss   = -(1 - s) log sigmoid(margin) - s log sigmoid(-margin)

    DPO, arXiv 2305.18290; s: E. Mitchell's conservative DPO (2023). A pair with a side without tokens is not counted
    and has loss 0. Step's loss = sum of the losses / `counted` over all micro-batches and data-parallel ranks
    (`count_pairs` before the forward); both sequences of a pair lie in one micro-batch. Fraction of margins > 0 is the
    accuracy.
    """
    reference = _need(t.reference, "reference log-probabilities", "dpo")
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    scores = sequence_sum(torch.where(t.mask, logprobs - reference, 0.0), t.lengths)
    counted = paired(t, pairs)
    margins = torch.where(counted, beta * (scores[pairs[:, 0]] - scores[pairs[:, 1]]), 0.0)
    losses = -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
    return torch.where(counted, losses, 0.0), margins.detach(), counted


def paired(t: Tokens, pairs: Tensor) -> Tensor:
    """bool [pairs]: both sides have a token in the mask."""
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs is [pairs, 2]: (chosen, rejected) indices of sequences, got {list(pairs.shape)}")
    return (sequence_sum(t.mask, t.lengths) > 0)[pairs].all(dim=1)


def count_pairs(t: Tokens, pairs: Tensor) -> int:
    """Denominator of `dpo`, to be added up over micro-batches and data-parallel ranks."""
    return int(paired(t, pairs).sum())
