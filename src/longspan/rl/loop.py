"""`longspan rl`: the loop.

    step t    rollouts drawn by weights t-1 (or t-2, where they were drawn while step t-1 trained), whole on every rank
              rewards -> advantages; log-probabilities before the step, and a reference's, where the recipe needs them
              `updates` times: forward_backward of a part of the groups, optimizer step
              the generator gets weights t, and is asked whether it and the trainer agree

Everything that is drawn is a function of the seed and of how many prompts came before; the data of a step is the same
on every rank, and the engine deals it. So a run on other ranks is the same run, up to rounding, and one that is resumed
goes on as if it had not stopped: with rollouts drawn ahead, these are in the checkpoint too.

With one update per step, log-probabilities before the step are those of the step's own forward: ratios are 1, and their
gradient is taken at 1 (anchor "current"); a forward is saved. That is not so where a correction drops tokens from the
denominators, or a KL penalty is weighted, which need them beforehand.

A step in which no token is left to learn from, or no advantage differs from 0, updates nothing and says so; ten steps
in a row without any token to learn from end the run.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from longspan import losses
from longspan.config import ConfigError, RLConfig
from longspan.engine import metrics
from longspan.engine.build import build_model
from longspan.engine.checkpoint import no_progress_bar
from longspan.engine.core import Engine
from longspan.engine.data import load_tokenizer
from longspan.engine.datum import Datum, loss_tokens
from longspan.engine.mesh import gather_vector, local_device
from longspan.engine.optim import learning_rate
from longspan.engine.packing import step_rows
from longspan.engine.process import precise, seed_step
from longspan.engine.progress import Progress
from longspan.engine.runs import begin, find_checkpoint, session, write_run_files
from longspan.rl.collect import Collector, Rollouts, on_rank_zero
from longspan.rl.continuous import ContinuousGenerator
from longspan.rl.data import Prompt, answer_tokens, load_prompts
from longspan.rl.environments import Episode
from longspan.rl.own import OwnGenerator
from longspan.rl.probe import probe
from longspan.rl.rewards import check_any_reward
from longspan.rl.rollout import Completion, Generator, Sampling
from longspan.rl.servers import ServerGenerator

log = logging.getLogger(__name__)

IDLE_STEPS = 10  # in a row with nothing to learn from, before the run ends
PROBE_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended."""

    folder: str
    step: int
    steps: int
    stopped: bool  # by a signal, before the last step
    reward: float | None  # of the last step
    seconds: float
    checkpoint: str | None
    export: str | None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What stays the same through a run."""

    config: RLConfig
    recipe: losses.Recipe
    engine: Engine
    reference: Engine | None
    generator: Generator
    collector: Collector
    prompts: list[Prompt]
    fingerprint: str  # of the prompts
    tokenizer: PreTrainedTokenizerBase


@dataclass(kw_only=True)
class _At:
    """Where a run stands: all that a checkpoint keeps beside the engine's state."""

    step: int = 0
    consumed: int = 0  # prompts
    idle: int = 0  # steps in a row with nothing to learn from
    ahead: Rollouts | None = None  # of the next step


def train(
    config: RLConfig, *, progress: bool = True, on_step: Callable[[dict[str, Any]], None] | None = None
) -> Summary:
    """Trains as `config` says; every rank calls it. `on_step` gets each step's record, on every rank."""
    with session(deterministic=config.train.deterministic) as stop:
        return _train(config, progress, on_step, stop)


def _train(
    config: RLConfig, progress: bool, on_step: Callable[[dict[str, Any]], None] | None, stop: threading.Event
) -> Summary:
    shown = progress and config.log.progress
    run, at, saved = _start(config, shown=shown)
    steps = config.train.steps
    book = _Book(run, at.step, shown=shown) if dist.get_rank() == 0 else None
    begun = time.perf_counter()
    record: dict[str, Any] | None = None
    stopped = False
    pool = ThreadPoolExecutor(1, "rollouts")
    try:
        while at.step < steps:
            record, rollouts, advantages = _whole_step(run, at, pool)
            if book is not None:
                book.write(record, rollouts, advantages)
            if on_step is not None:
                on_step(record)
            stopped = bool(gather_vector([stop.is_set()]).any()) and at.step < steps
            due = config.checkpoint.every and at.step % config.checkpoint.every == 0
            if due or stopped or (at.step == steps and config.checkpoint.at_end):
                saved = _save(run, at)
            if stopped:
                log.info("a signal asked to stop: saved %s", saved)
                break
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if book is not None:
            book.close()
    exported = None
    if config.checkpoint.export and at.step == steps:
        exported = run.engine.export_hf(Path(config.folder) / "export", run.tokenizer)
    return Summary(
        folder=config.folder,
        step=at.step,
        steps=steps,
        stopped=stopped,
        reward=record["reward"] if record else None,
        seconds=time.perf_counter() - begun,
        checkpoint=str(saved) if saved else None,
        export=str(exported) if exported else None,
    )


