"""A model's configuration, small, with its structure kept.

Kept: layer types and their order, windows and chunks (shortened to bite), sinks, softcaps, RoPE types, expert routing,
tied weights, the ratio of query to key heads (up to 4). Made small: widths, depths, vocabulary, experts. Made zero:
dropout and jitter, which no split could equal. Works by what a field is called: transformers' configs name things
alike, and `attribute_map` gives the common names of those that do not.

All widths shrink by one factor and all head widths by another, so that what must fit together still does.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 128
SPECIAL = 24  # ids at the end of the small vocabulary that only special tokens use
LENGTH = 256  # of the position tables
WINDOW = 8
CHUNK = 16
EXPERTS = 4
MOST_LAYERS = 6

_DROPOUT = re.compile(r"drop(out|_path|_rate|_prob)?s?(_p|_prob|_rate)?$|_drop$|pdrop$|layerdrop|jitter|dropout")
_HEADS = re.compile(r"(^|_)(n|num)_.*heads?$|(^|_)n_heads?$|_heads$|^num_heads$|attention_heads")
_HEAD_WIDTH = re.compile(r"head_dim$|^d_head$|^head_dim|_head_size$|kv_channels|dim_head$|^rotary_dim$|^d_kv$")
_WINDOW = re.compile(
    r"^sliding_window(_size)?$|^window_size$|^local_attention$|attention_window|local_attention_window_len"
)
_LAYERS = re.compile(r"^(num|n)_.*layers$|_layers$|^num_layers_per_stack$")
_NOT_LAYERS = re.compile(r"shared_layers|dense_layers|every_n_layers|per_layer|window_layers|rope_layers|predict|nextn")
_EXPERTS = re.compile(r"^(n_routed|num|num_local|moe_num|n)_experts$|^zero_expert_num$")
_TOP_EXPERTS = re.compile(r"experts_per_tok(en)?$|^moe_top_?k$|^moe_k$|^top_k_experts$")
_WIDTH = re.compile(
    r"(hidden|intermediate|embedding|embed|ffn|ff|feed_forward|projection|d_model|n_embd|n_inner|width|channels|dff|rel)"
    r"(_?(size|dim|width|s))?(_mlp|_dim)?$|_size$|_dim$|^d_model$|^n_embd$|^n_inner$|^d_ff$|^dff$|^dim_ff$|^d_rel$"
)
_NOT_WIDTH = re.compile(
    r"vocab|chunk_size|patch_size|image_size|block_size|conv_kernel|kernel_size|block_|type_|ngram|multiple|state|"
    r"hash|dim_model_base|per_step|temporal|merge_size|stack_size|compress|audio_chunk|batch_size|group_size|sampl"
)
_RANK = re.compile(r"_rank$|_lora_rank|^time_step_rank$|lowrank$")
_TOKEN = re.compile(r"_token_(id|index)$|_token$|^(boi|eoi|boa|eoa|bos|eos|pad)_token|_token_ids?$")
# Fields that some classes leave open, and that every checkpoint of theirs fills in.
_LEFT_OPEN = {"num_experts_per_tok": 2, "n_routed_experts": EXPERTS, "num_experts": EXPERTS, "n_shared_experts": 1,
              "n_group": 1, "topk_group": 1}  # fmt: skip
_POSITIONS = re.compile(r"max_position|^n_positions$|^n_ctx$|^max_seq_len$|max_length$|seq_length$|max_sequence_length")


@dataclass(frozen=True)
class Scale:
    """How one decoder's numbers shrink. `heads` is (query, key) before and after."""

    heads: tuple[int, int]
    small_heads: tuple[int, int]
    head_width: int  # divisor of every head width
    width: tuple[int, int]  # before, after
    layers: tuple[int, ...]  # of the original, which are kept
    count: int  # of layers in the original


def is_dropout(name: str) -> bool:
    """Whether a field of a configuration is a probability of dropout or an amount of jitter, by its name."""
    return _DROPOUT.search(name) is not None


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """A small configuration of the same kind; the original is left alone. Raises whatever the config's own class
    raises where it does not accept the result."""
    fields = _shrink(config, None)
    small = type(config)(**fields)
    small._attn_implementation = config._attn_implementation
    return small


