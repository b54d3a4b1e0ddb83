# torchrun --nproc-per-node 2 examples/library.py
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import longspan

mesh = longspan.init_mesh(dp=1, cp=2)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = longspan.parallelize(LlamaForCausalLM(config), mesh["cp"])
trained = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(trained.parameters())
for step in range(5):
    ids = torch.randint(0, 256, (1, 4096), generator=torch.Generator().manual_seed(step))  # whole, on every rank
    loss = trained(input_ids=ids, labels=ids).loss  # the whole loss, on every rank
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {torch.distributed.get_rank()}: loss {loss:.6f}, {longspan.report(model)}")
