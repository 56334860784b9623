"""Llama by the Trainer of transformers, which wraps it in DistributedDataParallel.

torchrun --nproc-per-node 2 llama_trainer.py
"""

import torch
from small_gpt import CONTEXT, VOCABULARY, report, report_weights, rows_of_text
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from monitor.pytorch.callbacks.huggingface import MonitorCallback  # +


class Reporting(TrainerCallback):
    """What the Trainer logs of each step."""

    def on_log(self, _args, state, _control, logs=None, **_):
        if "grad_norm" in logs:
            report(state.global_step - 1, logs["grad_norm"])


torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT + 1, **sizes))
arguments = TrainingArguments(
    "trained",
    max_steps=4,
    per_device_train_batch_size=4,
    max_grad_norm=1e9,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
rows = [{"input_ids": row, "labels": row} for row in rows_of_text(64)]
callbacks = [Reporting()]
callbacks.append(MonitorCallback())  # +
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
trainer.train()
report_weights(model.parameters())
torch.distributed.destroy_process_group()
