"""What a run sets for its process, and puts back: threads, determinism, seeds, signals, and fp64 that stays fp64."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


def seed_step(seed: int, step: int, dp_rank: int) -> None:
    """Random state as a function of its arguments: nothing to save, the same after a resume."""
    words = np.random.SeedSequence([seed, step, dp_rank]).generate_state(2, dtype=np.uint32)
    torch.manual_seed(int(words[0]) << 31 ^ int(words[1]))


@contextmanager
def numerics(*, deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms where asked for, and no warnings about torch by torch; puts back what the run
    changed in this process."""
    before = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    level = logging.getLogger("longspan").level
    if deterministic:
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


class StayFloat64(TorchFunctionMode):
    """Inside it, what is float64 is not narrowed to float32.

    Models written for half precision widen to float32 on the way (norms, softmaxes, routers), which in a float64 model
    narrows: a difference of 1e-16 then becomes one of 1e-7 wherever it flips a rounding, and curves of two correct
    runs part. Function modes are off inside backward(): what is recomputed there needs the mode anew.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wide = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if wide and function is torch.Tensor.float:
            return args[0]
        if wide and (any(each is torch.float32 for each in args) or kwargs.get("dtype") is torch.float32):
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {**kwargs, **({"dtype": torch.float64} if "dtype" in kwargs else {})}
        return function(*args, **kwargs)


def precise(dtype: torch.dtype) -> AbstractContextManager:
    """The context of forwards of a model of this dtype."""
    return StayFloat64() if dtype == torch.float64 else nullcontext()


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
