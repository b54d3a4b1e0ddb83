"""Generators: what they draw, that it is a function of the seeds, and that its log-probabilities are the trainer's."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import longspan
from longspan.rl import own
from longspan.rl.continuous import ContinuousGenerator
from longspan.rl.own import OwnGenerator, draw, uniform
from longspan.rl.probe import probe
from longspan.rl.rollout import Completion, Sampling
from tiny import batch, build, refusal

STOP = (5, 6, 7, 8)
LENGTHS = (7, 12, 12, 1, 3, 12, 20, 7, 5, 2)
WIDE = torch.float64


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are slower on several threads, the more so beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts(lengths=LENGTHS, seed=3):
    rows = batch(len(lengths), max(lengths), seed)
    return [row[:length].tolist() for row, length in zip(rows, lengths)]


def groups(size=3):
    return [prompt for prompt in prompts() for _ in range(size)]


def scored(model):
    """What the trainer says: `probe`'s function."""

    def score(sequences, temperature):
        with torch.no_grad():
            return longspan.score(model, sequences, temperature=temperature).logprobs

    return score


def worst(model, asked, completions, temperature):
    """The largest difference between a generator's log-probabilities and the trainer's."""

    class Said:
        def generate(self, *_):
            return completions

    sampling = Sampling(temperature=temperature)
    return probe(Said(), scored(model), asked, sampling, tolerance=math.inf)


# -- the own loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("dtype,tolerance", [(WIDE, 1e-10), (torch.float32, 1e-5)])
def test_log_probabilities_are_the_trainers(kind, dtype, tolerance):
    model = build(kind, dtype).eval()
    generator = OwnGenerator(model)
    for temperature in (0.6, 0.0):
        sampling = Sampling(temperature=temperature, max_new_tokens=16, stop=STOP)
        made = generator.generate(groups(2), sampling, list(range(20)))
        assert worst(model, groups(2), made, temperature) <= tolerance
        assert generator.pads  # lengths from 1 to 20 ran together
        assert temperature == 0 or {each.finish for each in made} == {"stop", "length"}
        for each in made:
            stops = [token in STOP for token in each.tokens]
            assert not any(stops[:-1]) and stops[-1] == (each.finish == "stop")
            assert each.finish == "stop" or len(each.tokens) == 16


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "gemma2"])
def test_experts_and_sinks_and_capped_scores(kind):
    model = build(kind).eval()
    sampling = Sampling(max_new_tokens=12, stop=STOP)
    made = OwnGenerator(model).generate(groups(), sampling, list(range(30)))
    assert worst(model, groups(), made, 1.0) <= 1e-5


def test_what_is_drawn_depends_on_the_seed_alone():
    generator = OwnGenerator(build("qwen3", WIDE))
    asked, seeds = groups(), list(range(40, 70))
    sampling = Sampling(temperature=0.9, max_new_tokens=10, stop=STOP)
    together = [each.tokens for each in generator.generate(asked, sampling, seeds)]
    alone = [generator.generate([prompt], sampling, [seed])[0].tokens for prompt, seed in zip(asked, seeds)]
    assert alone == together
    order = np.random.default_rng(0).permutation(len(asked))
    mixed = generator.generate([asked[i] for i in order], sampling, [seeds[i] for i in order])
    assert [each.tokens for each in mixed] == [together[i] for i in order]
    generator.batch_tokens = 64  # a few rows a batch
    assert [each.tokens for each in generator.generate(asked, sampling, seeds)] == together
    shorter = generator.generate(asked, Sampling(temperature=0.9, max_new_tokens=4, stop=STOP), seeds)
    assert [each.tokens for each in shorter] == [tokens[:4] for tokens in together]
    assert len(set(together)) > 25  # and the seeds of a group are different draws
    same = generator.generate([asked[0]] * 2, sampling, [1, 1])
    assert same[0].tokens == same[1].tokens


