"""Kernels that need a GPU: their calls are checked here as far as shapes and schemas go, on the meta device."""

import pytest
import torch

from longspan import kernels
from longspan.kernels import CPU_FLASH, CUDA_FLASH, NAIVE, Block, choose


@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (20, 12)])
def test_cuda_flash_calls_fit_torchs_schema(width, value_width):
    q = torch.empty(2, 8, 16, width, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 2, 16, width, device="meta", dtype=torch.bfloat16)
    v = torch.empty(2, 2, 16, value_width, device="meta", dtype=torch.bfloat16)
    out, lse = CUDA_FLASH.forward(q, k, v, Block(scale=0.1, causal=True))
    assert out.shape == (2, 8, 16, value_width) and lse.shape == (2, 8, 16)
    dq, dk, dv = CUDA_FLASH.backward(torch.empty_like(out), q, k, v, out, lse, Block(scale=0.1, causal=True))
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_flash_equals_naive(causal):
    torch.manual_seed(0)
    q, gradient = (torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = CUDA_FLASH.forward(q, k, v, Block(scale=0.125, causal=causal))
    truth, lse_truth = NAIVE.forward(*(t.float() for t in (q, k, v)), Block(scale=0.125, causal=causal))
    assert (out.float() - truth).abs().max() < 2e-2 and (lse - lse_truth).abs().max() < 1e-2
    found = CUDA_FLASH.backward(gradient, q, k, v, out, lse, Block(scale=0.125, causal=causal))
    wanted = NAIVE.backward(
        *(t.float() for t in (gradient, q, k, v)), truth, lse_truth, Block(scale=0.125, causal=causal)
    )
    for a, b in zip(found, wanted):
        assert (a.float() - b).norm() / b.norm() < 2e-2


def test_bf16_pieces_merge_as_well_as_one_kernel():
    """The error of merged bf16 pieces against fp32 is that of one bf16 kernel: merges are in fp32."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 256, 32) for _ in range(3))
    truth, _ = NAIVE.forward(q, k, v, Block(scale=0.18))
    half = [t.bfloat16() for t in (q, k, v)]
    whole, _ = CPU_FLASH.forward(*half, Block(scale=0.18))
    out, lse = torch.zeros(1, 4, 256, 32), torch.full((1, 4, 256), -torch.inf)
    for start in range(0, 256, 32):
        part = slice(start, start + 32)
        keys, values = half[1][:, :, part], half[2][:, :, part]
        kernels.merge_(out, lse, *CPU_FLASH.forward(half[0], keys, values, Block(scale=0.18)))
    error_whole, error_merged = (float((x.float() - truth).norm()) for x in (whole, out.bfloat16()))
    assert error_merged <= 1.1 * error_whole


def test_choosing_is_explicit():
    q = torch.empty(1, 2, 4, 8)
    assert choose("auto", q, softcap=None) is CPU_FLASH and choose("auto", q, softcap=2.0) is NAIVE
    meta = torch.empty(1, 2, 4, 8, device="meta")
    assert choose("auto", meta, softcap=None) is NAIVE
    with pytest.raises(ValueError, match="no flash kernel"):
        choose("flash", meta, softcap=None)
