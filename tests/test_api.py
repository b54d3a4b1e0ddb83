"""Engine: whole data in, whole outputs out; after a step the weights are those of one plain process, at any mesh."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from longspan import losses
from longspan.config import OptimizerConfig, ParallelConfig
from longspan.engine.core import Engine
from longspan.engine.datum import Datum, Unit, deal, units
from longspan.engine.mesh import init_mesh
from longspan.engine.process import precise
from longspan.prefix_tree import prefix_tree
from tiny import build, refusal

WIDE = torch.float64
ADAM = OptimizerConfig(lr=1e-2, schedule="constant", weight_decay=0.1, max_grad_norm=0.5)
LENGTHS = (13, 5, 24, 7, 2, 18)


def data(count=6, seed=0):
    """Groups of two share a prompt of four tokens where they are long enough."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, length in enumerate(LENGTHS[:count]):
        prompt = torch.arange(4) + 10 * (i // 2)
        tokens = torch.cat([prompt, torch.randint(3, 96, (length,), generator=generator)])[:length]
        noise = torch.randn(2, length, generator=generator, dtype=WIDE)
        mask = torch.arange(length) >= 4
        mask[0] = False
        made.append(
            Datum.from_tokens(
                tokens, mask, advantages=1.5 - i, old=-4 + noise[0], generator=-4 + noise[1], group=i // 2
            )
        )
    return made


def engine(dp, cp, **options):
    wrap = options.pop("wrap", "auto")
    return Engine(
        options.pop("model", None) or build("qwen3", WIDE),
        init_mesh(dp, cp),
        optimizer=ADAM,
        parallel=ParallelConfig(wrap=wrap),
        **options,
    )


# -- one plain process ---------------------------------------------------------------------------------------------


def plain_logprobs(model, datum):
    with precise(WIDE):
        every = F.log_softmax(model(input_ids=datum.tokens[None], use_cache=False).logits[0], -1)
    picked = every.gather(-1, datum.targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(datum.targets == -100, 0.0, picked)


def sequence_loss(logprobs, datum):
    """A loss of the user's own: a sequence's mean ratio, squared."""
    if not datum.mask.any():
        return 0.0 * logprobs.sum()
    return ((logprobs - datum.old)[datum.mask].mean().exp() * datum.advantages[0]).square()


def plain_steps(recipe, steps=2):
    """(losses, weights) of a plain loop over single sequences."""
    model = build("qwen3", WIDE)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps)
    found = []
    for _ in range(steps):
        total = 0.0
        if isinstance(recipe, losses.Recipe):
            every = [
                losses.tokens([d.mask], advantages=[d.advantages], old=[d.old], generator=[d.generator]) for d in data()
            ]
            over = losses.denominator(recipe, losses.count(recipe, every))
        for i, datum in enumerate(data()):
            logprobs = plain_logprobs(model, datum)
            if isinstance(recipe, losses.Recipe):
                total = total + losses.policy_loss(recipe, every[i], logprobs).loss / over
            else:
                total = total + sequence_loss(logprobs, datum) / len(LENGTHS)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(total.detach()))
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}


def own(batch):
    return sum(sequence_loss(new, datum) for new, datum in zip(batch.logprobs, batch.data)) / len(LENGTHS)


RECIPES = {
    "grpo": losses.preset("grpo"),
    "gspo, tis": losses.preset("gspo", correction=losses.Correction("tis")),
    "own": own,
}


def steps(dp, cp, name, options):
    made = engine(dp, cp, **options)
    found = []
    for _ in range(2):
        found.append(made.forward_backward(data(), RECIPES[name]).loss)
        made.optim_step()
    return found, made.whole_weights()


MESHES = [
    (1, 1, {"token_budget": 24}),
    (1, 2, {"token_budget": 1000}),
    (1, 4, {"token_budget": 30, "wrap": "ddp"}),
    (2, 1, {"token_budget": 25, "wrap": "ddp"}),
    (2, 2, {"token_budget": 24}),
    (4, 1, {"token_budget": 40}),
    (2, 2, {"token_budget": 64, "activation_checkpointing": True, "share_prefixes": False}),
]


