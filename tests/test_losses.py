"""Every formula against a loop over tokens with `math`, gradients against finite differences of that loop.

In the loop a stop-gradient is a second argument, `frozen`: equal to the log-probabilities in value, and held while they
are moved."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from longspan import losses
from longspan.losses import Correction, Counts, Recipe, Tokens, policy_loss, preset

LENGTHS = (7, 1, 0, 12, 5, 9)
FIELDS = ("advantages", "old", "generator", "reference", "weights")


def example(seed=0, lengths=LENGTHS, per_token=False):
    """(lists of per-sequence float64 tensors, log-probabilities, entropies): off-policy, with holes in the mask, a
    sequence with no token in it, one truncated, generator log-probabilities that are not finite."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda n: torch.rand(n, generator=g, dtype=torch.float64)  # noqa: E731
    randn = lambda n: torch.randn(n, generator=g, dtype=torch.float64)  # noqa: E731
    data = {name: [] for name in ("mask", *FIELDS)}
    logprobs, entropies = [], []
    for i, n in enumerate(lengths):
        lp = -2 * rand(n) - 0.1
        old = lp + 0.25 * randn(n)
        generator = old + 0.2 * randn(n)
        mask = rand(n) < 0.8
        if n > 8:
            mask[3] = mask[5] = True
            generator[3], generator[5] = -math.inf, math.nan
        if i == 1 and len(lengths) > 2:
            mask[:] = n > 1  # the one-token sequence has nothing to learn from
        data["mask"].append(mask)
        data["advantages"].append(randn(n) if per_token else randn(1).expand(n))
        data["old"].append(old)
        data["generator"].append(generator)
        data["reference"].append(lp + 0.4 * randn(n))
        data["weights"].append(rand(n))
        logprobs.append(lp)
        entropies.append(rand(n))
    data["truncated"] = torch.tensor([i == 4 for i in range(len(lengths))])
    return data, logprobs, entropies


def pick(data, indices):
    return {
        name: value[indices] if name == "truncated" else [value[i] for i in indices] for name, value in data.items()
    }


# -- the loop ------------------------------------------------------------------------------------------------------


def bounded(x):
    return max(-20.0, min(20.0, x))


def naive_filter(recipe, data):
    """Per sequence: indices before the correction, and after it."""
    eligible, kept = [], []
    for i, mask in enumerate(data["mask"]):
        first = [t for t in range(len(mask)) if mask[t]]
        if recipe.overlong_filter and data["truncated"][i]:
            first = []
        if "generator" in data:
            first = [t for t in first if math.isfinite(data["generator"][i][t])]
        eligible.append(first)
        if recipe.correction.drops:
            logs = {t: float(data["old"][i][t] - data["generator"][i][t]) for t in first}
            kept.append([t for t in first if naive_weight(recipe.correction, logs, t) > 0])
        else:
            kept.append(first)
    return eligible, kept


def naive_weight(correction, logs, t):
    """logs: log k of the sequence's eligible tokens, by index."""
    if correction.kind == "none":
        return 1.0
    log = {
        "token": lambda: logs[t],
        "sequence": lambda: sum(logs.values()),
        "sequence_mean": lambda: sum(logs.values()) / len(logs),
    }[correction.level]()
    k, (low, high) = math.exp(log), correction.bounds
    if correction.kind == "tis":
        return min(k, high)
    return k if low <= k <= high else 0.0


def naive_token(recipe, lp, frozen, old, advantages, weights, kept, t):
    """One token's loss, from a sequence's lists."""
    o, a = recipe.options, advantages[t]
    if recipe.loss == "sft":
        return -weights[t] * lp[t]
    if recipe.loss == "reinforce":
        return -a * lp[t]
    if recipe.loss == "cispo":
        return -min(max(math.exp(bounded(frozen[t] - old[t])), o.get("low", 0.0)), o.get("high", 5.0)) * a * lp[t]
    if recipe.loss == "sapo":
        tau = o.get("tau_positive", 1.0) if a > 0 else o.get("tau_negative", 1.05)
        return -4 / tau / (1 + math.exp(-tau * (math.exp(lp[t] - old[t]) - 1))) * a
    if recipe.loss == "gmpo":
        total = 0.0
        for s in kept:
            d = lp[s] - old[s]
            if advantages[s] > 0:
                d = min(d, o.get("log_clip_high", 0.4))
            elif advantages[s] < 0:
                d = max(d, -o.get("log_clip_low", 0.4))
            total += d
        return -sum(advantages[s] for s in kept) / len(kept) * math.exp(total / len(kept))

    level = o.get("level", "token")
    if level == "token":
        log = lp[t] - old[t]
    elif level == "sequence":
        log = sum(lp[s] - old[s] for s in kept) / len(kept)
    elif level == "sequence_token":
        log = sum(frozen[s] - old[s] for s in kept) / len(kept) + lp[t] - frozen[t]
    else:
        log = sum(lp[s] - old[s] for s in kept)
    r = math.exp(bounded(log))
    if recipe.loss == "importance_sampling":
        return -a * r
    assert recipe.loss == "ppo_clip"
    clip = min(max(r, 1 - o.get("clip_low", 0.2)), 1 + o.get("clip_high", 0.2))
    cap = o.get("ratio_cap")
    loss = -min((r if cap is None else min(r, cap)) * a, clip * a)
    if o.get("dual_clip") and a < 0:
        loss = min(loss, -o["dual_clip"] * a)
    return loss


