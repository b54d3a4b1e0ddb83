"""Engine: a model, its split, its optimizer; data in, gradients and steps out.

    engine = Engine(model, mesh, optimizer=OptimizerConfig(lr=1e-5, schedule="constant"))
    before = engine.forward(data)                     # log-probabilities, whole, in the caller's order
    done   = engine.forward_backward(data, "grpo")    # a preset, a losses.Recipe, or your own function
    step   = engine.optim_step()

Every rank makes the same calls with the same whole data (compared by a hash), and gets whole results. Underneath, data
is dealt over dp ranks and micro-batches (`engine.datum`), each sequence is split over cp ranks, and gradients are
averaged over all ranks by FSDP2 or DDP. What is counted is counted over the whole data before the first backward, so
the gradient does not depend on ranks, budget or micro-batches:

    step's loss = sum over micro-batches and dp ranks of what each gives to backward()

The low level, for loops of one's own; a loss there is divided by what the whole step counts:

    for batch in engine.micro_batches(data):
        engine.backward(my_loss(batch) / len(data))
    engine.optim_step()

The vocabulary (Datum, forward_backward, optim_step, save_state) is that of tinker's training API.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longspan import losses
from longspan.comm import ContextParallel
from longspan.config import ConfigError, OptimizerConfig, ParallelConfig
from longspan.engine import checkpoint, metrics, optim
from longspan.engine.datum import Datum, check_alike, deal, loss_tokens, units
from longspan.engine.mesh import gather_vector, init_mesh
from longspan.engine.process import precise
from longspan.engine.wrap import compute, forget_unreduced, synchronise, wrap_model
from longspan.models import parallelize, report
from longspan.models.score import Scores, packs, score, shared_tree

M = TypeVar("M")


@dataclass(frozen=True)
class Output:
    """Of one Datum: log-probabilities of its targets and, where asked for, the entropy at each place; fp32 [T]."""

    logprobs: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True)
class Done:
    """A forward_backward: the step's loss, its metrics (`losses.summarize`), and outputs in the order of the data."""

    loss: float
    metrics: dict[str, float]
    outputs: list[Output]


