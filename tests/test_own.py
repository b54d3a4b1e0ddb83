"""parallelize(plan=..): models of one's own equal one rank in outputs and every gradient, or are refused everywhere."""

import copy
import gc
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import longspan
from longspan import ContextParallel
from tiny import gradient_error, gradients, refusal

PLAN = {"trunk": "split_sequence", "trunk.layers.*.attn": "attention"}
VOCABULARY, WIDTH, HEADS, HEAD = 50, 32, 8, 4


def rotated(x, positions):
    """x [B, H, rows, D], positions [1, rows]."""
    angle = positions[:, None, :, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1)


class Dense(nn.Module):
    """Attention written out, with a softcap; k and v may have fewer heads."""

    def forward(self, q, k, v, is_causal=True, softcap=None, scale=None, bias=None):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, kind, kv_heads):
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)
        self.core = Dense()
        self.kv_heads = kv_heads

    def forward(self, x, positions, mask=None):
        parts = self.qkv(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        q, k, v = parts.split([HEADS, self.kv_heads, self.kv_heads], 1)
        q, k = rotated(q, positions), rotated(k, positions)
        grouped = self.kv_heads != HEADS
        if self.kind == "flex":
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        elif self.kind == "core":
            y = self.core(q, k, v, softcap=2.0)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.kind == "causal", enable_gqa=grouped)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, kind, kv_heads):
        super().__init__()
        self.attn = Attention(kind, kv_heads)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x, positions, mask=None):
        x = x + self.attn(self.norm(x), positions, mask)
        return x + self.mlp(x)


class Trunk(nn.Module):
    def __init__(self, kind, kv_heads, reentrant):
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind, kv_heads) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.reentrant = reentrant

    def forward(self, x, positions, mask=None):
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x, positions, mask)
            else:
                x = checkpoint(layer, x, positions, mask, use_reentrant=self.reentrant)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, kind, kv_heads=HEADS, reentrant=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = Trunk(kind, kv_heads, reentrant)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, mask=None):
        positions = torch.arange(ids.shape[1])[None]
        return self.head(self.trunk(self.embed(ids), positions, mask))


def built(kind, **options):
    torch.manual_seed(3)
    model = Model(kind, **options).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.3)
    return model


def tokens(length, rows=2, seed=0):
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model, ids, mask=None):
    out = model(ids, mask)
    return out, F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) if ids.shape[
        1
    ] > 1 else out.sin().sum()


def truth_of(model, ids, mask=None):
    out, loss = loss_of(model, ids, mask)
    loss.backward()
    return out.detach(), gradients(model)


def error(split, plain, ids, mask=None, plain_mask=None):
    """The largest difference of outputs and gradients; split is a parallelized model."""
    truth = truth_of(plain, ids, mask if plain_mask is None else plain_mask)
    out, loss = loss_of(split, ids, mask)
    loss.backward()
    ContextParallel(dist.group.WORLD).reduce_gradients(split)
    return max(float((out - truth[0]).abs().max()), gradient_error(gradients(split), truth[1]))


def parallel(model, plan=PLAN, **options):
    return longspan.parallelize(model, dist.group.WORLD, plan=plan, **options)


# -- equal to one rank -----------------------------------------------------------------------------------------


def windowed(b, h, q, k):
    return (q >= k) & (q - k < 5)


def dense(mask_mod, length, rows):
    at = torch.arange(length)
    return torch.stack([mask_mod(torch.tensor(b), 0, at[:, None], at[None]) for b in range(rows)])[:, None]


