"""The own generator: a batched loop over a plain Hugging Face causal LM and its key-value cache. CPU, and tests.

    prompts   sorted by length and cut into batches of `batch_tokens`; equal prompts of a batch run once, and the cache
              is repeated for each of their completions
    step      the last token of every row -> logits -> log_softmax(logits / temperature) over the true vocabulary
    draw      p = exp of that in fp64, as integers of 2^-48; the first token whose running sum exceeds u * total
    stop      a row that is finished leaves the batch, and the cache with it

u is the t-th number of a counter-based stream of the sequence's own seed, so what is drawn depends on the seed, the
prompt and the weights: not on the batch, the rank, or how many tokens are asked for. What is left is rounding: the
logits of another batch differ in the last digits, and a u that falls so close to a border draws the neighbour. The
running sum is over integers, because integer sums do not depend on their order, on any device.

Prompts of different lengths are padded on the left, with a mask and with positions counted from the first real token.
Not every model heeds both (recurrent layers do not, nor do models that count positions themselves). So the first padded
batch is compared with its shortest prompt run alone; where they differ, lengths are from then on batched apart, and a
warning says so once. So are they for RoPE whose angles depend on the longest position ("dynamic", "longrope"); beyond
the length at which these change, cached keys keep their old angles, here as in `model.generate`, and log-probabilities
are no longer those of the whole sequence scored at once.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from longspan.models import rope
from longspan.models.decoder import CACHES, STATE
from longspan.rl.rollout import Completion, Sampling, check_request

GRAIN = 2.0**48  # of probabilities in the running sum
DRAW_ELEMENTS = 2**24  # rows x vocabulary that are drawn from at once: 128 MiB in fp64
LOGGER = logging.getLogger(__name__)


class CopyHolder:
    """What generators in this process have in common: a plain copy of the model, and whose version it is of."""

    def __init__(self, model: Any, dtype: torch.dtype | None, device: torch.device | str | None, version: int) -> None:
        self.model = plain_copy(model, dtype, device)
        self.version = version

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies the weights in. Raises ValueError, and changes nothing, unless they are the model's to the name and
        the shape. No cache outlives a call of `generate`."""
        copy_weights(self.model, weights)
        self.version = version

    def close(self) -> None:
        """Lets go of the model."""
        del self.model