def _whole_step(run: _Run, at: _At, pool: ThreadPoolExecutor) -> tuple[dict[str, Any], Rollouts, list[float]]:
    """(the step's record, its rollouts, their advantages): draws, learns, and gives the generator the weights."""
    config = run.config
    started = time.perf_counter()
    rollouts, draws = _collect(run, at)
    pending = None
    if config.rollout.off_policy_steps and at.step + 1 < config.train.steps:
        pending = _ask_ahead(run, pool, at)
    seed_step(config.train.seed, at.step + 1, run.engine.dp_rank)
    record, advantages = _step(run, at.step + 1, rollouts)
    at.step += 1
    at.idle = at.idle + 1 if record["learned_tokens"] == 0 else 0
    if at.idle >= IDLE_STEPS:
        raise RuntimeError(
            f"step {at.step}: {at.idle} steps in a row left no token to learn from (unscored, truncated, filtered); "
            "the run would go on without learning"
        )
    waited = time.perf_counter()
    if pending is not None:
        at.ahead = _await(run, pending)
    synced = time.perf_counter()
    record |= {"draws": draws, "probe_difference": _sync(run, at.step), "seconds_wait": synced - waited}
    record["seconds_sync"] = time.perf_counter() - synced
    if config.train.evaluate_every and at.step % config.train.evaluate_every == 0:
        record |= _evaluate(run)
    record["seconds"] = time.perf_counter() - started
    record["tokens_per_second"] = record["tokens"] / record["seconds"]
    return record, rollouts, advantages


# -- beginning and saving ------------------------------------------------------------------------------------------


def _start(config: RLConfig, *, shown: bool) -> tuple[_Run, _At, Path | None]:
    """(what stays, where the run stands, the checkpoint it starts from): all that can be wrong with the configuration
    shows before the run folder is touched."""
    mesh = begin(config)
    recipe = make_recipe(config)
    tokenizer = load_tokenizer(config.data, trust_remote_code=config.model.trust_remote_code)
    prompts, training = load_prompts(config.data, tokenizer, environment=bool(config.rollout.environment))
    fingerprint = _same_rows(config, _fingerprint(prompts, training))
    plain = build_model(config.model, tokenizer, sequence_length=_check_lengths(config, prompts))
    _check_vocabulary(plain, prompts)
    folder = Path(config.folder)
    generator = _generator(config, plain, folder)
    engine = _engine(config, plain, mesh)
    collector = Collector(config, prompts, training, tokenizer, generator, plain.dtype)

    newest = find_checkpoint(folder, config.checkpoint.resume)
    at = _At() if newest is None else _resume(config, engine, newest, fingerprint)
    if dist.get_rank() == 0:
        write_run_files(folder, config, engine, training_rows=training, validation_rows=len(prompts) - training)
    if newest is None and config.warmup.steps:
        _warm_up(config, engine, prompts[:training], tokenizer, shown=shown and dist.get_rank() == 0)
    run = _Run(
        config=config,
        recipe=recipe,
        engine=engine,
        reference=_reference(config, engine, fresh=newest is None) if recipe.kl_coefficient else None,
        generator=generator,
        collector=collector,
        prompts=prompts,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
    )
    _sync(run, at.step)
    return run, at, newest


def _resume(config: RLConfig, engine: Engine, newest: Path, fingerprint: str) -> _At:
    state = engine.load_state(newest)
    if state["data"] != fingerprint:
        raise ConfigError(
            f"{newest} was trained on other prompts ({state['data']}; now {fingerprint}); restore the data settings, "
            "take another folder, or set checkpoint.resume = 'never'"
        )
    at = _At(step=state["step"], consumed=state["consumed"], idle=state["idle"])
    if state["ahead"] and state["drawn_by"] == _drawn_by(config):
        at.ahead = Rollouts.from_json(state["ahead"])
    elif state["ahead"]:
        log.warning("settings of rollouts or rewards changed: those drawn ahead are drawn anew")
        at.consumed = state["consumed_before"]
    log.info("resuming from %s: step %d, %d prompts", newest, at.step, at.consumed)
    return at


