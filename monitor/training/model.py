"""The sections of a training YAML that are about metrics: every field, its default and its bounds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from monitor.config.values import Patterns, Positive

TENSORBOARD: Final = "tensorboard"
LOG: Final = "log"
DESTINATIONS: Final = (LOG, TENSORBOARD)

_ALLOWED: Final = '"log", "tensorboard", a list of these, or null'


def _destinations(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or any(name not in DESTINATIONS for name in names):
        raise ValueError(f"expected {_ALLOWED}")
    return tuple(dict.fromkeys(names))


def _text(path: str) -> str:
    if not path.strip():
        raise ValueError("expected a path")
    return path


Destinations = Annotated[
    tuple[str, ...],
    BeforeValidator(_destinations),
    WithJsonSchema({"type": "string or list", "allowed": _ALLOWED}),
]
"""Where a metric is shown; nowhere where it is empty."""

Directory = Annotated[str, AfterValidator(_text), Field(json_schema_extra={"allowed": "a path"})]


def _or_default(default: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


class _Strict(BaseModel):
    """Values are taken as they are written. An integer serves where a float is asked for."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra={"documented": "docs/training-metrics.md"},
    )


class MonitorSection(_Strict):
    """``monitor_config``: what ``TrainingStateMonitor`` shows."""

    monitor_on: bool = False
    """Whether anything in this section has an effect."""
    dump_path: Annotated[Directory, _or_default("./dump")] = "./dump"
    """Where numbers are kept as files. Nothing that was not written by the monitor is ever deleted there."""
    target: Annotated[Patterns, _or_default((".*",))] = (".*",)
    """Regular expressions: parameters whose name has a match somewhere are shown in `local_norm`, `adam_m_norm` and
    `adam_v_norm`."""
    invert: bool = False
    """Show the parameters that `target` does not match instead."""
    step_interval: Positive = 1
    """Show the metrics of this section every so many steps."""
    local_loss_format: Destinations = ()
    """Where `local_loss` is shown."""
    device_local_loss_format: Destinations = ()
    """Where `device_accum_local_loss` is shown."""
    local_norm_format: Destinations = ()
    """Where `local_norm` is shown."""
    device_local_norm_format: Destinations = ()
    """Where `device_local_norm` is shown."""
    optimizer_state_format: Destinations = ()
    """Where `adam_m_norm` and `adam_v_norm` are shown."""
    weight_state_format: Destinations = ()
    """Where `weight_norm` is shown."""
    throughput_baseline: Annotated[float, Field(gt=0)] | None = None
    """Samples per second and device that `throughput_linearity` is the ratio to. Null: it is not shown. It is shown in
    TensorBoard and in the log."""
    print_struct: bool = False
    """Print the names of all trainable parameters when the first step begins, and end the run when it ends."""


class TensorBoardSection(_Strict):
    """``tensorboard``: the files of events."""

    tensorboard_dir: Directory
    """Where the directories `rank_{id}` are made."""
    tensorboard_queue_size: Positive = 10
    """How many events are held before they are written."""
    log_loss_scale_to_tensorboard: bool = False
    """Whether `loss-scale` is shown."""
    log_timers_to_tensorboard: bool = False
    """Whether `iteration-time`, `throughput` and `B-samples-per-day` are shown."""
    log_expert_load_to_tensorboard: bool = False
    """Whether `expert_load` is caught, and shown there and in the log."""


class LossMonitor(_Strict):
    """``MFLossMonitor``: what is shown of the run as a whole."""

    per_print_times: Positive = 1
    """Every so many steps."""


class StateMonitor(_Strict):
    """``TrainingStateMonitor``: there by itself where ``monitor_on`` is true."""


class BiasBalance(_Strict):
    """``TopkBiasBalanceCallback``: the load of experts. They are not balanced: a monitor changes nothing."""


class Callbacks(_Strict):
    """The entries of ``callbacks`` that are about metrics."""

    MFLossMonitor: LossMonitor | None = None
    """The run as a whole."""
    TrainingStateMonitor: StateMonitor | None = None
    """The norms and losses of `monitor_config`."""
    TopkBiasBalanceCallback: BiasBalance | None = None
    """The load of experts."""


class TrainingConfig(_Strict):
    """All that a training YAML says of metrics.

    Attributes:
        document: The YAML file as it was read, with the defaults of these sections, for TensorBoard's page of texts.
    """

    monitor_config: Annotated[MonitorSection, _or_default(MonitorSection())] = MonitorSection()
    """What is shown of the state of training."""
    tensorboard: TensorBoardSection | None = None
    """The files of events. Null: what would go there goes to the log."""
    callbacks: Callbacks = Callbacks(MFLossMonitor=LossMonitor())
    """What is shown of the run as a whole."""
    document: Annotated[Mapping[str, Any], Field(exclude=True, repr=False)] = {}
    """The whole file."""

    def shown(self, wanted: Collection[str]) -> frozenset[str]:
        """Where a metric goes. Without a section ``tensorboard`` the log takes its place."""
        if self.tensorboard is None and TENSORBOARD in wanted:
            wanted = {*wanted, LOG} - {TENSORBOARD}
        return frozenset(wanted)

    def wants(self, field: str) -> frozenset[str]:
        """Where the metric of a field ``*_format`` goes: nowhere where the monitor is off."""
        section = self.monitor_config
        return self.shown(getattr(section, field)) if section.monitor_on else frozenset()

    @property
    def baseline(self) -> float:
        """``throughput_baseline``; NaN where the metric is not wanted."""
        section = self.monitor_config
        wanted = section.throughput_baseline if section.monitor_on else None
        return math.nan if wanted is None else wanted

    @property
    def shows_expert_load(self) -> bool:
        """Whether the load of experts is caught at all."""
        return self.tensorboard is not None and self.tensorboard.log_expert_load_to_tensorboard
