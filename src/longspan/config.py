"""Every program's configuration: plain dataclasses, read from TOML, checked here, before torch is imported.

One road: defaults below, then the TOML file, then `key.path=value` overrides (values are TOML; a bare word that
is not TOML is taken as a string). Unknown keys, wrong types and impossible combinations raise `ConfigError`: one
line that names the key and the cure. The resolved configuration is written into the run folder.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import math
import textwrap
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, overload


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one line for the user."""


def key(default: Any, doc: str) -> Any:
    """A field with the text that `--help` prints for it."""
    return field(default=default, metadata={"doc": doc})


@dataclass(kw_only=True)
class ModelConfig:
    """Which model: either `path` or `config`."""

    path: str = key("", "a hub id or a local folder, for `from_pretrained`")
    config: dict[str, Any] = field(
        default_factory=dict,
        metadata={"doc": "Hugging Face config fields with `model_type`; random initialisation from `seed`"},
    )
    dtype: Literal["float32", "float64", "bfloat16"] = key("float32", "of the (master) weights")
    seed: int = key(0, "of the random initialisation")
    trust_remote_code: bool = key(False, "run the code that a hub repository brings along")


@dataclass(kw_only=True)
class MeshConfig:
    """How ranks are arranged: dp * cp = number of ranks."""

    dp: int = key(0, "replicas; 0: whatever the number of ranks leaves")
    cp: int = key(1, "ranks that each sequence is split over")


@dataclass(kw_only=True)
class ParallelConfig:
    """How a sequence is split: the arguments of `longspan.parallelize`."""

    scheme: Literal["auto", "ulysses", "exchange"] = key("auto", "how ranks exchange data for attention")
    layout: Literal["auto", "contiguous", "head_tail", "per_document", "balanced"] = key(
        "auto", "which rows a rank owns"
    )
    kernel: Literal["auto", "naive", "flash", "model"] = key(
        "auto", "attention of one block on one rank; model: the model's own, needs scheme ulysses"
    )
    stages: int = key(0, "exchange: number of fetch stages, 1 .. cp-1; 0 chooses")
    check_batch: bool = key(True, "compare a hash of each batch over the cp ranks")
    wrap: Literal["auto", "none", "ddp", "fsdp"] = key("auto", "auto: none on one rank, fsdp otherwise")


@dataclass(kw_only=True)
class DataConfig:
    """What to train on, and how it becomes rows of `sequence_length` tokens."""

    source: str = key("stdlib", '"stdlib" (this Python\'s library), a file, a folder, or a `datasets` id')
    format: Literal["auto", "text", "messages", "prompt_completion", "tokens"] = key("auto", "of a record")
    split: str = key("train", "of a `datasets` id")
    tokenizer: str = key("bytes", '"bytes" (byte-level, built in), or a hub id or folder')
    chat_template: str = key("", "a file with a Jinja template that replaces the tokenizer's")
    sequence_length: int = key(8192, "tokens per row")
    packing: Literal["auto", "split", "whole", "none"] = key(
        "auto", "cut documents to fill rows, keep them whole, or one a row; auto: split for text and tokens"
    )
    too_long: Literal["error", "drop", "keep_start", "keep_end", "split"] = key(
        "error", "documents longer than a row, with packing whole or none"
    )
    seed: int = key(0, "shuffling; the order of an epoch is a function of (seed, epoch)")
    shuffle: bool = key(True, "shuffle rows in each epoch")
    validation_rows: int = key(0, "rows held out from the end of the unshuffled data")
    max_documents: int = key(0, "read no more documents than this; 0: all")


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW, warm-up and a schedule, clipping by the true global norm."""

    lr: float = key(3e-4, "the highest learning rate")
    schedule: Literal["cosine", "linear", "constant"] = key("cosine", "after the warm-up, until the last step")
    warmup_steps: int = key(0, "steps in which the learning rate grows linearly")
    final_lr_ratio: float = key(0.1, "lr at the last step over lr, for cosine and linear")
    weight_decay: float = key(0.1, "on matrices only")
    beta1: float = key(0.9, "decay of the mean of gradients")
    beta2: float = key(0.95, "decay of the mean of squared gradients")
    eps: float = key(1e-8, "added to the root of the mean square")
    max_grad_norm: float = key(1.0, "clip the global norm to this; 0: no clipping")


@dataclass(kw_only=True)
class TrainConfig:
    """The loop. One step takes `batch_rows` rows: over dp ranks, and in micro-batches of `micro_rows`."""

    steps: int = key(30, "optimizer steps")
    batch_rows: int = key(1, "rows per step, over all ranks")
    micro_rows: int = key(1, "rows per forward")
    precision: Literal["full", "bf16"] = key("full", "bf16: compute in bf16, weights and reductions in fp32")
    activation_checkpointing: bool = key(False, "recompute each layer in backward: less memory, more time")
    deterministic: bool = key(False, "refuse operations that are not bitwise repeatable")
    seed: int = key(0, "of dropout and whatever else draws numbers while training")
    validate_every: int = key(0, "steps; 0: never")
    threads: int = key(0, "CPU threads per rank; 0: cores / local ranks")


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where and when state is kept. Checkpoints live in `<run folder>/checkpoints/step-N`."""

    every: int = key(0, "steps; 0: only at the end and at SIGTERM")
    at_end: bool = key(True, "write one after the last step")
    keep: int = key(2, "older checkpoints are removed")
    resume: Literal["auto", "never", "must"] = key("auto", "from the newest checkpoint; auto: if there is one")
    export: bool = key(False, "at the end, write <run folder>/export for `from_pretrained`")


