"""longspan check: a model proven equal to one rank, or refused, or shown where it differs.

`check(model, batch)` proves a model on a batch inside a running job. `prove` does it for given cases. The programs
`longspan check` and `longspan sweep` (`longspan.checks.program`, `longspan.checks.sweep`) build small models for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from longspan import layout as layouts
from longspan.checks.cases import Case
from longspan.checks.verdict import Answer, Finding, answer, compare, diagnose, truth, worst
from longspan.comm import ContextParallel
from longspan.models import parallelize, report, suspended, unparallelize
from longspan.models.decoder import STATE, sizes
from longspan.models.find import model_within

__all__ = ["Case", "Finding", "Report", "check", "describe", "prove"]

# What a model that does not fit raises; anything else is a fault of ours and is not caught.
TROUBLE = (
    RuntimeError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    AssertionError,
    ImportError,
)
ROUNDING = 1e-3  # a difference below this is looked at again in fp64


@dataclass(frozen=True)
class Report:
    """Findings, and the status of all: "different" if one case differs, "failed" if one broke down, "refused" if
    every case was, or the simplest of them; else "equal", beside inputs that may be refused."""

    findings: tuple[Finding, ...]

    @property
    def status(self) -> str:
        found = {f.status for f in self.findings}
        if "different" in found or "failed" in found:
            return "different" if "different" in found else "failed"
        simplest = [f.status for f in self.findings if f.case == self.findings[0].case]
        return "refused" if "refused" in simplest else "equal"

    @property
    def refused_inputs(self) -> dict[str, str]:
        """Cases that were refused, and why."""
        return {f.case: f.reason for f in self.findings if f.status == "refused"}

    @property
    def equal(self) -> bool:
        return self.status == "equal"

    def __str__(self) -> str:
        return "\n".join(describe(f) for f in self.findings)


def describe(finding: Finding) -> str:
    """A finding in a line of text."""
    head = f"{finding.case}, {finding.ranks} ranks, {finding.scheme}, {finding.layout}: {finding.status}"
    if finding.status in ("refused", "failed"):
        return f"{head}: {finding.reason}"
    numbers = ", ".join(f"{name} {getattr(finding, name):.1e}" for name in ("loss", "logits", "hidden", "gradient"))
    if finding.status == "equal":
        return f"{head} ({numbers})"
    where = []
    if finding.layer:
        where.append(f"first at {finding.layer}")
    if finding.position:
        where.append(f"batch row {finding.position[0]}, token {finding.position[1]}")
    if finding.parameter:
        where.append(f"first gradient {finding.parameter}")
    return f"{head} ({numbers}); {', '.join(where)}; likely cause: {finding.cause} ({finding.reason})"


def check(
    model: nn.Module,
    batch: Mapping[str, Any],
    mesh: DeviceMesh | ProcessGroup | None = None,
    *,
    documents: Sequence[int] = (),
    **options: Any,
) -> Report:
    """Compares a model split over ranks with itself on one rank, on a batch of the caller's; every rank calls it.

    Args:
        model: a plain model (then `mesh` and parallelize()'s `options` say how to split it, for the time of the
            check), or one that is parallelized already; DDP's wrapper and FSDP2 are seen through.
        batch: the model's keyword arguments, whole and the same on every rank of the context-parallel group; with
            labels, losses and every gradient are compared too.
        documents: lengths of packed documents ([1, S] batches); the truth is then each run alone.

    Every rank also runs the plain model on the whole batch, so it must fit. Gradients and modes of the model are put
    back afterwards. Raises ValueError where the batch cannot be used; a refusal is a finding.
    """
    inner: Any = model_within(model)
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(
            f"longspan.check compares Hugging Face models, got {type(inner).__name__}; for others compare model(..) "
            "with what it gives under longspan.suspended(model)"
        )
    case = Case("batch", dict(batch), tuple(documents))
    modes = {m: m.training for m in model.modules()}
    gradients = {p: p.grad for p in model.parameters()}
    state = getattr(inner, STATE, None)
    try:
        if state is None:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                raise ValueError("parallelize the model before DDP wraps it")
            cp = ContextParallel(mesh)
            if cp.size == 1:
                raise ValueError("there is nothing to compare: the model is not parallelized, and mesh has one rank")
            return Report(tuple(prove(model, [case], mesh, **options)))
        if mesh is not None or options:
            raise ValueError("the model is parallelized already; mesh and options are taken from it")
        with suspended(inner):
            true = truth(model, case, lambda: _average(model, state.cp))
        return Report((_examine(model, inner, case, true, state.cp),))
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for module, training in modes.items():
            module.training = training


def prove(
    model: nn.Module,
    cases: Sequence[Case],
    mesh: DeviceMesh | ProcessGroup | None,
    *,
    truths: dict[str, Answer] | None = None,
    **options: Any,
) -> list[Finding]:
    """Findings for a plain model on each case, split as parallelize() is told by `options`; plain again afterwards.

    `truths` keeps the plain model's answers by case between calls. Collective: every rank of the mesh calls it with
    the same arguments, and gets the same findings.
    """
    truths = {} if truths is None else truths
    cp = ContextParallel(mesh)
    for case in cases:
        if case.name not in truths:
            truths[case.name] = truth(model, case, lambda: None)
    scheme, layout = options.get("scheme", "auto"), options.get("layout", "auto")
    try:
        parallelize(model, mesh, **{"unverified": True, **options})
    except ValueError as error:
        return [Finding("every case", cp.size, scheme, layout, "refused", _one_line(error))]
    try:
        findings = [_examine(model, model, case, truths[case.name], cp) for case in cases]
        return [
            _in_fp64(model, case, found, cp) if _may_be_rounding(found) else found
            for case, found in zip(cases, findings)
        ]
    finally:
        unparallelize(model)


def _may_be_rounding(finding: Finding) -> bool:
    errors = (finding.loss, finding.logits, finding.hidden, finding.gradient)
    return finding.status == "different" and all(math.isnan(e) or e < ROUNDING for e in errors)


def _in_fp64(model: Any, case: Case, finding: Finding, cp: ContextParallel) -> Finding:
    """The same comparison with everything in fp64: rounding becomes smaller there, a fault does not. Sums of terms that
    nearly cancel (a router's gradient, say) differ by more than 1e-5 between any two orders of summing in fp32.
    The finding is returned as it is where the model cannot run in fp64."""
    if any(p.dtype != torch.float32 for p in model.parameters()):
        return finding
    grouped = model.get_experts_implementation() if model._can_set_experts_implementation() else None
    model.double()
    try:
        if grouped is not None:
            model.set_experts_implementation("eager")  # torch's grouped matrix product takes no fp64
        with suspended(model):
            true = truth(model, case, lambda: None)
        if not all(bool(g.isfinite().all()) for g in true.gradients.values()):
            return finding
        wide = _examine(model, model, case, true, cp)
    except (ValueError, *TROUBLE):
        return finding
    finally:
        model.float()
        model.zero_grad(set_to_none=True)
        if grouped is not None:
            model.set_experts_implementation(grouped)
    if wide.status != "equal":
        return finding
    return replace(wide, reason="compared in fp64: in fp32 rounding was beyond the bound")


def _examine(model: nn.Module, inner: Any, case: Case, true: Answer, cp: ContextParallel) -> Finding:
    """One case on a parallelized model, agreed on by all ranks."""
    state = getattr(inner, STATE)
    base = {"case": case.name, "ranks": cp.size, "scheme": state.scheme, "layout": state.layout}
    try:
        split = answer(model, case, lambda: _average(model, cp))
    except ValueError as error:
        return Finding(**base, status="refused", reason=_one_line(error))
    except TROUBLE as error:
        return Finding(**base, status="failed", reason=f"{type(error).__name__}: {_one_line(error)}")
    found = compare(case, true, split)
    base["layout"] = report(inner)["layout"]
    everyone: list[Any] = [None] * cp.size
    dist.all_gather_object(everyone, Finding(**base, **found), group=cp.group)
    finding = worst(everyone)
    if finding.status == "equal":
        return finding
    with suspended(inner):
        _, length = sizes(case.inputs)
        layout = layouts.make(base["layout"], length, cp.size, case.starts)
        cause, words = diagnose(model, case, layout, true, split, found)
    dist.all_gather_object(everyone, Finding(**{**base, **found, "cause": cause, "reason": words}), group=cp.group)
    return worst(everyone)


def _average(model: nn.Module, cp: ContextParallel) -> None:
    """What DDP and FSDP do by themselves: gradients averaged over the ranks."""
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
    sharded = any(hasattr(p, "device_mesh") for p in model.parameters())
    state = getattr(model, STATE, None)
    if not wrapped and not sharded and not (state is not None and state.suspended):
        cp.reduce_gradients(model)


def _one_line(error: BaseException) -> str:
    text = str(error)
    # A KeyError's text is the key alone.
    text = repr(error) if isinstance(error, KeyError) or not text else text
    return " ".join(text.split())
