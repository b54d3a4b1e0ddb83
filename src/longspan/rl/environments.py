"""Conversations of several turns with an environment: what the policy said, what it was told, and what it is worth.

    reset(row)                     -> the first messages, or text
    policy completes               -> tokens, kept as they are
    step(text of the completion)   -> an observation, a reward, whether it is over
    observation                    -> tokens of its own, appended; and so on

Tokens in, tokens out: what was generated is never encoded again, and an observation is encoded alone. Under a chat
template, that is what the template writes after an assistant's words: the end of its turn, the observation in its
role, and the beginning of the next turn. The end of turn is left out where the policy said it itself.

Whatever the policy did not choose has mask False and a log-probability of NaN: it is context, never trained on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Protocol

from longspan.rl.rollout import Completion, Generator, Sampling, seed_of

LOGGER = logging.getLogger(__name__)
SENTINEL = "longspan-7f3a-turn"  # stands for an assistant's words in a template

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Turn:
    """What an environment answers. observation: the next message's text; None ends the conversation, as done does.
    reward: added to the conversation's; None or NaN: the conversation has none."""

    observation: str | None = None
    reward: float | None = 0.0
    done: bool = False


class Environment(Protocol):
    """The other side of one conversation; its state is its own. An exception costs the conversation its reward."""

    def reset(self, row: Mapping[str, Any]) -> Messages | str:
        """Begins: the first messages (for the chat template), or text."""
        ...

    def step(self, text: str) -> Turn:
        """Answers what the policy said, decoded without special tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A conversation. tokens: all of it; chosen: which of them the policy chose; logprobs: the generator's, NaN where
    not chosen. prompt: how many tokens the reset made. version: the oldest of the weights that it was drawn by, -1
    where none were. reward: NaN where there is none: an environment that said so, or raised, or that never came to
    step. truncated: it ended by max_turns, max_tokens or max_new_tokens. failed: what the environment raised, or
    nothing; where reset did, there are no tokens."""

    tokens: tuple[int, ...]
    chosen: tuple[bool, ...]
    logprobs: tuple[float, ...]
    prompt: int
    reward: float
    truncated: bool
    failed: str
    turns: int
    version: int


class Codec:
    """Between text and tokens, for conversations.

    tokenizer: a Hugging Face one. role: of observations, where the conversation is one of messages.
    """

    def __init__(self, tokenizer: Any, *, role: str = "user") -> None:
        self.tokenizer, self.role = tokenizer, role

    def start(self, conversation: Messages | str) -> list[int]:
        """Tokens of the beginning, up to where the policy goes on. Raises ValueError for none."""
        if isinstance(conversation, str):
            ids = self.tokenizer(conversation)["input_ids"]
        else:
            made = self.tokenizer.apply_chat_template(
                conversation, tokenize=True, return_dict=True, add_generation_prompt=True
            )
            ids = made["input_ids"]
        if not ids:
            raise ValueError("a conversation begins with one token at least")
        return list(ids)

    def observation(self, text: str, said: Sequence[int], *, chat: bool) -> list[int]:
        """Tokens of an observation after the tokens that the policy said."""
        if not chat:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        messages = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": SENTINEL},
            {"role": self.role, "content": text},
        ]
        written = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if written.count(SENTINEL) != 1:
            raise ValueError(
                "the chat template does not write an assistant's words once and as they are; observations cannot be "
                "told from what stands around them"
            )
        after = written.partition(SENTINEL)[2]
        ids = list(self.tokenizer(after, add_special_tokens=False)["input_ids"])
        return ids[1:] if ids and said and ids[0] == said[-1] else ids

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def rollout(
    environments: Sequence[Environment],
    rows: Sequence[Mapping[str, Any]],
    generator: Generator,
    codec: Codec,
    sampling: Sampling,
    *,
    max_turns: int,
    max_tokens: int,
    seeds: Sequence[int],
    workers: int = 1,
) -> list[Episode]:
    """One conversation per environment, in order; a group is as many environments with the same row.

    sampling: of each turn; a turn that is cut off ends the conversation. max_tokens: of a whole conversation, the last
    token included. seeds: one per conversation; its turns draw from seeds made of that one and the turn's number.
    workers: how many environments step at once, in threads.

    Conversations go on together: each turn is one call of the generator (one for each number of tokens that are left,
    where that is less than `max_new_tokens`). Raises ValueError for lists of different lengths and for environments
    that answer with something else than a `Turn`.
    """
    if not len(environments) == len(rows) == len(seeds):
        raise ValueError(f"{len(environments)} environments have {len(rows)} rows and {len(seeds)} seeds")
    if min(max_turns, max_tokens, workers) < 1:
        raise ValueError("max_turns, max_tokens and workers are at least 1")
    talks = [_Talk(environment, row, codec) for environment, row in zip(environments, rows)]
    with ThreadPoolExecutor(workers, "environment") as pool:
        each: Callable[..., Any] = map if workers == 1 else pool.map
        list(each(_Talk.begin, talks))
        for turn in range(max_turns):
            for talk in talks:
                talk.over = talk.over or talk.cut(len(talk.tokens) >= max_tokens)
            live = [i for i, talk in enumerate(talks) if not talk.over]
            if not live:
                break
            prompts, own = [talks[i].tokens for i in live], [seeds[i] for i in live]
            said = _complete(generator, sampling, prompts, max_tokens, own, turn)
            last = turn + 1 == max_turns
            list(each(_Talk.turn, [talks[i] for i in live], said, repeat(max_tokens), repeat(last)))
    _log_failures(talks)
    return [talk.episode() for talk in talks]


