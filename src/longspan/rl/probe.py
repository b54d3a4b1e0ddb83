"""The probe: does the generator draw from the policy that is trained? Asked after every update of its weights.

A few fixed prompts are completed, and what the generator says of its tokens is compared with what the trainer says:

    max |logprob of the generator - logprob of score| <= tolerance

Old weights, a prefix cache that outlived them, a sampler that renormalises, log-probabilities from before the
temperature, another model, another precision: all of them show here, and in nothing else but a training run that goes
wrong slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from longspan.rl.rollout import Completion, Generator, Sampling

Score = Callable[[list[list[int]], float], Sequence[Tensor | Sequence[float]]]


def probe(
    generator: Generator,
    score: Score,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    tolerance: float = 1e-5,
    seeds: Sequence[int] | None = None,
) -> float:
    """The largest difference of a log-probability, over all tokens of the prompts' completions.

    score(sequences, temperature) -> per sequence the log-probability of each next token, [T] or [T - 1], as
    `longspan.score(model, sequences, temperature=temperature).logprobs` gives it; whatever collectives that has are
    the only ones: every rank calls this alike, with the same prompts. At temperature 0 tokens are greedy and
    log-probabilities those at temperature 1.

    tolerance: 1e-5 where both run in fp32; about 1e-2 for a bf16 generator.

    Raises RuntimeError beyond the tolerance, for a log-probability that is no number, and for a generator that says
    nothing. Every rank that calls with the same generator's answers raises alike; a server's ranks may differ.
    """
    if not prompts:
        raise RuntimeError("the probe has nothing to compare: it was given no prompt")
    completions = generator.generate(prompts, sampling, list(seeds) if seeds is not None else list(range(len(prompts))))
    sequences = [[*map(int, prompt), *each.tokens] for prompt, each in zip(prompts, completions)]
    scored = score(sequences, sampling.temperature or 1.0)
    worst, where = 0.0, None
    for i, (prompt, completion, logprobs) in enumerate(zip(prompts, completions, scored)):
        trained = _numbers(logprobs)[len(prompt) - 1 :][: len(completion.tokens)]
        for t, (theirs, ours) in enumerate(zip(completion.logprobs, trained, strict=True)):
            difference = abs(theirs - ours)
            if where is None or not difference <= worst:
                worst, where = difference, (i, t, theirs, ours)
            if math.isnan(difference):
                raise RuntimeError(_report(difference, tolerance, where, completion))
    if where is None:
        raise RuntimeError("the probe has nothing to compare: no token was generated")
    if not worst <= tolerance:
        raise RuntimeError(_report(worst, tolerance, where, completions[where[0]]))
    return worst


def _numbers(values: Any) -> list[float]:
    return values.detach().double().tolist() if isinstance(values, Tensor) else [float(value) for value in values]


def _report(worst: float, tolerance: float, where: tuple[int, int, float, float], completion: Completion) -> str:
    i, t, theirs, ours = where
    return (
        f"the generator does not draw from the trained policy: of token {t} of prompt {i} "
        f"({completion.tokens[t]}, weights of version {completion.version}) it says log p = {theirs:.7g}, the trainer "
        f"{ours:.7g}; they differ by {worst:.3g}, {tolerance:.3g} is allowed. Old weights or a prefix cache of them; a "
        "sampler that renormalises (top-p, top-k, min-p, penalties); log-probabilities from before the temperature "
        "(vLLM without --logprobs-mode processed_logprobs); or another precision, for which the tolerance is to be set"
    )
