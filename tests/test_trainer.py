"""transformers' own Trainer, unchanged: cp peers get the same rows, and the curve is one process's."""

import os
import tempfile

import torch
import torch.distributed as dist

import longspan
from tiny import batch, build


def body(layout):
    from accelerate.state import AcceleratorState, PartialState
    from transformers import Trainer, TrainingArguments

    size, rank = dist.get_world_size(), dist.get_rank()
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 29500}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    rows = []
    for seed in range(8):
        ids = batch(1, 61, seed=seed)[0]
        labels = ids.clone()
        labels[: 10 + 5 * seed] = -100  # unequal target counts
        mask = torch.ones_like(ids)
        mask[: seed % 3] = 0  # left padding
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask})

    class InOrder(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def log(self, logs, *args, **kwargs):
            if "loss" in logs:
                found.append((logs["loss"], logs["grad_norm"]))

    found = []
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    model = longspan.parallelize(build("llama"), dist.group.WORLD, layout=layout)
    try:
        repeated = [row for row in rows for _ in range(size)]  # the only thing a cp group asks of its data
        InOrder(model=model, args=arguments, train_dataset=repeated).train()
    finally:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        os.environ.clear()
        os.environ.update(before)
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_stock_trainer_with_accumulation_clipping_and_padding(run_ranks):
    ((curve, weights),) = run_ranks(body, 1, "auto")
    assert len(curve) == 4
    for layout in ("head_tail", "contiguous"):
        for found, split_weights in run_ranks(body, 2, layout):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(curve), rtol=2e-6, atol=0)
            for name, weight in weights.items():
                torch.testing.assert_close(split_weights[name], weight, rtol=0, atol=1e-6)
