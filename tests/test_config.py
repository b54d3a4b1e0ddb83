"""Reading and checking configurations: what is accepted, and that a refusal is one line with the key and the cure."""

import dataclasses
import subprocess
import sys

import pytest

from longspan.config import Config, ConfigError, describe, from_dict, is_path, load, ranks, to_dict, validate

LLAMA = 'model.config={model_type="llama"}'


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def error(function, *args):
    with pytest.raises(ConfigError) as caught:
        function(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_a_file_it_is_the_defaults():
    assert load(None, []) == Config()


def test_file_then_overrides(tmp_path):
    path = write(
        tmp_path,
        """
        folder = "runs/x"
        [model.config]
        model_type = "llama"
        hidden_size = 64
        rope_parameters = { rope_type = "default", rope_theta = 1e4 }
        [train]
        steps = 7
        [optimizer]
        lr = 1
        """,
    )
    overrides = [
        "train.steps=9",
        "model.config.hidden_size=32",
        "model.config.rope_parameters.rope_theta=5e5",
        "model.config.new.table=[1, 2]",
        "parallel.scheme=ulysses",  # bare words need no quotes
        'data.tokenizer="bytes"',
        "train.deterministic = true",
        "mesh={dp=2, cp=4}",
        "folder=7",  # text keys take text as it stands
    ]
    config = load(path, overrides)
    assert config.train.steps == 9
    assert config.train.deterministic is True
    assert config.model.config == {
        "model_type": "llama",
        "hidden_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "new": {"table": [1, 2]},
    }
    assert (config.parallel.scheme, config.data.tokenizer, config.folder) == ("ulysses", "bytes", "7")
    assert (config.mesh.dp, config.mesh.cp, ranks(config)) == (2, 4, 8)
    assert isinstance(config.optimizer.lr, float)
    assert from_dict(to_dict(config)) == config


def test_configurations_do_not_share_tables():
    load(None, ["model.config.hidden_size=1"])
    assert Config().model.config == {}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.step=3", ["'train.step'", "'train.steps'"]),
        ("steps=3", ["'steps'", "'train.steps'"]),  # right key, no section
        ("model.lr=3", ["'model.lr'", "'optimizer.lr'"]),  # right key, wrong section
        ("xyzzy=3", ["'xyzzy'", "--help"]),
        ("mesh={cp=2, dq=1}", ["'mesh.dq'", "'mesh.dp'"]),
        ("mesh=3", ["mesh is a section", "mesh.dp="]),
        ("train.steps=3.5", ["train.steps = 3.5", "expected an integer"]),
        ("train.steps=true", ["train.steps = True", "expected an integer"]),
        ("train.steps=many", ["'many'", "expected an integer"]),
        ("train.deterministic=yes", ["'yes'", "true or false"]),
        ("train.deterministic=1", ["= 1", "true or false"]),
        ("optimizer.lr=nan", ["finite"]),
        ("model.config=[1]", ["a list", "a table"]),
        ("model.config.a.b.c=1", None),
        ("parallel.scheme=ulises", ["'ulises'", "auto, ulysses, exchange", "'ulysses'"]),
        ("folder.x=1", ["folder is a value"]),
        ("train.steps", ["key.path=value"]),
        ("=3", ["key.path=value"]),
        ("train.steps=1\nlog.progress=false", ["expected an integer"]),
    ],
)
def test_overrides_that_are_mistakes(override, parts):
    if parts is None:
        load(None, [override])
        return
    message = error(load, None, [override])
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[trian]\nsteps = 3", ["'trian'", "run.toml"]),
        ("[train]\nstep = 3", ["'train.step'", "'train.steps'", "run.toml"]),
        ("train = 3", ["train is a section", "run.toml"]),
        ("[train\nsteps = 3", ["cannot be parsed", "line 1"]),
        ("[model]\nconfig = 2020-01-01", ["a date", "a table"]),
    ],
)
def test_files_that_are_mistakes(tmp_path, text, parts):
    message = error(load, write(tmp_path, text), [])
    for part in parts:
        assert part in message


def test_missing_files_and_folders(tmp_path):
    assert "no such file" in error(load, str(tmp_path / "none.toml"), [])
    assert "folder" in error(load, str(tmp_path), [])


