"""Reward functions: by name, by column, and what a failure costs; and conversations with environments."""

import logging
import math
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

from longspan.config import ConfigError
from longspan.engine.tokens import byte_tokenizer
from longspan.rl.environments import Codec, Turn, rollout
from longspan.rl.own import OwnGenerator
from longspan.rl.probe import probe
from longspan.rl.rewards import Rewards, check_any_reward, load_function, load_rewards
from longspan.rl.rollout import Completion, Sampling
from test_generators import scored
from tiny import build

SOURCE = """
from dataclasses import dataclass

@dataclass
class Kept:  # a dataclass looks its module up in sys.modules
    value: float = 1.0

def length(completions, **columns):
    return [float(len(text)) for text in completions]

def matches(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer)]

def positional(completions, /):
    return []

async def later(completions):
    return []

constant = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


def call(rewards, texts=("a", "bb", "ccc"), **columns):
    ids = [[ord(letter) for letter in text] for text in texts]
    return rewards(list(texts), prompts=["?"] * len(texts), completion_ids=ids, columns=columns)


def same(found, expected):
    return len(found) == len(expected) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, expected)
    )


# -- loading ---------------------------------------------------------------------------------------------------


def test_functions_are_found_by_file_and_by_module(file, monkeypatch):
    assert load_function(f"{file}:length")(["abc"]) == [3.0]
    assert load_function(f"{file}:length") is load_function(f"{file}:length")  # a file is run once
    monkeypatch.syspath_prepend(str(file.parent))
    assert load_function("my_rewards:matches")(["a"], ["a"]) == [1.0]
    sys.modules.pop("my_rewards")


@pytest.mark.parametrize(
    "name,said",
    [
        ("length", "is no function; write path/to/file.py:name"),
        ("{file}", "is no function"),
        ("{file}:longth", "has no function 'longth'; it has Kept, dataclass, later, length, matches, positional"),
        ("{file}:constant", "has no function 'constant'"),
        ("{file}:positional", "only a position can fill"),
        ("{file}:later", "is asynchronous"),
        ("nowhere/file.py:length", "there is no file nowhere/file.py"),
        ("no_such_package.rewards:length", "there is no module no_such_package"),
    ],
)
def test_names_that_lead_nowhere(name, said, file):
    with pytest.raises(ConfigError) as raised:
        load_function(name.format(file=file))
    assert said in str(raised.value)


def test_an_error_within_the_file_is_not_hidden(file):
    file.write_text("import no_such_package_within\n")
    with pytest.raises(ModuleNotFoundError):
        load_function(f"{file}:length")
    file.write_text("def length(completions): return [1.0]\n")  # and the half-made module is gone
    assert load_function(f"{file}:length")(["a"]) == [1.0]


def test_weights_must_fit(file):
    with pytest.raises(ConfigError, match="1 reward functions have 2 weights"):
        load_rewards([f"{file}:length"], [1.0, 2.0])
    with pytest.raises(ConfigError, match="one function is needed at least"):
        load_rewards([])
    with pytest.raises(ConfigError, match="named twice"):
        load_rewards([f"{file}:length"] * 2)
    with pytest.raises(ConfigError, match="must be numbers"):
        load_rewards([f"{file}:length"], [math.nan])


# -- calling ---------------------------------------------------------------------------------------------------


def test_functions_get_the_columns_they_name_and_are_summed(file):
    rewards = load_rewards([f"{file}:length", f"{file}:matches"], [0.5, 2.0])
    totals, each = call(rewards, answer=["a", "x", "ccc"], other=[1, 2, 3])
    assert totals == [2.5, 1.0, 3.5]
    assert each == {f"{file}:length": [1.0, 2.0, 3.0], f"{file}:matches": [1.0, 0.0, 1.0]}


def test_what_a_function_is_given():
    seen = {}

    def everything(**given):
        seen.update(given)
        return [0] * len(given["completions"])

    def two(completion_ids, prompts):
        assert completion_ids == [[97], [98, 98]] and prompts == ["?", "?"]
        return [1, 2]

    totals, _ = call(Rewards({"all": everything, "two": two}, [1.0, 1.0]), ("a", "bb"), level=[7, 8])
    assert totals == [1.0, 2.0]
    assert seen == {
        "completions": ["a", "bb"],
        "prompts": ["?", "?"],
        "completion_ids": [[97], [98, 98]],
        "level": [7, 8],
    }


def test_none_and_nan_and_exceptions_leave_no_reward(caplog):
    def partly(completions):
        return [None, math.nan, 1.0]

    def broken(completions):
        raise KeyError("answer")

    totals, each = call(Rewards({"partly": partly, "whole": lambda completions: [1, 1, 1]}, [1.0, 1.0]))
    assert same(totals, [math.nan, math.nan, 2.0]) and same(each["partly"], [math.nan, math.nan, 1.0])
    rewards = Rewards({"broken": broken, "whole": lambda completions: [1, 1, 1]}, [1.0, 1.0])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            totals, each = call(rewards)
            assert same(totals, [math.nan] * 3) and each["whole"] == [1, 1, 1]
    assert rewards.failures == {"broken": 3}
    assert len(caplog.records) == 1 and "KeyError: 'answer'" in caplog.text
    check_any_reward([math.nan, 0.0], 3)
    check_any_reward([], 3)
    with pytest.raises(RuntimeError, match="step 3: none of its 2 completions has a reward"):
        check_any_reward([math.nan, math.nan], 3)


@pytest.mark.parametrize(
    "returned,said",
    [
        ([1.0], "returned 1 rewards for 3 completions"),
        (1.0, "returned a float, not a list"),
        ("abc", "returned a str, not a list"),
        (None, "returned a NoneType, not a list"),
        ([1.0, "x", 2.0], r"\[1\] is a str, neither a number nor None"),
        ([1.0, [2.0], 2.0], r"\[1\] is a list, neither"),
        ([1.0, math.inf, 2.0], r"\[1\] is inf; return None"),
    ],
)
def test_functions_that_are_wrong_raise(returned, said):
    with pytest.raises(ValueError, match=said):
        call(Rewards({"wrong": lambda completions: returned}, [1.0]))


def test_numbers_of_arrays_and_tensors_are_numbers():
    for returned in (np.array([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0]), [np.float32(1), True, torch.tensor(3)]):
        totals, _ = call(Rewards({"array": lambda completions, returned=returned: returned}, [1.0]))
        assert totals[0] == 1.0 and totals[2] == 3.0 and all(type(total) is float for total in totals)


def test_columns_must_fit():
    rewards = Rewards({"one": lambda completions: [1, 1, 1]}, [1.0])
    with pytest.raises(ValueError, match="answer has 2 rows, there are 3 completions"):
        call(rewards, answer=[1, 2])
    with pytest.raises(ValueError, match=r"columns cannot be called .'completions'"):
        rewards(["a"], prompts=["?"], completion_ids=[[1]], columns={"completions": ["b"]})


def test_a_call_that_takes_too_long_is_a_failure():
    def hangs(completions):
        while True:
            time.sleep(0.01)

    rewards = Rewards({"hangs": hangs}, [1.0], seconds=0.1)
    start = time.monotonic()
    totals, _ = call(rewards)
    assert same(totals, [math.nan] * 3) and rewards.failures == {"hangs": 1} and time.monotonic() - start < 5
    assert call(Rewards({"quick": lambda completions: [1, 2, 3]}, [1.0], seconds=0.1))[0] == [1.0, 2.0, 3.0]
    time.sleep(0.2)  # no alarm is left behind


# -- environments ----------------------------------------------------------------------------------------------


class Count:
    """Says how long the last turn was, until a number of turns; the reward of a turn is its length."""

    def __init__(self, turns=3, chat=False, fails=None):
        self.turns, self.chat, self.fails, self.said = turns, chat, fails, []

    def reset(self, row):
        if self.fails == 0:
            raise OSError("no such game")
        return [{"role": "user", "content": row["prompt"]}] if self.chat else row["prompt"]

    def step(self, text):
        self.said.append(text)
        if self.fails == len(self.said):
            raise OSError("the game is over")
        return Turn(f"<{len(text)}>", float(len(text)), len(self.said) == self.turns)


def play(environments, generator, *, prompt="ab", max_new_tokens=4, stop=(), max_turns=5, max_tokens=200, **options):
    sampling = Sampling(max_new_tokens=max_new_tokens, stop=stop)
    rows = [{"prompt": prompt}] * len(environments)
    return rollout(
        environments,
        rows,
        generator,
        Codec(byte_tokenizer()),
        sampling,
        max_turns=max_turns,
        max_tokens=max_tokens,
        seeds=list(range(len(environments))),
        **options,
    )


class Script:
    """Says the given turns, whatever it is asked; ends with a stop token are its turns' own."""

    def __init__(self, *turns, finish="stop"):
        self.turns, self.finish, self.asked = list(turns), finish, []

    def generate(self, prompts, sampling, seeds):
        self.asked.append((list(map(list, prompts)), sampling, list(seeds)))
        turn = self.turns.pop(0)[: sampling.max_new_tokens]
        return [
            Completion(
                tokens=tuple(turn), logprobs=(-0.5,) * len(turn), finish=self.finish, version=9 - len(self.turns)
            )
            for _ in prompts
        ]


