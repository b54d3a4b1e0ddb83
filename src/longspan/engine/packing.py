"""From documents to rows and batches: pack, order, collate.

A *document* is token ids plus a mask that says which of them are targets. Documents lie one after another in one
long array; a *row* is a list of *pieces*, each `[start, stop)` of that array:

    split   the stream is cut every `length` tokens, also inside a document; the part behind a cut is a document of
            its own. The tail that does not fill a row is dropped and counted.
    whole   documents stay whole and are put into rows of at most `length`, longest first, each into the fullest
            row that still has room.
    none    one document is one row.

Within a row each piece's positions start at 0, and no token is a target across pieces: `shift_labels[i]` is the
token behind `i` if both lie in the same piece and that token is a target, else -100. Rows of a micro-batch are
padded on the right to the longest; the padding is a piece without targets.

The order of an epoch is a function of (seed, epoch), and the batch of a step is a function of the number of rows
consumed before it. Neither knows the mesh: any mesh sees the same batches, and a run resumes at another one.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from longspan.config import ConfigError

log = logging.getLogger(__name__)

IGNORE = -100


@dataclass(frozen=True)
class Document:
    ids: np.ndarray  # [tokens] int32
    targets: np.ndarray  # [tokens] bool: is this token to be predicted


@dataclass(frozen=True, kw_only=True)
class Rows:
    """All rows: `pieces[offsets[r]:offsets[r + 1]]` are the `[start, stop)` of row r in `ids`."""

    ids: np.ndarray  # [tokens] int32
    targets: np.ndarray  # [tokens] bool
    pieces: np.ndarray  # [pieces, 2] int64
    offsets: np.ndarray  # [rows + 1] int64
    target_counts: np.ndarray  # [rows] int64: targets that the row really predicts
    dropped_tokens: int = 0
    dropped_documents: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, row: int) -> np.ndarray:
        """[pieces of this row] lengths."""
        pieces = self.pieces[self.offsets[row] : self.offsets[row + 1]]
        return pieces[:, 1] - pieces[:, 0]


def pack(documents: Iterable[Document], *, length: int, packing: str, too_long: str = "error") -> Rows:
    """Rows of at most `length` tokens; see the module's text for `packing` (split, whole, none)."""
    if packing == "split":
        rows = _split(list(documents), length)
    else:
        kept, dropped_tokens, dropped_documents = _fit(documents, length, too_long)
        lengths = [len(document.ids) for document in kept]
        members = best_fit(lengths, length) if packing == "whole" else [[index] for index in range(len(kept))]
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        pieces = [(starts[index], starts[index + 1]) for row in members for index in row]
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in members], dtype=np.int64)])
        rows = _rows(
            kept, np.asarray(pieces, dtype=np.int64).reshape(-1, 2), offsets, dropped_tokens, dropped_documents
        )
    idle = int((rows.target_counts == 0).sum())
    if idle:
        log.warning("%d of %d rows hold no target: they cost time and train nothing", idle, len(rows))
    if rows.dropped_tokens or rows.dropped_documents:
        log.info("packing dropped %d tokens (%d whole documents)", rows.dropped_tokens, rows.dropped_documents)
    return rows


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: rows as lists of document indices, each row's in source order, rows by first document."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(room, (lengths[index], -1))
        if at == len(room):
            free, row = capacity, len(rows)
            rows.append([])
        else:
            free, row = room.pop(at)
        rows[row].append(index)
        insort(room, (free - lengths[index], row))
    return sorted(sorted(row) for row in rows)


def _fit(documents: Iterable[Document], length: int, too_long: str) -> tuple[list[Document], int, int]:
    """(documents of at most `length` tokens, tokens dropped, documents dropped)."""
    kept: list[Document] = []
    long = dropped_tokens = dropped_documents = 0
    for number, document in enumerate(documents):
        size = len(document.ids)
        if size <= length:
            kept.append(document)
            continue
        long += 1
        if too_long == "error":
            raise ConfigError(
                f"document {number} has {size} tokens, more than data.sequence_length = {length}; raise it, or set "
                "data.too_long to drop, keep_start, keep_end or split"
            )
        if too_long == "split":
            cuts = range(0, size, length)
            kept += [Document(document.ids[cut : cut + length], document.targets[cut : cut + length]) for cut in cuts]
        elif too_long == "drop":
            dropped_documents += 1
            dropped_tokens += size
        else:
            part = slice(0, length) if too_long == "keep_start" else slice(size - length, size)
            kept.append(Document(document.ids[part], document.targets[part]))
            dropped_tokens += size - length
    if long:
        log.info("%d documents are longer than %d tokens: data.too_long = %s", long, length, too_long)
    return kept, dropped_tokens, dropped_documents