def _save(run: _Run, at: _At) -> Path:
    config, engine = run.config, run.engine
    return engine.save_state(
        config.folder,
        keep=config.checkpoint.keep,
        step=at.step,
        consumed=at.consumed,
        consumed_before=at.consumed - (config.rollout.prompts if at.ahead is not None else 0),
        idle=at.idle,
        ahead=at.ahead.to_json() if at.ahead is not None else None,
        drawn_by=_drawn_by(config),
        data=run.fingerprint,
        mesh={"dp": engine.dp, "cp": engine.cp},
        config=dataclasses.asdict(config),
    )


# -- what is made once ---------------------------------------------------------------------------------------------


def make_recipe(config: RLConfig) -> losses.Recipe:
    """The recipe of `loss.recipe` with `loss.changes`. Raises ConfigError."""
    changes = copy.deepcopy(config.loss.changes)
    _check_fields(losses.Recipe, changes, "loss.changes")
    try:
        if "correction" in changes:
            _check_fields(losses.Correction, changes["correction"], "loss.changes.correction")
            changes["correction"] = losses.Correction(**changes["correction"])
        recipe = losses.preset(config.loss.recipe, **changes)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"loss.recipe = {config.loss.recipe!r} with loss.changes: {error}") from error
    if recipe.baseline == "gae":
        raise ConfigError(f"loss.recipe = {config.loss.recipe!r} needs a critic, and longspan rl trains none")
    if recipe.loss == "sft":
        raise ConfigError("loss.recipe = 'sft' looks at no reward: `warmup` takes supervised steps")
    if config.rollout.group_size == 1 and recipe.baseline == "group":
        raise ConfigError(
            "rollout.group_size = 1 with a baseline by group: every advantage would be 0; raise it, or set "
            "loss.changes.baseline and loss.changes.scale to 'batch'"
        )
    if config.train.updates == 1 and recipe.anchor == "old" and not recipe.correction.drops and not recipe.kl_weighted:
        recipe = replace(recipe, anchor="current")
    return recipe


def _check_fields(kind: type[Any], given: Any, name: str) -> None:
    known = {field.name: field.type for field in dataclasses.fields(kind)}
    if not isinstance(given, dict):
        raise ConfigError(f"{name} = {given!r} is no table; it has the keys {', '.join(known)}")
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"unknown key {name}.{key}; {hint}")
        wanted = {"bool": bool, "float": float, "float | None": float, "int | None": int}.get(str(known[key]))
        number = wanted is float and type(value) is int
        if wanted is not None and type(value) is not wanted and not number:
            raise ConfigError(f"{name}.{key} = {value!r} is no {wanted.__name__}")


def _engine(config: RLConfig, model: PreTrainedModel, mesh: Any) -> Engine:
    return Engine(
        model,
        mesh,
        optimizer=config.optimizer,
        parallel=config.parallel,
        precision=config.train.precision,
        activation_checkpointing=config.train.activation_checkpointing,
        token_budget=config.train.token_budget,
        share_prefixes=config.train.share_prefixes,
    )


def _generator(config: RLConfig, plain: PreTrainedModel, folder: Path) -> Generator:
    rollout = config.rollout
    if rollout.generator in ("own", "continuous"):
        # Where the trainer computes in bf16, so does what it is compared with.
        dtype = torch.bfloat16 if config.train.precision == "bf16" else None
        make = OwnGenerator if rollout.generator == "own" else ContinuousGenerator
        return make(plain, dtype=dtype, device=local_device())
    kind: Any = rollout.generator
    try:
        return ServerGenerator(
            kind, rollout.urls, config=plain.config, folder=folder / "weights", seconds=rollout.timeout_seconds
        )
    except ValueError as error:
        raise ConfigError(f"rollout.urls: {error}") from error


