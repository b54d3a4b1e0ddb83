# torchrun --nproc-per-node 2 examples/own_models.py
"""Three models of one's own, split by a plan: one calls scaled_dot_product_attention, one flex_attention, one has an
attention module f(q, k, v). Each prints how far its output and gradients are from one rank's."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import longspan


class Core(nn.Module):
    """Attention by hand. [B, H, rows, D]"""

    def forward(self, q, k, v, is_causal=True, softcap=5.0):
        scores = softcap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / softcap)
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.core = kind, Core()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, 8)).permute(2, 0, 3, 1, 4)
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "flex":
            y = flex_attention(q, k, v, block_mask=mask)
        else:
            y = self.core(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 64), nn.Embedding(512, 64)
        self.layers = nn.ModuleList(Attention(kind) for _ in range(2))
        self.head = nn.Linear(64, 256)

    def forward(self, ids, positions, mask=None):  # positions are an argument: each rank sees its own rows'
        x = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def window(b, h, q, k):
    return (q >= k) & (q - k < 32)


PLANS = {
    "sdpa": {"": "split_sequence", "layers.*": "attention"},
    "flex": {"": "split_sequence", "layers.*": "exchange"},
    "core": {"": "split_sequence", "layers.*.core": "ulysses"},
}


def reference(plain, kind, ids, positions):
    """One rank. (torch's flex_attention has no backward on CPU, so there the mask goes to the SDPA model.)"""
    if kind != "flex":
        return plain(ids, positions)
    at = torch.arange(ids.shape[1])
    seen = window(0, 0, at[:, None], at[None])

    def masked(q, k, v, block_mask):
        return F.scaled_dot_product_attention(q, k, v, seen)

    global flex_attention
    kept, flex_attention = flex_attention, masked
    try:
        return plain(ids, positions)
    finally:
        flex_attention = kept


mesh = longspan.init_mesh(dp=1, cp=2)
cp = longspan.ContextParallel(mesh["cp"])
differences = {}
for kind, plan in PLANS.items():
    torch.manual_seed(0)
    plain = Model(kind).double()
    ids, positions = torch.randint(0, 256, (2, 301)), torch.arange(301)[None]
    mask = create_block_mask(window, None, None, 301, 301, device="cpu") if kind == "flex" else None
    model = longspan.parallelize(copy.deepcopy(plain), mesh["cp"], plan=plan)
    outputs = model(ids, positions, mask), reference(plain, kind, ids, positions)  # whole logits, on every rank
    for out in outputs:
        F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    cp.reduce_gradients(model)  # as DDP or FSDP would
    pairs = [outputs, *((p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))]
    differences[kind] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    print(f"rank {cp.rank}: {kind} differs by {differences[kind]:.1e} from one rank; {longspan.report(model)}")
    longspan.unparallelize(model)