def _split(documents: list[Document], length: int) -> Rows:
    starts = np.concatenate([[0], np.cumsum([len(document.ids) for document in documents], dtype=np.int64)])
    total = int(starts[-1])
    count = total // length
    if total and not count:
        raise ConfigError(
            f"the data has {total} tokens, fewer than one row of data.sequence_length = {length}; lower it, or set "
            "data.packing = 'whole'"
        )
    borders = np.arange(count + 1, dtype=np.int64) * length
    cuts = np.unique(np.concatenate([borders, starts[starts < borders[-1]]]))
    pieces = np.stack([cuts[:-1], cuts[1:]], axis=1)
    return _rows(documents, pieces, np.searchsorted(cuts, borders), total - count * length, 0)


def _rows(documents: list[Document], pieces: np.ndarray, offsets: np.ndarray, tokens: int, whole: int) -> Rows:
    ids = np.concatenate([document.ids for document in documents] or [np.empty(0, dtype=np.int32)])
    targets = np.concatenate([document.targets for document in documents] or [np.empty(0, dtype=bool)])
    # targets up to each token, so that a piece's count is one subtraction; its first token has no predecessor
    before = np.concatenate([[0], np.cumsum(targets, dtype=np.int64)])
    in_piece = before[pieces[:, 1]] - before[np.minimum(pieces[:, 0] + 1, pieces[:, 1])]
    up_to = np.concatenate([[0], np.cumsum(in_piece)])
    return Rows(
        ids=ids,
        targets=targets,
        pieces=pieces,
        offsets=offsets,
        target_counts=up_to[offsets[1:]] - up_to[offsets[:-1]],
        dropped_tokens=tokens,
        dropped_documents=whole,
    )


@functools.lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """[rows] the order in which an epoch visits them."""
    if not shuffle:
        return np.arange(rows)
    return np.random.default_rng([seed, epoch]).permutation(rows)


def step_rows(position: int, count: int, *, rows: int, seed: int, shuffle: bool) -> np.ndarray:
    """[count] row indices of the step that starts after `position` consumed rows; runs on into the next epochs."""
    at = range(position, position + count)
    return np.asarray([epoch_order(rows, seed, place // rows, shuffle)[place % rows] for place in at], dtype=np.int64)


def collate(
    rows: Rows, indices: Sequence[int] | np.ndarray, *, pad_id: int, separate: bool = True
) -> dict[str, torch.Tensor]:
    """input_ids, labels (unshifted), shift_labels and position_ids, each [rows, longest] int64.

    Padding at the end is a document of its own; with separate=False (rows of one document, for models that do not
    read documents from positions) it goes on counting, and no real token sees it either, being before it.
    """
    width = max(int(rows.lengths(index).sum()) for index in indices)
    batch = {
        "input_ids": np.full((len(indices), width), pad_id, dtype=np.int64),
        "labels": np.full((len(indices), width), IGNORE, dtype=np.int64),
        "shift_labels": np.full((len(indices), width), IGNORE, dtype=np.int64),
        "position_ids": np.zeros((len(indices), width), dtype=np.int64),
    }
    for line, row in enumerate(indices):
        at = 0
        for start, stop in rows.pieces[rows.offsets[row] : rows.offsets[row + 1]]:
            ids = rows.ids[start:stop]
            end = at + len(ids)
            batch["input_ids"][line, at:end] = ids
            batch["position_ids"][line, at:end] = np.arange(len(ids))
            following = np.where(rows.targets[start + 1 : stop], ids[1:], IGNORE)
            batch["shift_labels"][line, at : end - 1] = following
            batch["labels"][line, at + 1 : end] = following
            at = end
        batch["position_ids"][line, at:] = np.arange(width - at) + (0 if separate else at)
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def document_lengths(rows: Rows, indices: Sequence[int] | np.ndarray, *, separate: bool = True) -> list[list[int]]:
    """Per row of the batch that `collate` makes: the lengths of its documents, padding included as the last."""
    lengths = [rows.lengths(index).tolist() for index in indices]
    width = max(sum(row) for row in lengths)
    if not separate:
        return [[width] for _ in lengths]
    return [[*row, width - sum(row)] if sum(row) < width else row for row in lengths]
