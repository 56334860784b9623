"""Two ranks dump a step in which they sum a tensor. ``argv[1]``: where to."""

import sys

import mindspore as ms
from mindspore import Tensor, communication, mint

from monitor.mindspore import PrecisionDebugger

ms.set_device("CPU")
communication.init("mccl")
debugger = PrecisionDebugger(dump_path=sys.argv[1])
debugger.start()
x = Tensor([float(communication.get_rank() + 1)])
mint.distributed.all_reduce(x)
debugger.stop()
debugger.step()
