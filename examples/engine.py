# torchrun --nproc-per-node 2 examples/engine.py
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import longspan
from longspan.config import OptimizerConfig

mesh = longspan.init_mesh(cp=2)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(0)
optimizer = OptimizerConfig(lr=1e-3, schedule="constant")
engine = longspan.Engine(LlamaForCausalLM(config), mesh, optimizer=optimizer, token_budget=4096)

generator = torch.Generator().manual_seed(0)
pairs = []  # whole, on every rank: a prompt with a better and a worse answer; a group stays in one micro-batch
for number in range(6):
    prompt = torch.randint(0, 256, (600,), generator=generator)
    for length in (50, 31):
        tokens = torch.cat([prompt, torch.randint(0, 256, (length,), generator=generator)])
        pairs.append(longspan.Datum.from_tokens(tokens, torch.arange(len(tokens)) >= 600, group=number))


def preference(batch):  # a loss of your own, over whole sequences: plain torch, no word of ranks
    said = [(new * datum.mask).sum() / datum.mask.sum() for new, datum in zip(batch.logprobs, batch.data)]
    better, worse = torch.stack(said[::2]), torch.stack(said[1::2])
    return -torch.nn.functional.logsigmoid(better - worse).sum() / 6


losses = []
for _ in range(8):
    losses.append(engine.forward_backward(pairs, preference).loss)
    engine.optim_step()
print(f"rank {torch.distributed.get_rank()}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {engine.step} steps")
