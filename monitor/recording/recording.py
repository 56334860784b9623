"""One recording: a table, an attachment that fills it, and the run that it is written to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from monitor.config import MonitorConfig
from monitor.coordinator.manifest_format import Watched
from monitor.dynamic import Job
from monitor.failures import LOGGER, Failures
from monitor.pipeline.protocols import Watcher
from monitor.recording.attachment import Attachment
from monitor.recording.attachment_spec import Watch
from monitor.recording.backend import Backend, Communication, Framework
from monitor.recording.gradients import NOT_OF_THE_STEP, SUMMED_EARLY
from monitor.recording.missing import Announced
from monitor.recording.model_names import ModelNames
from monitor.recording.run import OPEN, Place, Run, identity_of
from monitor.recording.step_clock import Schedule
from monitor.recording.switching import PutInForce, Switching
from monitor.selection import clean_name
from monitor.series import SeriesTable
from monitor.stats.rows import KindRows, TensorLayout
from monitor.stats.table import combined_micro_steps

Listening = Callable[[SeriesTable], Watcher]
"""Makes what looks at the rows of a recording, whose series are these."""


class Recording:
    """What one ``set_monitor`` brought into being.

    Args:
        ordinal: How many recordings this process had begun before.
        start_step: Number of the first step.
        listening: Make what looks at the rows of each step beside the alert rules, by what a failure in it is called.
        watched: What other ranks know the recording by; None: they know it by ``ordinal``.

    Attributes:
        attachment: Set by ``attach``.
        switching: Under dynamic monitoring, what is in force; else None.
    """

    attachment: Attachment

    def __init__(
        self,
        config: MonitorConfig,
        config_path: str,
        base: Path,
        where: Callable[[], Place],
        ordinal: int,
        failures: Failures,
        backend: Backend,
        start_step: int = 0,
        listening: Mapping[str, Listening] = MappingProxyType({}),
        watched: Watched | None = None,
    ) -> None:
        self._backend = backend
        self.series = SeriesTable()
        self._config = config
        self._config_path = config_path
        self._base = base
        self._where = where
        self._failures = failures
        self._ordinal = ordinal
        self._watched = watched
        self._start_step = start_step
        self._recorder = backend.new_recorder(self.series, config.eps, magnitudes=config.counts_magnitudes)
        self._opened: Run | None = None
        self._closed = False
        self._communication: Communication | None = None
        self.switching: Switching | None = None
        self._put_in_force: PutInForce = _nothing
        self._announced = Announced(failures)
        self._listening: dict[str, Watcher] = {"what was announced": self._announced}
        self._listening |= {name: make(self.series) for name, make in listening.items()}

    def listen(self, name: str, make: Listening) -> None:
        """From the next step on have another one look at the rows."""
        self._listening[name] = make(self.series)
        if self.run is not None:
            self.run.listen(name, self._listening[name])

    def follow_file(self, put_in_force: PutInForce) -> None:
        """From the end of the first step on, record what the configuration file asks for.

        Args:
            put_in_force: Between two steps: calls ``use`` with what a configuration comes to. Where it raises, it has left
                nothing recorded.
        """
        self._put_in_force = put_in_force
        if self.switching is None:
            self.switching = Switching(self._config_path, self._config, self, self._failures)
            if self._opened is not None:
                self.switching.opened(self._opened)
        self.attachment.at_boundary = self.switching.at_boundary

    def use(self, watch: Watch, names: ModelNames, schedule: Schedule, collected: int) -> None:
        """Between two steps: record otherwise, as if so many steps of ``schedule`` had been collected."""
        if watch.ownership.monitored or self._opened is not None:
            self.open().use(watch.config)
        self._recorder.use(watch.config.eps, magnitudes=watch.config.counts_magnitudes)
        self.attachment.use(watch, names, schedule, collected)
        self._announced.expect(self.attachment.expected, self.attachment.clock.step)

    def count_magnitudes(self, wanted: bool) -> None:
        """Count histograms of magnitudes from the next tensor on, or no longer."""
        self._recorder.count_magnitudes(wanted)

    def put_in_force(self, config: MonitorConfig, schedule: Schedule, collected: int) -> None:
        """See ``Switched``."""
        self._put_in_force(config, schedule, collected)

    def collected(self) -> int:
        """See ``Switched``."""
        return self.attachment.collected

    def job(self) -> Job:
        """See ``Switched``."""
        here = self._where()
        name = self._ordinal if self._watched is None else self._watched.key
        identity = identity_of(here, name, self._failures) if self.run is None else self.run.identity
        return Job(
            here.rank,
            here.world_size,
            here.store,
            f"monitor/dynamic/{identity.job_id}",
            self._backend.initialized,
            self._backend.asked_per_second,
        )

    def attach(self, watch: Watch, names: ModelNames, start_step: int) -> None:
        """Hook the model and the optimizer, in place of what was hooked before."""
        rest: tuple[int, Schedule | None] = (0, None)
        if hasattr(self, "attachment"):
            # The step in progress goes on under its number, and would stand twice if what it has so far were kept.
            self.attachment.detach(keep=False)
            rest = self.attachment.collected, self.attachment.schedule
        self.attachment = Attachment(watch, names, self._recorder, self.open, start_step, self._failures, self._backend, *rest)
        self._announced.expect(self.attachment.expected, self.attachment.clock.step)

    def open(self) -> Run:
        """The run, begun now if it was not: before the first record at the latest, when rank and job are known."""
        if self._opened is None:
            here = self._where()
            self._failures.rank = here.rank
            beside = next(iter(OPEN.runs()), None)
            self._opened = Run(
                self._config,
                self._config_path,
                self._base,
                here,
                self._ordinal,
                beside,
                self.series,
                self._backend.versions(),
                self._failures,
                self._listening,
                self._watched,
            )
            OPEN.add(self)
            if self.switching is not None:
                self.switching.opened(self._opened)
            self._announce(here.rank, self._opened)
        return self._opened

    def _announce(self, rank: int, run: Run) -> None:
        if run.resumes_after < 0:
            LOGGER.info("[rank %d] recording to %s", rank, run.directory)
            return
        said = "[rank %d] append_output: recording from step %d on to %s, which has steps up to %d"
        LOGGER.info(said, rank, self._start_step, run.directory, run.resumes_after)
        if self._start_step == 0:
            self._failures.warn(
                "resumed at step 0",
                f"append_output: steps 0 to {run.resumes_after} in {run.directory} will be overwritten. Pass start_iteration, "
                "the step of the checkpoint, to go on after them.",
            )

    def current(self) -> tuple[Mapping[str, KindRows], list[TensorLayout]]:
        """Rows of the step in progress; until the next one begins with a forward, of the step just ended."""
        table = self._recorder.table
        if self._recorder.has_rows:
            return self._now(), table.layouts
        return ({} if self.attachment.begun else self._just_ended()), table.layouts

    def _now(self) -> Mapping[str, KindRows]:
        _, combined = self.attachment.micro_step_kinds()
        kinds = self._recorder.kinds_now()
        return {kind: combined_micro_steps(rows) if kind in combined else rows for kind, rows in kinds.items()}

    def _just_ended(self) -> Mapping[str, KindRows]:
        """Nothing where that step was not collected, or was dropped. One that closing cut short still has its number."""
        step = self.attachment.clock.step
        latest = self._opened.pipeline.latest(self._config.close_seconds) if self._opened is not None else None
        return latest.kinds if latest is not None and latest.step in (step - 1, step) else {}

    def write_structure(self) -> Path:
        """Write ``module_struct.json`` of this rank."""
        assert self.attachment.structure is not None
        run = self.open()
        path = run.base / "module_struct" / f"rank{self._where().rank}" / "module_struct.json"
        self.attachment.structure.write(path)
        return path

    def record_communication(self, communication: Communication) -> None:
        """Give communication operators rows among the others."""
        self._communication = communication  # which listens for as long as somebody holds it
        communication.record_into(self._recorder, self._where().groups, self._note)

    def end_communication_log(self, communication: Communication) -> None:
        """Write the log of the first step into the directory of the rank, unless it was written before."""
        communication.end_log(self.open().directory)

    def _note(self, key: str, said: str) -> None:
        if (run := self.run) is not None:
            run.manifest.note(key, said)

    @property
    def backward_leaves_what_is_given(self) -> bool:
        """Whether the optimizer of the step in progress is given what backward has left: one process reduces nothing, and no
        framework stands between. Loss scales and clipping come later.
        """
        watch = self.attachment.watch
        plain = watch.framework.name in ("torch", "mindspore") and not self._backend.has_others()
        rows_are_of_steps = not watch.config.monitor_mbs_grad and self.local_gradients_note is None
        return self._recorder.has_rows and plain and rows_are_of_steps

    @property
    def local_gradients_note(self) -> str | None:
        """Why ``grad_unreduced`` is not what the micro-batches of a step make together; None where it is."""
        said = "" if self.run is None else str(self.run.manifest.notes.get("grad_unreduced", ""))
        several = self.attachment.clock.micro_steps > 1
        of_others = {SUMMED_EARLY, *(NOT_OF_THE_STEP if several else ())}
        return said if any(one in said for one in of_others) else None

    @property
    def run(self) -> Run | None:
        """None before the first record, and in a process forked since: there it is another's."""
        return None if self._opened is None or self._opened.pipeline.inert else self._opened

    def detach(self) -> None:
        """Take every hook away; the step in progress goes to the pipeline."""
        if hasattr(self, "attachment"):
            self._failures.guarded("detaching", self.attachment.detach)()
            if self.run is not None and self.attachment.clock.step > self._start_step:
                self.run.trained(self._start_step, self.attachment.clock.step - 1)

    def flush(self, seconds: float) -> bool:
        """Whether within ``seconds`` every step that has ended was written."""
        return self.run is None or self._closed or self.run.pipeline.flush(seconds)

    def close(self) -> None:
        """Detach, write what is left, and say what was lost. Any number of times."""
        if self.switching is not None:
            self._failures.guarded("closing dynamic monitoring", self.switching.close)()
        self.detach()
        run = self.run
        if run is None or self._closed:
            return
        self._closed = True
        OPEN.discard(self)
        complete = run.close()
        lost = sum(run.pipeline.dropped.values())
        if lost or not complete:
            said = f"{lost} step{' was' if lost == 1 else 's were'} dropped" if lost else "not everything could be written"
            LOGGER.warning("[rank %d] %s; see %s", self._failures.rank, said, run.directory / "manifest.json")


