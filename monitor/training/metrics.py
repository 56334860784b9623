"""``RunMetrics``, the part of ``TrainingMetrics`` that no framework affects.

A training loop, or a callback of a trainer, reports its steps through it.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self

from monitor.config import MonitorConfig
from monitor.coordinator.output import prepare
from monitor.failures import LOGGER, Failures
from monitor.recording.run import ProcessTopology, RunEnded
from monitor.recording.trainer_mon import ModelMonitor
from monitor.training.config import TrainingConfig, load_training_config
from monitor.training.expert_load import ExpertCounts
from monitor.training.norms import GradNormSource
from monitor.training.reporting import EventWriter, LogWriter, MetricsWriter, Outputs, Reporting, texts
from monitor.training.step import (
    ATTRIBUTES,
    MEASURED,
    PER_PARAMETER,
    FlopCount,
    Given,
    Number,
    StateScalars,
    Step,
    StepFacts,
    Tokens,
)
from monitor.training.tensor_monitor import NormRecording

# --- The adapter interface that a framework implements for training metrics.


class Routers(Protocol):
    """Counts what the routers of a model choose."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the routers."""

    def step(self) -> dict[str, Tokens]:
        """The tokens that went to each expert since the last call, by router. Does not wait for a device."""

    def remove(self) -> None:
        """Remove the hooks."""


class GradientScale(Protocol):
    """Observes the factor by which an optimizer divides its gradients inside its own step."""

    def take(self) -> Number | None:
        """The factor of the latest step since the last call; None if the optimizer did not scale. Does not wait."""

    def remove(self) -> None:
        """Stop observing."""


class LearningRate(Protocol):
    """The learning rate of the first parameter group of an optimizer."""

    def step_ended(self) -> None:
        """A training step has ended."""

    def next(self, optimizer: Any) -> Number | None:
        """The rate in the next step; None if only the device knows it, or if it is not certain."""

    def remove(self) -> None:
        """Stop observing."""


class MetricsBackend(Protocol):
    """A framework. The modules ``monitor.pytorch.training.backend`` and ``monitor.mindspore.training.backend`` implement it."""

    def monitor_of(self, config: MonitorConfig, base: Path) -> ModelMonitor:
        """The framework's tensor monitor, which records to ``base``."""

    def place(self) -> ProcessTopology:
        """The rank, world size and groups of this process."""

    def kept(self, x: Any) -> Number:
        """A snapshot of a number, which later changes of ``x`` do not affect. Does not wait for a device.

        Args:
            x: A number, or a tensor of one element.

        Raises:
            TypeError: It is neither.
        """

    def trainable_names(self, model: Any) -> list[str]: ...

    def learning_rate(self, optimizer: Any, failures: Failures) -> LearningRate:
        """Observe an optimizer, without keeping it alive."""

    def routers(self, model: Any, names: Iterable[str], failures: Failures) -> Routers:
        """Observe the recognised routers, and the modules of these names.

        Raises:
            ValueError: The model has no module of one of these names.
        """

    def gradient_scale(self, optimizer: Any, failures: Failures) -> GradientScale | None:
        """Observe an optimizer; None if it never scales gradients."""

    def counting_flops(self, model: Any) -> AbstractContextManager[Callable[[], float]]:
        """A context that counts floating point operations; it yields a function that returns the count.

        Raises:
            NoCounterError: The framework has no counter, or its counter cannot handle this model.
        """


# --- Check arguments before anything is attached, and values of a step before they are used.


def count(name: str, value: Any, least: int) -> int:
    """Convert an integer of any type (numpy's too) to ``int``.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is below ``least``.
    """
    if not _is_integer(value):
        raise TypeError(f"{name} is {value!r} and must be an integer.")
    if value < least:
        raise ValueError(f"{name} is {value} and must be at least {least}.")
    return int(value)


def flops(value: Any) -> Given:
    """Floating point operations of a step: a number, ``"measure"`` or None.

    Raises:
        TypeError: The value is neither a number nor ``"measure"``.
        ValueError: The number is not above 0, or not finite.
    """
    if value is None:
        return None
    if isinstance(value, str) and value == MEASURED:
        return MEASURED
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f'model_flops is {value!r} and must be a number, "{MEASURED}" or None.')
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"model_flops is {value} and must be a number above 0.")
    return number