@dataclass(kw_only=True)
class LogConfig:
    """What is shown beside `<run folder>/metrics.jsonl`, which is always written."""

    tensorboard: bool = key(False, "write <run folder>/tensorboard")
    progress: bool = key(True, "a progress bar")


@dataclass(kw_only=True)
class Config:
    """`longspan train`."""

    folder: str = key("runs/train", "the run folder: metrics, configuration, checkpoints")
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(kw_only=True)
class PromptsConfig:
    """What to draw completions for. A row has `prompt` (text, messages or token ids); all its columns reach the reward
    functions and the environment."""

    source: str = key("", 'a Python function "file.py:name", a JSON Lines or Parquet file, or a `datasets` id')
    split: str = key("train", "of a `datasets` id")
    tokenizer: str = key("bytes", '"bytes" (byte-level, built in), or a hub id or folder')
    chat_template: str = key("", "a file with a Jinja template that replaces the tokenizer's")
    seed: int = key(0, "shuffling; the order of an epoch is a function of (seed, epoch)")
    shuffle: bool = key(True, "shuffle rows in each epoch")
    validation_rows: int = key(0, "rows held out from the end of the unshuffled data")
    max_rows: int = key(0, "read no more rows than this; 0: all")


@dataclass(kw_only=True)
class RolloutConfig:
    """How completions are drawn: `prompts` prompts per step, `group_size` completions of each."""

    generator: Literal["own", "continuous", "vllm", "sglang"] = key(
        "own", "own: a key-value-cache loop in each rank; continuous: transformers' batching; or servers at `urls`"
    )
    urls: list[str] = field(default_factory=list, metadata={"doc": 'of servers of one kind, ["http://host:port", ..]'})
    prompts: int = key(8, "prompts per step, over all ranks")
    group_size: int = key(8, "completions per prompt")
    max_new_tokens: int = key(64, "of one completion; in an environment, of one turn")
    temperature: float = key(1.0, "divides the logits, in sampling and in training alike")
    top_p: float = key(1.0, "only 1: other samplers renormalise, and their log-probabilities are not the model's")
    top_k: int = key(0, "only 0, for the same reason")
    environment: str = key("", 'a multi-turn environment, "file.py:Class"; "": one completion per prompt')
    max_turns: int = key(8, "of a conversation in an environment")
    max_tokens: int = key(4096, "of a conversation in an environment, observations included")
    off_policy_steps: Literal[0, 1] = key(0, "1: the next step's rollouts are drawn while this step trains")
    probe_every: int = key(1, "weight updates between checks that generator and trainer agree; 0: never")
    probe_tolerance: float = key(0.0, "largest difference of log-probabilities; 0: 1e-5 for float32, 0.05 for servers")
    timeout_seconds: float = key(300.0, "of one call to a server")
    samples: int = key(2, "rollouts per step that are written to samples.jsonl")