@pytest.mark.parametrize("name", RECIPES)
def test_steps_at_every_mesh_are_those_of_one_plain_process(run_ranks, name):
    truth, weights = plain_steps(RECIPES[name])
    for dp, cp, options in MESHES:
        for found, theirs in run_ranks(steps, dp * cp, dp, cp, name, options):
            assert found == pytest.approx(truth, rel=1e-10), (dp, cp, options)
            assert set(weights) <= set(theirs)
            worst = max(float((theirs[key] - weights[key]).abs().max()) for key in weights)
            assert worst < 1e-9, (dp, cp, options, worst)


# -- outputs -------------------------------------------------------------------------------------------------------


def outputs(dp, cp, count, budget):
    made = engine(dp, cp, token_budget=budget)
    before = made.forward(data(count), entropy=True)
    done = made.forward_backward(data(count), "reinforce", entropy=True)
    made.zero_grad()
    return [(o.logprobs, o.entropy) for o in before], [(o.logprobs, o.entropy) for o in done.outputs], done.metrics


@pytest.mark.parametrize("count", [1, 3, 6])
def test_outputs_are_whole_in_the_order_of_the_data_on_every_rank(run_ranks, count):
    model = build("qwen3", WIDE)
    truth = [plain_logprobs(model, datum).detach() for datum in data(count)]
    for dp, cp in ((1, 1), (1, 2), (2, 2), (4, 1)):
        for before, after, metrics in run_ranks(outputs, dp * cp, dp, cp, count, 24):
            assert len(before) == len(after) == count
            for each, (logprobs, entropy), (again, _) in zip(truth, before, after):
                assert torch.allclose(logprobs, each, rtol=1e-10) and torch.allclose(again, each, rtol=1e-10)
                assert entropy.shape == logprobs.shape and bool((entropy > 0).all())
            assert metrics["tokens"] == sum(int(datum.mask.sum()) for datum in data(count))


# -- the low level -------------------------------------------------------------------------------------------------


def low_level(dp, cp):
    made = engine(dp, cp, token_budget=24)
    for _ in range(2):
        for batch in made.micro_batches(data()):
            made.backward(own(batch))
        made.optim_step()
    return made.whole_weights()


def test_a_loop_of_ones_own(run_ranks):
    _, weights = plain_steps(own)
    for dp, cp in ((1, 2), (2, 2)):
        for theirs in run_ranks(low_level, dp * cp, dp, cp):
            assert max(float((theirs[key] - weights[key]).abs().max()) for key in weights) < 1e-9


def mistakes():
    made = engine(1, 2, token_budget=24)
    rank = torch.distributed.get_rank()
    said = {}

    def forgets():
        for _ in made.micro_batches(data()):
            pass

    def tries(name, call):
        try:
            call()
            said[name] = "accepted"
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
        made.zero_grad()

    tries("no backward", forgets)
    tries("stray backward", lambda: made.backward(torch.ones((), requires_grad=True)))

    def early():
        for batch in made.micro_batches(data()):
            made.backward(own(batch))
            break
        made.optim_step()

    tries("left early", early)
    tries("no gradient", made.optim_step)
    tries("different data", lambda: made.forward(data(seed=rank)))
    tries("too long", lambda: made.forward([Datum(tokens=list(range(30)))]))
    tries("no data", lambda: made.forward([]))
    nothing = [Datum(tokens=[5, 6, 7], mask=[0, 0, 0], advantages=1.0, old=torch.zeros(3))]
    tries("all masked", lambda: made.forward_backward(nothing, "grpo"))
    tries("fields differ", lambda: made.forward([*data(), Datum(tokens=[5, 6])]))
    tries("unknown recipe", lambda: made.forward_backward(data(), "grpp"))
    made.options = OptimizerConfig()
    tries("no last step", made.optim_step)
    return said


