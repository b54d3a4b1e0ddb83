"""parallelize(): loss, whole logits and every gradient equal the plain model's."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification, RobertaConfig, RobertaForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

import longspan
from longspan import ContextParallel, scoring
from tiny import CONFIGS, Largest, batch, build, gradient_error, gradients, refusal

IGNORE = -100
SIX = ("llama", "qwen3", "mistral", "gemma3_text", "gpt2", "mixtral")
SCHEMES = ("ulysses", "exchange")


def world():
    return dist.group.WORLD


def plain_step(kind, labels, dtype=torch.float32, **inputs):
    """Loss, gradients and logits of the plain model."""
    model = build(kind, dtype).train()
    out = model(labels=labels, use_cache=False, **inputs)
    out.loss.backward()
    model.eval()
    with torch.no_grad():
        logits = model(use_cache=False, **inputs).logits
    return out.loss.detach(), gradients(model), logits


def split_step(kind, labels, options, dtype=torch.float32, **inputs):
    model = longspan.parallelize(build(kind, dtype), world(), **options).train()
    out = model(labels=labels, use_cache=False, **inputs)
    out.loss.backward()
    ContextParallel(world()).reduce_gradients(model)
    model.eval()
    with torch.no_grad():
        logits = model(use_cache=False, **inputs).logits
    return out.loss.detach(), gradients(model), logits


def differences(kind, labels, options, rows=None, **inputs):
    """(loss, gradient, logits) differences; `rows` are the positions whose logits count."""
    loss, truth, logits = plain_step(kind, labels, **inputs)
    split_loss, found, split_logits = split_step(kind, labels, options, **inputs)
    off = (split_logits - logits).abs()
    return (
        float((split_loss - loss).abs()),
        gradient_error(found, truth),
        float((off if rows is None else off[rows]).max()),
        split_logits.shape == logits.shape,
    )


def assert_equal(results):
    for each in results:
        bad = {k: v for k, v in each.items() if not (v[0] <= 1e-5 and v[1] <= 1e-5 and v[2] <= 1e-4 and v[3])}
        assert not bad


# -- under DDP and FSDP2, on meshes ----------------------------------------------------------------------------


def full_gradients(model):
    from torch.distributed.tensor import DTensor

    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            found[name.removeprefix("module.")] = grad.detach().clone()
    return found


def body_wrapped(kind, dp, cp, wrap, scheme):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    ids = batch(dp, 61)
    labels = ids.clone()
    labels[0, :40] = IGNORE  # unequal target counts
    count = int((labels[:, 1:] != IGNORE).sum())
    # The router loss of one dp rank's tokens is no share of the whole batch's, with or without longspan.
    changes = {"output_router_logits": dp == 1} if kind == "mixtral" else {}
    reference = build(kind, **changes).train()
    loss = reference(input_ids=ids, labels=labels, num_items_in_batch=count, use_cache=False).loss
    loss.backward()
    truth = gradients(reference)

    mesh = longspan.init_mesh(dp=dp, cp=cp)
    model = longspan.parallelize(build(kind, **changes), mesh["cp"], scheme=scheme).train()
    if wrap == "fsdp":
        flat = mesh._flatten("dp_cp")
        for layer in next(m for m in model.get_decoder().children() if isinstance(m, torch.nn.ModuleList)):
            fully_shard(layer, mesh=flat)
        wrapped = fully_shard(model, mesh=flat)
    else:
        wrapped = DistributedDataParallel(model)
    mine = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    out = wrapped(input_ids=ids[mine], labels=labels[mine], num_items_in_batch=count / dp, use_cache=False)
    out.loss.backward()
    found = full_gradients(wrapped)
    total = out.loss.detach().clone()
    dist.all_reduce(total)
    same = []
    for grad in found.values():
        first = grad.clone()
        dist.broadcast(first, 0)
        same.append(torch.equal(first, grad))
    loss_error = abs(float(total) / cp / dp - float(loss.detach()))
    return loss_error, gradient_error(found, truth), all(same)


@pytest.mark.parametrize("kind", SIX)
def test_wrapped_gradients_equal_one_rank(run_ranks, kind):
    for dp, cp in ((1, 2), (2, 2), (1, 4)):
        for wrap, scheme in (("ddp", "exchange"), ("ddp", "ulysses"), ("fsdp", "ulysses"), ("fsdp", "exchange")):
            for loss, gradient, same in run_ranks(body_wrapped, dp * cp, kind, dp, cp, wrap, scheme):
                assert loss <= 1e-5 and gradient <= 1e-5 and same, (dp, cp, wrap, scheme, loss, gradient, same)


def body_fsdp_defaults():
    """bf16 under FSDP2's own policy, which casts (and copies dataclasses among) a layer's arguments."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    ids = batch(2, 61)
    losses = []
    for half in (False, True):
        model = longspan.parallelize(build("llama"), world()).train()
        if half:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in model.model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def test_fsdp2_mixed_precision_with_its_defaults(run_ranks):
    for full, half in run_ranks(body_fsdp_defaults, 2):
        assert 0 < abs(full - half) < 0.05 * full