def test_draws_have_the_distribution():
    """Chi-squared of 20,000 draws against the probabilities; and the ends of the unit interval."""
    logits = torch.tensor([[0.0, 1.0, -math.inf, 2.0, -1.0]])
    count = 20_000
    found, logprobs = draw(logits.expand(count, -1), torch.from_numpy(uniform(0, count)), 0.5)
    expected = (logits[0] / 0.5).softmax(-1)
    seen = torch.bincount(found, minlength=5).double()
    assert seen[2] == 0
    terms = (seen - count * expected).square() / (count * expected)
    assert float(terms[expected > 0].sum()) < 16.3  # 0.1 % at 3 degrees of freedom
    assert torch.equal(logprobs, F.log_softmax(logits[0] / 0.5, -1)[found])
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=WIDE)
    assert draw(logits.expand(2, -1), ends, 0.5)[0].tolist() == [0, 4]
    certain = torch.tensor([[-math.inf, 5.0, -math.inf]]).expand(2, -1)
    assert draw(certain, ends, 1.0)[0].tolist() == [1, 1]


def test_greedy_takes_the_most_probable():
    model = build("qwen3", WIDE).eval()
    (made,) = OwnGenerator(model).generate([[3, 4, 5]], Sampling(temperature=0, max_new_tokens=8), [0])
    ids = torch.tensor([[3, 4, 5, *made.tokens]])
    with torch.no_grad():
        assert model(input_ids=ids).logits[0, 2:-1].argmax(-1).tolist() == list(made.tokens)


def test_padding_that_the_model_does_not_heed_is_not_used():
    """A model that counts positions from the padding on: lengths run apart, and the log-probabilities stay right."""
    model = build("gpt2", WIDE).eval()  # with RoPE, to count from elsewhere is no difference
    generator = OwnGenerator(model)
    generator._takes -= {"position_ids"}
    sampling = Sampling(max_new_tokens=8, stop=STOP)
    with mock.patch.object(own.LOGGER, "warning") as warned:
        made = generator.generate(groups(), sampling, list(range(30)))
        generator.generate(groups(), sampling, list(range(30)))
    assert generator.pads is False and warned.call_count == 1
    assert worst(model, groups(), made, 1.0) <= 1e-10
    assert [each.tokens for each in made] == [
        each.tokens for each in OwnGenerator(model).generate(groups(), sampling, list(range(30)))
    ]


def test_rope_of_the_longest_position_is_batched_by_length():
    model = build("llama", WIDE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}).eval()
    generator = OwnGenerator(model)
    made = generator.generate(prompts(), Sampling(max_new_tokens=6), list(range(len(LENGTHS))))
    assert generator.pads is False and worst(model, prompts(), made, 1.0) <= 1e-10


def test_a_padded_output_table_is_not_drawn_from():
    """Rows behind the vocabulary take no part, as in `longspan.score`."""
    model = build("qwen3", WIDE).eval()
    model.resize_token_embeddings(128)
    model.config.vocab_size = 96
    with torch.no_grad():
        model.lm_head.weight[96:] = 3.0 * model.lm_head.weight[:32]
    made = OwnGenerator(model).generate(groups(), Sampling(max_new_tokens=12), list(range(30)))
    assert max(max(each.tokens) for each in made) < 96
    assert worst(model, groups(), made, 1.0) <= 1e-10
    with pytest.raises(ValueError, match="128 output rows for 96 tokens"):
        ContinuousGenerator(model)


def test_recurrent_layers_are_batched_by_length():
    fields = {
        "vocab_size": 96,
        "hidden_size": 32,
        "state_size": 8,
        "num_hidden_layers": 2,
        "expand": 2,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **fields)).to(WIDE).eval()
    generator = OwnGenerator(model)
    made = generator.generate(groups(), Sampling(max_new_tokens=6), list(range(30)))
    for prompt, each in zip(groups(), made):
        ids = torch.tensor([[*prompt, *each.tokens]])
        with torch.no_grad():
            truth = F.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
        assert (
            abs(truth.gather(-1, torch.tensor(each.tokens)[:, None])[:, 0] - torch.tensor(each.logprobs)).max() < 1e-5
        )