@dataclass(frozen=True)
class Step:
    """An optim_step: its number, from 1 on, the learning rate, and the gradient's norm before clipping."""

    step: int
    lr: float
    grad_norm: float


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences that this rank (and its cp peers) run together.

    data, and indices into what the caller gave. scores: `longspan.Scores`, with gradients; a list entry per sequence.
    stand_in: this rank has no data of its own left, and runs some that another one has, so that all join every
        collective: `backward` multiplies its loss by 0, and a sum of one's own is to leave it out.
    """

    data: tuple[Datum, ...]
    indices: tuple[int, ...]
    scores: Scores
    stand_in: bool

    @property
    def logprobs(self) -> list[Tensor]:
        """Per sequence, [T]."""
        return list(self.scores.logprobs)

    @cached_property
    def tokens(self) -> losses.Tokens:
        """The data as `losses` takes it; its per-token tensors lie flat like `losses.flatten(logprobs)`."""
        return loss_tokens(self.data, self.scores.logprobs[0].device)


Plan = list[tuple[tuple[int, ...], bool]]  # of each micro-batch: indices, and whether they stand in for none
Loss = str | losses.Recipe | Callable[[MicroBatch], Tensor]


class Engine:
    """See the module's text.

    Args:
        model: a plain Hugging Face causal LM; it is adapted in place. Where no parameter requires a gradient, the
            engine only runs forward.
        mesh: axes ("dp", "cp"), as `init_mesh` makes it; None for all ranks as dp.
        optimizer, parallel: sections of the configuration.
        precision: "full", or "bf16" for computing in bf16 with weights and reductions in fp32.
        activation_checkpointing: recompute each layer in the backward.
        steps: how many optimizer steps there will be, for schedules that end.
        token_budget: the most tokens in a micro-batch, over the cp ranks together.
        share_prefixes: compute what sequences of a group have in common once (`longspan.score`).
        packed: at cp 1 too, run sequences end to end in one row (`parallelize(on_one_rank=True)`). False: the model
            stays as it is there, and sequences of several lengths run one length after the other.

    Raises ConfigError (a ValueError) for models and options that cannot equal one rank.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh | None = None,
        *,
        optimizer: OptimizerConfig | None = None,
        parallel: ParallelConfig | None = None,
        precision: str = "full",
        activation_checkpointing: bool = False,
        steps: int | None = None,
        token_budget: int = 8192,
        share_prefixes: bool = True,
        packed: bool = True,
    ) -> None:
        self.mesh = init_mesh() if mesh is None else mesh
        self.options = OptimizerConfig() if optimizer is None else optimizer
        parallel = ParallelConfig() if parallel is None else parallel
        self.precision, self.steps = precision, steps
        self.token_budget, self.share_prefixes = token_budget, share_prefixes
        self.step = 0
        self.weights = metrics.active_weights(model)
        self.plain_config = copy.deepcopy(model.config)
        if activation_checkpointing:
            _recompute_blocks(model)
        try:
            self.model = parallelize(
                model,
                self.mesh["cp"],
                scheme=parallel.scheme,
                layout=parallel.layout,
                kernel=parallel.kernel,
                logits="none",
                stages=parallel.stages or None,
                check_batch=parallel.check_batch,
                on_one_rank=packed,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.module = wrap_model(self.model, self.mesh, wrap=parallel.wrap, precision=precision)
        trainable = any(parameter.requires_grad for parameter in self.module.parameters())
        self.optimizer = optim.build_optimizer(self.module, self.options) if trainable else None
        self._one_forward = packs(self.model)
        self._everyone = ContextParallel(dist.group.WORLD, check_batch=parallel.check_batch)
        self.work = np.zeros(3)  # tokens, attention pairs, bytes sent by this rank's forwards; the caller may reset it
        self._owed: int | None = None  # backwards that the micro-batches under way still owe
        self._stand_in = False  # of the micro-batch under way

    @property
    def dp(self) -> int:
        return self.mesh["dp"].size()

    @property
    def dp_rank(self) -> int:
        return self.mesh["dp"].get_local_rank()

    @property
    def cp(self) -> int:
        return self.mesh["cp"].size()

    def computing(self) -> ExitStack:
        """The context of a forward: precision, and fp64 that stays fp64."""
        stack = ExitStack()
        stack.enter_context(compute(self.module, self.precision))
        stack.enter_context(precise(self.model.dtype))
        return stack

    # -- forward and backward ----------------------------------------------------------------------------------

    def accumulate(self, batches: Sequence[M], loss: Callable[[M], Tensor]) -> list[Tensor]:
        """Forward and backward of each of this rank's micro-batches, equally many on every rank; gradients travel with
        the last. Returns the losses, detached. The step's gradient is the mean over all ranks of the sums."""
        self.module.train()
        found = []
        for number, batch in enumerate(batches):
            with synchronise(self.module, last=number == len(batches) - 1):
                with self.computing():
                    value = loss(batch)
                value.backward()
            found.append(value.detach())
        return found

    @torch.no_grad()
    def forward(self, data: Sequence[Datum], *, temperature: float = 1.0, entropy: bool = False) -> list[Output]:
        """Log-probabilities (and entropies) of every Datum, whole, in the order of the data, on every rank."""
        plan, _ = self._plan(data, {"temperature": temperature, "entropy": entropy})
        self.module.eval()
        found: list[tuple[int, Output]] = []
        for indices, stand_in in plan:
            batch = self._run(data, indices, stand_in=stand_in, temperature=temperature, entropy=entropy)
            found += _outputs(batch)
        if isinstance(self.module, FSDPModule):
            self.module.reshard()
        self.module.train()
        return self._everywhere(data, found)

    def micro_batches(
        self,
        data: Sequence[Datum],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        top_k: int = 0,
        hidden_states: bool = False,
    ) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the data, each with its forward done. Every one is owed one `backward`; the
        fields of `longspan.score` are there as asked for."""
        asked = {"temperature": temperature, "entropy": entropy, "top_k": top_k, "hidden_states": hidden_states}
        plan, _ = self._plan(data, asked)
        yield from self._loop(data, plan, asked)

    def _loop(self, data: Sequence[Datum], plan: Plan, asked: dict[str, Any]) -> Iterator[MicroBatch]:
        if self._owed:
            raise RuntimeError(
                f"{self._owed} micro-batches of an earlier loop had no backward; zero_grad() starts anew"
            )
        self.module.train()
        for number, (indices, stand_in) in enumerate(plan):
            # Gradients add up over several loops before one optim_step, each reduced with the loop's last backward.
            with synchronise(self.module, last=number == len(plan) - 1):
                batch = self._run(data, indices, stand_in=stand_in, **asked)
                self._owed = len(plan) - number
                self._stand_in = stand_in
                yield batch
                if self._owed != len(plan) - number - 1:
                    raise RuntimeError(
                        f"micro-batch {number + 1} of {len(plan)} had no backward; give each to engine.backward(loss), "
                        "since other ranks wait for its gradients"
                    )

    def backward(self, loss: Tensor) -> None:
        """The backward of one micro-batch's part of the step's loss. Parts add up over micro-batches and dp ranks."""
        if not self._owed:
            raise RuntimeError("backward() belongs to a micro-batch: for batch in engine.micro_batches(data): ..")
        if loss.ndim or not loss.requires_grad:
            raise ValueError(
                f"a loss is a scalar with a gradient, got {tuple(loss.shape)}, requires_grad {loss.requires_grad}"
            )
        # The wrapper takes the mean over all ranks, cp peers included, which compute the same loss.
        (loss * (0.0 if self._stand_in else float(self.dp))).backward()
        self._owed -= 1

    def forward_backward(
        self, data: Sequence[Datum], loss: Loss, *, temperature: float = 1.0, entropy: bool = False
    ) -> Done:
        """The gradient of a step's loss is added to what is there.

        loss: a name of `losses.PRESETS`, a `losses.Recipe`, or a function of a `MicroBatch` whose values, added over
        micro-batches and dp ranks, are the loss. entropy: report it (a recipe with a bonus computes it anyway).

        Raises ValueError where nothing is left to learn from, FloatingPointError where the loss is not finite.
        """
        recipe = losses.preset(loss) if isinstance(loss, str) else loss
        fixed = recipe if isinstance(recipe, losses.Recipe) else None
        entropy = entropy or bool(fixed and fixed.entropy_coefficient)
        asked: dict[str, Any] = {"temperature": temperature, "entropy": entropy}
        plan, over = self._plan(data, asked, fixed)
        total = 0.0
        sums: dict[str, float] = {}
        found: list[tuple[int, Output]] = []
        try:
            for batch in self._loop(data, plan, asked):
                with self.computing():
                    value, told = _value(recipe, batch, over)
                self.backward(value)
                found += _outputs(batch)
                total += 0.0 if batch.stand_in else float(value.detach())
                for name, each in told.items():
                    sums[name] = sums.get(name, 0.0) + (0.0 if batch.stand_in else float(each))
        except BaseException:
            self.zero_grad()
            raise
        # Ranks are numbered dp outermost: the first rank of each cp group speaks for it.
        everyone = gather_vector([total, *sums.values()])[:: self.cp].sum(0).tolist()
        if not math.isfinite(everyone[0]):
            self.zero_grad()
            raise FloatingPointError(f"the loss is {everyone[0]}; its gradients were thrown away")
        return Done(
            loss=everyone[0],
            metrics=losses.summarize(dict(zip(sums, everyone[1:]))) if sums else {},
            outputs=self._everywhere(data, found),
        )

    def _plan(
        self, data: Sequence[Datum], options: dict[str, Any], recipe: losses.Recipe | None = None
    ) -> tuple[Plan, int]:
        """(this rank's part of every micro-batch, the recipe's denominator, counted over the whole data). Raises on
        every rank where one was given other data, or nothing to learn from."""
        if self.dp > 1 and not self._one_forward and isinstance(self.module, FSDPModule):
            raise ConfigError(
                f"{type(self.model).__name__} cannot run sequences of several lengths in one forward, so dp ranks "
                "would run different numbers of them, which FSDP cannot; use parallel.wrap = 'ddp'"
            )

        def planned() -> tuple[Plan, int]:
            check_alike(data)
            pair_cost = 1 / (6 * self.plain_config.get_text_config().hidden_size)
            tree_of = partial(shared_tree, self.model) if self.share_prefixes else None
            parts = units(data, self.token_budget, pair_cost, tree_of)
            least = min(parts, key=lambda part: part.cost).members
            mine = [row[self.dp_rank] for row in deal(parts, self.dp, self.token_budget)]
            over = 1 if recipe is None else _denominator(recipe, data)
            return [(indices or least, not indices) for indices in mine], over

        given: dict[str, Any] = {"options": repr((options, recipe and _named(recipe)))}
        if len(data) and all(isinstance(datum, Datum) for datum in data):
            given["lengths"] = repr([len(datum.tokens) for datum in data])
            for name, value in vars(data[0]).items():
                parts = [getattr(datum, name) for datum in data]
                if isinstance(value, Tensor) and all(isinstance(part, Tensor) for part in parts):
                    given[name] = torch.cat(parts)
                else:
                    given[name] = repr(parts)
        return self._everyone.agree(planned, given, "data")

    def _run(self, data: Sequence[Datum], indices: tuple[int, ...], *, stand_in: bool, **asked: Any) -> MicroBatch:
        """The forward of one micro-batch."""
        mine = tuple(data[i] for i in indices)
        with self.computing():
            scores = score(
                self.module,
                [datum.tokens for datum in mine],
                [datum.targets for datum in mine],
                share_prefixes=self.share_prefixes,
                **asked,
            )
        if self._one_forward:
            did = report(self.model)
            self.work += (did["tokens"], did["pairs"], did["bytes_sent"])
        else:
            lengths = [len(datum.tokens) for datum in mine]
            self.work += (sum(lengths), metrics.layer_pairs(self.model.config.get_text_config(), lengths), 0)
        return MicroBatch(mine, indices, scores, stand_in)

    def _everywhere(self, data: Sequence[Datum], found: list[tuple[int, Output]]) -> list[Output]:
        """Every rank's outputs, from those of each: every Datum's are zero but on the ranks that ran it."""
        lengths = [len(datum.tokens) for datum in data]
        starts = [0, *itertools.accumulate(lengths)]
        with_entropy = any(output.entropy is not None for _, output in found)
        some = found[0][1].logprobs
        flat = torch.zeros(1 + with_entropy, sum(lengths), dtype=some.dtype, device=some.device)
        for i, output in found:
            if i >= 0:
                flat[0, starts[i] : starts[i] + lengths[i]] = output.logprobs
                if output.entropy is not None:
                    flat[1, starts[i] : starts[i] + lengths[i]] = output.entropy
        if self.dp > 1:
            dist.all_reduce(flat, group=self.mesh["dp"].get_group())
        parts = [row.cpu().split(lengths) for row in flat]
        return [Output(*each) for each in zip(*parts)]

    # -- steps and state ---------------------------------------------------------------------------------------

    def optim_step(self, lr: float | None = None) -> Step:
        """One optimizer step with the gradients so far, which are then gone. lr: instead of the schedule's.

        Raises FloatingPointError, on every rank, for gradients that are not finite; nothing is updated then.
        """
        optimizer = self._trained()
        if self._owed:
            raise RuntimeError(
                f"{self._owed} micro-batches had no backward yet, so the step's gradient is not whole; zero_grad() "
                "throws away what there is"
            )
        if lr is None:
            if self.steps is None and self.options.schedule != "constant":
                raise ValueError(
                    f"schedule {self.options.schedule!r} depends on the last step: give Engine(steps=..), or lr here"
                )
            lr = optim.learning_rate(self.step + 1, self.steps or 0, self.options)
        if all(parameter.grad is None for parameter in self.module.parameters()):
            raise RuntimeError("there is no gradient: optim_step() follows forward_backward(), or backward()s")
        norm = optim.gradient_norm(self.module)
        if not math.isfinite(norm):
            self.zero_grad()
            raise FloatingPointError(
                f"step {self.step + 1}: gradient norm {norm}; nothing was updated. Lower optimizer.lr, or resume from "
                "the last checkpoint"
            )
        limit = self.options.max_grad_norm
        if limit > 0:
            optim.scale_gradients(self.module, min(1.0, limit / (norm + 1e-6)))
        optim.set_learning_rate(optimizer, lr)
        optimizer.step()
        self.zero_grad()
        self.step += 1
        return Step(self.step, lr, norm)

    def _trained(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise RuntimeError("no parameter requires a gradient: this engine only runs forward")
        return self.optimizer

    def zero_grad(self) -> None:
        """Throws gradients away, those of a loop that was given up half way as well."""
        if self._owed:
            forget_unreduced(self.module)
        self.module.zero_grad(set_to_none=True)
        self._owed = None

    def save_state(self, folder: str | Path, *, keep: int = 2, step: int | None = None, **more: Any) -> Path:
        """Writes `folder/checkpoints/step-N`: weights, optimizer moments, the step and whatever JSON is in `more`; then
        removes all but the last `keep`. Whole or absent; loads at any mesh. Every rank calls it. step: N, where the
        caller counts otherwise than by optimizer steps."""
        state = {"step": self.step if step is None else step, "optimizer_steps": self.step, **more}
        return checkpoint.save(Path(folder), self.module, self._trained(), state=state, keep=keep)

    def load_state(self, path: str | Path) -> dict[str, Any]:
        """Reads a `step-N` folder; returns what `save_state` was given, and the step."""
        state = checkpoint.read_state(Path(path))
        checkpoint.load(Path(path), self.module, self._trained())
        self.step = state.get("optimizer_steps", state["step"])
        return state

    def export_hf(self, place: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
        """Writes a folder that `from_pretrained` loads, in safetensors; every rank calls it."""
        return checkpoint.export(Path(place), self.module, self.plain_config, tokenizer)

    def whole_weights(self) -> dict[str, Tensor]:
        """The plain model's state dict, whole, on every rank; every rank calls it."""
        weights: Any = get_model_state_dict(self.module, options=StateDictOptions(full_state_dict=True))
        return {name: value.detach() for name, value in weights.items()}


def _value(recipe: Any, batch: MicroBatch, over: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's part of the loss, and its metrics' sums."""
    if not isinstance(recipe, losses.Recipe):
        return recipe(batch), {}
    entropies: Any = batch.scores.entropy
    entropy = None if entropies is None else losses.flatten(entropies)
    result = losses.policy_loss(recipe, batch.tokens, losses.flatten(batch.logprobs), entropy)
    return result.loss / over, result.metrics


def _denominator(recipe: losses.Recipe, data: Sequence[Datum]) -> int:
    counts = losses.count(recipe, [loss_tokens(data)])
    if not counts.tokens:
        masked = sum(int(datum.mask.sum()) for datum in data)
        raise ValueError(
            f"nothing is left to learn from: {len(data)} sequences have {masked} targets in their masks, and the "
            "recipe's filters (truncation, generator log-probabilities that are not finite, corrections) leave none"
        )
    return losses.denominator(recipe, counts)


def _named(recipe: losses.Recipe) -> str:
    """For comparing recipes over ranks: a function by its name, not its address."""
    loss = recipe.loss if isinstance(recipe.loss, str) else getattr(recipe.loss, "__name__", "a function")
    return repr({**vars(recipe), "loss": loss})


def _outputs(batch: MicroBatch) -> list[tuple[int, Output]]:
    """With the index of the Datum; -1 for a stand-in."""
    entropies = batch.scores.entropy
    found = []
    for number, logprobs in enumerate(batch.logprobs):
        entropy = None if entropies is None else entropies[number].detach()
        found.append((-1 if batch.stand_in else batch.indices[number], Output(logprobs.detach(), entropy)))
    return found


def _recompute_blocks(model: PreTrainedModel) -> None:
    """Activation checkpointing of each block, under whichever name this transformers has it."""
    options: dict[str, Any] = {"use_reentrant": False}
    if model.dtype == torch.float64:
        # The recomputation runs inside backward(), where no function mode is active.
        options["context_fn"] = lambda: (nullcontext(), precise(torch.float64))
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)
