"""The group: cutting and gathering whole batches, the gradient convention, agreement on errors."""

import time

import pytest
import torch
import torch.distributed as dist

from longspan.comm import ContextParallel, digest


def group():
    return dist.group.WORLD


def body_roundtrip():
    fine = []
    size = dist.get_world_size()
    for name in ("contiguous", "head_tail", "per_document"):
        for length in (0, 1, 3, size * 4, 37):
            cp = ContextParallel(group(), layout=name).bind(length, [0, length // 2])
            whole = torch.arange(2 * length * 3, dtype=torch.float64).view(2, length, 3).requires_grad_()
            local = cp.cut(whole, 1)
            again = cp.gather(local, 1)
            fine.append(torch.equal(again, whole) and local.shape[1] == cp.bound.rows(cp.rank))
            weights = torch.randn(2, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            (again * weights).sum().backward()
            total = whole.grad.clone()
            dist.all_reduce(total)
            fine.append(torch.allclose(total / size, weights))  # averaged over ranks: the plain gradient
    unbound = ContextParallel(group(), layout="head_tail")
    x = torch.randn(1, 13, 2, generator=torch.Generator().manual_seed(2))
    fine.append(torch.equal(unbound.gather(unbound.bind(13).cut(x)), x))
    return fine


@pytest.mark.parametrize("size", [2, 3, 4])
def test_cut_and_gather_round_trip_with_the_plain_gradient(run_ranks, size):
    assert all(all(fine) for fine in run_ranks(body_roundtrip, size))


def body_total(gradient):
    cp = ContextParallel(group(), gradient=gradient)
    x = torch.tensor(float(cp.rank + 1), dtype=torch.float64, requires_grad=True)
    loss = cp.total(x * x) * 3
    loss.backward()
    return float(loss.detach()), float(x.grad)


def test_total(run_ranks):
    assert run_ranks(body_total, 2, "mean") == [(15.0, 12.0), (15.0, 24.0)]
    assert run_ranks(body_total, 2, "sum") == [(15.0, 6.0), (15.0, 12.0)]


def body_shard():
    length = 11
    tree = {
        "input_ids": torch.arange(2 * length).view(2, length),
        "position_ids": torch.arange(3 * 2 * length).view(3, 2, length),
        "loss_kwargs": {"advantages": torch.randn(2, length), "temperature": 0.7, "names": ["a", "b"]},
        "lengths": torch.tensor([5, 6]),
        "pair": (torch.ones(2, length, 4), None),
    }
    cp = ContextParallel(group(), layout="head_tail")
    torch.manual_seed(0)
    tree["loss_kwargs"]["advantages"] = torch.randn(2, length)
    local = cp.shard(tree)
    bound = cp.bind(length)
    positions = torch.from_numpy(bound.bound.positions(cp.rank))
    fine = torch.equal(local["input_ids"], tree["input_ids"][:, positions])
    fine &= torch.equal(local["position_ids"], tree["position_ids"][..., positions])
    fine &= torch.equal(local["loss_kwargs"]["advantages"], tree["loss_kwargs"]["advantages"][:, positions])
    fine &= local["loss_kwargs"]["temperature"] == 0.7 and local["loss_kwargs"]["names"] == ["a", "b"]
    fine &= torch.equal(local["lengths"], tree["lengths"]) and local["pair"][1] is None
    fine &= local["pair"][0].shape == (2, len(positions), 4)
    total = local["loss_kwargs"]["advantages"].sum()
    dist.all_reduce(total)
    fine &= bool(torch.isclose(total, tree["loss_kwargs"]["advantages"].sum(), atol=1e-5))
    return fine


def test_shard_nested(run_ranks):
    assert all(run_ranks(body_shard, 2))


def message(call):
    start = time.monotonic()
    try:
        call()
    except ValueError as raised:
        return str(raised), time.monotonic() - start
    return "accepted", time.monotonic() - start


def body_disagree():
    cp = ContextParallel(group())
    ids = torch.arange(12).view(1, 12)
    longer = {"input_ids": ids, "loss_kwargs": {"advantages": torch.ones(1, 13)}}
    on_one = {"input_ids": ids[:, :11] if cp.rank == 1 else ids, "mask": torch.ones(1, 12)}
    other = {"input_ids": ids + (cp.rank == 1)}
    shapes = {"input_ids": ids[:, : 12 - cp.rank]}
    loose = ContextParallel(group(), check_batch=False)
    return [
        message(lambda: cp.shard(longer)),
        message(lambda: cp.shard(on_one)),
        message(lambda: cp.shard(other)),
        message(lambda: cp.shard(shapes)),
        message(lambda: loose.shard(other)),
        message(lambda: cp.shard({"x": torch.ones(3)})),
        message(lambda: cp.shard({"input_ids": ids})),
    ]


def test_bad_batches_raise_the_same_on_every_rank_at_once(run_ranks):
    results = run_ranks(body_disagree, 2)
    texts = [[text for text, _ in each] for each in results]
    assert texts[0] == texts[1]
    assert all(seconds < 1 for each in results for _, seconds in each)
    wrong_length, on_one, other, shapes, loose, nothing, fine = texts[0]
    assert "loss_kwargs.advantages has 13 tokens" in wrong_length and "input_ids has 12" in wrong_length
    assert "rank 1" in on_one and "mask has 12" in on_one
    assert "different batches: batch.input_ids on rank(s) [1]" in other
    assert "different batches: batch.input_ids" in shapes
    assert loose == fine == "accepted"
    assert "nothing to shard" in nothing


def test_digest_sees_every_change():
    x = torch.arange(100)
    seen = {str(digest({"x": x}))}
    swapped = x.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    for change in (swapped, x + 1, x.view(10, 10), x.int(), x.float(), x.flip(0), x.roll(1), x.bool()):
        seen.add(str(digest({"x": change})))
    assert len(seen) == 9
    assert digest({"a": [1, "b", None]}) == digest({"a": [1, "b", None]}) != digest({"a": [1, "c", None]})
    assert digest({"e": torch.ones(0)}) != digest({"e": torch.ones(0, 3)})


def test_refusals_without_a_group():
    with pytest.raises(ValueError, match="unknown layout"):
        ContextParallel(None, layout="zigzag")
    with pytest.raises(ValueError, match="no length yet"):
        ContextParallel(None).cut(torch.ones(1, 4))
    with pytest.raises(ValueError, match="mean"):
        ContextParallel(None, gradient="both")