def _nothing(_config: MonitorConfig, _schedule: Schedule, _collected: int) -> None:
    """Nothing is put in force before there is a file to follow."""


# --- What is the same on every rank that trains a model, and tells it from other models of the process.

INNER: Final = ("_orig_mod", "module")
"""Where wrappers keep what they wrap."""

MOST_WRAPPERS: Final = 8


def role_of(framework: Framework, backend: Backend, dp: Any, tp: Any, pp: Any) -> str:
    """The role of the model that ``framework`` was found for.

    Stages of a pipeline may be modules of several classes, and one of them may have no parameter that is trained.

    Args:
        dp: The data-parallel group that was passed, or None. A rank that is in no such group has it passed, too.
        tp: The tensor-parallel group.
        pp: The pipeline-parallel group.
    """
    groups = [name for name, group in (("dp", dp), ("tp", tp), ("pp", pp)) if group is not None]
    *wrappers, model = _classes(framework.chunks[0]) if framework.chunks else [""]
    own = [] if is_staged(framework, backend, pp) else [model, *_training(framework, backend)]
    return " ".join([framework.name, *wrappers, *own, *(f"{name}_group" for name in groups)])


def names_of(framework: Framework, backend: Backend) -> Iterator[str]:
    """The names of all parameters, chunk by chunk."""
    for chunk, root in enumerate(framework.chunks):
        for name, _ in backend.parts(root).parameters:
            yield f"{chunk}:{clean_name(name)}"


