"""The training loop of nanochat: no wrapper, and one optimizer that averages gradients over the ranks inside its step.

Matrices are stepped by Muon, the rest by AdamW, whose state is divided among the ranks. So the average gradient of a whole
tensor exists on no rank, and has no rows. A warning says so once.

torchrun --nproc-per-node 2 nanochat.py
"""

import torch
import torch.distributed as dist
from small_gpt import GPT, batches, report, report_weights

import monitor  # +

ITERATIONS, MICRO_STEPS = 6, 2


def orthogonal(x):
    """Nearly the orthogonal matrix next to ``x``, by five Newton-Schulz steps."""
    x = x / x.norm()
    for _ in range(5):
        squared = x @ x.T
        x = 3.4445 * x + (2.0315 * squared @ squared - 4.775 * squared) @ x
    return x


class MuonAdamW(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                (self.muon if group["muon"] else self.adamw)(parameter, group)

    def muon(self, parameter, group):
        state, gradient = self.state[parameter], parameter.grad.clone()
        dist.all_reduce(gradient)
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
        momentum.lerp_(gradient / dist.get_world_size(), 0.05)
        parameter.add_(orthogonal(momentum), alpha=-group["lr"])

    def adamw(self, parameter, group):
        state, ranks = self.state[parameter], dist.get_world_size()
        part = parameter.chunk(ranks)[dist.get_rank()]
        gradient = torch.empty_like(part)
        dist.reduce_scatter_tensor(gradient, parameter.grad)
        gradient /= ranks
        first = state.setdefault("exp_avg", torch.zeros_like(part)).lerp_(gradient, 0.1)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(part)).lerp_(gradient.square(), 0.01)
        count = state["step"] = state.get("step", 0) + 1
        update = (first / (1 - 0.9**count)) / ((second / (1 - 0.99**count)).sqrt() + 1e-8)
        dist.all_gather_into_tensor(parameter, part - group["lr"] * update)


dist.init_process_group("gloo")
torch.manual_seed(42)
orig_model = GPT()
matrices = [p for p in orig_model.h.parameters() if p.dim() == 2]
rest = [p for p in orig_model.parameters() if all(p is not one for one in matrices)]
groups = [{"params": matrices, "lr": 0.02, "muon": True}, {"params": rest, "lr": 0.001, "muon": False}]
optimizer = MuonAdamW(groups, {})
model = torch.compile(orig_model, backend="aot_eager", dynamic=False)
monitor.watch(model, optimizer)  # +

batch = batches(dist.get_rank(), dist.get_world_size())
for step in range(ITERATIONS):
    for _ in range(MICRO_STEPS):
        _, loss = model(*next(batch))
        (loss / MICRO_STEPS).backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    report(step, torch.nn.utils.get_total_norm(list(orig_model.parameters())))
report_weights(orig_model.parameters())
dist.destroy_process_group()
