"""What a run says about itself: one JSON object per step, TensorBoard on request, FLOPs, memory.

FLOPs of one step, forward and backward: 6 per active weight and token for the matrices (the input embedding is a
look-up and does not count unless it is also the head), and for attention `12 * heads * head_dim` per layer and
visible pair of query and key: two products of 2 FLOPs forward, twice that backward. Pairs are counted from the
documents, causal, within each layer's window. Recomputation is not counted: MFU is about useful work.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from longspan.layout import Span
from longspan.rule import Rule

# dense bf16 FLOP/s by a part of the device's name, the more special first
PEAK_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GB200": 2450e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "H800": 989e12,
    "H20": 148e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
    "MI250X": 191e12,
}


class MetricsLog:
    """Appends records to `metrics.jsonl`, after dropping what lies beyond the step the run starts from."""

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool) -> None:
        path = folder / "metrics.jsonl"
        truncate(path, after_step)
        self.file = path.open("a")
        self.board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # an optional dependency

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self.board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def truncate(path: Path, after_step: int) -> None:
    """Drops the records of a JSON Lines file that lie beyond a step, and a line that was not finished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # the line a killed run did not finish
        if record["step"] <= after_step:
            kept.append(line + "\n")
    draft = path.with_name(f".{path.name}.unfinished")
    draft.write_text("".join(kept))
    os.replace(draft, path)


def visible_pairs(length: int, *, window: int | None = None, chunk: int | None = None) -> int:
    """Causal pairs of a document: query i sees itself and what is before it, at most `window` keys, or of its chunk."""
    rule = Rule.causal()
    if window is not None:
        rule = rule.windowed(window)
    if chunk is not None:
        rule = rule.chunked(chunk)
    whole = Span(0, length)
    return rule.pairs(whole, whole)


def layer_pairs(config: PretrainedConfig, documents: Iterable[int]) -> int:
    """Causal pairs of documents of these lengths, summed over the attention layers."""
    lengths = list(documents)
    limits = Counter(_limits(config))
    return sum(
        count * sum(visible_pairs(length, window=window, chunk=chunk) for length in lengths)
        for (window, chunk), count in limits.items()
    )


def _limits(config: PretrainedConfig) -> list[tuple[int | None, int | None]]:
    """Per attention layer its (window, chunk); None is no limit."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = window if getattr(config, "use_sliding_window", True) else None
        return [(sliding, None)] * config.num_hidden_layers
    known = {"full_attention": (None, None), "sliding_attention": (window, None), "chunked_attention": (None, chunk)}
    return [known[kind] for kind in kinds if kind in known]


def active_weights(model: PreTrainedModel) -> int:
    """Weights that multiply a token: all but the input embedding, of experts only the share that is chosen."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = chosen / experts if experts and chosen else 1.0
    count = sum(
        p.numel() * (share if ("expert" in name and p.ndim > 2) or ".experts." in name else 1.0)
        for name, p in model.named_parameters()
    )
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    if head is None or head.weight is not table.weight:
        count -= table.weight.numel()
    return int(count)


def step_flops(model: PreTrainedModel, weights: int, tokens: int, documents: Iterable[int]) -> float:
    """Model FLOPs of one step over documents of these lengths; see the module's text."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 6.0 * weights * tokens + 12.0 * heads * width * layer_pairs(config, documents)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of one device, where the table knows it and the work is in bf16."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16.items() if part in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank has held: allocated on its GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