@pytest.mark.parametrize("make", [OwnGenerator, ContinuousGenerator])
def test_another_precision_is_the_parameters_alone(make):
    """RoPE's frequencies are a buffer: in bf16 they would put far tokens at other positions."""
    model = build("qwen3").eval()
    generator = make(model, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in generator.model.parameters()} == {torch.bfloat16}
    for (name, buffer), (_, own_buffer) in zip(model.named_buffers(), generator.model.named_buffers(), strict=True):
        assert buffer.dtype is own_buffer.dtype and torch.equal(buffer, own_buffer), name
    generator.update_weights({name: 1.1 * tensor for name, tensor in model.state_dict().items()}, 1)
    assert torch.equal(generator.model.lm_head.weight, (1.1 * model.lm_head.weight).bfloat16())
    generator.update_weights(model.state_dict(), 2)
    made = generator.generate(prompts(), Sampling(max_new_tokens=4), list(range(len(LENGTHS))))
    assert 1e-5 < worst(model, prompts(), made, 1.0) < 0.1


# -- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [OwnGenerator, ContinuousGenerator])
def test_weights_are_copied_and_checked(make):
    model = build("qwen3").eval()
    generator = make(model)
    asked, sampling = prompts(), Sampling(max_new_tokens=5)
    seeds = list(range(len(asked)))
    before = generator.generate(asked, sampling, seeds)
    assert {each.version for each in before} == {0}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert generator.generate(asked, sampling, seeds) == before  # its own copy
    generator.update_weights(model.state_dict(), 7)
    after = generator.generate(asked, sampling, seeds)
    assert {each.version for each in after} == {7}
    assert worst(model, asked, after, 1.0) <= 1e-5
    whole = model.state_dict()
    short = {name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}
    for wrong, said in (
        (short, "1 missing .model.norm.weight"),
        ({**whole, "extra": torch.zeros(1)}, "1 unknown .extra"),
        ({**whole, "model.norm.weight": torch.zeros(3)}, "model.norm.weight is .3,."),
    ):
        with pytest.raises(ValueError, match=said):
            generator.update_weights({name: 2 * tensor for name, tensor in wrong.items()}, 8)
    assert generator.generate(asked, sampling, seeds) == after  # nothing of them was copied


def test_tied_weights_come_under_either_name():
    model = build("llama", tie_word_embeddings=True)
    generator = OwnGenerator(model)
    doubled = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    del doubled["lm_head.weight"]
    generator.update_weights(doubled, 1)
    assert torch.equal(generator.model.lm_head.weight, 2 * model.lm_head.weight)


# -- what cannot be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [OwnGenerator, ContinuousGenerator])
def test_requests_that_mean_nothing_are_refused(make):
    generator = make(build("qwen3"))
    for asked, seeds, said in (
        ([[3, 4], []], [0, 1], r"prompts\[1\] has no token"),
        ([[3, 96]], [0], r"prompts\[0\] has tokens from 3 to 96, outside 0..95"),
        ([[3]], [0, 1], "1 prompts have 2 seeds"),
        ([[3]], [-1], r"seeds\[0\] is -1"),
    ):
        with pytest.raises(ValueError, match=said):
            generator.generate(asked, Sampling(), seeds)
    assert generator.generate([], Sampling(), []) == []
    for wrong in ({"temperature": -1.0}, {"temperature": math.nan}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError):
            Sampling(**wrong)
    with pytest.raises(ValueError, match="a plain Hugging Face causal LM"):
        make(torch.nn.Linear(2, 2))


def _generator_of_a_split_model():
    return refusal(lambda: OwnGenerator(longspan.parallelize(build("qwen3"), dist.group.WORLD)))


def test_a_split_model_is_refused(run_ranks):
    for said in run_ranks(_generator_of_a_split_model, 2):
        assert "before longspan.parallelize" in said


