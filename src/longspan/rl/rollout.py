"""What a generator is: tokens in, tokens out, with the log-probability and the weight version of every token.

Text never comes between the model and what it is trained on: a completion that is decoded and encoded again may be
other tokens. Log-probabilities are those of the distribution that was sampled from, after the temperature, over the
whole vocabulary; so they equal the trainer's, `longspan.score(.., temperature=)`, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn.

    temperature: divides the logits; 0 takes the most probable token (its log-probability is then at temperature 1).
    max_new_tokens: a completion that gets there without a stop token is truncated: finish "length".
    stop: token ids that end a completion; the stop token is its last token.
    """

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop: tuple[int, ...] = ()


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
