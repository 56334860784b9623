"""The training loop of nanochat: no wrapper, Muon for matrices and AdamW for the rest, gradients averaged before they step.

torchrun --nproc-per-node 2 nanochat.py
"""

import torch
import torch.distributed as dist
from small_gpt import GPT, batches, report, report_weights

import monitor  # +

ITERATIONS = 6

dist.init_process_group("gloo")
torch.manual_seed(42)
model = GPT()
matrices = [p for p in model.h.parameters() if p.dim() == 2]
rest = [p for p in model.parameters() if all(p is not one for one in matrices)]
optimizers = [torch.optim.AdamW(rest, lr=1e-3, fused=True), torch.optim.Muon(matrices, lr=0.02)]
monitor.watch(model, optimizers)  # +

batch = batches(dist.get_rank(), dist.get_world_size())
for step in range(ITERATIONS):
    _, loss = model(*next(batch))
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()
    report(step, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
report_weights(model.parameters())
dist.destroy_process_group()
