"""attend() against plain attention on one rank: outputs and every gradient."""

import math

import pytest
import torch

from longspan.attention import attend
from longspan.comm import ContextParallel
from longspan.kernels import CPU_FLASH, NAIVE, Block, add_sinks, merge_, naive_forward
from longspan.layout import Layout, Span, make
from longspan.rule import Rule

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6}


def reference(q, k, v, rules, *, scale=None, softcap=None, sinks=None):
    """Straight from the definition: dense scores, dense mask, softmax by autograd."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    every = torch.arange(q.shape[2])
    seen = torch.stack([rule.mask(every, every) for rule in rules])[:, None]
    scores = scores.masked_fill(~seen, -1e300 if q.dtype == torch.float64 else -1e38)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : q.shape[2]]
    return weights.masked_fill(~seen, 0.0) @ v


def draw(batch, heads, kv_heads, length, width, value_width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q = normal(batch, heads, length, width)
    k, v = normal(batch, kv_heads, length, width), normal(batch, kv_heads, length, value_width)
    return q, k, v, normal(batch, heads, length, value_width), normal(heads)


def one_rank(tensors, gradient, rules, **options):
    leaves = [t.double().detach().clone().requires_grad_() for t in tensors]
    names = ["q", "k", "v", "sinks"]
    given = dict(zip(names, leaves))
    out = reference(given["q"], given["k"], given["v"], rules, sinks=given.get("sinks"), **options)
    out.backward(gradient.double())
    return out.detach(), [leaf.grad for leaf in leaves]


def error(found, truth):
    """The largest difference, relative to the largest entry where that is above 1. The truth is fp64 always: an fp32
    reference has rounding of its own."""
    return float((found.double() - truth).abs().max() / truth.abs().max().clamp(min=1)) if truth.numel() else 0.0


def compare(cp, case, **options):
    """One case on this rank; returns the largest error over output and gradients of the whole tensors."""
    shape, dtype, rules, with_sinks, extra = case
    q, k, v, gradient, sinks = draw(*shape, dtype)
    tensors = [q, k, v, sinks] if with_sinks else [q, k, v]
    out_whole, gradients_whole = one_rank(tensors, gradient, rules, **extra)
    leaves = [cp.cut(t.detach(), 2).clone().requires_grad_() for t in (q, k, v)]
    given = sinks.clone().requires_grad_() if with_sinks else None
    out = attend(*leaves, cp=cp, rule=rules, sinks=given, **extra, **options)
    out.backward(cp.cut(gradient, 2))
    errors = [error(out.detach(), cp.cut(out_whole, 2))]
    errors += [error(leaf.grad, cp.cut(whole, 2)) for leaf, whole in zip(leaves, gradients_whole)]
    if with_sinks:
        import torch.distributed as dist

        dist.all_reduce(given.grad)
        errors.append(error(given.grad, gradients_whole[3]))
    return max(errors)


def group():
    import torch.distributed as dist

    return dist.group.WORLD


def layouts_of(name, length, size):
    if name == "reversed":
        spans = make("contiguous", length, size).spans
        return Layout(length, tuple(reversed(spans)))
    return make(name, length, size, [0, length // 3, length // 3 + 1, length // 2])


def body_grid(dtype, lengths):
    """Sizes x schemes x layouts x lengths, causal, 4/2 heads; the issue's grid."""
    worst = {}
    cp = ContextParallel(group())
    for length in lengths:
        for name in ("contiguous", "head_tail", "per_document", "reversed"):
            bound = ContextParallel(group(), layout=layouts_of(name, length, cp.size))
            for rules in ([Rule.causal()], [Rule.causal().packed([length // 3, length // 2])]):
                for scheme in ("ulysses", "exchange"):
                    case = ((1, 4, 2, length, 16, 16), dtype, rules, False, {})
                    found = compare(bound, case, scheme=scheme, kernel="auto")
                    worst[scheme] = max(worst.get(scheme, 0.0), found)
    return worst


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_one_rank(run_ranks, size, dtype):
    for worst in run_ranks(body_grid, size, dtype, (1, 3, 61, 64, 257)):
        assert max(worst.values()) <= LIMITS[dtype], worst


def rule_kinds(length):
    causal = Rule.causal()
    left = [0] * (length // 4) + [1] * (length - length // 4)
    right = [1] * (length - 5) + [0] * 5
    odd = lambda q, k: (q + k) % 3 != 1  # noqa: E731
    return {
        "bidirectional": [Rule.bidirectional()] * 2,
        "window short": [causal.windowed(5)] * 2,
        "window long": [causal.windowed(40)] * 2,
        "two-sided window": [Rule.bidirectional().windowed(7)] * 2,
        "chunks": [causal.chunked(16, 3)] * 2,
        "left padding": [causal.padded(left), causal],
        "right padding": [causal, causal.padded(right)],
        "documents": [causal.packed([1, 24, 25]), causal.packed([40])],
        "index": [causal.where(odd), Rule.bidirectional().where(odd)],
        "window, documents, padding": [causal.windowed(9).packed([13, 37]).padded(left), causal.windowed(9)],
    }


def body_rules(size_of_heads):
    worst = {}
    length = 61
    for kind, rules in rule_kinds(length).items():
        for name in ("contiguous", "head_tail"):
            cp = ContextParallel(group(), layout=make(name, length, ContextParallel(group()).size))
            for scheme, kernel in (("ulysses", "flash"), ("exchange", "flash"), ("exchange", "naive")):
                case = ((2, *size_of_heads, length, 8, 8), torch.float64, rules, True, {})
                worst[kind, name, scheme, kernel] = compare(cp, case, scheme=scheme, kernel=kernel)
    return worst


@pytest.mark.parametrize(("size", "heads"), [(2, (4, 2)), (4, (6, 3)), (3, (5, 5))])
def test_every_rule(run_ranks, size, heads):
    for worst in run_ranks(body_rules, size, heads):
        bad = {key: value for key, value in worst.items() if not value <= 1e-12}
        assert not bad


def body_options():
    worst = {}
    size = ContextParallel(group()).size
    cp = ContextParallel(group(), layout=make("head_tail", 50, size))
    for heads in ((8, 2), (8, 1), (6, 3), (6, 2), (5, 5), (2, 1), (1, 1)):
        for scheme in ("ulysses", "exchange"):
            case = ((1, *heads, 50, 8, 8), torch.float64, [Rule.causal()], True, {"scale": 0.3})
            worst[heads, scheme] = compare(cp, case, scheme=scheme)
    for scheme in ("ulysses", "exchange"):
        softcap = ((1, 4, 2, 50, 8, 8), torch.float64, [Rule.causal().windowed(11)], True, {"softcap": 1.5})
        worst["softcap", scheme] = compare(cp, softcap, scheme=scheme)
        for widths in ((8, 12), (16, 8)):
            mla = ((1, 4, 4, 50, *widths), torch.float64, [Rule.causal()], False, {})
            worst["widths", widths, scheme] = compare(cp, mla, scheme=scheme)
    for stages in range(1, size):
        case = ((1, 4, 2, 50, 8, 8), torch.float64, [Rule.causal()], False, {})
        worst["stages", stages] = compare(cp, case, scheme="exchange", stages=stages)
    return worst


@pytest.mark.parametrize("size", [2, 3, 4])
def test_heads_softcap_widths_and_stages(run_ranks, size):
    for worst in run_ranks(body_options, size):
        bad = {key: value for key, value in worst.items() if not value <= 1e-12}
        assert not bad


def body_bitwise():
    """ulysses against the same kernel on one rank, fp32: equal bits in output and gradients."""
    cp = ContextParallel(group(), layout=make("head_tail", 96, ContextParallel(group()).size))
    one = ContextParallel(None, layout=make("contiguous", 96, 1))
    q, k, v, gradient, _ = draw(2, 8, 4, 96, 16, 16, torch.float32)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    out_whole = attend(*whole, cp=one)
    out_whole.backward(gradient)
    local = [cp.cut(t, 2).clone().requires_grad_() for t in (q, k, v)]
    out = attend(*local, cp=cp, scheme="ulysses")
    out.backward(cp.cut(gradient, 2))
    same = [torch.equal(out, cp.cut(out_whole, 2))]
    same += [torch.equal(a.grad, cp.cut(b.grad, 2)) for a, b in zip(local, whole)]
    again = [cp.cut(t, 2).clone().requires_grad_() for t in (q, k, v)]
    runs = []
    for _ in range(2):
        for leaf in again:
            leaf.grad = None
        result = attend(*again, cp=cp, scheme="exchange")
        result.backward(cp.cut(gradient, 2))
        runs.append([result.detach().clone(), *(leaf.grad.clone() for leaf in again)])
    same += [torch.equal(a, b) for a, b in zip(*runs)]
    return same


@pytest.mark.parametrize("size", [2, 4])
def test_ulysses_is_bitwise_one_rank_and_exchange_repeats(run_ranks, size):
    assert all(all(same) for same in run_ranks(body_bitwise, size))


def body_only_needed_rows():
    size = ContextParallel(group()).size
    length, window = 64 * size, 9
    sent = {}
    for name, rule, stages in (
        ("window", Rule.causal().windowed(window), 1),
        ("all", Rule.causal(), 1),
        ("documents", Rule.causal().packed(range(0, length, 64)), 1),
    ):
        cp = ContextParallel(group(), layout="contiguous").bind(length)
        q, k, v, _, _ = draw(1, 2, 2, length, 8, 8, torch.float32)
        attend(*(cp.cut(t, 2) for t in (q, k, v)), cp=cp, rule=rule, scheme="exchange", stages=stages)
        sent[name] = cp.traffic.bytes_sent / (2 * 2 * 8 * 4)
    return sent


def test_only_needed_rows_travel(run_ranks):
    for rank, sent in enumerate(run_ranks(body_only_needed_rows, 4)):
        assert sent["window"] == (8 if rank < 3 else 0)
        assert sent["all"] == 64 * (3 - rank)
        assert sent["documents"] == 0


def body_refusals():
    q, k, v, _, sinks = draw(1, 4, 2, 10, 8, 8, torch.float32)
    cp = ContextParallel(group(), layout=make("contiguous", 20, 2))
    messages = []
    for change in (
        {"dropout": 0.1},
        {"scheme": "ring"},
        {"kernel": "fast"},
        {"softcap": 2.0, "kernel": "flash"},
        {"rule": [Rule.causal()] * 3},
        {"sinks": sinks[:3]},
        {"stages": 4, "scheme": "exchange"},
    ):
        try:
            attend(q, k, v, cp=cp, **change)
            messages.append("accepted")
        except ValueError as raised:
            messages.append(str(raised))
    return messages, cp.traffic.collectives


def test_refusals_come_before_any_collective(run_ranks):
    for messages, collectives in run_ranks(body_refusals, 2):
        assert collectives == 0
        wanted = ["dropout", "ring", "fast", "softcap", "3 rules", "per query head", "1..1"]
        for message, word in zip(messages, wanted):
            assert word in message


def test_merge_and_kernels_agree():
    q, k, v, _, sinks = draw(1, 4, 2, 40, 8, 8, torch.float64)
    seen = Rule.causal().windowed(6).padded([0] * 7 + [1] * 33).mask(torch.arange(40), torch.arange(40))
    out_whole, lse_whole = naive_forward(q, k, v, Block(scale=0.5, mask=seen))
    assert (lse_whole[:, :, :7] == -torch.inf).all() and (out_whole[:, :, :7] == 0).all()
    for kernel in (NAIVE, CPU_FLASH):
        out, lse = torch.zeros_like(out_whole), torch.full_like(lse_whole, -torch.inf)
        for a, b in ((0, 11), (11, 12), (12, 40)):
            block = Block(scale=0.5, mask=seen[:, a:b])
            merge_(out, lse, *kernel.forward(q, k[:, :, a:b], v[:, :, a:b], block))
        assert torch.allclose(out, out_whole, atol=1e-14) and torch.allclose(lse, lse_whole, atol=1e-14)
    with_sinks, _ = add_sinks(out_whole, lse_whole, sinks)
    truth = reference(q, k, v, [Rule.causal().windowed(6).padded([0] * 7 + [1] * 33)], scale=0.5, sinks=sinks)
    assert torch.allclose(with_sinks, truth, atol=1e-14)
    assert Span(0, 3).size == 3
