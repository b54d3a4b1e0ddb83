import itertools

import numpy as np
import pytest
import torch

from longspan import rule as rule_module
from longspan.layout import Span
from longspan.rule import Block, Kind, Rule, merge_blocks

LENGTH = 23


def visible_naively(rule_args, q, k):
    """Written from the definition, without Rule."""
    behind, ahead, starts, chunk, origin, flags, index = rule_args
    if behind is not None and q - k > behind:
        return False
    if ahead is not None and k - q > ahead:
        return False
    document = [sum(s <= p for s in starts) for p in (q, k)]
    if starts and document[0] != document[1]:
        return False
    start = max((s for s in starts if s <= q), default=0)
    if chunk is not None and (q - start - origin) // chunk != (k - start - origin) // chunk:
        return False
    if flags is not None and not flags[k]:
        return False
    return index is None or bool(index(torch.tensor(q), torch.tensor(k)))


def every_rule():
    odd = lambda q, k: (q * 3 + k) % 5 != 0  # noqa: E731
    left = [0] * 9 + [1] * (LENGTH - 9)
    right = [1] * 17 + [0] * (LENGTH - 17)
    holes = [int(i % 7 != 3) for i in range(LENGTH)]
    for ahead, behind, starts, (chunk, origin), flags, index in itertools.product(
        [0, None, 3],
        [None, 0, 4, 12],
        [(), (0, 1, 13, 20)],
        [(None, 0), (8, 5)],
        [None, left, right, holes],
        [None, odd],
    ):
        rule = Rule(behind=behind, ahead=ahead)
        if starts:
            rule = rule.packed(starts)
        if chunk:
            rule = rule.chunked(chunk, origin)
        if flags:
            rule = rule.padded(flags)
        if index:
            rule = rule.where(index)
        yield rule, (behind, ahead, starts, chunk, origin, flags, index)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(rule_module, "TILE", 8)
    monkeypatch.setattr(rule_module._tiles, "__defaults__", (8,))


def test_everything_agrees_with_the_definition(small_tiles):
    pairs = [(0, 23, 0, 23), (3, 12, 12, 20), (12, 20, 3, 12), (12, 13, 0, 13), (5, 5, 0, 9), (4, 18, 4, 18)]
    spans = [(Span(a, b), Span(c, d)) for a, b, c, d in pairs]
    every = torch.arange(LENGTH)
    for rule, args in every_rule():
        truth = torch.tensor([[visible_naively(args, q, k) for k in range(LENGTH)] for q in range(LENGTH)])
        assert torch.equal(rule.mask(every, every), truth)
        for q, k in spans:
            part = truth[q.start : q.stop, k.start : k.stop]
            assert rule.pairs(q, k) == int(part.sum())
            kind = rule.classify(q, k)
            if kind is Kind.EMPTY:
                assert not part.any()
            elif kind is Kind.FULL:
                assert part.all()
            elif kind is Kind.CAUSAL:
                assert q == k and torch.equal(part, torch.ones_like(part).tril())
            covered = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
            for block in rule.blocks([q], [k]):
                seen = truth[block.q.start : block.q.stop, block.k.start : block.k.stop]
                if block.kind is Kind.FULL:
                    assert seen.all()
                elif block.kind is Kind.CAUSAL:
                    assert block.q == block.k and torch.equal(seen, torch.ones_like(seen).tril())
                else:
                    assert block.q.size <= 8 and block.k.size <= 8
                covered[block.q.start : block.q.stop, block.k.start : block.k.stop] += 1
            assert covered.max() <= 1
            assert (covered[q.start : q.stop, k.start : k.stop][part] == 1).all()


def test_plain_causal_is_one_square_and_windows_are_mostly_unmasked():
    whole = Span(0, 5000)
    assert list(Rule.causal().blocks([whole], [whole])) == [Block(whole, whole, Kind.CAUSAL)]
    blocks = list(Rule.causal().windowed(512).blocks([whole], [whole]))
    area = sum(b.q.size * b.k.size for b in blocks)
    assert area < 1.5 * 512 * 5000
    assert len(list(Rule.causal().packed(range(0, 5000, 100)).blocks([whole], [whole]))) == 50


def test_merging_keeps_the_pattern():
    rng = np.random.default_rng(0)
    for _ in range(50):
        cuts = sorted(set(rng.integers(1, 40, size=5).tolist()))
        spans = [Span(a, b) for a, b in itertools.pairwise([0, *cuts, 40])]
        rule = Rule.causal().packed([int(rng.integers(1, 40))]) if rng.random() < 0.5 else Rule.causal()
        blocks = [b for q in spans for k in spans for b in rule.blocks([q], [k])]
        picture = torch.zeros(40, 40, dtype=torch.int64)
        for b in merge_blocks(blocks):
            tile = torch.ones(b.q.size, b.k.size, dtype=torch.int64)
            picture[b.q.start : b.q.stop, b.k.start : b.k.stop] += tile.tril() if b.kind is Kind.CAUSAL else tile
        every = torch.arange(40)
        assert torch.equal(picture, rule.mask(every, every).long())
    whole = Span(0, 40)
    pieces = [Span(a, a + 10) for a in range(0, 40, 10)]
    assert merge_blocks(b for q in pieces for k in pieces for b in Rule.causal().blocks([q], [k])) == [
        Block(whole, whole, Kind.CAUSAL)
    ]


def test_refusals():
    for make in (lambda: Rule.causal().windowed(0), lambda: Rule.causal().chunked(0), lambda: Rule(behind=-1)):
        with pytest.raises(ValueError, match=r"-1|at least 1"):
            make()