@dataclass(kw_only=True)
class RewardConfig:
    """What a completion is worth: Python functions `reward(completions, **columns) -> list of floats`."""

    functions: list[str] = field(
        default_factory=list, metadata={"doc": '"file.py:name" or "package.module:name"; None scores nothing'}
    )
    weights: list[float] = field(default_factory=list, metadata={"doc": "of the functions; none: 1 each"})
    timeout_seconds: float = key(0.0, "a call of a function that takes longer has failed; 0: wait for ever")
    solved: float = key(1.0, "the reward from which on a completion counts as solved in pass@1 and pass@k")
    overlong_buffer: int = key(0, "soft punishment of the last so many tokens before max_new_tokens (DAPO); 0: none")
    overlong_factor: float = key(1.0, "the soft punishment at max_new_tokens")


@dataclass(kw_only=True)
class LossConfig:
    """What is learned from completions: a recipe of `longspan.losses`, with changes to its fields."""

    recipe: str = key("grpo", "grpo, dr_grpo, dapo, rloo, gspo, cispo, sapo, gmpo, reinforce, ..")
    changes: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "doc": "fields of losses.Recipe: aggregation, kl_coefficient, options.clip_high, correction.kind, .."
        },
    )
    dynamic_sampling: bool = key(False, "drop groups whose rewards are all equal and draw others in their place (DAPO)")
    max_draws: int = key(
        4,
        "with dynamic_sampling: draws per step; the step takes what they found, and no group ends the run",
    )


@dataclass(kw_only=True)
class WarmupConfig:
    """Supervised steps on the rows' answers before the first rollout; not counted in train.steps."""

    steps: int = key(0, "optimizer steps; 0: none")
    rows: int = key(16, "rows per step, over all ranks")
    lr: float = key(1e-3, "constant")
    answer: str = key("answer", "the column with the answer's text")


@dataclass(kw_only=True)
class RLTrainConfig:
    """The loop. One step draws rollouts, and learns from them in `updates` optimizer steps."""

    steps: int = key(100, "steps, each with its rollouts")
    updates: int = key(1, "optimizer steps per step, each on its part of the groups")
    token_budget: int = key(8192, "the most tokens in a micro-batch, over the cp ranks together")
    share_prefixes: bool = key(True, "compute a prompt once for its whole group, where that pays")
    precision: Literal["full", "bf16"] = key("full", "bf16: compute in bf16, weights and reductions in fp32")
    activation_checkpointing: bool = key(False, "recompute each layer in backward: less memory, more time")
    deterministic: bool = key(False, "refuse operations that are not bitwise repeatable")
    seed: int = key(0, "of the sampling")
    evaluate_every: int = key(0, "steps between evaluations on data.validation_rows; 0: never")
    threads: int = key(0, "CPU threads per rank; 0: cores / local ranks")


def _rl_optimizer() -> OptimizerConfig:
    return OptimizerConfig(lr=1e-6, schedule="constant", weight_decay=0.0, beta2=0.999)


