"""`longspan check MODEL`: from a name to a verdict.

The user's own configuration is shrunk with its structure kept (or, with `--full`, its real weights and a text are
used), and a model of it is run on local CPU ranks over batches that bite. Ranks write what they found to a file, which
the process that started them prints.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longspan.config import ConfigError

EXIT = {"equal": 0, "different": 1, "failed": 1, "refused": 2}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `longspan check` was asked."""

    model: str
    sizes: tuple[int, ...] = (2, 4)
    schemes: tuple[str, ...] = ("exchange", "ulysses")
    layout: str = "auto"
    full: bool = False
    text: str | None = None
    length: int | None = None
    seed: int = 0
    trust_remote_code: bool = False


def variants(request: Request) -> list[tuple[int, str, str]]:
    return [(size, scheme, request.layout) for size in request.sizes for scheme in request.schemes]


def find_config(source: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a hub id, a local folder, a config file or a registered model type.

    Raises ConfigError if there is none, or if it is not of a language model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from longspan.checks import sweep

    path = Path(source)
    try:
        if path.is_file():
            fields = json.loads(path.read_text())
            if not isinstance(fields, dict) or "model_type" not in fields:
                raise ConfigError(f"{source} is not a model's config.json: it has no model_type")
            config = AutoConfig.for_model(**fields)
        elif source in CONFIG_MAPPING and not path.exists():
            config = CONFIG_MAPPING[source]()
        else:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"cannot read a configuration from {source!r}: {str(error).splitlines()[0]} (a hub id, a folder, a "
            "config.json or a registered model type)"
        ) from None
    try:
        sweep.auto_class(config)
    except ValueError as error:
        raise ConfigError(f"{source!r}: {error}") from None
    return config


def without_dropout(config: Any) -> list[str]:
    """Sets every dropout and jitter of a configuration to 0, in place; the names of what was not 0."""
    from transformers import PreTrainedConfig

    from longspan.checks.shrink import is_dropout

    changed = []
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            changed += [f"{name}.{inner}" for inner in without_dropout(value)]
        elif isinstance(value, float) and value > 0 and is_dropout(name):
            setattr(config, name, 0.0)
            changed.append(name)
    return changed


def start(request: Request, arguments: Sequence[str]) -> tuple[dict[str, Any] | None, int]:
    """Runs the check on local ranks; (what they found, 0), or (None, exit code) where they failed."""
    from longspan import launch

    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        file = Path(folder, "answer.json")
        code = launch.start(["check", *arguments, "--record", str(file)], max(request.sizes))
        return (json.loads(file.read_text()), 0) if code == 0 else (None, code)


def run_rank(request: Request, file: Path) -> int:
    """What each rank does; rank 0 writes the file."""
    import torch
    import torch.distributed as dist
    import transformers

    from longspan.checks import Report, sweep
    from longspan.checks.cases import LENGTH, make_cases, random_tokens
    from longspan.engine.mesh import init_mesh

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    init_mesh(cp=1, timeout_seconds=120.0)
    config = find_config(request.model, trust_remote_code=request.trust_remote_code)
    off = without_dropout(config)
    if request.full:
        model, tokens = _full(request, config)
    else:
        model = sweep.build(sweep.small(config), request.seed)
        tokens = random_tokens(sweep.vocabulary(model), request.length or LENGTH, request.seed)
    todo = variants(request)
    groups = sweep.make_groups(size for size, *_ in todo)
    report = Report(tuple(sweep.prove_variants(model, make_cases(tokens), todo, groups)))
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in model.parameters())
        answer = {
            "model": request.model,
            "class": type(model).__name__,
            "parameters": parameters,
            "full": request.full,
            "dropout_set_to_0": off,
            "status": report.status,
            "findings": [asdict(f) for f in report.findings],
        }
        file.write_text(json.dumps(answer))
    dist.barrier()
    return 0


