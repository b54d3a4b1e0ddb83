"""What the README shows is what runs."""

import re
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parent.parent


def body(path):
    found = runpy.run_path(path)
    assert not dist.is_initialized() or dist.get_world_size() == 2
    return float(found["loss"].detach()), found["step"]


def test_the_library_example_runs_and_agrees(run_ranks):
    results = run_ranks(body, 2, str(ROOT / "examples" / "library.py"))
    assert results[0] == results[1] and results[0][1] == 4
    assert 5.0 < results[0][0] < 6.0


def body_own_models(path):
    return runpy.run_path(path)["differences"]


def test_the_example_of_own_models_equals_one_rank(run_ranks):
    for differences in run_ranks(body_own_models, 2, str(ROOT / "examples" / "own_models.py")):
        assert set(differences) == {"sdpa", "flex", "core"} and max(differences.values()) <= 1e-10


def body_engine(path):
    return runpy.run_path(path)["losses"]


def test_the_example_of_a_loop_with_the_engine_learns(run_ranks):
    first, second = run_ranks(body_engine, 2, str(ROOT / "examples" / "engine.py"))
    assert first == second and first[-1] < first[0] - 0.1


def test_the_readme_shows_that_example():
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    assert shown == (ROOT / "examples" / "library.py").read_text()
    code = [line for line in shown.splitlines() if line and not line.startswith("#")]
    assert len(code) <= 18


def test_public_names_are_exact_and_lazy():
    import subprocess

    import longspan

    assert sorted(longspan.__all__) == longspan.__all__
    for name in longspan.__all__:
        assert getattr(longspan, name) is not None
    probe = "import sys, longspan, longspan.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
