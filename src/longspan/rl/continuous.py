"""Continuous batching: transformers' own paged engine, for prompts and completions of ragged lengths on a GPU.

A manager is made for every call of `generate`, holds pages for that call's sequences, and is destroyed at its end.
What that and the explicit settings below are for, as transformers 5.24 has it (generation/continuous_batching):

    sizes        without num_blocks and max_batch_tokens it takes 60-90 % of the memory that is free: here they follow
                 from the request, up to `batch_tokens`
    prefixes     prompts share pages by their tokens alone: pages of old weights would be used again after an update.
                 They do not outlive a call here
    samplers     top-k and top-p are applied before the log-probabilities: here the only processor is temperature, and
                 any other raises
    failures     a request that fails is a result with `error` set, and a loop that dies ends early: both raise here
    random state it seeds and uses torch's global generators: saved and put back, but meanwhile nothing else may use
                 them
    attention    it may switch to a flash kernel, fetched over the network: not here; `attention` chooses
    padding      it draws from the rows of a padded output table too: such a model is refused
    features     paged attention leaves out what it does not know (Gemma 2's capped scores, say): the longest
                 completion of the first call is scored by the model's own forward, and a difference raises

Draws are not a function of a sequence's seed: there is one stream for all sequences. A whole call is repeatable: the
same prompts and seeds in the same order, by the same weights. Requests are queued before the loop starts, so that its
batches do not depend on timing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, TemperatureLogitsWarper

from longspan.rl.own import CopyHolder, true_vocabulary
from longspan.rl.rollout import Completion, Sampling, check_request
from longspan.scoring import row_fields

NO_TOKEN = -1  # where transformers wants a token that ends a completion, and there is none


class ContinuousGenerator(CopyHolder):
    """Completions by a copy of `model`.

    Args:
        model: a plain Hugging Face causal LM whose attention is sdpa, eager or flash. It is copied.
        dtype, device: of the copy's parameters; None: the model's. Where a trainer computes in bf16, so should this.
        attention: sets the copy's attention, as `attn_implementation` does; None: the model's. On a GPU
            "flash_attention_2" is what makes this fast.
        batch_tokens: how many tokens the cache holds; sequences wait where it is full.
        step_tokens: tokens of one forward pass, prompts included.
        page_tokens: of a cache page.
        seconds: without any completion for this long, `generate` gives up.
        version: of the weights it has now.

    Raises ValueError for a split model, and for one with a padded output table.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        attention: str | None = None,
        batch_tokens: int = 2**16,
        step_tokens: int = 1024,
        page_tokens: int = 32,
        seconds: float = 600.0,
        version: int = 0,
    ) -> None:
        if min(batch_tokens, step_tokens) < 1 or page_tokens < 4 or not seconds > 0:
            raise ValueError("batch_tokens and step_tokens must be positive, page_tokens at least 4, seconds above 0")
        super().__init__(model, dtype, device, version)
        rows, vocabulary = self.model.get_output_embeddings().weight.shape[0], true_vocabulary(self.model)
        if rows > vocabulary:
            raise ValueError(
                f"{type(model).__name__} has {rows} output rows for {vocabulary} tokens, and continuous batching draws "
                "from all of them; use the own generator, or a model whose output table is not padded"
            )
        if attention is not None:
            self.model.set_attn_implementation(attention)
        self.batch_tokens, self.step_tokens, self.page_tokens = batch_tokens, step_tokens, page_tokens
        self.seconds = seconds
        self._checked = False

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """See `Generator.generate`, and above what the seeds are worth. Raises ValueError for requests that cannot be
        run, RuntimeError with the prompt's number for one that failed."""
        asked = check_request(prompts, sampling, seeds, known=self.model.get_input_embeddings().weight.shape[0])
        if not asked:
            return []
        with _random_state(), self._manager(asked, sampling, seeds) as manager:
            names = manager.add_requests([list(prompt) for prompt in asked], max_new_tokens=sampling.max_new_tokens)
            manager.start()
            results = self._results(manager, names)
        completions = [self._completion(i, results[name], sampling) for i, name in enumerate(names)]
        if not self._checked:
            longest = max(range(len(asked)), key=lambda i: len(completions[i].tokens))
            self._check(asked[longest], completions[longest], sampling.temperature)
        return completions

    @contextmanager
    def _manager(self, prompts: list[tuple[int, ...]], sampling: Sampling, seeds: Sequence[int]) -> Iterator[Any]:
        pages = [-(-(len(prompt) + sampling.max_new_tokens) // self.page_tokens) for prompt in prompts]
        room = self.batch_tokens // self.page_tokens
        if max(pages) > room:
            raise ValueError(
                f"a prompt and its completion take {max(pages)} pages of {self.page_tokens} tokens; batch_tokens = "
                f"{self.batch_tokens} has room for {room}"
            )
        batching = ContinuousBatchingConfig(
            page_size=self.page_tokens,
            num_blocks=min(room, sum(pages)),
            max_batch_tokens=min(self.step_tokens, max(len(prompts), sum(map(len, prompts)))),
            max_requests_per_batch=min(self.step_tokens, len(prompts)),
            return_logprobs=True,
            seed=int(np.random.SeedSequence(list(seeds)).generate_state(1)[0]),
            auto_switch_to_flash=False,
            use_cuda_graph=False,
        )
        greedy = sampling.temperature == 0
        generation = GenerationConfig(
            do_sample=not greedy,
            temperature=1.0 if greedy else sampling.temperature,
            top_k=None,
            top_p=None,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop) or [NO_TOKEN],
        )
        manager = self.model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
        try:
            others = [p for p in manager.logit_processor.logits_processor if type(p) is not TemperatureLogitsWarper]
            if others:
                raise RuntimeError(
                    f"transformers put {type(others[0]).__name__} before the sampler, which changes the distribution; "
                    "remove it from the model's generation config"
                )
            yield manager
        finally:
            if manager.is_running():
                manager.stop(block=True, timeout=self.seconds, hard_stop=True)
            if not manager.is_running():  # else it hangs, and so would this
                manager.destroy()

    def _results(self, manager: Any, names: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        last = time.monotonic()
        while len(found) < len(names):
            running = manager.is_running()  # asked before: what a loop that ended left behind is still taken
            result = manager.get_result(timeout=0.1)
            if result is not None:
                if result.is_finished():
                    found[result.request_id] = result
                    last = time.monotonic()
                continue
            missing = [i for i, name in enumerate(names) if name not in found]
            if not running:
                fatal = manager.background_thread_status.fatal_error
                raise RuntimeError(
                    f"continuous batching ended without prompts {missing[:8]} ({len(missing)} of {len(names)}): {fatal}"
                )
            if time.monotonic() - last > self.seconds:
                raise RuntimeError(
                    f"continuous batching finished nothing for {self.seconds} s; prompts {missing[:8]} "
                    f"({len(missing)} of {len(names)}) are missing"
                )
        return found

    def _completion(self, i: int, result: Any, sampling: Sampling) -> Completion:
        tokens, logprobs = tuple(result.generated_tokens), tuple(result.logprobs)
        if result.error is not None:
            raise RuntimeError(f"continuous batching failed on prompt {i}: {result.error}")
        if not tokens or len(tokens) != len(logprobs):
            raise RuntimeError(
                f"continuous batching returned {len(tokens)} tokens and {len(logprobs)} log-probabilities "
                f"for prompt {i}"
            )
        finish: Literal["stop", "length"] = "stop" if tokens[-1] in sampling.stop else "length"
        return Completion(tokens=tokens, logprobs=logprobs, finish=finish, version=self.version)

    def _check(self, prompt: tuple[int, ...], completion: Completion, temperature: float) -> None:
        ids = torch.tensor([prompt + completion.tokens], device=self.model.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        targets = ids[0, len(prompt) :, None]
        plain = row_fields(logits, targets, temperature=temperature or 1.0, top_k=0, entropy=False)["logprobs"][:, 0]
        paged = torch.tensor(completion.logprobs, dtype=torch.float64)
        difference = float((plain.double().cpu() - paged).abs().max())
        # The engine's softmax is in fp32.
        allowed = max(torch.finfo(each).eps for each in (logits.dtype, torch.float32)) ** 0.5
        if not difference <= allowed:
            raise RuntimeError(
                f"continuous batching is not {type(self.model).__name__}: its log-probabilities differ by "
                f"{difference:.2g} from the model's own forward, rounding allows {allowed:.2g}; transformers' paged "
                "attention leaves out a part of this model. Use the own generator or a server"
            )
        self._checked = True


@contextmanager
def _random_state() -> Iterator[None]:
    """torch's global random state is afterwards what it was, on every device: seeding one seeds them all."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