def body_sum():
    ids = batch(2, 61)
    plain = build("llama").train()
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model = longspan.parallelize(build("llama"), world(), gradient="sum").train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return gradient_error(gradients(model), gradients(plain))


def test_gradients_for_engines_that_sum(run_ranks):
    assert max(run_ranks(body_sum, 4)) <= 1e-5


# -- inputs ----------------------------------------------------------------------------------------------------


def body_grid(kind):
    results = {}
    ids = batch(2, 61)
    for scheme in SCHEMES:
        for layout in ("contiguous", "head_tail"):
            options = {"scheme": scheme, "layout": layout}
            results[scheme, layout] = differences(kind, ids, options, input_ids=ids)
    results["model kernel"] = differences(kind, ids, {"kernel": "model", "scheme": "ulysses"}, input_ids=ids)
    return results


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_schemes_layouts_and_the_models_own_kernel(run_ranks, kind):
    assert_equal(run_ranks(body_grid, 2, kind))


def body_lengths():
    """In fp64, since many gradients of so few tokens are zero but for rounding."""
    results = {}
    wide = torch.float64
    for length in (1, 2, 3, 5):
        ids = batch(2, length)
        for scheme in SCHEMES:
            if length > 1:
                for kind in ("llama", "gpt2"):
                    results[kind, length, scheme] = differences(
                        kind, ids, {"scheme": scheme}, dtype=wide, input_ids=ids
                    )
                if length > 2:  # transformers' experts take no fp64
                    results["mixtral", length, scheme] = differences("mixtral", ids, {"scheme": scheme}, input_ids=ids)
                continue
            model = longspan.parallelize(build("llama", wide), world(), scheme=scheme).eval()
            with torch.no_grad():
                off = (model(input_ids=ids).logits - build("llama", wide).eval()(input_ids=ids).logits).abs().max()
            results[length, scheme] = (0.0, 0.0, float(off), True)
    return results


def test_lengths_shorter_than_the_group(run_ranks):
    assert_equal(run_ranks(body_lengths, 4))


def body_padding():
    ids = batch(2, 64)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0  # left padding over more than one rank's rows
    labels = ids.masked_fill(mask == 0, IGNORE)
    real = mask.bool()
    results = {}
    for kind in ("llama", "mistral", "gpt2"):
        for scheme, kernel in (("ulysses", "auto"), ("exchange", "auto"), ("ulysses", "model")):
            for layout in ("contiguous", "head_tail"):
                options = {"scheme": scheme, "layout": layout, "kernel": kernel}
                results[kind, scheme, layout, kernel] = differences(
                    kind, labels, options, rows=real, input_ids=ids, attention_mask=mask
                )
    return results


def test_left_padding(run_ranks):
    assert_equal(run_ranks(body_padding, 4))


DOCUMENTS = ([13, 24, 27], [7, 57], [1, 62, 1], [9, 7, 8, 12, 8, 20])


def per_document_truth(kind, ids, lengths):
    """Each document alone, on the plain model: summed loss over the pack's targets, gradients, logits."""
    model = build(kind).train()
    targets = sum(length - 1 for length in lengths)
    loss, logits, at = 0.0, [], 0
    for length in lengths:
        part = ids[:, at : at + length]
        out = model(input_ids=part, use_cache=False)
        logits.append(out.logits.detach())
        if length > 1:
            loss = loss + scoring.summed_cross_entropy(out.logits[:, :-1], part[:, 1:], torch.float32) / targets
        at += length
    loss.backward()
    return loss.detach(), gradients(model), torch.cat(logits, 1)


