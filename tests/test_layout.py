import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.comm import ContextParallel
from longspan.layout import Layout, Span, balanced, causal_counts, contiguous, head_tail, make, per_document
from longspan.scoring import causal_lm_loss
from tiny import batch, build, gradient_error, gradients


def every_layout(length, size):
    yield contiguous(length, size)
    yield head_tail(length, size)
    yield per_document(length, size, [])
    rng = np.random.default_rng(length * 10 + size)
    cuts = sorted(set(rng.integers(0, length + 1, size=4).tolist()))
    yield per_document(length, size, cuts)
    yield per_document(length, size, range(length))
    yield balanced(rng.integers(0, length + 1, size=length), size)
    yield balanced(np.arange(1, length + 1), size)
    reversed_spans = tuple(reversed(contiguous(length, size).spans))
    yield Layout(length, reversed_spans, "reversed")


def test_every_position_has_one_owner_and_one_row():
    for size in range(1, 9):
        for length in range(41):
            for layout in every_layout(length, size):
                seen = {}
                for rank in range(size):
                    row = 0
                    for span in layout.spans[rank]:
                        for position in range(span.start, span.stop):
                            assert position not in seen
                            seen[position] = (rank, row)
                            row += 1
                    assert layout.rows(rank) == row == len(layout.positions(rank))
                assert sorted(seen) == list(range(length))
                for position, (rank, row) in seen.items():
                    assert layout.owner[position] == rank
                    assert layout.row[position] == row
                    assert layout.positions(rank)[row] == position
                whole = np.arange(length) * 7
                assert (whole[layout.order][layout.inverse] == whole).all()
                assert max(layout.row_counts) - min(layout.row_counts) <= 1


def test_head_tail_balances_causal_pairs():
    for size in range(1, 9):
        for length in (size * 2 * 5, 257, 1000):
            pairs = [int((head_tail(length, size).positions(rank) + 1).sum()) for rank in range(size)]
            assert max(pairs) <= min(pairs) + 2 * length
        exact = [int((head_tail(size * 20, size).positions(rank) + 1).sum()) for rank in range(size)]
        assert len(set(exact)) == 1


def test_per_document_balances_each_document():
    boundaries = [0, 64, 100, 900]
    layout = per_document(1000, 4, boundaries)
    starts = np.searchsorted(boundaries, np.arange(1000), side="right") - 1
    depth = np.arange(1000) - np.array(boundaries)[starts] + 1
    pairs = [int(depth[layout.positions(rank)].sum()) for rank in range(4)]
    assert max(pairs) / (sum(pairs) / 4) < 1.02


def busiest(counts, layout):
    """Attention pairs of the busiest rank over the mean."""
    pairs = [int(counts[layout.positions(rank)].sum()) for rank in range(layout.size)]
    return max(pairs) * layout.size / sum(pairs)


def test_balanced_balances_any_rule():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(7.7, 1.2, 80).astype(int) + 1
    cases = {
        "causal": np.arange(1, 20001),
        "documents": np.concatenate([np.arange(1, n + 1) for n in lengths]),
        "window": np.minimum(np.arange(1, 20001), 512),
        "a short and a long document": np.concatenate([np.arange(1, 6001), np.arange(1, 14001)]),
        "bidirectional": np.full(20000, 20000),
    }
    for name, counts in cases.items():
        for size in (2, 3, 4, 8, 32):
            layout = balanced(counts, size)
            assert layout == balanced(counts.tolist(), size) and layout.name == "balanced"
            assert busiest(counts, layout) <= 1.05, (name, size)
            assert all(list(spans) == sorted(spans) for spans in layout.spans)
            assert max(map(len, layout.spans)) <= 8
    assert balanced(cases["causal"], 4).spans == head_tail(20000, 4).spans
    assert balanced(cases["bidirectional"], 4).spans == contiguous(20000, 4).spans