def test_mistakes_are_told_on_every_rank(run_ranks):
    for said in run_ranks(mistakes, 2):
        assert "micro-batch 1 of" in said["no backward"] and "had no backward" in said["no backward"]
        assert "belongs to a micro-batch" in said["stray backward"]
        assert "had no backward yet" in said["left early"]
        assert "there is no gradient" in said["no gradient"]
        assert "different data" in said["different data"]
        assert "30 tokens, more than the token budget of 24" in said["too long"]
        assert "no data" in said["no data"]
        assert "nothing is left to learn from: 1 sequences" in said["all masked"]
        assert "differ in which fields they have: advantages" in said["fields differ"]
        assert "unknown recipe" in said["unknown recipe"]
        assert "Engine(steps=..)" in said["no last step"]


def not_finite():
    made = engine(2, 1, token_budget=64)
    before = made.whole_weights()
    broken = data()
    broken[3].advantages[0] = float("nan")
    try:
        made.forward_backward(broken, lambda batch: own(batch))
        text = "accepted"
    except FloatingPointError as error:
        text = str(error)
    same = all(torch.equal(value, before[name]) for name, value in made.whole_weights().items())
    return text, same


def test_a_loss_that_is_not_finite_stops_every_rank(run_ranks):
    for text, same in run_ranks(not_finite, 2):
        assert "the loss is" in text and same


def given_up(dp, cp, wrap):
    """A step after a loop that an error ended half way."""
    made = engine(dp, cp, token_budget=24, wrap=wrap)

    def fails(batch):
        fails.calls += 1
        if fails.calls == 2:
            raise ZeroDivisionError
        return own(batch) * 100

    fails.calls = 0
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            made.forward_backward(data(), fails)
        for number, batch in enumerate(made.micro_batches(data())):
            made.backward(own(batch) * 100)
            if number == 0:
                break
        made.zero_grad()
        made.forward_backward(data(), own)
        made.optim_step()
    return made.whole_weights()


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_a_loop_that_was_given_up_leaves_nothing(run_ranks, wrap):
    _, weights = plain_steps(own)
    for theirs in run_ranks(given_up, 2, 1, 2, wrap):
        assert max(float((theirs[key] - weights[key]).abs().max()) for key in weights) < 1e-9


def differing():
    made = engine(2, 1, token_budget=64)
    rank = torch.distributed.get_rank()
    stream = torch.arange(3, 15)
    cut = (4, 7)[rank]
    parts = [Datum(tokens=stream[:cut], targets=stream[:cut]), Datum(tokens=stream[cut:], targets=stream[cut:])]
    nothing = [Datum(tokens=[5, 6, 7], mask=[0, 0, 0], advantages=1.0)] * 2
    said = [refusal(lambda: made.forward(parts))]
    said.append(refusal(lambda: made.forward_backward(data(), ("grpo", "reinforce")[rank])))
    said.append(refusal(lambda: made.forward_backward((data(2), nothing)[rank], "reinforce")))
    return said


def test_what_differs_between_ranks_is_told_on_all(run_ranks):
    for cuts, recipes, masked in run_ranks(differing, 2):
        assert "different data: lengths" in cuts and "different data: options" in recipes
        assert "nothing is left to learn from" in masked


def pairs(dp):
    made = engine(dp, 1, wrap="ddp")
    group = [Datum.from_tokens([3, 4, 5, 6], [0, 0, 1, 1], group=0), Datum.from_tokens([3, 4, 7], [0, 0, 1], group=0)]

    def preference(batch):
        better, worse = (torch.stack([lp.sum() for lp in batch.logprobs[k::2]]) for k in (0, 1))
        return -F.logsigmoid(better - worse).sum()

    return made.forward_backward(group, preference).loss, made.optim_step().grad_norm