def naive_loss(recipe, data, logprobs, frozen, entropies, only=None, filters=None):
    """The whole step's loss: sum over denominator, as floats; of sequence `only`, its share. logprobs, frozen,
    entropies: lists of lists."""
    eligible, kept = filters or naive_filter(recipe, data)
    total = 0.0
    for i, (lp, fr, h) in enumerate(zip(logprobs, frozen, entropies)):
        if only is not None and i != only:
            continue
        fields = {n: (data[n][i].tolist() if n in data else [1.0] * len(lp)) for n in FIELDS}
        old = {"old": fields["old"], "generator": fields["generator"], "current": fr}[recipe.anchor]
        trainer = fields["old"] if recipe.anchor == "old" else fr
        of_sequence = 0.0
        logs = {s: trainer[s] - fields["generator"][s] for s in eligible[i]}
        for t in kept[i]:
            loss = naive_token(recipe, lp, fr, old, fields["advantages"], fields["weights"], kept[i], t)
            loss *= naive_weight(recipe.correction, logs, t)
            if recipe.kl_coefficient:
                d = lp[t] - fields["reference"][t]
                penalty = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[recipe.kl_kind]
                loss += recipe.kl_coefficient * penalty * (math.exp(lp[t] - old[t]) if recipe.kl_weighted else 1.0)
            of_sequence += loss - recipe.entropy_coefficient * h[t]
        if recipe.aggregation == "sequence_mean_token_mean" and kept[i]:
            of_sequence /= len(kept[i])
        total += of_sequence
    tokens, sequences = sum(map(len, kept)), sum(bool(k) for k in kept)
    over = {
        "token_mean": tokens,
        "sequence_mean_token_mean": sequences,
        "sequence_mean_token_sum": sequences,
        "fixed_length": sequences * (recipe.length or 0),
    }[recipe.aggregation]
    return total / over if over else 0.0


def naive_gradient(recipe, data, logprobs, entropies, step=1e-5):
    """Central differences, the frozen copy held."""
    frozen = [lp.tolist() for lp in logprobs]
    moved = [lp.tolist() for lp in logprobs]
    flat_entropy = [h.tolist() for h in entropies]
    filters = naive_filter(recipe, data)
    out = []
    for i, sequence in enumerate(moved):
        for t in range(len(sequence)):
            here = sequence[t]
            sequence[t] = here + step
            above = naive_loss(recipe, data, moved, frozen, flat_entropy, i, filters)
            sequence[t] = here - step
            below = naive_loss(recipe, data, moved, frozen, flat_entropy, i, filters)
            sequence[t] = here
            out.append((above - below) / (2 * step))
    return torch.tensor(out, dtype=torch.float64)


# -- the code under test -------------------------------------------------------------------------------------------


def run(recipe, data, logprobs, entropies, batches=None, denominators="step"):
    """(loss, gradient [tokens], entropy gradient, summed metrics) of a step in micro-batches of the given indices."""
    leaves = [lp.clone().requires_grad_() for lp in logprobs]
    bonus = [h.clone().requires_grad_() for h in entropies]
    batches = batches or [list(range(len(logprobs)))]
    step = [losses.tokens(**pick(data, batch)) for batch in batches]
    counts = losses.count(recipe, step)
    total, sums = 0.0, {}
    for batch, t in zip(batches, step):
        flat = losses.flatten([leaves[i] for i in batch])
        out = policy_loss(recipe, t, flat, losses.flatten([bonus[i] for i in batch]))
        mine = counts if denominators == "step" else losses.count(recipe, [t])
        share = 1 if denominators == "step" else len(batches)
        loss = out.loss / losses.denominator(recipe, mine) / share
        loss.backward()
        total += loss.item()
        for name, value in out.metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    gradients = [
        torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in group])
        for group in (leaves, bonus)
    ]
    return total, *gradients, sums