def _shrink(config: PreTrainedConfig, outer: Scale | None) -> dict[str, Any]:
    fields = {k: v for k, v in copy.deepcopy(config.to_dict()).items() if k not in ("transformers_version", "dtype")}
    common = {own: name for name, own in (getattr(config, "attribute_map", None) or {}).items() if own in fields}
    scale = _scale(config) or outer
    subs = set(getattr(config, "sub_configs", None) or ())
    taken: set[int] = set()
    small: dict[str, Any] = {}
    for own, value in fields.items():
        if own in ("id2label", "label2id", "architectures", "model_type", "auto_map"):
            continue
        if own == "loss_type" and value is None:  # would be warned of as a type that nobody knows
            continue
        sub = config.__dict__.get(own)
        if isinstance(sub, PreTrainedConfig):
            small[own] = _shrink(sub, scale)
        elif own in subs and value is None:
            small[own] = None
        else:
            small[own] = _small(own, common.get(own, own), value, scale, taken)
    if "model_type" in fields and outer is not None:
        small["model_type"] = fields["model_type"]
    _mend(small, {name: own for own, name in common.items()}, scale)
    return small


def _get(config: PreTrainedConfig, *names: str) -> Any:
    """The first of these fields (or common names) that is a positive integer. Read from the instance: some configs
    raise where a value differs between layers."""
    common = getattr(config, "attribute_map", None) or {}
    for name in names:
        value = config.__dict__.get(common.get(name, name))
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _scale(config: PreTrainedConfig) -> Scale | None:
    """How this config shrinks; None if it has no attention of its own (then its outer config says)."""
    heads = _get(config, "num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads")
    width = _get(config, "hidden_size", "d_model", "n_embd", "dim")
    if heads is None or width is None:
        return None
    key_heads = _get(config, "num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads") or heads
    key_heads = math.gcd(heads, key_heads)
    ratio = heads // key_heads
    small_keys = 1 if key_heads == 1 and heads > 1 else (4 if ratio == 1 else 2)
    small_keys = min(small_keys, key_heads)
    small_heads = small_keys * min(ratio, 4)
    values = [v for k in _head_width_fields(config) if (v := _get(config, k))]
    every = values or [max(1, width // heads)]
    aim = 8 if _get(config, "kv_lora_rank", "qk_rope_head_dim") else 16
    divisor = max((d for d in range(1, min(every) + 1) if all(v % d == 0 and v // d % 2 == 0 for v in every)
                   and min(every) // d >= aim), default=1)  # fmt: skip
    main = (_get(config, "head_dim", "v_head_dim") or max(1, width // heads)) // divisor
    small_width = small_heads * main if width == heads * main * divisor else max(64, small_heads * main)
    layers, count = _kept_layers(config)
    return Scale((heads, key_heads), (small_heads, small_keys), divisor, (width, small_width), layers, count)


def _head_width_fields(config: PreTrainedConfig) -> list[str]:
    return [k for k in config.to_dict() if _HEAD_WIDTH.search(k) and not re.match(r"linear_|mamba_|index_|swa_", k)]


def _kept_layers(config: PreTrainedConfig) -> tuple[tuple[int, ...], int]:
    """One layer of each kind, in order of appearance, at least two; twice that where layers share keys."""
    count = _get(config, "num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers") or 2
    lists = [
        v
        for v in config.to_dict().values()
        if isinstance(v, list) and len(v) == count and all(isinstance(e, str | int | bool | float) for e in v)
    ]
    first, middle = _get(config, "n_input_layers"), _get(config, "n_recurrent_layers")
    if first and middle:  # three stacks, of which the middle one is run several times: one layer of each
        return (0, first, first + middle), count
    kinds: list[Any] = [tuple(v[i] for v in lists if len(set(v)) <= 4) for i in range(count)]
    kept: list[int] = []
    for i in range(count):
        if kinds[i] not in [kinds[j] for j in kept] and len(kept) < MOST_LAYERS:
            kept.append(i)
    if len(kept) < 2 and count > 1:
        kept.append(kept[-1] + 1)
    if _get(config, "num_kv_shared_layers"):
        kept = kept + kept
    return tuple(kept), count


def _small(own: str, name: str, value: Any, scale: Scale | None, taken: set[int]) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return _small_mapping(own, value, scale)
    if isinstance(value, list | tuple):
        return _small_list(own, name, list(value), scale, taken)
    if isinstance(value, float):
        return 0.0 if _DROPOUT.search(own) and value > 0 else _small_float(own, value)
    if not isinstance(value, int):
        return value
    return _small_integer(own, name, value, scale, taken)


def _small_float(own: str, value: float) -> float:
    return 0.1 if own in ("initializer_range", "init_std", "initializer_factor") else value


def _small_integer(own: str, name: str, value: int, scale: Scale | None, taken: set[int]) -> int:
    names = (own, name)

    def called(pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(n) for n in names)

    if called(_DROPOUT):
        return 0
    if called(_TOKEN):
        return _small_token(value, taken)
    if re.search(r"vocab", own) and value > VOCABULARY:
        return VOCABULARY
    if called(_POSITIONS):
        return min(value, LENGTH)
    if called(_WINDOW):
        return min(value, WINDOW)
    if own == "attention_chunk_size":
        return min(value, CHUNK)
    if called(_EXPERTS):
        return min(value, EXPERTS)
    if called(_TOP_EXPERTS):
        return min(value, 2)
    if own in ("n_group", "num_expert_group"):
        return min(value, 2)
    if own in ("topk_group",):
        return 1
    if called(_RANK):
        return min(value, 16)
    if re.match(r"index_(topk|block)", own):
        return min(value, 8)
    if re.match(r"linear_num_|index_n_heads|mamba_(n|num)_heads|linear_num_heads", own):
        return min(value, 4 if "value" in own or "mamba" in own else 2)
    if re.match(r"(linear|index|mamba|swa_mamba)_.*(head_dim|d_head)$", own):
        return min(value, 16)
    if own in ("conv_L_cache", "d_conv", "conv_kernel"):
        return value
    if scale is not None and called(_HEAD_WIDTH) and value > 0:
        return value // scale.head_width if value % scale.head_width == 0 else max(8, value * 16 // 128)
    if scale is not None and called(_HEADS) and not called(_NOT_WIDTH):
        return _small_heads(own, value, scale)
    if re.match(r"n_(input|recurrent|output)_layers", own):
        return 1
    if called(_LAYERS) and not called(_NOT_LAYERS):
        return len(scale.layers) if scale is not None and value == scale.count else min(value, 2)
    if own == "num_kv_shared_layers":
        return min(value, len(scale.layers) // 2) if scale is not None else value
    if re.search(r"first_k_dense|num_dense_layers|moe_layer_start", own):
        return min(value, 1)
    if re.search(r"layer_period$", own):
        return min(value, 2)
    if re.search(r"layer_offset$", own):
        return min(value, 1)
    if called(_WIDTH) and not called(_NOT_WIDTH) and value > 32:
        return _small_width(value, scale)
    if re.search(r"_state$|state_size", own):
        return min(value, 16)
    if re.search(r"chunk_size", own) and value > 0:
        return min(value, CHUNK)
    return value


def _small_token(value: int, taken: set[int]) -> int:
    if value < VOCABULARY - SPECIAL:
        return value
    free = next(i for i in range(VOCABULARY - 1, 0, -1) if i not in taken)
    taken.add(free)
    return free


def _small_heads(own: str, value: int, scale: Scale) -> int:
    (heads, keys), (small_heads, small_keys) = scale.heads, scale.small_heads
    if re.search(r"key_value|kv", own):
        return small_keys if value == keys else max(1, min(value, small_keys))
    if value == heads:
        return small_heads
    # another number of query heads: a multiple of the key heads, other than the main one where it was
    return small_keys * max(1, min(value // keys, 6)) if value % keys == 0 else min(value, small_heads)


def _small_width(value: int, scale: Scale | None) -> int:
    if scale is None:
        return min(value, 64)
    before, after = scale.width
    if value * after % (before * 8) == 0:
        return value * after // before
    return max(16, -(-value * after // (before * 8)) * 8)


def _small_list(own: str, name: str, value: list[Any], scale: Scale | None, taken: set[int]) -> list[Any]:
    if scale is not None and len(value) == scale.count and scale.count > 2:
        return [_small(own, name, value[i], scale, taken) if _is_integer(value[i]) else value[i] for i in scale.layers]
    if own == "attention_types" and scale is not None:  # gpt_neo: [[kinds, repeats]]
        return [[value[0][0], max(1, len(scale.layers) // len(value[0][0]))]]
    if re.search(r"(_layers|_ids|_idxs)$", own) and scale is not None and all(isinstance(v, int) for v in value):
        if _TOKEN.search(own):
            return [_small_token(v, taken) for v in value]
        return [scale.layers.index(v) for v in value if v in scale.layers]
    return [_small(own, name, v, scale, taken) if _is_integer(v) else v for v in value]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _small_mapping(own: str, value: Mapping[Any, Any], scale: Scale | None) -> dict[Any, Any]:
    if own == "per_layer_config" and scale is not None:
        kept = {int(k): v for k, v in value.items()}
        return {
            i: {k: _small(k, k, v, scale, set()) for k, v in kept[layer].items()}
            for i, layer in enumerate(scale.layers)
            if layer in kept
        }
    result: dict[Any, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            result[key] = _small_mapping(key, entry, scale)
        elif key == "original_max_position_embeddings":
            result[key] = min(int(entry), 32)
        elif key == "mrope_section" and scale is not None:
            result[key] = [max(1, v // scale.head_width) for v in entry]
        elif key in ("short_factor", "long_factor") and scale is not None:
            result[key] = list(entry)[: max(1, len(entry) // scale.head_width)]
        else:
            result[key] = entry
    return result


def _mend(small: dict[str, Any], own: Mapping[str, str], scale: Scale | None) -> None:
    """What must hold between fields."""
    if small.get("pad_token_id") is not None and small["pad_token_id"] < 0:
        small["pad_token_id"] = None
    for name, filled in _LEFT_OPEN.items():
        if own.get(name, name) in small and small[own.get(name, name)] is None:
            small[own.get(name, name)] = filled
    if scale is not None and "head_dim" in small and small["head_dim"] is None:
        small["head_dim"] = scale.width[1] // scale.small_heads[0]
    if "default_language" in small and small["default_language"] is None:
        small["default_language"] = small["languages"][0]
    if scale is not None and "num_key_value_heads" in small and small["num_key_value_heads"] is None:
        small["num_key_value_heads"] = scale.small_heads[0]
    if "kv_n_heads" in small:
        small.setdefault("rope_theta", 1e4)
        small["clip_qkv"] = small.get("clip_qkv") or 8.0
    if small.get("rope_parameters") == {} and small.get("layer_types"):
        small["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in small["layer_types"]}
    heads = scale.small_heads[0] if scale is not None else 0
    rope = small.get("rope_parameters")
    if scale is not None and isinstance(rope, dict) and "rope_type" in rope and "mrope_section" not in rope:
        # Models of text and images have three rows of positions, and by default sections for their full head width.
        half = int(_main_width(small, scale) * rope.get("partial_rotary_factor", 1.0)) // 2
        if half >= 3:
            rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    experts = next((small[k] for k in small if _EXPERTS.search(k) and isinstance(small[k], int)), None)
    if experts is not None and small.get("topk_group") and small.get("n_group", 1) == 1:
        small["topk_group"] = 1
    if "qk_head_dim" in small and "qk_nope_head_dim" in small:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if "mamba_d_head" in small and "mamba_expand" in small and scale is not None:
        small["mamba_n_heads"] = small["mamba_expand"] * scale.width[1] // small["mamba_d_head"]
    if scale is not None and heads and "multi_query_group_num" in small:
        small["multi_query_group_num"] = scale.small_heads[1]


def _main_width(small: Mapping[str, Any], scale: Scale) -> int:
    """The width of a head in the small configuration."""
    return int(small.get("head_dim") or scale.width[1] // scale.small_heads[0])
