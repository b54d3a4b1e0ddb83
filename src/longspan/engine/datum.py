"""What is learned from: whole sequences and what a loss may use of each; and how they are dealt into micro-batches.

Every per-token field of a `Datum` speaks of the *target* at its place: entry t is about targets[t], predicted after
tokens[: t + 1], as everywhere in `longspan.score`. `Datum.from_tokens` takes fields that speak of the tokens
themselves, as samplers and data sets have them, and moves each one place ahead.

Micro-batches: units (a group that shares a prefix, or one sequence) are dealt, the costliest first, to the bin that
costs least so far and has room within the token budget; as many bins as ranks x micro-batches, with the fewest
micro-batches that work. Every dp rank gets equally many, so that all join every collective; a bin that stays empty
runs the least costly unit, whose gradient is multiplied by 0. Integers and data only: the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from longspan import losses
from longspan.prefix_tree import PrefixTree

IGNORE = -100
LOGPROBS = ("old", "generator", "reference")


@dataclass(frozen=True, kw_only=True, eq=False)
class Datum:
    """One whole sequence of T tokens. Lists become tensors.

    tokens: int64 [T]. targets: int64 [T], -100 for none; the next tokens by default.
    mask: bool [T], which targets are learned from; by default those that are not -100.
    advantages: floating [T], or one number. weights: floating [T], of supervised losses.
    old, generator, reference: log-probabilities of the targets, floating [T]: the trainer's before the step, the
        generator's (NaN where it told none: such targets are left out), a reference model's. Masked entries may hold
        anything.
    truncated: the generator ran into its length limit. group: sequences of one group stay in one micro-batch where its
        token budget allows (they share a prompt, or a loss compares them).

    Raises ValueError for other shapes, and for a mask on targets that are -100.
    """

    tokens: Any
    targets: Any = None
    mask: Any = None
    advantages: Any = None
    weights: Any = None
    old: Any = None
    generator: Any = None
    reference: Any = None
    truncated: bool = False
    group: int | str | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        tokens = _vector(self.tokens, torch.int64, "tokens")
        if not len(tokens):
            raise ValueError("a Datum holds one token at least")
        put("tokens", tokens)
        if self.targets is None:
            put("targets", torch.cat([tokens[1:], tokens.new_full((1,), IGNORE)]))
        else:
            put("targets", _vector(self.targets, torch.int64, "targets"))
        has_target = self.targets != IGNORE
        if self.mask is None:
            put("mask", has_target)
        else:
            put("mask", _mask(self.mask))
        if isinstance(self.advantages, int | float):
            put("advantages", torch.full(tokens.shape, float(self.advantages)))
        for name in ("advantages", "weights", *LOGPROBS):
            if getattr(self, name) is not None:
                put(name, _vector(getattr(self, name), None, name))
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.shape != tokens.shape:
                raise ValueError(f"{name} is {tuple(value.shape)}, the sequence has {len(tokens)} tokens")
        aimless = self.mask & ~has_target
        if bool(aimless.any()):
            at = int(aimless.nonzero()[0])
            raise ValueError(f"the mask learns from place {at} of {len(tokens)}, which has no target (-100)")

    @classmethod
    def from_tokens(cls, tokens: Any, mask: Any, **given: Any) -> Datum:
        """A Datum of fields that speak of the tokens themselves: entry t about tokens[t], the mask saying which tokens
        were chosen by the policy (or are to be learned). The first token can have been chosen by nobody: ValueError."""
        mask = _mask(mask)
        if len(mask) and bool(mask[0]):
            raise ValueError("the first token of a sequence has nothing before it to be predicted from")
        moved = {name: _ahead(value, name) for name, value in given.items()}
        return cls(tokens=tokens, mask=_ahead(mask, "mask"), **moved)


def _mask(value: Any) -> Tensor:
    mask = torch.as_tensor(value)
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("a mask is 0 or 1; fractions belong into weights")
    return mask.bool()


def _ahead(value: Any, name: str) -> Any:
    """Per-token fields one place ahead; the last entry is 0."""
    if name in ("truncated", "group") or value is None or isinstance(value, int | float):
        return value
    value = torch.as_tensor(value)
    return torch.cat([value[1:], value.new_zeros(1)])


def _vector(value: Any, dtype: torch.dtype | None, name: str) -> Tensor:
    tensor = torch.as_tensor(value).detach().cpu()
    if dtype is None:
        if not tensor.is_floating_point():
            tensor = tensor.float()
    elif tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} are integers, got {tensor.dtype}")
    else:
        tensor = tensor.to(dtype)
    if tensor.ndim != 1:
        raise ValueError(f"{name} is one sequence, [T], got {tuple(tensor.shape)}")
    return tensor


def check_alike(data: Sequence[Datum]) -> None:
    """Raises ValueError unless there is data, and all of it has the same fields."""
    if not len(data):
        raise ValueError("there is no data: a step needs one Datum at least")
    every = [field.name for field in fields(Datum) if field.name != "group"]
    names = [name for name in every if getattr(data[0], name) is not None]
    for i, datum in enumerate(data):
        theirs = [name for name in every if getattr(datum, name) is not None]
        if theirs != names:
            odd = ", ".join(sorted(set(names) ^ set(theirs)))
            raise ValueError(f"data[{i}] and data[0] differ in which fields they have: {odd}")


def loss_tokens(data: Sequence[Datum], device: torch.device | None = None) -> losses.Tokens:
    """The data as losses take it, flat."""

    def every(name: str) -> list[Tensor] | None:
        return None if getattr(data[0], name) is None else [getattr(datum, name).to(device) for datum in data]

    truncated = torch.tensor([datum.truncated for datum in data], device=device)
    mask = [datum.mask.to(device) for datum in data]
    per_token = {name: every(name) for name in ("advantages", "weights", *LOGPROBS)}
    return losses.tokens(mask, truncated=truncated, **per_token)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Unit:
    """Sequences that stay together, the tokens that computing them takes, and what that costs."""

    members: tuple[int, ...]
    tokens: int
    cost: float


TreeOf = Callable[[list[Tensor]], PrefixTree | None]


def _unit(data: Sequence[Datum], members: Sequence[int], pair_cost: float, tree_of: TreeOf | None) -> Unit:
    lengths = [len(data[i].tokens) for i in members]
    tokens, pairs = sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    tree = tree_of([data[i].tokens for i in members]) if tree_of is not None and len(members) > 1 else None
    if tree is not None:
        tokens, pairs = tree.shared.tokens, tree.shared.pairs
    return Unit(tuple(members), tokens, tokens + pair_cost * pairs)


def units(data: Sequence[Datum], budget: int, pair_cost: float, tree_of: TreeOf | None) -> list[Unit]:
    """The data in units of at most `budget` tokens. A group stays together where it fits; `tree_of` gives the prefix
    tree as which sequences would run, or None.

    Raises ValueError for a sequence longer than the budget."""
    for i, datum in enumerate(data):
        if len(datum.tokens) > budget:
            raise ValueError(
                f"data[{i}] has {len(datum.tokens)} tokens, more than the token budget of {budget} per micro-batch; "
                "raise the budget, or shorten the sequence"
            )
    groups: dict[Any, list[int]] = {}
    for i, datum in enumerate(data):
        groups.setdefault((i, None) if datum.group is None else (None, datum.group), []).append(i)
    found = []
    for members in groups.values():
        whole = _unit(data, members, pair_cost, tree_of)
        if whole.tokens <= budget:
            found.append(whole)
            continue
        part: Unit | None = None
        for i in members:
            more = _unit(data, [*part.members, i] if part else [i], pair_cost, tree_of)
            if part is not None and more.tokens > budget:
                found.append(part)
                more = _unit(data, [i], pair_cost, tree_of)
            part = more
        found += [part] if part else []
    return found


def deal(parts: Sequence[Unit], ranks: int, budget: int) -> list[list[tuple[int, ...]]]:
    """[micro-batch][rank] -> indices of data, () where a rank has nothing to do there."""
    order = sorted(range(len(parts)), key=lambda i: (-parts[i].cost, i))
    count = max(1, -(-sum(part.tokens for part in parts) // (budget * ranks)))
    while True:
        bins: list[list[int]] = [[] for _ in range(count * ranks)]
        tokens, cost = [0] * len(bins), [0.0] * len(bins)
        fits = True
        for i in order:
            free = [b for b in range(len(bins)) if tokens[b] + parts[i].tokens <= budget]
            if not free:
                fits = False
                break
            best = min(free, key=lambda b: (cost[b], b))
            bins[best].append(i)
            tokens[best] += parts[i].tokens
            cost[best] += parts[i].cost
        if fits:
            break
        count += 1
    # Micro-batches of like cost side by side, so that no rank waits; every second one the other way round.
    heaviest = sorted(range(len(bins)), key=lambda b: (-cost[b], b))
    dealt = []
    for number in range(count):
        row = heaviest[number * ranks : (number + 1) * ranks]
        row = row[::-1] if number % 2 else row
        dealt.append([tuple(sorted(i for unit in bins[b] for i in parts[unit].members)) for b in row])
    return dealt
