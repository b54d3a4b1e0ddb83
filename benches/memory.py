"""Peak live bytes of a training step per rank, as the sequence grows: whole model, forward and backward.

    python benches/memory.py [--ranks 1,2,4] [--seq 1024,2048,4096] [--scheme exchange]

Counted are the storages that operations return and that are alive at once (parameters and their gradients excluded),
seen through a dispatch mode: deterministic, and independent of the machine and of allocators. Workspace inside a
kernel is not seen. The slope is bytes per token between the shortest and the longest sequence. The vocabulary is
small, so that the head (which longspan chunks and the plain model does not) does not flatter the result.
Aim: slope at N ranks <= 1.1 / N of the slope at one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Live(TorchDispatchMode):
    """Bytes of storages that operations returned and that still exist, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.now = self.peak = 0

    def ignore(self, tensor: torch.Tensor) -> None:
        self.known[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes()
        self.known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.now -= self.known.pop(key, 0)


def model(length: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=length,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def work(rank: int, ranks: int, args: argparse.Namespace, folder: str) -> None:
    import longspan

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init = f"file://{folder}/rendezvous{ranks}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    peaks = []
    for length in args.seq:
        net = longspan.parallelize(model(length), dist.group.WORLD, scheme=args.scheme)
        ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(1))
        net(input_ids=ids[:, :64], labels=ids[:, :64], use_cache=False).loss.backward()  # gradients exist now
        live = Live()
        for parameter in net.parameters():
            live.ignore(parameter)
            live.ignore(parameter.grad)
        with live:
            net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peak = torch.tensor(live.peak)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        peaks.append(int(peak))
        dist.barrier()
    if rank == 0:
        Path(folder, "peaks.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--seq", type=numbers, default=[1024, 2048, 4096])
    parser.add_argument("--scheme", default="exchange")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    peaks: dict[int, list[int]] = {}
    for ranks in args.ranks:
        with TemporaryDirectory() as folder:
            mp.start_processes(work, (ranks, args, folder), nprocs=ranks, start_method="spawn")
            peaks[ranks] = json.loads(Path(folder, "peaks.json").read_text())
    print(f"peak live bytes of the busiest rank, {args.scheme}, torch {torch.__version__}")
    lengths = "".join(f"{length:>14,}" for length in args.seq)
    print(f"{'ranks':>6}{lengths}{'bytes/token':>14}{'x ranks/one':>13}")
    slopes = {n: (p[-1] - p[0]) / (args.seq[-1] - args.seq[0]) for n, p in peaks.items()}
    for n, row in peaks.items():
        relative = slopes[n] * n / slopes[args.ranks[0]] / args.ranks[0]
        print(f"{n:6}" + "".join(f"{peak:14,}" for peak in row) + f"{slopes[n]:14,.0f}{relative:13.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "peaks": peaks, "slopes": slopes}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
