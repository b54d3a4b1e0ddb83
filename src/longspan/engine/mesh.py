"""The mesh of ranks: axes ("dp", "cp"), dp outermost, so that the ranks of one cp group are neighbours.

Where the world comes from, in this order: a process group that already exists; `LONGSPAN_RENDEZVOUS`, torchrun or
any launcher that sets RANK and WORLD_SIZE; a SLURM step with several tasks; else a world of this one process, over
an in-memory store, with no port.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan.config import ConfigError


def init_mesh(
    dp: int = 0, cp: int = 1, *, init_method: str | None = None, timeout_seconds: float = 600.0
) -> DeviceMesh:
    """A mesh with axes ("dp", "cp") over the whole world; `dp = 0` means whatever the world size leaves.

    Starts torch.distributed if nothing has: nccl (with gloo for CPU tensors) when there is CUDA, else gloo.
    """
    if not dist.is_initialized():
        _start(init_method, timedelta(seconds=timeout_seconds))
    world = dist.get_world_size()
    if cp < 1 or dp < 0:
        raise ConfigError(f"mesh.dp={dp}, mesh.cp={cp}: cp must be at least 1 and dp at least 0")
    if dp == 0:
        if world % cp:
            raise ConfigError(
                f"mesh.cp={cp} does not divide the world size {world}; start a multiple of {cp} ranks or change mesh.cp"
            )
        dp = world // cp
    if dp * cp != world:
        raise ConfigError(
            f"mesh.dp={dp} times mesh.cp={cp} is {dp * cp} ranks, but the world size is {world}; "
            f"start {dp * cp} ranks, or set mesh.dp=0"
        )
    return init_device_mesh(device_type(), (dp, cp), mesh_dim_names=("dp", "cp"))


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_device() -> torch.device:
    """This rank's device; on CUDA the one chosen by LOCAL_RANK."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def local_world_size() -> int:
    """Ranks on this node, as the launcher says; without a launcher every rank is taken to be on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()


def gather_vector(values: list[float]) -> torch.Tensor:
    """[ranks, len(values)] in float64 on the CPU: every rank's `values`, the same on all ranks."""
    mine = torch.tensor(values, dtype=torch.float64, device=local_device())
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).cpu()


def _start(init_method: str | None, timeout: timedelta) -> None:
    _adopt_slurm(os.environ)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    dist.init_process_group(
        backend,
        init_method=init_method or os.environ.get("LONGSPAN_RENDEZVOUS") or "env://",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )


def _adopt_slurm(environ: os._Environ[str] | dict[str, str]) -> None:
    """Under `srun`, fills in the variables torchrun would have set."""
    # SLURM_STEP_NUM_TASKS is set by srun only: a batch script that runs python by itself stays a world of one.
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in environ or tasks < 2:
        return
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = str(tasks)
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    # "4(x2),3" counts tasks per node, in the order of the nodes.
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    per_node = [int(count) for count, repeat in counts for _ in range(int(repeat or 1))]
    node = int(environ.get("SLURM_NODEID", "0"))
    if node < len(per_node):
        environ["LOCAL_WORLD_SIZE"] = str(per_node[node])
    environ.setdefault("MASTER_ADDR", _first_node(environ.get("SLURM_STEP_NODELIST", "localhost")))
    environ.setdefault("MASTER_PORT", str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000))


def _first_node(nodes: str) -> str:
    """The first name of a SLURM list: "gpu[03-07,9],login" gives "gpu03"."""
    match = re.match(r"([^\[,]+)(?:\[([^\]\-,]+)[^\]]*\]([^,]*))?", nodes)
    return nodes if match is None else "".join(part or "" for part in match.groups())
