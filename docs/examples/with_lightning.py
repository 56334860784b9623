"""Lightning, with DistributedDataParallel.

python with_lightning.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from small_gpt import GPT, report, report_weights, rows_of_text

from monitor.pytorch.callbacks.lightning import MonitorCallback  # +


class Training(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def forward(self, tokens, targets):
        return self.model(tokens, targets)

    def training_step(self, rows, _number):
        _, loss = self(rows[:, :-1], rows[:, 1:])
        return loss

    def on_before_optimizer_step(self, _optimizer):
        report(self.global_step, torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


seed_everything(0)
module = Training()
callbacks = []
callbacks.append(MonitorCallback())  # +
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(max_steps=4, accelerator="cpu", devices=2, strategy="ddp", callbacks=callbacks, **quiet)
trainer.fit(module, torch.utils.data.DataLoader(rows_of_text(64), batch_size=4))
report_weights(module.parameters())
