"""The causal-LM loss from hidden rows, in chunks, without a tensor of tokens x vocabulary.

Each chunk of rows goes through the model's own head to logits and a summed cross entropy, under recomputation: only
the chunk's hidden rows are kept, and the backward makes its logits again. Alive at once: `chunk_rows` x vocabulary
logits, their fp32 copy and its softmax. Cost: the head's matrix multiplication twice in the forward sense (4/3 of the
head's time).

Losses are sums; whoever calls divides by a count taken over whole labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100
CHUNK_ELEMENTS = 2**24  # of one chunk's logits: 64 MiB in fp32

Head = Callable[[Tensor], Tensor]  # hidden [B, rows, width] -> logits [B, rows, vocabulary]


def shift_left(labels: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """Targets from labels: entry t is the label of t + 1, the last entry is ignored. [B, S] -> [B, S]"""
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


def check_targets(targets: Tensor, vocabulary: int, name: str, ignore_index: int = IGNORE) -> None:
    """Raises ValueError for targets that are neither a token nor ignored: plain cross entropy would score them as
    -log Z or crash the device."""
    bad = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
    if bool(bad.any()):
        at = [int(i) for i in bad.nonzero()[0]]
        raise ValueError(
            f"{name}{at} is {int(targets[tuple(at)])}, outside the vocabulary of {vocabulary} and not {ignore_index}"
        )


def summed_cross_entropy(logits: Tensor, targets: Tensor, dtype: torch.dtype, ignore_index: int = IGNORE) -> Tensor:
    """Sum over targets of -log p(target), computed in `dtype`; ignored targets give exactly 0."""
    flat = logits.reshape(-1, logits.shape[-1]).to(dtype)
    return F.cross_entropy(flat, targets.reshape(-1), reduction="sum", ignore_index=ignore_index)


def chunk_rows(batch: int, vocabulary: int) -> int:
    """How many rows of logits make a chunk."""
    return max(1, CHUNK_ELEMENTS // max(1, batch * vocabulary))


def chunked_loss_sum(
    hidden: Tensor, targets: Tensor, head: Head, *, rows: int, dtype: torch.dtype, ignore_index: int = IGNORE
) -> Tensor:
    """Summed cross entropy of the targets under `head(hidden)`, `rows` rows at a time.

    hidden [B, n, width], targets int64 [B, n]; returns a scalar in `dtype`. No row at all is one empty chunk, so that
    every parameter of the head is part of the graph on every rank.
    """

    def one(hidden_chunk: Tensor, targets_chunk: Tensor) -> Tensor:
        return summed_cross_entropy(head(hidden_chunk), targets_chunk, dtype, ignore_index)

    total = torch.zeros((), dtype=dtype, device=hidden.device)
    for start in range(0, max(1, hidden.shape[1]), rows):
        chunk = hidden[:, start : start + rows], targets[:, start : start + rows]
        if torch.is_grad_enabled():
            total = total + checkpoint(one, *chunk, use_reentrant=False, preserve_rng_state=False)
        else:
            total = total + one(*chunk)
    return total


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | float | None = None,
    ignore_index: int = IGNORE,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' causal-LM loss, in fp32 at least: theirs narrows fp64 logits to fp32. Set it as
    `model.loss_function` to train in fp64. Without any target the loss is 0 (theirs is NaN)."""
    if shift_labels is None:
        if labels is None:
            raise ValueError("causal_lm_loss needs labels or shift_labels")
        shift_labels = shift_left(labels, ignore_index)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    total = summed_cross_entropy(logits, shift_labels.to(logits.device), dtype, ignore_index)
    count = num_items_in_batch if num_items_in_batch is not None else (shift_labels != ignore_index).sum()
    return divide(total, count)


def divide(total: Tensor, count: Tensor | int | float) -> Tensor:
    """total / count, and exactly 0 for a count of 0 (where total is 0 too)."""
    count = torch.as_tensor(count, device=total.device, dtype=total.dtype)
    return total / torch.where(count == 0, torch.ones_like(count), count)
