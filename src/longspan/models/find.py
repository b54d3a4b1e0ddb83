"""Which module of a Hugging Face model is its decoder, and which one of a wrapper is the model."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def model_within(model: Any) -> Any:
    """The Hugging Face model inside PEFT's, torch.compile's or DDP's wrapper; anything else is returned as it is."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model_within(model.module)
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        return model_within(model._orig_mod)
    if not isinstance(model, PreTrainedModel) and callable(getattr(model, "get_base_model", None)):
        return model_within(model.get_base_model())
    return model


def decoder_of(model: Any) -> Any:
    """The decoder: `get_decoder()`, looked through where that answers with a causal LM around the decoder, or with
    something that is no model. Raises ValueError where there is none."""
    found = model.get_decoder()
    if not isinstance(found, PreTrainedModel):  # e.g. an output layer that goes by the name of "decoder"
        found = model.base_model
    if found is not model and found.get_output_embeddings() is not None:
        return decoder_of(found)
    if found is model and model.get_output_embeddings() is not None:
        inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        if len(inner) != 1:
            raise ValueError(f"{type(model).__name__} does not tell which of its parts is the decoder")
        return decoder_of(inner[0])
    return found


def parent_of(model: nn.Module, decoder: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the decoder, and the name it goes by there."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is decoder:
                return parent, name
    raise ValueError(f"{type(decoder).__name__} is not a part of {type(model).__name__}")