def test_balanced_by_name():
    starts = [0, 7, 8, 60]
    counts = causal_counts(100, starts)
    assert counts.tolist() == [*range(1, 8), 1, *range(1, 53), *range(1, 41)]
    assert make("balanced", 100, 4, starts) == balanced(counts, 4)
    assert make("balanced", 100, 4) == balanced(np.arange(1, 101), 4)
    assert make("balanced", 100, 4, starts, np.arange(1, 101)) == balanced(np.arange(1, 101), 4)
    assert causal_counts(0).tolist() == [] and make("balanced", 0, 2).row_counts == (0, 0)
    cp = ContextParallel(None, "balanced")
    assert cp.bind(100, starts).bound == make("balanced", 100, 1, starts)
    with pytest.raises(ValueError, match="depends on the batch"):
        cp.bind_rows(100)


def body_balanced(kind, case):
    """Loss, logits and every gradient under layout="balanced", and this rank's pairs and rows."""
    ids = batch(2, 60)
    inputs = {"input_ids": ids}
    if case == "padded":
        mask = torch.ones_like(ids)
        mask[0, :37] = mask[1, 50:] = 0
        inputs["attention_mask"] = mask
    if case == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in (5, 36, 19)]).expand(2, -1)
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    labels = ids.masked_fill(mask == 0, -100)
    seen = mask.bool() & (mask.cumsum(1) > 0)
    found = []
    for split in (False, True):
        model = build(kind, torch.float64).eval()
        model.loss_function = causal_lm_loss
        if split:
            longspan.parallelize(model, dist.group.WORLD, layout="balanced", scheme="exchange")
        out = model(**inputs, labels=labels, use_cache=False)
        out.loss.backward()
        if split:
            ContextParallel(dist.group.WORLD).reduce_gradients(model)
        found.append((out.loss.detach(), out.logits[seen].detach(), gradients(model)))
    (loss, logits, grads), (split_loss, split_logits, split_grads) = found
    error = max(float(abs(loss - split_loss)), float((logits - split_logits).abs().max()))
    report = longspan.report(model)
    assert report["layout"] == "balanced"
    return max(error, gradient_error(split_grads, grads)), report["pairs"], report["tokens"]


@pytest.mark.parametrize("kind, case", [("llama", "padded"), ("gpt2", "packed"), ("mistral", "plain")])
def test_balanced_batches_equal_one_rank_and_are_balanced(run_ranks, kind, case):
    errors, pairs, rows = zip(*run_ranks(body_balanced, 4, kind, case))
    assert max(errors) <= 1e-10, errors
    assert max(pairs) * 4 <= 1.1 * sum(pairs) and max(rows) - min(rows) <= 2


def test_balanced_is_near_the_best_there_is():
    """Against every way to give each rank its share in pieces of 2 positions."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        counts = np.sort(rng.integers(1, 30, size=16))[rng.permutation(16)]
        owners = (set(chosen) for chosen in itertools.combinations(range(8), 4))
        halves = ([i for piece in own for i in (2 * piece, 2 * piece + 1)] for own in owners)
        best = min(max(int(counts[h].sum()), int(counts.sum() - counts[h].sum())) for h in halves)
        assert busiest(counts, balanced(counts, 2)) <= 1.1 * best * 2 / counts.sum()


def test_rows_ascend_and_heads_come_first():
    assert head_tail(16, 2).spans == ((Span(0, 4), Span(12, 16)), (Span(4, 12),))
    assert contiguous(5, 3).spans == ((Span(0, 2),), (Span(2, 4),), (Span(4, 5),))


def test_refusals_carry_the_numbers():
    with pytest.raises(ValueError, match=r"exactly once.*Span\(start=3"):
        Layout(5, ((Span(0, 2),), (Span(3, 5),)))
    with pytest.raises(ValueError, match="end at 4, the sequence has 5"):
        Layout(5, ((Span(0, 4),),))
    with pytest.raises(ValueError, match="unknown layout 'ring'"):
        make("ring", 4, 2)
