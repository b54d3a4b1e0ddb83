"""The context-parallel group: cutting whole tensors, gathering them again, and the exchanges between.

Every operation states its dual, so that gradients follow one convention. Context-parallel peers look to a trainer
like data-parallel ranks that hold the same batch: each returns the same whole loss, and the trainer averages
gradients over all its ranks. So a gradient that enters this rank's rows from a replicated whole is multiplied by the
group size (`gradient="mean"`; with `gradient="sum"`, for engines that sum, it is not):

    forward                                     backward                                       bytes sent per rank
    cut       whole -> own rows                 own rows -> whole, zeros elsewhere             0
    gather    own rows -> whole, source order   own rows of the gradient, times size           (size-1) * rows
    total     sum of scalars                    the gradient, times size                       a scalar
    to_heads  own rows, all heads ->            the transposed exchange; gradients of a head   rows * heads elsewhere
              all rows, some heads              sent to several ranks are summed
    to_rows   the transpose of to_heads         to_heads                                       the same

Nothing is padded in the model and any row count is legal. Sizes are equal on both sides of every exchange by
construction (they come from the one layout), because gloo aborts the process on a mismatch. Errors are agreed on
before the first collective of a call: `agree`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longspan import layout as layouts
from longspan.layout import Layout, Span

T = TypeVar("T")
Heads = Sequence[Span]  # per rank: which heads it gets

# Renamed in torch 2.13, which warns at the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

LENGTH_KEYS = ("input_ids", "inputs_embeds", "tokens", "position_ids", "labels")


@dataclass
class Traffic:
    """What one forward (and its backward) did on this rank."""

    bytes_sent: int = 0
    collectives: int = 0
    pairs: float = 0  # attention pairs computed, averaged over query heads, summed over layers and batch rows


@dataclass(frozen=True)
class ContextParallel:
    """A group of ranks that split each sequence, and how they split it.

    Args:
        mesh: a one-dimensional DeviceMesh (`mesh["cp"]`), a ProcessGroup, or None for a group of one.
        layout: "contiguous", "head_tail", "per_document", "balanced", or a `Layout` (then the length is fixed).
        gradient: "mean" where the trainer averages gradients over its ranks (DDP, FSDP), "sum" where it sums.
        check_batch: compare a hash of each whole batch over the group.
    """

    mesh: DeviceMesh | dist.ProcessGroup | None = None
    layout: str | Layout = "head_tail"
    gradient: Literal["mean", "sum"] = "mean"
    check_batch: bool = True
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.mesh, DeviceMesh) and self.mesh.ndim != 1:
            raise ValueError(f"a context-parallel mesh has one axis, got {self.mesh.mesh_dim_names}; pass mesh['cp']")
        if isinstance(self.layout, str) and self.layout not in layouts.NAMES:
            raise ValueError(f"unknown layout {self.layout!r}; choose one of {', '.join(layouts.NAMES)}")
        if isinstance(self.layout, Layout) and self.layout.size != self.size:
            raise ValueError(f"the layout is for {self.layout.size} ranks, the group has {self.size}")
        if self.gradient not in ("mean", "sum"):
            raise ValueError(f'gradient is "mean" or "sum", got {self.gradient!r}')

    # -- who and what ------------------------------------------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group() if isinstance(self.mesh, DeviceMesh) else self.mesh

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else dist.get_rank(self.group)

    @property
    def scale(self) -> int:
        """What a gradient of a replicated whole is multiplied by on its way into local rows."""
        return self.size if self.gradient == "mean" else 1

    @property
    def bound(self) -> Layout:
        """The layout of the current sequence. Raises ValueError where no length is known yet."""
        if isinstance(self.layout, str):
            raise ValueError("this ContextParallel has no length yet; use the one that cp.bind(length) returns")
        return self.layout

    def bind(
        self, length: int, boundaries: Iterable[int] = (), counts: Sequence[int] | layouts.Positions | None = None
    ) -> ContextParallel:
        """The same group with the layout of a sequence of `length` tokens, and with traffic counted from zero.
        `boundaries`: where documents begin. `counts`: visible keys of each position, for "balanced" (default: causal
        within the documents)."""
        if isinstance(self.layout, Layout):
            if self.layout.length != length:
                raise ValueError(f"the layout is for {self.layout.length} tokens, the sequence has {length}")
            return replace(self, traffic=Traffic())
        return replace(self, layout=layouts.make(self.layout, length, self.size, boundaries, counts), traffic=Traffic())

    def bind_rows(self, rows: int) -> ContextParallel:
        """Like `bind`, for callers who know only how many rows each rank holds: one tiny collective."""
        if isinstance(self.layout, Layout):
            return self
        self._check_length_is_enough()
        counts = self.all_gather_integers([rows])
        bound = replace(self, layout=layouts.make(self.layout, sum(c[0] for c in counts), self.size))
        if bound.bound.row_counts != tuple(c[0] for c in counts):
            raise ValueError(
                f"ranks hold {[c[0] for c in counts]} rows, the {self.layout} layout gives {bound.bound.row_counts}"
            )
        return bound

    def _check_length_is_enough(self) -> None:
        if self.layout in ("per_document", "balanced"):
            raise ValueError(f'"{self.layout}" depends on the batch: use cp.bind(length, boundaries) first')

    # -- agreement ---------------------------------------------------------------------------------------------

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """The values of every rank. Forward only."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64, device=self._device())
        every = mine.new_empty(self.size * len(values))
        _all_gather(every, mine, group=self.group)
        self.traffic.collectives += 1
        return every.view(self.size, -1).tolist()

    @torch._dynamo.disable
    def agree(self, check: Callable[[], T], inputs: Mapping[str, Any] | None = None, what: str = "batches") -> T:
        """Runs `check()` here, and raises the same ValueError on every rank if it raised on any, or if the ranks
        were given different `inputs` (compared by hash; skipped with check_batch=False). One tiny collective.
        `what` the inputs are is for the error."""
        error: Exception | None = None
        result: Any = None
        hashes: dict[str, int] = {}
        try:
            result = check()
            if inputs is not None and self.check_batch and self.size > 1:
                hashes = digest(inputs)
        except Exception as raised:  # noqa: BLE001 - agreed on with the peers, then raised
            error = raised
        if self.size == 1:
            if error is not None:
                raise error
            return result
        summary = zlib.crc32(repr(sorted(hashes.items())).encode())
        reports = self.all_gather_integers([int(error is not None), summary])
        failed = [rank for rank, (flag, _) in enumerate(reports) if flag]
        if failed:
            messages: list[str] = [""] * self.size
            said = "" if error is None else (str(error) or type(error).__name__)
            dist.all_gather_object(messages, said, group=self.group)
            if len(failed) == self.size and len(set(messages)) == 1 and isinstance(error, ValueError):
                raise error
            raise ValueError(f"context-parallel rank {failed[0]}: {messages[failed[0]]}") from error
        if any(report != reports[0] for report in reports):
            every: list[dict[str, int]] = [{} for _ in range(self.size)]
            dist.all_gather_object(every, hashes, group=self.group)
            keys = sorted({key for each in every for key in each})
            differing = [key for key in keys if len({each.get(key) for each in every}) > 1]
            ranks = [rank for rank, each in enumerate(every) if each != every[0]]
            raise ValueError(
                f"context-parallel ranks were given different {what}: {', '.join(differing)} on rank(s) {ranks} "
                f"differ from rank 0; every rank of a context-parallel group must get the same"
            )
        return result

    def first_failure(self, error: Exception, number: int) -> str | None:
        """For a rank that fails on its own in forward `number`: leaves the reason where peers find it. For one whose
        collective broke because of that: which peer failed first, and why; else None."""
        store = dist.distributed_c10d._get_default_store()
        place = f"longspan/{self.group.group_name}/{number}"  # type: ignore[union-attr]
        try:
            if isinstance(error, RuntimeError):
                for peer in range(self.size):
                    if peer != self.rank and store.check([f"{place}/{peer}"]):
                        reason = store.get(f"{place}/{peer}").decode()
                        return f"context-parallel rank {peer} failed in the forward: {reason}"
            store.set(f"{place}/{self.rank}", f"{type(error).__name__}: {error}")
        except (RuntimeError, OSError):  # the store went with the process that kept it
            pass
        return None

    def _device(self) -> torch.device:
        if dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    # -- whole <-> own rows ------------------------------------------------------------------------------------

    def cut(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a whole tensor, along `dim`. Differentiable."""
        if whole.shape[dim] != self.bound.length:
            raise ValueError(f"dimension {dim} has {whole.shape[dim]} tokens, the layout {self.bound.length}")
        return _cut(whole, self.bound.spans[self.rank], dim)

    def shard(self, tree: T, dim: int = 1) -> T:
        """This rank's part of a nested batch: every tensor that has a dimension `dim` is per token and is cut there
        by the one layout; everything else (numbers, strings, tensors of fewer dimensions) is passed through.

        `position_ids` of shape [3, B, S] are cut on their last dimension. Raises ValueError, on every rank, for a
        tensor whose length is not the sequence's, naming its key path and both lengths, for batches that differ
        between ranks, and for a layout that depends on more than the length and was not bound to it.
        """

        def check() -> ContextParallel:
            self._check_length_is_enough()
            lengths = {path: leaf.shape[at] for path, leaf, at in _per_token(tree, dim)}
            if not lengths:
                raise ValueError(f"nothing to shard: no tensor has a dimension {dim}")
            known = [path for key in LENGTH_KEYS for path in lengths if path.split(".")[-1] == key]
            first = known[0] if known else next(iter(lengths))
            for path, length in lengths.items():
                if length != lengths[first]:
                    raise ValueError(
                        f"{path} has {length} tokens in dimension {dim}, but {first} has {lengths[first]}; "
                        "keep tensors that are not per token out of shard()"
                    )
            return self.bind(lengths[first])

        bound = self.agree(check, {"batch": tree})
        return _map_tree(tree, lambda leaf, at: bound.cut(leaf, at), dim)

    def gather(self, local: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor in source order from every rank's rows. Differentiable: see the module's table."""
        cp = self.bind_rows(local.shape[dim])
        if local.shape[dim] != cp.bound.rows(cp.rank):
            raise ValueError(
                f"dimension {dim} has {local.shape[dim]} rows, rank {cp.rank} owns {cp.bound.rows(cp.rank)}"
            )
        return local if cp.size == 1 and len(cp.bound.spans[0]) < 2 else _Gather.apply(local, cp, dim)

    def total(self, value: Tensor) -> Tensor:
        """The sum of a scalar (or small tensor) over the group, the same on every rank. Differentiable."""
        return value if self.size == 1 else _Total.apply(value, self)

    # -- all rows x some heads ---------------------------------------------------------------------------------

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[Heads]) -> tuple[Tensor, ...]:
        """Own rows of all heads -> all rows of some heads, several tensors in one collective.

        tensors[i]: [B, H_i, rows, D_i]; heads[i][rank]: the span of heads that `rank` gets (spans may overlap, be
        empty, and differ in size). Returns [B, heads, S, D_i] in source order.
        """
        return _ToHeads.apply(self, tuple(tuple(h) for h in heads), *tensors)

    def to_rows(self, tensor: Tensor, heads: Heads) -> Tensor:
        """All rows of some heads -> own rows of all heads; `heads` must partition them. [B, H, rows, D]"""
        count = max((span.stop for span in heads), default=0)
        return _ToRows.apply(tensor, self, tuple(heads), count)

    # -- the raw exchange --------------------------------------------------------------------------------------

    def start_exchange(self, pieces: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]]) -> Pending:
        """Sends pieces[rank] to every rank and receives tensors of shapes[rank] from it, in one all-to-all that may
        still be in flight on return. All pieces share a dtype and a device. Not differentiable."""
        flat = [piece.reshape(-1) for row in pieces for piece in row]
        template = flat[0]
        counts_in = [sum(p.numel() for p in row) for row in pieces]
        counts_out = [sum(shape.numel() for shape in row) for row in shapes]
        sent = torch.cat(flat) if sum(counts_in) else template.new_empty(0)
        received = template.new_empty(sum(counts_out))
        work = dist.all_to_all_single(received, sent, counts_out, counts_in, group=self.group, async_op=True)
        self.traffic.collectives += 1
        self.traffic.bytes_sent += (sum(counts_in) - counts_in[self.rank]) * template.element_size()
        return Pending(work, sent, received, [list(row) for row in shapes])

    def reduce_gradients(self, module: nn.Module) -> None:
        """For training loops without DDP or FSDP: averages (or sums, by `gradient`) every parameter's gradient over
        the group, in place. A parameter without a gradient on this rank counts as zero if a peer has one."""
        if self.size == 1:
            return
        parameters = [p for p in module.parameters() if p.requires_grad]
        mine = [int(p.grad is not None) for p in parameters]
        have = [any(flags) for flags in zip(*self.all_gather_integers(mine))] if mine else []
        for parameter, wanted in zip(parameters, have):
            if not wanted:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.scale