class OwnGenerator(CopyHolder):
    """Completions by a copy of `model`, in eval mode and without gradients.

    Args:
        model: a Hugging Face causal LM that is not split. It is copied: later changes to it do not matter.
        dtype, device: of the copy's parameters; None: the model's. Where a trainer computes in bf16, so should this.
        batch_tokens: prompts and completions of one batch, at their longest; bounds the cache.
        version: of the weights it has now.

    Neither the global random state nor the model that was given is touched. Raises ValueError for a split model.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        batch_tokens: int = 2**16,
        version: int = 0,
    ) -> None:
        if batch_tokens < 1:
            raise ValueError(f"batch_tokens must be positive, got {batch_tokens}")
        super().__init__(model, dtype, device, version)
        self.batch_tokens = batch_tokens
        self.vocabulary = true_vocabulary(self.model)
        # Whether padded batches are exact, None: not known yet. RoPE of the longest position would take the batch's.
        self.pads: bool | None = False if rope.modules_of(self.model) else None
        self._takes = set(inspect.signature(self.model.forward).parameters)
        self._cache = next((name for name in CACHES if name in self._takes), CACHES[-1])  # what transformers calls it

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """See `Generator.generate`. Raises ValueError for tokens outside the vocabulary, an empty prompt or a negative
        seed; RuntimeError for logits that are not numbers."""
        asked = check_request(prompts, sampling, seeds, known=self.model.get_input_embeddings().weight.shape[0])
        streams = [uniform(seed, sampling.max_new_tokens) for seed in seeds]
        found: dict[int, Completion] = {}
        order = sorted(range(len(asked)), key=lambda i: (len(asked[i]), asked[i]))
        while order:
            # Each batch is cut when it runs: the first padded one tells whether there may be more.
            rows = self._next_batch(order, asked, sampling.max_new_tokens)
            order = order[len(rows) :]
            parts = self._batch([asked[i] for i in rows], sampling, np.stack([streams[i] for i in rows]))
            found.update(zip(rows, parts))
        return [found[i] for i in range(len(asked))]

    # -- batches -----------------------------------------------------------------------------------------------

    def _next_batch(self, order: list[int], prompts: list[tuple[int, ...]], new: int) -> list[int]:
        rows: list[int] = []
        for i in order:
            full = (len(prompts[i]) + new) * (len(rows) + 1) > self.batch_tokens  # the last is the longest
            apart = self.pads is False and rows and len(prompts[i]) != len(prompts[rows[0]])
            if rows and (full or apart):
                break
            rows.append(i)
        return rows

    def _batch(self, prompts: list[tuple[int, ...]], sampling: Sampling, uniforms: np.ndarray) -> list[Completion]:
        """Completions of the prompts, sorted by length; uniforms [rows, max_new_tokens]."""
        different = list(dict.fromkeys(prompts))
        if self.pads is None and len(different[0]) < len(different[-1]):
            self.pads = self._padding_is_exact(different)
        if self.pads or len(different[0]) == len(different[-1]):
            return self._decode(prompts, different, sampling, uniforms)
        # Only the batch that told: each length on its own.
        out: list[Completion] = []
        for length in dict.fromkeys(map(len, prompts)):
            rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            same = [prompt for prompt in different if len(prompt) == length]
            out += self._decode([prompts[i] for i in rows], same, sampling, uniforms[rows])
        return out

    def _decode(
        self, prompts: list[tuple[int, ...]], different: list[tuple[int, ...]], sampling: Sampling, uniforms: np.ndarray
    ) -> list[Completion]:
        device = self.model.get_input_embeddings().weight.device
        place = {prompt: i for i, prompt in enumerate(different)}
        rows = torch.tensor([place[prompt] for prompt in prompts], device=device)
        logits, cache, mask = self._prefill(different)
        if len(different) < len(prompts):
            cache.reorder_cache(rows)
            logits = logits.index_select(0, rows)
            mask = None if mask is None else mask.index_select(0, rows)
        drawn = torch.from_numpy(uniforms).to(device)
        stop = torch.tensor(sampling.stop, dtype=torch.int64, device=device)
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        stopped = [False] * len(prompts)
        alive = list(range(len(prompts)))
        for step in range(sampling.max_new_tokens):
            chosen, scored = draw(logits[:, : self.vocabulary], drawn[:, step], sampling.temperature)
            ended = torch.isin(chosen, stop)
            table = torch.stack([chosen.double(), scored.double(), ended.double()], -1).tolist()  # one transfer
            for i, (token, logprob, end) in zip(alive, table):
                tokens[i].append(int(token))
                logprobs[i].append(logprob)
                stopped[i] = bool(end)
            if step + 1 == sampling.max_new_tokens or all(stopped[i] for i in alive):
                break
            if any(stopped[i] for i in alive):
                keep = torch.tensor([j for j, i in enumerate(alive) if not stopped[i]], device=device)
                alive = [i for i in alive if not stopped[i]]
                cache.reorder_cache(keep)
                chosen, drawn = chosen.index_select(0, keep), drawn.index_select(0, keep)
                mask = None if mask is None else mask.index_select(0, keep)
            mask = None if mask is None else F.pad(mask, (0, 1), value=1)
            logits, cache = self._forward(chosen[:, None], mask, cache)
        return [
            Completion(
                tokens=tuple(tokens[i]),
                logprobs=tuple(logprobs[i]),
                finish="stop" if stopped[i] else "length",
                version=self.version,
            )
            for i in range(len(prompts))
        ]

    # -- the model ---------------------------------------------------------------------------------------------

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Any, Tensor | None]:
        """Logits [rows, vocabulary] after each prompt, the cache, and the mask [rows, longest] where there is padding
        (on the left)."""
        device = self.model.get_input_embeddings().weight.device
        longest = max(map(len, prompts))
        ids = torch.tensor([(prompt[0],) * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = None
        if any(len(prompt) < longest for prompt in prompts):
            padding = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=device)
            mask = (torch.arange(longest, device=device) >= padding).long()
        logits, cache = self._forward(ids, mask, None)
        if not hasattr(cache, "reorder_cache"):
            raise ValueError(
                f"{type(self.model).__name__} returned no key-value cache that can be reordered "
                f"({type(cache).__name__}); the own generator needs one"
            )
        return logits, cache, mask

    def _forward(self, ids: Tensor, mask: Tensor | None, cache: Any) -> tuple[Tensor, Any]:
        given: dict[str, Any] = {"input_ids": ids, "use_cache": True, self._cache: cache}
        if mask is not None:
            given["attention_mask"] = mask
            if "position_ids" in self._takes:
                given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = 1
        if "output_router_logits" in self._takes:  # else an auxiliary loss is made of them, by masks of whole batches
            given["output_router_logits"] = False
        out = self.model(**given)
        return out.logits[:, -1], getattr(out, self._cache, None)

    def _padding_is_exact(self, prompts: list[tuple[int, ...]]) -> bool:
        """Whether the shortest prompt has the same distribution, of the next token and of one after it, alone and on
        the left of the longest, up to rounding."""
        pair, found = [prompts[0], prompts[-1]], []
        for batch in ([pair[0]], pair):
            logits, cache, mask = self._prefill(batch)
            mask = None if mask is None else F.pad(mask, (0, 1), value=1)
            ids = torch.tensor([prompt[-1:] for prompt in batch], device=logits.device)
            after, _ = self._forward(ids, mask, cache)
            found.append(torch.stack([logits[0], after[0]])[:, : self.vocabulary])
        alone, padded = (F.log_softmax(each.double(), -1) for each in found)
        difference = float((alone - padded).abs().max())
        allowed = float(torch.finfo(found[0].dtype).eps) ** 0.5 * max(1.0, float(found[0].abs().max()))
        if difference <= allowed:
            return True
        LOGGER.warning(
            "%s is not the same model with padding on the left (log-probabilities differ by %.2g, rounding allows "
            "%.2g); prompts of different lengths are generated apart, which is slower",
            type(self.model).__name__,
            difference,
            allowed,
        )
        return False


# -- pieces ----------------------------------------------------------------------------------------------------


def uniform(seed: int, count: int) -> np.ndarray:
    """`count` numbers of [0, 1), fp64, from the seed alone; fewer numbers are the same ones' beginning."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).random(count)


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One token of each row of logits [rows, V]: (int64 [rows], log-probabilities [rows], fp32 or fp64 of fp64).

    uniforms fp64 [rows]: where in the running sum of probabilities a row's token lies. Temperature 0 takes the most
    probable token, the first of equals, and its log-probability at temperature 1. Raises RuntimeError for NaN.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    every = F.log_softmax(wide if temperature in (0, 1) else wide / temperature, -1)
    chosen = every.argmax(-1) if temperature == 0 else _inverse(every, uniforms)
    logprobs = every.gather(-1, chosen[:, None])[:, 0]
    if not bool(torch.isfinite(logprobs).all()):
        raise RuntimeError("the model's logits are not numbers (NaN or infinite): the weights have diverged")
    return chosen, logprobs


