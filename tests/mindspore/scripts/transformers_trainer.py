"""Trains a tiny model with the trainer of MindSpore Transformers; ``transformers_trainer.py THEIRS OURS RESULT``.

``THEIRS`` is the trainer's YAML. ``OURS``, if it is not empty, is that of ``TrainingMetricsCallback``. ``RESULT`` receives the
weights at the end and their norm after each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindformers import MindFormerConfig, Trainer, build_context
from mindformers.models.configuration_utils import PretrainedConfig
from mindformers.models.modeling_utils import PreTrainedModel
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback

from monitor.mindspore.training import TrainingMetricsCallback

THEIRS, OURS, RESULT = sys.argv[1], sys.argv[2], Path(sys.argv[3])
WORDS, WIDTH, LENGTH, STEPS, ROWS = 32, 8, 8, 3, 2


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class OnCpu(MFTrainOneStepCell):
    """A CPU has no operation that looks for an overflow."""

    def start_overflow_check(self, _: Any, scale: Any) -> Any:
        return Tensor(False), scale

    def get_overflow_status(self, *_: Any) -> Any:
        return Tensor(False)


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.feed = nn.Dense(WIDTH, WIDTH)

    def construct(self, x: Tensor) -> Tensor:
        return x + ops.tanh(self.feed(x))


class Tiny(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self) -> None:
        super().__init__(PretrainedConfig(name_or_path="tiny"))
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.CellList([Block() for _ in range(3)])
        self.head = nn.Dense(WIDTH, WORDS)
        for seed, parameter in enumerate(self.trainable_params()):
            drawn = np.random.default_rng(seed).normal(size=parameter.shape)
            parameter.set_data(Tensor(drawn.astype(np.float32)))

    def construct(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return ops.cross_entropy(self.head(x).reshape((-1, WORDS)), input_ids[:, 1:].reshape((-1,)))


class Norms(Callback):
    """The norm of all weights after each step."""

    def __init__(self, network: nn.Cell) -> None:
        self._network = network
        self.seen: list[float] = []

    def on_train_step_end(self, _: Any) -> None:
        squares = [(one.asnumpy().astype(np.float64) ** 2).sum() for one in self._network.trainable_params()]
        self.seen.append(float(np.sqrt(sum(squares))))


build_context(MindFormerConfig(THEIRS))
tokens = [(np.random.default_rng(row).integers(0, WORDS, LENGTH + 1).astype(np.int32),) for row in range(STEPS * ROWS)]
batches = GeneratorDataset(tokens, ["input_ids"], shuffle=False).batch(ROWS)
network = Tiny()
norms = Norms(network)
callbacks = [TrainingMetricsCallback(OURS)] if OURS else []
Trainer(args=THEIRS, task="text_generation", model=network, train_dataset=batches, callbacks=[norms, *callbacks]).train()
weights = {one.name: one.asnumpy().tobytes().hex() for one in network.trainable_params()}
RESULT.write_text(json.dumps({"weights": weights, "norms": norms.seen, "mode": int(mindspore.get_context("mode"))}))