def _reference(config: RLConfig, engine: Engine, *, fresh: bool) -> Engine:
    """The model as it was before the first rollout, which KL is measured against; kept in the run folder."""
    place = Path(config.folder) / "reference"
    if fresh:
        engine.export_hf(place)
    elif not place.is_dir():
        raise ConfigError(
            f"loss.changes.kl_coefficient was set after the run began, and {place} was not kept; take another folder"
        )
    with no_progress_bar():
        kept = AutoModelForCausalLM.from_pretrained(place, dtype=engine.model.dtype, local_files_only=True)
    return _engine(config, kept.requires_grad_(False), engine.mesh)


def _check_lengths(config: RLConfig, prompts: Sequence[Prompt]) -> int:
    """The longest sequence there can be."""
    rollout = config.rollout
    longest = rollout.max_tokens
    if not rollout.environment:
        longest = max(len(prompt.ids) for prompt in prompts) + rollout.max_new_tokens
    if longest > config.train.token_budget:
        raise ConfigError(
            f"the longest sequence may have {longest} tokens (prompt and rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}), more than train.token_budget = {config.train.token_budget}; raise it"
        )
    return longest


def _check_vocabulary(model: PreTrainedModel, prompts: Sequence[Prompt]) -> None:
    table: Any = model.get_input_embeddings()
    largest = max((max(prompt.ids) for prompt in prompts if prompt.ids), default=0)
    if largest >= table.num_embeddings:
        raise ConfigError(
            f"a prompt holds token id {largest}, but the model's vocabulary is {table.num_embeddings}; raise "
            "vocab_size or change the tokenizer"
        )


def _fingerprint(prompts: Sequence[Prompt], training: int) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.ids, dict(prompt.columns)], sort_keys=True, default=_plainly).encode())
    return f"{training} of {len(prompts)} prompts, {digest.hexdigest()[:16]}"


def _plainly(value: Any) -> Any:
    """What JSON has no word for, without what differs from process to process."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else type(value).__name__


def _same_rows(config: RLConfig, fingerprint: str) -> str:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, fingerprint)
    odd = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
    if odd:
        raise ConfigError(
            f"data.source = {config.data.source!r} gave other rows on rank(s) {odd} than on rank 0 "
            f"({everyone[odd[0]]}; {everyone[0]}); every process must get the same: seed random numbers, sort what "
            "comes from a set"
        )
    return fingerprint


def _drawn_by(config: RLConfig) -> dict[str, Any]:
    """The settings that rollouts drawn ahead were drawn and scored by."""
    every = dataclasses.asdict(config)
    kept = {name: every[name] for name in ("rollout", "reward", "data")} | {"seed": config.train.seed}
    for name in ("urls", "probe_every", "probe_tolerance", "timeout_seconds", "samples"):
        del kept["rollout"][name]
    return json.loads(json.dumps(kept))  # as a checkpoint has it


def _warm_up(config: RLConfig, engine: Engine, prompts: Sequence[Prompt], tokenizer: Any, *, shown: bool) -> None:
    """Supervised steps on the rows' answers."""
    data, warmup = config.data, config.warmup
    bar = Progress(0, warmup.steps, shown=shown, note=lambda record: f"warm-up loss {record['loss']:.4f}")
    for step in range(warmup.steps):
        rows = step_rows(step * warmup.rows, warmup.rows, rows=len(prompts), seed=data.seed, shuffle=data.shuffle)
        batch = []
        for row in rows:
            if not prompts[row].ids:
                raise ConfigError("warmup.steps needs rows with a prompt; these leave it to the environment")
            answer = answer_tokens(prompts[row], warmup.answer, tokenizer)
            mask = [False] * len(prompts[row].ids) + [True] * len(answer)
            batch.append(Datum.from_tokens([*prompts[row].ids, *answer], mask))
        loss = engine.forward_backward(batch, "sft").loss
        engine.optim_step(lr=warmup.lr)
        bar.update({"step": step + 1, "loss": loss})
    bar.close()
    engine.step = 0


# -- rollouts ------------------------------------------------------------------------------------------------------


