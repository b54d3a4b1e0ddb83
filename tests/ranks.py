"""A warm pool of gloo ranks for tests.

Four processes are forked once from a fork server that has torch and transformers loaded. A job is a top-level
function of a test module; each job gets a process group of its own over a file rendezvous, so jobs share nothing.
A rank that raises ends the job for all: the pool is killed (peers may sit in a collective) and made anew.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import uuid
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

SIZE = 4
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
JOB_SECONDS = 300


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        body, size, rendezvous, args = job
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            torch.manual_seed(0)
            result = body(*args)
            dist.barrier()
            dist.destroy_process_group()
            pipe.send(("ok", result))
        except BaseException as error:  # noqa: BLE001 - carried to the parent, which raises it
            pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class Pool:
    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.llama"]
        )
        self.workers: list[Any] = []

    def start(self) -> None:
        for rank in range(SIZE):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def stop(self) -> None:
        for process, pipe in self.workers:
            process.kill()
            process.join()
            pipe.close()
        self.workers = []

    def run(self, body: Any, size: int, *args: Any) -> list[Any]:
        """Runs `body(*args)` in ranks 0 .. size-1; returns their results by rank."""
        if not self.workers:
            self.start()
        rendezvous = os.path.join(tempfile.gettempdir(), f"longspan-{uuid.uuid4().hex}")
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:size])}
        for pipe in pipes:
            pipe.send((body, size, rendezvous, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + JOB_SECONDS
        try:
            while len(results) < size:
                waiting = [pipe for pipe, rank in pipes.items() if rank not in results]
                ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(pipes[pipe] for pipe in waiting)
                    self.stop()
                    raise RankError(f"ranks {missing} did not answer within {JOB_SECONDS} s")
                for pipe in ready:
                    rank = pipes[pipe]
                    try:
                        state, value = pipe.recv()
                    except EOFError:
                        self.stop()
                        raise RankError(f"rank {rank} died (a collective with mismatched sizes aborts)") from None
                    if state == "error":
                        self.stop()
                        raise RankError(f"rank {rank} raised {value}")
                    results[rank] = value
        finally:
            if os.path.exists(rendezvous):
                os.unlink(rendezvous)
        return [results[rank] for rank in range(size)]