TOKEN_LOSSES = [
    ("sft", {}),
    ("reinforce", {}),
    *(("importance_sampling", {"level": level}) for level in ("token", "sequence", "sequence_token", "product")),
    *(("ppo_clip", {"level": level}) for level in ("token", "sequence", "sequence_token", "product")),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.3}),
    ("ppo_clip", {"ratio_cap": 1.25}),
    ("cispo", {"low": 0.9, "high": 1.2}),
    ("sapo", {}),
    ("gmpo", {"log_clip_low": 0.15, "log_clip_high": 0.2}),
]
CORRECTIONS = [
    Correction(),
    Correction("tis", high=1.2),
    Correction("tis", "sequence", high=1.1),
    Correction("tis", "sequence_mean", high=1.05),
    *(
        Correction(kind, level, low, high, rejected)
        for (kind, low, high), level, rejected in itertools.product(
            [("mis", None, 1.15), ("icepop", 0.85, 1.25)], ["token", "sequence", "sequence_mean"], ["zero", "drop"]
        )
    ),
]
AGGREGATIONS = [{"aggregation": how} for how in losses.AGGREGATIONS[:3]] + [
    {"aggregation": "fixed_length", "length": 16}
]
PENALTIES = [
    {},
    {"kl_coefficient": 0.3, "kl_kind": "k2", "entropy_coefficient": 0.2},
    {"kl_coefficient": 0.3, "kl_kind": "k3"},
    {"kl_coefficient": 0.3, "kl_weighted": True, "overlong_filter": True},
    {"kl_coefficient": 0.3, "kl_weighted": True, "kl_kind": "k1"},
]


def agrees(recipe, seed=0, per_token=False):
    data, logprobs, entropies = example(seed, per_token=per_token)
    loss, gradient, entropy_gradient, _ = run(recipe, data, logprobs, entropies)
    lists = [lp.tolist() for lp in logprobs], [lp.tolist() for lp in logprobs], [h.tolist() for h in entropies]
    assert loss == pytest.approx(naive_loss(recipe, data, *lists), rel=1e-12, abs=1e-13)
    expected = naive_gradient(recipe, data, logprobs, entropies)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    _, kept = naive_filter(recipe, data)
    assert bool((entropy_gradient != 0).any()) == bool(recipe.entropy_coefficient and any(kept))
    return expected


@pytest.mark.parametrize("loss,options", TOKEN_LOSSES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)))
def test_every_loss_with_every_aggregation(loss, options):
    for how, per_token in [(AGGREGATIONS[1], False), *((how, True) for how in AGGREGATIONS)]:
        expected = agrees(Recipe(loss=loss, options=options, **how), seed=3, per_token=per_token)
        assert expected.abs().max() > 1e-3


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.kind}-{c.level}-{c.rejected}")
def test_every_correction_with_every_aggregation(correction):
    for how, options in zip(itertools.cycle(AGGREGATIONS), [{"level": "token"}, {"level": "sequence"}] * 2):
        assert agrees(Recipe(correction=correction, options=options, **how), seed=1).any()
        if not correction.drops:
            agrees(Recipe(loss="reinforce", anchor="current", correction=correction, **how), seed=2)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("anchor", ["old", "generator", "current"])
def test_penalties_and_anchors(penalty, anchor):
    if anchor == "current" and penalty.get("kl_weighted"):
        with pytest.raises(ValueError, match="kl_weighted"):
            Recipe(anchor=anchor, **penalty)
        return
    for how in AGGREGATIONS:
        agrees(Recipe(anchor=anchor, **penalty, **how), seed=4)


@pytest.mark.parametrize("name", sorted(losses.PRESETS))
def test_presets(name):
    agrees(preset(name, **({"length": 20} if name == "dr_grpo" else {})), seed=5)


@pytest.mark.parametrize(
    "loss,level",
    [("sft", ""), ("sapo", ""), ("gmpo", ""), ("ppo_clip", "token"), ("ppo_clip", "sequence"), ("ppo_clip", "product")],
)
def test_gradcheck(loss, level):
    options = {"level": level} if level else {}
    data, logprobs, entropies = example(6, lengths=(4, 1, 5))
    t = losses.tokens(**data)
    for how in AGGREGATIONS[:2]:
        recipe = Recipe(loss=loss, options=options, kl_coefficient=0.1, entropy_coefficient=0.1, **how)
        inputs = [losses.flatten(x).requires_grad_() for x in (logprobs, entropies)]
        assert torch.autograd.gradcheck(lambda lp, h, r=recipe: policy_loss(r, t, lp, h).loss, inputs)


def test_gspo_and_gspo_token_differ_only_with_unequal_advantages():
    for per_token in (False, True):
        data, *outputs = example(7, per_token=per_token)
        wide = {"clip_low": 0.5, "clip_high": 0.5}
        a, b = (run(preset(name, options=wide), data, *outputs)[1] for name in ("gspo", "gspo_token"))
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14) != per_token


# -- how a step is cut ---------------------------------------------------------------------------------------------


def every_recipe():
    for (loss, options), how in itertools.product(TOKEN_LOSSES, AGGREGATIONS):
        yield Recipe(loss=loss, options=options, **how)
    for correction, how in zip(CORRECTIONS, itertools.cycle(AGGREGATIONS)):
        yield Recipe(correction=correction, **PENALTIES[1], **how)


CUTS = [[[1, 2], [0, 3, 4, 5]], [[5, 3], [4, 0, 2], [1]], [[0], [1], [2], [3], [4], [5]]]