@dataclass
class Pending:
    """An exchange in flight. `wait()` returns what came, by source rank, and may be called once."""

    work: Any
    sent: Tensor  # kept alive until the transfer is over
    received: Tensor
    shapes: list[list[torch.Size]]

    def wait(self) -> list[list[Tensor]]:
        self.work.wait()
        result, at = [], 0
        for row in self.shapes:
            tensors = []
            for shape in row:
                tensors.append(self.received[at : at + shape.numel()].view(shape))
                at += shape.numel()
            result.append(tensors)
        return result


# -- cutting and pasting spans ---------------------------------------------------------------------------------


def _cut(whole: Tensor, spans: Sequence[Span], dim: int) -> Tensor:
    if len(spans) == 1:
        return whole.narrow(dim, spans[0].start, spans[0].size)
    if not spans:
        return whole.narrow(dim, 0, 0)
    return torch.cat([whole.narrow(dim, span.start, span.size) for span in spans], dim)


def _paste(whole: Tensor, local: Tensor, spans: Sequence[Span], dim: int) -> None:
    row = 0
    for span in spans:
        whole.narrow(dim, span.start, span.size).copy_(local.narrow(dim, row, span.size))
        row += span.size


def _resized(shape: torch.Size, dim: int, size: int) -> torch.Size:
    sizes = list(shape)
    sizes[dim] = size
    return torch.Size(sizes)


