"""Attention of one block on one rank, as forward/backward pairs, and the merge of blocks.

    forward(q, k, v, block)                       -> out, lse
    backward(gradient, q, k, v, out, lse, block)  -> dq, dk, dv

q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], out [B, H, Sq, Dv] in the dtype of q; lse [B, H, Sq] in fp32
(fp64 for fp64), the natural logarithm of the sum of exponentials, -inf for a query that sees no key. Hkv divides H.
The backward takes the *merged* out and lse of all blocks. With P = exp(S - lse) and delta = sum(gradient * out),
dS = P * (gradient V^T - delta) needs nothing else from the other blocks (Dao et al., FlashAttention-2, 2023, sec. 2).
Autograd must not differentiate the merge instead: the library kernels' lse carries no gradient, and the result would
be a right output with wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES_AT_ONCE = 2**22  # elements of a score tile in the naive kernel, per batch row and head


@dataclass(frozen=True, kw_only=True)
class Block:
    """What to compute: softmax over S = softcap(scale * q k^T), where visible."""

    scale: float
    softcap: float | None = None  # S -> softcap * tanh(S / softcap)
    mask: Tensor | None = None  # bool [Sq, Sk], True where visible; None: everything
    causal: bool = False  # for squares, Sq = Sk


@dataclass(frozen=True)
class Kernel:
    """A forward/backward pair. `masks`: takes a mask; `softcaps`: takes a softcap."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    masks: bool
    softcaps: bool


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64 inputs, else fp32."""
    return torch.promote_types(dtype, torch.float32)


# -- naive -----------------------------------------------------------------------------------------------------


def _query_tiles(q: Tensor, k: Tensor) -> range:
    return range(0, q.shape[2], max(1, SCORES_AT_ONCE // max(1, k.shape[2])))


def _scores(q: Tensor, k: Tensor, start: int, block: Block) -> tuple[Tensor, Tensor | None]:
    """Scores [B, Hkv, G, Sq, Sk] of the queries from `start` on, and tanh(S / softcap) where there is a softcap."""
    scores = torch.einsum("bngqd,bnkd->bngqk", q, k) * block.scale
    squashed = None
    if block.softcap is not None:
        squashed = torch.tanh(scores / block.softcap)
        scores = squashed * block.softcap
    if block.causal:
        rows = torch.arange(start, start + q.shape[3], device=q.device)
        seen = rows[:, None] >= torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
    if block.mask is not None:
        scores = scores.masked_fill(~block.mask[start : start + q.shape[3]], -torch.inf)
    return scores, squashed


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, S, D] -> [B, Hkv, H / Hkv, S, D]"""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def naive_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Any mask, softcap and dtype, in fp32 at least; queries in tiles, so that no whole S x S tensor exists."""
    wide = accumulator(q.dtype)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
    k_wide, v_wide = k.to(wide), v.to(wide)
    for start in (tiles := _query_tiles(q, k)):
        rows = slice(start, start + tiles.step)
        q_tile = _grouped(q[:, :, rows].to(wide), k.shape[1])
        scores, _ = _scores(q_tile, k_wide, start, block)
        lse_tile = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse_tile.masked_fill(lse_tile == -torch.inf, 0.0)[..., None])
        out[:, :, rows] = torch.einsum("bngqk,bnkd->bngqd", weights, v_wide).flatten(1, 2).to(q.dtype)
        lse[:, :, rows] = lse_tile.flatten(1, 2)
    return out, lse


def naive_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """The dual of `naive_forward`, from the merged out and lse."""
    wide = accumulator(q.dtype)
    k_wide, v_wide = k.to(wide), v.to(wide)
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k_wide), torch.zeros_like(v_wide)
    for start in (tiles := _query_tiles(q, k)):
        rows = slice(start, start + tiles.step)
        q_tile, g_tile, o_tile = (_grouped(x[:, :, rows].to(wide), k.shape[1]) for x in (q, gradient, out))
        lse_tile = lse[:, :, rows].unflatten(1, (k.shape[1], -1))
        scores, squashed = _scores(q_tile, k_wide, start, block)
        weights = torch.exp(scores - lse_tile.masked_fill(lse_tile == -torch.inf, 0.0)[..., None])
        dv += torch.einsum("bngqk,bngqd->bnkd", weights, g_tile)
        delta = (g_tile * o_tile).sum(-1, keepdim=True)
        dscores = weights * (torch.einsum("bngqd,bnkd->bngqk", g_tile, v_wide) - delta)
        if squashed is not None:
            dscores = dscores * (1 - squashed * squashed)
        dscores = dscores * block.scale
        dq[:, :, rows] = torch.einsum("bngqk,bnkd->bngqd", dscores, k_wide).flatten(1, 2).to(q.dtype)
        dk += torch.einsum("bngqk,bngqd->bnkd", dscores, q_tile)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


NAIVE = Kernel("naive", naive_forward, naive_backward, masks=True, softcaps=True)


# -- flash on CPU ----------------------------------------------------------------------------------------------


def _widen(*tensors: Tensor, multiple: int = 1) -> list[Tensor]:
    """torch's flash ops want one width for keys and values, CUDA's a multiple of 8: pads the last dimension with zeros
    (which change neither scores nor the values that are kept)."""
    width = max(t.shape[-1] for t in tensors)
    width += -width % multiple
    return [t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    # Boolean masks are refused by the op; the additive one must have the dtype of the queries.
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[None, None]


def _without_keys(mask: Tensor | None) -> Tensor | None:
    """Queries that see no key of the block, as [Sq], or None where there are none."""
    if mask is None:
        return None
    blind = ~mask.any(-1)
    return blind if bool(blind.any()) else None


def cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """torch's `_scaled_dot_product_flash_attention_for_cpu`. A fully masked row comes back with lse 0: set to -inf."""
    q_wide, k_wide, v_wide = _widen(q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_wide, k_wide, v_wide, 0.0, block.causal, attn_mask=_additive(block.mask, q.dtype), scale=block.scale
    )
    out = out[..., : v.shape[-1]]
    blind = _without_keys(block.mask)
    if blind is not None:
        out, lse = out.clone(), lse.clone()
        out[:, :, blind] = 0
        lse[:, :, blind] = -torch.inf
    return out, lse


