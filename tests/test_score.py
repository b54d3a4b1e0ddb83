"""score(): whole outputs in the caller's order, whose losses have the plain model's values and every gradient.

The reference is each sequence run alone through the plain model, with log_softmax of its logits, in fp64.
"""

import logging
import runpy
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    RobertaConfig,
    RobertaForCausalLM,
)

import longspan
from longspan import ContextParallel, scoring
from longspan.models.find import decoder_of
from longspan.models.score import TopK
from tiny import CONFIGS, Largest, build, gradient_error, gradients

ROOT = Path(__file__).parent.parent
IGNORE = -100
KINDS = ("llama", "qwen3", "gemma2", "gpt2", "mistral")
WIDE = torch.float64
LENGTHS = (13, 1, 24, 7, 2)


def world():
    return dist.group.WORLD


def tokens(lengths=LENGTHS, seed=0, vocabulary=96):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]


def next_tokens(part):
    return F.pad(part[1:], (0, 1), value=IGNORE)


@contextmanager
def really_wide():
    """Norms and eager attention narrow fp64 to fp32, where the order of a sum shows; in here they do not."""
    softmax, to = F.softmax, torch.Tensor.to

    def wide_to(self, *args, **kwargs):
        return self if self.dtype is WIDE and args[:1] == (torch.float32,) else to(self, *args, **kwargs)

    def wide_softmax(input, dim=None, dtype=None):
        return softmax(input, dim=dim, dtype=WIDE if dtype is torch.float32 else dtype)

    wide = mock.patch.object(torch.Tensor, "float", torch.Tensor.double), mock.patch.object(torch.Tensor, "to", wide_to)
    with wide[0], wide[1], mock.patch.object(F, "softmax", wide_softmax):
        yield


def split(model, **options):
    return longspan.parallelize(model, world() if dist.get_world_size() > 1 else None, **options)


def reduce(*modules):
    for module in modules:
        ContextParallel(world()).reduce_gradients(module)


# -- the reference, and losses on either -----------------------------------------------------------------------


def alone(model, parts, targets=None, top_k=0, temperature=1.0):
    """What score returns for a list, from each sequence run alone."""
    body, vocabulary = decoder_of(model), model.config.get_text_config().vocab_size
    found = {"logprobs": [], "entropy": [], "hidden_states": [], "logits": [], "top": [], "top_ids": []}
    for i, part in enumerate(parts):
        label = next_tokens(part) if targets is None else targets[i]
        kept = []
        hook = body.register_forward_hook(lambda module, args, out, kept=kept: kept.append(out.last_hidden_state))
        logits = model(input_ids=part[None], use_cache=False).logits[0, :, :vocabulary] / temperature
        hook.remove()
        every = F.log_softmax(logits, -1)
        picked = every.gather(-1, label.clamp(min=0).reshape(len(part), -1)).view_as(label)
        found["logprobs"].append(torch.where(label == IGNORE, 0.0, picked))
        found["entropy"].append(torch.distributions.Categorical(logits=logits).entropy())
        found["hidden_states"].append(kept[0][0])
        found["logits"].append(logits)
        top = every.topk(top_k, -1)
        found["top"].append(top.values)
        found["top_ids"].append(top.indices)
    top = TopK(found.pop("top"), found.pop("top_ids"))
    return longspan.Scores(top_k=top, **found)


def probe(width=64):
    torch.manual_seed(3)
    return torch.nn.Linear(width, 1).to(WIDE)


def token_loss(scores, probe):
    weights = [torch.linspace(-1, 2, each.numel(), dtype=each.dtype).view_as(each) for each in scores.logprobs]
    return -sum((w * each).sum() for w, each in zip(weights, scores.logprobs)) / 37


def ratio_loss(scores, probe):
    """exp(mean(logp - old)) of a sequence times its advantage, over tokens with a target."""
    total = 0.0
    for i, each in enumerate(scores.logprobs):
        mask = each.detach() != 0
        old = torch.linspace(-4.0, -3.0, each.numel(), dtype=each.dtype).view_as(each)
        if mask.any():
            total = total - (1.5 - i) * ((each - old)[mask].mean()).exp()
    return total


def probe_loss(scores, probe):
    total = 0.0
    for each in scores.hidden_states:
        mask = torch.arange(len(each)) % 3 != 1
        total = total + probe(each[mask]).tanh().square().sum()
    return total


def pair_loss(scores, probe):
    chosen, rejected = scores.logprobs[0].sum(), scores.logprobs[2].sum()
    return -F.logsigmoid(0.05 * (chosen - rejected + 3.0))


def field_loss(scores, probe):
    total = sum(each.square().sum() for each in scores.entropy)
    total = total + sum((each * torch.arange(1, each.shape[-1] + 1)).sum() for each in scores.top_k.logprobs)
    return total + sum(each.sin().sum() for each in scores.logits)