def body_packed(kind):
    results = {}
    ids = batch(1, 64)
    for lengths in DOCUMENTS:
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        labels = ids.masked_fill(positions == 0, IGNORE)
        loss, truth, logits = per_document_truth(kind, ids, lengths)
        for scheme, kernel in (("ulysses", "auto"), ("exchange", "auto"), ("ulysses", "model")):
            for layout in ("per_document", "contiguous"):
                options = {"scheme": scheme, "layout": layout, "kernel": kernel}
                inputs = {"input_ids": ids, "position_ids": positions}
                split_loss, found, split_logits = split_step(kind, labels, options, **inputs)
                results[tuple(lengths), scheme, layout, kernel] = (
                    float((split_loss - loss).abs()),
                    gradient_error(found, truth),
                    float((split_logits - logits).abs().max()),
                    True,
                )
    return results


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
def test_packed_documents_are_each_alone(run_ranks, kind):
    assert_equal(run_ranks(body_packed, 2, kind))


def body_perturbed():
    moved, isolated = [], []
    positions = torch.cat([torch.arange(13), torch.arange(51)])[None]
    for scheme in SCHEMES:
        model = longspan.parallelize(build("llama"), world(), scheme=scheme).eval()
        ids = batch(1, 64)
        other = ids.clone()
        other[0, 0] = (ids[0, 0] + 1) % 96
        with torch.no_grad():
            moved.append(float((model(input_ids=ids).logits - model(input_ids=other).logits)[0, -8:].abs().min()))
            a = model(input_ids=ids, position_ids=positions).logits[0, 13:]
            isolated.append(torch.equal(a, model(input_ids=other, position_ids=positions).logits[0, 13:]))
    return moved, isolated


def test_token_zero_reaches_the_last_rank_and_not_the_next_document(run_ranks):
    for moved, isolated in run_ranks(body_perturbed, 4):
        assert min(moved) > 1e-6 and all(isolated)


def body_layer_inputs():
    seen = []
    model = longspan.parallelize(build("llama"), world()).train()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    ids = batch(2, 61)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    return seen, longspan.report(model), out.logits is None


def test_layers_hold_a_share_of_the_rows(run_ranks):
    results = run_ranks(body_layer_inputs, 4)
    rows = [seen[0][1] for seen, _, _ in results]
    assert sorted(rows) == [15, 15, 15, 16] and sum(rows) == 61
    for (seen, report, no_logits), count in zip(results, rows):
        assert seen == [(2, count, 64)] * 2
        assert report["tokens"] == 2 * count and report["bytes_sent"] > 0 and report["layout"] == "head_tail"
        assert no_logits
    total = sum(report["pairs"] for _, report, _ in results)
    assert total == 2 * 2 * 61 * 62 // 2


# -- targets ---------------------------------------------------------------------------------------------------


def body_targets():
    ids = batch(2, 64)
    cases = {}
    last = torch.full_like(ids, IGNORE)
    last[:, 50:] = ids[:, 50:]
    cases["one rank"] = last
    single = torch.full_like(ids, IGNORE)
    single[1, 63] = ids[1, 63]
    cases["one target"] = single
    uneven = torch.full_like(ids, IGNORE)
    uneven[0, 1:4] = ids[0, 1:4]
    uneven[:, 60:] = ids[:, 60:]
    cases["uneven"] = uneven
    results = {}
    for name, labels in cases.items():
        for scheme in SCHEMES:
            options = {"scheme": scheme, "layout": "contiguous"}
            results[name, scheme] = differences("llama", labels, options, input_ids=ids)
    nothing = torch.full_like(ids, IGNORE)
    model = longspan.parallelize(build("llama"), world()).train()
    loss = model(input_ids=ids, labels=nothing, use_cache=False).loss
    loss.backward()
    zero = float(loss.detach()) == 0.0 and all(float(g.abs().max()) == 0.0 for g in gradients(model).values())
    full = len(gradients(model)) == len(list(model.parameters()))
    return results, zero and full


def test_targets_on_one_rank_one_target_and_none(run_ranks):
    results = run_ranks(body_targets, 4)
    assert_equal([each for each, _ in results])
    assert all(zero for _, zero in results)


