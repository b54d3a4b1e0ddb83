"""Losses on split models: every gradient of every recipe is the one that one rank has, however a step is cut.

The reference is a plain model that runs each sequence alone, all of them as one micro-batch. Recipes are many and a
backward through ranks is slow, but the backward of a forward is a linear map from the gradient of its outputs to those
of its parameters. So its matrix is taken once per layout, mesh and accumulation, one backward per token that is learned
from, and every recipe's gradient is a product with it. Some recipes go the whole way, through `Tensor.backward`.
"""

import copy
import dataclasses
import itertools
import math
import runpy
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan import ContextParallel, losses
from longspan import layout as layouts
from longspan.losses import Correction, Recipe, policy_loss, preset
from test_losses import AGGREGATIONS, CORRECTIONS, PENALTIES, TOKEN_LOSSES, pick
from test_score import IGNORE, ROOT, field_errors, next_tokens, tokens
from test_score import alone as alone_whole
from tiny import build, gradient_error, gradients, refusal

WIDE = torch.float64
SMALL = {"n_embd": 16, "n_head": 4, "n_positions": 64, "vocab_size": 48}  # GPT-2 computes all of fp64 in fp64
LAYOUTS = ("contiguous", "head_tail", "per_document")
MESHES = ((1, 2), (1, 4), (2, 2))  # dp, cp
CUTS_OF_A_MESH = list(itertools.product(LAYOUTS, (1, 4)))  # layout, accumulation
# Sixteen sequences in eight pairs. None of 6 and 7 is learned from, nor of 3; 2 has no next token.
LENGTHS = (9, 4, 1, 5, 11, 3, 3, 3, 7, 5, 13, 7, 5, 5, 2, 3)
NOT_LEARNED = (3, 6, 7)


def small():
    return build("gpt2", WIDE, **SMALL).train()


