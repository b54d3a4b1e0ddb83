"""Generation by a vLLM or SGLang server over HTTP: tokens in, tokens out, weights by safetensors on disk.

What is followed (read, not run: this was written without a GPU; the tests speak the same protocol):

    vLLM    main of August 2026 (0.26 and on): POST /v1/completions with the prompt's ids, `return_token_ids` and
            `logprobs`; and, of its development endpoints (VLLM_SERVER_DEV_MODE=1), /pause, /collective_rpc with the
            worker's `reload_weights(weights_path=)`, /reset_prefix_cache, /resume.
            Start it with --logprobs-mode processed_logprobs, or its log-probabilities are those before the temperature.
    SGLang  docs/advanced_features/sglang_for_rl.md and docs/basic_usage/sampling_params.md of August 2026 (0.5):
            POST /generate with `input_ids` and `return_logprob`; /pause_generation, /update_weights_from_disk,
            /flush_cache, /continue_generation.

An update: rank 0 writes the weights to a folder of their version, in the layout and with the names of the hub, and
tells every server to pause, load, drop its prefix cache and go on; how that went is told to all ranks, and raises on
all of them. A server that failed stays paused: nobody knows which weights it has.

Every request sends every parameter that shapes the distribution, because servers fill what is missing from the
model's generation_config.json; end-of-sequence is left to `Sampling.stop` alone. Every answer is checked: the prompt
it was for, as many log-probabilities as tokens, an end that was asked for, a version that is known. What cannot be
seen in an answer (old weights, a sampler that renormalises, log-probabilities before the temperature) shows in
`probe`, after each update.

vLLM draws from a generator of each request's seed. SGLang does where it was started with
--enable-deterministic-inference, and ignores the seed elsewhere. In both, logits depend on the batch by rounding.
"""

from __future__ import annotations

import copy
import http.client
import json
import math
import shutil
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from longspan.engine.checkpoint import write_weights
from longspan.rl.rollout import Completion, Sampling, check_request

TRIES = 3  # of a completion whose connection breaks

Post = Callable[[str, Any], Any]  # path, body -> answer; raises RuntimeError


class Answer(NamedTuple):
    """What a server said about one prompt."""

    tokens: Any
    logprobs: Any
    finish: Any
    prompt: Any  # the prompt's ids or their number, as the server saw them; None: not told
    version: Any  # of the weights; None: not told


@dataclass(frozen=True)
class Api:
    """How one kind of server is spoken to."""

    name: str
    path: str
    request: Callable[[Sequence[int], Sampling, int], dict[str, Any]]
    read: Callable[[Any], Answer]
    update: Callable[[Post, Path, int], None]
    cure: str  # for endpoints that are not there