def test_micro_batches_change_nothing():
    data, *outputs = example(0)
    for recipe, cut in zip(every_recipe(), itertools.cycle(CUTS)):  # 3 cuts and 4 aggregations: every pairing
        loss, gradient, entropy_gradient, sums = run(recipe, data, *outputs)
        other = run(recipe, data, *outputs, batches=cut)
        assert gradient.any(), recipe
        assert other[0] == pytest.approx(loss, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(other[1], gradient, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(other[2], entropy_gradient, rtol=1e-12, atol=1e-15)
        assert {k: float(v) for k, v in other[3].items()} == pytest.approx({k: float(v) for k, v in sums.items()})


def test_the_micro_batch_test_catches_denominators_per_micro_batch():
    """The mistake: each micro-batch divides by its own count, and the results are averaged."""
    data, *outputs = example(0)
    for recipe in every_recipe():
        _, gradient, *_ = run(recipe, data, *outputs)
        _, wrong, *_ = run(recipe, data, *outputs, batches=CUTS[0], denominators="micro-batch")
        assert (wrong - gradient).abs().max() > 0.1 * gradient.abs().max(), recipe


def test_the_order_of_sequences_and_tokens_changes_nothing():
    data, logprobs, entropies = example(9, per_token=True)
    order = [4, 2, 0, 5, 3, 1]
    shuffles = [torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    shuffled = {n: v if n == "truncated" else [x[p] for x, p in zip(v, shuffles)] for n, v in data.items()}
    for recipe in every_recipe():
        loss, gradient, *_ = run(recipe, data, logprobs, entropies)
        again, permuted, *_ = run(recipe, data, logprobs, entropies, batches=[order])
        assert again == pytest.approx(loss, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(permuted, gradient, rtol=1e-12, atol=1e-15)
        moved = [[x[p] for x, p in zip(values, shuffles)] for values in (logprobs, entropies)]
        again, permuted, *_ = run(recipe, shuffled, *moved)
        assert again == pytest.approx(loss, rel=1e-12, abs=1e-14)
        expected = torch.cat([x[p] for x, p in zip(gradient.split(LENGTHS), shuffles)])
        torch.testing.assert_close(permuted, expected, rtol=1e-12, atol=1e-15)


def test_padded_rows_equal_lists():
    data, logprobs, _ = example(10)
    width = max(LENGTHS)
    pad = lambda rows: torch.stack(  # noqa: E731
        [torch.cat([r, torch.full((width - len(r),), math.nan).to(r.dtype)]) for r in rows]
    )
    padded = {n: v if n == "truncated" else pad(v) for n, v in data.items()}
    padded["mask"] = torch.stack([torch.cat([m, torch.zeros(width - len(m), dtype=torch.bool)]) for m in data["mask"]])
    recipe = preset("gspo", kl_coefficient=0.1, correction=Correction("icepop", "sequence"))
    a = policy_loss(recipe, losses.tokens(**data), losses.flatten(logprobs))
    leaf = pad(logprobs).requires_grad_()
    b = policy_loss(recipe, losses.tokens(**padded), losses.flatten(leaf))
    assert b.loss.item() == pytest.approx(a.loss.item(), rel=1e-13)
    b.loss.backward()
    assert leaf.grad.isfinite().all()


# -- edges ---------------------------------------------------------------------------------------------------------


def test_nothing_to_learn_is_zero_with_a_graph():
    for lengths in [(), (3, 0, 2)]:
        data, logprobs, entropies = example(lengths=lengths)
        data["mask"] = [torch.zeros_like(m) for m in data["mask"]]
        for values in (*(data[n] for n in FIELDS), logprobs, entropies):
            for value in values:
                value.copy_(torch.full_like(value, math.nan)) if value.is_contiguous() else None
        for recipe in every_recipe():
            t = losses.tokens(**data)
            counts = losses.count(recipe, [t])
            assert counts == Counts(0, 0) and losses.denominator(recipe, counts) == 1
            lp = losses.flatten(logprobs).clone().requires_grad_()
            out = policy_loss(recipe, t, lp, losses.flatten(entropies))
            assert out.loss.item() == 0
            out.loss.backward()
            assert lp.grad.eq(0).all()
            assert math.isnan(losses.summarize(out.metrics)["clipped"])


def test_one_token():
    data, logprobs, entropies = example(11, lengths=(1,))
    data["mask"] = [torch.ones(1, dtype=torch.bool)]
    for recipe in every_recipe():
        loss, *_ = run(recipe, data, logprobs, entropies)
        lists = [[x.tolist() for x in v] for v in (logprobs, logprobs, entropies)]
        assert loss == pytest.approx(naive_loss(recipe, data, *lists), rel=1e-12, abs=1e-14)


def test_tokens_without_a_finite_generator_logprob_leave_as_if_masked():
    data, logprobs, entropies = example(12)
    for recipe in every_recipe():
        masked = dict(data)
        masked["mask"] = [m & q.isfinite() for m, q in zip(data["mask"], data["generator"])]
        masked["generator"] = [q.nan_to_num(0.0, 0.0, 0.0) for q in data["generator"]]
        assert sum(int(m.sum()) for m in masked["mask"]) < sum(int(m.sum()) for m in data["mask"])
        a, b = (run(recipe, d, logprobs, entropies) for d in (data, masked))
        assert a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])


@pytest.mark.parametrize(
    "gap,dtype",
    [(200.0, torch.float64), (200.0, torch.bfloat16), *((gap, torch.float32) for gap in (30.0, 200.0, 1e5, math.inf))],
)
def test_huge_ratios_stay_finite(gap, dtype):
    """Sequences of 3 tokens; every sign of the gap and of the advantage."""
    for sign, advantage in itertools.product([1, -1], [1.0, -1.0]):
        logprobs = torch.full((6,), -1.0, dtype=dtype)
        # An infinite gap: the anchor called the token impossible.
        other = torch.full((6,), -1.0 - sign * gap) if sign > 0 or gap < math.inf else torch.full((6,), -1e5)
        finite = other if math.isfinite(float(other[0])) else torch.full((6,), -1e5)
        ones = torch.ones(6)
        t = Tokens(
            mask=ones.bool(), lengths=(3, 3), advantages=advantage * ones, old=other, generator=finite * 0.5,
            reference=finite, truncated=torch.zeros(2, dtype=torch.bool),
        )  # fmt: skip
        recipes = [Recipe(loss=loss, options=options) for loss, options in TOKEN_LOSSES]
        for i, recipe in enumerate(recipes + [Recipe(correction=correction) for correction in CORRECTIONS]):
            recipe = dataclasses.replace(recipe, kl_coefficient=1.0, kl_weighted=bool(i % 2))
            lp = logprobs.clone().requires_grad_()
            out = policy_loss(recipe, t, lp, -lp.detach())
            out.loss.backward()
            assert out.loss.isfinite() and lp.grad.isfinite().all(), recipe
            assert all(v.isfinite() for v in out.metrics.values())


def test_bf16_is_computed_in_fp32():
    data, logprobs, _ = example(13)
    low = losses.flatten([lp.to(torch.bfloat16) for lp in logprobs])
    assert low.dtype == torch.float32
    out = policy_loss(preset("grpo"), losses.tokens(**data), torch.cat(logprobs).to(torch.bfloat16))
    exact = policy_loss(preset("grpo"), losses.tokens(**data), low.double())
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)


# -- metrics, your own loss, DPO -----------------------------------------------------------------------------------


def test_metrics():
    data, logprobs, entropies = example(14)
    recipe = Recipe(options={"dual_clip": 1.1}, correction=Correction("icepop", low=0.8, high=1.3, rejected="drop"))
    eligible, kept = naive_filter(recipe, data)
    got = losses.summarize(run(recipe, data, logprobs, entropies, batches=CUTS[1])[3])

    def mean(indices, value):
        values = [value(i, t) for i, ts in enumerate(indices) for t in ts]
        return sum(values) / len(values)

    def at(name, i, t):
        return float(data[name][i][t])

    def log_r(i, t):
        return float(logprobs[i][t]) - at("old", i, t)

    def log_k(i, t):
        return at("old", i, t) - at("generator", i, t)

    def clipped(i, t):
        r, a = math.exp(log_r(i, t)), at("advantages", i, t)
        return (a > 0 and r > 1.2) or (a < 0 and (r < 0.8 or r > 1.1))

    d = lambda i, t: float(logprobs[i][t]) - at("reference", i, t)  # noqa: E731
    k, k2 = mean(eligible, lambda i, t: math.exp(log_k(i, t))), mean(eligible, lambda i, t: math.exp(2 * log_k(i, t)))
    assert got == pytest.approx(
        {
            "tokens": sum(map(len, kept)),
            "clipped": mean(kept, clipped),
            "logprob": mean(kept, lambda i, t: float(logprobs[i][t])),
            "ratio": mean(kept, lambda i, t: math.exp(log_r(i, t))),
            "approx_kl": mean(kept, lambda i, t: math.exp(log_r(i, t)) - 1 - log_r(i, t)),
            "reference_kl": mean(kept, lambda i, t: math.exp(-d(i, t)) + d(i, t) - 1),
            "entropy": mean(kept, lambda i, t: float(entropies[i][t])),
            "mismatch_difference": mean(eligible, lambda i, t: abs(log_k(i, t))),
            "mismatch_k3": mean(eligible, lambda i, t: math.exp(log_k(i, t)) - 1 - log_k(i, t)),
            "mismatch_weight": k,
            "rejected": mean(eligible, lambda i, t: not 0.8 <= math.exp(log_k(i, t)) <= 1.3),
            "effective_samples": k * k / k2,
        },
        rel=1e-9,
    )
    assert 0 < got["clipped"] < 1 and 0 < got["rejected"] < 1


def test_your_own_loss():
    def own(t, logprobs, *, power):
        """A probe of whole sequences: the squared mean log-probability, on every token of the sequence."""
        return losses.spread(losses.sequence_mean(logprobs, t.mask, t.lengths).abs() ** power, t.lengths)

    data, logprobs, entropies = example(15)
    recipe = Recipe(loss=own, options={"power": 2}, aggregation="sequence_mean_token_mean")
    loss, gradient, *_ = run(recipe, data, logprobs, entropies)
    _, kept = naive_filter(recipe, data)
    means = [sum(float(lp[t]) for t in k) / len(k) for lp, k in zip(logprobs, kept) if k]
    assert loss == pytest.approx(sum(m * m for m in means) / len(means), rel=1e-12)
    torch.testing.assert_close(run(recipe, data, logprobs, entropies, batches=CUTS[1])[1], gradient, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="one value per token"):
        policy_loss(Recipe(loss=lambda t, lp: lp.sum()), losses.tokens(**data), losses.flatten(logprobs))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(smoothing):
    data, logprobs, _ = example(16)
    data = {n: v for n, v in data.items() if n != "generator"}
    pairs = torch.tensor([[0, 3], [5, 4], [1, 0], [2, 5]])  # sequences 1 and 2 hold no token to learn from
    t = losses.tokens(**data)
    lp = losses.flatten(logprobs).requires_grad_()
    got, margins, counted = losses.dpo(t, lp, pairs, beta=0.3, label_smoothing=smoothing)
    assert counted.tolist() == [True, True, False, False] and losses.count_pairs(t, pairs) == 2

    def score(i):
        return sum(
            float(logprobs[i][s] - data["reference"][i][s]) for s in range(len(logprobs[i])) if data["mask"][i][s]
        )

    expected = []
    for chosen, rejected in pairs.tolist():
        margin = 0.3 * (score(chosen) - score(rejected))
        expected.append((1 - smoothing) * math.log1p(math.exp(-margin)) + smoothing * math.log1p(math.exp(margin)))
    assert got.tolist()[:2] == pytest.approx(expected[:2], rel=1e-12) and got.tolist()[2:] == [0, 0]
    assert margins[0].item() == pytest.approx(0.3 * (score(0) - score(3)), rel=1e-12) and margins[2:].eq(0).all()
    assert torch.autograd.gradcheck(lambda x: losses.dpo(t, x, pairs, label_smoothing=smoothing)[0], [lp])
    far = losses.flatten([1e4 * x for x in logprobs]).requires_grad_()
    losses.dpo(t, far, pairs)[0].sum().backward()
    assert far.grad.isfinite().all()
    with pytest.raises(ValueError, match=r"\[pairs, 2\]"):
        losses.dpo(t, lp, torch.tensor([0, 1]))


def test_kl_estimators_by_definition():
    lp, ref = torch.tensor([-1.0, -0.2], dtype=torch.float64), torch.tensor([-1.3, -0.9], dtype=torch.float64)
    for a, b, k1, k2, k3 in zip(lp, ref, *(losses.kl(kind, lp, ref) for kind in ("k1", "k2", "k3"))):
        d = float(a - b)
        assert (float(k1), float(k2), float(k3)) == pytest.approx((d, d * d / 2, math.exp(-d) + d - 1), rel=1e-12)
    tiny = losses.kl("k3", torch.tensor([-1.0 + 1e-7], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64))
    assert float(tiny) == pytest.approx(5e-15, rel=1e-3, abs=0)
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        losses.kl("k4", lp, ref)


# -- rewards and advantages ----------------------------------------------------------------------------------------

REWARDS = [0.1, 0.9, math.nan, 0.4, 0.3, 0.3, 0.3, 2.0, -1.0, math.nan, 0.7]
GROUP = [5, 5, 5, 5, 2, 2, 2, 9, 7, 7, 5]


def naive_advantages(rewards, group, baseline, leave_one_out, scale, epsilon, unbiased):
    out = []
    for i, reward in enumerate(rewards):
        if math.isnan(reward):
            out.append(0.0)
            continue
        everyone = [j for j, r in enumerate(rewards) if not math.isnan(r)]
        mine = [j for j in everyone if group[j] == group[i]]
        pool = {"group": mine, "batch": everyone, "none": []}
        others = [j for j in pool[baseline] if j != i] if leave_one_out else pool[baseline]
        mean = sum(rewards[j] for j in others) / len(others) if others else (0.0 if baseline == "none" else reward)
        value = reward - mean
        spread = pool[scale]
        if len(spread) > 1:
            centre = sum(rewards[j] for j in spread) / len(spread)
            variance = sum((rewards[j] - centre) ** 2 for j in spread) / (len(spread) - unbiased)
            value /= math.sqrt(variance) + epsilon
        out.append(value)
    return out


def test_advantages():
    for baseline, scale, one_out, unbiased in itertools.product(
        ["group", "batch", "none"], ["group", "batch", "none"], [False, True], [False, True]
    ):
        arguments = {
            "baseline": baseline,
            "scale": scale,
            "leave_one_out": one_out,
            "std_epsilon": 1e-3,
            "unbiased": unbiased,
        }
        rewards, group = torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUP)
        if (one_out and baseline == "none") or (scale != "none" and baseline not in ("group", scale)):
            with pytest.raises(ValueError, match=r"leave_one_out|scale"):
                losses.group_advantages(rewards, group, **arguments)
            with pytest.raises(ValueError, match=r"leave_one_out|scale"):
                Recipe(**arguments)
            continue
        got, scored = losses.group_advantages(rewards, group, **arguments)
        expected = naive_advantages(REWARDS, GROUP, baseline, one_out, scale, 1e-3, unbiased)
        assert got.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-13)
        assert scored.tolist() == [not math.isnan(r) for r in REWARDS]
        assert torch.equal(got, Recipe(**arguments).advantages(rewards, group)[0])
        order = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(0))
        permuted, _ = losses.group_advantages(rewards[order], group[order], **arguments)
        torch.testing.assert_close(permuted, got[order], rtol=1e-12, atol=1e-14)


