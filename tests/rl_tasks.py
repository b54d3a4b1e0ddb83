"""Rows, rewards and environments for tests/test_rl.py."""

import math

from longspan.rl.environments import Turn


def rows():
    return [{"prompt": f"{n}{n + 1}>", "answer": f"{n}"} for n in range(8)]


def rows_of_each_rank():
    import torch.distributed as dist

    return [
        {"prompt": "0>", "answer": "0"},
        *({"prompt": f"{n}>", "answer": f"{n}"} for n in range(8 + dist.get_rank())),
    ]


def reward(completions, answer, **_):
    return [sum(a == b for a, b in zip(c, w)) + 0.01 * len(c) for c, w in zip(completions, answer)]


def thirds(completions, **_):
    """Something that random weights get right now and then."""
    return [sum(ord(c) % 3 == 0 for c in text) / 4 for text in completions]


def needs(completions, solution):
    return [1.0] * len(completions)


def nothing(completions, **_):
    return [None] * len(completions)


def same(completions, **_):
    return [1.0] * len(completions)


def some(completions, prompts, **_):
    """No reward for the completions of two of the prompts."""
    scores = thirds(completions)
    return [None if prompt[0] in "13" else score for prompt, score in zip(prompts, scores)]


def shouts(completions, **_):
    raise KeyError("no such answer")


def infinite(completions, **_):
    return [math.inf] * len(completions)


class Echo:
    """Two turns; rewards every third character of the table."""

    def reset(self, row):
        self.turns = 0
        return row["prompt"]

    def step(self, text):
        self.turns += 1
        score = sum(ord(c) % 3 == 0 for c in text) / 4
        return Turn(observation=f"[{self.turns}]", reward=score, done=self.turns == 2)


def id_rows():
    """Prompts as token ids, below 96."""
    return [{"prompt": [3 + n, 4, 5 + n]} for n in range(8)]


def even(completions, completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / 4 for ids in completion_ids]
