"""Data parallelism around a model whose cp peers look like replicas that hold the same batch.

Every rank, cp peers included, averages its gradients with every other: FSDP2 shards each decoder block and the root
over the flattened dp x cp mesh, DDP replicates over the world, `none` is one rank alone. Embeddings, final norm and
head stay together in the root group, unsharded until the backward is through: tied weights are one parameter there,
and the head can be called once per chunk of tokens.

bf16 means: compute in bf16, keep weights and reduce gradients in fp32. FSDP2 casts what it gathers; the others run
the forward under autocast.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from longspan.config import ConfigError
from longspan.engine.mesh import local_device


def wrap_model(model: PreTrainedModel, mesh: DeviceMesh, *, wrap: str = "auto", precision: str = "full") -> nn.Module:
    """The module to call and to hand to the optimizer; `model` itself is adapted in place."""
    world = dist.get_world_size()
    wrap = resolve_wrap(wrap)
    if precision == "bf16" and model.dtype == torch.float64:
        raise ConfigError("train.precision = 'bf16' with model.dtype = 'float64': use float32 master weights")
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    if wrap == "none" or (wrap == "ddp" and frozen):
        if world > 1 and not frozen:
            raise ConfigError(
                f"parallel.wrap = 'none' on {world} ranks: nothing would average gradients; use fsdp or ddp"
            )
        return nn.Module.to(model, local_device())
    if wrap == "ddp":
        device = local_device()
        ids = [device.index] if device.type == "cuda" else None
        known = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.13
        options: dict[str, Any] = {"device_ids": ids, "gradient_as_bucket_view": True, name: False}
        return DistributedDataParallel(nn.Module.to(model, device), **options)
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    # Inputs are left alone. With bf16 weights a model makes its own activations bf16, as it does where it is bf16
    # throughout; FSDP's cast would also narrow what it keeps in float32, and it copies every dataclass on its way.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32 if precision == "bf16" or model.dtype == torch.bfloat16 else None,
        cast_forward_inputs=False,
    )
    for block in decoder_blocks(model):
        fully_shard(block, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy, reshard_after_forward=False)
    return model


def resolve_wrap(wrap: str) -> str:
    """`auto` is `none` on one rank and `fsdp` otherwise."""
    if wrap != "auto":
        return wrap
    return "none" if dist.get_world_size() == 1 else "fsdp"


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the decoder: the outermost list of modules that has one per hidden layer."""
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return list(module)
    raise ConfigError(f"{type(model).__name__} has no list of {layers} layers to shard; use parallel.wrap = 'ddp'")


def compute(module: nn.Module, precision: str) -> AbstractContextManager:
    """The context of a forward."""
    if precision == "bf16" and not isinstance(module, FSDPModule):
        return torch.autocast(local_device().type, dtype=torch.bfloat16)
    return nullcontext()


def synchronise(module: nn.Module, *, last: bool) -> AbstractContextManager:
    """The context of a micro-batch: gradients travel in the last one only."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        return nullcontext()
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return nullcontext()


def forget_unreduced(module: nn.Module) -> None:
    """Throws away gradients of micro-batches that were not the last, which FSDP2 keeps unsharded until one is. There is
    no public name for them; tests/test_api.py tells when torch has changed these."""
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        group: Any = part._get_fsdp_state()._fsdp_param_group  # type: ignore[no-untyped-call]
        for each in () if group is None else group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
