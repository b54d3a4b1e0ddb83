"""longspan check: equal models are found equal, and every fault that is put in is found and named."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import longspan
import tiny
from longspan import layout as layouts
from longspan.checks import prove, sweep
from longspan.checks.cases import make_cases, random_tokens
from longspan.checks.shrink import shrink
from longspan.models import causal_lm, decoder, hooks
from longspan.models.forward import Forward
from longspan.rule import Rule
from longspan.scoring import IGNORE, shift_left

# ---- faults, each as a patch of the adapter


def dropped_mask():
    return mock.patch.object(Forward, "rules", lambda forward, mask_function: (Rule.causal(),) * forward.batch)


def dropped_window():
    stack = contextlib.ExitStack()
    stack.enter_context(dropped_mask())
    stack.enter_context(mock.patch.object(hooks, "_understood", lambda *args: {}))  # it would have refused
    return stack


def local_positions():
    right = decoder._local_arguments

    def wrong(prepared, arguments, **options):
        local = right(prepared, arguments, **options)
        local["position_ids"] = torch.arange(prepared.model_rows)[None]
        return local

    return mock.patch.object(decoder, "_local_arguments", wrong)


def shard_local_attention():
    def wrong(q, k, v, *, scale=None, **_):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    return mock.patch.object(hooks, "attend", wrong)


def missing_remote_gradient():
    from longspan.attention import exchange

    return mock.patch.object(exchange, "_add_returned", lambda stage, pending, own: pending.wait())


def local_label_shift():
    def wrong(labels, ignore_index=IGNORE):
        layout = layouts.head_tail(labels.shape[1], dist.get_world_size())
        parts = labels[:, torch.from_numpy(layout.order)].split(list(layout.row_counts), 1)
        shifted = torch.cat([shift_left(part, ignore_index) for part in parts], 1)
        return shifted[:, torch.from_numpy(layout.inverse)]

    return mock.patch.object(causal_lm, "shift_left", wrong)


def unrefused_state():
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(longspan.models, "_check_model", lambda *args, **kwargs: None))
    stack.enter_context(mock.patch.object(decoder, "_check_attention_ran", lambda *args, **kwargs: None))
    return stack


# fault, model, options of parallelize(), the cause that must be named, which cases must show it
FAULTS = {
    "dropped mask": (dropped_mask, "llama", {}, "mask", {"left padding", "packed positions"}),
    "dropped window": (dropped_window, "mistral", {}, "mask", {"odd length"}),
    "local positions": (local_positions, "llama", {}, "position", {"odd length"}),
    "local positions, learned": (local_positions, "gpt2", {}, "position", {"odd length"}),
    "shard-local attention": (shard_local_attention, "llama", {}, "attention", {"odd length"}),
    "missing remote gradient": (missing_remote_gradient, "llama", {"scheme": "exchange"}, "gradient", {"odd length"}),
    "local label shift": (local_label_shift, "llama", {}, "head", {"odd length"}),
    "gradients that nobody sums": (contextlib.nullcontext, "llama", {"gradient": "sum"}, "scale", {"odd length"}),
    "state": (unrefused_state, "qwen3_next", {}, "state", {"odd length"}),
}


def broken(names):
    found = {}
    for name in names:
        fault, kind, options, *_ = FAULTS[name]
        model = sweep.small_model(kind)
        cases = make_cases(random_tokens(sweep.vocabulary(model)))
        options = {"layout": "head_tail", "scheme": "exchange", **options}
        if options.get("gradient") == "sum":
            options["logits"] = "none"
            with fault():
                found[name] = prove_sum(model, cases)
            continue
        with fault():
            found[name] = prove(model, cases, dist.group.WORLD, **options)
    return found


def prove_sum(model, cases):
    """A trainer that averages what was meant to be summed. (Without labels the same model gives whole logits.)"""
    right = longspan.ContextParallel.reduce_gradients

    def halved(self, module):
        right(self, module)
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.size

    with mock.patch.object(longspan.ContextParallel, "reduce_gradients", halved):
        return prove(model, cases, dist.group.WORLD, layout="head_tail", scheme="exchange")


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found_and_named(run_ranks, name):
    *_, cause, showing = FAULTS[name]
    for findings in run_ranks(broken, 2, [name]):
        different = {f.case: f for f in findings[name] if f.status == "different"}
        assert showing <= set(different), [(f.case, f.status, f.reason) for f in findings[name]]
        for case in showing:
            finding = different[case]
            assert finding.cause == cause, finding
            if cause in ("mask", "position", "attention", "state"):
                assert finding.layer and finding.position, finding
            assert finding.parameter, finding  # each of these faults bends gradients


def in_a_job():
    model = tiny.build("llama").eval()
    batch = {"input_ids": tiny.batch(2, 21), "labels": tiny.batch(2, 21)}
    group = dist.group.WORLD
    model(**batch).loss.backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    reports = [longspan.check(model, batch, group)]
    longspan.parallelize(model, group)
    reports.append(longspan.check(model, batch))
    with dropped_mask():
        reports.append(longspan.check(model, {**batch, "attention_mask": left_padded(2, 21)}))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    reports.append(longspan.check(wrapped, batch))
    report = fully_sharded(batch)
    reports.append(report)
    kept = all(torch.equal(before[n], p.grad) for n, p in model.named_parameters())
    return [r.status for r in reports], [str(r) for r in reports], kept, model.training


def fully_sharded(batch):
    from torch.distributed.fsdp import fully_shard

    model = longspan.parallelize(tiny.build("llama"), dist.group.WORLD)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    right = longspan.check(model, batch)
    with dropped_mask():
        wrong = longspan.check(model, {**batch, "attention_mask": left_padded(2, 21)})
    assert wrong.status == "different" and wrong.findings[0].cause == "mask", str(wrong)
    return right


def left_padded(rows, length):
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, :9] = 0
    return mask


def test_check_inside_a_job(run_ranks):
    for statuses, texts, gradients_kept, training in run_ranks(in_a_job, 2):
        assert statuses == ["equal", "equal", "different", "equal", "equal"], texts
        assert "mask" in texts[2] and "batch row 0, token 9" in texts[2]
        assert gradients_kept and not training


def test_shrinking_keeps_the_structure():
    from transformers import AutoConfig

    full = AutoConfig.for_model(
        "gemma3_text", num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4, attention_dropout=0.1
    )
    small = shrink(full)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert small.num_attention_heads == 8 and small.num_key_value_heads == 2
    assert small.sliding_window == 8 and small.attention_dropout == 0.0
    assert small.rope_parameters == full.rope_parameters and small.tie_word_embeddings == full.tie_word_embeddings
    assert small.final_logit_softcapping == full.final_logit_softcapping
    assert full.num_hidden_layers == 12  # left alone

    phi = AutoConfig.for_model("phi3", rope_parameters={
        "rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48, "rope_theta": 1e4,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0,
    })  # fmt: skip
    small = shrink(phi)
    assert len(small.rope_parameters["long_factor"]) * 2 == small.hidden_size // small.num_attention_heads


def cli(*arguments, folder):
    command = [sys.executable, "-m", "longspan", *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=300)


def test_the_command(tmp_path):
    """Equal: 0, refused: 2 with parallelize()'s reason, nonsense: 2 in one line."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8}))
    done = cli("check", str(config), "--sizes", "2", "--scheme", "exchange", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["status"] == "equal" and len(answer["findings"]) == 6

    done = cli("check", "mamba", "--sizes", "2", folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "refused" in done.stdout and "linear_attention" in done.stdout

    done = cli("check", str(tmp_path / "nothing"), folder=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


def test_the_command_with_real_weights(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", *(f"w{i}" for i in range(90))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "model")
    tiny.build("qwen3").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * 7 % 90}" for i in range(100)))
    options = ["--full", "--text", "text.txt", "--length", "29", "--sizes", "2", "--scheme", "ulysses"]
    done = cli("check", "model", *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its own weights" in done.stdout and "equal to one rank" in done.stdout

    done = cli("check", "model", "--full", folder=tmp_path)
    assert done.returncode == 2 and "--full and --text" in done.stderr


def test_a_few_architectures_of_every_kind(tmp_path):
    """The sweep's fast part; the whole is run nightly (`longspan sweep`)."""
    page, lines = tmp_path / "models.md", tmp_path / "sweep.jsonl"
    kinds = ("llama", "gpt2", "mamba")
    done = cli("sweep", *kinds, "--lines", str(lines), "--out", str(page), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    read = sweep.read(lines)
    assert {kind: read[kind]["status"] for kind in kinds} == {"llama": "equal", "gpt2": "equal", "mamba": "refused"}
    assert "| llama | LlamaForCausalLM |" in page.read_text()


def body_kind(kind):
    groups = {2: dist.group.WORLD}
    line = sweep.examine(kind, [(2, "exchange", "head_tail")], groups)
    return line["status"], line["reason"]


REFUSED = {"mamba", "qwen3_next", "mpt", "doge", "falcon"}


@pytest.mark.parametrize("kind", sweep.FAST)
def test_architectures(run_ranks, kind):
    """Two ranks, one scheme; `longspan sweep` goes through all of them with more."""
    for status, reason in run_ranks(body_kind, 2, kind):
        assert status == ("refused" if kind in REFUSED else "equal"), reason


@pytest.mark.nightly
def test_every_architecture(tmp_path):
    """At least 130 equal, none different; the rest refused, or their small model does not run plainly."""
    lines = tmp_path / "sweep.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "longspan", "sweep", "--lines", str(lines)], capture_output=True, text=True, timeout=3600
    )
    read = sweep.read(lines)
    statuses = [read[kind]["status"] for kind in sweep.architectures()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert statuses.count("equal") >= 130
    assert not [kind for kind, line in read.items() if line["status"] == "different"]


def test_the_list_of_verified_decoders_is_the_table():
    """The page of the docs and the data that parallelize() reads come from one sweep."""
    from longspan.models.verified import verified

    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    equal = page.split("### Equal")[1].split("### Refused")[0]
    assert len(verified()["decoders"]) >= 100
    for kind in ("llama", "qwen3", "mistral", "gemma3_text", "gpt_oss", "mixtral", "gpt2"):
        assert kind in verified()["decoders"] and f"| {kind} |" in equal
