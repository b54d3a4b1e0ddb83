"""A process that speaks vLLM's or SGLang's HTTP protocol, as far as a trainer needs it, and runs a small model.

    python tests/fake_server.py --kind vllm|sglang --model FOLDER --port-file FILE

It listens on a port that the system chooses, and writes it to FILE. Like the real ones it knows pausing, keeps a prefix
cache (here: whole answers, so that old ones show), loads weights from disk, fills missing parameters from
generation_config.json, and draws by top-p where it is told to. POST /misbehave {"how": ..} makes it go wrong:

    slow, trickle, error, words, cut, long, short, missing, unlike, retokenize, abort, eos, top_p, raw, stale, sticky,
    refuse, version
"""

import argparse
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longspan.rl.own import OwnGenerator, draw
from longspan.rl.rollout import Sampling


class Model:
    """The model behind the endpoints; one request at a time."""

    def __init__(self, folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.generator = OwnGenerator(model)
        defaults = Path(folder, "generation_config.json")
        self.defaults = json.loads(defaults.read_text()) if defaults.exists() else {}
        self.lock = threading.Lock()
        self.running = threading.Event()
        self.running.set()
        self.cache = {}
        self.version = "default"
        self.how = ""
        self.calls = []

    def load(self, folder, version=None):
        weights = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            weights.update(load_file(file))
        if self.how != "stale":
            self.generator.update_weights(weights, 0)
        self.version = version or self.version

    def flush(self):
        if self.how != "sticky":
            self.cache.clear()

    def complete(self, prompt, sampling, seed, top_p):
        key = (tuple(prompt), sampling, seed, top_p)
        self.running.wait()
        with self.lock:
            if key not in self.cache:
                self.cache[key] = self._complete(prompt, sampling, seed, top_p)
            return self.cache[key]

    def _complete(self, prompt, sampling, seed, top_p):
        if top_p == 1 and self.how != "raw":
            (made,) = self.generator.generate([prompt], sampling, [seed])
            return list(made.tokens), list(made.logprobs), made.finish
        # Slowly, token by token: with top-p, or with log-probabilities from before the temperature.
        tokens, logprobs, model = [], [], self.generator.model
        uniforms = torch.rand(
            sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        for uniform in uniforms:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[:, -1].float()
            ordered, ids = (logits / sampling.temperature).softmax(-1).sort(descending=True)
            allowed = torch.zeros_like(ordered, dtype=torch.bool).scatter(1, ids, ordered.cumsum(-1) - ordered < top_p)
            token, logprob = draw((logits / sampling.temperature).masked_fill(~allowed, -math.inf), uniform[None], 1.0)
            tokens.append(int(token))
            logprobs.append(float(F.log_softmax(logits, -1)[0, token]) if self.how == "raw" else float(logprob))
            if tokens[-1] in sampling.stop:
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"


def spoil(how, tokens, logprobs, finish):
    """An answer as a broken server gives it."""
    if how == "cut":
        return tokens[:-1], logprobs, finish
    if how == "long":
        return tokens * 9, logprobs * 9, finish
    if how == "missing":
        return tokens, [*logprobs[:-1], None], finish
    if how == "short":
        return tokens[:1], logprobs[:1], "length"
    if how == "eos":
        return tokens[:1], logprobs[:1], "stop"
    if how == "abort":
        return tokens, logprobs, "abort"
    return tokens, logprobs, finish


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body):
        payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        try:
            if self.server.model.how == "trickle":
                for byte in payload:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)
            else:
                self.wfile.write(payload)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up, as it should

    def do_POST(self):
        model, path = self.server.model, self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if path == "/misbehave":
            model.how = body["how"]
            return self.answer(200, {})
        if path == "/calls":
            return self.answer(200, model.calls)
        model.calls.append(path)
        if model.how == "error":
            return self.answer(500, {"error": {"message": "CUDA out of memory"}})
        if model.how == "words":
            return self.answer(200, "<html>a proxy's greeting</html>")
        endpoint = getattr(self, f"{self.server.kind}_{path.strip('/').replace('/', '_')}", None)
        if endpoint is None:
            return self.answer(404, {"detail": "Not Found"})
        slow = model.how == "slow"
        done = endpoint(model, body)
        if slow:  # only the answer: what is asked for later must not be undone by what was asked for now
            time.sleep(3)
        return self.answer(*done)

    def make(self, model, prompt, given, *, most, seed):
        """The completion that the parameters ask for; what they leave out is the model's default."""

        def parameter(name, otherwise):
            value = given.get(name)
            return model.defaults.get(name, otherwise) if value is None else value

        stop = tuple(given.get("stop_token_ids") or ())
        if not given.get("ignore_eos"):
            stop += (model.generator.model.config.eos_token_id,)
        sampling = Sampling(temperature=parameter("temperature", 1.0), max_new_tokens=given[most], stop=stop)
        top_p = 0.3 if model.how == "top_p" else parameter("top_p", 1.0)
        prompt = [*prompt, 5] if model.how == "retokenize" else prompt
        return prompt, *spoil(model.how, *model.complete(prompt, sampling, given.get(seed) or 0, top_p))

    # -- vLLM

    def vllm_v1_completions(self, model, body):
        prompt, tokens, logprobs, finish = self.make(model, body["prompt"], body, most="max_tokens", seed="seed")
        choice = {"index": 0, "text": "", "finish_reason": finish, "stop_reason": None, "logprobs": None}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [f"token_id:{token}" for token in tokens]}
        if body.get("return_token_ids"):
            choice |= {"token_ids": tokens, "prompt_token_ids": prompt}
        if model.how == "unlike":
            choice["logprobs"] = None
        return 200, {"id": "cmpl-0", "object": "text_completion", "choices": [choice]}

    def vllm_pause(self, model, body):
        model.running.clear()
        return 200, {"status": "paused"}

    def vllm_resume(self, model, body):
        model.running.set()
        return 200, {"status": "resumed"}

    def vllm_reset_prefix_cache(self, model, body):
        model.flush()
        return 200, {"success": model.how != "refuse"}

    def vllm_collective_rpc(self, model, body):
        if body["method"] != "reload_weights":
            return 400, {"detail": "unknown method"}
        model.load(body["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    # -- SGLang

    def sglang_generate(self, model, body):
        given = body["sampling_params"]
        prompt, tokens, logprobs, finish = self.make(
            model, body["input_ids"], given, most="max_new_tokens", seed="sampling_seed"
        )
        meta = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "weight_version": model.version}
        meta["finish_reason"] = {"type": finish, "matched": tokens[-1]}
        if body.get("return_logprob") and model.how != "unlike":
            named = [*tokens, 0]
            meta["output_token_logprobs"] = [[logprob, named[i], None] for i, logprob in enumerate(logprobs)]
        return 200, {"text": "", "output_ids": tokens, "meta_info": meta}

    def sglang_pause_generation(self, model, body):
        model.running.clear()
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def sglang_continue_generation(self, model, body):
        model.running.set()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def sglang_flush_cache(self, model, body):
        model.flush()
        return (400 if model.how == "refuse" else 200), "Cache flushed."

    def sglang_update_weights_from_disk(self, model, body):
        if not Path(body["model_path"], "config.json").is_file():
            return 400, {"success": False, "message": "no config.json"}
        model.load(body["model_path"], None if model.how == "version" else body.get("weight_version"))
        if body.get("flush_cache", True):
            model.flush()
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port-file", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ThreadingHTTPServer.request_queue_size = 128  # as real servers, not 5
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.kind, server.model = options.kind, Model(options.model)
    draft = Path(options.port_file + ".tmp")
    draft.write_text(str(server.server_address[1]))
    draft.rename(options.port_file)
    server.serve_forever()


if __name__ == "__main__":
    main()
