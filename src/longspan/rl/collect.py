"""From prompts to scored groups: the same whole rollouts on every rank.

A step's requests (which row, which seed) are a function of (seed, how many prompts came before): no rank decides
anything. Each rank draws a contiguous share of them, since the completions of one prompt are cheaper together; shares
are gathered, and rank 0 scores all completions in one call, so that a reward sees the same batch at any number of
ranks. An error on one rank is raised on all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from longspan import losses
from longspan.config import ConfigError, RLConfig
from longspan.engine.packing import step_rows
from longspan.engine.process import precise
from longspan.rl.data import Prompt
from longspan.rl.environments import Codec, Episode, rollout
from longspan.rl.rewards import Rewards, load_function, load_rewards
from longspan.rl.rollout import Completion, Generator, Sampling, seed_of

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One completion (or conversation) to be drawn. group: all of one prompt's draw."""

    row: int
    group: int
    seed: int


@dataclass(frozen=True)
class Rollouts:
    """Whole, in the order of the requests. rewards: NaN where there is none; each: by function, before weights."""

    requests: tuple[Request, ...]
    episodes: tuple[Episode, ...]
    rewards: tuple[float, ...]
    each: dict[str, tuple[float, ...]]
    seconds: dict[str, float]

    def __len__(self) -> int:
        return len(self.requests)

    def take(self, which: Sequence[int]) -> Rollouts:
        """Those of these indices."""
        return Rollouts(
            tuple(self.requests[i] for i in which),
            tuple(self.episodes[i] for i in which),
            tuple(self.rewards[i] for i in which),
            {name: tuple(values[i] for i in which) for name, values in self.each.items()},
            self.seconds,
        )

    def __add__(self, other: Rollouts) -> Rollouts:
        return Rollouts(
            self.requests + other.requests,
            self.episodes + other.episodes,
            self.rewards + other.rewards,
            {name: values + other.each[name] for name, values in self.each.items()},
            {name: seconds + other.seconds[name] for name, seconds in self.seconds.items()},
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Rollouts:
        episodes = []
        for each in values["episodes"]:
            lists = {name: tuple(each[name]) for name in ("tokens", "chosen", "logprobs")}
            episodes.append(Episode(**{**each, **lists}))
        return cls(
            tuple(Request(**each) for each in values["requests"]),
            tuple(episodes),
            tuple(values["rewards"]),
            {name: tuple(each) for name, each in values["each"].items()},
            values["seconds"],
        )


class Collector:
    """Draws and scores completions of the rows in `prompts[: training]`."""

    def __init__(
        self,
        config: RLConfig,
        prompts: Sequence[Prompt],
        training: int,
        tokenizer: PreTrainedTokenizerBase,
        generator: Generator,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.prompts, self.training = config, prompts, training
        self.tokenizer, self.generator, self.dtype = tokenizer, generator, dtype
        reward, rollouts = config.reward, config.rollout
        self.rewards: Rewards | None = None
        if reward.functions:
            self.rewards = load_rewards(reward.functions, reward.weights, seconds=reward.timeout_seconds)
            self.rewards.check_columns([*prompts[0].columns])
        self.environment = load_function(rollouts.environment) if rollouts.environment else None
        stop = tokenizer.eos_token_id
        if stop is None:
            raise ConfigError("the tokenizer has no EOS token, so no completion would ever end")
        self.sampling = Sampling(
            temperature=rollouts.temperature, max_new_tokens=rollouts.max_new_tokens, stop=(int(stop),)
        )

    def ask(self, consumed: int) -> tuple[Request, ...]:
        """The requests of a draw of `rollout.prompts` prompts, after so many."""
        data, rollouts = self.config.data, self.config.rollout
        rows = step_rows(consumed, rollouts.prompts, rows=self.training, seed=data.seed, shuffle=data.shuffle)
        seed = self.config.train.seed
        return tuple(
            Request(int(row), consumed + number, seed_of(seed, consumed + number, member))
            for number, row in enumerate(rows)
            for member in range(rollouts.group_size)
        )

    def held_out(self) -> tuple[Request, ...]:
        """One request per validation row."""
        return tuple(Request(row, row, 0) for row in range(self.training, len(self.prompts)))

    def draw(self, requests: Sequence[Request], sampling: Sampling) -> list[Episode] | str:
        """This rank's share, or what went wrong. Without any collective: it may run in a thread."""
        try:
            with precise(self.dtype):
                return self._draw(_share(requests), sampling)
        except Exception as error:  # noqa: BLE001 - carried to `gather`, which raises it on every rank
            return f"{type(error).__name__}: {error}"

    def _draw(self, requests: Sequence[Request], sampling: Sampling) -> list[Episode]:
        seeds = [request.seed for request in requests]
        if self.environment is None:
            asked = [self.prompts[request.row].ids for request in requests]
            drawn = self.generator.generate(asked, sampling, seeds) if asked else []
            return [_episode(prompt, completion) for prompt, completion in zip(asked, drawn, strict=True)]
        if not requests:
            return []
        rollouts = self.config.rollout
        return rollout(
            [self.environment() for _ in requests],
            [self.prompts[request.row].row for request in requests],
            self.generator,
            Codec(self.tokenizer),
            sampling,
            max_turns=rollouts.max_turns,
            max_tokens=rollouts.max_tokens,
            seeds=seeds,
        )

    def gather(self, requests: Sequence[Request], mine: list[Episode] | str, seconds: float) -> Rollouts:
        """All ranks' episodes, scored. seconds: what drawing took here."""
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, mine)
        for rank, share in enumerate(shares):
            if isinstance(share, str):
                raise RuntimeError(f"rollouts failed on rank {rank}: {share}")
        episodes = [episode for share in shares for episode in share]
        started = time.perf_counter()
        rewards, each = on_rank_zero(lambda: self._score(requests, episodes))
        took = {"rollout": seconds, "reward": time.perf_counter() - started}
        return Rollouts(
            tuple(requests), tuple(episodes), tuple(rewards), {name: tuple(v) for name, v in each.items()}, took
        )

    def _score(
        self, requests: Sequence[Request], episodes: Sequence[Episode]
    ) -> tuple[list[float], dict[str, list[float]]]:
        totals = [0.0] * len(episodes)
        each: dict[str, list[float]] = {}
        if self.environment is not None:
            each["environment"] = totals = [episode.reward for episode in episodes]
        if self.rewards is not None:
            rows = [self.prompts[request.row] for request in requests]
            said = [[t for t, own in zip(episode.tokens, episode.chosen) if own] for episode in episodes]
            texts = [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in said]
            sums, by_name = self.rewards(
                texts,
                prompts=[row.row.get("prompt") for row in rows],
                completion_ids=said,
                columns={name: [row.columns[name] for row in rows] for name in rows[0].columns},
            )
            totals = [a + b for a, b in zip(totals, sums)]
            each.update(zip(_short(list(by_name)), by_name.values()))
        buffer = self.config.reward.overlong_buffer
        if buffer:
            lengths = torch.tensor([sum(episode.chosen) for episode in episodes])
            punished = losses.soft_punishment(
                lengths, self.sampling.max_new_tokens, buffer, self.config.reward.overlong_factor
            )
            totals = [a + b for a, b in zip(totals, punished.tolist())]
        return totals, each

    def pass_at(self, rollouts: Rollouts) -> tuple[float, float]:
        """(pass@1, pass@k): the fraction of scored completions that are solved, and of groups with one that is."""
        scored = [(r.group, reward) for r, reward in zip(rollouts.requests, rollouts.rewards) if not math.isnan(reward)]
        if not scored:
            return math.nan, math.nan
        solved = [reward >= self.config.reward.solved for _, reward in scored]
        groups = {group for group, _ in scored}
        with_one = {group for (group, _), ok in zip(scored, solved) if ok}
        return sum(solved) / len(solved), len(with_one) / len(groups)


def on_rank_zero(function: Callable[[], T]) -> T:
    """What `function()` returns on rank 0, on every rank; if it raises, every rank raises."""
    answer: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer = [("returned", function())]
        except Exception as raised:  # noqa: BLE001 - raised again below, here and on every other rank
            error = raised
            answer = [("raised", f"{type(raised).__name__}: {raised}")]
    dist.broadcast_object_list(answer, src=0)
    if error is not None:
        raise error
    kind, value = answer[0]
    if kind == "raised":
        raise RuntimeError(f"on rank 0: {value}")
    return value  # type: ignore[no-any-return]


def _short(names: list[str]) -> list[str]:
    """What reward functions are called in metrics: by their own name where no other metric is called so."""
    short = [name.rpartition(":")[2] for name in names]
    return [name if own in ("std", "environment") or short.count(own) > 1 else own for name, own in zip(names, short)]


def _share(requests: Sequence[Request]) -> Sequence[Request]:
    """This rank's part."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return requests[len(requests) * rank // size : len(requests) * (rank + 1) // size]


def _episode(prompt: Sequence[int], completion: Completion) -> Episode:
    return Episode(
        tokens=(*prompt, *completion.tokens),
        chosen=(*[False] * len(prompt), *[True] * len(completion.tokens)),
        logprobs=(*[math.nan] * len(prompt), *completion.logprobs),
        prompt=len(prompt),
        reward=0.0,
        truncated=completion.finish == "length",
        failed="",
        turns=1,
        version=completion.version,
    )
