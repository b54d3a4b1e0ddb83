"""Copy six digits: the task of examples/rl_copy.toml."""

import random


def rows(count=512, digits=6, seed=0):
    """Prompts like "402913>", and what should come next."""
    generator = random.Random(seed)
    numbers = ["".join(generator.choices("0123456789", k=digits)) for _ in range(count)]
    return [{"prompt": f"{number}>", "answer": number} for number in numbers]


def reward(completions, answer, **_):
    """The fraction of digits at their places; what is too long or too short loses a place for each."""
    scores = []
    for completion, wanted in zip(completions, answer):
        right = sum(a == b for a, b in zip(completion, wanted))
        scores.append(right / max(len(wanted), len(completion)))
    return scores
