"""Documents from files, folders or `datasets`, as token ids with a mask of targets.

text                every token is a target; EOS at the end
messages            the chat template writes the conversation; targets are what its {% generation %} markers
                    surround. Nothing is appended: the template owns its ends.
prompt_completion   targets are the completion and its EOS
tokens              ids as they are; targets are all, or where `labels` is not -100
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longspan.config import ConfigError, DataConfig, PromptsConfig
from longspan.engine.packing import IGNORE, Document, Rows, pack
from longspan.engine.tokens import byte_tokenizer


def load_tokenizer(config: DataConfig | PromptsConfig, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that `data.tokenizer` names, with `data.chat_template` put in."""
    tokenizer: PreTrainedTokenizerBase
    if config.tokenizer == "bytes":
        tokenizer = byte_tokenizer()
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(f"data.tokenizer = {config.tokenizer!r}: {' '.join(str(error).split())}") from error
    if config.chat_template:
        tokenizer.chat_template = _existing(config.chat_template, "data.chat_template").read_text(encoding="utf-8")
    return tokenizer


def read_documents(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    """Documents in the order of the source; documents without any token are skipped."""
    read = 0
    for where, record in records(config):
        if config.max_documents and read == config.max_documents:
            return
        document = _document(record, where, config, tokenizer)
        if len(document.ids):
            read += 1
            yield document


def _existing(path: str, key: str) -> Path:
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(f"{key} = {path!r}: there is no such file or folder")
    return found


def records(config: DataConfig | PromptsConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, record); a text file is a record with the one field `text`."""
    if config.source == "stdlib":
        for file in _stdlib_files():
            yield file.name, {"text": file.read_bytes().decode("utf-8", errors="replace")}
        return
    path = Path(config.source).expanduser()
    if path.is_dir():
        files = _files(path)
        if not files:
            raise ConfigError(f"data.source = {config.source!r}: the folder holds no files")
    elif path.is_file():
        files = [path]
    elif config.source.startswith((".", "/", "~")) or config.source.count("/") > 1 or path.suffix in _SUFFIXES:
        # What looks like a path is one that is missing: say so, rather than ask the hub.
        raise ConfigError(f"data.source = {config.source!r}: there is no such file or folder")
    else:
        yield from _from_datasets(config.source, config, {})
        return
    parquet = [str(file) for file in files if file.suffix == ".parquet"]
    if parquet and len(parquet) < len(files):
        raise ConfigError(
            f"data.source = {config.source!r}: {len(parquet)} of {len(files)} files are Parquet; split them"
        )
    if parquet:
        yield from _from_datasets("parquet", config, {"data_files": {config.split: parquet}})
        return
    for file in files:
        reader = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_list}.get(file.suffix, _text)
        yield from reader(file)


def _stdlib_files() -> list[Path]:
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return [file for file in _files(sysconfig.get_paths()["stdlib"], skip) if file.suffix == ".py"]


def _files(folder: str | Path, skip: Collection[str] = ()) -> list[Path]:
    """All files below a folder, sorted, without hidden ones and without what lies in folders named in `skip`."""
    found = []
    for place, below, names in os.walk(folder):
        below[:] = [name for name in below if name not in skip and not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _text(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        yield str(file), {"text": file.read_bytes().decode("utf-8")}  # line ends as they are
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); remove or convert it"
        ) from error


def _json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{where} is a {type(record).__name__}; each line must be an object")
            yield where, record


def _json_list(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}; one object per line belongs in a .jsonl file") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ConfigError(f"{file} must hold a list of objects")
    for number, record in enumerate(records):
        yield f"{file}[{number}]", record


def _from_datasets(
    name: str, config: DataConfig | PromptsConfig, arguments: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import datasets  # an optional dependency, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"data.source = {config.source!r} is no text, JSON or JSON lines here, and anything else needs the "
            "`datasets` package: pip install 'longspan[data]'"
        ) from error
    try:
        table = datasets.load_dataset(name, split=config.split, **arguments)
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"data.source = {config.source!r}, data.split = {config.split!r}: {message}") from error
    for number, record in enumerate(table):
        # a column that other records use is None here, which is to say absent
        yield (
            f"{config.source} record {number}",
            {key: value for key, value in record.items() if value is not None},
        )


def _document(record: dict[str, Any], where: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Document:
    kind = config.format if config.format != "auto" else _kind(record, where)
    missing = [key for key in _FIELDS[kind] if key not in record]
    if kind != "tokens" and missing:
        raise ConfigError(f"{where} has no {' and no '.join(map(repr, missing))}, which data.format = {kind!r} needs")
    return _READERS[kind](record, where, tokenizer)


def _kind(record: dict[str, Any], where: str) -> str:
    for kind, fields in _FIELDS.items():
        if all(field in record for field in fields) or (kind == "tokens" and "input_ids" in record):
            return kind
    raise ConfigError(
        f"{where} has the fields {sorted(record)}; expected text, messages, prompt and completion, tokens or input_ids"
    )


def _from_text(record: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    text = record["text"]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: 'text' is a {type(text).__name__}, not a string")
    if not text:
        return _made([], [])
    ids = with_eos(encode(text, tokenizer), tokenizer)
    return _made(ids, np.ones(len(ids), dtype=bool))


def _from_prompt(record: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        head = chat(prompt, where, tokenizer, add_generation_prompt=True)
        both = chat(prompt + completion, where, tokenizer)
        ids, start = both["input_ids"], len(head["input_ids"])
        if ids[:start] != head["input_ids"]:
            raise ConfigError(
                f"{where}: the chat template does not write the prompt as a prefix of prompt + completion; "
                "use 'messages' and {% generation %} markers"
            )
    elif isinstance(prompt, str) and isinstance(completion, str):
        before = encode_prompt(prompt, tokenizer)
        after = tokenizer(completion, add_special_tokens=False)["input_ids"]
        ids, start = np.concatenate([before, with_eos(after, tokenizer)]), len(before)
    else:
        raise ConfigError(f"{where}: 'prompt' and 'completion' must both be strings or both be lists of messages")
    return _made(ids, np.arange(len(ids)) >= start)


def _from_messages(record: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(f"{where} holds messages, but the tokenizer has no chat template; set data.chat_template")
    text = template if isinstance(template, str) else " ".join(template.values())
    if not re.search(r"{%-?\s*generation\s*-?%}", text):
        raise ConfigError(
            f"{where}: the assistant mask is all zero, because the chat template has no {{% generation %}} markers "
            "around what the assistant says; set data.chat_template to one that has"
        )
    made = chat(record["messages"], where, tokenizer, tools=record.get("tools"), return_assistant_tokens_mask=True)
    mask = np.asarray(made["assistant_masks"], dtype=bool)
    if not mask.any():
        roles = [message.get("role") for message in record["messages"]]
        raise ConfigError(
            f"{where}: the assistant mask is all zero over {len(mask)} tokens; its roles are {roles}: either none is "
            "'assistant', or the chat template's {% generation %} markers do not surround what it says"
        )
    return _made(made["input_ids"], mask)


def chat(messages: Any, where: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except (TemplateError, TypeError, ValueError) as error:  # what templates raise over roles they do not know
        raise ConfigError(f"{where}: the chat template refuses its messages: {error}") from error


def _from_tokens(record: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    ids = np.asarray(record["tokens"] if "tokens" in record else record["input_ids"])
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ConfigError(f"{where}: token ids must be one flat list of integers")
    if "labels" not in record:
        return _made(ids, np.ones(len(ids), dtype=bool))
    labels = np.asarray(record["labels"])
    if labels.shape != ids.shape:
        raise ConfigError(
            f"{where}: {labels.size} labels for {ids.size} token ids; labels are unshifted, one per token"
        )
    wrong = np.flatnonzero((labels != IGNORE) & (labels != ids))
    if wrong.size:
        at = int(wrong[0])
        raise ConfigError(f"{where}: label {labels[at]} at {at} is neither the token there ({ids[at]}) nor {IGNORE}")
    return _made(ids, labels != IGNORE)


_SUFFIXES = {".txt", ".md", ".py", ".json", ".jsonl", ".ndjson", ".parquet", ".csv"}
# in the order in which `auto` looks for them
_FIELDS = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "tokens": ("tokens",),
    "text": ("text",),
}
_READERS = {
    "messages": _from_messages,
    "prompt_completion": _from_prompt,
    "tokens": _from_tokens,
    "text": _from_text,
}


def encode(text: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    if tokenizer.init_kwargs.get("ids_are_bytes"):
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)
    return np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)


def encode_prompt(text: str, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    ids = encode(text, tokenizer)
    if len(ids) and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
        return ids[:-1]  # some tokenizers end every text with EOS; a prompt goes on
    return ids


def with_eos(ids: Any, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    ids = np.asarray(ids, dtype=np.int32)
    if tokenizer.eos_token_id is None or (len(ids) and ids[-1] == tokenizer.eos_token_id):
        return ids
    return np.append(ids, np.int32(tokenizer.eos_token_id))


def _made(ids: Any, targets: Any) -> Document:
    return Document(np.asarray(ids, dtype=np.int32), np.asarray(targets, dtype=bool))


def load_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Rows, int]:
    """(all rows, how many of them are for training); the validation rows are the last ones."""
    if config.sequence_length < 2:
        raise ConfigError(
            f"data.sequence_length = {config.sequence_length}: at least 2 tokens are needed to predict one"
        )
    documents = list(read_documents(config, tokenizer))
    if not documents:
        raise ConfigError(f"data.source = {config.source!r} holds no documents")
    packing = config.packing
    if packing == "auto":
        # where every token is a target a cut document is still good text; a cut answer has lost its question
        packing = "split" if all(document.targets.all() for document in documents) else "whole"
    rows = pack(documents, length=config.sequence_length, packing=packing, too_long=config.too_long)
    training = len(rows) - config.validation_rows
    if training < 1:
        raise ConfigError(
            f"the data makes {len(rows)} rows of at most {config.sequence_length} tokens, and data.validation_rows = "
            f"{config.validation_rows} leaves none to train on"
        )
    return rows, training