class ServerGenerator:
    """Completions by one or several servers of one kind that hold the same model.

    Args:
        kind: "vllm" or "sglang".
        urls: of the servers, "http://host:port"; requests go around, updates go to all.
        config: of the model, for the folders of weights and the size of its vocabulary.
        folder: where versions are written, for servers to read: on a file system that they share.
        rank: the rank that this is; 0 does the talking in `update_weights`. None: this process's.
        concurrency: how many requests are open at once.
        seconds: a request that is not answered in full by then has failed. Completions may be long.
        update_seconds: the same for each call of an update.
        keep: how many versions stay in the folder.
        dtype: what weights are written in, None: as they come.
        headers: sent with every request (authorization, say).

    All ranks call `update_weights` alike and wait for rank 0: the process group's timeout must be longer than writing
    and loading the weights take. Raises RuntimeError, with server, endpoint, status and cure, for whatever goes wrong.
    """

    def __init__(
        self,
        kind: Literal["vllm", "sglang"],
        urls: Sequence[str],
        *,
        config: PretrainedConfig,
        folder: Path | str,
        rank: int | None = None,
        concurrency: int = 64,
        seconds: float = 1800.0,
        update_seconds: float = 600.0,
        keep: int = 2,
        dtype: torch.dtype | None = None,
        headers: Mapping[str, str] | None = None,
        version: int = 0,
    ) -> None:
        if kind not in APIS:
            raise ValueError(f"servers are of kind {' or '.join(APIS)}, got {kind!r}")
        if isinstance(urls, str) or not urls:
            raise ValueError(f"urls are a list of at least one, got {urls!r}")
        for url in urls:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
                raise ValueError(f"a server's url is http://host:port, without a path, got {url!r}")
        if min(concurrency, keep) < 1 or not min(seconds, update_seconds) > 0:
            raise ValueError("concurrency and keep are at least 1, seconds and update_seconds above 0")
        self.api = APIS[kind]
        self.urls = list(urls)
        self.config = copy.deepcopy(config)
        self.folder = Path(folder).absolute()
        self.rank = (dist.get_rank() if dist.is_initialized() else 0) if rank is None else rank
        self.concurrency, self.seconds, self.update_seconds = concurrency, seconds, update_seconds
        self.keep, self.dtype = keep, dtype
        self.headers = dict(headers or {})
        self.version = version
        self._told: str | None = None  # the version that servers were told, which they may repeat

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """See `Generator.generate`. One request per prompt, `concurrency` at once."""
        asked = check_request(prompts, sampling, seeds, known=self.config.get_text_config().vocab_size)

        def one(i: int) -> Completion:
            url = self.urls[i % len(self.urls)]
            server = f"{self.api.name} server {url}{self.api.path}, prompt {i}"
            body = self.api.request(asked[i], sampling, seeds[i])
            answer = self._post(url, self.api.path, body, what=f", prompt {i}", seconds=self.seconds, tries=TRIES)
            try:
                read = self.api.read(answer)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise RuntimeError(
                    f"{server}: the answer has not the fields that were asked for ({error!r}): {_short(answer)}"
                ) from error
            return self._checked(server, read, asked[i], sampling)

        with ThreadPoolExecutor(self.concurrency, "rollout") as pool:
            futures = [pool.submit(one, i) for i in range(len(asked))]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Rank 0 writes `folder/version-N` and tells the servers; every rank returns, or raises, the same."""
        problem: list[str | None] = [None]
        if self.rank == 0:
            try:
                place = self._write(weights, version)
                for url in self.urls:
                    self.api.update(partial(self._post, url, seconds=self.update_seconds), place, version)
            except Exception as error:  # noqa: BLE001 - whatever it is, every rank raises it
                problem[0] = f"weights of version {version}: {error}"
        if dist.is_initialized():
            dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise RuntimeError(problem[0])
        self.version, self._told = version, str(version)

    def close(self) -> None:
        """Nothing is held; servers and folders stay."""

    # -- answers -----------------------------------------------------------------------------------------------

    def _checked(self, server: str, answer: Answer, prompt: tuple[int, ...], sampling: Sampling) -> Completion:
        tokens, logprobs, vocabulary = answer.tokens, answer.logprobs, self.config.get_text_config().vocab_size
        if answer.prompt is not None and answer.prompt not in (list(prompt), len(prompt)):
            raise RuntimeError(
                f"{server}: the server ran another prompt than the {len(prompt)} tokens it was sent: "
                f"{_short(answer.prompt)}; it must neither add nor cut tokens"
            )
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(t) is int and 0 <= t < vocabulary for t in tokens)
        ):
            raise RuntimeError(f"{server}: no list of tokens from 0 to {vocabulary - 1} came back: {_short(tokens)}")
        if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
            count = len(logprobs) if isinstance(logprobs, list) else "no"
            raise RuntimeError(f"{server}: {count} log-probabilities came back for {len(tokens)} tokens")
        missing = [i for i, p in enumerate(logprobs) if not isinstance(p, int | float) or not math.isfinite(p)]
        if missing:
            raise RuntimeError(
                f"{server}: the log-probability of token {missing[0]} is {logprobs[missing[0]]!r} "
                f"({len(missing)} of {len(tokens)})"
            )
        if self._told is not None and answer.version is not None and str(answer.version) != self._told:
            raise RuntimeError(
                f"{server}: the server has weights of version {answer.version}, and was told {self._told}; an update "
                "did not reach it, or another trainer uses it"
            )
        ended = tokens[-1] in sampling.stop
        early = [i for i, token in enumerate(tokens[:-1]) if token in sampling.stop]
        if len(tokens) > sampling.max_new_tokens or early:
            raise RuntimeError(
                f"{server}: {len(tokens)} tokens came back; {sampling.max_new_tokens} at most were asked for, and the "
                f"end at the first of {sampling.stop}{f', which is token {early[0]}' if early else ''}"
            )
        if answer.finish not in ("stop", "length") or (answer.finish == "stop" and not ended):
            raise RuntimeError(
                f"{server}: the completion ended by {answer.finish!r} after {len(tokens)} tokens with {tokens[-1]}, "
                f"which is no stop token {sampling.stop}; aborted, or the server has stop conditions of its own"
            )
        if not ended and len(tokens) < sampling.max_new_tokens:
            raise RuntimeError(
                f"{server}: the completion ended after {len(tokens)} of {sampling.max_new_tokens} tokens; prompt and "
                "completion are longer than the server's context. Start it with a longer one, or ask for fewer tokens"
            )
        return Completion(
            tokens=tuple(tokens),
            logprobs=tuple(map(float, logprobs)),
            finish="stop" if ended else "length",
            version=self.version,
        )

    # -- updates -----------------------------------------------------------------------------------------------

    def _write(self, weights: Mapping[str, Tensor], version: int) -> Path:
        place = self.folder / f"version-{version:08d}"
        write_weights(place, weights, self.config, dtype=self.dtype)
        for old in sorted(self.folder.glob("version-*"))[: -self.keep]:
            if old != place:
                shutil.rmtree(old)
        return place

    # -- http --------------------------------------------------------------------------------------------------

    def _post(
        self, url: str, path: str, body: dict[str, Any] | None, *, seconds: float, what: str = "", tries: int = 1
    ) -> Any:
        server = f"{self.api.name} server {url}{path}{what}"
        try:
            status, reason, text = _post_again(url, path, body, seconds, self.headers, tries)
        except TimeoutError as error:
            raise RuntimeError(
                f"{server}: no full answer within {seconds} s; raise the limit if it needs longer, or look at its log"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(
                f"{server} cannot be talked to ({error!r}); is it running, and is this its address?"
            ) from error
        if status != 200:
            cure = f"; {self.api.cure}" if status in (404, 405) else ""
            raise RuntimeError(f"{server} answered {status} {reason}: {_short(text)}{cure}")
        try:
            answer = json.loads(text) if text.strip() else None
        except json.JSONDecodeError:
            answer = text  # some endpoints answer in words
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RuntimeError(f"{server} did not do it: {_short(answer)}")
        return answer


def _post_again(
    url: str, path: str, body: dict[str, Any] | None, seconds: float, headers: Mapping[str, str], tries: int
) -> tuple[int, str, str]:
    """`post`, tried again where the connection was refused or broke: many requests at once overrun a server's queue."""
    for number in range(1, tries):
        try:
            return post(url, path, body, seconds, headers)
        except ConnectionError:
            time.sleep(0.1 * number)
    return post(url, path, body, seconds, headers)


