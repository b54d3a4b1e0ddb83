"""Two training curves side by side, and one verdict: are they the same run?

A side is a configuration (run here, in a process of its own), a finished run folder, or a reference file that
`--export` wrote. Both runs get the same seeds, so the same initial weights and data, and no
nondeterministic kernels.

Three questions, because none of them alone is enough:

- is every step within its bound, for the loss and for the gradient norm? (|b - a| <= atol + rtol |a|);
- is the *mean* of the difference within a much tighter bound? A wrong scale or a lost token shifts every step
  by a little, always the same way. Rounding errors change sign and average out, so
  drift = |mean(b - a)| / mean|a| sees such a bias where the largest difference does not;
- is every number finite? NaN equals nothing, not even NaN.

The gradient norm is compared beside the loss because a wrong gradient needs many steps to show in the loss.
Pure functions on curves first, then files, running, printing, plotting.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan import config as configuration
from longspan.config import ConfigError

# ---- curves


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Loss and gradient norm after each step, at full precision."""

    name: str
    steps: list[int]
    loss: list[float]
    grad_norm: list[float]
    tokens_per_second: float | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds relative to A; `exact` demands equal bits and ignores the rest."""

    loss_rtol: float
    grad_norm_rtol: float
    loss_drift: float
    grad_norm_drift: float
    atol: float = 0.0
    exact: bool = False


# One table. A gradient norm sums many rounded squares: a wider bound than the loss.
TOLERANCES = {
    "float64": Tolerance(loss_rtol=1e-9, grad_norm_rtol=1e-9, loss_drift=1e-9, grad_norm_drift=1e-9),
    "float32": Tolerance(loss_rtol=1e-4, grad_norm_rtol=1e-3, loss_drift=1e-5, grad_norm_drift=1e-4),
    "bfloat16": Tolerance(loss_rtol=1e-2, grad_norm_rtol=5e-2, loss_drift=1e-3, grad_norm_drift=1e-2),
}
EXACT = Tolerance(loss_rtol=0, grad_norm_rtol=0, loss_drift=0, grad_norm_drift=0, exact=True)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """B against A in one quantity. `first_failure` is an index into the steps."""

    max_abs: float
    max_rel: float
    worst: int  # index of the step with the largest relative difference
    drift: float
    first_failure: int | None
    drift_failed: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    a: Curve
    b: Curve
    tolerance: Tolerance
    loss: Difference
    grad_norm: Difference
    failure: str  # "" when equal

    @property
    def equal(self) -> bool:
        return not self.failure


def default_tolerance(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, Tolerance]:
    """The bound of the less precise of two runs, by their configurations."""
    order = list(TOLERANCES)
    name = max(_precision(a), _precision(b), key=order.index)
    return name, TOLERANCES[name]


def _precision(config: Mapping[str, Any]) -> str:
    if config.get("train", {}).get("precision") == "bf16":
        return "bfloat16"
    return config.get("model", {}).get("dtype", "float32")


def relative(a: float, b: float) -> float:
    """|b - a| / |a|; 0 for equal numbers, infinite where only A is zero."""
    if a == b:
        return 0.0
    return abs(b - a) / abs(a) if a else math.inf


def drift(a: Sequence[float], b: Sequence[float]) -> float:
    """|mean(b - a)| / mean|a|. `fsum`, so that the sum itself adds no rounding."""
    if not all(map(math.isfinite, (*a, *b))):
        return math.nan
    bias = abs(math.fsum(y - x for x, y in zip(a, b, strict=True)))
    scale = math.fsum(abs(x) for x in a)
    if bias == 0:
        return 0.0
    return bias / scale if scale else math.inf


def difference(
    a: Sequence[float], b: Sequence[float], *, rtol: float, atol: float, drift_bound: float, exact: bool
) -> Difference:
    def fails(x: float, y: float) -> bool:
        if not (math.isfinite(x) and math.isfinite(y)):
            return True
        if exact:
            return x.hex() != y.hex()  # tells 0.0 from -0.0
        return abs(y - x) > atol + rtol * abs(x)

    relatives = [relative(x, y) for x, y in zip(a, b, strict=True)]
    bad = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if fails(x, y)]
    bias = drift(a, b)
    # atol also excuses drift: where A is about zero, nothing relative can be asked.
    excused = not math.isnan(bias) and abs(math.fsum(b) - math.fsum(a)) <= atol * len(a)
    # NaN compares false with everything: put it last, so that `max` finds it.
    worst = max(range(len(a)), key=lambda i: math.inf if math.isnan(relatives[i]) else relatives[i])
    return Difference(
        max_abs=_max(abs(y - x) for x, y in zip(a, b, strict=True)),
        max_rel=relatives[worst],
        worst=worst,
        drift=bias,
        first_failure=bad[0] if bad else None,
        drift_failed=not exact and not excused and not bias <= drift_bound,
    )


def _max(values: Any) -> float:
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def check_steps(a: Curve, b: Curve) -> None:
    """Curves over different steps cannot be compared; say which steps are missing where."""
    for has, lacks in ((a, b), (b, a)):
        missing = sorted(set(has.steps) - set(lacks.steps))
        if missing:
            raise ConfigError(f"{lacks.name} lacks steps {_ranges(missing)} of {has.name}; compare equal steps")
    if not a.steps:
        raise ConfigError(f"{a.name} and {b.name} have no steps to compare")


def _ranges(steps: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more ranges" if len(shown) > 5 else "")


def compare(a: Curve, b: Curve, tolerance: Tolerance) -> Comparison:
    check_steps(a, b)
    bounds = {
        "loss": (tolerance.loss_rtol, tolerance.loss_drift),
        "grad_norm": (tolerance.grad_norm_rtol, tolerance.grad_norm_drift),
    }
    differences = {
        name: difference(
            getattr(a, name),
            getattr(b, name),
            rtol=rtol,
            atol=tolerance.atol,
            drift_bound=drift_bound,
            exact=tolerance.exact,
        )
        for name, (rtol, drift_bound) in bounds.items()
    }
    return Comparison(
        a=a, b=b, tolerance=tolerance, **differences, failure=_failure(a, b, tolerance, differences, bounds)
    )


def _failure(
    a: Curve,
    b: Curve,
    tolerance: Tolerance,
    differences: Mapping[str, Difference],
    bounds: Mapping[str, tuple[float, float]],
) -> str:
    """The first step that fails and by how much; else the drift; else nothing."""
    failing = [(d.first_failure, name) for name, d in differences.items() if d.first_failure is not None]
    if failing:
        index, name = min(failing, key=lambda pair: pair[0])
        x, y = getattr(a, name)[index], getattr(b, name)[index]
        start = f"step {a.steps[index]} is the first to fail: {_NAMES[name]} {x!r} and {y!r}"
        if not (math.isfinite(x) and math.isfinite(y)):
            return f"{start}, not finite"
        allowed = "equal bits" if tolerance.exact else f"{tolerance.atol + bounds[name][0] * abs(x):.3g}"
        return f"{start} differ by {abs(y - x):.3g} ({relative(x, y):.3g} of A); allowed: {allowed}"
    for name, d in differences.items():
        if d.drift_failed:
            return (
                f"mean drift of the {_NAMES[name]} is {d.drift:.3g}; allowed: {bounds[name][1]:.3g}. "
                "Each step alone is within its bound, but all differ the same way"
            )
    return ""


_NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


def shown_steps(comparison: Comparison, most: int = 40) -> list[int]:
    """Indices worth printing: all of a short run; of a long one its ends and its worst steps."""
    count = len(comparison.a.steps)
    if count <= most:
        return list(range(count))
    picked = {*range(5), *range(count - 5, count)}
    for name in ("loss", "grad_norm"):
        d: Difference = getattr(comparison, name)
        pairs = list(zip(getattr(comparison.a, name), getattr(comparison.b, name)))
        picked.update(sorted(range(count), key=lambda i: -_rank(relative(*pairs[i])))[:5])
        if d.first_failure is not None:
            picked.add(d.first_failure)
    return sorted(picked)


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What the two runs were told differently, where both are known: "mesh.cp: 1, 2"."""
    flat_a, flat_b = _flat(a), _flat(b)
    if not flat_a or not flat_b:
        return []
    # Where results go, and what is shown or kept, says nothing about them.
    keys = [k for k in {**flat_a, **flat_b} if k.partition(".")[0] not in ("folder", "checkpoint", "log")]
    missing = "(none)"
    return [
        f"{k}: {flat_a.get(k, missing)}, {flat_b.get(k, missing)}"
        for k in keys
        if flat_a.get(k, missing) != flat_b.get(k, missing)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


# ---- reading and writing curves


def read_run(folder: Path) -> Curve:
    """The curve in `<folder>/metrics.jsonl`. A resumed run repeats steps: the last one counts."""
    path = folder / "metrics.jsonl"
    rows: dict[int, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                break  # a run that was killed while it wrote
            raise ConfigError(f"{path}, line {number} is not JSON: {line[:60]!r}") from None
        if isinstance(row, dict) and {"step", "loss", "grad_norm"} <= row.keys():  # not validation and the like
            rows[row["step"]] = row
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    ordered = [rows[step] for step in sorted(rows)]
    return Curve(
        name=str(folder),
        steps=[row["step"] for row in ordered],
        loss=[float(row["loss"]) for row in ordered],
        grad_norm=[float(row["grad_norm"]) for row in ordered],
        tokens_per_second=speed(ordered),
        config=config,
    )


def speed(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens per second over a run without its first step, which also warms up."""
    rows = [row for row in rows if row.get("tokens_per_second")]
    rows = rows[1:] or rows
    # Steps weigh by their duration: the harmonic mean of equal amounts of tokens.
    return len(rows) / math.fsum(1 / row["tokens_per_second"] for row in rows) if rows else None


def read_reference(path: Path) -> Curve:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Curve(
            name=str(path),
            steps=values["steps"],
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            tokens_per_second=values.get("tokens_per_second"),
            config=values.get("config", {}),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no reference written by --export: {error!r}") from None


def write_reference(curve: Curve, path: Path) -> None:
    """At full precision: JSON prints floats so that reading them gives the same bits."""
    config = json.dumps(curve.config, sort_keys=True)
    values = {
        "steps": curve.steps,
        "loss": curve.loss,
        "grad_norm": curve.grad_norm,
        "tokens_per_second": curve.tokens_per_second,
        "config": curve.config,
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "versions": {name: _version(name) for name in ("longspan", "torch", "transformers")},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def first_steps(curve: Curve, most: int) -> Curve:
    keep = [i for i, step in enumerate(curve.steps) if step <= most]
    return dataclasses.replace(
        curve,
        steps=[curve.steps[i] for i in keep],
        loss=[curve.loss[i] for i in keep],
        grad_norm=[curve.grad_norm[i] for i in keep],
    )


# ---- sides: what A and B can be


@dataclass(frozen=True, kw_only=True)
class Side:
    """A run to start (`run`), or one that is already there (`curve`)."""

    label: str  # "A" or "B"
    source: str
    curve: Curve | None = None
    arguments: tuple[str, ...] = ()  # for `longspan train`
    config: configuration.Config | None = None
    nproc: int = 1

    @property
    def folder(self) -> Path:
        assert self.config is not None  # an invariant of this file: only runs have folders to write
        return Path(self.config.folder)


def open_side(
    label: str, source: str, overrides: Sequence[str], *, out: Path, nproc: int | None, steps: int | None
) -> Side:
    """Read what exists; check what is to run. Nothing is started or written here."""
    path = Path(source)
    if path.is_dir():
        if not (path / "metrics.jsonl").is_file():
            raise ConfigError(f"{label}: {source} is not a run folder, it has no metrics.jsonl")
        curve = read_run(path)
    elif path.suffix == ".json" and path.name != "config.json":
        if not path.is_file():
            raise ConfigError(f"{label}: no such file: {source}")
        curve = read_reference(path)
    else:
        return _open_run(label, source, overrides, out=out, nproc=nproc, steps=steps)
    if nproc is not None:
        raise ConfigError(f"--{label.lower()}-nproc {nproc}, but {source} is finished and will not be run")
    return Side(label=label, source=source, curve=first_steps(curve, steps) if steps else curve)


def _open_run(
    label: str, source: str, overrides: Sequence[str], *, out: Path, nproc: int | None, steps: int | None
) -> Side:
    ours = [
        "train.deterministic=true",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        'checkpoint.resume="never"',
        "checkpoint.export=false",
        f"folder={json.dumps(str(out / label.lower()))}",
    ]
    if steps:
        ours.append(f"train.steps={steps}")
    config = configuration.load(source, [*overrides, *ours])
    nproc = configuration.ranks(config) if nproc is None else nproc
    configuration.validate(config, nproc)
    arguments = ("train", source, *overrides, *ours, "--nproc", str(nproc))
    return Side(label=label, source=source, arguments=arguments, config=config, nproc=nproc)


def check_schedule(sides: Sequence[Side]) -> None:
    """A fresh run of fewer steps than a stored one was planned for has other learning rates."""
    stored = [side.curve.config for side in sides if side.curve is not None]
    for side in sides:
        for config in stored if side.config else []:
            train, schedule = config.get("train", {}), config.get("optimizer", {}).get("schedule")
            if side.config and train.get("steps", side.config.train.steps) != side.config.train.steps:
                if schedule == side.config.optimizer.schedule == "constant":
                    continue
                raise ConfigError(
                    f"{side.label} would run {side.config.train.steps} steps beside a stored run planned for "
                    f"{train['steps']}: their {schedule} schedules give different learning rates; "
                    f"use train.steps={train['steps']}"
                )


def run(side: Side) -> Curve:
    """Train in a process of its own and read the curve it leaves."""
    (side.folder / "metrics.jsonl").unlink(missing_ok=True)
    print(f"running {side.label}: {side.source} on {side.nproc} rank{'s' * (side.nproc != 1)}", flush=True)
    # A SIGTERM to the comparison must not leave the run behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen([sys.executable, "-P", "-m", "longspan", *side.arguments])
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == 2:
        raise ConfigError(f"{side.label} could not start, see above")
    if code:
        raise RunFailed(f"{side.label} failed with exit code {code}, see above; its folder is {side.folder}")
    return read_run(side.folder)


class RunFailed(RuntimeError):
    """One of the two runs ended with an error, so there is nothing to compare."""


# ---- showing


def print_table(comparison: Comparison) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    a, b = comparison.a, comparison.b
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("step", "loss A", "loss B", "B - A", "grad norm A", "grad norm B", "B - A"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = -1
    for i in shown_steps(comparison):
        if i != before + 1:
            table.add_row("...", *[""] * 6)
        before = i
        table.add_row(
            str(a.steps[i]),
            f"{a.loss[i]:.8f}",
            f"{b.loss[i]:.8f}",
            f"{b.loss[i] - a.loss[i]:+.2e}",
            f"{a.grad_norm[i]:.6f}",
            f"{b.grad_norm[i]:.6f}",
            f"{b.grad_norm[i] - a.grad_norm[i]:+.2e}",
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=110)  # a log has no width of its own
    console.print(table)


def summary_lines(comparison: Comparison, notes: Sequence[str]) -> list[str]:
    a, b, tolerance = comparison.a, comparison.b, comparison.tolerance
    lines = [f"A  {a.name}{speed_text(a)}", f"B  {b.name}{speed_text(b)}", *notes]
    for name, rtol, bound in (
        ("loss", tolerance.loss_rtol, tolerance.loss_drift),
        ("grad_norm", tolerance.grad_norm_rtol, tolerance.grad_norm_drift),
    ):
        d: Difference = getattr(comparison, name)
        allowed = ("equal bits", "") if tolerance.exact else (f"allowed {rtol:.1e}", f" (allowed {bound:.1e})")
        lines.append(
            f"{_NAMES[name]}: largest difference {d.max_abs:.3e}, relative {d.max_rel:.3e} at step "
            f"{a.steps[d.worst]} ({allowed[0]}); mean drift {d.drift:.3e}{allowed[1]}"
        )
    count = len(a.steps)
    equal = f"EQUAL over {count} step{'s' * (count != 1)}"
    return [*lines, f"verdict: {equal if comparison.equal else f'DIFFERENT: {comparison.failure}'}"]


def speed_text(curve: Curve) -> str:
    return f", {curve.tokens_per_second:,.0f} tokens/s" if curve.tokens_per_second else ""


def write_json(comparison: Comparison, differences: Sequence[str], path: Path) -> None:
    values = {
        "equal": comparison.equal,
        "failure": comparison.failure,
        "tolerance": dataclasses.asdict(comparison.tolerance),
        "loss": dataclasses.asdict(comparison.loss),
        "grad_norm": dataclasses.asdict(comparison.grad_norm),
        "config_differences": list(differences),
        "a": dataclasses.asdict(comparison.a),
        "b": dataclasses.asdict(comparison.b),
        "versions": {name: _version(name) for name in ("longspan", "torch", "transformers")},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(values), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(comparison: Comparison, path: Path) -> None:
    """Both losses over each other; below, how far apart loss and gradient norm are."""
    import matplotlib

    matplotlib.use("Agg")  # files only: no display is needed, nor opened
    import matplotlib.pyplot as plt

    blue, orange, green = "#0072B2", "#D55E00", "#009E73"  # told apart by colour-blind readers too
    a, b, tolerance = comparison.a, comparison.b, comparison.tolerance
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2), layout="constrained")
    top.plot(a.steps, a.loss, color=blue, linewidth=3.5, alpha=0.55, label=f"A: {a.name}")
    top.plot(b.steps, b.loss, color=orange, linewidth=1.4, linestyle="--", label=f"B: {b.name}")
    top.set_ylabel("loss")
    top.legend(frameon=False)
    top.set_title("EQUAL" if comparison.equal else "DIFFERENT", loc="left", fontweight="bold")

    any_difference = False
    for name, colour, marker in (("loss", orange, "o"), ("grad_norm", green, "s")):
        rel = [relative(x, y) for x, y in zip(getattr(a, name), getattr(b, name))]
        points = [(s, r) for s, r in zip(a.steps, rel) if math.isfinite(r) and r > 0]  # a log axis has no zero
        equal = sum(r == 0 for r in rel)
        label = _NAMES[name] + (f" ({equal} of {len(rel)} steps equal in every bit)" if equal else "")
        xs, ys = [s for s, _ in points], [r for _, r in points]
        bottom.plot(xs, ys, color=colour, marker=marker, ms=3.5, lw=1, label=label)
        any_difference |= bool(points)
    bottom.set_xlabel("step")
    bottom.set_ylabel("|B - A| / |A|")
    if any_difference:
        bottom.set_yscale("log")
        if not tolerance.exact:
            bottom.axhline(tolerance.loss_rtol, color=orange, ls=":", lw=1, label="allowed, loss")
            bottom.axhline(tolerance.grad_norm_rtol, color=green, ls=":", lw=1, label="allowed, gradient norm")
    else:
        bottom.set_yticks([])
        bottom.text(0.5, 0.4, "no step differs", ha="center", transform=bottom.transAxes)
    bottom.legend(frameon=False, fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(comparison: Comparison, out: Path, precision: str) -> int:
    """Print, write, and the exit code."""
    differences = config_differences(comparison.a.config, comparison.b.config)
    notes = [f"configured differently (A, B): {'; '.join(differences)}"] if differences else []
    notes.append("bounds: equal bits" if comparison.tolerance.exact else f"bounds: {precision}")
    print_table(comparison)
    print()
    for line in summary_lines(comparison, notes):
        print(line)
    write_json(comparison, differences, out / "compare.json")
    if importlib.util.find_spec("matplotlib"):
        plot(comparison, out / "compare.png")
        print(f"plot: {out / 'compare.png'}")
    else:
        print("no plot: matplotlib is not installed (pip install 'longspan[plot]')")
    print(f"numbers: {out / 'compare.json'}")
    return 0 if comparison.equal else 1


# ---- the program


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `longspan compare` was asked."""

    a: str
    b: str | None
    a_overrides: tuple[str, ...] = ()
    b_overrides: tuple[str, ...] = ()
    a_nproc: int | None = None
    b_nproc: int | None = None
    steps: int | None = None
    exact: bool = False
    rtol: float | None = None
    atol: float | None = None
    drift: float | None = None
    out: str = "runs/compare"
    export: str | None = None


def main(request: Request) -> int:
    if "RANK" in os.environ:
        raise ConfigError("compare starts its own ranks; run it without torchrun")
    out = Path(request.out)
    if out.is_file():
        raise ConfigError(f"--out {out} is a file; name a folder")
    a = open_side("A", request.a, request.a_overrides, out=out, nproc=request.a_nproc, steps=request.steps)
    b = None
    if request.b is not None:
        b = open_side("B", request.b, request.b_overrides, out=out, nproc=request.b_nproc, steps=request.steps)
    sides = [side for side in (a, b) if side]
    check_schedule(sides)
    try:
        curves = [side.curve or run(side) for side in sides]
    except RunFailed as error:
        print(f"longspan: error: {error}", file=sys.stderr)
        return 1
    if request.export:
        write_reference(curves[0], Path(request.export))
        print(f"reference: {request.export} ({len(curves[0].steps)} steps of {curves[0].name})")
    if b is None:
        return 0
    precision, tolerance = _tolerance(request, curves)
    return report(compare(curves[0], curves[1], tolerance), out, precision)


def _tolerance(request: Request, curves: Sequence[Curve]) -> tuple[str, Tolerance]:
    if request.exact:
        return "", EXACT
    precision, tolerance = default_tolerance(curves[0].config, curves[1].config)
    changes: dict[str, Any] = {}
    if request.rtol is not None:
        changes |= {"loss_rtol": request.rtol, "grad_norm_rtol": request.rtol}
    if request.atol is not None:
        changes |= {"atol": request.atol}
    if request.drift is not None:
        changes |= {"loss_drift": request.drift, "grad_norm_drift": request.drift}
    given = ", ".join(f"--{name}" for name in ("rtol", "atol", "drift") if getattr(request, name) is not None)
    note = f"{precision} defaults{f', then {given}' if given else ''}"
    return note, dataclasses.replace(tolerance, **changes)
