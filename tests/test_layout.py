import itertools

import numpy as np
import pytest

from longspan.layout import Layout, Span, balanced, contiguous, head_tail, make, per_document


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