VALID = [
    ([LLAMA], 1),
    ([LLAMA, "mesh.cp=2"], 2),
    ([LLAMA, "mesh.cp=2", "train.batch_rows=4", "train.micro_rows=2"], 4),
    ([LLAMA, "mesh.dp=2", "mesh.cp=2", "train.batch_rows=2"], 4),
    ([LLAMA, "mesh.cp=4", "parallel.stages=3"], 4),
    ([LLAMA, "mesh.cp=1", "parallel.stages=1"], 1),  # inert on one rank
    ([LLAMA, "parallel.kernel=model", "parallel.scheme=ulysses"], None),
    (["model.path=someone/some-model", "data.source=someone/some-data"], 1),
]


@pytest.mark.parametrize(("overrides", "size"), VALID)
def test_valid(overrides, size):
    validate(load(None, overrides), size)


@pytest.mark.parametrize(
    ("overrides", "size", "parts"),
    [
        ([], 1, ["no model", "model.path", "model.config"]),
        ([LLAMA, "model.path=x"], 1, ["both"]),
        (["model.config.hidden_size=3"], 1, ["model_type"]),
        (["model.path=./no/such"], 1, ["model.path", "./no/such"]),
        ([LLAMA, "mesh.cp=2"], 1, ["mesh.cp = 2", "1 rank;", "--nproc 2"]),
        ([LLAMA, "mesh.cp=2"], 3, ["mesh.cp = 2", "3 ranks"]),
        ([LLAMA, "mesh.cp=2", "mesh.dp=2", "train.batch_rows=2"], 2, ["2 * 2", "2 ranks", "--nproc 4"]),
        ([LLAMA, "mesh.cp=0"], 1, ["mesh.cp = 0", "at least 1"]),
        ([LLAMA, "train.batch_rows=3"], 2, ["batch_rows = 3", "2 * 1"]),
        ([LLAMA, "train.batch_rows=4", "train.micro_rows=3"], 1, ["batch_rows = 4", "1 * 3", "use 3"]),
        ([LLAMA, "mesh.cp=2", "parallel.stages=2"], 2, ["stages = 2", "cp - 1 = 1"]),
        ([LLAMA, "mesh.cp=2", "parallel.stages=1", "parallel.scheme=ulysses"], 2, ["stages", "exchange"]),
        ([LLAMA, "parallel.kernel=model"], 1, ["kernel", "ulysses"]),
        ([LLAMA, "train.steps=0"], 1, ["train.steps = 0", "at least 1"]),
        ([LLAMA, "optimizer.beta2=1.0"], 1, ["beta2", "less than 1"]),
        ([LLAMA, "optimizer.warmup_steps=31"], 1, ["31", "30"]),
        ([LLAMA, "model.dtype=float64", "train.precision=bf16"], 1, ["float64", "bf16"]),
        ([LLAMA, "data.source=no-such.txt"], 1, ["data.source", "no-such.txt"]),
        ([LLAMA, "data.source=/no/such"], 1, ["data.source", "/no/such"]),
        ([LLAMA, "data.chat_template=no.jinja"], 1, ["chat_template", "no.jinja"]),
        ([LLAMA, "train.validate_every=5"], 1, ["validate_every", "validation_rows"]),
        ([LLAMA, "checkpoint.keep=0"], 1, ["checkpoint.keep"]),
        ([LLAMA, "checkpoint.resume=must", "folder=no/such"], 1, ["resume", "no/such"]),
        ([LLAMA, 'folder=""'], 1, ["folder"]),
    ],
)
def test_refused(overrides, size, parts):
    message = error(validate, load(None, overrides), size)
    for part in parts:
        assert part in message


def test_what_counts_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    paths = ["book.txt", "./book", "/tmp/book", "~/book", "a/b/c", "data/book", "data", "a/book.jsonl", "b/"]
    assert [p for p in paths if not is_path(p)] == []
    assert [p for p in ["stdlib", "wikitext", "someone/some-data", "someone/data-1.5b"] if is_path(p)] == []


def test_every_key_has_a_text_in_the_help():
    text = describe()
    for section in dataclasses.fields(Config):
        value = getattr(Config(), section.name)
        names = (
            [f"{section.name}.{f.name}" for f in dataclasses.fields(value)]
            if dataclasses.is_dataclass(value)
            else [section.name]
        )
        for name in names:
            assert f"\n  {name} = " in text
    assert "ulysses" in text and "0.0003" in text


def test_needs_no_torch():
    code = "import sys, longspan.config, longspan.cli; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
