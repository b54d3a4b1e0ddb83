"""parallelize(): a Hugging Face decoder that takes whole batches and returns whole outputs, split underneath.

No code per architecture: the decoder is found by `get_decoder()`, attention and masks by the functions transformers
calls by name. What cannot be made equal to one rank raises, here or in the forward before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import transformers
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from longspan import layout as layouts
from longspan.attention import SCHEMES
from longspan.attention.plan import check_stages
from longspan.comm import ContextParallel
from longspan.models import causal_lm, decoder, hooks, inputs, numbering, own, rope
from longspan.models.decoder import STATE, State
from longspan.models.find import decoder_of, model_within, parent_of
from longspan.models.verified import check_verified
from longspan.version import VERSION

M = TypeVar("M", bound=nn.Module)
KERNELS = ("auto", "naive", "flash", "model")
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

__all__ = ["parallelize", "report", "separates_documents", "suspended", "unparallelize"]


def parallelize(
    model: M,
    mesh: DeviceMesh | ProcessGroup | None,
    *,
    scheme: str = "auto",
    layout: str = "auto",
    kernel: str = "auto",
    logits: str = "auto",
    stages: int | None = None,
    gradient: Literal["mean", "sum"] = "mean",
    check_batch: bool = True,
    unverified: bool = False,
    on_one_rank: bool = False,
    plan: Mapping[str, own.Words] | None = None,
) -> M:
    """Adapts a Hugging Face model in place; returns the same object.

    Afterwards every rank of the group calls it with the same whole batch and gets whole outputs, in the order of the
    batch, and the whole loss. With a group of one rank nothing is installed, unless on_one_rank asks for it.

    Args:
        mesh: the context-parallel group: `mesh["cp"]`, a process group, or None (one rank).
        scheme: "ulysses" (all-to-all over heads), "exchange" (fetch the keys that are needed) or "auto".
        layout: "contiguous", "head_tail", "per_document", "balanced" (equal attention pairs at equal tokens, by what
            the layers see of each batch); "auto" is per_document for packed batches, balanced for prefix trees
            (`score`), else head_tail.
        kernel: "flash", "naive", "auto", or, under ulysses, "model": the model's own attention function.
        logits: of a causal LM: "whole", "local" (this rank's rows), "none", or "auto": none while training with
            labels, else whole.
        stages: fetch stages of the exchange scheme, 1 .. size-1.
        gradient: "mean" where gradients are averaged over all ranks (DDP, FSDP), "sum" where they are summed.
        check_batch: compare a hash of every batch over the group.
        unverified: adapt an architecture that has not been compared with one rank (docs/models.md), with a warning;
            `longspan check MODEL` compares it. With a plan: skip the trial of its first tokens.
        on_one_rank: adapt the decoder for a group of one rank too; `score` then packs there and shares prefixes.
        plan: for a model of your own, which is not Hugging Face's: module name patterns and styles (`models.own`).

    Raises ValueError for models and options that would not equal one rank.
    """
    cp = ContextParallel(mesh, gradient=gradient, check_batch=check_batch)
    inner = model_within(model)

    def check_call() -> None:
        _check_options(scheme, layout, kernel, logits, stages, cp)
        if getattr(inner, STATE, None) is not None:
            raise ValueError("this model is parallelized already; call longspan.unparallelize(model) first")
        by_batch = layout in ("per_document", "balanced")
        if plan is not None and (kernel == "model" or logits != "auto" or by_batch or gradient == "sum"):
            raise ValueError("a plan takes no kernel='model', logits, gradient='sum', or layout of each batch's own")

    if plan is not None:
        cp.agree(check_call)
        cp = replace(cp, layout="head_tail" if layout == "auto" else layout)
        own.parallelize(model, own.OwnState(cp, scheme, kernel, stages, unverified), plan)
        return model
    if cp.size == 1 and not on_one_rank:
        check_call()
        return model

    def checked() -> tuple[Any, bool, State]:
        check_call()
        if not isinstance(inner, PreTrainedModel):
            kind = type(inner).__name__
            raise ValueError(f"parallelize() adapts Hugging Face models, got {kind}; pass a plan for yours")
        body = decoder_of(inner)
        causal = inner is not body and causal_lm.scored_from_rows(inner)
        _check_gradient(inner, gradient, logits, causal=causal)
        if not causal and logits in ("local", "none"):
            raise ValueError(f"logits={logits!r} is for causal LMs whose loss is transformers' loss_function")
        _check_model(inner, body)
        check_verified(inner, body, unverified=unverified)
        if inner is not body:
            parent_of(inner, body)
        original = body.config._attn_implementation
        state = State(cp, scheme, layout, kernel, stages, logits, hooks.register(original), original)
        _check_backend(body, state)
        return body, causal, state

    options = {"scheme": scheme, "layout": layout, "kernel": kernel, "logits": logits, "stages": stages}
    given = {"options": {**options, "gradient": gradient}, "config": _config_fields(inner), "versions": _versions()}
    body, causal, state = replace(cp, check_batch=True).agree(checked, given, "models")
    # Nothing is refused from here on: a model is adapted whole or not at all.
    body.set_attn_implementation(state.backend)
    decoder.install(body, decoder.split_forward, state)
    if inner is not body:
        decoder.install(inner, causal_lm.split_forward if causal else decoder.outer_forward, state)
    return model


def unparallelize(model: M) -> M:
    """Undoes parallelize(); a model that is not parallelized is returned as it is."""
    inner = model_within(model)
    state: State | own.OwnState | None = getattr(inner, STATE, None)
    if state is None:
        return model
    if isinstance(state, own.OwnState):
        own.unparallelize(inner)
        return model
    body = decoder_of(inner)
    body.set_attn_implementation(state.original_backend)
    decoder.uninstall(body)
    if inner is not body:
        decoder.uninstall(inner)
    return model


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is the plain one again: whole sequence on every rank, bit for bit."""
    inner = model_within(model)
    state: State | own.OwnState | None = getattr(inner, STATE, None)
    if state is None:
        yield
        return
    if isinstance(state, own.OwnState):
        with own.plainly(state):
            yield
        return
    body = decoder_of(inner)
    before = body.config._attn_implementation
    body.set_attn_implementation(state.original_backend)
    try:
        with decoder.plainly(state):
            yield
    finally:
        body.set_attn_implementation(before)


def separates_documents(model: PreTrainedModel) -> bool:
    """Whether the plain model, on one rank, keeps documents apart that its position_ids tell by beginning anew. Those
    that do not are refused such batches once they are split; found by a trial of a few tokens."""
    body = decoder_of(model)
    with decoder.hooked(body):
        try:
            return inputs.packing_row(body, body.forward, 0, body.get_input_embeddings().weight.device) is not None
        except ValueError:
            return False


def report(model: nn.Module) -> dict[str, Any]:
    """What this rank did in the last forward (bytes: and its backward, as far as it has run).

    tokens: rows times batch; pairs: attention pairs per head, summed over layers; bytes_sent; collectives; layout.
    Raises ValueError before the first forward, or for a model that is not split.
    """
    state: State | own.OwnState | None = getattr(model_within(model), STATE, None)
    if state is None or state.last is None:
        raise ValueError("nothing to report: the model is not parallelized, or has had no forward yet")
    traffic = state.last["traffic"]
    return {
        "rank": state.cp.rank,
        "size": state.cp.size,
        "tokens": state.last["tokens"],
        "pairs": state.last["pairs"],
        "layout": state.last["layout"],
        "bytes_sent": traffic.bytes_sent,
        "collectives": traffic.collectives,
    }


def _check_options(scheme: str, layout: str, kernel: str, logits: str, stages: int | None, cp: ContextParallel) -> None:
    for name, value, known in (
        ("scheme", scheme, SCHEMES),
        ("layout", layout, ("auto", *layouts.NAMES)),
        ("kernel", kernel, KERNELS),
        ("logits", logits, causal_lm.LOGITS),
    ):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(known)}")
    if kernel == "model" and scheme == "exchange":
        raise ValueError("kernel='model' needs whole sequences, so scheme='ulysses' (or 'auto')")
    if stages is not None:
        check_stages(stages, cp.size)


