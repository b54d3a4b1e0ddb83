"""parallelize(): a Hugging Face decoder that takes whole batches and returns whole outputs, split underneath.

No code per architecture: the decoder is found by `get_decoder()`, attention and masks by the functions transformers
calls by name. What cannot be made equal to one rank raises, here or in the forward before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from longspan import layout as layouts
from longspan.attention import SCHEMES
from longspan.attention.plan import check_stages
from longspan.comm import ContextParallel
from longspan.models import causal_lm, decoder, hooks
from longspan.models.decoder import STATE, State

M = TypeVar("M", bound=nn.Module)
KERNELS = ("auto", "naive", "flash", "model")
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

__all__ = ["parallelize", "report", "suspended", "unparallelize"]


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
) -> M:
    """Adapts a Hugging Face model in place; returns the same object.

    Afterwards every rank of the group calls it with the same whole batch and gets whole outputs, in the order of the
    batch, and the whole loss. With a group of one rank nothing is installed.

    Args:
        mesh: the context-parallel group: `mesh["cp"]`, a process group, or None (one rank).
        scheme: "ulysses" (all-to-all over heads), "exchange" (fetch the keys that are needed) or "auto".
        layout: "contiguous", "head_tail", "per_document"; "auto" is per_document for packed batches, else head_tail.
        kernel: "flash", "naive", "auto", or, under ulysses, "model": the model's own attention function.
        logits: of a causal LM: "whole", "local" (this rank's rows), "none", or "auto": none while training with
            labels, else whole.
        stages: fetch stages of the exchange scheme, 1 .. size-1.
        gradient: "mean" where gradients are averaged over all ranks (DDP, FSDP), "sum" where they are summed.
        check_batch: compare a hash of every batch over the group.

    Raises ValueError for models and options that would not equal one rank.
    """
    cp = ContextParallel(mesh, gradient=gradient, check_batch=check_batch)
    _check_options(scheme, layout, kernel, logits, stages, cp)
    if getattr(model, STATE, None) is not None:
        raise ValueError("this model is parallelized already; call longspan.unparallelize(model) first")
    if cp.size == 1:
        return model
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"parallelize() adapts Hugging Face models, got {type(model).__name__}")
    body = model.get_decoder()
    causal = _is_causal_lm(model, body)
    _check_gradient(model, gradient, logits, causal=causal)
    _check_model(model, body)
    _check_positions(body)
    if causal:
        causal_lm.parent_of(model, body)
    original_backend = body.config._attn_implementation
    backend = hooks.register(original_backend)
    state = State(cp, scheme, layout, kernel, stages, logits, backend, original_backend)
    body.set_attn_implementation(backend)
    if body.config._attn_implementation != backend:
        raise ValueError(f"{type(body).__name__} does not let its attention function be set; it is not supported")
    # Nothing is refused from here on: a model is adapted whole or not at all.
    decoder.install(body, decoder.split_forward, state)
    if causal:
        decoder.install(model, causal_lm.split_forward, state)
    else:
        setattr(model, STATE, state)
    return model


def unparallelize(model: M) -> M:
    """Undoes parallelize(); a model that is not parallelized is returned as it is."""
    state: State | None = getattr(model, STATE, None)
    if state is None:
        return model
    body = model.get_decoder()  # type: ignore[operator]
    body.set_attn_implementation(state.original_backend)
    decoder.uninstall(body)
    if model is not body:
        decoder.uninstall(model)
    return model


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is the plain one again: whole sequence on every rank, bit for bit."""
    state: State | None = getattr(model, STATE, None)
    if state is None:
        yield
        return
    body = model.get_decoder()  # type: ignore[operator]
    before = body.config._attn_implementation
    body.set_attn_implementation(state.original_backend)
    try:
        with decoder.plainly(state):
            yield
    finally:
        body.set_attn_implementation(before)


def report(model: nn.Module) -> dict[str, Any]:
    """What this rank did in the last forward (bytes: and its backward, as far as it has run).

    tokens: rows times batch; pairs: attention pairs per head, summed over layers; bytes_sent; collectives; layout.
    Raises ValueError before the first forward, or for a model that is not split.
    """
    state: State | None = getattr(model, STATE, None)
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


def _check_options(
    scheme: str, layout: str, kernel: str, logits: str, stages: int | None, cp: ContextParallel
) -> None:
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


def _is_causal_lm(model: Any, body: nn.Module) -> bool:
    return model is not body and model.get_output_embeddings() is not None


def _check_model(model: PreTrainedModel, body: Any) -> None:
    """Refuses, by what config and modules tell, what would be silently different on shards."""
    config = body.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; only decoders are supported")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if others:
        raise ValueError(f"{name} has layers of type {', '.join(others)}, which mix tokens in ways not supported yet")
    for path, module in body.named_modules():
        if isinstance(module, nn.Conv1d | nn.RNNBase):
            raise ValueError(f"{name} mixes tokens in {path} ({type(module).__name__}), which is not supported yet")
    for rope in _rope_types(config):
        if rope in ("dynamic", "longrope"):
            raise ValueError(
                f"{name} has RoPE of type {rope!r}, whose angles depend on the longest position of the whole "
                "sequence; it is not supported yet"
            )
    if "position_ids" not in decoder.parameter_names(body):
        raise ValueError(f"{name} takes no position_ids, so its shards would count positions from 0; not supported")


@torch.no_grad()
def _check_positions(body: Any) -> None:
    """Refuses decoders that number tokens in a way of their own: shards are given 0, 1, 2, .. of the whole sequence.

    A probe of two short rows, one of them padded on the left: the plain decoder must answer the same with and without
    those positions. Weights on the meta device cannot answer; then nothing is checked.
    """
    parameter = next(body.parameters())
    if parameter.is_meta:
        return
    vocabulary = body.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(8, device=parameter.device).view(2, 4) + 5) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    training = {module: module.training for module in body.modules()}
    body.eval()
    try:
        own = body(**inputs).last_hidden_state
        counted = body(**inputs, position_ids=torch.arange(4, device=parameter.device)[None]).last_hidden_state
    except (IndexError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(body).__name__} fails on a plain batch of {tuple(ids.shape)} ids: {error}") from error
    finally:
        for module, flag in training.items():
            module.training = flag
    real = mask.bool()
    if not torch.allclose(own[real], counted[real], rtol=1e-3, atol=1e-3 * float(own[real].abs().max())):
        raise ValueError(
            f"{type(body).__name__} numbers its tokens in a way of its own (from ids, padding or lengths), which its "
            "shards cannot; not supported"
        )


def _rope_types(config: Any) -> set[str]:
    found: set[str] = set()
    for source in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        for entry in [source, *(source.values() if isinstance(source, dict) else ())]:
            if isinstance(entry, dict):
                found |= {str(entry[key]) for key in ("rope_type", "type") if key in entry}
    return found