def _collect(run: _Run, at: _At) -> tuple[Rollouts, int]:
    """(the step's rollouts, draws). With dynamic sampling, groups whose rewards are all equal are
    dropped, and others drawn in their place."""
    config, loss = run.config, run.config.loss
    kept: Rollouts | None = None
    wanted = config.rollout.prompts
    for draws in range(1, loss.max_draws + 1):
        if at.ahead is None:
            requests = run.collector.ask(at.consumed)
            at.consumed += config.rollout.prompts
            started = time.perf_counter()
            mine = run.collector.draw(requests, run.collector.sampling)
            drawn = run.collector.gather(requests, mine, time.perf_counter() - started)
        else:
            drawn, at.ahead = at.ahead, None
        check_any_reward(drawn.rewards, at.step + 1)
        if not loss.dynamic_sampling:
            return drawn, draws
        rewards, groups = _rewards(drawn)
        some = drawn.take(losses.informative(rewards, groups).nonzero().flatten().tolist())
        kept = some if kept is None else kept + some
        order = list(dict.fromkeys(request.group for request in kept.requests))[:wanted]
        if len(order) == wanted:
            return kept.take([i for i, r in enumerate(kept.requests) if r.group in order]), draws
    if kept is None or not len(kept):
        raise RuntimeError(
            f"dynamic sampling dropped every one of {loss.max_draws * wanted} groups in {loss.max_draws} draws: all "
            "completions of each prompt have the same reward. The task is solved, or too hard to get any right; make "
            "it harder or easier, or raise rollout.group_size or loss.max_draws"
        )
    log.warning("dynamic sampling found %d of %d groups in %d draws", len(order), wanted, loss.max_draws)
    return kept, loss.max_draws


@dataclass(frozen=True)
class _Pending:
    """A draw under way in a thread."""

    requests: Any
    mine: Future[tuple[Any, float]]


def _ask_ahead(run: _Run, pool: ThreadPoolExecutor, at: _At) -> _Pending:
    requests = run.collector.ask(at.consumed)
    at.consumed += run.config.rollout.prompts

    def drawn() -> tuple[Any, float]:
        started = time.perf_counter()
        return run.collector.draw(requests, run.collector.sampling), time.perf_counter() - started

    return _Pending(requests, pool.submit(drawn))


def _await(run: _Run, pending: _Pending) -> Rollouts:
    mine, seconds = pending.mine.result()
    return run.collector.gather(pending.requests, mine, seconds)


def _rewards(rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(rollouts.rewards, dtype=torch.float64),
        torch.tensor([request.group for request in rollouts.requests]),
    )


# -- a step --------------------------------------------------------------------------------------------------------


def _step(run: _Run, step: int, rollouts: Rollouts) -> tuple[dict[str, Any], list[float]]:
    """(the step's record, advantages): rewards to advantages, and the optimizer steps."""
    config, engine, recipe = run.config, run.engine, run.recipe
    staleness = _staleness(config, step, rollouts.episodes)
    rewards, groups = _rewards(rollouts)
    advantages, scored = recipe.advantages(rewards, groups)
    for each in (engine, run.reference):
        if each is not None:
            each.work[:] = 0
    started = time.perf_counter()
    data = [
        _datum(episode, float(advantage), bool(ok), request.group)
        for episode, advantage, ok, request in zip(rollouts.episodes, advantages, scored, rollouts.requests)
        if any(episode.chosen)
    ]
    temperature = config.rollout.temperature
    if data and (recipe.anchor == "old" or recipe.correction.drops):
        before = engine.forward(data, temperature=temperature)
        data = [replace(datum, old=output.logprobs) for datum, output in zip(data, before)]
    if data and run.reference is not None:
        known = run.reference.forward(data, temperature=temperature)
        data = [replace(datum, reference=output.logprobs) for datum, output in zip(data, known)]
    scoring = time.perf_counter() - started

    started = time.perf_counter()
    learned = losses.count(recipe, [loss_tokens(data)]).tokens if data else 0
    penalties = bool(recipe.kl_coefficient or recipe.entropy_coefficient)
    teaches = penalties or any(bool((datum.advantages[datum.mask] != 0).any()) for datum in data)
    done = _updates(run, step, data) if learned and teaches else _Updates(0, 0.0, 0.0, 0.0, {})
    if not learned:
        log.warning("step %d: no token is left to learn from; nothing was updated", step)
    elif not done.count:
        log.warning("step %d: every advantage is 0 (all rewards of each group are equal); nothing was updated", step)
    training = time.perf_counter() - started
    work = engine.work if run.reference is None else engine.work + run.reference.work
    everyone = gather_vector([*work, metrics.peak_memory_bytes(local_device())])
    tokens, pairs, sent, memory = (everyone[:, column].tolist() for column in range(4))
    record = {
        "step": step,
        **_rollout_metrics(run, rollouts, rewards, groups, scored),
        "loss": done.loss,
        "grad_norm": done.grad_norm,
        "lr": done.lr,
        "updates": done.count,
        **done.metrics,
        "learned_tokens": learned,
        "staleness": staleness,
        "tokens": sum(len(episode.tokens) for episode in rollouts.episodes),
        "tokens_per_rank": tokens,
        "pairs_per_rank": pairs,
        "bytes_per_rank": sent,
        "imbalance": max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0,
        "peak_memory_bytes": int(max(memory)),
        "seconds_rollout": rollouts.seconds["rollout"],
        "seconds_reward": rollouts.seconds["reward"],
        "seconds_score": scoring,
        "seconds_train": training,
    }
    return record, advantages.tolist()


