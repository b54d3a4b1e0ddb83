"""Attention, forward and backward, on two or more CPU ranks: CPU seconds per rank, and bytes on the wire.

    python benches/attention.py [--ranks 2] [--seq 4096] [--heads 8] [--kv-heads 2] [--width 64] [--rounds 9]

Contestants, interleaved in every round (A B C .. then .. C B A), one thread per rank, fp32, causal:

    longspan exchange, longspan ulysses
    torch ring      torch's own ring attention template, driven by the CPU flash op (its public `context_parallel`
                    has no CPU path): head-tail shards, keys and values all-gathered, dK/dV by ring
    one rank        the same op over the whole sequence on one rank; its time is divided by the number of ranks

Before anything is timed, every contestant's output and gradients are compared with the one-rank op. Times are
`time.process_time()` of the busiest rank: CPU seconds, which a busy machine stretches less than wall time; the load
average is printed. Aims: exchange / (one rank / ranks) <= 1.05, exchange / torch ring <= 0.97 at 2 ranks and 4,096.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from longspan import ContextParallel, attend

ATEN = torch.ops.aten


class TorchRing(torch.autograd.Function):
    """torch's private ring templates around the CPU flash op."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mesh: Any) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        def op(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_: Any) -> tuple[Tensor, ...]:
            return ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

        out, lse, *_ = ring._templated_ring_attention(mesh, 2, op, query=q, key=k, value=v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mesh = mesh
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        q, k, v, out, lse = ctx.saved_tensors

        def op(
            grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
            is_causal: bool = False, **_: Any,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            return ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, key, value, out, logsumexp, 0.0, is_causal
            )

        grads = ring._templated_ring_attention_backward(
            ctx.mesh, 2, op, grad_out=gradient, grad_out_name="grad_out", query=q, key=k, value=v, out=out,
            logsumexp=lse, is_causal=True,
        )  # fmt: skip
        return (*grads[:3], None)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def draw(args: argparse.Namespace) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [args.heads, args.kv_heads, args.kv_heads, args.heads]
    return [torch.randn(1, heads, args.seq, args.width) for heads in shapes]


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=args.ranks, timeout=timedelta(minutes=5))
    mesh = dist.init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, layout="head_tail").bind(args.seq)
    q, k, v, gradient = draw(args)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    local = [cp.cut(t, 2).contiguous().requires_grad_() for t in (q, k, v)]
    gradient_local = cp.cut(gradient, 2).contiguous()

    def split(scheme: str) -> Callable[[], Tensor]:
        stages = args.stages if scheme == "exchange" else None
        return lambda: attend(*local, cp=cp, scheme=scheme, stages=stages)

    contestants: dict[str, tuple[Callable[[], Tensor], list[Tensor], Tensor]] = {
        "exchange": (split("exchange"), local, gradient_local),
        "ulysses": (split("ulysses"), local, gradient_local),
    }
    if args.seq % (2 * args.ranks) == 0:
        contestants["torch ring"] = (lambda: TorchRing.apply(*local, cp.group), local, gradient_local)
    contestants["one rank"] = (lambda: flash(*whole), whole, gradient)

    def run(name: str) -> tuple[float, list[Tensor]]:
        call, leaves, grad = contestants[name]
        for leaf in leaves:
            leaf.grad = None
        dist.barrier()
        start = time.process_time()
        out = call()
        out.backward(grad)
        seconds = time.process_time() - start
        return seconds, [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    truth = [cp.cut(t, 2) for t in run("one rank")[1]]
    for name in contestants:
        if name != "one rank":
            for found, wanted in zip(run(name)[1], truth):
                error = float((found - wanted).abs().max() / wanted.abs().max())
                if error > 5e-6:
                    raise SystemExit(f"{name} differs from one rank by {error:.1e}")
    sent = {}
    for scheme in ("exchange", "ulysses"):
        before = cp.traffic.bytes_sent
        run(scheme)
        sent[scheme] = cp.traffic.bytes_sent - before
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(args.rounds):
        for name in list(contestants) if round_ % 2 == 0 else list(contestants)[::-1]:
            seconds = torch.tensor(run(name)[0], dtype=torch.float64)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            times[name].append(float(seconds))
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps({"times": times, "sent": sent}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("seq", 4096), ("heads", 8), ("kv-heads", 2), ("width", 64), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stages", type=int, help="fetch stages of exchange; default as attend() chooses")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        mp.start_processes(work, (args, folder), nprocs=args.ranks, start_method="spawn")
        result = json.loads(Path(folder, "times.json").read_text())
    times = result["times"]
    ideal = [t / args.ranks for t in times["one rank"]]
    print(
        f"attention forward+backward, {args.seq} tokens, {args.heads}/{args.kv_heads} heads of {args.width}, fp32, "
        f"{args.ranks} ranks, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':12}{'CPU s (min)':>12}{'median':>9}{'max':>9}{'/ ideal':>9}{'MB sent':>9}")
    rows = {}
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, ideal))
        row = [min(seconds), statistics.median(seconds), max(seconds), ratio]
        rows[name] = {"cpu_seconds": seconds, "ratio_to_ideal": ratio, "bytes_sent": result["sent"].get(name)}
        bytes_sent = result["sent"].get(name)
        print(f"{name:12}{row[0]:12.3f}{row[1]:9.3f}{row[2]:9.3f}{ratio:9.3f}", end="")
        print(f"{bytes_sent / 1e6:9.2f}" if bytes_sent else "")
    if "torch ring" in times:
        paired = statistics.median(a / b for a, b in zip(times["exchange"], times["torch ring"]))
        rows["exchange / torch ring"] = paired
        print(f"exchange / torch ring, median of pairs: {paired:.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
