"""The plain model: from a folder or the hub, or at random from Hugging Face config fields.

Random weights are a function of `model.seed` and the dtype, not of the mesh: every rank draws all of them.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from longspan.config import ConfigError, ModelConfig

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def build_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, sequence_length: int) -> PreTrainedModel:
    """The plain model on the CPU; random weights depend on `model.seed` alone."""
    dtype = DTYPES[config.dtype]
    if bool(config.path) == bool(config.config):
        raise ConfigError("set exactly one of model.path and model.config")
    if config.path:
        if config.path.startswith((".", "/", "~")) and not Path(config.path).expanduser().exists():
            raise ConfigError(f"model.path = {config.path!r}: there is no such folder")
        path = os.path.expanduser(config.path)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path = {config.path!r}: {' '.join(str(error).split())}") from error
    else:
        model = _random_model(config, tokenizer, dtype, sequence_length)
    model.config.use_cache = False
    if dtype == torch.float64:
        model.loss_function = float64_loss
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and limit < sequence_length:
        log.warning("max_position_embeddings = %d is less than data.sequence_length = %d", limit, sequence_length)
    return model


def _random_model(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, sequence_length: int
) -> PreTrainedModel:
    fields = dict(config.config)
    kind = fields.pop("model_type", None)
    if not kind:
        raise ConfigError("model.config needs model_type, for example 'llama'")
    fields.setdefault("vocab_size", len(tokenizer))
    fields.setdefault("max_position_embeddings", sequence_length)
    fields.setdefault("bos_token_id", tokenizer.bos_token_id)
    fields.setdefault("eos_token_id", tokenizer.eos_token_id)
    fields.setdefault("pad_token_id", None)
    try:
        made = AutoConfig.for_model(kind, **fields)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            return AutoModelForCausalLM.from_config(made, dtype=dtype)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.config with model_type {kind!r}: {' '.join(str(error).split())}") from error


def float64_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: float | torch.Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The causal loss without the detour through float32 that transformers makes."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    total = nn.functional.cross_entropy(
        logits.reshape(-1, vocab_size), shift_labels.reshape(-1), ignore_index=ignore_index, reduction="sum"
    )
    return total / (num_items_in_batch if num_items_in_batch is not None else (shift_labels != ignore_index).sum())
