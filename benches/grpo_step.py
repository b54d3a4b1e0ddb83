"""One GRPO step on split sequences against the same step on one rank, figure by figure, in fp32.

    python benches/grpo_step.py [--tokens 4096] [--ranks 2] [--layout head_tail]

The step: two fixed micro-batches of --tokens positions each, padding included; the first is a batch [8, tokens / 8],
padded on the left, the second a list of sequences. Per token: advantages, a mask, and old, generator and reference
log-probabilities near the model's own, some of the generator's not finite. The recipe has everything on: clip with
unequal bounds, truncated importance sampling, KL, entropy bonus.

Exit status 1 if a figure differs by more than 1e-6 of its value, or if a second run of the split step differs from the
first in one bit of a figure or a gradient. Aims: docs/losses.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

BOUND = 1e-6
ROWS = 8
VOCABULARY = 512
Step = list[dict[str, Any]]  # a micro-batch each
FIGURES = ("loss", "gradient norm", "entropy", "clipped fraction", "ratio mean", "log-probability difference")


def model(layers: int = 2, width: int = 128) -> torch.nn.Module:
    """The same weights on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, initializer_range=0.05,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def recipe() -> Any:
    from longspan.losses import Correction, preset

    return preset(
        "grpo",
        options={"clip_low": 0.2, "clip_high": 0.28},
        correction=Correction("tis"),
        kl_coefficient=0.05,
        entropy_coefficient=0.01,
    )


def fixed_step(tokens: int) -> Step:
    """Two micro-batches: sequences of three quarters to all of a row, and data near what `model()` gives them."""
    import longspan

    g = torch.Generator().manual_seed(1)
    length, step = tokens // ROWS, []
    for padded in (True, False):
        sizes = torch.randint(3 * length // 4, length + 1, (ROWS,), generator=g).tolist()
        parts = [torch.randint(0, VOCABULARY, (size,), generator=g) for size in sizes]
        with torch.no_grad():
            now = longspan.score(model(), parts).logprobs
        data: dict[str, list[Tensor]] = {name: [] for name in ("mask", "advantages", "old", "generator", "reference")}
        for lp in now:
            noise = torch.randn(4, len(lp), generator=g)
            mask = (torch.arange(len(lp)) >= len(lp) // 4) & (torch.rand(len(lp), generator=g) < 0.9)
            mask[-1] = False
            old = lp + 0.2 * noise[0]
            generator = torch.where(torch.rand(len(lp), generator=g) < 0.99, old + 0.1 * noise[1], -torch.inf)
            values = (mask, torch.randn(1, generator=g) + 0.3 * noise[2], old, generator, lp + 0.2 * noise[3])
            for name, value in zip(data, values):
                data[name].append(value)
        micro_batch: dict[str, Any] = {"sequences": parts}
        if padded:
            ids, mask = torch.zeros(ROWS, length, dtype=torch.int64), torch.zeros(ROWS, length, dtype=torch.int64)
            for row, part in enumerate(parts):
                ids[row, length - len(part) :], mask[row, length - len(part) :] = part, 1
            micro_batch = {"sequences": ids, "attention_mask": mask}
            data = {
                name: [torch.nn.functional.pad(each, (length - len(each), 0)) for each in rows]
                for name, rows in data.items()
            }
        step.append({**micro_batch, "data": data})
    return step


def run(net: torch.nn.Module, step: Step, group: Any = None) -> tuple[dict[str, float], list[Tensor]]:
    """(figures, gradients) of the step. group: the context-parallel ranks that `net` is split over."""
    import longspan
    from longspan import losses

    rule, every = recipe(), [losses.tokens(**each["data"]) for each in step]
    over = losses.denominator(rule, losses.count(rule, every))
    net.zero_grad()
    total, difference, sums = 0.0, 0.0, dict[str, float]()
    for each, t in zip(step, every):
        given = {name: value for name, value in each.items() if name != "data"}
        scores = longspan.score(net, **given, entropy=True)
        logprobs = losses.flatten(scores.logprobs)
        out = losses.policy_loss(rule, t, logprobs, losses.flatten(scores.entropy))
        longspan.check_loss(out.loss, net)
        (out.loss / over).backward()
        total += float(out.loss.detach().double() / over)
        kept = losses.filtered(rule, t).mask
        difference += float((logprobs.detach() - t.generator).double().abs()[kept].sum())
        for name, value in out.metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    longspan.ContextParallel(group).reduce_gradients(net)
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    norm = float(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt())
    means = losses.summarize(sums)
    values = (total, norm, means["entropy"], means["clipped"], means["ratio"], difference / means["tokens"])
    return {**dict(zip(FIGURES, values)), "tokens": means["tokens"]}, gradients


def compare(tokens: int, layout: str = "head_tail") -> dict[str, Any]:
    """Both steps on this rank, the split one twice over all ranks of the world."""
    import longspan

    step = fixed_step(tokens)
    one, one_gradients = run(model(), step)
    net = longspan.parallelize(model(), dist.group.WORLD, layout=layout)
    split, gradients = run(net, step, dist.group.WORLD)
    again, again_gradients = run(net, step, dist.group.WORLD)
    pairs = list(zip(gradients, again_gradients, strict=True))
    return {
        "one": one,
        "split": split,
        "relative": {name: abs(split[name] - one[name]) / abs(one[name]) for name in FIGURES},
        "gradient": max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, one_gradients, strict=True)),
        "repeats": split == again and all(torch.equal(a, b) for a, b in pairs),
    }


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=args.ranks, timeout=timedelta(minutes=5))
    result = compare(args.tokens, args.layout)
    results: list[Any] = [None] * args.ranks
    dist.all_gather_object(results, result)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def fine(result: dict[str, Any]) -> bool:
    return result["repeats"] and all(value <= BOUND for value in result["relative"].values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="positions of a micro-batch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", default="head_tail")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        mp.start_processes(work, (args, folder), nprocs=args.ranks, start_method="spawn")
        results = json.loads(Path(folder, "results.json").read_text())
    result = results[0]
    learned, split = f"{result['one']['tokens']:,.0f} tokens learned from", f"cp {args.ranks}, {args.layout}"
    print(f"two micro-batches of {args.tokens:,} positions, {learned}; fp32, torch {torch.__version__}")
    print(f"{'':28}{'one rank':>16}{split:>22}{'relative difference':>22}")
    for name in FIGURES:
        print(f"{name:28}{result['one'][name]:16.9f}{result['split'][name]:22.9f}{result['relative'][name]:22.1e}")
    print(f"largest difference of a parameter's gradient, over its norm: {result['gradient']:.1e}")
    print(f"a second run is the same to the bit: {'yes' if result['repeats'] else 'NO'}")
    return 0 if all(fine(each) for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