def _complete(
    generator: Generator,
    sampling: Sampling,
    prompts: list[list[int]],
    max_tokens: int,
    seeds: list[int],
    turn: int,
) -> list[Completion]:
    drawn = [seed_of(seed, turn) for seed in seeds]
    room = [min(sampling.max_new_tokens, max_tokens - len(prompt)) for prompt in prompts]
    found: dict[int, Completion] = {}
    for size in sorted(set(room)):
        some = [i for i, each in enumerate(room) if each == size]
        asked = replace(sampling, max_new_tokens=size)
        found.update(zip(some, generator.generate([prompts[i] for i in some], asked, [drawn[i] for i in some])))
    return [found[i] for i in range(len(prompts))]


class _Talk:
    """A conversation in the making."""

    def __init__(self, environment: Environment, row: Mapping[str, Any], codec: Codec) -> None:
        self.environment, self.row, self.codec = environment, row, codec
        self.tokens: list[int] = []
        self.chosen: list[bool] = []
        self.logprobs: list[float] = []
        self.prompt, self.turns, self.reward = 0, 0, 0.0
        self.versions: list[int] = []
        self.chat = self.over = self.truncated = False
        self.error: Exception | None = None

    def begin(self) -> None:
        try:
            conversation = self.environment.reset(self.row)
        except Exception as error:  # noqa: BLE001 - a user's environment: logged, counted, and without a reward
            self._fail(error)
            return
        self.chat = not isinstance(conversation, str)
        self._add(self.codec.start(conversation))
        self.prompt = len(self.tokens)

    def turn(self, said: Completion, max_tokens: int, last: bool) -> None:
        self._add(said.tokens, said.logprobs)
        self.turns += 1
        self.versions.append(said.version)
        try:
            answer = self.environment.step(self.codec.text(said.tokens))
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            return
        if not isinstance(answer, Turn):
            raise ValueError(f"{type(self.environment).__name__}.step returned {answer!r}, not a Turn")
        reward = math.nan if answer.reward is None else float(answer.reward)
        if math.isinf(reward):
            raise ValueError(f"{type(self.environment).__name__}.step gave the reward {reward}; None is for none")
        self.reward += reward
        self.over = answer.done or answer.observation is None
        if self.over or self.cut(last or said.finish == "length") or answer.observation is None:
            return
        told = self.codec.observation(answer.observation, said.tokens, chat=self.chat)
        if not self.cut(len(self.tokens) + len(told) >= max_tokens):
            self._add(told)

    def cut(self, condition: bool) -> bool:
        """Ends the conversation as truncated, on that condition."""
        if condition and not self.over:
            self.over = self.truncated = True
        return condition

    def episode(self) -> Episode:
        return Episode(
            tokens=tuple(self.tokens),
            chosen=tuple(self.chosen),
            logprobs=tuple(self.logprobs),
            prompt=self.prompt,
            reward=self.reward if self.turns else math.nan,
            truncated=self.truncated,
            failed="" if self.error is None else repr(self.error),
            turns=self.turns,
            version=min(self.versions, default=-1),
        )

    def _add(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.tokens += tokens
        self.chosen += [logprobs is not None] * len(tokens)
        self.logprobs += [math.nan] * len(tokens) if logprobs is None else logprobs

    def _fail(self, error: Exception) -> None:
        self.error, self.reward, self.over = error, math.nan, True


def _log_failures(talks: list[_Talk]) -> None:
    """One traceback of each kind."""
    kinds: dict[tuple[str, str], list[Exception]] = {}
    for talk in talks:
        if talk.error is not None:
            kind = type(talk.environment).__name__, type(talk.error).__name__
            kinds.setdefault(kind, []).append(talk.error)
    for (name, _), errors in kinds.items():
        LOGGER.error(
            "%s raised in %d of %d conversations, which have no reward",
            name,
            len(errors),
            len(talks),
            exc_info=errors[0],
        )
