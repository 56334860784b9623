"""What must hold with every version of MindSpore that the project supports: ``python tools/contract/with_mindspore.py``.

It needs the installed package and MindSpore, nothing else. A small GPT-like model is trained without a monitor, with one, and
observed by this script. ``checks.py`` says what is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore
from checks import Heard, run_checks
from model_of_mindspore import observed, train
from rows import Arrays, compare_everything, same_bits, written_config

from monitor.mindspore import TrainerMon
from monitor.mindspore.autograd import GRAPH_IS_THERE, NO_GRAPH


def training_is_the_same_bits(directory: Path) -> None:
    """Losses, weights and moments."""
    same_bits(train(), monitored(directory))


def rows_equal_float64_references(directory: Path) -> str | None:
    """Rows in all formats, merged and not: of all kinds that this version of MindSpore lets the monitor read."""
    monitored(directory)
    tensors = {series: tensor for series, tensor in observed().items() if GRAPH_IS_THERE or series.kind != "actv_grad"}
    compare_everything(directory / "monitor_output", tensors)
    return None if GRAPH_IS_THERE else "gradients of activations have no rows; a warning says so"


def monitored(directory: Path) -> Arrays:
    """A run with the monitor. It warns of nothing, except of a graph that this version of MindSpore does not show."""
    monitor = TrainerMon(written_config(directory))
    with Heard() as heard, monitor:
        trained = train(lambda net, optimizer: monitor.set_monitor(net, grad_acc_steps=1, optimizer=optimizer))
    if GRAPH_IS_THERE:
        assert heard.warnings == [], f"the monitor warned: {heard.warnings}"
    else:
        assert NO_GRAPH in "".join(heard.warnings), f"the monitor does not say what has no rows: {heard.warnings}"
    return trained


if __name__ == "__main__":
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    sys.exit(run_checks(training_is_the_same_bits, rows_equal_float64_references))
