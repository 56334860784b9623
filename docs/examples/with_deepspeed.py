"""DeepSpeed, with the optimizer's state and the gradients partitioned (ZeRO 2).

torchrun --nproc-per-node 2 with_deepspeed.py
"""

import deepspeed
import torch
from small_gpt import GPT, batches, report, report_weights

import monitor  # +

STEPS = 4

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = GPT()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": 2},
        "steps_per_print": 1000,
    },
)
monitor.watch(engine, engine)  # +

batch = batches(torch.distributed.get_rank(), torch.distributed.get_world_size())
for step in range(STEPS):
    _, loss = engine(*next(batch))
    engine.backward(loss)
    engine.step()
    report(step, engine.get_global_grad_norm())
report_weights(engine.parameters())
torch.distributed.destroy_process_group()
