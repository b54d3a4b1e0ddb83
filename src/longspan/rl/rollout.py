"""What a generator is: tokens in, tokens out, with the log-probability and the weight version of every token.

Text never comes between the model and what it is trained on: a completion that is decoded and encoded again may be
other tokens. Log-probabilities are those of the distribution that was sampled from, after the temperature, over the
whole vocabulary; so they equal the trainer's, `longspan.score(.., temperature=)`, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn.

    temperature: divides the logits; 0 takes the most probable token (its log-probability is then at temperature 1).
    max_new_tokens: a completion that gets there without a stop token is truncated: finish "length".
    stop: token ids that end a completion; the stop token is its last token.

    There is no top-p, top-k or min-p: they renormalise, and what is reported is then not the log-probability of the
    policy that is trained. Raises ValueError for values that mean nothing.
    """

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a number from 0 on, got {self.temperature!r}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens!r}")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The tokens after a prompt, a stop token included; logprobs as many as tokens (NaN where the generator did not
    tell); version of the weights by which it was drawn, the oldest where they changed meanwhile."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    version: int


class Generator(Protocol):
    """Draws completions of prompts. Every rank has one and asks it for its own prompts; nothing here is collective but
    `update_weights`, which every rank calls alike."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One completion per prompt (repeat a prompt for a group), in order. What is drawn for a prompt depends on its
        seed, and not on what is drawn beside it, on the rank or on the number of ranks, where the generator is able to
        promise that. Safe to be called from a thread, while no other call is running."""
        ...

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """The plain model's whole state dict, on every rank; afterwards prefix caches know nothing of the old ones."""
        ...

    def close(self) -> None: ...


def seed_of(*words: int) -> int:
    """A seed from several numbers."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def check_request(
    prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], *, known: int | None = None
) -> list[tuple[int, ...]]:
    """The prompts as tuples of integers. Raises ValueError for what no generator can run: another number of seeds than
    of prompts, a negative seed, an empty prompt, a token outside 0..known-1."""
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts have {len(seeds)} seeds; each needs one of its own")
    negative = [i for i, seed in enumerate(seeds) if seed < 0]
    if negative:
        raise ValueError(f"seeds[{negative[0]}] is {seeds[negative[0]]}; seeds are integers from 0 on")
    asked = [tuple(int(token) for token in prompt) for prompt in prompts]
    for i, prompt in enumerate(asked):
        if not prompt:
            raise ValueError(f"prompts[{i}] has no token; a model needs one to go on from")
        if min(prompt) < 0 or (known is not None and max(prompt) >= known):
            end = "" if known is None else str(known - 1)
            raise ValueError(f"prompts[{i}] has tokens from {min(prompt)} to {max(prompt)}, outside 0..{end}")
    return asked
