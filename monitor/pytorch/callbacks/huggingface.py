"""The monitor as a callback for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from monitor.pytorch.callbacks import HEALTH, AttachingCallback


class MonitorCallback(AttachingCallback, TrainerCallback):
    """Attaches the monitor when training begins, and closes it when training ends.

    >>> Trainer(model, arguments, callbacks=[MonitorCallback()])  # doctest: +SKIP

    Steps have the Trainer's numbers, also after a checkpoint. The arguments are those of ``monitor.watch``. If training raises,
    the monitor stays attached until the next training begins; ``monitor.close()`` ends it.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(self, preset: str | None = HEALTH, **fields: Any) -> None:
        self._configure(preset, fields)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach to the model and its optimizer."""
        del control
        self._new_monitor().watch(
            given["model"],  # without its wrapper, which would show the group
            given["optimizer"],
            micro_batches=args.gradient_accumulation_steps,
            dp_group=dist.group.WORLD if dist.is_available() and dist.is_initialized() else None,
            start_iteration=state.global_step,
        )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write what is queued, and close."""
        self._close()
