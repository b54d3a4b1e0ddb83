"""What a batch may hold: positions, masks, documents, images, padding; heads on whole hidden states; long RoPE."""

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ForSequenceClassification,
    Gemma3Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    masking_utils,
)

import longspan
from longspan import ContextParallel, scoring
from longspan.layout import Span
from longspan.models.forward import LazyMask, make_rules
from longspan.rule import Kind
from tiny import COMMON, batch, build, gradient_error, gradients, refusal

IGNORE = -100
CASES = (("exchange", "head_tail"), ("ulysses", "contiguous"))


def split(model, **options):
    return longspan.parallelize(model, dist.group.WORLD, unverified=True, **options)


def step(model, rows=None, **inputs):
    """Loss, gradients, and whole logits of a training step."""
    out = model.train()(use_cache=False, **inputs)
    out.loss.backward()
    if hasattr(model, "_longspan"):
        ContextParallel(dist.group.WORLD).reduce_gradients(model)
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad():
        logits = model.eval()(use_cache=False, **inputs).logits
    return out.loss.detach(), gradients(model), logits if rows is None else logits[rows]


def errors(found, truth):
    (loss, grads, logits), (true_loss, true_grads, true_logits) = found, truth
    assert logits.shape == true_logits.shape
    return float((loss - true_loss).abs()), gradient_error(grads, true_grads), float((logits - true_logits).abs().max())


def differences(make, rows=None, cases=CASES, **inputs):
    """Of the split model from the plain one, by case."""
    truth = step(make(), rows, **inputs)
    return {case: errors(step(split(make(), scheme=case[0], layout=case[1]), rows, **inputs), truth) for case in cases}


def assert_equal(results):
    for each in results:
        bad = {k: v for k, v in each.items() if not (v[0] <= 1e-5 and v[1] <= 1e-5 and v[2] <= 1e-4)}
        assert not bad


# -- whole masks -----------------------------------------------------------------------------------------------


def square(kind, length, starts=()):
    """A mask [1, 1, S, S], bool: causal, with documents, or causal where the first tokens see each other."""
    at = torch.arange(length)
    seen = at[None, :] <= at[:, None]
    if kind == "documents":
        document = torch.bucketize(at, torch.tensor(starts), right=True)
        seen = seen & (document[None, :] == document[:, None])
    if kind == "prefix":
        seen = seen | ((at < 20)[None, :] & (at < 20)[:, None])
    return seen[None, None]


def body_masks(kind):
    ids = batch(2, 61)
    low = torch.finfo(torch.float32).min
    both = torch.cat([square("prefix", 61), square("documents", 61, [9, 40])])
    results = {}
    for name, mask in {
        "causal": square("causal", 61),
        "documents": square("documents", 61, [13, 20, 50]),
        "prefix": square("prefix", 61),
        "per row": both,
        "additive": torch.zeros(both.shape).masked_fill(~both, low),
    }.items():
        found = differences(lambda: build(kind), input_ids=ids, labels=ids, attention_mask=mask)
        results |= {(name, *case): each for case, each in found.items()}
    if kind == "gemma3_text":
        masks = {"full_attention": None, "sliding_attention": both}
        found = differences(lambda: build(kind), input_ids=ids, labels=ids, attention_mask=masks)
        results |= {("by type", *case): each for case, each in found.items()}
    model = split(build(kind), kernel="model").train()
    mask = square("prefix", 61)
    results["model kernel"] = errors(
        step(model, input_ids=ids, labels=ids, attention_mask=mask),
        step(build(kind), input_ids=ids, labels=ids, attention_mask=mask),
    )
    return results


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
def test_whole_masks(run_ranks, kind):
    assert_equal(run_ranks(body_masks, 2, kind))


# -- positions and documents -----------------------------------------------------------------------------------