def test_weights_that_diverged_raise():
    model = build("qwen3")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(RuntimeError, match="the weights have diverged"):
        OwnGenerator(model).generate([[3]], Sampling(), [0])
    with pytest.raises(RuntimeError, match=r"prompt 0|ended without prompts"):
        ContinuousGenerator(model).generate([[3]], Sampling(max_new_tokens=3), [0])


# -- continuous batching ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_continuous_batching_is_the_trainers_and_leaves_no_trace(kind):
    model = build(kind).train()
    generator = ContinuousGenerator(model)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for temperature in (0.7, 0.0):
        sampling = Sampling(temperature=temperature, max_new_tokens=8, stop=STOP)
        made = generator.generate(groups(2), sampling, list(range(20)))
        assert worst(model, groups(2), made, temperature) <= 1e-5
        for each in made:
            stops = [token in STOP for token in each.tokens]
            assert not any(stops[:-1]) and stops[-1] == (each.finish == "stop")
    assert made == generator.generate(groups(2), sampling, list(range(20)))  # repeatable
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert not hasattr(generator.model, "_cached_continuous_batching_manager")


def test_continuous_batching_waits_where_the_cache_is_full_and_refuses_what_never_fits():
    model = build("qwen3")
    generator = ContinuousGenerator(model, batch_tokens=96, step_tokens=16, page_tokens=16)
    sampling = Sampling(max_new_tokens=12)
    made = generator.generate(prompts(), sampling, list(range(len(LENGTHS))))
    assert worst(model, prompts(), made, 1.0) <= 1e-5
    with pytest.raises(ValueError, match="has room for 6"):
        generator.generate([[3] * 90], sampling, [0])


def test_a_model_that_paged_attention_does_not_know_is_refused():
    with pytest.raises(RuntimeError, match="continuous batching is not Gemma2ForCausalLM"):
        ContinuousGenerator(build("gemma2")).generate(prompts(), Sampling(max_new_tokens=8), list(range(len(LENGTHS))))


def test_a_loop_that_dies_names_its_prompts():
    generator = ContinuousGenerator(build("qwen3"))
    generator.model.forward = mock.Mock(side_effect=MemoryError("no room"))
    with pytest.raises(RuntimeError, match="no room"):
        generator.generate(prompts(), Sampling(max_new_tokens=3), list(range(len(LENGTHS))))


# -- the probe -------------------------------------------------------------------------------------------------


def test_the_probe_tells_old_weights_and_renormalised_ones():
    model = build("qwen3").eval()
    generator, sampling = OwnGenerator(model), Sampling(temperature=0.8, max_new_tokens=4)
    assert 0 < probe(generator, scored(model), prompts(), sampling) <= 1e-5
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
        model.lm_head.weight[3].add_(0.01)
    with pytest.raises(RuntimeError, match=r"it says log p = -\d.*the trainer -\d.*Old weights"):
        probe(generator, scored(model), prompts(), sampling)
    generator.update_weights(model.state_dict(), 1)
    probe(generator, scored(model), prompts(), sampling)
    with pytest.raises(RuntimeError, match="differ by"):  # as a sampler does that reports before the temperature
        probe(generator, lambda sequences, _: scored(model)(sequences, 1.0), prompts(), sampling)


def test_the_probe_does_not_pass_over_what_is_no_number():
    class Mute:
        def generate(self, asked, sampling, seeds):
            return [Completion(tokens=(4, 5), logprobs=(-1.0, math.nan), finish="length", version=0) for _ in asked]

    with pytest.raises(RuntimeError, match="nan"):
        probe(Mute(), lambda sequences, _: [[-1.0] * 3 for _ in sequences], [[3]], Sampling(), tolerance=1.0)
    with pytest.raises(RuntimeError, match="nothing to compare"):
        probe(OwnGenerator(build("qwen3")), scored(build("qwen3")), [], Sampling())