def body_equal(scheme, layout):
    warnings.simplefilter("ignore")
    found = {}
    for kind, kv_heads in (("causal", 8), ("causal", 2), ("both", 4), ("core", 8), ("core", 4)):
        plan = {**PLAN, "trunk.layers.*.attn": scheme}
        if kind == "core":
            plan = {"trunk": "split_sequence", "trunk.layers.*.attn.core": scheme}
        for length in (61, 3) if kind == "causal" else (17, 1):
            split = parallel(built(kind, kv_heads=kv_heads), plan, layout=layout)
            found[kind, kv_heads, length] = error(split, built(kind, kv_heads=kv_heads), tokens(length))
    for length in (29, 2):
        ids = tokens(length)
        documents = (torch.arange(length)[None] > torch.tensor([[length // 2], [length // 3]])).long()

        def packed(b, h, q, k, documents=documents):
            return (q >= k) & (documents[b, q] == documents[b, k])

        split = parallel(built("flex", kv_heads=4), {**PLAN, "trunk.layers.*.attn": scheme}, layout=layout)
        for name, mask_mod, batch in (("window", windowed, None), ("packed", packed, 2)):
            block_mask = create_block_mask(mask_mod, batch, None, length, length, device="cpu")
            whole = dense(mask_mod, length, 2)
            split.zero_grad()
            found["flex", name, length] = error(split, built("both", kv_heads=4), ids, block_mask, whole)
        masked = parallel(built("both"), {**PLAN, "trunk.layers.*.attn": scheme}, layout=layout)
        for whole in (dense(windowed, length, 1)[0, 0], dense(windowed, length, 1), dense(packed, length, 2)):
            if tuple(whole.shape) == (2, 2):
                continue  # also flags of two rows, and refused
            masked.zero_grad()
            found["mask", tuple(whole.shape)] = error(masked, built("both"), ids, whole)
    return found


@pytest.mark.parametrize("size, scheme, layout", [
    (2, "ulysses", "head_tail"), (2, "exchange", "contiguous"), (4, "ulysses", "contiguous"), (4, "exchange", "auto"),
])  # fmt: skip
def test_outputs_and_gradients_equal_one_rank(run_ranks, size, scheme, layout):
    for found in run_ranks(body_equal, size, scheme, layout):
        assert not {key: value for key, value in found.items() if not value <= 1e-10}


def backward_of(losses, together):
    for loss in [sum(losses)] if together else losses:
        loss.backward()


def body_recomputed():
    """Activation checkpointing; two forwards, of as many rows here, wait for their backward at the same time."""
    found, kept = {}, {}
    for reentrant in (True, False):
        for together in (True, False):
            plain, split = (built("causal", kv_heads=4, reentrant=reentrant) for _ in range(2))
            parallel(split, scheme="exchange", layout="contiguous")
            batches = [tokens(13, seed=1), tokens(14, seed=2), tokens(13, seed=3)]
            for model in (plain, split):
                backward_of([loss_of(model, ids)[1] for ids in batches], together)
            ContextParallel(dist.group.WORLD).reduce_gradients(split)
            found[reentrant, together] = gradient_error(gradients(split), gradients(plain))
            gc.collect()
            state = split._longspan
            kept[reentrant, together] = sum(call() is not None for call in state.calls)
            plain.zero_grad()
            split.zero_grad()
            with longspan.suspended(split):
                loss = loss_of(split, batches[0])[1]
            loss.backward()  # recomputed plainly
            truth = truth_of(plain, batches[0])
            found[reentrant, together, "suspended"] = gradient_error(gradients(split), truth[1])
    # masks are looked up in the backward, when nothing else holds them
    plain, split = built("both", reentrant=False), parallel(built("both", reentrant=False), scheme="exchange")
    found["mask"] = error(split, plain, tokens(13), dense(windowed, 13, 1))
    return found, kept


def test_recomputation_finds_its_forward(run_ranks):
    for found, kept in run_ranks(body_recomputed, 2):
        assert not {key: value for key, value in found.items() if not value <= 1e-10}
        assert set(kept.values()) == {0}


class Outer(nn.Module):
    """Checkpoints the split module itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.inside = built("causal")
        self.reentrant = reentrant

    def forward(self, ids, mask=None):
        x = self.inside.embed(ids)
        return self.inside.head(
            checkpoint(self.inside.trunk, x, torch.arange(ids.shape[1])[None], use_reentrant=self.reentrant)
        )


def body_wrapped():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    ids = tokens(13)
    for reentrant in (True, False):
        plan = {"inside.trunk": "split_sequence", "inside.trunk.layers.*.attn": "attention"}
        found["outer", reentrant] = error(parallel(Outer(reentrant), plan), Outer(reentrant), ids)
        truth = truth_of(built("causal"), ids)[1]
        for wrap in ("ddp", "fsdp"):
            model = parallel(built("causal", reentrant=reentrant))
            if wrap == "fsdp":
                for layer in model.trunk.layers:
                    fully_shard(layer)
            wrapped = fully_shard(model) if wrap == "fsdp" else DistributedDataParallel(model)
            loss_of(wrapped, ids)[1].backward()
            grads = {name: g.full_tensor() if wrap == "fsdp" else g for name, g in gradients(model).items()}
            found[wrap, reentrant] = gradient_error(grads, truth)
    with torch.inference_mode():
        masked, mask = parallel(built("both")), dense(windowed, 13, 1)
        found["inference"] = float((masked(ids, mask) - built("both")(ids, mask)).abs().max())
    return found


def test_under_ddp_fsdp_and_whole_checkpoints(run_ranks):
    for found in run_ranks(body_wrapped, 2):
        assert not {key: value for key, value in found.items() if not value <= 1e-10}


# -- what a plan can say ---------------------------------------------------------------------------------------


class Whole(nn.Module):
    """Everything in one module, which is its own trunk; its head works on whole tensors after a gather."""

    def __init__(self):
        super().__init__()
        self.inside = built("causal", kv_heads=4)

    def forward(self, ids, rope, labels):
        x = self.inside.trunk(self.inside.embed(ids), rope["positions"])
        return self.inside.head(x).mean((1, 2)).square().sum()


def one_stage(module, context):
    def around(context, forward, /, *args, **kwargs):
        call = context.call()  # None where the model is suspended
        stages.append(1 if call is None else call.cp.size)
        return context.attention(forward, args, kwargs, scheme="exchange", stages=1)

    context.wrap(around)
    return lambda module: stages.clear()


stages = []


def body_plans():
    found = {}
    ids = tokens(13)
    # "" is the root; arguments nest; the output is a scalar made of whole tensors
    plain, split = Whole().double(), Whole().double()
    plan = {"": "split_sequence", "inside.trunk.norm": "gather", "inside.*.layers.?.attn": "ulysses"}
    parallel(split, plan)
    arguments = {"rope": {"positions": torch.arange(13)[None]}, "labels": None}
    losses = [model(ids, **arguments) for model in (plain, split)]
    for loss in losses:
        loss.backward()
    losses = [loss.detach() for loss in losses]
    longspan.unparallelize(split)
    ContextParallel(dist.group.WORLD).reduce_gradients(split)
    found["gather"] = abs(float(losses[0] - losses[1])) + gradient_error(gradients(split), gradients(plain))
    # several words; a user's style; the whole trunk as the attention module
    longspan.register_style("one_stage", one_stage)
    longspan.register_style("one_stage", one_stage)
    split = parallel(built("causal"), {"trunk": ["split_sequence", "gather", "one_stage"]}, layout="contiguous")
    found["style"] = error(split, built("causal"), ids)
    found["style ran"] = 0.0 if stages and set(stages) <= {1, dist.get_world_size()} else 1.0
    # copies work on the copy, in their own time
    copied = copy.deepcopy(split)
    with torch.no_grad():
        copied.head.weight.mul_(2)
    copied.zero_grad()
    plain = built("causal")
    with torch.no_grad():
        plain.head.weight.mul_(2)
    found["copy"] = error(copied, plain, ids)
    # the plain model again
    report = longspan.report(split)
    plain = built("causal")
    with longspan.suspended(split), longspan.suspended(split):
        same = torch.equal(split(ids), plain(ids))
    found["suspended"] = 0.0 if same else 1.0
    gc.collect()  # models of other tests
    longspan.unparallelize(split)
    longspan.unparallelize(copied)
    installed = [name for module in split.modules() for name in vars(module) if "longspan" in name or name == "forward"]
    clean = flex_module.flex_attention is own_attention_flex() and flex_attention is flex_module.flex_attention
    found["undone"] = 0.0 if torch.equal(split(ids), plain(ids)) else 1.0
    found["left behind"] = len(installed) + len(stages) + (not clean)
    # mixed precision
    split = parallel(built("causal").float())
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = float((split(ids) - built("causal").float()(ids)).abs().max() > 0.5)
    return found, report["tokens"], report["bytes_sent"], report["pairs"]


def own_attention_flex():
    from longspan.models import own_attention

    return own_attention.flex_attention


def test_plans_styles_copies_and_undoing(run_ranks):
    results = run_ranks(body_plans, 2)
    for found, *_ in results:
        assert not {key: value for key, value in found.items() if not value <= 1e-10}
    assert sum(tokens for _, tokens, *_ in results) == 2 * 13
    assert all(sent > 0 and pairs > 0 for *_, sent, pairs in results)


def test_one_rank_installs_nothing():
    model = built("causal")
    assert longspan.parallelize(model, None, plan=PLAN) is model
    assert not [name for module in model.modules() for name in vars(module) if "longspan" in name]
    with pytest.raises(ValueError, match="no module of Model is called 'trunc'"):
        longspan.parallelize(model, None, plan={"trunc": "split_sequence"})


# -- refused ---------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A trunk of one line, with a planned attention module `attn`."""

    def __init__(self, line, **children):
        super().__init__()
        self.line = line
        self.attn = Planned()
        self.scale = nn.Parameter(torch.ones(32))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x, positions=None, mask=None):
        return self.line(self, x * self.scale, positions, mask)


class Planned(nn.Module):
    def forward(self, x, function=F.scaled_dot_product_attention, *args, **kwargs):
        h = heads(x)
        return function(h, h, h, *args, **kwargs).transpose(1, 2).flatten(2)


def heads(x):
    return x.unflatten(-1, (8, 4)).transpose(1, 2)


def core(m, x, **options):
    h = heads(x)
    return m.core(h, h, h, **options).transpose(1, 2).flatten(2)


def by_hand(x):
    h = heads(x)
    return (torch.softmax(h @ h.mT, -1) @ h).transpose(1, 2).flatten(2)


def tril(x, dtype=torch.bool):
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().to(dtype)


def multi_head(x):
    w = torch.eye(32)
    return F.multi_head_attention_forward(
        x, x, x, 32, 8, w.repeat(3, 1), None, None, None, False, 0.0, w, None, need_weights=False
    )[0]


HIDDEN = {"flex": flex_attention}
CORE = Dense()
KEEP = {"bias": torch.ones(1)}
REFUSED_LINES = {
    "numbers tokens by itself .*torch.arange at .*test_own.py": lambda m, x, p, _: (
        x + torch.arange(x.shape[1])[:, None]
    ),
    "the input of norm is not what it is on one rank": lambda m, x, p, _: m.norm(by_hand(x)),
    "output of the root is not what": lambda m, x, p, _: x - x.mean(1, keepdim=True),
    "the q of attn is not what": lambda m, x, p, _: m.attn(
        x, lambda q, k, v: F.scaled_dot_product_attention(q + torch.arange(q.shape[2])[:, None], k, v)
    ),
    "scaled_dot_product_attention outside of the modules": lambda m, x, p, _: Planned()(x),
    "flex_attention outside of the modules": lambda m, x, p, _: Planned()(x, flex_attention),
    "drew random numbers": lambda m, x, p, _: m.attn(x) + torch.rand(1) * 0,
    "nn.MultiheadAttention, which longspan": lambda m, x, p, _: multi_head(x),
    "mask that is not": lambda m, x, p, _: m.attn(x, F.scaled_dot_product_attention, tril(x)),
    "adds a mask of torch.float32": lambda m, x, p, _: m.attn(x, F.scaled_dot_product_attention, tril(x, x.dtype)),
    "both a mask and": lambda m, x, p, k: m.attn(x, F.scaled_dot_product_attention, k, is_causal=True),
    "dropout 0.5": lambda m, x, p, _: m.attn(x, F.scaled_dot_product_attention, None, 0.5),
    "gives flex_attention score_mod": lambda m, x, p, _: m.attn(x, flex_attention, lambda s, *at: s * 2),
    "gives flex_attention kernel_options": lambda m, x, p, _: m.attn(x, flex_attention, kernel_options={"BLOCK_M": 16}),
    "block_mask for each of 8 heads": lambda m, x, p, _: m.attn(
        x, flex_attention, None, create_block_mask(lambda b, h, q, k: q >= k, None, 8, 13, 13, device="cpu")
    ),
    "block_mask that is not of the whole": lambda m, x, p, _: m.attn(
        x, flex_attention, None, create_block_mask(lambda b, h, q, k: q >= k, None, None, 5, 5, device="cpu")
    ),
    "other than .batch, heads, rows, width.": lambda m, x, p, _: m.attn(x[:, :2]),
    "neither calls": lambda m, x, p, _: m.attn(x, lambda q, k, v: q),
    "is given 'bias'": lambda m, x, p, _: core(m, x, bias=KEEP["bias"]),
    "says nowhere whether it is causal": lambda m, x, p, _: core(m, x, is_causal=None),
    "cannot be made whole": lambda m, x, p, _: m.attn(x).mean(),
    # torch compiles it, and says so where longspan refuses it
    "kept under a name|Unsupported": lambda m, x, p, _: HIDDEN["flex"](*[heads(x)] * 3),
}


def body_refused():
    longspan.register_style("one_stage", one_stage)  # as another test does: messages list the words
    torch.manual_seed(1)
    x = torch.randn(2, 13, 32)
    rank = dist.get_rank()
    found = []

    def refused(expected, attempt):
        found.append((expected, refusal(attempt)))

    plan = {"": "split_sequence", "attn": "attention", "core": "attention"}

    def small(line, **children):
        return Small(line, norm=nn.LayerNorm(32), core=Dense(), **children)

    for expected, line in REFUSED_LINES.items():
        mask = tril(x) if "both" in expected else None
        refused(expected, lambda line=line, mask=mask: parallel(small(line), plan)(x, mask=mask))

    fine = REFUSED_LINES["neither calls"]
    for expected, given, children in (
        ("no module of Small is called 'attm'", {**plan, "attm": "attention"}, {}),
        ("unknown style 'atention'.*split_sequence, gather, attention", {**plan, "attn": "atention"}, {}),
        ("so nothing would be split", {"attn": "attention"}, {}),
        ("split_sequence of 'norm' lies inside", {**plan, "norm": "split_sequence"}, {}),
        ("'core' is planned for attention, but lies in no", {"norm": "split_sequence", "core": "attention"}, {}),
        ("for ulysses and attention; choose", {"": ["split_sequence", "ulysses", "attention"]}, {}),
        ("odd .Conv1d. mixes tokens", plan, {"odd": nn.Conv1d(32, 32, 3)}),
        ("odd .LSTM. mixes tokens", plan, {"odd": nn.LSTM(32, 32)}),
        ("odd is a MultiheadAttention", plan, {"odd": nn.MultiheadAttention(32, 4)}),
        ("odd is compiled", plan, {"odd": torch.compile(nn.Linear(32, 32))}),
    ):
        refused(expected, lambda given=given, children=children: parallel(small(fine, **children), given))
    for option in ({"gradient": "sum"}, {"kernel": "model"}, {"logits": "none"}, {"layout": "per_document"}):
        refused("a plan takes no", lambda option=option: parallel(small(fine), plan, **option))

    def good(m, x, p, mask):
        return m.norm(m.attn(x))

    for expected, children in (
        ("dropout 0.1 in odd", {"odd": nn.Dropout(0.1)}),
        ("odd takes stat", {"odd": nn.BatchNorm1d(32)}),
    ):
        refused(expected, lambda children=children: parallel(small(good, **children), plan)(x))
    split = parallel(small(good), plan)
    refused("parallelized already", lambda: parallel(split, plan))
    refused("given different batches: x", lambda: split(x + rank))
    refused("positions of shape .13, 13. has several", lambda: split(x, torch.zeros(13, 13)))
    refused("may hide tensors", lambda: split(x, positions=object()))
    refused("no tensor .batch, length", lambda: split(x[0, 0]))
    refused("there is a style 'gather' already", lambda: longspan.register_style("gather", one_stage))
    whole = parallel(small(lambda m, x, p, _: (m.attn(x), m.norm(x))[0]), {**plan, "norm": "gather"})
    refused("still of this rank's rows", lambda: whole(x))
    twice = parallel(small(lambda m, x, p, _: m.attn(m(x))), plan)
    refused("would be split twice", lambda: twice(x))
    # after all of that the good one still runs; and unverified lifts the trial, not the rest
    accepted = torch.equal(split(x).argmax(), small(good)(x).argmax())
    loose = parallel(
        small(lambda m, x, p, _: x + torch.arange(x.shape[1])[:, None], odd=nn.LSTM(32, 32)), plan, unverified=True
    )
    refused("accepted", lambda: loose(x))
    refused(
        "outside of the modules", lambda: parallel(small(lambda m, x, p, _: Planned()(x)), plan, unverified=True)(x)
    )
    for model in (split, loose, whole, twice):
        longspan.unparallelize(model)
    return found, accepted


def test_refusals_are_the_same_on_every_rank(run_ranks):
    for size in (2, 4):
        results = run_ranks(body_refused, size)
        found, accepted = results[0]
        assert accepted
        for others, _ in results[1:]:
            assert not [(mine, theirs) for mine, theirs in zip(found, others, strict=True) if mine != theirs]
        for expected, message in found:
            assert re.search(expected, message, re.S), (expected, message)
