# torchrun --nproc-per-node 2 examples/score.py
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import longspan

mesh = longspan.init_mesh(dp=1, cp=2)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = longspan.parallelize(LlamaForCausalLM(config).double(), mesh["cp"])
generator = torch.Generator().manual_seed(0)
group = [torch.randint(0, 256, (length,), generator=generator) for length in (700, 1200, 31)]  # whole, on every rank
old = [torch.full((len(tokens),), -5.5) for tokens in group]  # log-probabilities before the step
advantages = torch.tensor([1.0, 0.2, -1.2])


def sequence_loss(model):  # a loss of your own: whole sequences, plain torch, no word of ranks
    logprobs = longspan.score(model, group).logprobs  # entry t: log p(token t + 1 | tokens up to t); the last is 0
    total = 0.0
    for new, before, advantage in zip(logprobs, old, advantages):
        ratio = (new[:-1] - before[:-1]).mean().exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return total / len(group)


loss = longspan.check_loss(sequence_loss(model), model)
loss.backward()
longspan.ContextParallel(mesh["cp"]).reduce_gradients(model)  # DDP and FSDP do this by themselves
split = [parameter.grad.clone() for parameter in model.parameters()]

model.zero_grad()
with longspan.suspended(model):  # the plain model, on one rank
    sequence_loss(model).backward()
error = max((a - p.grad).norm() / p.grad.norm() for a, p in zip(split, model.parameters()))
print(f"rank {torch.distributed.get_rank()}: loss {loss:.6f}, largest difference of a gradient {error:.1e}")