def apart(make, ids, lengths, **inputs):
    """Loss, gradients and logits of each document alone, as one step over all of them. ids [1, S]"""
    model = make().train()
    targets = sum(length - 1 for length in lengths)
    parts = [model(input_ids=part, use_cache=False, **inputs).logits for part in ids.split(lengths, 1)]
    sums = [
        scoring.summed_cross_entropy(logits[:, :-1], part[:, 1:], torch.float32)
        for logits, part in zip(parts, ids.split(lengths, 1))
        if part.shape[1] > 1
    ]
    loss = sum(sums) / targets
    loss.backward()
    return loss.detach(), gradients(model), torch.cat(parts, 1).detach()


def cut_into(lengths, total):
    """Bounds of documents, positions that restart, and labels that do not cross, for rows of `total` tokens."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths]).view(-1, total)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.long(), "max_length_q": max(lengths)}, positions


def body_bounds(kind):
    results = {}
    lengths = [13, 1, 20, 27]
    bounds, positions = cut_into(lengths, 61)
    ids = batch(1, 61)
    labels = ids.masked_fill(positions == 0, IGNORE)
    truth = apart(lambda: build(kind), ids, lengths)
    for scheme, layout in (*CASES, ("exchange", "per_document"), ("ulysses", "auto")):
        for name, more in (("", {}), ("and positions", {"position_ids": positions})):
            model = split(build(kind), scheme=scheme, layout=layout)
            found = step(model, input_ids=ids, labels=labels, **bounds, **more)
            results[scheme, layout, name] = errors(found, truth)
    model = split(build(kind), scheme="ulysses", kernel="model")
    results["model kernel"] = errors(step(model, input_ids=ids, labels=labels, **bounds), truth)
    # two rows, flattened
    folded = batch(2, 32)
    bounds, positions = cut_into([10, 22, 32], 32)
    labels = folded.masked_fill(positions == 0, IGNORE)
    found = step(split(build(kind)), input_ids=folded, labels=labels, **bounds)
    truth = apart(lambda: build(kind), folded.view(1, 64), [10, 22, 32])
    results["two rows"] = errors((*found[:2], found[2].view(1, 64, -1)), truth)
    return results


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "gpt_oss"])
def test_documents_by_their_bounds_are_each_alone(run_ranks, kind):
    assert_equal(run_ranks(body_bounds, 2, kind))


def body_refused_documents():
    ids = batch(2, 32)
    model = split(build("llama")).train()
    leaky = split(build("gpt_oss")).train()

    def bounds(*values, **more):
        q = torch.tensor(values)
        return refusal(lambda: model(**{"input_ids": ids, "cu_seq_lens_q": q, "cu_seq_lens_k": q, **more}))

    _, restarting = cut_into([10, 22, 32], 32)
    return {
        "fine": bounds(0, 10, 32, 64, position_ids=restarting),
        "from": bounds(1, 32, 64),
        "to": bounds(0, 32, 63),
        "descends": bounds(0, 32, 20, 64),
        "rows": bounds(0, 30, 64),
        "floats": bounds(0.0, 32.0, 64.0),
        "one": bounds(0, 32, 64, cu_seq_lens_k=None),
        "differ": bounds(0, 32, 64, cu_seq_lens_k=torch.tensor([0, 31, 64])),
        "longest": bounds(0, 32, 64, max_length_q=31),
        "alone": refusal(lambda: model(input_ids=ids, max_length_q=31)),
        "positions": bounds(0, 11, 32, 64, position_ids=restarting),
        "padding": bounds(0, 32, 64, attention_mask=(ids > 9).long()),
        "mask": bounds(0, 32, 64, attention_mask=square("causal", 32)),
        "leaks": refusal(lambda: leaky(input_ids=ids, position_ids=restarting)),
        "rank": refusal(lambda: model(input_ids=ids, attention_mask=square("causal", 32 - dist.get_rank()))),
        "per head": refusal(lambda: model(input_ids=ids, attention_mask=square("causal", 32).expand(2, 8, -1, -1))),
        "biases": refusal(lambda: model(input_ids=ids, attention_mask=square("causal", 32).float())),
        "integers": refusal(lambda: model(input_ids=ids, attention_mask=square("causal", 32).long())),
        "sees nothing": refusal(
            lambda: model(input_ids=ids, attention_mask=square("causal", 32) & (torch.arange(32) != 5)[:, None])
        ),
        "by type": refusal(lambda: model(input_ids=ids, attention_mask={"full_attention": square("causal", 32)})),
        "bool, eager": refusal(lambda: leaky(input_ids=ids, attention_mask=square("causal", 32))),
    }


def test_refusals_are_the_same_on_every_rank(run_ranks):
    results = run_ranks(body_refused_documents, 2)
    assert results[0] == results[1]
    wanted = {
        "fine": "accepted",
        "from": "ascend from 0",
        "to": "64 tokens",
        "descends": "ascend",
        "rows": "lacks 32",
        "floats": "torch.float32",
        "one": "NoneType",
        "differ": "differ",
        "longest": "32 tokens",
        "alone": "say nothing",
        "positions": "[0, 10]",
        "padding": "leave one of them out",
        "mask": "not both",
        "leaks": "cu_seq_lens_q",
        "rank": "(2, 32)",
        "per head": "per head",
        "biases": "biases",
        "integers": "int64",
        "sees nothing": "token 5",
        "by type": "attention_mask",
        "bool, eager": "eager",
    }
    for name, word in wanted.items():
        assert word in results[0][name], (name, results[0][name])


def body_row_of_positions():
    """Several rows of positions per token: the first of four tells the documents, of three none."""
    ids = batch(2, 61)
    generator = torch.Generator().manual_seed(2)
    three = torch.arange(61) - torch.randint(0, 9, (3, 2, 61), generator=generator).cumsum(-1) % 7
    lengths = [17, 44]
    _, packed = cut_into(lengths, 61)
    four = torch.cat([packed.expand(1, 2, -1), three])
    results = {}
    for name, positions in {"three": three, "four": four, "four, one document": four.sort(-1).values}.items():
        found = differences(build_qwen, input_ids=ids, labels=ids, position_ids=positions)
        results |= {(name, *case): each for case, each in found.items()}
    # bounds of documents beside positions of three rows; the truth says it by a fourth
    model = split(build_qwen())
    bounds, _ = cut_into([*lengths, *lengths], 61)
    three[..., 17] = 0
    found = step(model, input_ids=ids, labels=ids, position_ids=three, **bounds)
    truth = step(build_qwen(), input_ids=ids, labels=ids, position_ids=torch.cat([packed.expand(1, 2, -1), three]))
    results["bounds"] = errors(found, truth)
    message = refusal(lambda: model(input_ids=ids, position_ids=packed.expand(2, -1)))
    return results, "cu_seq_lens_q" in message


def test_positions_of_several_rows_per_token(run_ranks):
    found = run_ranks(body_row_of_positions, 2)
    assert_equal([results for results, _ in found])
    assert all(refused for _, refused in found)


# -- vision-language models ------------------------------------------------------------------------------------

TEXT = {**COMMON, "max_position_embeddings": 512}
IMAGE = {"image_token_id": 90, "initializer_range": 0.1}


def build_qwen(**changes):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "temporal_patch_size": 1,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }
    text = {**TEXT, "rope_parameters": rope, **changes}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, video_token_id=91, vision_start_token_id=92, **IMAGE
    )
    torch.manual_seed(7)
    return Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")


def build_gemma(kind=Gemma3ForConditionalGeneration, **changes):
    text = {
        **TEXT,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
        **changes,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "initializer_range": 0.1,
    }
    config = Gemma3Config(
        text_config=text, vision_config=vision, boi_token_id=92, eoi_token_id=93, mm_tokens_per_image=16, **IMAGE
    )
    torch.manual_seed(7)
    model = kind._from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def pictures(length=61):
    """Ids of three rows: an image across the middle; none; two images side by side. And which are image tokens."""
    ids = batch(3, length) % 80 + 3
    ids[0, 24:40] = 90
    ids[2, 3:19] = 90
    ids[2, 20:36] = 90
    return ids, (ids == 90).int()


def qwen_inputs():
    ids, image = pictures()
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 90, IGNORE),
        "mm_token_type_ids": image,
        "pixel_values": torch.randn(3 * 64, 3 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * 3),
    }


def gemma_inputs():
    ids, image = pictures()
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 90, IGNORE),
        "token_type_ids": image,
        "pixel_values": torch.randn(3, 3, 16, 16, generator=generator),
    }


VISION = {"qwen2_5_vl": (build_qwen, qwen_inputs), "gemma3": (build_gemma, gemma_inputs)}


def body_vision(kind):
    make, inputs = VISION[kind][0], VISION[kind][1]()
    results = differences(make, **inputs)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :35] = 0
    padded = {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, IGNORE)}
    found = differences(make, rows=mask.bool(), **padded)
    return results | {("padded", *case): each for case, each in found.items()}


@pytest.mark.parametrize("kind", sorted(VISION))
def test_images_merged_whole_and_cut_at_the_text_decoder(run_ranks, kind):
    for size in (2, 4):
        assert_equal(run_ranks(body_vision, size, kind))


def body_gemma():
    """Packed documents beside images; the base model and other heads above it; caches and suspension."""
    inputs = gemma_inputs()
    packed = torch.cat([torch.arange(41), torch.arange(20)]).expand(3, -1)
    results = differences(build_gemma, position_ids=packed, **inputs)
    checks = {}
    labels = torch.tensor([1, 0, 1])
    found = differences(lambda: build_gemma(Gemma3ForSequenceClassification), **{**inputs, "labels": labels})
    results |= {("classifier", *case): each for case, each in found.items()}
    inputs.pop("labels")
    with torch.no_grad():
        plain, model = build_gemma().eval(), split(build_gemma().eval())
        other = inputs["token_type_ids"].roll(dist.get_rank())
        message = refusal(lambda: model(**{**inputs, "token_type_ids": other}))
        checks["token types must agree"] = "attention_mask" in message and "rank(s) [1]" in message
        truth = plain(**inputs).logits
        made, LazyMask.tensor = LazyMask.tensor, None  # calling it would raise: no square mask is ever made
        checks["no square"] = (model(**inputs).logits - truth).abs().max() <= 1e-4
        LazyMask.tensor = made
        checks["logits_to_keep"] = (model(**inputs, logits_to_keep=3).logits - truth[:, -3:]).abs().max() <= 1e-4
        checks["cache"] = torch.equal(model(**inputs, use_cache=True).logits, plain(**inputs, use_cache=True).logits)
        options = {"max_new_tokens": 4, "do_sample": False}
        checks["generate"] = torch.equal(model.generate(**inputs, **options), plain.generate(**inputs, **options))
        with longspan.suspended(model):
            checks["suspended"] = torch.equal(model(**inputs).logits, truth)
        plain, model = build_gemma(Gemma3Model).eval(), split(build_gemma(Gemma3Model).eval())
        off = model(**inputs).last_hidden_state - plain(**inputs).last_hidden_state
        checks["base model"] = off.abs().max() <= 1e-4
    return results, checks


def test_masks_made_above_the_decoder(run_ranks):
    found = run_ranks(body_gemma, 2)
    assert_equal([results for results, _ in found])
    for _, checks in found:
        assert all(checks.values()), checks


def body_vision_checkpointed(kind):
    make, inputs = VISION[kind][0], VISION[kind][1]()
    found = []
    for on in (False, True):
        model = split(make(), scheme="exchange").train()
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(**inputs, use_cache=False).loss.backward()
        found.append(gradients(model))
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("kind", sorted(VISION))
def test_checkpointing_of_images_changes_no_bit(run_ranks, kind):
    assert all(run_ranks(body_vision_checkpointed, 2, kind))


def block_ids(length, *spans):
    ids = torch.full((1, length), -1)
    for i, (start, stop) in enumerate(spans):
        ids[0, start:stop] = i
    return ids


def compositions(length):
    """Mask functions as models compose them: (function, whether it is all structure)."""
    blocks = masking_utils.blockwise_overlay(block_ids(length, (3, 5), (10, 40), (40, 44), (60, 61)))
    pieces = block_ids(length, (3, 9), (10, 20))
    pieces[0, 50:55] = 1
    chunks = masking_utils.chunked_overlay(8, torch.zeros(1, dtype=torch.int64))
    causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(8)
    either, both = masking_utils.or_masks, masking_utils.and_masks
    positions = torch.cat([torch.arange(33), torch.arange(length - 33)])[None]
    sequence = masking_utils.packed_sequence_mask_function((torch.arange(length) >= 33).long()[None])

    def remapped(function):
        return masking_utils.remap_positions_for_packed_sequence(function, positions)

    return {
        "full": (either(causal, blocks), True),
        "sliding": (both(either(causal, blocks), window), True),
        "window first": (both(window, either(causal, blocks)), True),
        "outside the window": (either(both(window, causal), blocks), True),
        "packed": (both(remapped(both(window, causal)), sequence), True),
        "packed blocks": (both(either(remapped(causal), blocks), sequence), True),
        "packed, chunked": (both(remapped(both(chunks, causal)), sequence), True),
        "blocks in pieces": (either(causal, masking_utils.blockwise_overlay(pieces)), False),
        "anything": (either(causal, lambda b, h, q, k: (q + k) % 5 == 0), False),
    }


def test_mask_functions_become_rules():
    """Against the tensor that transformers makes; blocks cover exactly the visible pairs."""
    length = 64
    for name, (function, structure) in compositions(length).items():
        truth = masking_utils.sdpa_mask(1, length, length, mask_function=function, allow_is_causal_skip=False)[0, 0]
        (rule,) = make_rules(function, 1, length, None)
        at = torch.arange(length)
        assert (rule.index is None) == structure, name
        assert torch.equal(rule.mask(at, at), truth), name
        covered = torch.zeros(length, length, dtype=torch.long)
        queries, keys = [Span(0, 14), Span(30, 64), Span(14, 30)], [Span(0, 31), Span(31, 64)]
        for q, k, kind in rule.blocks(queries, keys):
            block = rule.mask(at[q.start : q.stop], at[k.start : k.stop])
            if kind is Kind.CAUSAL:
                assert torch.equal(block, torch.ones_like(block).tril()), name
            assert kind is not Kind.FULL or block.all(), name
            covered[q.start : q.stop, k.start : k.stop] += block
        assert torch.equal(covered, truth.long()), name
        assert rule.pairs(Span(0, length), Span(0, length)) == int(truth.sum()), name


def body_deepstack():
    """Qwen3-VL hands image features to the first layers of its decoder: refused by name; text alone is fine."""
    text = {**TEXT, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "temporal_patch_size": 1,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, video_token_id=91, vision_start_token_id=92, **IMAGE)

    def make():
        torch.manual_seed(7)
        return Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")

    inputs = qwen_inputs()
    make()(**inputs)
    message = refusal(lambda: split(make())(**inputs))
    ids = batch(2, 61)
    return differences(make, input_ids=ids, labels=ids), message


def test_features_for_later_layers_are_refused_by_name(run_ranks):
    found = run_ranks(body_deepstack, 2)
    assert_equal([results for results, _ in found])
    assert found[0][1] == found[1][1]
    assert "visual_pos_masks" in found[0][1] or "deepstack" in found[0][1], found[0][1]


# -- RoPE that looks at the longest position -------------------------------------------------------------------


def build_rope(kind):
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        return build("llama", max_position_embeddings=32, rope_parameters=rope)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 32,
    }
    config = AutoConfig.for_model("phi3", **{**COMMON, "max_position_embeddings": 128}, rope_parameters=rope)
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def body_rope(kind):
    """Long, short, in between: what a module keeps between calls is the plain model's."""
    results = {}
    for scheme, layout in CASES:
        plain, model = build_rope(kind), split(build_rope(kind), scheme=scheme, layout=layout)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        packed = torch.cat([torch.arange(40), torch.arange(24)])[None]
        for name, length, more in (
            ("long", 64, {}),
            ("between", 45, {}),
            ("short", 16, {}),
            ("packed", 64, {"position_ids": packed}),
            ("three tokens", 3, {}),
        ):
            ids = batch(2, length)
            inputs = {"input_ids": ids, "labels": ids, **more}
            results[scheme, name] = errors(step(model, **inputs), step(plain, **inputs))
            plain.zero_grad()
            model.zero_grad()
    return results


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_of_the_longest_position(run_ranks, kind):
    assert_equal(run_ranks(body_rope, 2 if kind == "longrope" else 4, kind))