def body_shift_labels():
    ids = batch(2, 61)
    model = longspan.parallelize(build("llama"), world()).train()
    a = model(input_ids=ids, labels=ids, use_cache=False).loss
    b = model(input_ids=ids, shift_labels=scoring.shift_left(ids), labels=ids, use_cache=False).loss
    c = model(input_ids=ids, shift_labels=scoring.shift_left(ids), use_cache=False).loss
    d = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(240), use_cache=False).loss
    e = model(input_ids=ids, labels=ids, num_items_in_batch=120, use_cache=False).loss
    return [float(x.detach()) for x in (a, b, c, d, e)]


def test_label_forms(run_ranks):
    for a, b, c, d, e in run_ranks(body_shift_labels, 2):
        assert a == b == c == e and abs(d - a / 2) < 1e-6


# -- outputs ---------------------------------------------------------------------------------------------------


def body_outputs():
    ids = batch(2, 61)
    plain = build("llama").eval()
    model = longspan.parallelize(build("llama"), world()).eval()
    checks = {}
    with torch.no_grad():
        truth = plain(input_ids=ids, labels=ids, output_hidden_states=True)
        out = model(input_ids=ids, labels=ids, output_hidden_states=True)
        checks["hidden states"] = len(out.hidden_states) == len(truth.hidden_states) == 3 and all(
            torch.allclose(a, b, atol=1e-5) for a, b in zip(out.hidden_states, truth.hidden_states)
        )
        checks["logits with labels in eval"] = torch.allclose(out.logits, truth.logits, atol=1e-4)
        checks["loss"] = abs(float(out.loss - truth.loss)) < 1e-5
        as_tuple = model(input_ids=ids, labels=ids, return_dict=False)
        checks["tuple"] = isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], out.loss)
        kept = model(input_ids=ids, logits_to_keep=3).logits
        checks["logits_to_keep"] = torch.allclose(kept, truth.logits[:, -3:], atol=1e-4)
        embeds = plain.get_input_embeddings()(ids)
        checks["inputs_embeds"] = torch.allclose(model(inputs_embeds=embeds).logits, truth.logits, atol=1e-4)
        positions = torch.arange(61)[None] + 5
        checks["position_ids"] = torch.allclose(
            model(input_ids=ids, position_ids=positions).logits,
            plain(input_ids=ids, position_ids=positions).logits,
            atol=1e-4,
        )
        with longspan.suspended(model):
            with longspan.suspended(model):
                checks["suspended"] = torch.equal(model(input_ids=ids).logits, truth.logits)
            checks["still suspended"] = torch.equal(model(input_ids=ids).logits, truth.logits)
        checks["generate"] = torch.equal(
            model.generate(ids[:, :9], max_new_tokens=5, do_sample=False),
            plain.generate(ids[:, :9], max_new_tokens=5, do_sample=False),
        )
        cached, truth_cached = (m(input_ids=ids, use_cache=True) for m in (model, plain))
        checks["cache"] = torch.equal(cached.logits, truth_cached.logits)
        copied = copy.deepcopy(model)
        checks["copy"] = torch.equal(copied(input_ids=ids).logits, out.logits)
        copied.model.embed_tokens.weight.zero_()
        copied.lm_head.weight.zero_()
        checks["a copy is its own"] = float(copied(input_ids=ids).logits.abs().max()) == 0.0
        checks["and leaves ours"] = torch.equal(model(input_ids=ids).logits, out.logits)
    names = list(inspect.signature(plain.forward).parameters)
    checks["signature"] = list(inspect.signature(model.forward).parameters) == names and "labels" in names
    longspan.unparallelize(model)
    with torch.no_grad():
        checks["unparallelized"] = torch.equal(model(input_ids=ids).logits, truth.logits)
    for mode in ("local", "none"):
        longspan.parallelize(model, world(), logits=mode)
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        checks[mode] = logits is None if mode == "none" else logits.shape[1] in (30, 31)
        longspan.unparallelize(model)
    return checks


def test_outputs_are_whole(run_ranks):
    for checks in run_ranks(body_outputs, 2):
        assert all(checks.values()), checks


def body_whole_logits_loss():
    """A loss of the caller's own, on whole logits, computed alike on every rank."""
    ids = batch(2, 61)
    results = {}
    for kind in ("llama", "gpt2"):
        plain = build(kind).train()
        plain(input_ids=ids, use_cache=False).logits.tanh().square().mean().backward()
        for scheme in SCHEMES:
            model = longspan.parallelize(build(kind), world(), scheme=scheme).train()
            model(input_ids=ids, use_cache=False).logits.tanh().square().mean().backward()
            ContextParallel(world()).reduce_gradients(model)
            results[kind, scheme] = gradient_error(gradients(model), gradients(plain))
    return results