def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero():
    rewards, group = torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    assert rewards[0] != sum(rewards.tolist()) / 3  # the mean is not what it is a mean of
    for one_out, dtype in itertools.product([False, True], [torch.float32, torch.float64]):
        got, _ = losses.group_advantages(rewards.to(dtype), group, leave_one_out=one_out, std_epsilon=1e-6)
        assert got.dtype == dtype and got.eq(0).all()
    alone, _ = losses.group_advantages(torch.tensor([3.0]), torch.tensor([0]), leave_one_out=True)
    assert alone.tolist() == [0.0]
    assert losses.informative(torch.tensor(REWARDS), torch.tensor(GROUP)).tolist() == [
        g == 5 and not math.isnan(r) for r, g in zip(REWARDS, GROUP)
    ]
    with pytest.raises(ValueError, match="infinite"):
        losses.group_advantages(torch.tensor([1.0, math.inf]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="need the group"):
        losses.group_advantages(rewards)


def test_rloo_is_n_over_n_minus_one_times_the_difference():
    rewards = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    got, _ = preset("rloo").advantages(rewards, torch.zeros(3, dtype=torch.int64))
    assert got.tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


def test_gae():
    rng = random.Random(0)
    lengths = (6, 0, 1, 9)
    mask = [[rng.random() < 0.6 for _ in range(n)] for n in lengths]
    rewards = [[rng.gauss(0, 1) if m else 0.0 for m in row] for row in mask]
    values = [[rng.gauss(0, 1) for _ in row] for row in mask]
    last = [0.3, 0.1, -0.2, 0.0]
    flat = lambda rows: torch.tensor([x for row in rows for x in row], dtype=torch.float64)  # noqa: E731
    flat_mask = torch.tensor([m for row in mask for m in row])
    for gamma, lam in [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0)]:
        expected, returns = [], []
        for i, row in enumerate(mask):
            acting = [t for t, m in enumerate(row) if m]
            following = [values[i][t] for t in acting[1:]] + [last[i]]
            delta = [rewards[i][t] + gamma * v - values[i][t] for t, v in zip(acting, following)]
            # The definition: a discounted sum of what is to come, not a recursion.
            mine = {
                t: sum((gamma * lam) ** (j - a) * delta[j] for j in range(a, len(acting))) for a, t in enumerate(acting)
            }
            expected += [mine.get(t, 0.0) for t in range(len(row))]
            returns += [mine[t] + values[i][t] if t in mine else 0.0 for t in range(len(row))]
        got = losses.gae(
            flat(rewards), flat(values), flat_mask, lengths, gamma=gamma, lam=lam,
            last_values=torch.tensor(last, dtype=torch.float64),
        )  # fmt: skip
        assert got[0].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert got[1].tolist() == pytest.approx(returns, rel=1e-12, abs=1e-14)
    with pytest.raises(ValueError, match="outside the mask"):
        losses.gae(torch.ones_like(flat(values)), flat(values), flat_mask, lengths)

    white = losses.whiten(got[0], flat_mask)
    inside = white[flat_mask]
    assert inside.mean().item() == pytest.approx(0, abs=1e-12) and inside.std().item() == pytest.approx(1, rel=1e-6)
    assert white[~flat_mask].eq(0).all()


