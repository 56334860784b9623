"""Puts together what is shown of a step, and the thread that shows it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text import metadata
from tensorboard.util.tensor_util import make_tensor_proto

from monitor.failures import LOGGER, EarlierFailure, Failures
from monitor.pipeline.process import PROCESS, Ticket
from monitor.series import encodable
from monitor.sinks.files import AppendFile, opened
from monitor.sinks.tensorboard import FORMAT_VERSION, new_path, record
from monitor.training.config import LOG, TENSORBOARD, TrainingConfig
from monitor.training.expert_load import Counts, ExpertCounts, load, load_scalars
from monitor.training.norms import norms_of_state, unscaled
from monitor.training.step import RunScalars, Scalar, StateScalars, StepFacts, StepJoiner, StepNorms, ThroughputMeter, value_of

# --- Where training metrics are shown: event files for TensorBoard, and the log.

AGAINST_SAMPLES: Final = "-vs-samples"


class EventWriter:
    """Writes ``events.out.tfevents.…`` into a directory, which is created with the first event. Every run has its own file.

    The file is not marked as a restart: TensorBoard would apply that to steps and samples alike, and hide scalars shown against
    samples.

    Args:
        directory: The directory of the rank.
        queue_size: The number of events that are buffered before they are written.

    Raises:
        OSError: From every method, if the disk refuses an operation. Events that could not be written are lost. Events in the
        file stay intact, and later events are written.
    """

    def __init__(self, directory: Path, queue_size: int) -> None:
        self._directory = directory
        self._queue_size = queue_size
        self._held: list[bytes] = []
        self._file: AppendFile | None = None

    def scalars(self, scalars: Sequence[Scalar]) -> None:
        """Add numbers, each against its step and, if it has ``samples``, against samples too."""
        now = time.time()
        against = [(one.samples, one.tag + AGAINST_SAMPLES, one.value) for one in scalars if one.samples is not None]
        steps = [(one.x, one.tag, one.value) for one in scalars]
        for x, group in groupby(sorted(steps + against, key=_x), key=_x):
            summary = Summary()
            for _, tag, value in group:
                summary.value.add(tag=encodable(tag), simple_value=value)
            self._hold(Event(wall_time=now, step=x, summary=summary))

    def texts(self, texts: Mapping[str, str]) -> None:
        """Add texts, which belong to no step."""
        described = metadata.create_summary_metadata(display_name=None, description=None)
        for tag, text in texts.items():
            summary = Summary()
            tensor = make_tensor_proto([encodable(text)])
            summary.value.add(tag=encodable(tag), metadata=described, tensor=tensor)
            self._hold(Event(wall_time=time.time(), step=0, summary=summary))

    def flush(self) -> None:
        """Write the buffered events."""
        held, self._held = self._held, []
        if not held:
            return
        file = self._open_file()
        try:
            for event in held:
                file.write(record(event))
        except BaseException:
            file.forget()
            raise
        file.keep()

    def close(self) -> None:
        """Write the buffered events and close the file."""
        try:
            self.flush()
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.release()

    def _hold(self, event: Event) -> None:
        self._held.append(event.SerializeToString())
        if len(self._held) > self._queue_size:
            self.flush()

    def _open_file(self) -> AppendFile:
        if self._file is None or self._file.gone():
            path = new_path(self._directory)
            self._file = AppendFile(path, opened(path, os.O_CREAT | os.O_EXCL))
            self._file.write(record(Event(wall_time=time.time(), file_version=FORMAT_VERSION).SerializeToString()))
        return self._file


def _x(one: tuple[int, str, float]) -> int:
    return one[0]


# --- Training metrics in the log: one line a step for the run, and one for each metric of the training state.

UNITS: Final = {
    "iteration-time": " s",
    "throughput": " samples/s/device",
    "model-flops-throughput-per-npu": " TFLOPS",
}
JUDGED: Final = ("loss", "grad-norm", "device_local_norm", "weight_norm", "device_accum_local_loss")
"""Metrics that are reported when they are not finite."""
MOST_NAMED: Final = 3
MOST_SHARES: Final = 16
"""Up to so many experts of a router, a line lists all shares; for more, only the least and the greatest."""


class LogWriter:
    """Writes to the monitor's logger.

    Args:
        total: The planned number of steps; 0 if it is not known.
    """

    def __init__(self, rank: int, total: int = 0) -> None:
        self._rank = rank
        self._total = total
        self._since: dict[str, int] = {}

    def run(self, step: int, scalars: Sequence[Scalar], since_last: float, reasons: Iterable[str] = ()) -> None:
        """Log one line for a step.

        Args:
            since_last: Seconds since the previous step ended.
            reasons: Why numbers are not finite; the line is then a warning.
        """
        shown = ", ".join(f"{one.tag} {_shown(one.value)}{UNITS.get(one.tag, '')}" for one in scalars)
        of = f" of {self._total}" if self._total else ""
        why = "".join(f"; {reason}" for reason in reasons)
        level = logging.WARNING if why else logging.INFO
        LOGGER.log(level, "[rank %d] step %d%s: %s; %.3g s since the last step%s", self._rank, step, of, shown, since_last, why)

    def state(self, scalars: Sequence[Scalar]) -> None:
        """Log a line for each metric, with its parameters."""
        for (metric, x), group in groupby(scalars, key=lambda one: (one.metric, one.x)):
            LOGGER.info("[rank %d] step %d: %s", self._rank, x, _joined(metric, list(group)))

    def load(self, step: int, tokens: Counts) -> None:
        """Log one line with the shares of experts, by router."""
        parts = [f"{name} {_shares(load(counts))}" for name, counts in tokens.items() if sum(counts)]
        if parts:
            LOGGER.info("[rank %d] step %d: expert_load %s", self._rank, step, "; ".join(parts))

    def reasons(self, step: int, scalars: Sequence[Scalar], local: Mapping[str, float], *, skipped: bool) -> list[str]:
        """Which metrics are not finite, since which step, and which gradients are affected first.

        Args:
            local: Norms of gradients, by parameter.
        """
        wrong = {one.tag: one.value for one in scalars if one.tag in JUDGED and not math.isfinite(one.value)}
        fine = {one.tag for one in scalars if one.tag not in wrong}  # a metric that is not shown in this step keeps its state
        self._since = {tag: since for tag, since in self._since.items() if tag not in fine}
        self._since.update({tag: step for tag in wrong if tag not in self._since})
        said = [f"{tag} is {_shown(value)}, since step {self._since[tag]}" for tag, value in wrong.items()]
        if said and (poisoned := [name for name, norm in local.items() if not math.isfinite(norm)]):
            more = f" and {len(poisoned) - MOST_NAMED} more" if len(poisoned) > MOST_NAMED else ""
            said.append(f"these gradients are not finite: {', '.join(poisoned[:MOST_NAMED])}{more}")
        return [*said, "the optimizer skipped the step"] if skipped else said


def _joined(metric: str, scalars: Sequence[Scalar]) -> str:
    if len(scalars) == 1 and scalars[0].tag == metric:
        return f"{metric} {_shown(scalars[0].value)}"
    return f"{metric} " + ", ".join(f"{one.tag.partition('/')[2]} {_shown(one.value)}" for one in scalars)


def _shares(shares: Sequence[float]) -> str:
    if len(shares) <= MOST_SHARES:
        return " ".join(map(_shown, shares))
    (least, fewest), (most, greatest) = (choose(enumerate(shares), key=itemgetter(1)) for choose in (min, max))
    return f"of {len(shares)} experts from {_shown(fewest)} (expert_{least}) to {_shown(greatest)} (expert_{most})"


def _shown(value: float) -> str:
    return f"{value:.6g}"


# --- The run's configuration as TensorBoard shows it: a text for each top-level key of the training YAML.

_PROFILE: Final = (
    "profile_communication",
    "profile_level",
    "profile_memory",
    "profile_start_step",
    "profile_stop_step",
    "profile_rank_ids",
    "profile_pipeline",
    "init_start_profile",
)
_EVALUATION: Final = ("eval_callbacks", "eval_step_interval", "eval_epoch_interval", "eval_dataset", "eval_dataset_task")
_CHECKPOINT: Final = ("load_ckpt_format", "auto_trans_ckpt", "load_ckpt_async")
_TRANSFORM: Final = ("transform_process_num", "src_strategy_path_or_dir")

DEPENDS: Final[Mapping[str, str]] = {
    "ignore_data_skip": "resume_training",
    **dict.fromkeys(_CHECKPOINT, "load_checkpoint"),
    **dict.fromkeys(_TRANSFORM, "auto_trans_ckpt"),
    **dict.fromkeys(_PROFILE, "profile"),
    **dict.fromkeys(_EVALUATION, "do_eval"),
    "lr_scale_factor": "lr_scale",
}
"""Keys that matter only if another key is shown and is neither false nor empty."""

DEPENDS_ON_FALSE: Final[Mapping[str, str]] = {"data_skip_steps": "ignore_data_skip"}
"""Keys that matter only if another key is shown and is false."""


def texts(config: TrainingConfig) -> dict[str, str]:
    """The texts by tag."""
    document: dict[str, Any] = {str(key): value for key, value in config.document.items()}
    return {key: _markdown(value) for key, value in document.items() if _is_shown(key, document)}


def _is_shown(key: str, document: Mapping[str, Any]) -> bool:
    if key not in document:
        return False
    if (needed := DEPENDS.get(key)) is not None:
        return bool(document.get(needed)) and _is_shown(needed, document)
    if (refuted := DEPENDS_ON_FALSE.get(key)) is not None:
        return document.get(refuted) is False and _is_shown(refuted, document)
    return True


def _markdown(value: Any) -> str:
    """Markdown, as TensorBoard shows it: mappings and lists become a block of YAML."""
    if isinstance(value, dict | list):
        block: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        return f"```\n{block}```"
    return str(value)


NOT_RECORDED: Final = (
    "the tensor monitor has not recorded this step. Either it records other steps than training metrics show, or the optimizer "
    "was not called."
)
NOT_HERE: Final = (
    "grad-norm is not shown: it was not set, and this rank is not known to have the whole gradient. Set grad_norm of each "
    "step, or pass gradients_are_global=True if every rank's optimizer is given the same gradients."
)
NO_LOCAL_NORMS: Final = "local_norm and device_local_norm are not shown:"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the metrics of a rank are shown.

    Attributes:
        events: None if nothing is written to TensorBoard.
        counts: Stores the token counts of experts; None if they are not recorded.
    """

    log: LogWriter
    events: EventWriter | None = None
    counts: ExpertCounts | None = None


