"""The `longspan` command: arguments in, exit code out; the work is done elsewhere.

Exit codes: 0 done, or stopped by SIGTERM with the state saved; 1 failed, or a comparison found a difference;
2 a mistake in what the user gave, told in one line, before anything is started or written, or a model refused.

Nothing here imports torch before a run really starts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from longspan import compare, launch
from longspan.config import AnyConfig, Config, ConfigError, RLConfig, describe, load, to_dict, validate

if TYPE_CHECKING:
    from longspan.engine.train import Summary
    from longspan.rl.loop import Summary as RLSummary

_USAGE = """usage: longspan COMMAND ...

  longspan train CONFIG.toml [key=value ...] [--nproc N] [--dry-run]
  longspan rl CONFIG.toml [key=value ...] [--nproc N] [--dry-run]
  longspan compare A [B] [key=value ...] [--a key=value ...] [--b key=value ...]
  longspan check MODEL [--full --text FILE] [--sizes N ...] [--json]
  longspan sweep [TYPE ...] [--fast] [--out PAGE.md]
  longspan --version

`longspan COMMAND --help` explains each."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def entry() -> NoReturn:
    """What the `longspan` script calls."""
    code = main()
    if "RANK" in os.environ:
        # One of several ranks, done, its files closed. Ending the interpreter in order would race with gloo's threads,
        # which may still hold tensors: "terminate called without an active exception", now and then, on a busy host.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(arguments)
    except ConfigError as error:
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        print(f"longspan: error: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return launch.INTERRUPTED


def _command(arguments: list[str]) -> int:
    commands = {"train": _train, "rl": _rl, "compare": _compare, "check": _check, "sweep": _sweep}
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(_versions())
        return 0
    if arguments[0] not in commands:
        raise ConfigError(f"unknown command {arguments[0]!r}; one of {', '.join(commands)}")
    return commands[arguments[0]](arguments[1:])


def _versions() -> str:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    return f"longspan {version('longspan')} (torch {version('torch')}, transformers {version('transformers')})"


def split_overrides(items: Sequence[str]) -> tuple[list[str], list[str]]:
    """(paths, key=value overrides)."""
    return [i for i in items if "=" not in i], [i for i in items if "=" in i]


# ---- longspan train, longspan rl


def _train(arguments: list[str]) -> int:
    return _program(
        "train",
        Config,
        arguments,
        "Train a Hugging Face model on sequences split over ranks. Starts N ranks on this host with --nproc N; under "
        "torchrun or SLURM it runs as one of theirs.",
        _train_here,
    )


def _rl(arguments: list[str]) -> int:
    return _program(
        "rl",
        RLConfig,
        arguments,
        "Reinforcement learning (GRPO and its kin) of a Hugging Face model, on sequences split over ranks. Starts N "
        "ranks on this host with --nproc N; under torchrun or SLURM it runs as one of theirs.",
        _rl_here,
    )


def _program(
    name: str, kind: type[Any], arguments: list[str], description: str, here: Callable[[Any, int], int]
) -> int:
    """A program that trains by a configuration of this kind; `here(config, rank)` is one rank of it."""
    parser = _Parser(
        prog=f"longspan {name}",
        description=description,
        epilog=describe(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("items", nargs="*", metavar="CONFIG.toml | key=value", help="a file, then overrides")
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this host")
    parser.add_argument("--dry-run", action="store_true", help="check and print the configuration, then stop")
    options = parser.parse_intermixed_args(arguments)

    paths, overrides = split_overrides(options.items)
    if len(paths) > 1:
        raise ConfigError(f"one configuration at a time, got {', '.join(paths)}; overrides are key=value")
    if not options.items:
        raise ConfigError(f"no configuration; longspan {name} CONFIG.toml [key=value ...]")
    config = load(paths[0] if paths else None, overrides, kind=kind)

    place = launch.place(os.environ)
    if options.nproc is not None:
        if options.nproc < 1:
            raise ConfigError(f"--nproc {options.nproc}; expected at least 1")
        if place.launched and "RANK" in os.environ:
            raise ConfigError(f"--nproc {options.nproc}, but a launcher started {place.world_size} ranks; drop one")
        place = launch.Place(rank=0, world_size=options.nproc, launched=False)
    validate(config, place.world_size)

    if options.dry_run:
        if place.rank == 0:
            _print_plan(config, place.world_size)
        return 0
    if place.world_size > 1 and not place.launched:
        return launch.start([name, *options.items], place.world_size)
    return launch.as_worker(lambda: here(config, place.rank), place.rank)


def _print_plan(config: AnyConfig, world_size: int) -> None:
    print(json.dumps(to_dict(config), indent=2))
    print(f"{world_size} ranks: dp {world_size // config.mesh.cp} x cp {config.mesh.cp}. Nothing was started.")


def _quiet_threads() -> None:
    # Read when torch loads its OpenMP. By default threads spin at every barrier; wherever more are runnable than there
    # are cores, each spins for one that is not running (2 cores beside other jobs, measured: 1.6 to 4 times slower).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _train_here(config: Config, rank: int) -> int:
    _quiet_threads()
    with launch.CtrlC() as ctrl_c:
        from longspan.engine.train import train

        summary = train(config, progress=config.log.progress)
        if rank == 0:
            print(closing_lines(summary), flush=True)
    return launch.INTERRUPTED if ctrl_c.pressed else 0


def _rl_here(config: RLConfig, rank: int) -> int:
    _quiet_threads()
    with launch.CtrlC() as ctrl_c:
        from longspan.rl.loop import train

        summary = train(config, progress=config.log.progress)
        if rank == 0:
            print(rl_closing_lines(summary), flush=True)
    return launch.INTERRUPTED if ctrl_c.pressed else 0


def rl_closing_lines(summary: RLSummary) -> str:
    lines = []
    if summary.stopped:
        lines.append(f"stopped by a signal after step {summary.step} of {summary.steps}; checkpoint.resume continues")
    rewards = []
    for line in (Path(summary.folder) / "metrics.jsonl").read_text().splitlines():
        reward = json.loads(line)["reward"]
        rewards += [] if reward is None else [reward]
    if summary.reward is None:
        lines.append(f"nothing to do: step {summary.step} of {summary.steps} was done already")
    few = min(10, len(rewards))
    if few:
        first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
        lines.append(
            f"step {summary.step}: reward {last:.3f} over the last {few} steps, {first:.3f} over the first {few}"
        )
    return "\n".join([*lines, *_places(summary)])


def _places(summary: Summary | RLSummary) -> list[str]:
    lines = []
    if summary.checkpoint:
        lines.append(f"checkpoint: {summary.checkpoint}")
    if summary.export:
        lines.append(f"export: {summary.export}")
    return [*lines, f"run folder: {summary.folder}"]


def closing_lines(summary: Summary) -> str:
    curve = compare.read_run(Path(summary.folder))
    lines = []
    if summary.stopped:
        lines.append(f"stopped by a signal after step {summary.step} of {summary.steps}; checkpoint.resume continues")
    if summary.loss is None:
        lines.append(f"nothing to do: step {summary.step} of {summary.steps} was done already")
    else:
        lines.append(f"step {summary.step}: loss {summary.loss:.4f}{compare.speed_text(curve)}")
    return "\n".join([*lines, *_places(summary)])


# ---- longspan compare


def _compare(arguments: list[str]) -> int:
    parser = _Parser(
        prog="longspan compare",
        description="Train twice with the same weights and data, or read finished runs, and compare loss and "
        "gradient norm at every step. Exit code 0: equal, 1: different, 2: nothing to compare.",
        epilog="examples:\n"
        "  longspan compare demo.toml --a mesh.cp=1 --b mesh.cp=2\n"
        "  longspan compare runs/demo demo.toml mesh.cp=1\n"
        "  longspan compare runs/monday runs/tuesday --exact\n"
        "  longspan compare demo.toml --export reference.json; longspan compare reference.json demo.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "items",
        nargs="*",
        metavar="A [B] [key=value ...]",
        help="a TOML file, a run folder or a "
        "reference JSON; then overrides for both. Without B: the same configuration twice",
    )
    add("--a", nargs="+", action="extend", default=[], metavar="key=value", help="overrides for A alone")
    add("--b", nargs="+", action="extend", default=[], metavar="key=value", help="overrides for B alone")
    add("--a-nproc", type=int, metavar="N", help="ranks for A (default: dp * cp)")
    add("--b-nproc", type=int, metavar="N", help="ranks for B (default: dp * cp)")
    add("--steps", type=int, metavar="N", help="run N steps, compare the first N")
    add("--exact", action="store_true", help="demand equal bits")
    add("--rtol", type=float, metavar="X", help="bound of each step, relative to A (default: by dtype)")
    add("--atol", type=float, metavar="Y", help="added to that bound (default: 0)")
    add("--drift", type=float, metavar="Z", help="bound of |mean(B - A)| / mean|A| (default: by dtype)")
    add("--out", default="runs/compare", metavar="FOLDER", help="for compare.json, compare.png and the runs")
    add("--export", metavar="FILE", help="write A's curve as a reference; without B or --b, only that")
    options = parser.parse_intermixed_args(arguments)

    sides, both = split_overrides(options.items)
    for flag, items in (("--a", options.a), ("--b", options.b)):
        paths, _ = split_overrides(items)
        if paths:
            raise ConfigError(f"{flag} takes key=value overrides, got {paths[0]!r}; put A and B first")
    if not 1 <= len(sides) <= 2:
        raise ConfigError(f"compare takes one or two sides, got {len(sides)}; longspan compare A [B]")
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps}; expected at least 1")
    for name in ("rtol", "atol", "drift"):
        value = getattr(options, name)
        if value is not None and options.exact:
            raise ConfigError(f"--exact and --{name} contradict each other; keep one")
        if value is not None and not value >= 0:
            raise ConfigError(f"--{name} {value}; expected at least 0")
    second = sides[1] if len(sides) == 2 else sides[0]
    only_export = options.export and len(sides) == 1 and not options.b
    return compare.main(
        compare.Request(
            a=sides[0],
            b=None if only_export else second,
            a_overrides=(*both, *options.a),
            b_overrides=(*both, *options.b),
            a_nproc=options.a_nproc,
            b_nproc=options.b_nproc,
            steps=options.steps,
            exact=options.exact,
            rtol=options.rtol,
            atol=options.atol,
            drift=options.drift,
            out=options.out,
            export=options.export,
        )
    )


# ---- longspan check, longspan sweep


def _check(arguments: list[str]) -> int:
    parser = _Parser(
        prog="longspan check",
        description="Prove that a model split over ranks equals itself on one: loss, whole logits, hidden states and "
        "every gradient, on local CPU ranks, over batches that bite. Exit code 0: equal, 1: different, 2: refused.",
        epilog="examples:\n"
        "  longspan check Qwen/Qwen3-8B             its configuration, shrunk; no weights are loaded\n"
        "  longspan check ./my-model/config.json\n"
        "  longspan check gpt_oss                   the default configuration of a type\n"
        "  longspan check ./my-model --full --text book.txt --length 129",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a hub id, a folder, a config.json, or a model type that transformers knows")
    add("--sizes", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of ranks (default: 2 4)")
    add("--scheme", choices=("exchange", "ulysses", "both"), default="both")
    add("--layout", choices=("auto", "contiguous", "head_tail", "per_document", "balanced"), default="auto")
    add("--full", action="store_true", help="its own weights in fp32, on the text of --text")
    add("--text", metavar="FILE", help="a text file, for --full")
    add("--length", type=int, metavar="N", help="tokens per row (default: 37; with --full up to 257)")
    add("--seed", type=int, default=0)
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--json", action="store_true", help="print the findings as JSON")
    add("--record", help=argparse.SUPPRESS)  # for the ranks: where rank 0 writes what was found
    options = parser.parse_args(arguments)
    if options.full != (options.text is not None):
        raise ConfigError("--full and --text FILE go together: real weights are compared on your text")
    if options.text is not None and not Path(options.text).is_file():
        raise ConfigError(f"--text {options.text}: no such file")
    if any(not 2 <= size <= 16 for size in options.sizes):
        raise ConfigError(f"--sizes {' '.join(map(str, options.sizes))}; expected 2 to 16 ranks")
    if options.length is not None and options.length < 8:
        raise ConfigError(f"--length {options.length}; expected at least 8")
    from longspan.checks import program

    request = program.Request(
        model=options.model,
        sizes=tuple(options.sizes),
        schemes=("exchange", "ulysses") if options.scheme == "both" else (options.scheme,),
        layout=options.layout,
        full=options.full,
        text=options.text,
        length=options.length,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
    )
    if options.record is None and launch.place(os.environ).launched:
        raise ConfigError("longspan check starts its own ranks; run it without a launcher (in a job: longspan.check)")
    if options.record is not None:
        rank = launch.place(os.environ).rank
        return launch.as_worker(lambda: program.run_rank(request, Path(options.record)), rank)
    program.find_config(request.model, trust_remote_code=request.trust_remote_code)  # mistakes are told before a start
    answer, code = program.start(request, arguments)
    if answer is None:
        return code
    print(json.dumps(answer, indent=2)) if options.json else program.show(answer)
    return program.EXIT[answer["status"]]


def _sweep(arguments: list[str]) -> int:
    parser = _Parser(
        prog="longspan sweep",
        description="Check every language model, with or without vision, of the installed transformers, shrunk, on 2 "
        "and 4 local CPU ranks. Exit code 0: none is different, 1: one is.",
    )
    add = parser.add_argument
    add("types", nargs="*", metavar="TYPE", help="model types (default: all)")
    add("--fast", action="store_true", help="a few of every kind")
    add("--lines", default="runs/sweep.jsonl", metavar="FILE", help="one line per architecture; those there are kept")
    add("--out", metavar="PAGE.md", help="write the table")
    add("--data", metavar="FILE", help="write the list of verified decoders")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    from longspan.checks import program, sweep

    everything = sweep.architectures() + sweep.vision_language()
    unknown = sorted(set(options.types) - set(everything))
    if unknown:
        raise ConfigError(f"not a language model that transformers registers: {', '.join(unknown)}")
    kinds = options.types or (list(sweep.FAST) if options.fast else everything)
    file = Path(options.lines)
    if options.worker:
        return launch.as_worker(lambda: program.sweep_rank(kinds, file), launch.place(os.environ).rank)
    return program.sweep_all(kinds, file, out=options.out, data=options.data)