@dataclass(frozen=True)
class _Updates:
    """Of a step: losses and norms are means over its optimizer steps."""

    count: int
    loss: float
    grad_norm: float
    lr: float
    metrics: dict[str, float]


def _updates(run: _Run, step: int, data: Sequence[Datum]) -> _Updates:
    config, engine = run.config, run.engine
    groups = list(dict.fromkeys(datum.group for datum in data))
    parts = [part.tolist() for part in np.array_split(np.arange(len(groups)), min(config.train.updates, len(groups)))]
    found = []
    for number, part in enumerate(parts):
        chosen = {groups[i] for i in part}
        own = [datum for datum in data if datum.group in chosen]
        if not losses.count(run.recipe, [loss_tokens(own)]).tokens:
            continue  # the same on every rank: counted from the whole data
        done = engine.forward_backward(own, run.recipe, temperature=config.rollout.temperature, entropy=True)
        total = config.train.steps * config.train.updates
        stepped = engine.optim_step(
            lr=learning_rate((step - 1) * config.train.updates + number + 1, total, config.optimizer)
        )
        found.append((done, stepped))
    told = {name: [done.metrics[name] for done, _ in found] for name in found[0][0].metrics if name != "tokens"}
    return _Updates(
        len(found),
        float(np.mean([done.loss for done, _ in found])),
        float(np.mean([stepped.grad_norm for _, stepped in found])),
        found[-1][1].lr,
        {name: float(np.mean(values)) for name, values in told.items()},
    )


def _datum(episode: Episode, advantage: float, scored: bool, group: int) -> Datum:
    """What is learned from an episode; nothing, where it has no reward."""
    chosen = torch.tensor(episode.chosen) & scored
    return Datum.from_tokens(
        list(episode.tokens),
        chosen,
        generator=torch.tensor(episode.logprobs),
        advantages=advantage,
        truncated=episode.truncated,
        group=group,
    )


def _staleness(config: RLConfig, step: int, episodes: Sequence[Episode]) -> float:
    """How many weight updates the rollouts are behind, on average. Raises RuntimeError beyond what is allowed."""
    behind = [step - 1 - episode.version for episode in episodes if episode.version >= 0]
    allowed = config.rollout.off_policy_steps
    if behind and max(behind) > allowed:
        raise RuntimeError(
            f"step {step}: rollouts were drawn by weights {max(behind)} updates old, and rollout.off_policy_steps = "
            f"{allowed} are allowed; the generator did not take its last update"
        )
    return sum(behind) / len(behind) if behind else 0.0


def _rollout_metrics(
    run: _Run, rollouts: Rollouts, rewards: torch.Tensor, groups: torch.Tensor, scored: torch.Tensor
) -> dict[str, Any]:
    lengths = [sum(episode.chosen) for episode in rollouts.episodes]
    every = set(groups.tolist())
    teaching = set(groups[losses.informative(rewards, groups)].tolist())
    values = rewards[scored]
    solved, solved_once = run.collector.pass_at(rollouts)
    each = {}
    for name, found in rollouts.each.items():
        numbers = [value for value in found if not math.isnan(value)]
        each[f"reward_{name}"] = sum(numbers) / len(numbers) if numbers else math.nan
    return {
        "reward": float(values.mean()),
        "reward_std": float(values.std(correction=0)),
        **(each if len(each) > 1 else {}),
        "pass_at_1": solved,
        f"pass_at_{run.config.rollout.group_size}": solved_once,
        "unscored": 1 - float(scored.double().mean()),
        "zero_variance": 1 - len(teaching) / len(every),
        "completions": len(rollouts),
        "length": sum(lengths) / len(lengths),
        "length_max": max(lengths),
        "truncated": sum(episode.truncated for episode in rollouts.episodes) / len(rollouts),
        "turns": sum(episode.turns for episode in rollouts.episodes) / len(rollouts),
        "failed": sum(bool(episode.failed) for episode in rollouts.episodes),
    }


