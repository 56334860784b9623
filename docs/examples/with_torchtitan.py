"""torchtitan: its Llama for debugging, sharded by FSDP2.

torchrun --nproc-per-node 2 with_torchtitan.py
"""

from dataclasses import dataclass

import torch
from small_gpt import CONTEXT, VOCABULARY, report, report_weights, rows_of_text
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import monitor  # +


class Bytes(BaseTokenizer):
    """A byte is a token."""

    eos_id = 0

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, **_):
        super().__init__()

    def encode(self, text, **_):
        return list(text.encode())

    def decode(self, tokens, **_):
        return bytes(tokens).decode()

    def get_vocab_size(self):
        return VOCABULARY


class Text(BaseDataLoader):
    """Another part of the text for each rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, *, dp_world_size, dp_rank, local_batch_size, **_):
        self.batches = rows_of_text(64).split(local_batch_size)[dp_rank::dp_world_size]

    def __iter__(self):
        positions = torch.arange(CONTEXT)
        for rows in self.batches:
            batch = {"input": rows[:, :-1].contiguous(), "positions": positions.expand(len(rows), -1)}
            yield batch, rows[:, 1:].contiguous()

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        """The text begins anew."""


class Reporting(MetricsProcessor):
    """What the trainer logs of each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step, avg_loss, max_loss, grad_norm, *rest, **named):
        report(step - 1, grad_norm)
        super().log(step, avg_loss, max_loss, grad_norm, *rest, **named)


spec = model_registry("debugmodel")
config = Trainer.Config(
    model_spec=spec,
    loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
    optimizer=default_adamw(lr=8e-4),
    training=TrainingConfig(local_batch_size=4, seq_len=CONTEXT, steps=4, max_norm=1e9, disable_cuda_graphs=True),
    parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    tokenizer=Bytes.Config(),
    dataloader=Text.Config(),
    metrics=Reporting.Config(log_freq=1),
    checkpoint=CheckpointManager.Config(enable=False),
    debug=DebugConfig(seed=0),
)
trainer = config.build()
monitor.watch(trainer.model_parts, trainer.optimizers)  # +
trainer.train()
report_weights(p.to_local() for p in trainer.model_parts[0].parameters())
trainer.close()
torch.distributed.destroy_process_group()
