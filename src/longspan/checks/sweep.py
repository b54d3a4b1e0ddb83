"""Every causal-LM architecture of transformers, shrunk, run on several ranks and compared with one.

The parent starts ranks that examine one architecture after the other and append a line of JSON for each; if they die
or hang (a rank that raises alone leaves its peers in a collective), the one they were at is recorded as failed and
new ranks go on behind it. The table and the list of verified architectures are made from the lines.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from longspan.checks import TROUBLE, Finding, Report, _one_line, prove
from longspan.checks.cases import Case, make_cases, random_tokens
from longspan.checks.shrink import shrink
from longspan.models.find import decoder_of

SECONDS = 120  # for one architecture, before its ranks are given up
# (ranks, scheme, layout) that a sweep goes through: both schemes, both sizes, a layout of two pieces and one of one.
VARIANTS = ((2, "exchange", "head_tail"), (2, "ulysses", "contiguous"), (4, "exchange", "auto"))
# A few of every kind: dense, windows, chunks, sinks, softcaps, MLA, experts, learned positions, refusals.
FAST = (
    "llama", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "deepseek_v3", "llama4_text", "qwen2_moe", "hrm_text",
    "roberta", "bart", "opt", "fuyu", "mpt", "mamba", "qwen3_next", "doge", "falcon",
)  # fmt: skip


CLASSES = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}


def architectures() -> list[str]:
    """Model types that transformers registers for causal language modelling."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def vision_language() -> list[str]:
    """Further model types, registered for text from images and text; the sweep sends text through them."""
    return [
        kind for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ]


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class that makes a language model of a configuration. Raises ValueError if there is none."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map"):
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise ValueError(f"transformers has no language model for configurations of type {config.model_type!r}")


def small_model(kind: str, seed: int = 0) -> nn.Module:
    """A small causal LM of a registered type from its default configuration, with weights that show faults."""
    return build(small(CONFIG_MAPPING[kind]()), seed)


def small(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration shrunk; one that may be an encoder or a decoder is a decoder."""
    config = shrink(config)
    if getattr(config, "is_decoder", None) is False and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True
    return config


def build(config: PreTrainedConfig, seed: int = 0) -> nn.Module:
    """A causal LM in fp32 with every weight drawn anew: large enough that attention is far from uniform, biases, sinks
    and gates off their usual zero. The same on every rank."""
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            if parameter.ndim >= 2:
                parameter.copy_(noise)
            else:
                parameter.add_(noise)
    return model


def vocabulary(model: nn.Module) -> int:
    """How many ids the model predicts (some embed more, for prompts)."""
    embedded = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    predicted = getattr(model.config.get_text_config(), "vocab_size", None)  # type: ignore[union-attr,operator]
    return embedded if predicted is None else min(embedded, int(predicted))


def prove_variants(
    model: nn.Module, cases: Sequence[Case], variants: Iterable[tuple[int, str, str]], groups: dict[int, Any]
) -> list[Finding]:
    """Findings of every variant; on rank 0 all of them. `groups[size]` holds ranks 0 .. size-1."""
    truths: dict[str, Any] = {}
    findings: list[Finding] = []
    for size, scheme, layout in variants:
        if dist.get_rank() < size:
            findings += prove(model, cases, groups[size], truths=truths, scheme=scheme, layout=layout)
    return findings


def make_groups(sizes: Iterable[int]) -> dict[int, Any]:
    """Process groups of the first ranks, by size."""
    return {size: dist.new_group(list(range(size))) for size in sorted(set(sizes))}


def examine(kind: str, variants: Sequence[tuple[int, str, str]], groups: dict[int, Any]) -> dict[str, Any]:
    """One line of the table."""
    start = time.time()
    line: dict[str, Any] = {"type": kind, "class": CLASSES[kind], "layer_types": []}
    try:
        model: Any = small_model(kind)
        config = decoder_of(model).config
        line["decoder"] = config.model_type
        line["layer_types"] = sorted(set(getattr(config, "layer_types", None) or ()))
        cases = make_cases(random_tokens(vocabulary(model)))
        report = Report(tuple(prove_variants(model, cases, variants, groups)))
    except (ValueError, StrictDataclassError, *TROUBLE) as error:
        # Before anything was split: the small model could not be made or does not run on plain batches.
        text = f"its small model does not run plainly: {type(error).__name__}: {_one_line(error)}"
        return {**line, "status": "failed", "reason": text[:400], "seconds": time.time() - start}
    finally:
        model = None
        gc.collect()
    bad = [f for f in report.findings if f.status == report.status != "equal"]
    errors = {
        name: max((x for f in report.findings if (x := getattr(f, name)) == x), default=None)
        for name in ("loss", "logits", "gradient")
    }
    return {
        **line,
        **errors,
        "status": report.status,
        "reason": bad[0].reason if bad else "",
        "case": bad[0].case if bad else "",
        "refused_inputs": report.refused_inputs,
        "findings": [asdict(f) for f in bad],
        "seconds": time.time() - start,
    }


def work(kinds: Sequence[str], variants: Sequence[tuple[int, str, str]], file: Path) -> None:
    """What each rank does: rank 0 appends a line when it begins an architecture, and the result when it is done."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    groups = make_groups(size for size, *_ in variants)
    for kind in kinds:
        if dist.get_rank() == 0:
            _append(file, {"type": kind, "status": "begun"})
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)  # a rank that hangs ends, and its peers with it
        line = examine(kind, variants, groups)
        signal.alarm(0)
        if dist.get_rank() == 0:
            _append(file, line)


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Lines by type; one that was begun and never done is failed."""
    lines: dict[str, dict[str, Any]] = {}
    if file.exists():
        for text in file.read_text().splitlines():
            line = json.loads(text)
            lines[line["type"]] = line
    for kind, line in lines.items():
        if line["status"] == "begun":
            line.update(status="failed", reason="a rank ended or hung", **{"class": CLASSES[kind]})
    return lines