def test_soft_punishment_and_kl_rewards():
    lengths = torch.tensor([1, 80, 81, 90, 100, 150])
    got = losses.soft_punishment(lengths, maximum=100, buffer=20, factor=0.5).tolist()
    assert got == pytest.approx([0, 0, -0.025, -0.25, -0.5, -0.5])
    with pytest.raises(ValueError, match="buffer"):
        losses.soft_punishment(lengths, maximum=100, buffer=0)
    data, *_ = example(17)
    got = losses.kl_rewards(losses.tokens(**data), 0.1).tolist()
    for i, mask in enumerate(data["mask"]):
        total = sum(float(data["old"][i][t] - data["reference"][i][t]) for t in range(len(mask)) if mask[t])
        assert got[i] == pytest.approx(-0.1 * total, rel=1e-12, abs=1e-15)


# -- counts and refusals -------------------------------------------------------------------------------------------


def test_counts_are_of_what_is_left():
    data, *_ = example(18)
    drop = Correction("mis", high=1.1, rejected="drop")
    for recipe in (Recipe(), preset("dapo"), Recipe(correction=drop), Recipe(correction=drop, overlong_filter=True)):
        _, kept = naive_filter(recipe, data)
        step = [losses.tokens(**pick(data, cut)) for cut in CUTS[1]]
        counts = losses.count(recipe, step)
        assert counts == Counts(sum(map(len, kept)), sum(bool(k) for k in kept))
        assert counts == sum((losses.count(recipe, [t]) for t in step), Counts())
        long = dataclasses.replace(recipe, aggregation="fixed_length", length=50)
        assert losses.denominator(recipe, counts) == counts.tokens
        assert losses.denominator(long, counts) == 50 * counts.sequences


