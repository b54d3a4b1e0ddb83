import itertools

import numpy as np
import pytest
import torch

from longspan import rule as rule_module
from longspan.layout import Span
from longspan.prefix_tree import prefix_tree
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


def check_against(truth, rule, pairs):
    """Everything a rule says of rectangles (q start, q stop, k start, k stop), against the whole truth."""
    every = torch.arange(len(truth))
    assert torch.equal(rule.mask(every, every), truth)
    for a, b, c, d in pairs:
        q, k = Span(a, b), Span(c, d)
        part = truth[a:b, c:d]
        assert rule.pairs(q, k) == int(part.sum())
        assert rule.counts(q, k).tolist() == part.sum(1).tolist()
        kind = rule.classify(q, k)
        if kind is Kind.EMPTY:
            assert not part.any()
        elif kind is Kind.FULL:
            assert part.all()
        elif kind is Kind.CAUSAL:
            assert q == k and torch.equal(part, torch.ones_like(part).tril())
        covered = torch.zeros(truth.shape, dtype=torch.int64)
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
        assert (covered[a:b, c:d][part] == 1).all()


def test_everything_agrees_with_the_definition(small_tiles):
    pairs = [(0, 23, 0, 23), (3, 12, 12, 20), (12, 20, 3, 12), (12, 13, 0, 13), (5, 5, 0, 9), (4, 18, 4, 18)]
    for rule, args in every_rule():
        truth = torch.tensor([[visible_naively(args, q, k) for k in range(LENGTH)] for q in range(LENGTH)])
        check_against(truth, rule, pairs)


def paths_naively(subtrees, rows):
    """Whether k is on the path of q and the places of both, [rows, rows] each, written from the definition: a query's
    path is those rows whose innermost subtree holds it, counted in order."""
    innermost = [max((s for s in subtrees if s.start <= row < s.stop), default=None) for row in range(rows)]
    on_path = torch.zeros(rows, rows, dtype=torch.bool)
    q_place, k_place = torch.zeros(2, rows, rows, dtype=torch.int64)
    for q in range(rows):
        path = [k for k in range(rows) if innermost[k] == innermost[q] or (innermost[k] and q in range(*innermost[k]))]
        on_path[q, path], q_place[q] = True, path.index(q)
        k_place[q, path] = torch.arange(len(path))
    return on_path, q_place, k_place


def test_trees_agree_with_the_definition(small_tiles):
    odd = lambda q, k: (q * 3 + k) % 5 != 0  # noqa: E731
    rng = np.random.default_rng(0)
    kinds = list(itertools.product([None, 0, 3], [0, None], [(None, 0), (4, 3)], [False, True], [None, odd]))
    for trial in range(15):
        alphabet, count = (1, 5) if trial < 3 else (2, 7)
        tree = prefix_tree([rng.integers(0, alphabet, rng.integers(1, 16)) for _ in range(count)])
        rows = len(tree.tokens) + trial % 3  # the last ones are padding behind the tree
        on_path, q_place, k_place = paths_naively(tree.subtrees, rows)
        cuts = rng.integers(0, rows + 1, (3, 4))
        pairs = [(0, rows, 0, rows), *((min(a, b), max(a, b), min(c, d), max(c, d)) for a, b, c, d in cuts.tolist())]
        pairs.append((*pairs[1][:2], *pairs[1][:2]))
        nodes = [node.span for node in tree.nodes]
        pairs += [(*nodes[i], *nodes[j]) for i, j in rng.integers(0, len(nodes), (2, 2)).tolist()]
        for kind in rng.permutation(len(kinds))[:3]:
            behind, ahead, (chunk, origin), hidden, index = kinds[kind]
            rule, truth, distance = Rule(behind=behind, ahead=ahead), on_path.clone(), q_place - k_place
            if behind is not None:
                truth &= distance <= behind
            if ahead is not None:
                truth &= distance >= -ahead
            if chunk:
                rule = rule.chunked(chunk, origin)
                truth &= (q_place - origin) // chunk == (k_place - origin) // chunk
            rule = rule.branched(tree.subtrees)
            if hidden:
                flags = torch.arange(rows) % 7 != 3
                rule, truth = rule.padded(flags), truth & flags
            if index:
                every = torch.arange(rows)
                rule, truth = rule.where(index), truth & index(every[:, None], every)
            check_against(truth, rule, pairs)
        for rule in (Rule.causal(), Rule.causal().chunked(4, 3)):
            blocks = rule.branched(tree.subtrees).blocks([Span(0, rows)], [Span(0, rows)])
            assert all(block.kind is not Kind.PARTIAL for block in blocks)  # no mask is needed


def test_trees_take_few_blocks():
    """One square per node and one rectangle per node and ancestor; those of siblings join."""
    group = [np.concatenate([np.zeros(4096, dtype=int), [i + 1] * 1024]) for i in range(8)]
    tree = prefix_tree(group)
    rule = Rule.causal().branched(tree.subtrees)
    whole = Span(0, 12288)
    prompt, responses = Span(0, 4096), [Span(a, a + 1024) for a in range(4096, 12288, 1024)]
    blocks = merge_blocks(rule.blocks([whole], [whole]))
    assert blocks == sorted(
        [
            Block(prompt, prompt, Kind.CAUSAL),
            Block(Span(4096, 12288), prompt, Kind.FULL),
            *(Block(span, span, Kind.CAUSAL) for span in responses),
        ],
        key=lambda b: (b.q, b.k),
    )
    assert rule.classify(Span(5000, 9000), Span(100, 4096)) is Kind.FULL
    assert rule.classify(responses[3], responses[2]) is Kind.EMPTY
    assert rule.longest_path == 5120 and Rule.causal().longest_path is None


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


def test_refusals_of_trees():
    causal = Rule.causal()
    tree = [Span(0, 9), Span(3, 5), Span(5, 9)]
    assert causal.branched(tree).windowed(4) == causal.windowed(4).branched(tree)
    for refused in (
        lambda: causal.branched([Span(1, 3)]),  # does not begin at 0
        lambda: causal.branched([Span(0, 3), Span(4, 6)]),  # a gap
        lambda: causal.branched([Span(0, 5), Span(3, 6)]),  # overlap
        lambda: causal.branched([Span(0, 5), Span(0, 3)]),  # a node without tokens
        lambda: causal.branched([Span(0, 0)]),
        lambda: causal.branched([Span(0, 5), Span(2, 4)]),  # tokens behind the children
        lambda: causal.branched([Span(0, 6), Span(2, 4), Span(5, 6)]),
    ):
        with pytest.raises(ValueError, match="subtree"):
            refused()
    with pytest.raises(ValueError, match="documents"):
        causal.packed([3]).branched(tree)
    with pytest.raises(ValueError, match="documents"):
        causal.branched(tree).packed([3])
    with pytest.raises(ValueError, match="already"):
        causal.branched(tree).branched(tree)
