"""``Model.train`` of MindSpore, with gradients averaged over the ranks.

msrun --worker_num 2 --local_worker_num 2 --join True with_mindspore.py
"""

import mindspore
import numpy as np
from mindspore import communication, dataset, nn
from mindspore.train import Callback, Model

from monitor.mindspore.callbacks import MonitorCallback  # +

STEPS, LEARNING_RATE = 4, 0.5


class Reporting(Callback):
    """With plain SGD the weights move by the learning rate times the gradients."""

    def __init__(self, net):
        super().__init__()
        self.net, self.before = net, [p.asnumpy().copy() for p in net.trainable_params()]

    def on_train_step_end(self, run_context):
        now = [p.asnumpy().copy() for p in self.net.trainable_params()]
        moved = sum(float(np.square((old - new).astype(np.float64)).sum()) for old, new in zip(self.before, now, strict=True))
        step = run_context.original_args().cur_step_num - 1
        print(f"step {step} norm {moved**0.5 / LEARNING_RATE:.9g}\n", end="", flush=True)
        self.before = now


mindspore.set_device("CPU")
communication.init()
mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
mindspore.set_seed(0)
rank = communication.get_rank()
net = nn.SequentialCell(nn.Dense(4, 16), nn.ReLU(), nn.Dense(16, 3))
rows = np.random.default_rng(rank).normal(size=(2 * STEPS, 4)).astype(np.float32)
labels = np.random.default_rng(rank + 2).normal(size=(2 * STEPS, 3)).astype(np.float32)
batches = dataset.NumpySlicesDataset((rows, labels), shuffle=False).batch(2)
model = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), LEARNING_RATE))
callbacks = [Reporting(net)]
callbacks.append(MonitorCallback("health", dp_group="mccl_world_group"))  # +
model.train(1, batches, callbacks=callbacks, dataset_sink_mode=False)
total = sum(float(p.asnumpy().astype(np.float64).sum()) for p in net.trainable_params())
print(f"weights {total.hex()}\n", end="", flush=True)
