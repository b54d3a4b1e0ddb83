"""The plain model: from a folder or the hub, or at random from Hugging Face config fields.

Random weights are a function of `model.seed` and the dtype, not of the mesh: every rank draws all of them.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from longspan.config import ConfigError, ModelConfig
from longspan.models.causal_lm import KNOWN_LOSSES
from longspan.scoring import causal_lm_loss

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
            model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path = {config.path!r}: {' '.join(str(error).split())}") from error
    else:
        model = _random_model(config, tokenizer, dtype, sequence_length)
    model.config.use_cache = False
    if dtype == torch.float64:
        model.loss_function = causal_lm_loss  # transformers' own narrows logits to float32
    _check_loss(model)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and limit < sequence_length:
        log.warning("max_position_embeddings = %d, and sequences may have %d tokens", limit, sequence_length)
    return model


def _check_loss(model: Any) -> None:
    """A step's loss is one sum over one count, so the model must divide by the count it is given."""
    if model.loss_function not in KNOWN_LOSSES or getattr(model, "accepts_loss_kwargs", None) is False:
        raise ConfigError(
            f"{type(model).__name__} computes a loss of its own, which may not divide by the targets of the whole "
            "step; longspan train needs the causal-LM loss of transformers"
        )


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
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), CONFIG_MAPPING.keys(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else f" ({len(CONFIG_MAPPING.keys())} types)"
        raise ConfigError(f"model.config.model_type = {kind!r} is none that transformers knows{hint}")
    try:
        _check_fields(kind, fields)
        made = AutoConfig.for_model(kind, **fields)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            return AutoModelForCausalLM.from_config(made, dtype=dtype)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        first = " ".join(str(error).split())
        raise ConfigError(f"model.config with model_type {kind!r}: {first[:300]}") from error


def _check_fields(kind: str, fields: dict[str, Any]) -> None:
    """transformers keeps any keyword as an attribute; a misspelt one would silently leave its default in force."""
    plain: Any = CONFIG_MAPPING[kind]
    known = {*plain().to_dict(), *inspect.signature(plain).parameters, *getattr(plain, "attribute_map", {})}
    for name in sorted(set(fields) - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"model.config.{name} is no field of a {kind} configuration{hint}")