@dataclass(kw_only=True)
class RLConfig:
    """`longspan rl`."""

    folder: str = key("runs/rl", "the run folder: metrics, samples, configuration, checkpoints")
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: PromptsConfig = field(default_factory=PromptsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    optimizer: OptimizerConfig = field(default_factory=_rl_optimizer)
    train: RLTrainConfig = field(default_factory=RLTrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


AnyConfig = Config | RLConfig
C = TypeVar("C", Config, RLConfig)


# ---- reading


@overload
def load(path: str | None, overrides: Sequence[str] = ()) -> Config: ...
@overload
def load(path: str | None, overrides: Sequence[str] = ..., *, kind: type[C]) -> C: ...
def load(path: str | None, overrides: Sequence[str] = (), *, kind: Any = Config) -> Any:
    """Defaults, then the TOML file (or a run folder's `config.json`), then `key.path=value` overrides."""
    config = kind()
    if path is not None:
        _apply(config, _read(path), prefix="", where=f" in {path}", root=kind)
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigError(f"{override!r} is not an override; write key.path=value, like train.steps=10")
        _override(config, name, text.strip())
    return config


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`."""
    config = Config()
    _apply(config, values, prefix="", where="", root=Config)
    return config


def to_dict(config: AnyConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def ranks(config: AnyConfig) -> int:
    """How many ranks the mesh asks for; `dp = 0` asks for one replica."""
    return max(config.mesh.dp, 1) * config.mesh.cp


def _read(path: str) -> Mapping[str, Any]:
    if Path(path).is_dir():
        raise ConfigError(f"{path} is a folder; give a TOML file")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    try:
        values = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except ValueError as error:  # both decoders' errors are ValueErrors
        raise ConfigError(f"{path} cannot be parsed: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; expected keys and values")
    return values


def _apply(section: Any, values: Mapping[str, Any], *, prefix: str, where: str, root: type[AnyConfig]) -> None:
    hints = typing.get_type_hints(type(section))
    for name, value in values.items():
        if name not in hints:
            raise ConfigError(_unknown(prefix + name, where, root))
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{name} is a section, not a value; got {value!r}{where}")
            _apply(getattr(section, name), value, prefix=f"{prefix}{name}.", where=where, root=root)
        else:
            setattr(section, name, _checked(prefix + name, value, hints[name], where))


def _override(config: AnyConfig, name: str, text: str) -> None:
    """Set one dotted key. Keys below a free table (`model.config.hidden_size`) need not exist yet."""
    where = " on the command line"
    parts = name.split(".")
    section: Any = config
    for depth, part in enumerate(parts):
        hints = typing.get_type_hints(type(section))
        if part not in hints:
            raise ConfigError(_unknown(name, where, type(config)))
        rest = parts[depth + 1 :]
        if dataclasses.is_dataclass(hints[part]):
            section = getattr(section, part)
            continue
        if hints[part] == dict[str, Any] and rest:
            table = getattr(section, part)
            for inner in rest[:-1]:
                table = table.setdefault(inner, {})
                if not isinstance(table, dict):
                    raise ConfigError(f"{name}: {inner!r} holds a value, so nothing can be set below it")
            table[rest[-1]] = _parse(text)
            return
        if rest:
            raise ConfigError(f"{name}: {'.'.join(parts[: depth + 1])} is a value, not a section")
        value = _parse(text)
        if not isinstance(value, str) and (hints[part] is str or _is_word(hints[part])):
            value = text  # `folder=7` names a folder: what is text needs no quotes
        setattr(section, part, _checked(name, value, hints[part], where))
        return
    _apply(section, _table(name, text, type(config)), prefix=f"{name}.", where=where, root=type(config))


def _is_word(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal and isinstance(typing.get_args(kind)[0], str)


def _table(name: str, text: str, root: type[AnyConfig]) -> Mapping[str, Any]:
    value = _parse(text)
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is a section, not a value; set one of its keys, like {_children(name, root)[0]}=...")
    return value


def _parse(text: str) -> Any:
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if len(values) == 1 else text


def _checked(name: str, value: Any, kind: Any, where: str) -> Any:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices or type(value) is not type(choices[0]):
            near = difflib.get_close_matches(str(value), map(str, choices), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{name} = {value!r}{where} is not one of {', '.join(map(str, choices))}{hint}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if typing.get_origin(kind) is list and type(value) is list:
        return [_checked(f"{name}[{i}]", each, typing.get_args(kind)[0], where) for i, each in enumerate(value)]
    wanted = typing.get_origin(kind) or kind
    if type(value) is not wanted:  # not isinstance: `true` is no integer
        raise ConfigError(f"{name} = {value!r}{where} is {_KINDS[type(value)]}; expected {_KINDS[wanted]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} = {value}{where} is not a finite number")
    return value


class _Kinds(dict):  # type: ignore[type-arg]
    def __missing__(self, kind: type) -> str:  # dates, the rest of TOML
        return f"a {kind.__name__}"


_KINDS = _Kinds(
    {
        bool: "a boolean (true or false)",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a table",
        type(None): "null",
    }
)


def _fields(root: type[AnyConfig]) -> list[tuple[str, Any, Any, str]]:
    """(dotted name, type, default, text) of every key."""
    rows = []
    sections: list[tuple[str, Any]] = [("", root())]
    while sections:
        prefix, section = sections.pop(0)
        hints = typing.get_type_hints(type(section))
        for entry in dataclasses.fields(section):
            value = getattr(section, entry.name)
            if dataclasses.is_dataclass(value):
                sections.append((f"{prefix}{entry.name}.", value))
            else:
                rows.append((prefix + entry.name, hints[entry.name], value, entry.metadata["doc"]))
    return rows


def _children(section: str, root: type[AnyConfig]) -> list[str]:
    return [name for name, *_ in _fields(root) if name.startswith(f"{section}.")]


def _unknown(name: str, where: str, root: type[AnyConfig]) -> str:
    names = [known for known, *_ in _fields(root)]
    leaf = name.rpartition(".")[2]
    # A key in the wrong section is as common as a misspelt one.
    near = [known for known in names if known.rpartition(".")[2] == leaf]
    near = near or difflib.get_close_matches(name, names, n=1)
    leaves = {known.rpartition(".")[2]: known for known in names}
    near = near or [leaves[match] for match in difflib.get_close_matches(leaf, list(leaves), n=1)]
    hint = f"did you mean {near[0]!r}?" if near else f"`{_command(root)} --help` lists all keys"
    return f"unknown key {name!r}{where}; {hint}"


def _command(root: type[AnyConfig]) -> str:
    return (root.__doc__ or "").strip("`.")


def describe(root: type[AnyConfig] = Config) -> str:
    """All keys with type, default and meaning, for `--help`."""
    lines = []
    before = None
    for name, kind, default, doc in _fields(root):
        section = name.rpartition(".")[0]
        if section != before:
            before = section
            owner = getattr(root(), section) if section else root()
            title = " ".join((type(owner).__doc__ or "").split())
            lines += ["", f"[{section}]  {title}"] if section else ["keys, of the file and of overrides:", ""]
        if typing.get_origin(kind) is Literal:
            shown = "|".join(map(str, typing.get_args(kind)))
        elif typing.get_origin(kind) is list:
            shown = "list"
        else:
            shown = "table" if kind == dict[str, Any] else {str: "text"}.get(kind, kind.__name__)
        lines.append(f"  {name} = {json.dumps(default)}  ({shown})")
        lines += textwrap.wrap(doc, 96, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


# ---- checks across keys


def validate(config: AnyConfig, world_size: int | None = None) -> None:
    """Refuse what cannot run, before anything starts or is written. `world_size` None: not known yet."""
    _check_ranges(config)
    _check_model(config)
    _check_parallel(config)
    dp = _check_mesh(config, world_size)
    if isinstance(config, Config):
        _check_rows(config, dp)
        _check_data(config)
    else:
        _check_rollouts(config)
        _check_rewards(config)
    _check_train(config)
    _check_folder(config)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


# Smallest value allowed, per key.
_AT_LEAST = {
    "mesh.dp": 0,
    "mesh.cp": 1,
    "parallel.stages": 0,
    "data.sequence_length": 2,  # one token has no next one to predict
    "data.validation_rows": 0,
    "data.max_documents": 0,
    "optimizer.lr": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.final_lr_ratio": 0,
    "optimizer.weight_decay": 0,
    "optimizer.beta1": 0,
    "optimizer.beta2": 0,
    "optimizer.eps": 0,
    "optimizer.max_grad_norm": 0,
    "train.steps": 1,
    "train.batch_rows": 1,
    "train.micro_rows": 1,
    "train.validate_every": 0,
    "train.threads": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "data.max_rows": 0,
    "rollout.prompts": 1,
    "rollout.group_size": 1,
    "rollout.max_new_tokens": 1,
    "rollout.max_turns": 1,
    "rollout.max_tokens": 2,
    "rollout.probe_every": 0,
    "rollout.probe_tolerance": 0,
    "rollout.timeout_seconds": 1,
    "rollout.samples": 0,
    "reward.timeout_seconds": 0,
    "reward.overlong_buffer": 0,
    "reward.overlong_factor": 0,
    "loss.max_draws": 1,
    "warmup.steps": 0,
    "warmup.rows": 1,
    "warmup.lr": 0,
    "train.updates": 1,
    "train.token_budget": 2,
    "train.evaluate_every": 0,
}
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2")


def _check_ranges(config: AnyConfig) -> None:
    known = {name for name, *_ in _fields(type(config))}
    for name, least in _AT_LEAST.items():
        if name not in known:
            continue
        section, _, leaf = name.partition(".")
        value = getattr(getattr(config, section), leaf)
        _require(value >= least, f"{name} = {value}; expected at least {least}")
    for name in _BELOW_ONE:
        value = getattr(config.optimizer, name.partition(".")[2])
        _require(value < 1, f"{name} = {value}; expected less than 1")
    ratio = config.optimizer.final_lr_ratio
    _require(ratio <= 1, f"optimizer.final_lr_ratio = {ratio}; expected at most 1")


def _check_model(config: AnyConfig) -> None:
    model = config.model
    _require(
        bool(model.path) != bool(model.config),
        "model.path and model.config are both set; keep one"
        if model.path
        else "no model: set model.path (a hub id or folder), or model.config with model_type and sizes",
    )
    if model.config:
        _require("model_type" in model.config, 'model.config lacks model_type, like model_type = "llama"')
    if model.path.startswith(("/", "./", "../", "~")):
        _require(Path(model.path).expanduser().exists(), f"model.path: no such folder: {model.path}")
    if config.train.precision == "bf16":
        _require(
            model.dtype == "float32",
            f"train.precision = 'bf16' keeps float32 master weights, but model.dtype = {model.dtype!r}; "
            "drop one of the two",
        )


def _check_mesh(config: AnyConfig, world_size: int | None) -> int:
    """dp, 0 where it is not known yet."""
    mesh, dp = config.mesh, config.mesh.dp
    if world_size is None:
        return dp
    _require(
        world_size == dp * mesh.cp if dp else world_size % mesh.cp == 0,
        f"{f'mesh.dp * mesh.cp = {dp} * {mesh.cp}' if dp else f'mesh.cp = {mesh.cp}'} does not fit "
        f"{_count(world_size, 'rank')}; start {ranks(config)} (--nproc {ranks(config)}) or change the mesh",
    )
    return world_size // mesh.cp


def _check_rows(config: Config, dp: int) -> None:
    train = config.train
    if dp:
        _require(
            train.batch_rows % (dp * train.micro_rows) == 0,
            f"train.batch_rows = {train.batch_rows} is not divisible by dp * micro_rows = "
            f"{dp} * {train.micro_rows}; use {_multiple(train.batch_rows, dp * train.micro_rows)}",
        )


def _check_parallel(config: AnyConfig) -> None:
    mesh, parallel = config.mesh, config.parallel
    # One rank exchanges nothing: there `stages` is inert, and a comparison with cp=1 may leave it set.
    if mesh.cp > 1:
        _require(
            parallel.stages <= mesh.cp - 1,
            f"parallel.stages = {parallel.stages} exceeds mesh.cp - 1 = {mesh.cp - 1} stages",
        )
    _require(
        parallel.stages == 0 or parallel.scheme != "ulysses",
        f"parallel.stages = {parallel.stages} belongs to scheme exchange; parallel.scheme is 'ulysses'",
    )
    _require(
        parallel.kernel != "model" or parallel.scheme == "ulysses",
        f"parallel.kernel = 'model' needs parallel.scheme = 'ulysses', not {parallel.scheme!r}",
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _multiple(rows: int, unit: int) -> int:
    return max(unit, rows - rows % unit)


def _check_data(config: Config) -> None:
    data = config.data
    _require(bool(data.source), 'data.source is empty; for example "stdlib", or a file or folder')
    if is_path(data.source):
        _require(Path(data.source).expanduser().exists(), f"data.source: no such file or folder: {data.source}")
    if data.chat_template:
        _require(Path(data.chat_template).is_file(), f"data.chat_template: no such file: {data.chat_template}")
    _require(
        config.train.validate_every == 0 or data.validation_rows > 0,
        f"train.validate_every = {config.train.validate_every}, but data.validation_rows = 0 holds out nothing",
    )


def is_path(source: str) -> bool:
    """Whether a data source names a file or folder, not "stdlib" or a `datasets` id (`name`, `owner/name`)."""
    if source.startswith(("/", ".", "~")) or source.endswith("/") or source.count("/") > 1 or "\\" in source:
        return True
    path = Path(source)
    if "/" not in source:
        return bool(path.suffix) or (source != "stdlib" and path.exists())
    return path.exists() or path.parent.is_dir() or path.suffix in _SUFFIXES


_SUFFIXES = {
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".json",
    ".jsonl",
    ".parquet",
    ".csv",
    ".tsv",
    ".html",
    ".gz",
    ".zst",
}


def _check_rollouts(config: RLConfig) -> None:
    data, rollout = config.data, config.rollout
    _require(bool(data.source), "data.source is empty; name rows with prompts, like prompts.jsonl or task.py:rows")
    path, colon, _ = data.source.rpartition(":")
    _require(not data.source.endswith(".py"), f"data.source = {data.source!r}: name the function, {data.source}:rows")
    if colon and path.endswith(".py"):
        _require(Path(path).is_file(), f"data.source = {data.source!r}: no such file: {path}")
    elif is_path(data.source):
        _require(Path(data.source).expanduser().exists(), f"data.source: no such file or folder: {data.source}")
    if data.chat_template:
        _require(Path(data.chat_template).is_file(), f"data.chat_template: no such file: {data.chat_template}")
    for name, value, off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        _require(
            value == off,
            f"rollout.{name} = {value}: a sampler that renormalises reports log-probabilities that are not the "
            f"model's, and ratios would be off by the mass it cuts; leave it at {off:g}",
        )
    _require(rollout.temperature > 0, f"rollout.temperature = {rollout.temperature}; expected more than 0")
    server = rollout.generator in ("vllm", "sglang")
    _require(
        bool(rollout.urls) == server,
        f"rollout.generator = {rollout.generator!r} needs rollout.urls, like ['http://127.0.0.1:8000']"
        if server
        else f"rollout.urls is set, but rollout.generator = {rollout.generator!r} asks no server",
    )
    _require(
        config.train.evaluate_every == 0 or data.validation_rows > 0,
        f"train.evaluate_every = {config.train.evaluate_every}, but data.validation_rows = 0 holds out nothing",
    )
    _require(
        rollout.prompts % config.train.updates == 0,
        f"rollout.prompts = {rollout.prompts} is not divisible by train.updates = {config.train.updates}",
    )


def _check_rewards(config: RLConfig) -> None:
    reward = config.reward
    _require(
        bool(reward.functions) or bool(config.rollout.environment),
        'no reward: name a function in reward.functions, like ["task.py:reward"], or set rollout.environment',
    )
    _require(
        not reward.weights or len(reward.weights) == len(reward.functions),
        f"{len(reward.weights)} reward.weights for {len(reward.functions)} reward.functions",
    )
    _require(
        not (reward.overlong_buffer and config.rollout.environment),
        "reward.overlong_buffer is about single completions, and rollout.environment makes conversations; drop one",
    )
    _require(
        reward.overlong_buffer <= config.rollout.max_new_tokens,
        f"reward.overlong_buffer = {reward.overlong_buffer} exceeds rollout.max_new_tokens = "
        f"{config.rollout.max_new_tokens}",
    )


def _check_train(config: AnyConfig) -> None:
    _require(
        config.optimizer.warmup_steps <= config.train.steps,
        f"optimizer.warmup_steps = {config.optimizer.warmup_steps} exceeds train.steps = {config.train.steps}",
    )
    if config.log.tensorboard:
        _require(
            importlib.util.find_spec("tensorboard") is not None,
            "log.tensorboard = true, but tensorboard is not installed: pip install 'longspan[tensorboard]'",
        )


def _check_folder(config: AnyConfig) -> None:
    folder = Path(config.folder)
    _require(bool(config.folder), "folder is empty; name a run folder, for example runs/train")
    _require(not folder.is_file(), f"folder = {config.folder!r} is a file; name a run folder")
    if config.checkpoint.resume == "must":
        _require(
            any(folder.glob("checkpoints/step-*")),
            f"checkpoint.resume = 'must', but there is no {folder / 'checkpoints'}/step-*",
        )