class Reporting:
    """Shows each step at the configured destinations. A failure is logged once and counted; the other outputs continue.

    Args:
        devices: The number of devices of the job.
    """

    def __init__(
        self,
        config: TrainingConfig,
        devices: int,
        outputs: Outputs,
        failures: Failures,
        *,
        grad_norm_is_told: bool = False,
    ) -> None:
        run = config.callbacks.MFLossMonitor
        self._every = run.per_print_times if run is not None else 0
        self._state_every = config.monitor_config.step_interval if config.monitor_config.monitor_on else 0
        self._run, self._state = RunScalars(config), StateScalars(config)
        self._run_meter, self._state_meter = ThroughputMeter(devices), ThroughputMeter(devices)
        self._last: float | None = None
        self._norms_of_state, self._grad_norm_is_told = norms_of_state(config), grad_norm_is_told
        self._local_norms = bool(config.wants("local_norm_format") or config.wants("device_local_norm_format"))
        self.expects_norms = False
        self._log, self._events, self._counts = outputs.log, outputs.events, outputs.counts
        self._failures = failures

    def texts(self, texts: Mapping[str, str]) -> None:
        """Show the configuration of the run."""
        if self._events is not None:
            self._guarded("writing the configuration to TensorBoard", lambda events: events.texts(texts), self._events)

    def step(self, facts: StepFacts, norms: StepNorms | None) -> None:
        """Show one step, with its norms if there are any."""
        began = facts.ended if facts.began is None else facts.began
        self._last = began if self._last is None else self._last
        for meter in (self._run_meter, self._state_meter):
            meter.begin(began)
            meter.add(facts.batch_size, facts.flops)
        norms = self._of_the_step(facts, self._unscaled(facts, norms))
        self._warn_of_missing_norms(facts, norms)
        run, state = self._run_scalars(facts, norms), self._state_scalars(facts, norms)
        self._show(facts, norms, run, state, self._last)
        self._last = facts.ended
        if self._counts is not None and facts.tokens:
            self._guarded("counting what went to each expert", lambda counts: self._show_load(counts, facts), self._counts)

    def _unscaled(self, facts: StepFacts, norms: StepNorms | None) -> StepNorms | None:
        """Divide norms by their scales. None if a scale was set and cannot be read."""
        if norms is None:
            return None
        scales = facts.loss_scale, facts.gradient_scale
        return self._guarded("reading the loss scale", lambda it: unscaled(it, *map(value_of, scales)), norms)

    def _of_the_step(self, facts: StepFacts, norms: StepNorms | None) -> StepNorms | None:
        """Drop norms of gradients that cover only the last micro-batch."""
        if norms is None or facts.local_gradients_note is None:
            return norms
        if self._local_norms:
            self._failures.warn("no local norms", f"{NO_LOCAL_NORMS} {facts.local_gradients_note}.")
        return replace(norms, local={}, device_local=None)

    def _warn_of_missing_norms(self, facts: StepFacts, norms: StepNorms | None) -> None:
        run = self._shows_run(facts) and facts.grad_norm is None and not self._grad_norm_is_told
        state = self._shows_state(facts) and self._norms_of_state
        if self.expects_norms and norms is None and facts.measured is None and (run or state):
            self._failures.warn("no norms", f"Step {facts.step} has no norms: {NOT_RECORDED}")
        if run and norms is not None and not norms.gradient_is_here:
            self._failures.warn("no grad-norm", NOT_HERE)

    def _shows_run(self, facts: StepFacts) -> bool:
        return self._every > 0 and facts.step % self._every == 0

    def _shows_state(self, facts: StepFacts) -> bool:
        return self._state_every > 0 and facts.step % self._state_every == 0

    def _run_scalars(self, facts: StepFacts, norms: StepNorms | None) -> list[Scalar]:
        if not self._shows_run(facts):
            return []
        rates = self._run_meter.rates(facts.ended)
        return self._guarded("reading what training reports", lambda run: run.of(facts, norms, rates), self._run) or []

    def _state_scalars(self, facts: StepFacts, norms: StepNorms | None) -> list[Scalar]:
        if not self._shows_state(facts):
            return []
        throughput = self._state_meter.rates(facts.ended).throughput
        return self._guarded("reading the state of training", lambda it: it.of(facts, norms, throughput), self._state) or []

    def _show(self, facts: StepFacts, norms: StepNorms | None, run: list[Scalar], state: list[Scalar], last: float) -> None:
        local, skipped = (norms.local, norms.skipped) if norms is not None else ({}, False)
        reasons = self._log.reasons(facts.step, [*run, *state], local, skipped=skipped)
        if run or reasons:
            self._log.run(facts.step, _to(LOG, run), facts.ended - last, reasons)
        self._log.state(_to(LOG, state))
        if self._events is not None:
            self._guarded("writing to TensorBoard", lambda events: events.scalars(_to(TENSORBOARD, run + state)), self._events)

    def _show_load(self, counts: ExpertCounts, facts: StepFacts) -> None:
        tokens = counts.read(facts)
        self._log.load(facts.step, tokens)
        if self._events is not None:
            self._events.scalars(load_scalars(facts.step, tokens))

    def flush(self) -> None:
        """Write buffered events."""
        if self._events is not None:
            self._guarded("writing to TensorBoard", EventWriter.flush, self._events)

    def close(self) -> None:
        """Write buffered events and close every file."""
        if self._events is not None:
            self._guarded("closing the file for TensorBoard", EventWriter.close, self._events)
        if self._counts is not None:
            self._guarded("closing the counts of experts", ExpertCounts.close, self._counts)

    def _guarded(self, where: str, call: Callable[[T], R], on: T) -> R | None:
        try:
            return call(on)
        except EarlierFailure as failure:
            self._failures.defer_error(failure)
        except Exception as error:
            self._failures.report(where, error)
        return None