def test_a_conversation_is_tokens_with_a_mask():
    end = byte_tokenizer().eos_token_id
    script = Script([*b"hi", end], [*b"yes", end], [*b"!", end])
    (episode,) = play([Count()], script, stop=(end,))
    assert bytes(token for token in episode.tokens if token != end) == b"abhi<2>yes<3>!"
    said = [token for token, chosen in zip(episode.tokens, episode.chosen) if chosen]
    assert said == [*b"hi", end, *b"yes", end, *b"!", end]
    assert all(math.isnan(logprob) != chosen for logprob, chosen in zip(episode.logprobs, episode.chosen))
    assert len(episode.tokens) == len(episode.chosen) == len(episode.logprobs)
    assert (episode.prompt, episode.reward, episode.turns, episode.version) == (2, 6.0, 3, 7)
    assert not episode.truncated and episode.failed == ""
    assert script.asked[1][0] == [[*b"abhi", end, *b"<2>"]]  # what it said is asked on as it was
    assert len({seeds[0] for _, _, seeds in script.asked}) == 3  # every turn draws anew


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_under_a_chat_template_turns_are_closed_once(finish):
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    script = Script([*b"hi", end] if finish == "stop" else [*b"hi"], [*b"yes", end])
    sampling = Sampling(max_new_tokens=8, stop=(end,))
    (episode,) = rollout(
        [Count(turns=2, chat=True)],
        [{"prompt": "go"}],
        script,
        Codec(tokenizer),
        sampling,
        max_turns=4,
        max_tokens=99,
        seeds=[0],
    )
    whole = tokenizer.decode(episode.tokens)
    assert whole == "<|user|>go<|end|><|assistant|>hi<|end|><|user|><2><|end|><|assistant|>yes<|end|>"
    at = episode.prompt + 2
    assert episode.tokens[at] == end and episode.chosen[at] == (finish == "stop")  # who closed the turn