def test_a_rank_without_data_runs_what_another_has(run_ranks):
    ((loss, norm),) = run_ranks(pairs, 1, 1)
    for found in run_ranks(pairs, 2, 2):
        assert found == pytest.approx((loss, norm), rel=1e-9)


# -- state ---------------------------------------------------------------------------------------------------------


def saves(folder):
    made = engine(1, 2)
    made.forward_backward(data(), "grpo")
    made.optim_step()
    place = made.save_state(folder, version=3)
    made.export_hf(folder / "hf")
    made.forward_backward(data(), "grpo")
    made.optim_step()
    return str(place), made.whole_weights()


def goes_on(place):
    made = engine(2, 1, model=build("qwen3", WIDE))
    state = made.load_state(place)
    made.forward_backward(data(), "grpo")
    done = made.optim_step()
    return state["version"], done.step, made.whole_weights()


def test_state_goes_on_at_another_mesh_and_exports(run_ranks, tmp_path):
    (place, truth), _ = run_ranks(saves, 2, tmp_path)
    for version, step, weights in run_ranks(goes_on, 2, place):
        assert (version, step) == (3, 2)
        assert max(float((weights[name] - truth[name]).abs().max()) for name in truth) < 1e-9
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=WIDE)
    assert exported.config.model_type == "qwen3"


# -- Datum and its micro-batches -----------------------------------------------------------------------------------


def test_fields_that_speak_of_tokens_move_one_place_ahead():
    datum = Datum.from_tokens([7, 8, 9], [False, True, True], generator=[0.0, -1.0, -2.0], advantages=2.0)
    assert datum.targets.tolist() == [8, 9, -100] and datum.mask.tolist() == [True, True, False]
    assert datum.generator.tolist() == [-1.0, -2.0, 0.0] and datum.advantages.tolist() == [2.0, 2.0, 2.0]
    assert "nothing before it" in refusal(lambda: Datum.from_tokens([7, 8], [True, True]))
    assert "old is (2,)" in refusal(lambda: Datum(tokens=[1, 2, 3], old=[0.0, 0.0]))
    assert "has no target" in refusal(lambda: Datum(tokens=[1, 2, 3], mask=[1, 1, 1]))
    assert "fractions" in refusal(lambda: Datum(tokens=[1, 2, 3], mask=[0.5, 1, 0]))
    assert "fractions" in refusal(lambda: Datum.from_tokens([1, 2, 3], [0, 0.5, 1]))


def test_micro_batches_keep_the_budget_and_are_equally_many():
    generator = torch.Generator().manual_seed(0)
    for ranks in (1, 2, 3):
        for budget in (64, 100, 333):
            lengths = torch.randint(1, 65, (41,), generator=generator).tolist()
            parts = [Unit((i,), n, float(n * n)) for i, n in enumerate(lengths)]
            dealt = deal(parts, ranks, budget)
            assert sorted(i for row in dealt for own in row for i in own) == list(range(41))
            assert all(len(row) == ranks for row in dealt)
            assert all(sum(lengths[i] for i in own) <= budget for row in dealt for own in row)
    even = deal([Unit((i,), 10, 10.0) for i in range(16)], 2, 40)
    assert [[len(own) for own in row] for row in even] == [[4, 4], [4, 4]]


def test_groups_stay_together_and_count_their_prompt_once():
    prompt = list(range(3, 403))
    group = [Datum(tokens=[*prompt, 50 + i, 60 + i], group=0) for i in range(4)]
    (whole,) = units(group, 410, 0.0, prefix_tree)
    assert whole.members == (0, 1, 2, 3) and whole.tokens == 408
    assert [unit.tokens for unit in units(group, 900, 0.0, None)] == [804, 804]
    assert [unit.members for unit in units(group, 403, 0.0, prefix_tree)] == [(0,), (1,), (2,), (3,)]
    assert [unit.members for unit in units(group, 406, 0.0, prefix_tree)] == [(0, 1, 2), (3,)]
