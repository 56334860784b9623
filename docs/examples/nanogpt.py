"""The training loop of nanoGPT: DistributedDataParallel, a GradScaler, micro-batches without synchronisation but for the last.

torchrun --nproc-per-node 2 nanogpt.py
"""

import torch
import torch.distributed as dist
from small_gpt import GPT, batches, report, report_weights
from torch.nn.parallel import DistributedDataParallel

import monitor  # +

MAX_ITERS, MICRO_STEPS = 6, 2

dist.init_process_group("gloo")
torch.manual_seed(1337)
raw_model = GPT()
decayed = [p for p in raw_model.parameters() if p.dim() >= 2]
others = [p for p in raw_model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)
model = DistributedDataParallel(raw_model)
monitor.watch(model, optimizer)  # +

batch = batches(dist.get_rank(), dist.get_world_size())
for iteration in range(MAX_ITERS):
    for micro_step in range(MICRO_STEPS):
        model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
        _, loss = model(*next(batch))
        scaler.scale(loss / MICRO_STEPS).backward()
    scaler.unscale_(optimizer)
    report(iteration, torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
report_weights(raw_model.parameters())
dist.destroy_process_group()