def _check_gradient(model: Any, gradient: str, logits: str, *, causal: bool) -> None:
    if gradient != "sum":
        return
    if not causal:
        raise ValueError(
            f"gradient='sum' would count the head of {type(model).__name__} once per rank, since it works on whole "
            "hidden states; use gradient='mean'"
        )
    if logits == "whole":
        raise ValueError("gradient='sum' goes with losses from labels; whole logits need gradient='mean'")


def _config_fields(model: Any) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return {"class": type(model).__name__}
    return {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}


def _versions() -> str:
    return f"longspan {VERSION}, torch {torch.__version__}, transformers {transformers.__version__}"


def _check_model(model: PreTrainedModel, body: Any) -> None:
    """Refuses, by what config and modules tell, what would be silently different on shards."""
    config = body.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; only decoders are supported")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if others:
        raise ValueError(f"{name} has layers of type {', '.join(others)}, which mix tokens in ways not supported yet")
    rope.check(body)
    if "position_ids" not in decoder.parameter_names(body) and not numbering.modules_of(body):
        raise ValueError(f"{name} takes no position_ids, so its shards would count positions from 0; not supported")


def _check_backend(body: Any, state: State) -> None:
    """Tries the plain decoder under the hooks' names, to count its attention modules and to see how it numbers tokens;
    then the backend is the original again. Raises ValueError where either cannot be made equal."""
    try:
        body.set_attn_implementation(state.backend)
        if body.config._attn_implementation != state.backend:
            raise ValueError(f"{type(body).__name__} does not let its attention function be set; it is not supported")
        _check_positions(body, state)
    finally:
        body.set_attn_implementation(state.original_backend)