def weak_reference(name: str, x: Any) -> Callable[[], Any]:
    """A function that returns ``x`` as long as it lives elsewhere. For several optimizers it returns a list, until one is gone.

    Raises:
        TypeError: ``x`` has a type that no model and no optimizer has.
    """
    if x is None:
        return nothing
    if isinstance(x, (list, tuple, Mapping)):
        each = [weak_reference(name, one) for one in (x.values() if isinstance(x, Mapping) else x)]
        return partial(_all_of, each)
    try:
        return weakref.ref(x)
    except TypeError:
        raise TypeError(f"{name} is a {type(x).__name__}: expected the {name} itself.") from None


def _all_of(references: Sequence[Callable[[], Any]]) -> list[Any] | None:
    found = [reference() for reference in references]
    return None if any(one is None for one in found) else found


def _first(optimizer: Any) -> Any:
    """The first of a list of optimizers; None if it is empty. Any other optimizer as it is."""
    if isinstance(optimizer, list):
        return optimizer[0] if optimizer else None
    return optimizer


def nothing() -> None:
    """The reference in place of a missing model or optimizer."""


def batch_size(value: Any, failures: Failures) -> int | None:
    """Samples of a step; None and one warning if the value is no valid batch size. Does not wait for a device."""
    if value is None:
        return None
    if _is_integer(value) and value > 0:
        return int(value)
    said = f"batch_size is {value!r}" if isinstance(value, int | float | str) else f"batch_size is a {type(value).__name__}"
    failures.warn("batch_size", f"{said} and must be an integer above 0: the number of samples is unknown from here on.")
    return None


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


FLUSH_SECONDS: Final = 30.0


