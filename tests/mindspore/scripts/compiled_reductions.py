"""Two data-parallel ranks whose compiled steps reduce gradients in one way after the other; ``compiled_reductions.py BASE``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"MONITOR_NATIVE": "0", "MONITOR_COMPILED_CODE": "1"}

import mindspore as ms
from compiled_reductions_cells import STEPS, WAYS, Weighted, inputs, weights_after
from mindspore import Tensor, communication, nn
from ranks import tell

from monitor.mindspore import TrainerMon

CONFIG: dict[str, Any] = {"wg_distribution": True, "ops": ["min", "max", "norm"], "ndigits": 17}


def trained(way: type[nn.Cell], *, whole: bool, monitored: bool) -> list[list[float]]:
    """The weights after the steps."""
    ms.set_context(mode=ms.GRAPH_MODE if whole else ms.PYNATIVE_MODE)
    net = Weighted()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    monitor = TrainerMon(CONFIG) if monitored else None
    if monitor is not None:
        monitor.set_monitor(net, 1, optimizer)
    cell = way(net, optimizer)

    def called(x: Tensor) -> Tensor:
        return cell(x)

    step = cell if whole else ms.jit(called)
    for number in range(STEPS):
        step(Tensor(inputs(communication.get_rank(), number)))
    return weights_after(net, monitor)


def main(base: Path) -> None:
    ms.set_device("CPU")
    communication.init("mccl")
    for name, way in WAYS.items():
        for mode in ("graph", "jit"):
            os.environ["MONITOR_OUTPUT_DIR"] = str(base / name / mode)
            (base / name / mode).mkdir(parents=True, exist_ok=True)
            both = [trained(way, whole=mode == "graph", monitored=monitored) for monitored in (False, True)]
            tell([name, mode, both[0] == both[1]])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