def _training(framework: Framework, backend: Backend) -> tuple[str, str]:
    """What steps the model, and whether it is trained at all: an average of the weights is not."""
    parameters = (parameter for root in framework.chunks for _, parameter in backend.parts(root).parameters)
    trained = any(getattr(parameter, "requires_grad", False) for parameter in parameters)
    classes = dict.fromkeys(type(one).__name__ for one in framework.optimizers)  # of one a parameter, one name
    return "+".join(classes), "trained" if trained else "frozen"


def is_staged(framework: Framework, backend: Backend, pp: Any) -> bool:
    """Whether the ranks may have other parts of one model."""
    known = [_ranks_of(pp, backend), framework.groups().get("pp")]
    return any(ranks is not None and len(ranks) > 1 for ranks in known) or "torch.distributed.pipelining" in sys.modules


def _ranks_of(pp: Any, backend: Backend) -> Any:
    """None of what is no group: ``set_monitor`` says so where it needs the group."""
    try:
        return backend.group_ranks("process_group", pp)
    except (TypeError, ValueError):
        return None


def _classes(root: Any) -> list[str]:
    """Of the wrappers around a model, from outside in, and of the model."""
    found = [type(root).__name__]
    while len(found) < MOST_WRAPPERS and (root := _wrapped(root)) is not None:
        found.append(type(root).__name__)
    return found


def _wrapped(root: Any) -> Any:
    inner = (getattr(root, name, None) for name in INNER)
    return next((one for one in inner if hasattr(one, "named_parameters") or hasattr(one, "parameters_and_names")), None)