class _Gather(torch.autograd.Function):
    """All-gather of uneven shards (padded to the longest for the wire); backward takes the own rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, cp: ContextParallel, dim: int) -> Tensor:
        ctx.cp, ctx.dim = cp, dim
        layout = cp.bound
        whole = local.new_empty(_resized(local.shape, dim, layout.length))
        if cp.size == 1:
            _paste(whole, local, layout.spans[0], dim)
            return whole
        longest = max(layout.row_counts)
        padded = local.new_zeros(_resized(local.shape, dim, longest))
        padded.narrow(dim, 0, local.shape[dim]).copy_(local)
        every = padded.new_empty((cp.size, *padded.shape))
        _all_gather(every.view(-1), padded.contiguous().view(-1), group=cp.group)
        cp.traffic.collectives += 1
        cp.traffic.bytes_sent += (cp.size - 1) * padded.numel() * padded.element_size()
        for rank in range(cp.size):
            _paste(whole, every[rank], layout.spans[rank], dim)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own = _cut(gradient, ctx.cp.bound.spans[ctx.cp.rank], ctx.dim)
        return own * ctx.cp.scale, None, None


class _Total(torch.autograd.Function):
    """Sum over ranks; the backward is local, because every rank computes the same loss from the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, cp: ContextParallel) -> Tensor:
        ctx.scale = cp.scale
        total = value.detach().clone()
        dist.all_reduce(total, group=cp.group)
        cp.traffic.collectives += 1
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * ctx.scale, None