def test_refusals():
    data, logprobs, _ = example(19)
    t, lp = losses.tokens(**data), losses.flatten(logprobs)
    without = lambda *names: dataclasses.replace(t, **dict.fromkeys(names))  # noqa: E731
    for message, call in [
        ("unknown recipe 'grop'; choose one of cispo, dapo", lambda: preset("grop")),
        ("micro-batch", lambda: preset("bnpo")),
        ("losses.dpo", lambda: preset("dpo")),
        ("needs length", lambda: preset("dr_grpo")),
        ("others take none", lambda: preset("grpo", length=7)),
        ("unknown loss 'ppo'", lambda: Recipe(loss="ppo")),
        ("no option clip; it takes clip_low", lambda: preset("grpo", options={"clip": 0.1})),
        ("unknown aggregation 'mean'", lambda: Recipe(aggregation="mean")),
        ("zero expected gradient", lambda: Recipe(kl_kind="k1", kl_coefficient=0.1)),
        ("already corrects", lambda: Recipe(anchor="generator", correction=Correction("tis"))),
        ("before the forward", lambda: Recipe(anchor="current", correction=Correction("mis", rejected="drop"))),
        ("takes advantages from `gae`", lambda: preset("ppo").advantages(torch.ones(2), None)),
        ("'gae' takes", lambda: preset("ppo", scale="group")),
        ("unknown correction 'is'", lambda: Correction("is")),
        ("no low", lambda: Correction("tis", low=0.5)),
        ("0 <= low < high", lambda: Correction("icepop", low=2.0, high=1.0)),
        ("exceed 1", lambda: policy_loss(Recipe(options={"dual_clip": 0.5}), t, lp)),
        ("unknown ratio level 'word'", lambda: policy_loss(Recipe(options={"level": "word"}), t, lp)),
        ("old log-prob", lambda: policy_loss(Recipe(), without("old"), lp)),
        ("needs advantages", lambda: policy_loss(Recipe(), without("advantages"), lp)),
        ("needs generator", lambda: policy_loss(Recipe(correction=Correction("tis")), without("generator"), lp)),
        (
            "needs old",
            lambda: policy_loss(Recipe(loss="reinforce", correction=Correction("tis")), without("old"), lp),
        ),
        ("needs reference", lambda: policy_loss(Recipe(kl_coefficient=0.1), without("reference"), lp)),
        ("entropy of the forward", lambda: policy_loss(Recipe(entropy_coefficient=0.1), t, lp)),
        ("needs truncated", lambda: policy_loss(preset("dapo"), without("truncated"), lp)),
        ("logprobs must be flat", lambda: policy_loss(Recipe(), t, lp[:-1])),
        ("fractions belong", lambda: losses.tokens([torch.tensor([0.5])])),
        ("old has sequences of", lambda: losses.tokens([torch.ones(2)], old=[torch.ones(3)])),
        ("carries no gradient", lambda: losses.tokens([torch.ones(2)], old=[torch.ones(2).requires_grad_()])),
        ("flat bools", lambda: Tokens(torch.ones(3), (3,))),
        ("one bool per sequence", lambda: Tokens(torch.ones(3).bool(), (3,), truncated=torch.zeros(3).bool())),
    ]:
        with pytest.raises(ValueError) as caught:
            call()
        assert message in str(caught.value)


def test_one_advantage_per_sequence():
    mask = [torch.ones(2), torch.ones(3)]
    t = losses.tokens(mask, advantages=torch.tensor([1.0, -1.0], dtype=torch.bfloat16))
    assert t.advantages is not None and t.advantages.tolist() == [1, 1, -1, -1, -1]
    assert t.advantages.dtype == torch.float32 and t.mask.dtype == torch.bool
