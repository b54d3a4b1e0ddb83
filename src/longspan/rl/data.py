"""Prompts: rows of a Python function, a file or a data set, as token ids beside all their columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from longspan.config import ConfigError, PromptsConfig
from longspan.engine.data import chat, encode, encode_prompt, records, with_eos
from longspan.rl.rewards import GIVEN, load_function


@dataclass(frozen=True)
class Prompt:
    """ids: what the model goes on from. columns: the row, without `prompt`. row: all of it."""

    ids: tuple[int, ...]
    columns: Mapping[str, Any]
    row: Mapping[str, Any]


def load_prompts(
    config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, *, environment: bool = False
) -> tuple[list[Prompt], int]:
    """(all prompts, how many of them are for training); the validation rows are the last ones. With an environment,
    which begins its conversations itself, rows need no prompt.

    Raises ConfigError, naming the row, for one without a prompt, and where rows have different columns.
    """
    prompts: list[Prompt] = []
    for where, row in _rows(config):
        if config.max_rows and len(prompts) == config.max_rows:
            break
        ids = () if environment and "prompt" not in row else _ids(row, where, tokenizer)
        prompt = Prompt(ids, {k: v for k, v in row.items() if k != "prompt"}, row)
        if set(prompt.columns) & set(GIVEN):
            raise ConfigError(
                f"{where} has a column {sorted(set(prompt.columns) & set(GIVEN))[0]!r}, which rewards get"
            )
        if prompts and set(prompt.columns) != set(prompts[0].columns):
            odd = sorted(set(prompt.columns) ^ set(prompts[0].columns))
            raise ConfigError(f"{where} and the first row differ in their columns: {', '.join(odd)}")
        prompts.append(prompt)
    training = len(prompts) - config.validation_rows
    if training < 1:
        raise ConfigError(
            f"data.source = {config.source!r} has {len(prompts)} rows, of which data.validation_rows = "
            f"{config.validation_rows} are held out: none is left to train on"
        )
    return prompts, training


def answer_tokens(prompt: Prompt, column: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The row's answer, and the end."""
    answer = prompt.columns.get(column)
    if not isinstance(answer, str):
        raise ConfigError(f"warmup.answer = {column!r}, but a row has {sorted(prompt.columns)} and no such text")
    if tokenizer.init_kwargs.get("ids_are_bytes"):
        return with_eos(encode(answer, tokenizer), tokenizer).tolist()
    return with_eos(tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer).tolist()


def _rows(config: PromptsConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not config.source.rpartition(":")[0].endswith(".py"):
        yield from records(config)  # type: ignore[misc]
        return
    rows = load_function(config.source)()
    if not isinstance(rows, Iterable):
        raise ConfigError(f"data.source = {config.source!r} returned a {type(rows).__name__}, not rows")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{config.source} row {number} is a {type(row).__name__}, not a mapping of columns")
        yield f"{config.source} row {number}", row


def _ids(row: Mapping[str, Any], where: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        ids = encode_prompt(prompt, tokenizer).tolist()
    elif isinstance(prompt, list) and prompt and all(isinstance(each, Mapping) for each in prompt):
        ids = chat(prompt, where, tokenizer, add_generation_prompt=True, tools=row.get("tools"))["input_ids"]
    elif isinstance(prompt, list) and all(type(each) is int for each in prompt):
        ids = prompt
    else:
        raise ConfigError(f"{where}: `prompt` must be text, messages or token ids, got {type(prompt).__name__}")
    if not ids:
        raise ConfigError(f"{where}: the prompt has no token")
    return tuple(ids)