LOSSES = (token_loss, ratio_loss, probe_loss, pair_loss)


def everything(scores, probe):
    return token_loss(scores, probe) + ratio_loss(scores, probe) + probe_loss(scores, probe) + field_loss(scores, probe)


def step(run, model, loss):
    """(loss, gradients of model and probe, scores) of a loss on `run(model)`."""
    head = probe()
    scores = run(model)
    value = loss(scores, head)
    value.backward()
    return value.detach(), model, head, scores


def found_of(result):
    value, model, head, _ = result
    return value, {**gradients(model), **gradients(head)}


def errors(split_result, truth_result):
    value, found = found_of(split_result)
    reference, truth = found_of(truth_result)
    return abs(float(value - reference)), gradient_error(found, truth)


def field_errors(found, truth):
    worst = 0.0
    for name in ("logprobs", "entropy", "hidden_states", "logits"):
        if getattr(found, name) is None:
            continue
        for a, b in zip(getattr(found, name), getattr(truth, name), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype, (name, a.shape, b.shape)
            worst = max(worst, float((a - b).detach().abs().nan_to_num(torch.inf).max()))
    if found.top_k is not None:
        for a, b in zip(found.top_k.logprobs, truth.top_k.logprobs, strict=True):
            worst = max(worst, float((a - b).detach().abs().nan_to_num(torch.inf).max()))
        assert all(torch.equal(a, b) for a, b in zip(found.top_k.ids, truth.top_k.ids, strict=True))
    return worst


ALL = {"top_k": 3, "entropy": True, "hidden_states": True, "logits": "whole"}


# -- lists -----------------------------------------------------------------------------------------------------


@really_wide()
def body_losses(kind, options):
    results = {}
    parts = tokens()
    for loss in LOSSES:
        hidden = loss is probe_loss
        truth = step(lambda model: alone(model, parts), build(kind, WIDE).train(), loss)
        model = split(build(kind, WIDE), **options).train()
        found = step(lambda model, hidden=hidden: longspan.score(model, parts, hidden_states=hidden), model, loss)
        reduce(model, found[2])
        if loss is probe_loss:  # the plain graph gives the head none, the split one zeros: both say nothing
            found_gradients, true_gradients = gradients(model), gradients(truth[1])
            extra = set(found_gradients) - set(true_gradients)
            assert all(not found_gradients[name].any() for name in extra)
            for name, parameter in model.named_parameters():
                parameter.grad = None if name in extra else parameter.grad
        results[loss.__name__] = errors(found, truth)
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_losses_have_the_plain_gradients(run_ranks, kind):
    options = {"scheme": "exchange", "layout": "contiguous"} if kind in ("gpt2", "mistral") else {}
    for size in (2, 4) if kind == "gemma2" else (2,):
        for results in run_ranks(body_losses, size, kind, options):
            assert max(map(max, results.values())) <= 1e-10, (size, results)


@really_wide()
def body_grid(kind, lengths):
    results = {}
    parts = tokens(lengths)
    targets = []
    for i, part in enumerate(parts):  # three targets per position, some of them ignored
        labels = torch.stack([next_tokens(part), part.flip(0), part.flip(0)], -1)
        labels[i % 2 :: 3, 1] = IGNORE
        targets.append(labels)

    def run(model):
        return longspan.score(model, parts, targets, temperature=1.7, **ALL)

    truth = step(lambda model: alone(model, parts, targets, 3, 1.7), build(kind, WIDE).train(), everything)
    for scheme in ("ulysses", "exchange"):
        for layout in ("contiguous", "head_tail", "per_document"):
            model = split(build(kind, WIDE), scheme=scheme, layout=layout).train()
            if layout == "head_tail":
                model.gradient_checkpointing_enable()
            found = step(run, model, everything)
            reduce(model, found[2])
            results[scheme, layout] = (*errors(found, truth), field_errors(found[3], truth[3]))
    return results


@pytest.mark.parametrize("kind, lengths", [("llama", LENGTHS), ("gemma2", (1, 2)), ("llama", (1,))])
def test_fields_schemes_layouts_and_empty_shards(run_ranks, kind, lengths):
    for results in run_ranks(body_grid, 4, kind, lengths):
        assert max(map(max, results.values())) <= 1e-10, results


@really_wide()
def test_a_plain_model_gives_the_same_in_few_forwards():
    parts = tokens((13, 1, 24, 7, 12, 22, 13, 23))  # 24 23 22 | 13 13 12 | 7 | 1
    for kind in ("llama", "gemma2", "gpt2"):
        assert forwards_of(build(kind, WIDE), parts) == [(3, 24), (3, 13), (1, 7), (1, 1)]
        truth = step(lambda model: alone(model, parts, None, 3, 0.5), build(kind, WIDE).train(), everything)
        found = step(
            lambda model: longspan.score(model, [p.tolist() for p in parts], temperature=0.5, **ALL),
            longspan.parallelize(build(kind, WIDE), None).train(),
            everything,
        )
        assert max(*errors(found, truth), field_errors(found[3], truth[3])) <= 1e-10, kind


def forwards_of(model, parts):
    shapes = []
    hook = model.get_input_embeddings().register_forward_hook(lambda m, args, out: shapes.append(tuple(args[0].shape)))
    with torch.no_grad():
        longspan.score(model, parts)
    hook.remove()
    return shapes


def test_plain_models_that_may_not_be_padded():
    parts = tokens((13, 12, 13))
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    for changes in ({}, {"rope_parameters": rope}):
        model = build("llama", **changes)
        backend = model.config._attn_implementation
        assert forwards_of(model, parts) == ([(2, 13), (1, 12)] if changes else [(3, 13)])
        assert model.config._attn_implementation == backend


# -- batches ---------------------------------------------------------------------------------------------------


def body_batch():
    parts = tokens((9, 21, 1, 14))
    length, worst = 21, []
    truth = step(lambda model: alone(model, parts, None, 3), build("gpt2", WIDE).train(), everything)
    for side in ("left", "right"):
        pads = [(length - len(p), 0) if side == "left" else (0, length - len(p)) for p in parts]
        ids = torch.stack([F.pad(p, pad, value=5) for p, pad in zip(parts, pads)])
        mask = torch.stack([F.pad(torch.ones_like(p), pad) for p, pad in zip(parts, pads)])

        def cut(batch, mask=mask):
            return None if batch is None else [row[real.bool()] for row, real in zip(batch, mask)]

        def run(model, ids=ids, mask=mask, cut=cut):
            scores = longspan.score(model, ids, attention_mask=mask, **ALL)
            assert scores.logprobs.shape == ids.shape and scores.logits.shape == (*ids.shape, 96)
            assert not scores.logprobs[mask == 0].any() and not scores.top_k.ids[mask == 0].any()
            top = TopK(cut(scores.top_k.logprobs), cut(scores.top_k.ids))
            names = ("logprobs", "entropy", "hidden_states", "logits")
            return longspan.Scores(top_k=top, **{name: cut(getattr(scores, name)) for name in names})

        model = split(build("gpt2", WIDE)).train()
        found = step(run, model, everything)
        if dist.get_world_size() > 1:
            reduce(model, found[2])
        worst.append(max(*errors(found, truth), field_errors(found[3], truth[3])))
    return worst


def test_batches_with_padding_on_either_side(run_ranks):
    for size in (1, 4):
        assert max(map(max, run_ranks(body_batch, size))) <= 1e-10


def body_local():
    parts = tokens((9, 21, 1, 14))
    model = split(build("llama", WIDE), layout="head_tail").eval()
    batch = torch.stack(tokens((16, 16)))
    with torch.no_grad():
        whole, local = (longspan.score(model, parts, logits=each) for each in ("whole", "local"))
        rows = longspan.score(model, batch, logits="local")
        own = [whole.logits[i][at] for i, at in enumerate(local.positions)]
        same = all(torch.equal(a, b) for a, b in zip(own, local.logits, strict=True))
        with shared_whenever_possible():
            tree = longspan.score(model, TREES["family"], logits="local")
            ids = torch.stack([F.pad(part, (33 - len(part), 0), value=5) for part in TREES["family"]])
            mask = torch.stack([F.pad(torch.ones_like(part), (33 - len(part), 0)) for part in TREES["family"]])
            padded = longspan.score(model, ids, attention_mask=mask)
            assert longspan.report(model)["tokens"] == 76 // 4  # as a tree; the sequences have 197 tokens
        truth = alone(build("llama", WIDE), TREES["family"])
    assert not whole.logprobs[0].requires_grad
    same = same and all(
        (row[33 - len(true) :] - true).abs().max() < 1e-10 and not row[: 33 - len(true)].any()
        for row, true in zip(padded.logprobs, truth.logprobs, strict=True)
    )
    counts = torch.zeros(len(TREES["family"]), 33, dtype=torch.int64)
    for count, at, logits, true in zip(counts, tree.positions, tree.logits, truth.logits, strict=True):
        count[at] += 1
        same = same and (logits - true[at]).abs().max().item() < 1e-10 if len(at) else same
    dist.all_reduce(counts)
    lengths = [len(part) for part in TREES["family"]]
    same = same and all((count[:n] == 1).all() and not count[n:].any() for count, n in zip(counts, lengths))
    return same, [len(at) for at in local.positions], [len(at) for at in rows.positions]


def test_local_logits_know_their_positions(run_ranks):
    results = run_ranks(body_local, 4)
    assert all(same for same, _, _ in results)
    assert [sum(counts) for counts in zip(*(counts for _, counts, _ in results))] == [9, 21, 1, 14]
    assert [sum(counts) for counts in zip(*(counts for _, _, counts in results))] == [16, 16]


# -- targets, modes --------------------------------------------------------------------------------------------


def body_modes():
    parts = tokens()
    results = {}
    model = split(build("llama", WIDE))
    with torch.no_grad():
        truth = alone(build("llama", WIDE), parts)
    for name in ("train", "eval"):
        getattr(model, name)()
        with torch.no_grad():
            results[name] = field_errors(longspan.score(model, parts), truth)
    # nothing to predict: zeros that are part of the graph
    ignored = [torch.full_like(p, IGNORE) for p in parts]
    scores = longspan.score(model, parts, ignored)
    sum(each.sum() for each in scores.logprobs).backward()
    reduce(model)
    results["ignored"] = float(sum(each.abs().sum() for each in scores.logprobs).detach())
    results["ignored gradients"] = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    # two calls before one backward
    others = tokens((8, 3), seed=5)

    def both(run):
        return lambda model: (run(model, parts), run(model, others))

    def product(pair, probe):
        return ratio_loss(pair[0], probe) * token_loss(pair[1], probe)

    truth = step(both(alone), build("llama", WIDE), product)
    found = step(both(longspan.score), split(build("llama", WIDE)), product)
    reduce(found[1])
    results["two calls"] = max(errors(found, truth))
    # a frozen decoder under a trained head, and a probe on a frozen model
    frozen = build("llama", WIDE)
    frozen.get_decoder().requires_grad_(False)
    truth = step(lambda m: alone(m, parts), frozen, token_loss)
    frozen = build("llama", WIDE)
    frozen.get_decoder().requires_grad_(False)
    found = step(lambda m: longspan.score(m, parts), split(frozen), token_loss)
    reduce(found[1], found[2])
    results["frozen decoder"] = max(errors(found, truth))
    frozen = build("llama", WIDE).requires_grad_(False)
    truth = step(lambda m: alone(m, parts), frozen, probe_loss)
    found = step(lambda m: longspan.score(m, parts, ignored, hidden_states=True), split(frozen), probe_loss)
    reduce(found[1], found[2])
    results["frozen"] = max(errors(found, truth))
    return results


def test_modes_and_frozen_parts(run_ranks):
    for size in (2, 4):
        for results in run_ranks(body_modes, size):
            assert max(results.values()) <= 1e-10, results


def body_by_length():
    """Decoders whose positions depend on more than a document: sequences of one length at a time."""
    results = {}
    parts = tokens((40, 5, 12, 5))
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}

    def dynamic():
        return build("llama", WIDE, max_position_embeddings=16, rope_parameters=dict(rope))

    def roberta():
        torch.manual_seed(7)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = RobertaConfig(
            vocab_size=96,
            is_decoder=True,
            initializer_range=0.1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=80,
            pad_token_id=1,
            **sizes,
        )
        return RobertaForCausalLM._from_config(config).to(WIDE)

    def qwen():  # numbers tokens above its decoder
        torch.manual_seed(7)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        text = {**sizes, "vocab_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2, "rope_parameters": rope}
        vision = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
        config = Qwen2_5_VLConfig(text_config={**text, "initializer_range": 0.1}, vision_config=vision)
        return Qwen2_5_VLForConditionalGeneration._from_config(config).to(WIDE)

    for make in (dynamic, roberta, qwen):
        truth = step(lambda m: alone(m, parts, None, 3), make().train(), everything)
        model = split(make()).train()
        found = step(lambda m: longspan.score(m, parts, **ALL), model, everything)
        reduce(model, found[2])
        results[make.__name__] = (*errors(found, truth), field_errors(found[3], truth[3]))
    return results


def test_positions_that_depend_on_more_than_a_document(run_ranks):
    for results in run_ranks(body_by_length, 2):
        assert max(map(max, results.values())) <= 1e-10, results


def body_padded_table():
    parts = tokens(vocabulary=90)
    model, plain = build("llama", WIDE), build("llama", WIDE)
    model.config.vocab_size = plain.config.vocab_size = 90
    model = split(model)
    with torch.no_grad():
        found, truth = longspan.score(model, parts, **ALL), alone(plain, parts, None, 3)
    with pytest.raises(ValueError, match="outside the vocabulary of 90"):
        longspan.score(model, parts, [torch.full_like(p, 93) for p in parts])
    return field_errors(found, truth)


def test_a_padded_output_table_is_not_part_of_the_vocabulary(run_ranks):
    assert max(run_ranks(body_padded_table, 2)) <= 1e-10


# -- shared prefixes -------------------------------------------------------------------------------------------


def family():
    """Several roots, depth 4, a duplicate, prefixes of others, single tokens; a window of 8 crosses every branch."""
    a, b, c, d, e, f = tokens((12, 7, 5, 6, 9, 4), seed=11)
    x = tokens((1,) * 6, seed=12)
    parts = [
        [a, b, c, x[0], d],
        [a, b, c, x[1], f, f],
        [a, b],
        [a, b, c, x[0], d],
        [a],
        [a, x[2], e],
        [a[:1]],
        [d, x[3]],
        [d, x[4], e, e],
        [d, x[4], e],
    ]
    return [torch.cat(each) for each in parts]


TREES = {
    "family": family(),
    "duplicates": [tokens((9,))[0]] * 3,
    "fewer rows than ranks": [torch.tensor([5, 6]), torch.tensor([5])],
    "one token": [torch.tensor([7])] * 2,
    "many branches": [5 * torch.ones(2, dtype=torch.int64), *tokens((7, 3, 5, 8, 4, 6, 2) * 2, vocabulary=7)],
}


@contextmanager
def shared_whenever_possible():
    with mock.patch("longspan.models.score.block_cost_on", lambda device: 0):
        yield


def several_targets(parts):
    """Three per position, which differ between sequences that share the position; some ignored, some said twice."""
    found = []
    for i, part in enumerate(parts):
        labels = torch.stack([next_tokens(part), (part + i) % 90 + 3, part.flip(0)], -1)
        labels[i % 3 :: 3, 1] = IGNORE
        labels[::4, 2] = labels[::4, 1]
        found.append(labels)
    return found


# Chunks on one layer, no RoPE on the other.
CHUNKED = {
    **CONFIGS["qwen3"],
    "intermediate_size_mlp": 96,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "attn_temperature_tuning": False,
}


@really_wide()
@mock.patch.dict(CONFIGS, {"llama4_text": CHUNKED})
def body_shared(kind, name, options):
    parts, results, computed = TREES[name], {}, set()
    targets = several_targets(parts)
    for given, temperature in ((None, 1.0), (targets, 1.7)):
        truth_model = build(kind, WIDE).train()
        truth = step(lambda m, g=given, t=temperature: alone(m, parts, g, 3, t), truth_model, everything)
        for option in options:
            option = dict(option)
            checkpointing = option.pop("checkpointing", False)
            model = split(build(kind, WIDE), **option, unverified=kind == "llama4_text").train()
            if checkpointing:
                model.gradient_checkpointing_enable()
            with shared_whenever_possible():
                found = step(
                    lambda m, g=given, t=temperature: longspan.score(m, parts, g, temperature=t, **ALL),
                    model,
                    everything,
                )
            reduce(model, found[2])
            results[str(option), given is None] = (*errors(found, truth), field_errors(found[3], truth[3]))
            report = longspan.report(model)
            computed.add((report["tokens"], report["layout"]))
    return results, computed


WAYS = (
    {"scheme": "exchange", "kernel": "naive"},
    {"scheme": "ulysses", "kernel": "flash", "checkpointing": True},
    {"scheme": "exchange", "kernel": "flash", "layout": "per_document"},
)


@pytest.mark.parametrize(
    "kind, name, size, ways",
    [
        ("llama", "family", 2, WAYS),
        ("llama", "family", 4, WAYS[:2]),
        ("mistral", "family", 2, WAYS[:2]),
        ("gemma2", "family", 4, ({"scheme": "exchange", "layout": "contiguous"}, {"scheme": "ulysses"})),
        ("gpt2", "duplicates", 2, ({},)),
        ("gpt2", "many branches", 4, WAYS[2:]),
        ("llama", "fewer rows than ranks", 4, ({},)),
        ("mistral", "one token", 2, ({},)),
        ("llama4_text", "family", 2, WAYS[:1]),
    ],
)
def test_shared_prefixes_have_the_plain_gradients(run_ranks, kind, name, size, ways):
    rows = len({tuple(part[: n + 1].tolist()) for part in TREES[name] for n in range(len(part))})
    answers = run_ranks(body_shared, size, kind, name, ways)
    for results, _ in answers:
        assert max(map(max, results.values())) <= 1e-10, results
    layouts = {layout for _, layout in answers[0][1]}
    assert layouts == {way.get("layout", "balanced") for way in ways}
    for layout in layouts:  # every token once
        assert sum(tokens for _, computed in answers for tokens, name in computed if name == layout) == rows


@really_wide()
def test_prefixes_are_shared_on_one_rank_too():
    parts = TREES["family"]
    truth = step(lambda m: alone(m, parts, None, 3), build("mistral", WIDE).train(), everything)
    model = longspan.parallelize(build("mistral", WIDE), None, on_one_rank=True).train()
    with shared_whenever_possible():
        found = step(lambda m: longspan.score(m, parts, **ALL), model, everything)
        first, again = gradients(model), longspan.score(model, parts, **ALL)
        model.zero_grad()
        everything(again, probe()).backward()
    assert all(torch.equal(gradient, first[name]) for name, gradient in gradients(model).items())
    assert max(*errors(found, truth), field_errors(found[3], truth[3])) <= 1e-10
    assert longspan.report(model)["tokens"] == 76


def together(count, prompt, response, seed=0):
    """A prompt with responses that part at their first token."""
    start, *rest = tokens((prompt, *[response] * count), seed=seed)
    for i, each in enumerate(rest):
        each[0] = 3 + i
    return [torch.cat([start, each]) for each in rest]


def body_pays():
    model, computed = split(build("llama")).eval(), {}
    cases = {
        "a group": together(4, 200, 30),
        "a short prompt": together(4, 10, 30),
        "nothing in common": tokens((40, 30, 20)),
        "one sequence": tokens((40,)),
        "two groups behind one token": [F.pad(p, (1, 0), value=5) for s in (1, 2) for p in together(3, 120, 9, s)],
    }
    for name, parts in cases.items():
        for share in (True, False):
            with torch.no_grad():
                longspan.score(model, parts, share_prefixes=share)
            computed[name, share] = longspan.report(model)["tokens"]
    return computed


def test_prefixes_are_shared_where_that_pays(run_ranks):
    answers = run_ranks(body_pays, 2)
    computed = {case: sum(answer[case] for answer in answers) for case in answers[0]}
    assert computed == {
        ("a group", True): 200 + 4 * 30,
        ("a group", False): 4 * 230,
        ("a short prompt", True): 4 * 40,
        ("a short prompt", False): 4 * 40,
        ("nothing in common", True): 90,
        ("nothing in common", False): 90,
        ("one sequence", True): 40,
        ("one sequence", False): 40,
        ("two groups behind one token", True): 2 * (121 + 3 * 9),  # the token itself is not worth a block
        ("two groups behind one token", False): 6 * 130,
    }


def body_cannot():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("longspan").addHandler(handler)
    parts, results = together(3, 60, 10), {}
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    cases = {
        "rope": ({"rope_parameters": rope, "max_position_embeddings": 512}, {}),
        "kernel": ({}, {"kernel": "model"}),
    }
    for name, (changes, options) in cases.items():
        model = split(build("llama", WIDE, **changes), **options).eval()
        with torch.no_grad():
            found = [longspan.score(model, parts) for _ in range(2)]
            truth = alone(build("llama", WIDE, **changes).eval(), parts)
            longspan.score(model, tokens((5, 5)))
        results[name] = max(field_errors(each, truth) for each in found)
    logging.getLogger("longspan").removeHandler(handler)
    return results, said


def test_models_that_cannot_share_say_so_once(run_ranks):
    (first, said), (second, silent) = run_ranks(body_cannot, 2)
    assert max(*first.values(), *second.values()) <= 1e-10 and not silent
    assert [level for level, _ in said] == ["WARNING"] * 2
    for (_, text), reason in zip(said, ("angles of its RoPE", "kernel='model'"), strict=True):
        assert "57% of the tokens" in text and reason in text and "LlamaForCausalLM" in text


# -- the mistake that looks right ------------------------------------------------------------------------------


def body_mistake():
    """A sequence-level ratio from each rank's own log-probabilities, whose sum is all-reduced within the graph."""
    parts, old, cp = tokens((40, 24)), -3.7, ContextParallel(world())
    advantages = (1.0, -0.7)

    def right(scores, probe):
        means = [(each[:-1] - old).mean() for each in scores.logprobs]
        return -sum(a * mean.exp() for a, mean in zip(advantages, means))

    def own(i, logits, at):
        kept = at < len(parts[i]) - 1
        return F.log_softmax(logits[kept], -1).gather(-1, parts[i][at[kept] + 1][:, None])[:, 0]

    def wrong(scores, probe):
        total = 0.0
        for i, (logits, at) in enumerate(zip(scores.logits, scores.positions)):
            picked = own(i, logits, at)
            count = len(parts[i]) - 1
            everywhere = (picked - old).sum() * 1.0
            dist.all_reduce(everywhere)  # right forward; its backward is the identity
            total = total - advantages[i] * (everywhere / count).exp() * len(picked) / count
        return cp.total(total)

    def sums(scores, probe):
        return sum(each.square().sum() for each in scores.logprobs)

    def local_sums(scores, probe):
        each = zip(scores.logits, scores.positions)
        return cp.total(sum(own(i, *one).square().sum() for i, one in enumerate(each)))

    results = {}
    cases = ("sums", sums, local_sums, "local"), ("right", right, right, False), ("wrong", right, wrong, "local")
    for name, true_loss, loss, logits in cases:
        truth = step(lambda m: alone(m, parts), build("llama", WIDE), true_loss)
        model = split(build("llama", WIDE), layout="contiguous")
        found = step(lambda m, logits=logits: longspan.score(m, parts, logits=logits), model, loss)
        reduce(model)
        results[name] = errors(found, truth)
    # No constant factor repairs it.
    reference, given = gradients(truth[1]), gradients(model)
    a, b = (torch.cat([g[name].flatten() for name in sorted(g)]) for g in (given, reference))
    return results, float((a * (a @ b) / (a @ a) - b).norm() / b.norm())


def test_an_all_reduce_within_a_sequence_ratio_has_the_right_loss_and_wrong_gradients(run_ranks):
    for results, repaired in run_ranks(body_mistake, 2):
        assert max(*results["right"], *results["sums"]) <= 1e-10
        assert results["wrong"][0] <= 1e-10 and results["wrong"][1] > 0.05 and repaired > 0.05, (results, repaired)


# -- bytes and memory ------------------------------------------------------------------------------------------


def body_bytes():
    parts = tokens((100, 28))
    model = split(build("llama"), layout="contiguous").eval()
    sent = {}
    options = {"plain": {}, "all": {"entropy": True, "top_k": 4}, "hidden": {"hidden_states": True}}
    with torch.no_grad():
        for name, each in options.items():
            longspan.score(model, parts, **each)
            report = longspan.report(model)
            sent[name] = report["bytes_sent"], report["collectives"]
        ids = torch.cat(parts)[None]
        positions = torch.cat([torch.arange(len(p)) for p in parts])[None]
        model.get_decoder().config.use_cache = False
        model(input_ids=ids, position_ids=positions, logits_to_keep=1)
    gathered = longspan.report(model)  # the same forward, and its hidden rows gathered
    return sent, gathered["bytes_sent"] - 3 * 32 * 64 * 4


def test_bytes_are_those_of_the_narrow_fields(run_ranks):
    rows, peers = 32, 3
    for sent, decoder in run_ranks(body_bytes, 4):
        plain, every, hidden = (sent[name] for name in ("plain", "all", "hidden"))
        assert plain[0] - decoder == peers * rows * 4
        assert every[0] - plain[0] == peers * rows * (4 + 4 * 4 + 4 * 4)  # entropy, 4 of each; ids as int32
        assert every[1] - plain[1] == 1  # all that is fp32 together, and the ids
        assert hidden[0] - plain[0] == peers * rows * 64 * 4 and hidden[1] - plain[1] == 1


def test_no_tensor_of_tokens_times_vocabulary_exists(monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", 2000 * 16)
    model = build("llama", vocab_size=2000).train()
    with Largest() as largest:
        scores = longspan.score(model, tokens((300, 212)), entropy=True, top_k=2)
        sum(a.sum() + b.sum() for a, b in zip(scores.logprobs, scores.entropy)).backward()
    assert largest.elements < 512 * 2000 / 2
    assert scores.logprobs[0].dtype is torch.float32


def test_prompt_rows_do_not_go_through_the_head():
    model, seen = build("llama"), []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    parts = tokens((50, 30))
    targets = [next_tokens(p) for p in parts]
    for each in targets:
        each[:25] = IGNORE
    with torch.no_grad():
        longspan.score(model, parts, targets)
    assert sum(seen) == 24 + 4


# -- data parallelism ------------------------------------------------------------------------------------------


@really_wide()
def body_wrapped(wrap, share):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    mesh = longspan.init_mesh(dp=2, cp=2)
    groups = [tokens((11, 6), seed=1), tokens((3, 17, 2), seed=2)]
    if share:
        groups = [[torch.cat([group[0], part]) for part in group] for group in groups]

    def sums(scores):
        return sum(each.sum() for each in scores.logprobs), sum((each != 0).sum() for each in scores.logprobs)

    reference = build("llama", WIDE).train()
    (a, n), (b, m) = (sums(alone(reference, parts)) for parts in groups)
    one = torch.log1p((a + b).square() / (n + m))  # one loss of all ranks' sequences
    own = (a * (a + b) + b.sin() * (a + b)) / 2  # the mean of two that use each other's
    (one + own / 500).backward()
    model = longspan.parallelize(build("llama", WIDE), mesh["cp"]).train()
    if wrap == "fsdp":
        flat = mesh._flatten("dp_cp")
        for layer in model.model.layers:
            fully_shard(layer, mesh=flat)
        wrapped = fully_shard(model, mesh=flat)
    else:
        wrapped = DistributedDataParallel(model)
    mine = mesh.get_local_rank("dp")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view")  # FSDP2's: hooks and views do not go together
        with shared_whenever_possible():
            total, count = sums(longspan.score(wrapped, groups[mine], top_k=2))
    rows = 2 * 11 + 6 if mine == 0 else 2 * 3 + 17 + 2
    assert not share or longspan.report(wrapped)["tokens"] in (rows // 2, rows - rows // 2)
    everywhere = longspan.dp_reduce(total, mesh)
    found = torch.log1p(everywhere.square() / longspan.dp_reduce(count, mesh["dp"]))
    value = found.detach()
    longspan.check_loss(found, wrapped)
    (found + (total.sin() if mine else total) * everywhere / 500).backward()
    with pytest.raises(ValueError, match="data-parallel ranks"):
        longspan.dp_reduce(total, mesh["cp"])
    got = {name.removeprefix("module."): g for name, g in gradients(wrapped).items()}
    got = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in got.items()}
    return abs(float(value - one.detach())), gradient_error(got, gradients(reference))


@pytest.mark.parametrize("wrap, share", [("ddp", True), ("fsdp", False), ("fsdp", True)])
def test_sums_over_data_parallel_ranks_under_ddp_and_fsdp(run_ranks, wrap, share):
    assert max(map(max, run_ranks(body_wrapped, 4, wrap, share))) <= 1e-10


def body_refused():
    cases = {}
    model = split(build("llama"))
    parts = tokens()
    rank = dist.get_rank()

    def said(name, call):
        try:
            call()
            cases[name] = "nothing"
        except ValueError as error:
            cases[name] = str(error)

    bad = [next_tokens(p) for p in parts]
    bad[2][4] = 96
    only_here = [p.clone() for p in parts]
    only_here[0][0] += rank
    holes = torch.tensor([[1, 0, 1]])
    ids = torch.tensor([[5, 6, 7]])
    said("target", lambda: longspan.score(model, parts, bad))
    said("target of one rank", lambda: longspan.score(model, parts, bad if rank else None))
    said("token", lambda: longspan.score(model, [torch.tensor([3, 200])]))
    said("differ", lambda: longspan.score(model, only_here))
    said("options", lambda: longspan.score(model, parts, top_k=rank))
    said("empty", lambda: longspan.score(model, [[3], []]))
    said("none", lambda: longspan.score(model, []))
    said("holes", lambda: longspan.score(model, ids, attention_mask=holes))
    said("hidden target", lambda: longspan.score(model, ids, ids, attention_mask=torch.tensor([[0, 1, 1]])))
    said("temperature", lambda: longspan.score(model, parts, temperature=0))
    said("logits", lambda: longspan.score(model, parts, logits=True))
    said("sum", lambda: longspan.score(split(build("llama"), gradient="sum"), parts))
    said("dropout", lambda: longspan.score(split(build("gpt2", resid_pdrop=0.1)).train(), parts))
    said("loss", lambda: longspan.check_loss(torch.tensor(1.0 + rank), model))
    said("same loss", lambda: longspan.check_loss(torch.tensor(1.0), model))
    return cases


def test_refusals_are_the_same_on_every_rank(run_ranks):
    first, second = run_ranks(body_refused, 2)
    assert first == second
    words = {
        "target": r"targets[2][4] is 96, outside the vocabulary of 96",
        "target of one rank": "context-parallel rank 1: targets[2][4]",
        "token": "outside 0..95",
        "differ": "different calls of score: sequences[0]",
        "options": "different calls of score: options",
        "empty": "sequence 1 has no token",
        "none": "no sequence",
        "holes": "between others",
        "hidden target": "attention_mask hides",
        "temperature": "positive",
        "logits": '"whole", "local"',
        "sum": "gradient='mean'",
        "dropout": "dropout 0.1",
        "loss": "different losses: loss on rank(s) [1]",
        "same loss": "nothing",
    }
    assert {name: words[name] in text for name, text in first.items()} == dict.fromkeys(words, True), first


# -- the example -----------------------------------------------------------------------------------------------


def body_example(path):
    found = runpy.run_path(path)
    return float(found["loss"].detach()), float(found["error"])


def test_the_example_of_a_loss_of_ones_own(run_ranks):
    results = run_ranks(body_example, 2, str(ROOT / "examples" / "score.py"))
    assert results[0] == results[1] and results[0][1] <= 1e-10
    code = (ROOT / "examples" / "score.py").read_text()
    assert "dist.all_reduce" not in code