# -- padding ---------------------------------------------------------------------------------------------------


def body_not_finite():
    """What padding holds is nobody's business: not even where it is not finite, and where a shard is nothing else."""
    results = {}
    plain = build("llama").eval()
    for scheme, layout in CASES:
        model = split(build("llama").eval(), scheme=scheme, layout=layout)
        for name, count, left in (("left", 45, True), ("right", 20, False), ("less", 3, True), ("none", 0, True)):
            ids = batch(2, 64)
            mask = torch.ones_like(ids)
            mask[0, slice(0, count) if left else slice(64 - count, 64)] = 0
            with torch.no_grad():
                embeds = plain.get_input_embeddings()(ids)
                truth = plain(inputs_embeds=embeds, attention_mask=mask).logits
                for value in (0.0, float("inf"), float("nan")):
                    odd = embeds.masked_fill(mask[..., None] == 0, value)
                    found = model(inputs_embeds=odd, attention_mask=mask).logits
                    results[scheme, name, value] = float((found - truth)[mask.bool()].abs().max())
    return results


def test_padding_does_not_leak(run_ranks):
    for results in run_ranks(body_not_finite, 4):
        assert max(results.values()) <= 1e-4, results


# -- heads -----------------------------------------------------------------------------------------------------


def body_heads(kind):
    ids = batch(2, 61)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    mask[1, 55:] = 0
    config = build(kind).config
    config.num_labels, config.classifier_dropout = 3, 0.0
    heads = {
        "tokens": (AutoModelForTokenClassification, {"labels": (ids % 3).masked_fill(mask == 0, IGNORE)}),
        "spans": (
            AutoModelForQuestionAnswering,
            {"start_positions": torch.tensor([44, 3]), "end_positions": torch.tensor([50, 9])},
        ),
        "sequence": (AutoModelForSequenceClassification, {"labels": torch.tensor([2, 0])}),
    }
    results = {}
    for name, (head, targets) in heads.items():

        def run(prepare, head=head, targets=targets):
            torch.manual_seed(3)
            model = prepare(head.from_config(config)).train()
            out = model(input_ids=ids.masked_fill(mask == 0, 0), attention_mask=mask, **targets)
            out.loss.backward()
            if hasattr(model, "_longspan"):
                ContextParallel(dist.group.WORLD).reduce_gradients(model)
            scores = out.logits if "logits" in out else torch.stack([out.start_logits, out.end_logits], -1)
            scores = scores[mask.bool()] if scores.ndim == 3 else scores
            return out.loss.detach(), gradients(model), scores.detach()

        truth = run(lambda model: model)
        for scheme, layout in CASES:
            found = run(lambda model, options={"scheme": scheme, "layout": layout}: split(model, **options))
            results[name, scheme] = errors(found, truth)
    return results


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_heads_on_whole_hidden_states(run_ranks, kind):
    assert_equal(run_ranks(body_heads, 2, kind))