def _to(destination: str, scalars: Sequence[Scalar]) -> list[Scalar]:
    return [one for one in scalars if destination in one.where]


# --- The thread that shows metrics: training passes the facts of a step to it and continues.

MOST_QUEUED: Final = 4096
"""Steps that may wait to be shown; further steps are dropped and counted."""

FLUSH_SECONDS: Final = 10.0
"""Buffered events are written when nothing has arrived for this long."""

CLOSE_SECONDS: Final = 30.0

Task = Callable[[], object]


class MetricsWriter:
    """Takes facts from training and norms from a recording, joins them and shows them on its own thread.

    The queue has no lock that a forked process or a signal handler could find held. The thread is a daemon: call ``close`` to
    make sure that everything is written.
    """

    signal_seconds = 2.0

    def __init__(self, reporting: Reporting, failures: Failures) -> None:
        self._reporting = reporting
        self._failures = failures
        self._joiner = StepJoiner(reporting.step)
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"monitor-training-rank{failures.rank}", daemon=True)
        self._started = threading.Lock()
        self._closing = threading.Lock()
        self._adopted = self._expects_norms = self._abandoned = False
        self._born = PROCESS.forks

    @property
    def inert(self) -> bool:
        """Whether this is a copy in a forked process, which has no thread and writes nothing."""
        return self._born != PROCESS.forks

    def texts(self, texts: Mapping[str, str]) -> None:
        """Show the configuration of the run."""
        self._put(lambda: self._reporting.texts(texts))

    def facts(self, facts: StepFacts) -> None:
        """Add the facts of a step from the training loop. Does not wait."""
        if not self._adopted:
            # Adopted here and not earlier: at exit the recording that norms come from is closed first, and it exists by now.
            self._adopted = True
            PROCESS.adopt(self)
            PROCESS.watch_signals(self._failures)
        if self._queue.qsize() > MOST_QUEUED:
            said = "Training metrics are written too slowly: some steps are not shown. Show fewer steps or metrics."
            self._failures.warn("training metrics dropped", said)
        else:
            self._put(lambda: self._joiner.facts(facts))

    def norms(self, step: int, norms: StepNorms | None) -> None:
        """Add the norms of a recorded step; None if the step is lost. May be called from any thread."""
        self._put(lambda: self._joiner.norms(step, norms))

    def flush(self, seconds: float) -> bool:
        """Write everything that was queued, as far as its norms have arrived. Whether that was done within ``seconds``."""
        return self.ask_flush().wait(seconds)

    def ask_flush(self) -> Ticket:
        """``flush`` without waiting. Reentrant."""
        ticket = Ticket()
        if not self._started.locked() or self.inert:
            ticket.settle(True)
        else:
            self._queue.put(lambda: self._flush(ticket))
        return ticket

    def _flush(self, ticket: Ticket) -> None:
        self._reporting.flush()
        ticket.settle(True)

    def flush_without_writer(self) -> Ticket:
        """Refuse: without its thread nothing can be written."""
        ticket = Ticket()
        ticket.settle(False)
        return ticket

    def begin_close(self) -> None:
        """Nothing to do: norms may still arrive."""

    def close(self) -> bool:
        """Show what is left, and return whether that was done within ``CLOSE_SECONDS``. May be called repeatedly."""
        if self.inert or not self._started.locked():
            return True
        self._retire()
        self._thread.join(CLOSE_SECONDS)
        PROCESS.forget(self)
        return not self._thread.is_alive()

    def expect_norms(self) -> None:
        """Expect norms from a recording, until ``no_more_norms``."""
        self._expects_norms = self._reporting.expects_norms = True

    def no_more_norms(self) -> None:
        """The recording has ended."""
        self._expects_norms = False
        if self._abandoned:
            self._retire()

    def abandon(self) -> None:
        """The ``TrainingMetrics`` object is gone, so no more facts will come. Norms of the last steps may still arrive."""
        self._abandoned = True
        if not self._expects_norms:
            self._retire()

    def _retire(self) -> None:
        if not self.inert and self._closing.acquire(blocking=False):
            self._queue.put(None)

    def _put(self, task: Task) -> None:
        if self.inert or self._closing.locked():
            return
        self._queue.put(task)
        if self._started.acquire(blocking=False):
            self._thread.start()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._failures.guarded("showing training metrics", task)()
        self._joiner.pass_on_all()
        self._reporting.close()

    def _next(self) -> Task | None:
        try:
            return self._queue.get(timeout=FLUSH_SECONDS)
        except Empty:
            return self._reporting.flush
