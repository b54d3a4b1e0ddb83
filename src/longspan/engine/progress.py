"""What rank 0 shows while it trains: a bar on a terminal, else a plain line every few steps, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 5.0


def training_note(record: dict[str, Any]) -> str:
    note = (
        f"loss {record['loss']:.4f}  grad {record['grad_norm']:.3f}  lr {record['lr']:.2e}  "
        f"{record['tokens_per_second']:,.0f} tokens/s"
    )
    return note + (f"  validation {record['validation_loss']:.4f}" if "validation_loss" in record else "")


class Progress:
    """note: what is said of a step's record."""

    def __init__(
        self, step: int, steps: int, *, shown: bool, note: Callable[[dict[str, Any]], str] = training_note
    ) -> None:
        self.note = note
        self.shown = shown
        self.steps = steps
        self.bar: Bar | None = None
        self.said = 0.0
        if shown and sys.stderr.isatty():
            self.bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self.task = self.bar.add_task("train", total=steps, completed=step, note="")
            self.bar.start()

    def update(self, record: dict[str, Any]) -> None:
        note = self.note(record)
        if self.bar is not None:
            self.bar.update(self.task, completed=record["step"], note=note)
        elif self.shown and (time.monotonic() - self.said > SECONDS_BETWEEN_LINES or record["step"] == self.steps):
            self.said = time.monotonic()
            print(f"step {record['step']}/{self.steps}  {note}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
