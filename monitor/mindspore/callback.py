"""The monitor in one line, where ``mindspore.train.Model`` trains."""

from __future__ import annotations

import os
from typing import Any

from mindspore.train import Callback, RunContext

from monitor.mindspore.trainer_mon import TrainerMon


class MonitorCallback(Callback):  # type: ignore[misc]
    """Attaches a ``TrainerMon`` when training begins, and closes it when training ends.

    >>> model.train(epochs, dataset, callbacks=[MonitorCallback("monitor_config.json")])  # doctest: +SKIP

    Args:
        config_file_path: JSON, comments welcome.
        grad_acc_steps: Forwards a step.
        process_group: The pipeline-parallel group of this rank.
        dp_group: Data-parallel group.
        tp_group: Tensor-parallel group.
        start_iteration: Number of the first step.

    Attributes:
        monitor: Made at once, so that what is wrong with the configuration is said before training begins.

    Raises:
        ConfigError: The configuration cannot be used. The message names the field, the value and what is allowed.
        OutputError: The output directory cannot be made or written.
    """

    def __init__(
        self,
        config_file_path: str | os.PathLike[str],
        grad_acc_steps: int = 1,
        process_group: Any = None,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        super().__init__()
        self.monitor = TrainerMon(config_file_path, process_group)
        self._grad_acc_steps = grad_acc_steps
        self._groups = dp_group, tp_group
        self._start_iteration = start_iteration

    def on_train_begin(self, run_context: RunContext) -> None:
        """Attach to the network and the optimizer that ``Model`` was given."""
        training = run_context.original_args()
        dp_group, tp_group = self._groups
        self.monitor.set_monitor(
            training.network, self._grad_acc_steps, training.optimizer, dp_group, tp_group, self._start_iteration
        )

    def on_train_end(self, run_context: RunContext) -> None:
        """Write what is left."""
        del run_context
        self.monitor.close()