@torch.no_grad()
def _check_positions(body: Any, state: State) -> None:
    """Finds decoders that number tokens in a way of their own: others are given 0, 1, 2, .. of the whole sequence.

    A probe of two short rows, one of them padded on the left: the plain decoder must answer the same with and without
    those positions. Weights on the meta device cannot answer; then nothing is checked.
    """
    parameter = next(body.parameters())
    if parameter.is_meta:
        if decoder.mixing_modules(body):
            raise ValueError(
                f"{type(body).__name__} mixes tokens in {decoder.mixing_modules(body)[0]}; not supported yet"
            )
        return
    takes_positions = "position_ids" in decoder.parameter_names(body)
    vocabulary = body.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(8, device=parameter.device).view(2, 4) + 5) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    training = {module: module.training for module in body.modules()}
    body.eval()
    state.mixing = decoder.mixing_modules(body)
    try:
        # Convolutions off the way of text (an audio tower's) are refused only if a batch comes by them.
        with rope.unchanged(body), hooks.attention_counted() as calls, decoder.mixing_refused(body, state.mixing):
            own = body(**batch).last_hidden_state
            state.attention_modules = len(set(calls))
            counted = own
            if takes_positions:
                positions = torch.arange(4, device=parameter.device)[None]
                counted = body(**batch, position_ids=positions).last_hidden_state
    except (IndexError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(body).__name__} fails on a plain batch of {tuple(ids.shape)} ids: {error}") from error
    finally:
        for module, flag in training.items():
            module.training = flag
    real = mask.bool()
    if takes_positions and torch.allclose(
        own[real], counted[real], rtol=1e-3, atol=1e-3 * float(own[real].abs().max())
    ):
        return
    state.numbers_itself = True
    if not numbering.modules_of(body):
        raise ValueError(
            f"{type(body).__name__} numbers its tokens in a way of its own (from ids, padding or lengths), which its "
            "shards cannot; not supported"
        )