def _send_heads(cp: ContextParallel, heads: Sequence[Heads], tensors: Sequence[Tensor]) -> list[Tensor]:
    layout = cp.bound
    pieces = [[t[:, h[rank].start : h[rank].stop] for t, h in zip(tensors, heads)] for rank in range(cp.size)]
    shapes = [
        [torch.Size((t.shape[0], h[cp.rank].size, layout.row_counts[rank], t.shape[3])) for t, h in zip(tensors, heads)]
        for rank in range(cp.size)
    ]
    arrived = cp.start_exchange(pieces, shapes).wait()
    result = []
    for i, (t, h) in enumerate(zip(tensors, heads)):
        whole = t.new_empty(t.shape[0], h[cp.rank].size, layout.length, t.shape[3])
        for rank in range(cp.size):
            _paste(whole, arrived[rank][i], layout.spans[rank], 2)
        result.append(whole)
    return result


def _send_rows(
    cp: ContextParallel, heads: Sequence[Heads], counts: Sequence[int], tensors: Sequence[Tensor]
) -> list[Tensor]:
    layout = cp.bound
    rows = layout.row_counts[cp.rank]
    pieces = [[_cut(t, layout.spans[rank], 2) for t in tensors] for rank in range(cp.size)]
    shapes = [
        [torch.Size((t.shape[0], h[rank].size, rows, t.shape[3])) for t, h in zip(tensors, heads)]
        for rank in range(cp.size)
    ]
    arrived = cp.start_exchange(pieces, shapes).wait()
    result = []
    for i, (t, h, count) in enumerate(zip(tensors, heads, counts)):
        disjoint = sum(span.size for span in h) == count
        # Heads that several ranks held come back once from each: summed in fp32 at least.
        wide = t.dtype if disjoint else torch.promote_types(t.dtype, torch.float32)
        own = torch.zeros(t.shape[0], count, rows, t.shape[3], dtype=wide, device=t.device)
        for rank in range(cp.size):
            own[:, h[rank].start : h[rank].stop] += arrived[rank][i]
        result.append(own.to(t.dtype))
    return result


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, heads: Sequence[Heads], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.cp, ctx.heads, ctx.counts = cp, heads, [t.shape[1] for t in tensors]
        return tuple(_send_heads(cp, heads, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_send_rows(ctx.cp, ctx.heads, ctx.counts, gradients))


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cp: ContextParallel, heads: Heads, count: int) -> Tensor:
        ctx.cp, ctx.heads = cp, heads
        return _send_rows(cp, [heads], [count], [tensor])[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _send_heads(ctx.cp, [ctx.heads], [gradient])[0], None, None, None


# -- nested batches --------------------------------------------------------------------------------------------


def _token_dim(path: str, leaf: Tensor, dim: int) -> int | None:
    """The dimension of a leaf that counts tokens, or None for a tensor that is not per token."""
    if path.split(".")[-1] == "position_ids" and leaf.ndim == 3 and dim in (1, -1):
        return 2
    at = dim if dim >= 0 else leaf.ndim + dim
    return at if 0 <= at < leaf.ndim else None


def leaves(tree: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Every leaf of nested mappings, lists and tuples, with its key path (`loss_kwargs.advantages`)."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{path}[{i}]")
    else:
        yield path, tree


def _per_token(tree: Any, dim: int) -> Iterable[tuple[str, Tensor, int]]:
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            at = _token_dim(path, leaf, dim)
            if at is not None:
                yield path, leaf, at


def _map_tree(tree: Any, change: Callable[[Tensor, int], Tensor], dim: int, path: str = "") -> Any:
    if isinstance(tree, Mapping):
        return {k: _map_tree(v, change, dim, f"{path}.{k}" if path else str(k)) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        items = [_map_tree(v, change, dim, f"{path}[{i}]") for i, v in enumerate(tree)]
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items)
    if isinstance(tree, Tensor):
        at = _token_dim(path, tree, dim)
        return tree if at is None else change(tree, at)
    return tree


def digest(tree: Any) -> dict[str, int]:
    """A hash of every leaf by key path: contents, shape and dtype of tensors, `repr` of plain values, and only the
    type of anything else."""
    hashes: dict[str, int] = {}
    tensors: list[tuple[str, Tensor, str]] = []
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            tensors.append((path, _tensor_hash(leaf), f"{tuple(leaf.shape)} {leaf.dtype}"))
        else:
            plain = isinstance(leaf, bool | int | float | str | bytes | type(None))
            hashes[path] = zlib.crc32((repr(leaf) if plain else type(leaf).__name__).encode())
    # Read only now, so that a device computes all of them before anyone waits for it.
    for path, value, kind in tensors:
        hashes[path] = zlib.crc32(f"{int(value)} {kind}".encode())
    return hashes


def _tensor_hash(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.is_floating_point():
        flat = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    values = flat.to(torch.int64)
    # Odd multipliers that differ by position, in wrapping arithmetic: order, swaps and shifts all change the sum.
    place = torch.arange(values.numel(), device=values.device) * 2 + 1
    mixed = (values + 0x9E3779B9) * (place * 0x2545F4914F6CDD1D)
    return (mixed ^ (mixed >> 29)).sum()
