"""The causal-LM loss and per-token scores from hidden rows, in chunks, without a tensor of tokens x vocabulary.

Each chunk of rows goes through the model's own head to logits, and to a summed cross entropy or to narrow fields
(log-probabilities of targets, entropy, the top k), under recomputation: only the chunk's hidden rows are kept, and the
backward makes its logits again. Alive at once: `chunk_rows` x vocabulary logits, their fp32 copy and its softmax. Cost:
the head's matrix multiplication twice in the forward sense (4/3 of the head's time).

Losses are sums; whoever calls divides by a count taken over whole labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

    return sum(_chunks(one, rows, hidden, targets), torch.zeros((), dtype=dtype, device=hidden.device))


def _chunks(one: Callable[..., Any], rows: int, *tensors: Tensor) -> Iterator[Any]:
    """`one` of every chunk of `rows` rows of the tensors [B, n, ..], under recomputation; at least of an empty one."""
    for start in range(0, max(1, tensors[0].shape[1]), rows):
        chunk = [tensor[:, start : start + rows] for tensor in tensors]
        if torch.is_grad_enabled():
            yield checkpoint(one, *chunk, use_reentrant=False, preserve_rng_state=False)
        else:
            yield one(*chunk)


def row_fields(logits: Tensor, targets: Tensor, *, temperature: float, top_k: int, entropy: bool) -> dict[str, Tensor]:
    """What is asked of logits [.., V], after division by the temperature, in fp32 (fp64 for fp64).

    `logprobs` of targets int64 [.., K], exactly 0 and without a gradient where they are -100; `entropy` [.., 1] in
    nats; `top` and `top_ids` (int32) [.., top_k], log-probabilities and tokens, most probable first.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    every = F.log_softmax(wide if temperature == 1 else wide / temperature, -1)
    ignored = targets == IGNORE
    fields = {"logprobs": every.gather(-1, targets.masked_fill(ignored, 0)).masked_fill(ignored, 0.0)}
    if entropy:
        # Tokens that a model rules out have log-probability -inf; 0 * -inf would be NaN.
        fields["entropy"] = -(every.exp() * every.masked_fill(every == -torch.inf, 0.0)).sum(-1, keepdim=True)
    if top_k:
        fields["top"], ids = every.topk(top_k, -1)
        fields["top_ids"] = ids.int()
    return fields


def chunked_fields(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    top_k: int = 0,
    entropy: bool = False,
    rows: int | None = None,
) -> dict[str, Tensor]:
    """`row_fields` of `head(hidden)`, `rows` rows at a time (default: `chunk_rows`).

    hidden [B, n, width], targets int64 [B, n, K]; returns fields [B, n, ..]. `vocabulary`: how many logits are tokens;
    those behind them are padding of the output table and take no part. Where only log-probabilities are asked for, rows
    whose targets are all -100 do not go through the head.
    """
    shape = targets.shape[:2]
    hidden, targets = hidden.reshape(1, -1, hidden.shape[-1]), targets.reshape(1, -1, targets.shape[-1])
    count, kept = hidden.shape[1], None
    if not (top_k or entropy):
        kept = (targets[0] != IGNORE).any(-1).nonzero()[:, 0]
        hidden, targets = hidden.index_select(1, kept), targets.index_select(1, kept)

    def one(hidden_chunk: Tensor, targets_chunk: Tensor) -> dict[str, Tensor]:
        logits = head(hidden_chunk)[..., :vocabulary]
        return row_fields(logits, targets_chunk, temperature=temperature, top_k=top_k, entropy=entropy)

    pieces = list(_chunks(one, rows or chunk_rows(1, vocabulary), hidden, targets))
    fields = {name: torch.cat([piece[name] for piece in pieces], 1) for name in pieces[0]}
    if kept is not None:
        scored = fields["logprobs"]
        fields["logprobs"] = scored.new_zeros(1, count, scored.shape[-1]).index_copy(1, kept, scored)
    return {name: field.reshape(*shape, field.shape[-1]) for name, field in fields.items()}


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
