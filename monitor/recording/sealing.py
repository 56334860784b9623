"""Seals the rows of each collected step, and passes them to the pipeline of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from monitor.recording.attachment_spec import AttachmentSpec, Host
from monitor.recording.dataflow import SeenModule, observed_dataflow
from monitor.recording.run import Run
from monitor.recording.step_clock import Clock
from monitor.series import CALL_KIND, MICRO_STEP_KINDS
from monitor.stats.table import Status


@final
class StepSealer:
    """Copies the rows of a step into a table of the pipeline's ring, and adds notes to the manifest.

    Attributes:
        micro_step_kinds: Kinds with a row for each micro-step.
        combined_kinds: Kinds whose micro-steps or operator calls are combined.
        counted_kinds: Kinds whose rows are operator calls, combined and counted.
    """

    def __init__(self, host: Host, clock: Clock, watch: AttachmentSpec, *, dataflow_written: bool) -> None:
        self._host, self._clock = host, clock
        self._introduced = self._dataflow_written = False
        self.use(watch)
        self._dataflow_written = dataflow_written

    def use(self, watch: AttachmentSpec) -> None:
        """Follow a configuration from the next step on. If it records activations, their dataflow is written again."""
        self._watch, config = watch, watch.config
        self._dataflow_written = self._dataflow_written and not config.xy_distribution
        calls = frozenset({CALL_KIND} if config.cc_distribution.enable else ())
        gradients = frozenset({"grad_unreduced"} if config.monitor_mbs_grad else ())
        each = config.micro_steps == "each"
        self.counted_kinds: frozenset[str] = calls
        self.micro_step_kinds: frozenset[str] = MICRO_STEP_KINDS | gradients if each else gradients
        self.combined_kinds: frozenset[str] = calls if each else MICRO_STEP_KINDS | calls

    def note(self, key: str, said: str) -> None:
        """Add a note to the manifest."""
        self._opened().manifest.note(key, said)

    def seal(self, status: Status, seen: Callable[[], Sequence[SeenModule]]) -> None:
        """Submit the rows of the step; without room in the ring they are dropped.

        Args:
            seen: Returns the modules that were called in the step.
        """
        try:
            self._submit(status, seen)
        except BaseException:
            self._host.recorder.discard()  # this step's measurements must not become rows of the next step
            raise

    def _submit(self, status: Status, seen: Callable[[], Sequence[SeenModule]]) -> None:
        run, recorder, step = self._opened(), self._host.recorder, self._clock.step
        if not self._dataflow_written:  # of one step: the other steps are nearly the same
            self._dataflow_written = True
            write = self._host.failures.guarded(
                "following the flow of data", self._write_dataflow, "The manifest has none of it."
            )
            write(run, seen)
        sealed = run.pipeline.reserve(step)
        if sealed is None:
            recorder.discard()
            return
        try:
            sealed.step, sealed.status, sealed.ops = step, status, self._watch.ops()
            sealed.micro_step_kinds, sealed.combined_kinds = self.micro_step_kinds, self.combined_kinds
            sealed.counted_kinds = self.counted_kinds
            recorder.seal(sealed)
        except BaseException:
            run.pipeline.give_back(sealed)
            raise
        run.pipeline.submit(sealed)

    def _write_dataflow(self, run: Run, seen: Callable[[], Sequence[SeenModule]]) -> None:
        run.manifest.flows(observed_dataflow(self._host.recorder.table, seen()))

    def _opened(self) -> Run:
        """The run. The first call adds the framework's notes to its manifest."""
        run = self._host.run()
        if not self._introduced:
            self._introduced = True
            notes = self._host.failures.guarded("asking the framework for notes", self._watch.framework.notes)() or {}
            for key, said in notes.items():
                run.manifest.note(key, said)
        return run
