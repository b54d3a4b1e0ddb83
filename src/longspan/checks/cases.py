"""Batches that bite: each is small, and each shows a kind of fault that losses on plain text hide.

odd length         rows that no rank count divides, every token a target: borders, order, label shift
left padding       positions and mask must both be right (padding on the right hides a dropped mask)
right padding      the last rank may hold padding only
packed positions   documents by restarting position_ids, one of them a single token
packed bounds      the same documents by cu_seq_lens_q and _k
one target         a single target in the batch, on the last rank: counts, gradients that cross ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.scoring import IGNORE

LENGTH = 37


@dataclass(frozen=True)
class Case:
    """A whole batch as a caller gives it, labels included."""

    name: str
    inputs: dict[str, Any]
    documents: tuple[int, ...] = ()  # lengths: the truth is then each document run alone

    @property
    def starts(self) -> list[int]:
        """First positions of the documents."""
        return [sum(self.documents[:i]) for i in range(len(self.documents))]

    @property
    def unlabelled(self) -> dict[str, Any]:
        return {k: v for k, v in self.inputs.items() if k not in ("labels", "shift_labels")}

    def real(self) -> Tensor | None:
        """bool [B, S]: tokens that are not padding; None if all are."""
        mask = self.inputs.get("attention_mask")
        return None if not isinstance(mask, Tensor) or mask.ndim != 2 else mask.bool()


def make_cases(tokens: Tensor) -> list[Case]:
    """All kinds, cut from a stream of tokens (int64 [n], n >= 2 * length): the rows hold length = n // 2 tokens."""
    length = len(tokens) // 2
    two = tokens[: 2 * length].view(2, length)
    return [
        Case("odd length", {"input_ids": two, "labels": two}),
        _padded("left padding", two, left=True),
        _padded("right padding", two, left=False),
        *_packed(two[:1]),
        _one_target(two),
    ]


def random_tokens(vocabulary: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Tokens for `make_cases`, none of them among the first three or the last fifth, where special tokens live."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(3, vocabulary - 1), max(4, vocabulary * 4 // 5), (2 * length,), generator=generator)


def _padded(name: str, two: Tensor, *, left: bool) -> Case:
    length = two.shape[1]
    mask = torch.ones_like(two)
    holes = (length * 3 // 5, length // 5)  # one row is padding for more than half of its length
    for row, hole in enumerate(holes):
        if left:
            mask[row, :hole] = 0
        else:
            mask[row, length - hole :] = 0
    ids = two.where(mask.bool(), torch.zeros_like(two))
    labels = ids.where(mask.bool(), IGNORE)
    if left:  # the first real token would be predicted from padding, which some kernels let see everything
        for row, hole in enumerate(holes):
            labels[row, hole] = IGNORE
    return Case(name, {"input_ids": ids, "attention_mask": mask, "labels": labels})


def _packed(row: Tensor) -> list[Case]:
    length = row.shape[1]
    first = (length // 3, 1, length // 4)
    documents = (*first, length - sum(first))
    starts = Case("", {}, documents).starts
    labels = row.clone()
    labels[:, starts] = IGNORE  # no document's last token predicts the next one's first
    positions = torch.cat([torch.arange(n) for n in documents])[None]
    bounds = torch.tensor([*starts, length], dtype=torch.int32)
    batch = {"input_ids": row, "labels": labels}
    return [
        Case("packed positions", {**batch, "position_ids": positions}, documents),
        Case("packed bounds", {**batch, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}, documents),
    ]


def _one_target(two: Tensor) -> Case:
    labels = torch.full_like(two, IGNORE)
    labels[0, -1] = two[0, -1]
    return Case("one target", {"input_ids": two, "labels": labels})
