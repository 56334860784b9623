"""accelerate, with gradient accumulation.

torchrun --nproc-per-node 2 with_accelerate.py
"""

import torch
from accelerate import Accelerator
from small_gpt import GPT, report, report_weights, rows_of_text

import monitor  # +

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(rows_of_text(4 * 2 * 2 * 5), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
monitor.watch(model, optimizer)  # +

step = 0
for rows in loader:
    with accelerator.accumulate(model):
        _, loss = model(rows[:, :-1], rows[:, 1:])
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            report(step, accelerator.clip_grad_norm_(model.parameters(), 1e9))
            step += 1
        optimizer.step()
        optimizer.zero_grad()
report_weights(model.parameters())
accelerator.end_training()
