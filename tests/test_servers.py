"""vLLM and SGLang over HTTP, against a process that speaks their protocols: what works, and each way to fail."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.engine.checkpoint import write_weights
from longspan.rl.own import OwnGenerator
from longspan.rl.probe import probe
from longspan.rl.rollout import Sampling
from longspan.rl.servers import ServerGenerator, post
from tiny import batch, build

KINDS = ("vllm", "sglang")
SAMPLING = Sampling(temperature=0.7, max_new_tokens=6, stop=(5, 6, 7))
PROMPTS = [row[:length].tolist() for row, length in zip(batch(8, 12), (12, 12, 5, 7, 5, 1, 9, 12))]
SEEDS = list(range(8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose generation config would spoil what is drawn, were it asked."""
    folder = tmp_path_factory.mktemp("model")
    model = build("qwen3")
    write_weights(folder / "model", model.state_dict(), model.config)
    (folder / "model" / "generation_config.json").write_text('{"top_p": 0.2, "temperature": 3.0, "top_k": 2}')
    return folder / "model"


@pytest.fixture(scope="module")
def servers(folder):
    """The url of a server of each kind."""
    processes, urls = [], {}
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    try:
        for kind in KINDS:
            port = folder.parent / f"{kind}.port"
            script = str(Path(__file__).with_name("fake_server.py"))
            command = [sys.executable, script, "--kind", kind, "--model", str(folder), "--port-file", str(port)]
            processes.append((kind, port, subprocess.Popen(command, env=environment)))
        deadline = time.monotonic() + 180
        for kind, port, process in processes:
            while not port.exists():
                assert process.poll() is None and time.monotonic() < deadline, f"the {kind} server did not start"
                time.sleep(0.05)
            urls[kind] = f"http://127.0.0.1:{port.read_text()}"
        yield urls
    finally:
        for _, _, process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def server(servers, tmp_path):
    """A function (kind, how=misbehaviour, **options) -> generator; servers behave again, by their first weights."""
    made = []

    def make(kind, how="", **options):
        generator = ServerGenerator(
            kind,
            [servers[kind]],
            config=build("qwen3").config,
            folder=tmp_path / kind,
            **{"rank": 0, "seconds": 60.0, "update_seconds": 60.0, **options},
        )
        made.append(generator)
        misbehave(generator, how)
        return generator

    yield make
    for generator in made:
        misbehave(generator, "")
        generator.seconds = generator.update_seconds = 30
        generator.rank = 0
        generator.update_weights(build("qwen3").state_dict(), 0)


def misbehave(generator, how):
    assert post(generator.urls[0], "/misbehave", {"how": how}, 5, {})[0] == 200


def calls(generator):
    return json.loads(post(generator.urls[0], "/calls", None, 5, {})[2])


def trained(model):
    def score(sequences, temperature):
        with torch.no_grad():
            return longspan.score(model, sequences, temperature=temperature).logprobs

    return score


def changed():
    """The model after a step of training."""
    model = build("qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def failure(call):
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_completions_are_those_of_the_model_before_and_after_an_update(kind, server):
    generator = server(kind)
    for version, model in enumerate((build("qwen3"), changed())):
        if version:
            generator.update_weights(model.state_dict(), version)
        found = generator.generate(PROMPTS, SAMPLING, SEEDS)
        truth = OwnGenerator(model, version=version).generate(PROMPTS, SAMPLING, SEEDS)
        assert [each.tokens for each in found] == [each.tokens for each in truth]
        assert [each.finish for each in found] == [each.finish for each in truth]
        assert {each.version for each in found} == {version}
        assert probe(generator, trained(model), PROMPTS, SAMPLING) <= 1e-5
    greedy = Sampling(temperature=0.0, max_new_tokens=4)
    assert probe(generator, trained(model), PROMPTS, greedy) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_pauses_loads_flushes_and_goes_on(kind, server):
    generator = server(kind)
    before = len(calls(generator))
    generator.update_weights(changed().state_dict(), 12)
    order = {
        "vllm": ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"],
        "sglang": ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"],
    }
    assert calls(generator)[before:] == order[kind]
    for version in (13, 14):
        generator.update_weights(changed().state_dict(), version)
    assert sorted(each.name for each in generator.folder.iterdir()) == ["version-00000013", "version-00000014"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how,said",
    [
        ("error", "answered 500 Internal Server Error: .*CUDA out of memory"),
        ("words", "has not the fields that were asked for.*a proxy's greeting"),
        ("cut", "6 log-probabilities came back for 5 tokens|name different tokens"),
        ("long", "at most were asked for"),
        ("missing", "the log-probability of token . is None"),
        ("unlike", "has not the fields that were asked for"),
        ("retokenize", "ran another prompt than the"),
        ("abort", "ended by 'abort'"),
        ("short", "longer than the server's context"),
        ("eos", "which is no stop token"),
    ],
)
def test_broken_answers_raise(kind, how, said, server):
    generator = server(kind, how)
    sampling = Sampling(temperature=0.7, max_new_tokens=6)  # without an end, all answers are of the full length
    message = failure(lambda: generator.generate(PROMPTS, sampling, SEEDS))
    assert re.search(said, message), message
    assert f"{generator.api.name} server {generator.urls[0]}{generator.api.path}, prompt 0" in message


@pytest.mark.parametrize("how", ("slow", "trickle"))
def test_every_call_is_bounded_in_time(how, server):
    generator = server("vllm", how, seconds=0.5, update_seconds=0.5)
    start = time.monotonic()
    assert "no full answer within 0.5 s" in failure(lambda: generator.generate(PROMPTS, SAMPLING, SEEDS))
    assert "no full answer within 0.5 s" in failure(lambda: generator.update_weights(build("qwen3").state_dict(), 1))
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    "kind,how",
    [
        ("vllm", "stale"),
        ("sglang", "stale"),
        ("vllm", "sticky"),  # SGLang's update flushes as well: one of two that fails does not show
        ("vllm", "top_p"),
        ("sglang", "top_p"),
        ("vllm", "raw"),
    ],
)
def test_the_probe_sees_what_answers_do_not_show(kind, how, server):
    generator = server(kind)
    probe(generator, trained(build("qwen3")), PROMPTS, SAMPLING)
    misbehave(generator, how)
    generator.update_weights(changed().state_dict(), 1)
    message = failure(lambda: probe(generator, trained(changed()), PROMPTS, SAMPLING))
    assert "does not draw from the trained policy" in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_flush_and_a_wrong_version_raise(kind, server):
    generator = server(kind, "refuse")
    message = failure(lambda: generator.update_weights(changed().state_dict(), 3))
    assert "weights of version 3" in message and ("did not do it" in message or "answered 400" in message)
    if kind == "sglang":
        misbehave(generator, "version")
        generator.update_weights(changed().state_dict(), 4)
        assert "was told 4" in failure(lambda: generator.generate(PROMPTS, SAMPLING, SEEDS))