def test_own_loss_on_whole_logits(run_ranks):
    for results in run_ranks(body_whole_logits_loss, 4):
        assert max(results.values()) <= 1e-5, results


def body_smoothed():
    """Label smoothing as transformers' Trainer does it, and per-token weights, on whole logits."""
    ids = batch(2, 61)
    weights = torch.rand(2, 60, generator=torch.Generator().manual_seed(1))

    def losses(model):
        out = model(input_ids=ids, use_cache=False)
        smoothed = LabelSmoother(epsilon=0.2)(out, ids, shift_labels=True)
        each = torch.nn.functional.cross_entropy(out.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return smoothed + (each * weights).sum() / weights.sum()

    plain = build("llama").train()
    truth = losses(plain)
    truth.backward()
    model = longspan.parallelize(build("llama"), world()).train()
    loss = losses(model)
    loss.backward()
    ContextParallel(world()).reduce_gradients(model)
    return abs(float(loss.detach() - truth.detach())), gradient_error(gradients(model), gradients(plain))


def test_label_smoothing_and_token_weights(run_ranks):
    for loss, gradient in run_ranks(body_smoothed, 2):
        assert loss <= 1e-5 and gradient <= 1e-5


def body_classifier():
    config = build("llama").config
    config.num_labels = 3
    ids = batch(2, 61)
    mask = torch.ones_like(ids)
    mask[0, 50:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    labels = torch.tensor([2, 0])

    def make():
        torch.manual_seed(3)
        return AutoModelForSequenceClassification.from_config(config).train()

    plain = make()
    truth = plain(input_ids=ids, attention_mask=mask, labels=labels)
    truth.loss.backward()
    model = longspan.parallelize(make(), world())
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    out.loss.backward()
    ContextParallel(world()).reduce_gradients(model)
    return float((out.logits - truth.logits).abs().max()), gradient_error(gradients(model), gradients(plain))


def test_sequence_classification(run_ranks):
    for logits, gradient in run_ranks(body_classifier, 2):
        assert logits <= 1e-4 and gradient <= 1e-5


def body_checkpointing():
    ids = batch(2, 61)
    found = []
    for reentrant in (None, False, True):
        model = longspan.parallelize(build("llama"), world(), scheme="exchange").train()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()  # what reentrant checkpointing asks for
        first = model(input_ids=ids, labels=ids, use_cache=False).loss
        with torch.no_grad():
            model(input_ids=ids[:, :40], use_cache=False)  # a forward of another length in between
        second = model(input_ids=ids.flip(0), labels=ids, use_cache=False).loss  # two forwards before a backward
        (first + second).backward()
        found.append(gradients(model))
    return all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_activation_checkpointing_changes_no_bit(run_ranks):
    assert all(run_ranks(body_checkpointing, 2))


def body_largest(kernel):
    scoring.CHUNK_ELEMENTS = 96 * 64
    ids = batch(1, 1024)
    model = longspan.parallelize(build("llama", max_position_embeddings=2048), world(), kernel=kernel).train()
    with Largest() as largest:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    scoring.CHUNK_ELEMENTS = 2**24
    return largest.elements


def test_no_square_mask_and_no_whole_logits_exist(run_ranks):
    for elements in run_ranks(body_largest, 2, "flash"):
        # MLP activations of this rank are the largest thing there is; 1024 x 1024 and 1024 x 96 are not.
        assert elements <= 512 * 96


# -- one rank, errors ------------------------------------------------------------------------------------------


def body_one_rank():
    from longspan import comm

    calls, originals = [], {}
    places = [(dist, name) for name in ("all_to_all_single", "all_reduce", "all_gather_object", "broadcast")]
    for module, name in [*places, (comm, "_all_gather")]:
        originals[module, name] = getattr(module, name)
        setattr(module, name, lambda *args, _name=name, **kwargs: calls.append(_name))
    try:
        ids = batch(2, 61)
        plain, model = build("llama"), longspan.parallelize(build("llama"), world())
        a, b = (m(input_ids=ids, labels=ids).loss for m in (plain, model))
        return torch.equal(a, b), calls
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)


def test_one_rank_is_bitwise_plain_without_collectives(run_ranks):
    assert run_ranks(body_one_rank, 1) == [(True, [])]


def roberta():
    """A decoder whose positions come from its ids: padding does not count, and the first is padding_idx + 1."""
    config = RobertaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, is_decoder=True
    )
    model = RobertaForCausalLM(config).eval()
    plain = model.roberta.embeddings.forward
    # Longspan runs such a module on the whole batch if its interface tells; this one's does not.
    model.roberta.embeddings.forward = lambda **kwargs: plain(**kwargs)
    return model


