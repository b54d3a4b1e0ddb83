"""AdamW, its schedule, and clipping by the norm of the whole gradient.

The learning rate is a function of the step, so a schedule has no state to save:

    step <= warmup:  lr * step / warmup
    after it:        from lr down to final_lr_ratio * lr, reached at the last step; cosine or linear

The norm is taken over local shards, `sqrt(sum over ranks of sum of squares)` in float64: every rank gets the same
number, and the one a single rank would get.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from longspan.config import OptimizerConfig


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Two groups: matrices decay, vectors (norms, biases) do not."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=all(parameter.device.type in ("cpu", "cuda") for parameter in parameters),
    )


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of step 1 .. steps."""
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    first = max(config.warmup_steps, 1)
    done = min(max(step - first, 0) / max(steps - first, 1), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(module: nn.Module) -> float:
    """The 2-norm of the whole gradient, the same on all ranks."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    locals_ = _local(gradients)
    if not locals_:
        return 0.0
    narrow = locals_[0].dtype.itemsize < 4
    found = torch._foreach_norm(locals_, 2, dtype=torch.float32 if narrow else None)
    norms = torch.stack([norm.double() for norm in found])
    squares = norms.square()
    sharded = torch.tensor([isinstance(gradient, DTensor) for gradient in gradients], device=squares.device)
    total = squares[sharded].sum()
    if sharded.any():
        dist.all_reduce(total)
    return float((total + squares[~sharded].sum()).sqrt())


def scale_gradients(module: nn.Module, factor: float) -> None:
    locals_ = _local([parameter.grad for parameter in module.parameters() if parameter.grad is not None])
    if locals_ and factor != 1.0:
        torch._foreach_mul_(locals_, factor)


def _local(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
