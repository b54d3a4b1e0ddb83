"""The engine against one process: gradients, norms, weights, curves, checkpoints, signals."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from longspan.config import CheckpointConfig, Config, ConfigError, DataConfig, ModelConfig, OptimizerConfig
from longspan.engine import checkpoint, metrics
from longspan.engine.build import build_model
from longspan.engine.data import load_tokenizer
from longspan.engine.mesh import _adopt_slurm, _first_node, init_mesh
from longspan.engine.optim import learning_rate
from longspan.engine.train import train

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


def settings(folder, changes):
    """A small run over chat-like rows: uneven lengths, uneven target counts."""
    config = Config(
        folder=str(folder),
        model=ModelConfig(config=dict(MODEL), dtype="float64"),
        data=DataConfig(source=str(Path(folder).parent / "data.jsonl"), sequence_length=96, validation_rows=3),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=1),
        checkpoint=CheckpointConfig(at_end=False),
    )
    config.train.steps, config.train.batch_rows, config.train.threads = 3, 4, 1
    for key, value in changes.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    return config


GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 262, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 8, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    records = [
        {"prompt": f"{n} plus {n * n} is " * (1 + n % 3), "completion": "x" * (1 + 7 * (n % 5)) + str(n)}
        for n in range(24)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def run(folder, changes, kill_at=0):
    """One run: (summary, records without what depends on speed, whole weights)."""
    records, weights = [], {}

    def on_step(record):
        records.append({name: record[name] for name in ("step", "loss", "grad_norm", "lr", "targets", "tokens")})
        if "validation_loss" in record:
            records[-1]["validation_loss"] = record["validation_loss"]
        if record["step"] == kill_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    original = checkpoint.export

    def take(place, module, config, tokenizer):  # the engine keeps no model; the export is a door to its weights
        for name, value in module.state_dict().items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            weights[name.removeprefix("module.")] = value.clone()
        return original(place, module, config, tokenizer)

    checkpoint.export = take
    try:
        summary = train(settings(folder, changes), progress=False, on_step=on_step)
    finally:
        checkpoint.export = original
    return summary, records, weights


def assert_same(ours, theirs, tolerance, what=""):
    assert len(ours) == len(theirs), what
    for one, other in zip(ours, theirs):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=0), (what, one["step"], name)


EXPORT = {"checkpoint.export": True}

SAME_RUNS = {
    "fsdp on one rank": (1, {"parallel.wrap": "fsdp"}),
    "two rows at once": (1, {"train.micro_rows": 2}),
    "recomputed": (1, {"train.activation_checkpointing": True, "train.deterministic": True}),
    "dp 2 ddp": (2, {"parallel.wrap": "ddp"}),
    "dp 2 fsdp": (2, {}),
    "dp 2 ddp, accumulation 1": (2, {"parallel.wrap": "ddp", "train.micro_rows": 2}),
    "dp 2 fsdp, accumulation 1": (2, {"train.micro_rows": 2}),
    "dp 2 fsdp, recomputed": (2, {"train.activation_checkpointing": True}),
    "dp 4 fsdp": (4, {}),
    "cp 2 fsdp": (2, {"mesh.cp": 2}),
    "cp 2 ddp, ulysses": (2, {"mesh.cp": 2, "parallel.wrap": "ddp", "parallel.scheme": "ulysses"}),
    "cp 2 fsdp, exchange": (2, {"mesh.cp": 2, "parallel.scheme": "exchange", "train.micro_rows": 2}),
    "cp 2 fsdp, recomputed": (2, {"mesh.cp": 2, "train.activation_checkpointing": True}),
    "dp 2 cp 2 fsdp": (4, {"mesh.cp": 2}),
    "dp 2 cp 2 ddp": (4, {"mesh.cp": 2, "parallel.wrap": "ddp", "parallel.layout": "head_tail"}),
    "cp 4 fsdp": (4, {"mesh.cp": 4}),
}


def test_every_mesh_and_split_of_the_batch_trains_alike(run_ranks, folder):
    """Equal loss, norm and validation at each step, and equal weights after three steps, in fp64."""
    common = EXPORT | {"train.validate_every": 1, "optimizer.max_grad_norm": 0.5}
    (_, expected, weights), *_ = run_ranks(run, 1, str(folder / "one"), common)
    assert [record["step"] for record in expected] == [1, 2, 3]
    assert all(record["grad_norm"] > 0.5 for record in expected)  # so clipping took place
    for name, (size, changes) in SAME_RUNS.items():
        results = run_ranks(run, size, str(folder / name), common | changes)
        for _, records, ours in results:
            assert_same(records, expected, 1e-12, name)
            assert ours.keys() == weights.keys()
            for key, value in ours.items():
                torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-12, msg=f"{name}: {key}")


def test_tied_embeddings_train_and_export_alike(run_ranks, folder):
    changes = EXPORT | {"model.config": MODEL | {"tie_word_embeddings": True}}
    (_, expected, weights), *_ = run_ranks(run, 1, str(folder / "one"), changes)
    for wrap in ("ddp", "fsdp"):
        (summary, records, _ours), *_ = run_ranks(run, 2, str(folder / wrap), changes | {"parallel.wrap": wrap})
        assert_same(records, expected, 1e-12)
        model = AutoModelForCausalLM.from_pretrained(summary.export, dtype=torch.float64)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        torch.testing.assert_close(model.lm_head.weight.data, weights["lm_head.weight"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("wrap", "cp"), [("ddp", 1), ("fsdp", 1), ("fsdp", 2), ("ddp", 2)])
def test_bf16_keeps_float32_weights(run_ranks, folder, wrap, cp):
    changes = EXPORT | {"model.dtype": "float32", "train.micro_rows": 2}
    (_, expected, _), *_ = run_ranks(run, 1, str(folder / "one"), changes)
    changes |= {"train.precision": "bf16", "parallel.wrap": wrap, "mesh.cp": cp}
    (_, records, weights), *_ = run_ranks(run, 2, str(folder / "two"), changes)
    assert_same(records, expected, 2e-2)
    assert records != expected
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_a_run_resumes_at_another_mesh_on_the_same_curve(run_ranks, folder):
    """none -> fsdp, cp 2 -> ddp, dp 2 -> fsdp, dp 2 cp 2 -> none, two steps each, each stopped by SIGTERM; and the
    metrics file has no duplicates."""
    (_, expected, weights), *_ = run_ranks(run, 1, str(folder / "whole"), EXPORT | {"train.steps": 10})
    place = str(folder / "parts")
    every = EXPORT | {"train.steps": 10, "checkpoint.every": 2}
    meshes = [(1, "none", 1), (2, "fsdp", 2), (2, "ddp", 1), (4, "fsdp", 2), (1, "none", 1)]
    for part, (size, wrap, cp) in enumerate(meshes):
        changes = every | {"parallel.wrap": wrap, "mesh.cp": cp}
        results = run_ranks(run, size, place, changes, 2 * part + 2)
        summary, records, ours = results[0]
        assert_same(records, expected[2 * part : 2 * part + 2], 1e-12)
        assert (summary.step, summary.stopped) == (2 * part + 2, part < 4)
        assert results[-1][0].step == summary.step
    for name, value in ours.items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-12, msg=name)
    lines = [json.loads(line) for line in Path(place, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [path.name for path in checkpoint.checkpoints(Path(place))] == ["step-8", "step-10"]


def test_sigterm_on_one_rank_stops_all_after_the_step(run_ranks, folder):
    for summary, records, _ in run_ranks(run, 2, str(folder / "run"), {"train.steps": 50}, 2):
        assert (summary.step, summary.stopped, len(records)) == (2, True, 2)
        assert Path(summary.checkpoint).name == "step-2"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_half_written_checkpoint_is_ignored_and_cleared(run_ranks, folder):
    place = folder / "run"
    run_ranks(run, 1, str(place), {"train.steps": 2, "checkpoint.every": 1, "checkpoint.keep": 1})
    assert [path.name for path in checkpoint.checkpoints(place)] == ["step-2"]
    (place / "checkpoints/step-9").mkdir()  # without its parts it is no checkpoint
    draft = place / "checkpoints/.step-3.unfinished"
    draft.mkdir()
    (draft / "half").write_text("written")
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')  # the run was killed past its checkpoint
    (_summary, records, _), *_ = run_ranks(run, 1, str(place), {"train.steps": 3, "checkpoint.every": 1})
    assert [record["step"] for record in records] == [3]
    assert not draft.exists()
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_a_checkpoint_of_other_data_is_refused(run_ranks, folder):
    run_ranks(run, 1, str(folder / "run"), {"train.steps": 1, "checkpoint.at_end": True})
    message = run_ranks(raises, 1, str(folder / "run"), {"data.max_documents": 20})[0]
    assert "step-1 was trained on other data" in message and "checkpoint.resume = 'never'" in message
    changes = {"data.max_documents": 20, "checkpoint.resume": "never"}
    (summary, records, _), *_ = run_ranks(run, 1, str(folder / "run"), changes)
    assert (summary.step, records[0]["step"]) == (3, 1)


def raises(folder, changes):
    try:
        run(folder, changes)
    except (ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (
            2,
            {"train.batch_rows": 3},
            r"batch_rows = 3 is not a multiple of dp \* train.micro_rows = 2 \* 1; set it to 4",
        ),
        (2, {"mesh.dp": 3}, r"mesh.dp=3 times mesh.cp=1 is 3 ranks, but the world size is 2"),
        (2, {"mesh.cp": 3}, r"mesh.cp=3 does not divide the world size 2"),
        (2, {"parallel.wrap": "none"}, r"parallel.wrap = 'none' on 2 ranks"),
        (1, {"train.validate_every": 1, "data.validation_rows": 0}, "data.validation_rows = 0"),
        (1, {"model.config": {}}, "exactly one of model.path and model.config"),
        (1, {"model.config": {"model_type": "lama"}}, "model_type = 'lama'"),
        (1, {"model.config": MODEL | {"vocab_size": 100}}, "the model's vocabulary is 100"),
        (1, {"model.config": {}, "model.path": "./nowhere"}, "there is no such folder"),
        (1, {"train.precision": "bf16"}, "use float32 master weights"),
        (2, {"mesh.cp": 2, "parallel.kernel": "model", "parallel.scheme": "exchange"}, "kernel='model' needs"),
        (1, {"checkpoint.resume": "must"}, "holds no complete checkpoint"),
    ],
)
def test_impossible_runs_say_so_and_write_nothing(run_ranks, folder, size, changes, message):
    for text in run_ranks(raises, size, str(folder / "run"), changes):
        assert text.startswith("ConfigError")
        assert re.search(message, text), text
    assert not (folder / "run").exists()


def test_a_step_that_is_not_finite_stops_every_rank_before_it_updates(run_ranks, folder):
    changes = {"optimizer.lr": 1e300, "train.steps": 9, "checkpoint.every": 1, "checkpoint.keep": 0}
    for text in run_ranks(raises, 2, str(folder / "run"), changes):
        assert text.startswith("FloatingPointError: step 2: ") and "nothing was updated" in text
    assert [path.name for path in checkpoint.checkpoints(folder / "run")] == ["step-1"]


def test_models_that_let_packed_documents_see_each_other(run_ranks, folder):
    """gpt-oss does not read documents from positions: packing is refused, on one rank as on two; single documents, with
    padding behind them, train alike."""
    changes = {"model.config": GPT_OSS, "model.dtype": "float32"}
    for size in (1, 2):
        text = run_ranks(raises, size, str(folder / "run"), changes | {"mesh.cp": size})[0]
        assert "GptOssForCausalLM does not read them from position_ids" in text and "data.packing" in text
    changes |= {"data.packing": "none"}
    _, truth, _ = run_ranks(run, 1, str(folder / "one"), changes)[0]
    _, records, _ = run_ranks(run, 2, str(folder / "two"), changes | {"mesh.cp": 2})[0]
    assert_same(truth, records, 1e-4)


def test_a_batch_without_targets_is_an_error(run_ranks, folder):
    (folder / "data.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}\n' * 8)
    changes = {"data.packing": "none"}
    assert "step 1: its 4 rows hold no target tokens" in run_ranks(raises, 1, str(folder / "run"), changes)[0]


def test_export_loads_bit_equal(run_ranks, folder):
    (summary, _, weights), *_ = run_ranks(run, 2, str(folder / "run"), EXPORT | {"model.dtype": "float32"})
    model = AutoModelForCausalLM.from_pretrained(summary.export)
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.architectures == ["LlamaForCausalLM"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert AutoTokenizer.from_pretrained(summary.export)("é")["input_ids"] == list("é".encode())


def test_a_run_starts_from_an_export(run_ranks, folder):
    (summary, _, _weights), *_ = run_ranks(run, 1, str(folder / "run"), EXPORT)
    changes = {"model.path": summary.export, "model.config": {}, "data.tokenizer": summary.export}
    (_, one, _), *_ = run_ranks(run, 1, str(folder / "more"), changes)
    (_, two, _), *_ = run_ranks(run, 2, str(folder / "more too"), changes)
    assert_same(two, one, 1e-12)
    assert one[0]["loss"] < 4.5


def test_what_a_run_writes(run_ranks, folder):
    pytest.importorskip("tensorboard")
    run_ranks(run, 2, str(folder / "run"), {"log.tensorboard": True, "train.validate_every": 2})
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"loss", "grad_norm", "lr", "tokens_per_second", "tokens_per_second_per_rank", "mfu", "imbalance"} < set(
        lines[0]
    )
    assert "validation_loss" in lines[1] and "validation_loss" not in lines[2]
    assert len(lines[0]["tokens_per_rank"]) == len(lines[0]["pairs_per_rank"]) == 2
    assert sum(lines[0]["tokens_per_rank"]) == lines[0]["tokens"]  # one row at a time: no padding
    assert lines[0]["peak_memory_bytes"] > 2**20
    assert json.loads((folder / "run/config.json").read_text())["train"]["steps"] == 3
    assert json.loads((folder / "run/run.json").read_text())["mesh"] == {"dp": 2, "cp": 1}
    assert list((folder / "run/tensorboard").iterdir())


def test_two_runs_are_bitwise_equal(run_ranks, folder):
    changes = EXPORT | {"model.dtype": "float32", "mesh.cp": 2, "train.deterministic": True}
    (_, one, weights), *_ = run_ranks(run, 2, str(folder / "one"), changes)
    (_, two, again), *_ = run_ranks(run, 2, str(folder / "two"), changes)
    assert one == two
    assert all(torch.equal(value, again[name]) for name, value in weights.items())


def test_work_is_counted_alike_on_one_rank_and_on_shards(run_ranks, folder):
    for size in (1, 2):
        run_ranks(run, size, str(folder / f"cp {size}"), {"mesh.cp": size, "train.steps": 2})
    lines = [(folder / f"cp {size}/metrics.jsonl").read_text().splitlines() for size in (1, 2)]
    for one, two in zip(*(map(json.loads, each) for each in lines)):
        for name in ("tokens", "flops"):
            assert one[name] == two[name]
        for name in ("tokens_per_rank", "pairs_per_rank"):
            assert len(two[name]) == 2 and sum(one[name]) == sum(two[name])
        assert min(two["bytes_per_rank"]) > 0 and 1.0 <= two["imbalance"] < 1.5


def test_learning_rate():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_ratio=0.1)
    rates = [learning_rate(step, 10, config) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5) and rates[-1] == pytest.approx(0.1)
    config.schedule = "linear"
    assert learning_rate(7, 10, config) == pytest.approx(0.55)
    config.schedule, config.warmup_steps = "constant", 0
    assert [learning_rate(step, 10, config) for step in (1, 10)] == [1.0, 1.0]
    config.schedule = "cosine"
    assert (learning_rate(1, 10, config), learning_rate(1, 1, config)) == (1.0, 1.0)


def test_visible_pairs_by_counting():
    for length in range(20):
        for window in (None, 1, 3, 19, 40):
            counted = sum(min(query + 1, window or length) for query in range(length))
            assert metrics.visible_pairs(length, window=window) == counted
        assert metrics.visible_pairs(length, chunk=4) == sum(query % 4 + 1 for query in range(length))
    layers = PretrainedConfig(sliding_window=2, layer_types=["full_attention", "sliding_attention"])
    assert metrics.layer_pairs(layers, [3, 1]) == (6 + 1) + (5 + 1)


def test_slurm_becomes_torchrun():
    environ = {
        "SLURM_STEP_NUM_TASKS": "11",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
        "SLURM_STEP_NODELIST": "gpu[03-04,9],login",
        "SLURM_JOB_ID": "40007",
    }
    _adopt_slurm(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("9", "11", "1")
    assert (environ["LOCAL_WORLD_SIZE"], environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("3", "gpu03", "20007")
    assert [_first_node(nodes) for nodes in ("a", "a,b", "n[1,3-5]-ib", "n[7]")] == ["a", "a", "n1-ib", "n7"]
    alone = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}  # a batch script, without srun
    _adopt_slurm(alone)
    assert "RANK" not in alone


def mesh_shape(dp, cp):
    mesh = init_mesh(dp, cp)
    return mesh.mesh_dim_names, tuple(mesh.shape), mesh["cp"].get_local_rank()


def test_cp_peers_are_neighbours(run_ranks):
    results = run_ranks(mesh_shape, 4, 0, 2)
    assert results == [(("dp", "cp"), (2, 2), rank % 2) for rank in range(4)]


def test_model_fields_are_checked():
    tokenizer = load_tokenizer(DataConfig())
    for fields, word in (
        ({"model_type": "lama"}, "llama"),
        ({**MODEL, "hidden_sizes": 3}, "did you mean 'hidden_size'"),
        ({**MODEL, "hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 32}, "model_type"),
    ):
        with pytest.raises(ConfigError, match=word):
            build_model(ModelConfig(config=fields), tokenizer, sequence_length=64)
