"""Shared prefixes once, against every sequence in full: `score` forward and backward on two CPU ranks.

    python benches/prefix.py [--prompt 4096] [--response 1024] [--group 8] [--rounds 2] [--fit]

A Llama of 2 layers, width 256, 4/2 heads of 64, MLP 1024, vocabulary 1024, fp32, one thread per rank. A group of
responses to one prompt, whose responses are scored; contestants interleaved in every round, order reversed every second
round. Times are `time.process_time()` of the busiest rank; the load average is printed. Before anything is timed, both
contestants' log-probabilities and gradients are compared.

Counted, not timed: tokens through the layers and attention pairs (`longspan.report`, summed over ranks), and
floating-point operations of matrix products outside attention, in the forward (torch's counter, summed over ranks).
Ideal for a prompt P and g responses R: tokens g (P + R) / (P + g R), pairs g (P + R)^2 / (P^2 + g (2 P R + R^2)).
Aim: 0.9 of the ideal saving in tokens; no case slower with share_prefixes=True than without.

--fit measures groups of short sequences with prefixes of several lengths, shared whether that is predicted to pay or
not, and prints what a block costs each rank, in tokens (`prefix_tree.block_cost_on`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import longspan

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 16384,
    "use_cache": False,
}
FITTED = (8, 16, 32, 64, 128)  # prefixes
SHORT = 32, 32  # sequences, own tokens of each


def group(prompt: int, response: int, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sequences that part at the first token of their responses, and next-token targets of the responses."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(0, 1024, (prompt,), generator=generator)
    sequences, targets = [], []
    for i in range(count):
        own = torch.randint(0, 1024, (response,), generator=generator)
        own[0] = i
        sequences.append(torch.cat([shared, own]))
        ignored = torch.full((max(prompt - 1, 0),), -100)
        targets.append(torch.cat([ignored, own if prompt else own[1:], torch.tensor([-100])]))
    return sequences, targets


class Contest:
    """Score with and without sharing on this rank."""

    def __init__(self, mesh: Any, scheme: str) -> None:
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**CONFIG)).train()
        longspan.parallelize(self.model, mesh, scheme=scheme)
        self.cp = longspan.ContextParallel(mesh)

    def run(self, data: Any, share: bool, *, count: bool = False) -> dict[str, Any]:
        self.model.zero_grad(set_to_none=True)
        flops = FlopCounterMode(display=False)
        dist.barrier()
        start = time.process_time()
        if count:
            with flops:
                scores = longspan.score(self.model, *data, share_prefixes=share)
        else:
            scores = longspan.score(self.model, *data, share_prefixes=share)
        loss = -torch.stack([each.sum() for each in scores.logprobs]).sum() / sum(map(len, data[0]))
        forward = time.process_time()
        loss.backward()
        seconds = torch.tensor([time.process_time() - start, forward - start], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        report = longspan.report(self.model)
        kinds = {str(op): n for op, n in flops.get_flop_counts().get("Global", {}).items()}
        linear = sum(n for op, n in kinds.items() if "attention" not in op)
        counted = torch.tensor([report["tokens"], report["pairs"], linear, report["bytes_sent"]], dtype=torch.float64)
        dist.all_reduce(counted)
        return {"seconds": seconds.tolist(), "counted": counted.tolist(), "layout": report["layout"], "scores": scores}

    def compare(self, data: Any) -> dict[str, Any]:
        """Both, checked against each other: what they count."""
        both, grads = [], []
        for share in (False, True):
            both.append(self.run(data, share, count=True))
            self.cp.reduce_gradients(self.model)
            grads.append([p.grad for p in self.model.parameters() if p.grad is not None])
        worst = max(float((a - b).norm() / a.norm()) for a, b in zip(*grads))
        logprobs = zip(*(each.pop("scores").logprobs for each in both))
        apart = max(float((a - b).detach().abs().max()) for a, b in logprobs)
        if worst > 1e-4 or apart > 1e-4:
            raise SystemExit(f"sharing changes gradients by {worst:.1e}, log-probabilities by {apart:.1e}")
        return {"counted": [each["counted"] for each in both], "layout": [each["layout"] for each in both]}

    def time(self, data: Any, rounds: int) -> list[list[list[float]]]:
        times: list[list[list[float]]] = [[], []]
        for i in range(rounds):
            for share in (False, True) if i % 2 == 0 else (True, False):
                times[share].append(self.run(data, share)["seconds"])
        return times


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=args.ranks, timeout=timedelta(minutes=5))
    mesh = dist.init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))["cp"]
    contest = Contest(mesh, args.scheme)
    results: dict[str, Any] = {}
    if args.fit:
        always = mock.patch("longspan.models.score.worth_sharing", lambda *_, **__: True)
        with always, mock.patch("longspan.models.score.block_cost_on", lambda device: 0):
            for prefix in FITTED:
                data = group(prefix, SHORT[1], SHORT[0])
                results[str(prefix)] = {**contest.compare(data), "times": contest.time(data, args.rounds)}
    else:
        cases = {
            "a group": (group(args.prompt, args.response, args.group), args.rounds),
            "just worth sharing": (group(12, 32, 32), 3 * args.rounds),
            "one common token": (group(1, 256, 32), 3 * args.rounds),
            "nothing in common": (group(0, 1024, 8), 3 * args.rounds),
        }
        for name, (data, rounds) in cases.items():
            results[name] = {**contest.compare(data), "times": contest.time(data, rounds)}
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = ("ranks", 2), ("prompt", 4096), ("response", 1024), ("group", 8), ("rounds", 2)
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--scheme", choices=("auto", "exchange", "ulysses"), default="auto")
    parser.add_argument("--fit", action="store_true", help="measure the cost of a block")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        mp.start_processes(work, (args, folder), nprocs=args.ranks, start_method="spawn")
        results = json.loads(Path(folder, "results.json").read_text())
    print(
        f"score, forward+backward, flat / shared; {args.ranks} ranks, {args.scheme}, torch {torch.__version__}, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'':22}{'tokens':>8}{'pairs':>8}{'linear':>8}{'MB flat':>9}{'shared':>8}{'CPU s flat':>12}{'shared':>8}",
        end="",
    )
    print(f"{'ratio':>8}{'min':>7}{'max':>7}  layouts")
    for name, found in results.items():
        flat, shared = found["counted"]
        tokens, pairs, linear = (a / b for a, b in zip(flat[:3], shared[:3]))
        a, b = ([total for total, _ in each] for each in found["times"])
        ratios = [x / y for x, y in zip(a, b)]
        print(f"{name:22}{tokens:8.3f}{pairs:8.3f}{linear:8.3f}{flat[3] / 1e6:9.1f}{shared[3] / 1e6:8.1f}", end="")
        print(f"{statistics.median(a):12.3f}{statistics.median(b):8.3f}{statistics.median(ratios):8.3f}", end="")
        print(f"{min(ratios):7.3f}{max(ratios):7.3f}  {' '.join(found['layout'])}")
    if args.fit:
        count = SHORT[0]
        for name, found in results.items():
            prefix = int(name)
            a, b = ([total for total, _ in each] for each in found["times"])
            saved = statistics.median(x - y for x, y in zip(a, b))
            # Per token of the flat run, outside attention; a flat run of n sequences has n blocks, the tree 2 n + 1.
            per_token = statistics.median(a) * args.ranks / (count * (prefix + SHORT[1]))
            cost = ((count - 1) * prefix - saved * args.ranks / per_token) / (count + 1) / args.ranks
            print(f"prefix {prefix}: a block costs {cost:.0f} tokens on each rank")
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
