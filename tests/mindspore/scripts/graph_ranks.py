"""Two data-parallel ranks that train in GRAPH_MODE, then with a compiled backward alone; ``graph_ranks.py BASE``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
from compiled_reductions_cells import ByReducer, Weighted, inputs, weights_after
from mindspore import Tensor, communication, nn
from ranks import tell

from monitor.mindspore import TrainerMon

CONFIG: dict[str, Any] = {
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "replica_check": "all",
    "ops": ["norm"],
}
STEPS, FLIPPED_STEP, FLIPPED_RANK = 4, 2, 1


def trained(*, whole: bool, monitored: bool) -> list[list[float]]:
    """The weights after the steps."""
    ms.set_context(mode=ms.GRAPH_MODE if whole else ms.PYNATIVE_MODE)
    rank, net = communication.get_rank(), Weighted().set_train(True)
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    monitor = TrainerMon(CONFIG) if monitored else None
    if monitor is not None:
        monitor.set_monitor(net, 1, optimizer, dp_group="mccl_world_group")
    cell = ByReducer(net, optimizer)

    def gradients_of(x: Tensor) -> Any:
        return cell.gradients_of(x)

    compiled = ms.jit(gradients_of)
    for step in range(STEPS):
        x = Tensor(inputs(rank, step))
        if whole and (rank, step) == (FLIPPED_RANK, FLIPPED_STEP):
            ms.ops.assign(net.a.weight, -net.a.weight)
        if whole:
            cell(x)
        else:
            optimizer(cell.reducer(compiled(x)[1]))
    return weights_after(net, monitor)


def main(base: Path) -> None:
    ms.set_device("CPU")
    communication.init("mccl")
    for name in ("graph", "backward"):
        os.environ["MONITOR_OUTPUT_DIR"] = str(base / name)
        both = [trained(whole=name == "graph", monitored=monitored) for monitored in (False, True)]
        tell([name, both[0] == both[1]])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