# -- the generator's weights ---------------------------------------------------------------------------------------


class _OnRankZero:
    """A generator whose answers are rank 0's: of servers, and of others whose draws differ between ranks."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        return on_rank_zero(lambda: self.generator.generate(prompts, sampling, seeds))

    def update_weights(self, weights: Any, version: int) -> None:
        self.generator.update_weights(weights, version)

    def close(self) -> None:
        self.generator.close()


def _sync(run: _Run, step: int) -> float | None:
    """Gives the generator the weights after `step`; the largest difference that the probe found, if it was asked."""
    rollout, engine = run.config.rollout, run.engine
    run.generator.update_weights(engine.whole_weights(), step)
    if not rollout.probe_every or step % rollout.probe_every:
        return None
    prompt = next((prompt.ids for prompt in run.prompts if prompt.ids), (0,))
    exact = run.config.train.precision == "full" and engine.model.dtype in (torch.float32, torch.float64)
    own = rollout.generator == "own"
    tolerance = rollout.probe_tolerance or (1e-5 if exact and rollout.generator in ("own", "continuous") else 0.05)
    sampling = Sampling(temperature=rollout.temperature, max_new_tokens=PROBE_TOKENS)

    def score(sequences: list[list[int]], temperature: float) -> list[torch.Tensor]:
        return [o.logprobs for o in engine.forward([Datum(tokens=s) for s in sequences], temperature=temperature)]

    with precise(engine.model.dtype):
        generator = run.generator if own else _OnRankZero(run.generator)
        return probe(generator, score, [prompt], sampling, tolerance=tolerance, seeds=[step])


def _evaluate(run: _Run) -> dict[str, float]:
    """The held-out rows, one greedy completion each."""
    requests = run.collector.held_out()
    sampling = replace(run.collector.sampling, temperature=0.0)
    started = time.perf_counter()
    mine = run.collector.draw(requests, sampling)
    rollouts = run.collector.gather(requests, mine, time.perf_counter() - started)
    rewards = [reward for reward in rollouts.rewards if not math.isnan(reward)]
    return {
        "validation_reward": sum(rewards) / len(rewards) if rewards else math.nan,
        "validation_pass_at_1": run.collector.pass_at(rollouts)[0],
    }


# -- what is written -----------------------------------------------------------------------------------------------


def _without_nan(record: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


class _Book:
    """Rank 0's files and its bar."""

    def __init__(self, run: _Run, step: int, *, shown: bool) -> None:
        folder = Path(run.config.folder)
        self.run = run
        self.metrics = metrics.MetricsLog(folder, after_step=step, tensorboard=run.config.log.tensorboard)
        metrics.truncate(folder / "samples.jsonl", step)
        self.samples = (folder / "samples.jsonl").open("a")
        self.bar = Progress(step, run.config.train.steps, shown=shown, note=_note)

    def write(self, record: dict[str, Any], rollouts: Rollouts, advantages: Sequence[float]) -> None:
        self.metrics.write(_without_nan(record))
        decode = self.run.tokenizer.decode
        for i in range(min(self.run.config.rollout.samples, len(rollouts))):
            episode = rollouts.episodes[i]
            line = {
                "step": record["step"],
                "prompt": decode(list(episode.tokens[: episode.prompt])),
                "completion": decode(list(episode.tokens[episode.prompt :])),
                "reward": rollouts.rewards[i],
                "advantage": advantages[i],
                "truncated": episode.truncated,
                "turns": episode.turns,
                "version": episode.version,
            }
            self.samples.write(json.dumps(_without_nan(line)) + "\n")
        self.samples.flush()
        self.bar.update(record)

    def close(self) -> None:
        self.bar.close()
        self.metrics.close()
        self.samples.close()


def _note(record: dict[str, Any]) -> str:
    note = (
        f"reward {record['reward']:.3f}  length {record['length']:.1f}  grad {record['grad_norm']:.3f}  "
        f"{record['tokens_per_second']:,.0f} tokens/s"
    )
    return note + (f"  validation {record['validation_reward']:.3f}" if "validation_reward" in record else "")
