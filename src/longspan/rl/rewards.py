"""Rewards: the user's functions, called with whole columns; what they cannot score is NaN and votes in no statistic.

A function is named `path/to/file.py:name` or `package.module:name`, and is called as

    name(completions=[text, ..], prompts=[..], completion_ids=[[id, ..], ..], <every column of the rows>=[..])
        -> one number or None per completion

with every list as long as the completions (a row of a group of 8 stands there 8 times), and with those arguments that
it has parameters for, or all of them where it takes **kwargs. Several functions are summed by their weights; a row has
a reward only if every function gave it one: a sum with a term missing is not comparable with the others of its group.

    None, NaN                          that row has no reward
    an exception, or too long          no row of that call has one; counted, and logged with its traceback once a kind
    another length, no number, inf     raises ValueError: the function is wrong, not the row
    no row of a step has a reward      raises RuntimeError: a step without rewards would train on nothing
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import math
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from longspan.config import ConfigError

LOGGER = logging.getLogger(__name__)
GIVEN = ("completions", "prompts", "completion_ids")  # what columns cannot be called

Function = Callable[..., Any]


@dataclass
class Rewards:
    """Reward functions by name, their weights, and how often each one failed.

    seconds: a call that takes longer counts as failed; 0 waits for ever. The limit interrupts Python code in the main
    thread of a Unix process by an alarm; elsewhere, and inside C code that does not return, a function is only waited
    for. So what may hang (a compiler, a network) belongs in a subprocess with a time limit of its own.
    """

    functions: dict[str, Function]
    weights: list[float]
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)  # calls that raised, per function
    _logged: set[tuple[str, str]] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if not self.functions or len(self.weights) != len(self.functions):
            raise ConfigError(
                f"{len(self.functions)} reward functions have {len(self.weights)} weights; each needs one, and one "
                "function is needed at least"
            )
        if not all(math.isfinite(weight) for weight in self.weights):
            raise ConfigError(f"reward weights must be numbers, got {self.weights}")

    def __call__(
        self,
        completions: Sequence[str],
        *,
        prompts: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> tuple[list[float], dict[str, list[float]]]:
        """(weighted sums, each function's own rewards by name), NaN where there is none.

        All lists are as long as `completions`. Raises ValueError for lists of other lengths and for what a function
        returned that is not one number or None per completion; never for a function's own exception.
        """
        given = {"completions": completions, "prompts": prompts, "completion_ids": completion_ids, **(columns or {})}
        if columns and set(columns) & set(GIVEN):
            raise ValueError(f"columns cannot be called {sorted(set(columns) & set(GIVEN))}: rewards are given these")
        for name, values in given.items():
            if len(values) != len(completions):
                raise ValueError(f"{name} has {len(values)} rows, there are {len(completions)} completions")
        each = {name: self._call(name, function, given) for name, function in self.functions.items()}
        totals = [sum(w * r for w, r in zip(self.weights, row)) for row in zip(*each.values())]
        return totals, each

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raises ConfigError for a function that needs an argument which is no column."""
        known = [*GIVEN, *columns]
        for name, function in self.functions.items():
            for p in inspect.signature(function).parameters.values():
                named = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
                if named and p.default is p.empty and p.name not in known:
                    raise ConfigError(f"the reward {name} needs {p.name!r}; there are {', '.join(known)}")

    def _call(self, name: str, function: Function, given: Mapping[str, Sequence[Any]]) -> list[float]:
        count = len(given["completions"])
        if not count:
            return []
        arguments = {key: list(value) for key, value in given.items() if _accepts(function, key)}
        try:
            with _time_limit(self.seconds):
                returned = function(**arguments)
        except Exception as error:  # a user's function: counted, logged, and its rows have no reward
            self.failures[name] = self.failures.get(name, 0) + 1
            kind = (name, type(error).__name__)
            if kind not in self._logged:
                self._logged.add(kind)
                LOGGER.exception("reward %s raised; its %d rows have no reward (logged once a kind)", name, count)
            return [math.nan] * count
        return _numbers(name, returned, count)


def check_any_reward(rewards: Sequence[float], step: int) -> None:
    """Raises RuntimeError if no reward of a step (of all ranks) is a number."""
    if rewards and all(math.isnan(reward) for reward in rewards):
        raise RuntimeError(
            f"step {step}: none of its {len(rewards)} completions has a reward; every reward function raised, or "
            "returned None or NaN. The log holds the first traceback of each kind"
        )


# -- loading ---------------------------------------------------------------------------------------------------


def load_rewards(names: Sequence[str], weights: Sequence[float] = (), *, seconds: float = 0.0) -> Rewards:
    """The functions that `path/to/file.py:name` or `package.module:name` stand for; no weights: 1 each.

    Raises ConfigError for what is not there, cannot be called, or has parameters without a default that no column can
    fill (positional only).
    """
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise ConfigError(f"the reward {repeated[0]!r} is named twice; give it a larger weight instead")
    functions = {name: load_function(name) for name in names}
    return Rewards(functions, list(weights) if weights else [1.0] * len(functions), seconds)


def load_function(name: str) -> Function:
    """What `path/to/file.py:name` or `package.module:name` stands for. Raises ConfigError."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigError(f"{name!r} is no function; write path/to/file.py:name or package.module:name")
    module = _file(place, name) if place.endswith(".py") else _module(place, name)
    found = getattr(module, attribute, None)
    if not callable(found):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(f"{name!r}: {place} has no function {attribute!r}; it has {', '.join(known) or 'none'}")
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError as error:  # some that are written in C
        raise ConfigError(f"{name!r} does not tell its parameters; wrap it in a function of Python") from error
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise ConfigError(f"{name!r} has parameters that only a position can fill; rewards are called by names")
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{name!r} is asynchronous; rewards are plain functions")
    return found  # type: ignore[no-any-return]


def _file(place: str, name: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{name!r}: there is no file {place}")
    # Under a name of its own in sys.modules, so that dataclasses and pickling within it work.
    known = f"longspan_reward_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{name!r}: {place} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    return module


def _module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise  # an import within it
        raise ConfigError(f"{name!r}: there is no module {error.name}; a file is named with its .py") from error


# -- calling ---------------------------------------------------------------------------------------------------


def _accepts(function: Function, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _numbers(name: str, returned: Any, count: int) -> list[float]:
    values = returned.tolist() if callable(getattr(returned, "tolist", None)) else returned
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(f"reward {name} returned a {type(returned).__name__}, not a list of numbers")
    if len(values) != count:
        raise ValueError(f"reward {name} returned {len(values)} rewards for {count} completions")
    numbers = []
    for i, value in enumerate(values):
        value = value.item() if callable(getattr(value, "item", None)) else value
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"reward {name}[{i}] is a {type(value).__name__}, neither a number nor None")
        number = math.nan if value is None else float(value)
        if math.isinf(number):
            raise ValueError(f"reward {name}[{i}] is {number}; return None where there is no reward")
        numbers.append(number)
    return numbers


class TooLongError(Exception):
    """A reward function did not return in time."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()
    if not seconds or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TooLongError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