def cpu_flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """The op's backward, which accepts the merged out and lse."""
    q_wide, k_wide, v_wide, gradient, out = _widen(q, k, v, gradient, out)
    if block.mask is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # exp(-inf - 0) = 0; -inf - -inf would be NaN
    mask = _additive(block.mask, q.dtype)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q_wide, k_wide, v_wide, out, lse, 0.0, block.causal, attn_mask=mask, scale=block.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


CPU_FLASH = Kernel("flash", cpu_flash_forward, cpu_flash_backward, masks=True, softcaps=False)


# -- flash on CUDA ---------------------------------------------------------------------------------------------


def cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """torch's own FlashAttention (fp16 and bf16)."""
    q_wide, k_wide, v_wide = _widen(q, k, v, multiple=8)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q_wide, *_same_heads(q, k_wide, v_wide), 0.0, block.causal, False, scale=block.scale
    )
    return out[..., : v.shape[-1]], lse


def cuda_flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """The op's backward, from the merged out and lse; the random state is unused without dropout."""
    q_wide, k_wide, v_wide, gradient, out = _widen(q, k, v, gradient, out, multiple=8)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    nothing = torch.empty(0, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        gradient, q_wide, *_same_heads(q, k_wide, v_wide), out.contiguous(), lse.contiguous(),
        None, None, q.shape[2], k.shape[2], 0.0, block.causal, seed, nothing, scale=block.scale,
    )  # fmt: skip
    dk, dv = (d.unflatten(1, (k.shape[1], -1)).sum(2) for d in (dk, dv))
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # The aten op is documented for equal head counts only, so keys are repeated for it.
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


CUDA_FLASH = Kernel("flash", cuda_flash_forward, cuda_flash_backward, masks=False, softcaps=False)


# -- choosing --------------------------------------------------------------------------------------------------


def choose(name: str, q: Tensor, *, softcap: float | None) -> Kernel:
    """The kernel called `name` ("auto", "naive", "flash") for these queries.

    "auto" is flash where there is one for the device and dtype and no softcap, else naive. An explicit "flash" that
    cannot be had raises ValueError with the reason.
    """
    if name == "naive":
        return NAIVE
    if name not in ("auto", "flash"):
        raise ValueError(f"unknown kernel {name!r}; choose one of auto, naive, flash (or model, under ulysses)")
    if softcap is not None:
        if name == "flash":
            raise ValueError(f"the flash kernels of torch have no softcap ({softcap}); use kernel='naive'")
        return NAIVE
    if q.device.type == "cpu":
        return CPU_FLASH
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cuda" and half and q.shape[-1] <= 256:
        return CUDA_FLASH
    if name == "flash":
        raise ValueError(
            f"no flash kernel for {q.dtype} with width {q.shape[-1]} on {q.device.type}: CUDA's takes fp16 and bf16 "
            "up to width 256; use kernel='naive'"
        )
    return NAIVE


def for_block(kernel: Kernel, mask: Tensor | None) -> Kernel:
    """A kernel without masks leaves PARTIAL blocks to the naive one."""
    return kernel if mask is None or kernel.masks else NAIVE


# -- the merge -------------------------------------------------------------------------------------------------


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges a block into `out` and `lse` in place: lse' = logaddexp(lse, lse_b), out' = out + w (out_b - out) with
    w = exp(lse_b - lse') = sigmoid(lse_b - lse). Rows that neither has seen stay (0, -inf)."""
    weight = torch.sigmoid_(block_lse - lse)
    weight.nan_to_num_(nan=0.0)  # -inf against -inf: nothing seen on either side
    out.lerp_(block_out.to(out.dtype), weight[..., None])
    torch.logaddexp(lse, block_lse, out=lse)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention sinks are one more key per head that has a score and no value (Xiao et al., 2023; gpt-oss):
    lse' = logaddexp(lse, sink), out' = out * exp(lse - lse'). sinks: [H]."""
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return out * torch.exp(lse - with_sinks)[..., None].to(out.dtype), with_sinks


def sinks_backward(gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """d loss / d sinks [H], from the final out and lse: -sum over rows of exp(sink - lse) * (gradient . out)."""
    delta = (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    probability = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)