def _inverse(every: Tensor, uniforms: Tensor) -> Tensor:
    chosen = []
    rows = max(1, DRAW_ELEMENTS // every.shape[-1])
    for some, u in zip(every.split(rows), uniforms.split(rows)):
        running = (some.double().exp() * GRAIN).round().long().cumsum(-1)
        total = running[:, -1:]
        below = (u[:, None] * total).long().minimum(total - 1)  # the product may round up to the total
        chosen.append(torch.searchsorted(running, below, right=True)[:, 0].clamp(max=every.shape[-1] - 1))
    return torch.cat(chosen)


def true_vocabulary(model: Any) -> int:
    """How many of the output table's rows are tokens, as in `longspan.score`."""
    return min(model.get_output_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)


def plain_copy(model: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Any:
    """A copy in eval mode whose parameters need no gradient. Raises ValueError for what is not a plain causal LM.

    dtype casts parameters alone, as FSDP's mixed precision does: RoPE's frequencies are a buffer, and in bf16 they
    would put far tokens at other positions.
    """
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ValueError(f"a generator runs a plain Hugging Face causal LM, not {type(model).__name__}")
    if getattr(model, STATE, None) is not None:
        raise ValueError("a generator runs the plain model; make it before longspan.parallelize, from the same weights")
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    if dtype is not None:
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return copied if device is None else torch.nn.Module.to(copied, device)


def copy_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Copies a whole state dict into a plain model, cast to its dtype. A tied weight may come under any one of its
    names. Raises ValueError, and copies nothing, for names that are missing or unknown, and for other shapes."""
    own = dict(model.state_dict(keep_vars=True))
    unknown = sorted(set(weights) - set(own))
    given = {id(own[name]) for name in weights if name in own}
    missing = sorted(name for name, tensor in own.items() if name not in weights and id(tensor) not in given)
    if unknown or missing:
        raise ValueError(
            f"these are not the weights of {type(model).__name__}: {len(missing)} missing {_few(missing)}, "
            f"{len(unknown)} unknown {_few(unknown)}; give the plain model's state dict"
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, the generator's is {tuple(own[name].shape)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def _few(names: list[str]) -> str:
    return f"({', '.join(names[:3])}{', ..' if len(names) > 3 else ''})" if names else ""
