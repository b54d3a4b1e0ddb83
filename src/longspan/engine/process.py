"""What a run sets for its process, and puts back: threads, determinism, seeds, signals."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from longspan.config import TrainConfig


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Random state as a function of its arguments: nothing to save, the same after a resume."""
    words = np.random.SeedSequence([seed, step, dp_rank]).generate_state(2, dtype=np.uint32)
    torch.manual_seed(int(words[0]) << 31 ^ int(words[1]))


@contextmanager
def numerics(train: TrainConfig) -> Iterator[None]:
    """Deterministic algorithms where asked for, and no warnings about torch by torch; puts back what the run
    changed in this process."""
    before = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    level = logging.getLogger("longspan").level
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            # FSDP2 and DDP call names that torch itself has deprecated: nothing a user could act on
            warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*is deprecated", category=FutureWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.set_num_threads(threads)
        logging.getLogger("longspan").setLevel(level)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """SIGTERM and SIGUSR1 set the event instead of ending the process; handlers are put back."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers; the caller keeps its own
        return
    names = [signal.SIGTERM, signal.SIGUSR1]  # the second is what SLURM sends ahead of a time limit
    before = [signal.signal(name, lambda *_: stop.set()) for name in names]
    try:
        yield stop
    finally:
        for name, handler in zip(names, before):
            signal.signal(name, handler)


def cpu_threads(asked: int, local_ranks: int) -> int:
    """Threads of this rank: as asked, else its share of the cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked or max(1, cores // local_ranks)