def test_servers_that_are_not_there_and_endpoints_that_are_not(servers, tmp_path):
    options = {"config": build("qwen3").config, "folder": tmp_path, "rank": 0, "seconds": 5}
    nobody = ServerGenerator("vllm", ["http://127.0.0.1:9"], **options)
    assert "is it running" in failure(lambda: nobody.generate(PROMPTS, SAMPLING, SEEDS))
    other = ServerGenerator("vllm", [servers["sglang"]], **options)
    assert "VLLM_SERVER_DEV_MODE=1" in failure(lambda: other.update_weights(build("qwen3").state_dict(), 1))


def test_several_servers_share_the_requests(server, servers):
    generator = server("vllm")
    generator.urls = [servers["vllm"]] * 2
    before = len(calls(generator))
    generator.generate(PROMPTS, SAMPLING, SEEDS)
    assert len(calls(generator)) - before == len(PROMPTS)


def _update_on_every_rank(url, folder, config, how):
    rank = dist.get_rank()
    generator = ServerGenerator("vllm", [url], config=config, folder=folder)
    if rank == 0:
        misbehave(generator, how)
    try:
        generator.update_weights(changed().state_dict(), 5)
        return generator.version
    except RuntimeError as error:
        return str(error)


def test_what_happens_on_rank_0_happens_on_every_rank(run_ranks, server, tmp_path):
    generator = server("vllm")
    config = build("qwen3").config
    arguments = (generator.urls[0], str(tmp_path / "ranks"), config)
    before = len(calls(generator))
    assert run_ranks(_update_on_every_rank, 2, *arguments, "") == [5, 5]
    assert len(calls(generator)) - before == 4  # one rank talks
    told = run_ranks(_update_on_every_rank, 2, *arguments, "error")
    assert told[0] == told[1] and "CUDA out of memory" in told[0]


@pytest.mark.parametrize(
    "change,said",
    [
        ({"kind": "tgi"}, "servers are of kind vllm or sglang"),
        ({"urls": "http://here:1"}, "urls are a list"),
        ({"urls": ["here:1"]}, "http://host:port"),
        ({"seconds": 0}, "above 0"),
    ],
)
def test_what_cannot_be_is_refused(change, said, tmp_path):
    options = {"kind": "vllm", "urls": ["http://127.0.0.1:1"], "config": build("qwen3").config, "folder": tmp_path}
    options |= change
    with pytest.raises(ValueError, match=said):
        ServerGenerator(options.pop("kind"), options.pop("urls"), **options)


# -- a whole run ---------------------------------------------------------------------------------------------------


def a_run(kind, url, model, folder):
    from longspan.config import RLConfig, load
    from longspan.rl import loop

    tasks = Path(__file__).with_name("rl_tasks.py")
    changes = {
        "folder": folder,
        "model.path": model,
        "mesh.cp": 2,
        "data.source": f"{tasks}:id_rows",
        "reward.functions": [f"{tasks}:even"],
        "rollout.generator": kind,
        "rollout.urls": [url],
        "rollout.prompts": 4,
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 4,
        "rollout.off_policy_steps": 1,
        "rollout.probe_tolerance": 1e-5,
        "optimizer.lr": 1e-2,
        "train.steps": 3,
        "train.threads": 1,
        "checkpoint.at_end": False,
    }
    records = []
    config = load(None, [f"{name}={json.dumps(value)}" for name, value in changes.items()], kind=RLConfig)
    loop.train(config, progress=False, on_step=records.append)
    return records


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_draws_from_a_server_by_its_latest_weights(run_ranks, server, folder, tmp_path, kind):
    url = server(kind).urls[0]
    first, second = run_ranks(a_run, 2, kind, url, str(folder), str(tmp_path / "run"))
    for records in (first, second):
        assert [record["staleness"] for record in records] == [0, 1, 1]
        assert all(record["updates"] == 1 and record["probe_difference"] < 1e-5 for record in records)
        assert records[0]["mismatch_difference"] < 1e-5 < records[1]["mismatch_difference"]
    assert [record["reward"] for record in first] == [record["reward"] for record in second]
    assert sorted(path.name for path in (tmp_path / "run" / "weights").glob("version-*")) == [
        "version-00000002",
        "version-00000003",
    ]