def test_conversations_end_where_there_is_no_room():
    turns = [[*b"four"]] * 9
    (episode,) = play([Count(turns=9)], Script(*turns), max_turns=3)
    assert episode.truncated and episode.turns == 3 and episode.tokens == (*b"abfour<4>four<4>four",)
    (episode,) = play([Count(turns=9)], Script(*turns), max_tokens=18)
    assert episode.truncated and episode.turns == 3 and episode.tokens == (*b"abfour<4>four<4>fo",)
    (episode,) = play([Count(turns=9)], Script(*turns), max_tokens=16)  # an observation that nothing could follow
    assert episode.truncated and episode.turns == 2 and episode.tokens == (*b"abfour<4>four",)
    (episode,) = play([Count(turns=9)], Script(*turns, finish="length"))
    assert episode.truncated and episode.turns == 1 and episode.tokens == (*b"abfour",) and episode.reward == 4.0
    (episode,) = play([Count()], Script(*turns), max_tokens=2)
    assert episode.truncated and episode.turns == 0 and math.isnan(episode.reward) and episode.version == -1


def test_environments_that_fail_cost_their_own_reward_alone(caplog):
    environments = [Count(turns=2), Count(turns=2, fails=2), Count(turns=2, fails=0)]
    with caplog.at_level(logging.ERROR):
        fine, later, never = play(environments, Script([*b"one"], [*b"four"]))
    assert fine.reward == 7.0 and fine.failed == ""
    assert math.isnan(later.reward) and later.tokens == (*b"abone<3>four",) and "the game is over" in later.failed
    assert math.isnan(never.reward) and never.tokens == () and "no such game" in never.failed
    assert len(caplog.records) == 1 and "Count raised in 2 of 3 conversations" in caplog.text


@pytest.mark.parametrize("answer,said", [("text", "not a Turn"), (Turn("x", math.inf), "reward inf")])
def test_environments_that_are_wrong_raise(answer, said):
    class Wrong(Count):
        def step(self, text):
            return answer

    with pytest.raises(ValueError, match=said):
        play([Wrong()], Script([*b"one"]))


def test_no_reward_is_nan_and_none_ends():
    class Silent(Count):
        def step(self, text):
            return Turn(reward=None)

    (episode,) = play([Silent()], Script([*b"one"]))
    assert math.isnan(episode.reward) and not episode.truncated and episode.turns == 1 and episode.failed == ""


def test_a_real_policy_many_turns_and_the_trainers_log_probabilities():
    """Ragged conversations through the own generator: alone, together, and in threads they are the same; and the
    log-probabilities of all turns are the trainer's of the whole conversation."""
    model = build("qwen3", vocab_size=262).eval()
    generator = OwnGenerator(model)
    options = {"max_new_tokens": 5, "stop": tuple(range(60, 200)), "max_turns": 4, "max_tokens": 40}
    episodes = play([Count(turns=1 + i % 4) for i in range(8)], generator, **options)
    assert len({len(each.tokens) for each in episodes}) > 3 and max(each.turns for each in episodes) > 1
    (first,) = play([Count(turns=1)], generator, **options)
    assert first == episodes[0] or repr(first) == repr(episodes[0])  # NaN is not itself
    threads = play([Count(turns=1 + i % 4) for i in range(8)], generator, workers=4, **options)
    assert repr(threads) == repr(episodes)
    logprobs = scored(model)([list(each.tokens) for each in episodes], 1.0)
    for episode, trained in zip(episodes, logprobs):
        for t, chosen in enumerate(episode.chosen):
            assert not chosen or abs(float(trained[t - 1]) - episode.logprobs[t]) <= 1e-5
    assert probe(generator, scored(model), [[3]], Sampling(max_new_tokens=2)) <= 1e-5