# -- a step --------------------------------------------------------------------------------------------------------


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, SMALL["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def alone(model, parts):
    """(log-probabilities of the next tokens, 0 at the end, and entropies) of each sequence run alone: flat, [tokens]"""
    found = [[], []]
    for part in parts:
        every = model(input_ids=part[None], use_cache=False).logits[0].log_softmax(-1)
        found[0].append(torch.cat([every[:-1].gather(-1, part[1:, None])[:, 0], every.new_zeros(1)]))
        found[1].append(torch.distributions.Categorical(logits=every).entropy())
    return tuple(torch.cat(each) for each in found)


def step_data(parts, model):
    """What a step knows beforehand, per sequence: near the model's log-probabilities, a prompt in front that is not
    learned from, holes in the mask, generator log-probabilities that are not finite, two truncated sequences."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        now = alone(model, parts)[0].split([len(part) for part in parts])
    data = {name: [] for name in ("mask", "advantages", "old", "generator", "reference", "weights")}
    for i, lp in enumerate(now):
        n = len(lp)
        noise = torch.randn(5, n, generator=g, dtype=WIDE)
        mask = (torch.arange(n) >= n - 6) & (torch.rand(n, generator=g) < 0.6)
        mask[-2:-1] = True
        mask[-1] = False
        if i in NOT_LEARNED:
            mask[:] = False
        old = lp + 0.2 * noise[0]
        generator = old + 0.15 * noise[1]
        if n > 10:
            mask[n - 4 : n - 2] = True
            generator[n - 4], generator[n - 3] = float("-inf"), float("nan")
        data["mask"].append(mask)
        data["advantages"].append((0.8 if i % 3 else -1.1) + 0.2 * noise[2])
        data["old"].append(old)
        data["generator"].append(generator)
        data["reference"].append(lp + 0.3 * noise[3])
        data["weights"].append(noise[4].abs())
    data["truncated"] = torch.tensor([i in (5, 13) for i in range(len(parts))])
    return data


def cut(accumulation, dp, mine):
    """The indices of the sequences of each of data-parallel rank `mine`'s micro-batches. Pairs stay together."""
    pairs = [(2 * i, 2 * i + 1) for i in range(len(LENGTHS) // 2)]
    own = pairs[mine::dp]
    share = len(own) // accumulation
    return [list(itertools.chain(*own[i * share : (i + 1) * share])) for i in range(accumulation)]


def pairs_of(batch):
    return torch.arange(len(batch)).view(-1, 2)


# -- recipes -------------------------------------------------------------------------------------------------------


def own_loss(t, logprobs):
    """A user's own: a sequence's mean log ratio, bent, weighs each of its tokens."""
    difference = torch.where(t.mask, logprobs - t.old, 0.0)
    mean = losses.spread(losses.sequence_mean(difference, t.mask, t.lengths), t.lengths)
    return -t.advantages * mean.tanh().exp() * (1 + logprobs.sin() / 3)


ALL_LOSSES = [*TOKEN_LOSSES, (own_loss, {})]


def cross(shift):
    """Every loss with every correction, each loss and each correction with every aggregation; shifts 0..3 together are
    every combination of the three."""
    for i, (loss, options) in enumerate(ALL_LOSSES):
        for j, correction in enumerate(CORRECTIONS):
            how = AGGREGATIONS[(i + j + shift) % 4]
            yield Recipe(loss=loss, options=options, correction=correction, **how)


def shift(dp, cp, number):
    """Of the number-th layout and accumulation of a mesh: all four come in every layout, mesh and accumulation."""
    return number + (0, 2, 3)[MESHES.index((dp, cp))]


def others():
    """Penalties under every anchor, each of the presets, and each loss once."""
    for anchor, penalty in itertools.product(("old", "generator", "current"), PENALTIES):
        if not (anchor == "current" and penalty.get("kl_weighted")):
            yield Recipe(anchor=anchor, **penalty, **AGGREGATIONS[len(penalty) % 4])
    for name in losses.PRESETS:
        yield preset(name, entropy_coefficient=0.05, **({"length": 20} if name == "dr_grpo" else {}))
    for i, (loss, options) in enumerate(ALL_LOSSES):
        yield Recipe(loss=loss, options=options, correction=CORRECTIONS[3 * i % 16], **AGGREGATIONS[i % 4])
    yield "dpo"


def called(recipe):
    if recipe == "dpo":
        return recipe
    loss = recipe.loss if isinstance(recipe.loss, str) else recipe.loss.__name__
    c = recipe.correction
    penalties = f"{recipe.kl_coefficient} {'weighted ' * recipe.kl_weighted}{recipe.kl_kind}"
    penalties = f"KL {penalties}, entropy {recipe.entropy_coefficient}"
    correction = f"{c.kind} {c.level} {c.rejected}"
    return f"{loss} {dict(recipe.options)}, anchor {recipe.anchor}, {recipe.aggregation}, {correction}, {penalties}"


def divisors(recipes, step, mesh=None):
    """Of the whole step, from this rank's micro-batches: before the first backward. Recipes that filter alike count
    alike, and one sum over data-parallel ranks is enough."""
    counted = {}
    for recipe in recipes:
        key = filters(recipe)
        if key not in counted and recipe == "dpo":
            counted[key] = losses.Counts(sum(losses.count_pairs(t, pairs_of(t.lengths)) for t in step), 0)
        elif key not in counted:
            counted[key] = losses.count(recipe, step)
    local = torch.tensor([[c.tokens, c.sequences] for c in counted.values()])
    total = longspan.dp_reduce(local, None if mesh is None else mesh["dp"]).tolist()
    every = {key: losses.Counts(*each) for key, each in zip(counted, total)}
    return [
        max(1, every[filters(r)].tokens) if r == "dpo" else losses.denominator(r, every[filters(r)]) for r in recipes
    ]


def filters(recipe):
    return recipe if recipe == "dpo" else (recipe.correction, recipe.overlong_filter)


def loss_of(recipe, t, logprobs, entropy):
    if recipe == "dpo":
        return losses.dpo(t, logprobs, pairs_of(t.lengths), label_smoothing=0.1)[0].sum()
    return policy_loss(recipe, t, logprobs, entropy).loss


def output_gradient(recipe, t, logprobs, scale):
    """The loss (times scale) and its gradient at the log-probabilities, [tokens]."""
    leaf = logprobs.detach().requires_grad_()
    loss = loss_of(recipe, t, leaf, None) * scale
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


# -- gradients -----------------------------------------------------------------------------------------------------


def flat_gradient(output, parameters):
    found = torch.autograd.grad(output, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


def matrix(logprobs, t, parameters):
    """d logprobs / d parameters, [tokens, numbers], 0 for tokens that nothing is learned from."""
    rows = torch.zeros(len(logprobs), sum(p.numel() for p in parameters), dtype=WIDE)
    for at in t.mask.nonzero().flatten().tolist():
        rows[at] = flat_gradient(logprobs[at], parameters)
    return rows


def worst_error(found, truth, model):
    """Per recipe, the largest relative error over parameters, as `gradient_error` counts it. [recipes, numbers]"""
    sizes = [p.numel() for p in model.parameters()]
    norms = torch.stack([part.norm(dim=1) for part in truth.split(sizes, 1)])
    off = torch.stack([part.norm(dim=1) for part in (found - truth).split(sizes, 1)])
    return (off / torch.maximum(norms, 1e-3 * norms.amax(0))).amax(0), norms.amax(0)


def error_of(found, truth):
    """`gradient_error`, infinite where something is not finite."""
    return gradient_error(found, truth) if all(g.isfinite().all() for g in found.values()) else math.inf


def larger(worst, error):
    """The larger one; a NaN counts as infinite."""
    error = float(error)
    return max(worst, math.inf if math.isnan(error) else error)


def scored(model, parts, batch, entropy=True):
    scores = longspan.score(model, [parts[i] for i in batch], entropy=entropy)
    return losses.flatten(scores.logprobs), losses.flatten(scores.entropy) if entropy else None


def linear():
    """Recipes without an entropy bonus, beyond the cross."""
    for each in others():
        yield dataclasses.replace(each, entropy_coefficient=0.0) if isinstance(each, Recipe) else each


def shared_out(cp, count, evaluate):
    """[count, ..] of rows that each rank of the group evaluates a part of: their inputs are the same bit for bit."""
    mine = [evaluate(k) for k in range(cp.rank, count, cp.size)]
    most = -(-count // cp.size)
    rows = torch.stack(mine + [torch.zeros_like(mine[0])] * (most - len(mine)))
    every = [torch.empty_like(rows) for _ in range(cp.size)]
    dist.all_gather(every, rows, group=cp.group)
    return torch.stack(every, 1).flatten(0, 1)[:count]


def without_tokens(cp, parts, data, batch, layout):
    """Whether some of these sequences are learned from, but none of this rank's rows is."""
    lengths = [len(parts[i]) for i in batch]
    starts = [0, *itertools.accumulate(lengths)][:-1]
    rows = ContextParallel(cp.mesh, layout=layout).bind(sum(lengths), starts).bound.positions(cp.rank)
    mask = torch.cat([data["mask"][i] for i in batch])
    return bool(mask.any()) and not mask[torch.from_numpy(rows)].any()


def body_cross(dp, size):
    mesh = longspan.init_mesh(dp=dp, cp=size)
    cp, world = ContextParallel(mesh["cp"]), dist.get_world_size()
    parts, plain = sequences(), small()
    data = step_data(parts, plain)
    whole = losses.tokens(**data)
    truth, entropies = alone(plain, parts)
    truth_matrix = matrix(truth, whole, list(plain.parameters()))
    report = {"outputs": 0.0, "loss": 0.0, "cross": (0.0, ""), "backward": (0.0, ""), "smallest": 1.0}
    report["rank without tokens"] = report["micro-batch without tokens"] = False

    def worse(name, error, recipe, *where):
        if larger(0.0, error) > report[name][0]:
            report[name] = larger(0.0, error), f"{called(recipe)}: {', '.join(map(str, where))}"

    for number, (layout, accumulation) in enumerate(CUTS_OF_A_MESH):
        scheme = ("ulysses", "exchange")[(number + number // 2) % 2]
        where = layout, f"dp {dp} x cp {size}", f"accumulation {accumulation}", scheme
        batches = cut(accumulation, dp, mesh.get_local_rank("dp"))
        step = [losses.tokens(**pick(data, batch)) for batch in batches]
        model = longspan.parallelize(copy.deepcopy(plain), mesh["cp"], layout=layout, scheme=scheme)
        parameters = list(model.parameters())

        # every recipe of the cross, by the matrix
        recipes = [*cross(shift(dp, size, number)), *(linear() if accumulation == 4 else ())]
        over = [each / dp for each in divisors(recipes, step, mesh)]
        over_all = divisors(recipes, [whole])
        values, found = torch.zeros(len(recipes), dtype=WIDE), 0.0
        for batch, t in zip(batches, step):
            logprobs, _ = scored(model, parts, batch)
            longspan.check_loss(logprobs, cp)
            expected = torch.cat([truth.split(LENGTHS)[i] for i in batch])
            report["outputs"] = larger(report["outputs"], (logprobs - expected).detach().abs().max())
            report["rank without tokens"] |= without_tokens(cp, parts, data, batch, layout)
            report["micro-batch without tokens"] |= not t.mask.any()

            def evaluate(k, t=t, logprobs=logprobs, recipes=recipes, over=over):
                loss, gradient = output_gradient(recipes[k], t, logprobs, 1 / over[k])
                return torch.cat([gradient, loss[None]])

            rows = shared_out(cp, len(recipes), evaluate)
            values += rows[:, -1]
            found = found + rows[:, :-1] @ matrix(logprobs, t, parameters)
        dist.all_reduce(found)
        dist.all_reduce(values)  # the mean over data-parallel ranks, as many times as there are cp ranks
        mine = range(dist.get_rank(), len(recipes), world)
        expected = [output_gradient(recipes[k], whole, truth, 1 / over_all[k]) for k in mine]
        for k, (loss, _) in zip(mine, expected):
            report["loss"] = larger(report["loss"], abs(values[k] / world - loss))
        gradient = torch.stack([row for _, row in expected]) @ truth_matrix
        errors, norms = worst_error(found[mine.start :: world] / world, gradient, model)
        worse("cross", float(errors.max()), recipes[mine[int(errors.argmax())]], *where)
        report["smallest"] = min(report["smallest"], float(norms.min()))

        # some recipes the whole way
        some = list(others())[(number + 3 * MESHES.index((dp, size))) % 9 :: 9]
        for recipe, mine, whole_step in zip(some, divisors(some, step, mesh), divisors(some, [whole]), strict=True):
            model.zero_grad()
            for batch, t in zip(batches, step):
                (loss_of(recipe, t, *scored(model, parts, batch)) * dp / mine).backward()
            ContextParallel(dist.group.WORLD).reduce_gradients(model)
            plain.zero_grad()
            (loss_of(recipe, whole, truth, entropies) / whole_step).backward(retain_graph=True)
            worse("backward", error_of(gradients(model), gradients(plain)), recipe, *where)
    return report


def test_the_cross_has_every_pair_and_over_each_layout_mesh_and_accumulation_every_triple():
    names = {}
    for dp, cp in MESHES:
        for number, (layout, accumulation) in enumerate(CUTS_OF_A_MESH):
            recipes = list(cross(shift(dp, cp, number)))
            triples = {(called(Recipe(loss=r.loss, options=r.options)), r.aggregation, r.correction) for r in recipes}
            for leave_out in range(3):
                pairs = {each[:leave_out] + each[leave_out + 1 :] for each in triples}
                assert len(pairs) == {0: 4 * 16, 1: 16 * 16, 2: 16 * 4}[leave_out]
            for place in (layout, (dp, cp), accumulation):
                names.setdefault(place, set()).update(triples)
    assert {len(each) for each in names.values()} == {16 * 4 * 16} and len(names) == 3 + 3 + 2


@pytest.mark.parametrize("dp, cp", MESHES)
def test_every_recipe_has_the_plain_gradients(run_ranks, dp, cp):
    reports = run_ranks(body_cross, dp * cp, dp, cp)
    for report in reports:
        assert report["outputs"] <= 1e-12 and report["loss"] <= 1e-12, report
        assert report["cross"][0] <= 1e-10 and report["backward"][0] <= 1e-10, report
        assert report["smallest"] > 1e-3, report  # there was something to be wrong
    assert any(report["rank without tokens"] for report in reports)
    assert any(report["micro-batch without tokens"] for report in reports) == (dp == 2)


# -- the mistake that looks right ----------------------------------------------------------------------------------


def body_mistake():
    """GSPO's ratio of each sequence from this rank's own tokens, their sum all-reduced within the graph."""
    cp = ContextParallel(dist.group.WORLD)
    parts, plain = sequences(), small()
    data, batch = step_data(parts, plain), range(len(parts))
    t = losses.tokens(**data)
    recipe = preset("gspo", options={"clip_low": 0.5, "clip_high": 0.5}, aggregation="token_mean")
    over = losses.denominator(recipe, losses.count(recipe, [t]))
    mask = losses.filtered(recipe, t).mask
    truth, _ = alone(plain, parts)
    reference = policy_loss(recipe, t, truth).loss / over
    reference.backward()

    def right(model):
        return policy_loss(recipe, t, scored(model, parts, batch)[0]).loss / over

    def wrong(model):
        scores = longspan.score(model, parts, logits="local")
        sums, own, of = [], [], []
        starts = [0, *itertools.accumulate(LENGTHS)]
        for i, (logits, at) in enumerate(zip(scores.logits, scores.positions)):
            learned = mask[starts[i] + at]
            labels = parts[i][at[learned] + 1]
            picked = logits[learned].log_softmax(-1).gather(-1, labels[:, None])[:, 0]
            sums.append((picked - t.old[starts[i] + at[learned]]).sum())
            own.append(t.advantages[starts[i] + at[learned]].sum())
            of.append(mask[starts[i] : starts[i + 1]].sum())
        difference = torch.stack(sums) * 1.0
        dist.all_reduce(difference)  # right in the forward; the backward knows nothing of the other ranks' losses
        ratio = (difference / torch.stack(of).clamp(min=1)).exp()
        assert bool(((ratio > 0.5) & (ratio < 1.5)).all())  # none is clipped
        return cp.total(-(torch.stack(own) * ratio).sum() / over)

    found = {}
    for name, loss_of_step in (("right", right), ("wrong", wrong)):
        model = longspan.parallelize(small(), dist.group.WORLD, layout="contiguous")
        loss = loss_of_step(model)
        loss.backward()
        cp.reduce_gradients(model)
        found[name] = abs(float((loss - reference).detach())), error_of(gradients(model), gradients(plain))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_an_all_reduce_inside_a_sequence_ratio_is_caught_by_its_gradients_alone(run_ranks, size):
    for found in run_ranks(body_mistake, size):
        assert found["right"][0] <= 1e-12 and found["right"][1] <= 1e-10, found
        assert found["wrong"][0] <= 1e-12 and found["wrong"][1] > 0.05, found


# -- denominators --------------------------------------------------------------------------------------------------


def body_denominators():
    mesh = longspan.init_mesh(dp=2, cp=2)
    parts, plain = sequences(), small()
    data = step_data(parts, plain)
    # The same by hand: those tokens out of the mask, and nothing left to filter.
    by_hand = {**data, "truncated": torch.zeros(len(parts), dtype=torch.bool)}
    by_hand["mask"] = [
        mask & q.isfinite() & ~cut_off for mask, q, cut_off in zip(data["mask"], data["generator"], data["truncated"])
    ]
    by_hand["generator"] = [torch.where(q.isfinite(), q, -1.0) for q in data["generator"]]
    left = sum(int(mask.sum()) for mask in by_hand["mask"])
    given = sum(int(mask.sum()) for mask in data["mask"])
    mine = mesh.get_local_rank("dp")
    truth, _ = alone(plain, parts)
    model, report = longspan.parallelize(small(), mesh["cp"], layout="balanced"), []
    drop = Correction("mis", high=1.1, rejected="drop")
    for correction, how in zip((Correction(), drop, Correction(), drop), AGGREGATIONS):
        recipe = Recipe(correction=correction, overlong_filter=True, **how)
        found = {}
        for name, source, accumulation in (("one", data, 1), ("four", data, 4), ("by hand", by_hand, 4)):
            batches = cut(accumulation, 2, mine)
            step = [losses.tokens(**pick(source, batch)) for batch in batches]
            (over,) = divisors([recipe], step, mesh)
            model.zero_grad()
            total = 0.0
            for batch, t in zip(batches, step):
                logprobs, _ = scored(model, parts, batch, entropy=False)
                logprobs.retain_grad()
                loss = policy_loss(recipe, t, logprobs).loss * 2 / over
                loss.backward()
                assert not logprobs.grad[~losses.filtered(recipe, t).mask].any()
                total = total + loss.detach()
            ContextParallel(dist.group.WORLD).reduce_gradients(model)
            dist.all_reduce(total)
            found[name] = over, float(total) / 4, gradients(model)
        whole = losses.tokens(**by_hand)
        if recipe.aggregation == "token_mean" and correction.kind == "none":
            assert found["one"][0] == left < given, (found["one"][0], left, given)
        plain.zero_grad()
        reference = policy_loss(recipe, whole, truth).loss / divisors([recipe], [whole])[0]
        reference.backward(retain_graph=True)
        assert len({each[0] for each in found.values()}) == 1, (recipe, found)
        off = max(abs(each[1] - float(reference.detach())) for each in found.values())
        worst = max(error_of(each[2], gradients(plain)) for each in found.values())
        report.append((off, worst, error_of(found["one"][2], found["four"][2])))
    return report


def test_what_is_filtered_leaves_denominators_over_all_ranks_and_micro_batches(run_ranks):
    for report in run_ranks(body_denominators, 4):
        assert len(report) == 4 and max(map(max, report)) <= 1e-12, report


# -- shards --------------------------------------------------------------------------------------------------------


def layouts_of(length, size):
    """Every kind of ownership."""
    for name in layouts.NAMES:
        yield layouts.make(name, length, size, [0, 5, 6, length // 2])
    yield layouts.balanced([1 + 7 * at % length for at in range(length)], size)  # of any rule
    yield from odd_layouts(length, size)


def odd_layouts(length, size):
    """Uneven, with the end of the sequence on the first ranks and a rank's rows from back to front; then with a rank
    that has nothing."""
    bounds = [0, length // 5, length // 3, length // 2, 3 * length // 4, length]
    pieces = [layouts.Span(*each) for each in itertools.pairwise(bounds)]
    owned = {2: ([[4, 1], [3, 2, 0]], [[], [4, 3, 2, 1, 0]]), 4: ([[4], [3, 1], [2], [0]], [[4, 0], [], [3], [2, 1]])}
    for ranks in owned[size]:
        yield layouts.Layout(length, tuple(tuple(pieces[i] for i in each if pieces[i].size) for each in ranks))


def body_shards():
    size, length, report = dist.get_world_size(), 37, []
    labels = torch.arange(2 * length).view(2, length) + 1
    mask = labels % 3 != 0
    tree = {
        "input_ids": labels - 1,
        "labels": labels,
        "loss_kwargs": {
            "advantages": labels * 2.0,
            "mask": mask,
            "logprobs": {"generator": labels * 3.0, "reference": [labels * 4.0, (labels * 5.0, None)]},
            "top_k": labels[..., None] * torch.tensor([6.0, 7.0]),  # [B, S, K]
            "temperature": 0.7,
            "temperatures": torch.tensor([0.7, 1.0]),  # [B]
            "count": torch.tensor(41.0),
            "groups": ["a", "b"],
        },
    }
    for kind in layouts_of(length, size):
        cp = ContextParallel(dist.group.WORLD, layout=kind)
        local, positions = cp.shard(tree), torch.from_numpy(kind.positions(cp.rank))
        at, given = local["labels"], local["loss_kwargs"]
        assert torch.equal(at, labels[:, positions]) and torch.equal(local["input_ids"], at - 1), kind
        times = (given["advantages"], given["logprobs"]["generator"], given["logprobs"]["reference"][0])
        for factor, value in zip((2, 3, 4, 5), (*times, given["logprobs"]["reference"][1][0])):
            assert torch.equal(value, factor * at.float()), (kind, factor)
        assert torch.equal(given["top_k"], torch.stack([at * 6.0, at * 7.0], -1)), kind
        assert torch.equal(given["mask"], at % 3 != 0) and given["mask"].dtype == torch.bool, kind
        for name in ("temperature", "temperatures", "count", "groups"):
            assert given[name] is tree["loss_kwargs"][name] or given[name] == ["a", "b"], name
        assert given["logprobs"]["reference"][1][1] is None and type(given["logprobs"]["reference"][1]) is tuple
        sums = torch.stack([(given["advantages"] * given["mask"]).sum(), (given["top_k"][given["mask"]]).sum()])
        dist.all_reduce(sums)
        report.append(sums.tolist() == [2.0 * float(labels[mask].sum()), 13.0 * float(labels[mask].sum())])
        report.append(cp.bound.row_counts[cp.rank] == at.shape[1])
    return report, min(kind.row_counts[dist.get_rank()] for kind in layouts_of(length, size))


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_nested_loss_kwargs_stay_with_their_labels(run_ranks, size):
    results = run_ranks(body_shards, size)
    assert all(all(report) and len(report) >= 12 for report, _ in results)
    assert min(fewest for _, fewest in results) == 0  # a rank had nothing


def body_loss_of_shards():
    """A user's own token loss on local logits and shards of its data, in a packed row."""
    cp, parts, plain = ContextParallel(dist.group.WORLD), sequences(), small()
    data = step_data(parts, plain)
    t = losses.filtered(Recipe(), losses.tokens(**data))
    truth, _ = alone(plain, parts)
    over, report = int(t.mask.sum()), {}
    clean = torch.where(t.mask, truth, 0.0)
    reference = -(t.advantages * (clean - t.old).exp())[t.mask].sum() / over
    reference.backward()
    length, starts = sum(LENGTHS), [0, *itertools.accumulate(LENGTHS)][:-1]
    row = {
        "labels": torch.cat([torch.cat([part[1:], part.new_zeros(1)]) for part in parts])[None],
        "loss_kwargs": {"advantages": t.advantages[None], "old": t.old[None], "mask": t.mask[None], "over": over},
    }
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    for name in layouts.NAMES:
        model = longspan.parallelize(small(), dist.group.WORLD, layout=name, logits="local")
        local = ContextParallel(dist.group.WORLD, layout=name).bind(length, starts).shard(row)
        logits = model(input_ids=torch.cat(parts)[None], position_ids=positions, use_cache=False).logits
        picked = logits.log_softmax(-1).gather(-1, local["labels"][..., None])[..., 0]
        given = local["loss_kwargs"]
        terms = given["advantages"] * (picked - given["old"]).exp()
        loss = cp.total(-terms[given["mask"]].sum() / given["over"])
        loss.backward()
        cp.reduce_gradients(model)
        report[name] = abs(float((loss - reference).detach())), error_of(gradients(model), gradients(plain))
    unbound = ContextParallel(dist.group.WORLD, layout="per_document")
    return report, refusal(lambda: unbound.shard(row))  # which documents?


@pytest.mark.parametrize("size", [2, 4])
def test_a_token_loss_on_shards_has_the_plain_gradients(run_ranks, size):
    for report, said in run_ranks(body_loss_of_shards, size):
        assert max(map(max, report.values())) <= 1e-10, report
        assert "cp.bind(length, boundaries) first" in said


# -- a step in fp32 ------------------------------------------------------------------------------------------------


def body_step(path):
    bench = runpy.run_path(path)
    result = bench["compare"](256)
    return bench["fine"](result), result


def test_a_grpo_step_in_fp32_has_the_figures_of_one_rank_and_repeats_to_the_bit(run_ranks):
    for fine, result in run_ranks(body_step, 2, str(ROOT / "benches" / "grpo_step.py")):
        assert fine and result["gradient"] <= 1e-5 and 100 < result["one"]["tokens"] < 512, result
        assert 0.02 < result["one"]["clipped fraction"] < 0.5


# -- whole outputs -------------------------------------------------------------------------------------------------

GROUPS = [(13, 1, 24, 7), (5, 19, 2)]  # of the data-parallel ranks
K = 2


def targets_of(parts):
    """[T, K], some of them ignored; of the third sequence of a group all."""
    every = []
    for i, part in enumerate(parts):
        labels = torch.stack([next_tokens(part), part.flip(0)], -1)
        labels[i % 2 :: 3, 1] = IGNORE
        every.append(labels if i != 2 else torch.full_like(labels, IGNORE))
    return every


def untied(dtype=WIDE):
    return build("gpt2", dtype, **SMALL, tie_word_embeddings=False).train()


def of_hidden(scores, head):
    return sum(head(each[1::2]).tanh().square().sum() for each in scores.hidden_states)


def of_targets(scores, head):
    weights = [torch.linspace(-1, 2, each.numel(), dtype=WIDE).view_as(each) for each in scores.logprobs]
    return sum((w * each).sum() + (each.mean(0) * 0.3).exp().sum() for w, each in zip(weights, scores.logprobs))


def of_top(scores, head):
    return sum((each * torch.arange(1.0, 4.0)).sum() for each in scores.top_k.logprobs)


def of_logits(scores, head):
    return sum(each.sin().sum() + each[0].square().sum() for each in scores.logits)


def of_all(scores, head):
    return of_hidden(scores, head) + of_targets(scores, head) + of_top(scores, head) + of_logits(scores, head)


EVERY_FIELD = {"top_k": 3, "entropy": True, "hidden_states": True, "logits": "whole"}
MODES = {  # what score is asked for, a loss, and what is trained
    "hidden": ({"hidden_states": True}, of_hidden, ""),
    "targets": ({}, of_targets, ""),
    "top-k": ({"top_k": 3}, of_top, ""),
    "logits": ({"logits": "whole"}, of_logits, ""),
    "all": (EVERY_FIELD, of_all, ""),
    "head only": (EVERY_FIELD, of_all, "lm_head"),
    "frozen": (EVERY_FIELD, of_all, "nothing"),
}


def trained(model, only):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(only))
    return model


def step_gradients(loss, *modules, ranks=None):
    """Averaged over `ranks`; none and zero are the same to a trainer."""
    for module in modules:
        module.zero_grad()
    if loss.requires_grad:
        loss.backward()
    for module in modules:
        ContextParallel(ranks).reduce_gradients(module)
    return {name: g for module in modules for name, g in gradients(module).items() if g.any()}


def body_outputs(dp, size):
    mesh = longspan.init_mesh(dp=dp, cp=size)
    torch.manual_seed(3)
    head = torch.nn.Linear(SMALL["n_embd"], 1).to(WIDE)
    groups = [tokens(lengths, seed=i, vocabulary=SMALL["vocab_size"]) for i, lengths in enumerate(GROUPS[:dp])]
    here = mesh.get_local_rank("dp")
    mine = groups[here]
    worst = {"values": 0.0, "loss": 0.0, "gradients": 0.0}
    differs, owned = [], []
    real = layouts.make
    plain, model = untied(), longspan.parallelize(untied(), mesh["cp"])
    truths = [alone_whole(plain, parts, targets_of(parts), 3) for parts in groups]

    def step_of(mode):
        """What a rank with the whole of it has: its loss, and the gradients of the mean of the ranks' losses."""
        _, loss, only = MODES[mode]
        trained(plain, only)
        values = [loss(alone_whole(plain, parts, targets_of(parts), 3), head) for parts in groups]
        every = [torch.log1p((sum(values) / 50).square()) + value / 300 for value in values]
        return every[here].detach(), step_gradients(sum(every) / dp, plain, head)

    steps = {mode: step_of(mode) for mode in MODES}
    for kind, (mode, (options, loss, only)) in itertools.product(range(2), MODES.items()):
        reference, truth = steps[mode]
        trained(model, only)

        def made(name, length, ranks, *rest, kind=kind, **more):
            if ranks == 1:
                return real(name, length, ranks, *rest, **more)
            owned.append(list(odd_layouts(length, ranks))[kind])
            return owned[-1]

        with mock.patch.object(layouts, "make", made):
            scores = longspan.score(model, mine, targets_of(mine), **options)
            with torch.no_grad():
                quiet = longspan.score(model, mine, targets_of(mine), **options)
            own = loss(scores, head)
            everywhere = longspan.dp_reduce(own, mesh)
            value = torch.log1p((everywhere / 50).square()) + own / 300  # of all ranks together, and of its own
            longspan.check_loss(value, mesh["cp"])
            found = step_gradients(value, model, head, ranks=dist.group.WORLD)
        worst["loss"] = larger(worst["loss"], abs(value.detach() - reference))
        for each in (scores, quiet):
            worst["values"] = larger(worst["values"], field_errors(each, truths[here]))
        if truth or found:
            worst["gradients"] = larger(worst["gradients"], error_of(found, truth))
        graph = {"hidden": scores.hidden_states, "logprobs": scores.logprobs, "logits": scores.logits}
        expected = {"hidden": only == "", "logprobs": only != "nothing", "logits": only != "nothing"}
        for name, field in graph.items():
            if field is not None and any(each.requires_grad is not expected[name] for each in field):
                differs.append((kind, mode, name))
        if any(each.requires_grad for each in quiet.logprobs):
            differs.append((kind, mode, "no_grad"))
        if bool({"lm_head.weight"} & set(truth)) != (mode not in ("hidden", "frozen")):
            differs.append((kind, mode, "nothing to compare"))
        if scores.logprobs[2].any():
            differs.append((kind, mode, "ignored"))
    return worst, differs, [min(each.row_counts) for each in owned]


@pytest.mark.parametrize("dp, cp", MESHES)
def test_whole_outputs_whoever_owns_the_rows(run_ranks, dp, cp):
    for worst, differs, fewest in run_ranks(body_outputs, dp * cp, dp, cp):
        assert max(worst.values()) <= 1e-10 and not differs, (worst, differs)
        assert min(fewest) == 0 and max(fewest) > 0