class RunMetrics:
    """Shows the metrics of a run in TensorBoard and in the log.

    >>> metrics = TrainingMetrics("train.yaml", model, optimizer)  # doctest: +SKIP
    >>> for batch in batches:  # doctest: +SKIP
    ...     with metrics.step(batch_size=64) as step:
    ...         step.loss = train_one_step(batch)

    After it is created, its failures never reach training: each is logged once and counted. Remaining metrics are written when
    the interpreter exits, at the latest.

    Args:
        config: The training YAML: its path, or what ``load_training_config`` made of it.
        model: The model whose norms are shown; without it, or without its optimizer, there are none. May be attached later
            (``attach``).
        grad_acc_steps: Micro-batches a step.
        start_step: The number of steps of earlier runs; ``samples``: the number of samples they have seen.
        total_steps: The planned number of steps, for the log. 0: not known.
        model_flops: Floating point operations of this rank's model in a step. ``"measure"``: the framework counts them in the
            first step.
        routers: Names of modules that choose experts, in addition to those that are recognised.
        gradients_are_global: Whether every rank's optimizer is given the whole gradient, if the model does not show it:
            ``grad-norm`` is then read from these gradients.
        grad_norm_is_told: Whether the loop sets ``grad_norm`` of each step, so that it need not be read from gradients.
        monitor: A ``TrainerMon`` that already records the model: norms are read from its rows, and only norms that it records
            are shown. Without it, a monitor records what is needed to ``dump_path``.

    Attributes:
        steps: The number of steps that have ended, including those of earlier runs.
        world_size: Ranks of the job, once there is a model.

    Raises:
        ConfigError: The configuration cannot be used.
        OutputError: ``dump_path`` or ``tensorboard_dir`` cannot be written.
        TypeError: An argument has the wrong type.
        ValueError: A name in ``routers`` is no module, or a number is out of range.
    """

    _backend: ClassVar[MetricsBackend]

    def __init__(
        self,
        config: TrainingConfig | str | os.PathLike[str],
        model: Any = None,
        optimizer: Any = None,
        *,
        grad_acc_steps: int = 1,
        start_step: int = 0,
        samples: int = 0,
        total_steps: int = 0,
        model_flops: Given = None,
        routers: Sequence[str] = (),
        gradients_are_global: bool = False,
        grad_norm_is_told: bool = False,
        monitor: ModelMonitor | None = None,
    ) -> None:
        self.config = config if isinstance(config, TrainingConfig) else load_training_config(config)
        micro_steps = count("grad_acc_steps", grad_acc_steps, 1)
        self.steps = count("start_step", start_step, 0)
        self._samples: int | None = count("samples", samples, 0)
        self._total = count("total_steps", total_steps, 0)
        self._router_names = tuple(routers)
        self._grad_norm_is_told = grad_norm_is_told
        self._routers: Routers | None = None
        self._writing: MetricsWriter | None = None
        self._model: Callable[[], Any] = nothing
        self._optimizer: Callable[[], Any] = nothing
        self._scale: GradientScale | None = None
        self._rate: LearningRate | None = None
        self._began: float | None = None
        self._failures = Failures()
        source = GradNormSource(gradients_are_global, grad_norm_is_told)
        self._recording = NormRecording(self.config, monitor, micro_steps, source, self._failures)
        self._flops = FlopCount(flops(model_flops), self._backend.counting_flops, self._failures)
        self.world_size = 1
        self._closed = False
        if model is not None:
            self.attach(model, optimizer)

    def attach(self, model: Any, optimizer: Any = None) -> None:
        """Attach a model and its optimizer, and begin. Call it once, after communication between ranks is initialised.

        Raises:
            RuntimeError: A model is attached already.
        """
        if self._writing is not None:
            raise RuntimeError("These TrainingMetrics have a model already. Create new ones for another model.")
        self._model, self._optimizer = weak_reference("model", model), weak_reference("optimizer", optimizer)
        place = self._backend.place()
        self._failures.rank, self.world_size = place.rank, place.world_size
        if self.config.shows_expert_load and model is not None:
            self._routers = self._backend.routers(model, self._router_names, self._failures)
        try:
            self._attach(model, optimizer, place)
            self._failures.guarded("checking what the configuration names", self._advise_of_nothing)(model)
        except BaseException:
            self.close()  # a refused model keeps no hooks
            raise

    def _attach(self, model: Any, optimizer: Any, place: ProcessTopology) -> None:
        self._writing = self._begin(place.rank, place.world_size)
        weakref.finalize(self, self._writing.abandon).atexit = False
        self._recording.attach(model, optimizer, self.steps, self._monitor_of, self._writing, place.world_size)
        if optimizer is not None:
            scale_of = self._failures.guarded("looking for a loss scale", self._backend.gradient_scale)
            self._scale = scale_of(optimizer, self._failures)
            rate_of = self._failures.guarded("looking for a learning rate", self._backend.learning_rate)
            self._rate = rate_of(_first(self._optimizer()), self._failures)
        if self.config.callbacks.TopkBiasBalanceCallback is not None and place.rank == 0:
            LOGGER.info("TopkBiasBalanceCallback: the load of experts is shown and not balanced; a monitor changes nothing.")

    def _advise_of_nothing(self, model: Any) -> None:
        """Say which metrics will never be shown, because this model has nothing that the configuration asks for."""
        of_model = "of this model (in a pipeline: of this rank's stages)"
        if self._routers is not None and not self._routers.names:
            said = f"No module {of_model} is recognised as a router: expert_load is not shown"
            self._failures.advise("no routers", f"{said}. Name the modules that choose experts: routers=[...].")
        wanted = [metric for field, metric in PER_PARAMETER.items() if self.config.wants(field)]
        names = self._backend.trainable_names(model) if wanted and model is not None else []
        if names and not any(map(StateScalars(self.config).chooses, names)):
            section = self.config.monitor_config
            said = (
                f"monitor_config.target {list(section.target)}{' with invert' if section.invert else ''} selects no parameter"
            )
            names_are = f"Its parameters have names like {names[0]!r}; print_struct prints all of them"
            self._failures.advise("no target", f"{said} {of_model}: {' and '.join(wanted)} are not shown. {names_are}.")

    def _begin(self, rank: int, world_size: int) -> MetricsWriter:
        board = self.config.tensorboard
        events = None
        if board is not None:
            directory = Path(board.tensorboard_dir).expanduser().absolute() / f"rank_{rank}"
            prepare(directory, "tensorboard.tensorboard_dir")
            events = EventWriter(directory, board.tensorboard_queue_size)
        counts = ExpertCounts(self._dump_path / f"rank_{rank}", world_size) if self.config.shows_expert_load else None
        outputs = Outputs(LogWriter(rank, self._total), events, counts)
        reporting = Reporting(self.config, world_size, outputs, self._failures, grad_norm_is_told=self._grad_norm_is_told)
        writing = MetricsWriter(reporting, self._failures)
        if events is not None:
            writing.texts(texts(self.config))
        return writing

    def _monitor_of(self, config: MonitorConfig) -> ModelMonitor:
        return self._backend.monitor_of(config, prepare(self._dump_path, "monitor_config.dump_path"))

    @property
    def _dump_path(self) -> Path:
        return Path(self.config.monitor_config.dump_path).expanduser().absolute()

    @contextmanager
    def step(self, batch_size: int | None = None) -> Iterator[Step]:
        """One step of a training loop, including the optimizer's step. A step that raises is not shown.

        Args:
            batch_size: Samples of all ranks together.
        """
        step = self.begin_step(batch_size)
        self.count_flops()
        try:
            yield step
        except BaseException:
            self.stop_counting(failed=True)
            raise
        self.end_step(step)

    def count_flops(self) -> None:
        """For callbacks: start counting floating point operations, if they are counted. ``stop_counting`` has to follow."""
        self._failures.guarded("counting floating point operations", self._flops.begin)(self._model())

    def stop_counting(self, *, failed: bool = False) -> None:
        """Stop counting, after the computation has returned or failed. May be repeated; ``end_step`` calls it at the latest."""
        stop = self._flops.discard if failed else self._flops.pause
        self._failures.guarded("counting floating point operations", stop)()

    def begin_step(self, batch_size: int | None = None) -> Step:
        """The beginning of ``step``, for callbacks. They mark themselves what is counted (``count_flops``)."""
        if self._writing is None and not self._closed:
            self.attach(None)
        self._failures.guarded("listing trainable parameters", self._list_names)()
        step = Step(batch_size, partial(self._kept, "local_loss"))
        self._began = time.monotonic() if self._began is None else self._began
        if self._rate is not None and (optimizer := self._optimizer()) is not None:
            step.learning_rate = self._failures.guarded("reading the learning rate", self._rate.next)(_first(optimizer))
        return step

    def _list_names(self) -> None:
        if self._ends_after_first_step and (model := self._model()) is not None:
            names = self._backend.trainable_names(model)
            LOGGER.info("[rank %d] %d trainable parameters:\n%s", self._failures.rank, len(names), "\n".join(names))

    @property
    def _ends_after_first_step(self) -> bool:
        section = self.config.monitor_config
        return section.monitor_on and section.print_struct

    def end_step(self, step: Step) -> None:
        """The end of ``step``, for callbacks.

        Raises:
            RunEnded: ``print_struct`` ends the run after its first step.
        """
        self._failures.guarded("counting floating point operations", self._flops.end)()
        self._failures.guarded("ending a step", self._end_step)(step)
        step.forget()
        if self._ends_after_first_step:
            reason = "The trainable parameters were printed; print_struct ends the run here."
            self.close()
            LOGGER.info("[rank %d] %s", self._failures.rank, reason)
            raise RunEnded(reason)

    def _end_step(self, step: Step) -> None:
        self._failures.reraise_deferred()
        if self._rate is not None:
            self._rate.step_ended()
        ended = time.monotonic()
        self.steps += 1
        size = batch_size(step.batch_size, self._failures)
        self._samples = None if self._samples is None or size is None else self._samples + size
        self._recording.realign(self.steps)
        if self._writing is None or self._closed:
            return
        self._warn_of_unknown_attributes(step)
        losses = step.local_losses or ([] if step.loss is None else [step.loss])
        self._writing.facts(
            StepFacts(
                self.steps,
                ended,
                self._samples,
                size,
                self._kept("loss", step.loss),
                self._kept("grad_norm", step.grad_norm),
                self._kept("loss_scale", step.loss_scale),
                self._kept("learning_rate", step.learning_rate),
                tuple(kept for loss in losses if (kept := self._kept("local_loss", loss)) is not None),
                self._recording.measured(),
                self._flops.per_step,
                {} if self._routers is None else self._routers.step(),
                self._began,
                None if self._scale is None else self._scale.take(),
                self._recording.local_gradients_note,
            )
        )

    def _kept(self, name: str, x: Any) -> Number | None:
        """A snapshot of a number; None, and a warning once for each name, if it is no number."""
        return x if x is None or callable(x) else self._failures.guarded(f"reading {name} of a step", self._backend.kept)(x)

    def _warn_of_unknown_attributes(self, step: Step) -> None:
        for name in step.unknown:
            known = ", ".join(ATTRIBUTES)
            said = f"A step has no attribute {name!r}, which is not shown. It has {known}."
            self._failures.warn(f"attribute {name} of a step", said)

    def log_loss(self, terms: Sequence[Any]) -> None:
        """For callbacks: the losses from which the step's backwards began, before the optimizer steps."""
        self._failures.guarded("logging the loss", self._recording.log_loss)(terms)

    def warn_once(self, said: str) -> None:
        """For callbacks: warn once that something is not shown, and why."""
        self._failures.warn(said, said)

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Write everything that is known of the steps so far; returns whether that was done within ``seconds``."""
        return self._writing is None or self._writing.flush(seconds)

    def close(self) -> None:
        """Write what is left and detach. May be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        guarded = self._failures.guarded
        if self._routers is not None:
            guarded("removing the hooks of routers", self._routers.remove)()
        for observer in (self._scale, self._rate):
            if observer is not None:
                guarded("removing the hooks of the optimizer", observer.remove)()
        guarded("closing the recording", self._recording.close)()
        if self._writing is not None:
            guarded("closing training metrics", self._writing.close)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