def post(
    url: str, path: str, body: dict[str, Any] | None, seconds: float, headers: Mapping[str, str]
) -> tuple[int, str, str]:
    """(status, reason, text) of a POST of JSON. Raises TimeoutError unless all of it is there after `seconds`."""
    parts = urllib.parse.urlsplit(url)
    deadline = time.monotonic() + seconds
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(str(parts.hostname), parts.port, timeout=seconds)
    try:
        payload = b"" if body is None else json.dumps(body).encode()
        connection.request("POST", path, payload, {"Content-Type": "application/json", **headers})
        sock = connection.sock
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        response = connection.getresponse()
        pieces = []
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{seconds} s are over")
            sock.settimeout(left)  # a timeout of sockets is for each read, not for all of them
            piece = response.read1(2**16)
            if not piece:
                break
            pieces.append(piece)
        return response.status, response.reason, b"".join(pieces).decode("utf-8", errors="replace")
    finally:
        connection.close()


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"{text[:300]}.."


# -- vLLM ------------------------------------------------------------------------------------------------------


def _vllm_request(prompt: Sequence[int], sampling: Sampling, seed: int) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": seed % 2**63,
        "stop_token_ids": list(sampling.stop),
        "n": 1,
        "logprobs": 0,  # of the token that was drawn, and of no other
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # no need to decode them
        "add_special_tokens": False,
        "stream": False,
        "echo": False,
        # What a generation_config.json would fill in.
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "ignore_eos": True,
    }


def _vllm_read(answer: Any) -> Answer:
    (choice,) = answer["choices"]
    return Answer(
        tokens=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
        finish=choice["finish_reason"],
        prompt=choice.get("prompt_token_ids"),
        version=None,
    )


def _vllm_update(post: Post, place: Path, version: int) -> None:
    post("/pause", None)
    weights = {"weights_path": str(place), "is_checkpoint_format": True}
    post("/collective_rpc", {"method": "reload_weights", "kwargs": weights})
    post("/reset_prefix_cache", None)
    post("/resume", None)


# -- SGLang ----------------------------------------------------------------------------------------------------


def _sglang_request(prompt: Sequence[int], sampling: Sampling, seed: int) -> dict[str, Any]:
    return {
        "input_ids": list(prompt),
        "return_logprob": True,
        "logprob_start_len": -1,  # none of the prompt's
        "stream": False,
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "sampling_seed": seed % 2**31,
            "stop_token_ids": list(sampling.stop),
            "n": 1,
            # What a generation_config.json would fill in.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_new_tokens": 0,
            "ignore_eos": True,
        },
    }


def _sglang_read(answer: Any) -> Answer:
    meta = answer["meta_info"]
    table = meta["output_token_logprobs"]  # [log-probability, id, text] each
    tokens = answer["output_ids"] if "output_ids" in answer else [row[1] for row in table]
    if [row[1] for row in table] != tokens[: len(table)]:
        raise ValueError("output_ids and output_token_logprobs name different tokens")
    return Answer(
        tokens=tokens,
        logprobs=[row[0] for row in table],
        finish=meta["finish_reason"]["type"],
        prompt=meta.get("prompt_tokens"),
        version=meta.get("weight_version"),
    )


def _sglang_update(post: Post, place: Path, version: int) -> None:
    post("/pause_generation", {"mode": "abort"})
    weights = {"model_path": str(place), "weight_version": str(version), "flush_cache": True}
    post("/update_weights_from_disk", weights)
    post("/flush_cache", None)
    post("/continue_generation", {})


APIS = {
    "vllm": Api(
        "vLLM",
        "/v1/completions",
        _vllm_request,
        _vllm_read,
        _vllm_update,
        "weights are updated by development endpoints: start vLLM with VLLM_SERVER_DEV_MODE=1",
    ),
    "sglang": Api(
        "SGLang",
        "/generate",
        _sglang_request,
        _sglang_read,
        _sglang_update,
        "this needs SGLang 0.5 or newer, launched with its HTTP server",
    ),
}


# -- disk ------------------------------------------------------------------------------------------------------
