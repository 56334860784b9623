"""``TrainingMetrics``: what a training loop, or a callback of a framework's trainer, tells of its steps."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Final

from monitor.config import MonitorConfig
from monitor.coordinator.output import prepare
from monitor.failures import LOGGER, Failures
from monitor.recording.protocols import RunEnded
from monitor.recording.run import ProcessTopology
from monitor.recording.trainer_mon import TrainerMon
from monitor.training.backend import Backend, GradientScale, Routers
from monitor.training.config import TrainingConfig, load_training_config
from monitor.training.expert_load import ExpertCounts
from monitor.training.norms import Whose
from monitor.training.outputs import EventWriter, LogWriter, texts
from monitor.training.reporting import Reporting, Writing
from monitor.training.scalars import MEASURED, FlopCount, Given
from monitor.training.step import ATTRIBUTES, Number, Step, StepFacts
from monitor.training.tensor_monitor import NormRecording

# --- What ``TrainingMetrics`` may be given, checked before anything is attached; what a step is told, as it can be used.


def count(name: str, value: Any, least: int) -> int:
    """An integer of any kind (numpy's too), as a plain one.

    Raises:
        TypeError: It is none.
        ValueError: It is below ``least``.
    """
    if not _is_integer(value):
        raise TypeError(f"{name} is {value!r} and must be an integer.")
    if value < least:
        raise ValueError(f"{name} is {value} and must be at least {least}.")
    return int(value)


def flops(value: Any) -> Given:
    """Floating point operations of a step: a number, ``"measure"`` or None.

    Raises:
        TypeError: It is no number, and no word that is known.
        ValueError: It is not above 0, or not finite.
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


def weakly(name: str, x: Any) -> Callable[[], Any]:
    """A reference that does not let it live on; of several optimizers one of each, in a list until one of them is gone.

    Raises:
        TypeError: It can be no model and no optimizer.
    """
    if x is None:
        return nothing
    if isinstance(x, (list, tuple, Mapping)):
        each = [weakly(name, one) for one in (x.values() if isinstance(x, Mapping) else x)]
        return partial(_all_of, each)
    try:
        return weakref.ref(x)
    except TypeError:
        raise TypeError(f"{name} is a {type(x).__name__}: expected the {name} itself.") from None


def _all_of(references: Sequence[Callable[[], Any]]) -> list[Any] | None:
    found = [reference() for reference in references]
    return None if any(one is None for one in found) else found


def nothing() -> None:
    """In place of what there is not."""


def batch_size(value: Any, failures: Failures) -> int | None:
    """Samples of a step; None where it says nothing that they could be, which is said once. Waits for no device."""
    if value is None:
        return None
    if _is_integer(value) and value > 0:
        return int(value)
    said = f"batch_size is {value!r}" if isinstance(value, int | float | str) else f"batch_size is a {type(value).__name__}"
    failures.warn("batch_size", f"{said} and must be an integer above 0: the samples of steps are not known.")
    return None


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


FLUSH_SECONDS: Final = 30.0


class TrainingMetrics:
    """Shows the metrics of a run in TensorBoard and in the log.

    >>> metrics = TrainingMetrics("train.yaml", model, optimizer)  # doctest: +SKIP
    >>> for batch in batches:  # doctest: +SKIP
    ...     with metrics.step(batch_size=64) as step:
    ...         step.loss = train_one_step(batch)

    Once it is there no failure of its own reaches training: it is said once and counted. What is left at the end is written
    when the interpreter exits, at the latest.

    Args:
        config: The training YAML: its path, or what ``load_training_config`` made of it.
        model: Whose norms are shown; none are without one, or without its optimizer. May be attached later (``attach``).
        grad_acc_steps: Micro-batches a step.
        start_step: How many steps earlier runs have made, and ``samples`` how many samples they have seen.
        total_steps: How many there are going to be, for the log. 0: not known.
        model_flops: Floating point operations of this rank's model in a step; ``"measure"`` has the framework count them in the
            first step.
        routers: Names of modules that choose experts, beside those that are recognised.
        gradients_are_global: Whether every rank's optimizer is given the whole gradient, where the model does not show it:
            ``grad-norm`` is then read there.
        grad_norm_is_told: Whether ``grad_norm`` of each step will be set, and need not be read from gradients.
        monitor: A ``TrainerMon`` that records the model already: norms are read from its rows, and only what it records can be
            shown. Without one, what is needed is recorded to ``dump_path``.

    Attributes:
        steps: How many have ended, those of earlier runs included.
        world_size: Ranks of the job, once there is a model.

    Raises:
        ConfigError: The configuration cannot be used.
        OutputError: ``dump_path`` or ``tensorboard_dir`` cannot be written.
        TypeError: An argument is not what it should be.
        ValueError: There is no module of a name in ``routers``, or a number is out of range.
    """

    _backend: ClassVar[Backend]

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
        monitor: TrainerMon | None = None,
    ) -> None:
        self.config = config if isinstance(config, TrainingConfig) else load_training_config(config)
        micro_steps = count("grad_acc_steps", grad_acc_steps, 1)
        self.steps = count("start_step", start_step, 0)
        self._samples: int | None = count("samples", samples, 0)
        self._total = count("total_steps", total_steps, 0)
        self._router_names = tuple(routers)
        self._told = grad_norm_is_told
        self._routers: Routers | None = None
        self._writing: Writing | None = None
        self._model: Callable[[], Any] = nothing
        self._optimizer: Callable[[], Any] = nothing
        self._scale: GradientScale | None = None
        self._began: float | None = None
        self._failures = Failures()
        whose = Whose(gradients_are_global, grad_norm_is_told)
        self._recording = NormRecording(self.config, monitor, micro_steps, whose, self._failures)
        self._flops = FlopCount(flops(model_flops), self._backend.counting_flops, self._failures)
        self.world_size = 1
        self._closed = False
        if model is not None:
            self.attach(model, optimizer)

    def attach(self, model: Any, optimizer: Any = None) -> None:
        """Take the model and its optimizer, when communication between ranks is there, and begin. Once.

        Raises:
            RuntimeError: It has been done before.
        """
        if self._writing is not None:
            raise RuntimeError("These TrainingMetrics have their model already. Make new ones.")
        self._model, self._optimizer = weakly("model", model), weakly("optimizer", optimizer)
        place = self._backend.place()
        self._failures.rank, self.world_size = place.rank, place.world_size
        if self.config.shows_expert_load and model is not None:
            self._routers = self._backend.routers(model, self._router_names, self._failures)
        try:
            self._attach(model, optimizer, place)
        except BaseException:
            self.close()  # nothing stays attached of what was refused
            raise

    def _attach(self, model: Any, optimizer: Any, place: ProcessTopology) -> None:
        self._writing = self._begin(place.rank, place.world_size)
        weakref.finalize(self, self._writing.abandon).atexit = False
        self._recording.attach(model, optimizer, self.steps, self._monitor_of, self._writing, place.world_size)
        if optimizer is not None:
            scale_of = self._failures.guarded("looking for a loss scale", self._backend.gradient_scale)
            self._scale = scale_of(optimizer, self._failures)
        if self.config.callbacks.TopkBiasBalanceCallback is not None and place.rank == 0:
            LOGGER.info("TopkBiasBalanceCallback: the load of experts is shown and not balanced; a monitor changes nothing.")

    def _begin(self, rank: int, world_size: int) -> Writing:
        board = self.config.tensorboard
        events = None
        if board is not None:
            directory = Path(board.tensorboard_dir).expanduser().absolute() / f"rank_{rank}"
            prepare(directory, "tensorboard.tensorboard_dir")
            events = EventWriter(directory, board.tensorboard_queue_size)
        counts = ExpertCounts(self._dump_path / f"rank_{rank}", world_size) if self.config.shows_expert_load else None
        log = LogWriter(rank, self._total)
        reporting = Reporting(self.config, world_size, log, events, counts, self._failures, grad_norm_is_told=self._told)
        writing = Writing(reporting, self._failures)
        if events is not None:
            writing.texts(texts(self.config))
        return writing

    def _monitor_of(self, config: MonitorConfig) -> TrainerMon:
        return self._backend.monitor_of(config, prepare(self._dump_path, "monitor_config.dump_path"))

    @property
    def _dump_path(self) -> Path:
        return Path(self.config.monitor_config.dump_path).expanduser().absolute()

    @contextmanager
    def step(self, batch_size: int | None = None) -> Iterator[Step]:
        """One step of a training loop, its optimizer's step included. One that raises is not shown.

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
        """For callbacks: what computes in the step begins, if that is counted. Has to be followed by ``stop_counting``."""
        self._failures.guarded("counting floating point operations", self._flops.begin)(self._model())

    def stop_counting(self, *, failed: bool = False) -> None:
        """What computes has returned, or has failed. Any number of times; ``end_step`` calls it, at the latest."""
        stop = self._flops.give_up if failed else self._flops.pause
        self._failures.guarded("counting floating point operations", stop)()

    def begin_step(self, batch_size: int | None = None) -> Step:
        """What ``step`` does at its beginning, for callbacks: they say themselves what is counted (``count_flops``)."""
        if self._writing is None and not self._closed:
            self.attach(None)
        self._failures.guarded("listing trainable parameters", self._list_names)()
        step = Step(batch_size, partial(self._kept, "local_loss"))
        self._began = time.monotonic() if self._began is None else self._began
        if (optimizer := self._optimizer()) is not None:
            step.learning_rate = self._failures.guarded("reading the learning rate", self._backend.learning_rate)(optimizer)
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
        """What ``step`` does at its end, for callbacks.

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
        ended = time.monotonic()
        self.steps += 1
        size = batch_size(step.batch_size, self._failures)
        self._samples = None if self._samples is None or size is None else self._samples + size
        self._recording.realign(self.steps)
        if self._writing is None or self._closed:
            return
        self._say_what_is_unknown(step)
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
        """A number that stays what it is; None where it is none, which is said of each that a step is told."""
        return x if x is None or callable(x) else self._failures.guarded(f"reading {name} of a step", self._backend.kept)(x)

    def _say_what_is_unknown(self, step: Step) -> None:
        for name in step.unknown:
            known = ", ".join(ATTRIBUTES)
            self._failures.warn(f"attribute {name} of a step", f"A step has no {name!r}, which is not shown. It has {known}.")

    def warn_once(self, said: str) -> None:
        """For callbacks: say what is not shown, and why, the first time that it is so."""
        self._failures.warn(said, said)

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Whether within ``seconds`` all that is known of steps so far was written."""
        return self._writing is None or self._writing.flush(seconds)

    def close(self) -> None:
        """Write what is left. Any number of times."""
        if self._closed:
            return
        self._closed = True
        guarded = self._failures.guarded
        if self._routers is not None:
            guarded("letting go of routers", self._routers.remove)()
        if self._scale is not None:
            guarded("letting go of the optimizer", self._scale.remove)()
        guarded("closing the recording", self._recording.close)()
        if self._writing is not None:
            guarded("closing training metrics", self._writing.close)()

    def __enter__(self) -> TrainingMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