def _full(request: Request, config: Any) -> tuple[Any, Any]:
    """Real weights in fp32, and tokens of the user's text."""
    import torch
    from transformers import AutoTokenizer

    from longspan.checks import sweep

    options = {"trust_remote_code": request.trust_remote_code}
    auto = sweep.auto_class(config)
    model = auto.from_pretrained(request.model, config=config, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(request.model, **options)
    ids = tokenizer(Path(str(request.text)).read_text(), return_tensors="pt").input_ids[0]
    length = request.length or min(len(ids) // 2, 257)
    if len(ids) < 2 * length or length < 8:
        raise ConfigError(f"{request.text} has {len(ids)} tokens; two rows of {length} are needed (at least 8)")
    return model, ids[: 2 * length]


def show(answer: dict[str, Any]) -> None:
    """Prints a verdict for people."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if os.isatty(1) else 140)
    small = "its own weights" if answer["full"] else f"shrunk to {answer['parameters']:,} parameters"
    console.print(f"[bold]{escape(answer['model'])}[/bold]: {answer['class']}, {small}, fp32")
    if answer["dropout_set_to_0"]:
        console.print(f"dropout set to 0, as longspan asks for: {', '.join(answer['dropout_set_to_0'])}")
    findings = answer["findings"]
    refused = {f["reason"] for f in findings if f["status"] == "refused"}
    if all(f["status"] == "refused" for f in findings) and len(refused) == 1:
        console.print(f"[yellow]refused[/yellow]: {escape(refused.pop())}")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("case", "ranks", "scheme", "layout", "loss", "logits", "hidden", "gradients", ""):
        table.add_column(
            name, justify="right" if name in ("ranks", "loss", "logits", "hidden", "gradients") else "left"
        )
    for f in findings:
        errors = [_number(f[name]) for name in ("loss", "logits", "hidden", "gradient")]
        table.add_row(f["case"], str(f["ranks"]), f["scheme"], f["layout"], *errors, f["status"])
    console.print(table)
    told = set()
    for f in findings:
        if f["status"] == "equal" or (f["cause"], f["reason"], f["layer"]) in told:
            continue
        told.add((f["cause"], f["reason"], f["layer"]))
        console.print(escape(f"{f['status']}: {f['case']} on {f['ranks']} ranks ({f['scheme']}, {f['layout']})"))
        if f["status"] == "different":
            position = f["position"]
            console.print(f"  first layer that differs: {f['layer'] or 'none'}")
            console.print(
                f"  first position: {f'batch row {position[0]}, token {position[1]}' if position else 'none'}"
            )
            console.print(f"  first gradient that differs: {f['parameter'] or 'none'}")
            console.print(f"  likely cause: {f['cause']}")
        console.print(escape(f"  {f['reason']}"))
    words = {
        "equal": "[green]equal[/green] to one rank in loss, logits, hidden states and every gradient",
        "different": "[red]different[/red] from one rank",
        "refused": "[yellow]refused[/yellow]",
        "failed": "[red]failed[/red]: it broke down; please report this",
    }
    console.print(words[answer["status"]])
    if answer["status"] == "equal" and refused:
        cases = sorted({f["case"] for f in findings if f["status"] == "refused"})
        console.print(f"refused inputs, with an error on every rank: {', '.join(cases)}")


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.1e}"


# ---- the sweep


def sweep_rank(kinds: Sequence[str], file: Path) -> int:
    """What each rank of a sweep does."""
    from longspan.checks import sweep
    from longspan.engine.mesh import init_mesh

    init_mesh(cp=1, timeout_seconds=60.0)
    sweep.work(kinds, sweep.VARIANTS, file)
    return 0


def sweep_all(kinds: Sequence[str], file: Path, *, out: str | None, data: str | None) -> int:
    """Goes through the architectures that `file` has no line for yet; starts new ranks where they died."""
    import torch
    import transformers

    from longspan import launch
    from longspan.checks import sweep

    file.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    while left := [kind for kind in kinds if kind not in sweep.read(file)]:
        launch.start(["sweep", "--worker", "--lines", str(file), *left], max(size for size, *_ in sweep.VARIANTS))
        if [kind for kind in kinds if kind not in sweep.read(file)] == left:
            raise ConfigError("the ranks of the sweep ended before the first architecture")
    lines = {kind: line for kind, line in sweep.read(file).items() if kind in kinds}
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    if out is not None:
        Path(out).write_text(table_page(lines, versions))
    if data is not None:
        Path(data).write_text(json.dumps(verified_data(lines, versions), indent=1) + "\n")
    counts = {status: sum(line["status"] == status for line in lines.values()) for status in EXIT}
    for line in lines.values():
        if line["status"] == "different":
            print(f"different: {line['type']}: {line['case']}: {line['reason']}")
    print(f"{', '.join(f'{n} {s}' for s, n in counts.items())}, of {len(lines)}, in {time.time() - began:.0f} s")
    return 1 if counts["different"] else 0


def table_page(lines: dict[str, dict[str, Any]], versions: str) -> str:
    """The documentation page of a sweep, from its lines."""
    from longspan.checks import sweep

    causal, vision = ([lines[kind] for kind in kinds if kind in lines] for kinds in (
        sweep.architectures(), sweep.vision_language()
    ))  # fmt: skip
    page = [
        "# Architectures, one by one",
        "",
        f"Written by `longspan sweep` ({versions}): every causal LM that transformers registers, then every further "
        "model that makes text of images and text, each from its default configuration, shrunk with its structure kept "
        "(layer types, windows, sinks, softcaps, RoPE types, experts), weights drawn large enough for faults to show. "
        "Each runs on 2 and 4 ranks, both schemes, several layouts, over rows of odd length, left and right padding, "
        "packed documents (the truth is each run alone; by restarting positions, and by bounds), a single target; "
        "loss (1e-5), whole logits and hidden states (1e-4), every parameter's gradient (1e-5) are compared with the "
        "plain model's on one rank in fp32. Columns show the largest relative errors, and inputs that are refused.",
        "",
        "`parallelize` takes the decoders of the equal ones. For the others see the reason; `longspan check MODEL` "
        "compares your own configuration, which may switch on what a default leaves off.",
        "",
    ]
    for title, part in (("Causal LMs", causal), ("Text of images and text", vision)):
        page += _section(title, part) if part else []
    return "\n".join(page)


def _section(title: str, lines: list[dict[str, Any]]) -> list[str]:
    groups = {status: [x for x in lines if x["status"] == status] for status in EXIT}
    counts = f"{len(groups['equal'])} equal, {len(groups['different'])} different, {len(groups['refused'])} refused"
    page = [
        f"## {title}",
        "",
        f"**{counts}, {len(groups['failed'])} not compared** (their default configuration does not run shrunk, on one "
        f"rank), of {len(lines)}.",
        "",
    ]
    for status, words in (
        ("different", "Different"),
        ("equal", "Equal"),
        ("refused", "Refused"),
        ("failed", "Not compared"),
    ):
        if not groups[status]:
            continue
        page += [f"### {words}", ""]
        if status == "equal":
            page += ["| type | class | loss | logits | gradients | refused inputs |", "|---|---|---|---|---|---|"]
        else:
            page += ["| type | class | reason |", "|---|---|---|"]
        for x in sorted(groups[status], key=_by_type):
            cells = [_cell(x["reason"])]
            if status == "equal":
                cells = [*(_number(x[name]) for name in ("loss", "logits", "gradient")), ", ".join(x["refused_inputs"])]
            page.append(f"| {' | '.join([x['type'], x['class'], *cells])} |")
        page.append("")
    return page


def _by_type(line: dict[str, Any]) -> str:
    return str(line["type"])


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")[:300]


def verified_data(lines: dict[str, dict[str, Any]], versions: str) -> dict[str, Any]:
    """The list of verified decoders from a sweep's lines: those equal in every architecture that has them."""
    wrong = {line.get("decoder") for line in lines.values() if line["status"] == "different"}
    equal = [line for line in lines.values() if line["status"] == "equal" and line["decoder"] not in wrong]
    return {
        "made_with": versions,
        "decoders": sorted({line["decoder"] for line in equal}),
        "layer_types": sorted({kind for line in equal for kind in line["layer_types"]}),
    }
