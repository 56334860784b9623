"""Three ranks that sum gradients over all of them, with a data-parallel group of two; ``group_too_small.py BASE``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn, ops
from ranks import tell

from monitor.mindspore import TrainerMon

ms.set_device("CPU")
communication.init("mccl")
rank = communication.get_rank()
for name, members in {"pair": [0, 1], "everyone": [0, 1, 2]}.items():
    if rank in members:
        communication.create_group(name, members)
    os.environ["MONITOR_OUTPUT_DIR"] = str(Path(sys.argv[1]) / name)
    net = nn.Dense(4, 3).set_train()
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    monitor = TrainerMon({"wg_distribution": True, "ops": ["norm"]})
    monitor.set_monitor(net, 1, optimizer, dp_group=name if rank in members else None)
    gradients_of = ms.grad(lambda x, net=net: ops.square(net(x)).mean(), None, optimizer.parameters)
    reduce = ops.AllReduce()
    for step in range(2):
        x = Tensor(np.random.default_rng([step, rank]).normal(size=(3, 4)).astype(np.float32))
        optimizer(tuple(reduce(one) / 3 for one in gradients_of(x)))
    monitor.close()
tell(rank)
