"""Small models whose faults show: initializer_range 0.1, odd ratios, every feature on."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 512, "vocab_size": 96, "initializer_range": 0.1}
CONFIGS = {
    "llama": COMMON,
    "qwen3": {**COMMON, "head_dim": 8},
    "mistral": {**COMMON, "sliding_window": 8},
    "gemma3_text": {
        **COMMON,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
    },
    "gemma2": {
        **COMMON,
        "head_dim": 8,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 32,
        "_attn_implementation": "eager",
    },
    "gpt2": {**GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": {
        **COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 1.0,
    },
    "seed_oss": {**COMMON, "head_dim": 8, "residual_dropout": 0.0, "attention_dropout": 0.0},
    "gpt_oss": {
        **COMMON,
        "head_dim": 8,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "_attn_implementation": "eager",
    },
}


def build(kind, dtype=torch.float32, **changes):
    """The same weights on every call."""
    fields = {**CONFIGS[kind], **changes}
    backend = fields.pop("_attn_implementation", "sdpa")
    config = AutoConfig.for_model(kind, **fields)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=backend).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def batch(rows=2, length=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (rows, length), generator=generator)


def gradients(model):
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(found, truth):
    """The largest relative norm of a difference over parameters. A gradient below 1e-3 of the largest is compared on
    that scale: some are zero but for rounding (queries that see one key), and noise has no relative error."""
    if set(found) != set(truth):
        raise AssertionError(f"gradients missing: {sorted(set(found) ^ set(truth))}")
    floor = 1e-3 * max(float(reference.norm()) for reference in truth.values())
    worst = 0.0
    for name, reference in truth.items():
        difference = float((found[name].to(reference) - reference).norm())
        relative = difference / max(float(reference.norm()), floor, 1e-30)
        worst = max(worst, relative if math.isfinite(relative) else math.inf)  # max() would lose a NaN
    return worst


class Largest(TorchDispatchMode):
    """The largest number of elements any op returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def refusal(call):
    """The message of the ValueError that `call` raises."""
    try:
        call()
    except ValueError as raised:
        return str(raised)
    return "accepted"