def body_refusals():
    ids = batch(2, 64)
    rank = dist.get_rank()
    model = longspan.parallelize(build("llama"), world()).train()
    messages = {
        "twice": refusal(lambda: longspan.parallelize(model, world())),
        "different": refusal(lambda: model(input_ids=ids + rank, labels=ids)),
        "label": refusal(lambda: model(input_ids=ids, labels=ids.clone().fill_(97) if rank else ids)),
        "shape": refusal(lambda: model(input_ids=ids, labels=ids[:, :63])),
        "mask": refusal(lambda: model(input_ids=ids, attention_mask=torch.ones(2, 63))),
        "4d": refusal(lambda: model(input_ids=ids, attention_mask=torch.ones(2, 1, 64, 64))),
        "unknown": refusal(lambda: model(input_ids=ids, gate=torch.ones(2, 64))),
        "cache": refusal(lambda: model(input_ids=ids, labels=ids, use_cache=True)),
        "dropout": refusal(
            lambda: longspan.parallelize(build("llama", attention_dropout=0.1), world()).train()(input_ids=ids)
        ),
        "hidden dropout": refusal(
            lambda: longspan.parallelize(build("gpt2", resid_pdrop=0.1), world()).train()(input_ids=ids)
        ),
        "functional dropout": refusal(
            lambda: longspan.parallelize(build("seed_oss", residual_dropout=0.1), world()).train()(input_ids=ids)
        ),
        "scheme": refusal(lambda: longspan.parallelize(build("llama"), world(), scheme="ring")),
        "kernel": refusal(lambda: longspan.parallelize(build("llama"), world(), kernel="model", scheme="exchange")),
        "module": refusal(lambda: longspan.parallelize(torch.nn.Linear(2, 2), world())),
    }
    messages["own positions"] = refusal(lambda: longspan.parallelize(roberta(), world()))
    model.set_attn_implementation("eager")
    messages["switched"] = refusal(lambda: model(input_ids=ids, labels=ids))
    model.set_attn_implementation("longspan_sdpa")
    custom = longspan.parallelize(build("llama"), world()).train()
    custom.loss_function = lambda *a, **k: None
    messages["loss"] = refusal(lambda: custom(input_ids=ids, labels=ids))
    messages["fine again"] = refusal(lambda: model(input_ids=ids, labels=ids))
    return messages


def body_refused_whole():
    """A model that is refused stays the plain one."""
    ids = batch(2, 61)
    config = build("llama").config
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    truth = model(input_ids=ids).logits
    message = refusal(lambda: longspan.parallelize(model, world(), gradient="sum"))
    same = torch.equal(model(input_ids=ids).logits, truth) and model.config._attn_implementation == "sdpa"
    return message, same, "forward" in model.model.__dict__


def test_a_refused_model_is_left_alone(run_ranks):
    for message, same, replaced in run_ranks(body_refused_whole, 2):
        assert "gradient='sum'" in message and same and not replaced


def test_refusals_are_the_same_on_every_rank(run_ranks):
    results = run_ranks(body_refusals, 2)
    assert results[0] == results[1]
    wanted = {
        "twice": "already",
        "different": "input_ids",
        "label": "97",
        "shape": "(2, 63)",
        "mask": "(2, 63)",
        "4d": "(2, 1, 64, 64)",
        "unknown": "gate",
        "cache": "cache",
        "dropout": "dropout 0.1",
        "hidden dropout": "dropout 0.1",
        "functional dropout": "random numbers",
        "scheme": "ring",
        "kernel": "ulysses",
        "module": "Linear",
        "own positions": "numbers its tokens",
        "switched": "eager",
        "loss": "loss function",
        "fine again": "accepted",
    }
    for name, word in wanted.items():
        assert word in results[0][name], (name, results[0][name])
