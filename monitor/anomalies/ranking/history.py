"""What the steps before have left behind in weights and moments."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from monitor.anomalies.ranking.job import Job
from monitor.anomalies.ranking.subjects import Role, modules_around, parent
from monitor.anomalies.ranking.sweep import IN_PASSES, StageChunk, Weights
from monitor.coordinator.manifest_format import ManifestRecord, StepsRecord

CHANGED_NOTE: Final = "grad_reduced"
CHANGED: Final = "changed in place"
"""Where, and in which words, a manifest notes that gradients were clipped, or changed in another way, before they were read."""

_WEIGHTS: Final = ("param_origin", "param_updated")

Parameter = tuple[int, int, int, str]
"""Recording, stage, chunk and name."""


def notes_a_change(manifest: ManifestRecord | None) -> bool:
    """Whether gradients were read after they had been changed together. The same note may say other things of gradients."""
    return manifest is not None and CHANGED in str(manifest.notes.get(CHANGED_NOTE, ""))


def _sets() -> defaultdict[Role, set[Parameter]]:
    return defaultdict(set)


@dataclass
class Fired:
    """What fired in a step.

    Attributes:
        roles: Of all ranks of a recording.
        parameters: Those of which a series of that role fired.
        incomplete: Recordings of which not all events of the step are there.
    """

    step: int
    roles: dict[int, set[Role]] = field(default_factory=lambda: defaultdict(set))
    parameters: defaultdict[Role, set[Parameter]] = field(default_factory=_sets)
    incomplete: frozenset[int] = frozenset()

    def of(self, recording: int) -> Fired:
        """That of one recording."""
        own = {role: {one for one in names if one[0] == recording} for role, names in self.parameters.items()}
        return Fired(self.step, {recording: self.roles.get(recording, set())}, defaultdict(set, own), self.incomplete)

    def carried_over(self, later: Fired) -> Fired:
        """What is left of it after a step whose update was skipped."""
        both = {role: self.parameters[role] | later.parameters[role] for role in {*self.parameters, *later.parameters}}
        return Fired(later.step, self.roles, defaultdict(set, both), self.incomplete)


class History:
    """Told of each step, one after another.

    Attributes:
        recordings: Of the job.
        spoiled: Recordings whose moments have taken in a gradient that had fired.
        moments: Those that have fired.
    """

    def __init__(self, job: Job) -> None:
        self.recordings = sorted({one.recording for one in job.members})
        self.recorded = _Recorded(job)
        self.spoiled: set[int] = set()
        self.moments: set[Parameter] = set()
        self._judged: dict[int, set[StepsRecord]] = defaultdict(set)
        self._skipped: dict[int, set[StepsRecord]] = defaultdict(set)
        for one in job.members:
            self._judged[one.recording].add(one.events.judged.steps)
            if one.manifest is not None:
                self._skipped[one.recording].add(one.manifest.steps.skipped)
        self._last: dict[int, Fired] = {}

    def recordings_behind(self, step: int) -> frozenset[int]:
        """Those of which some rank has not judged the step, or not yet: it may have had events."""
        return frozenset(one for one, every in self._judged.items() if not all(steps.holds(step) for steps in every))

    def begin(self, step: int) -> None:
        """Forget what updates have come after."""
        self._last = {recording: one for recording, one in self._last.items() if not self._updated(recording, one.step, step)}

    def add(self, fired: Fired) -> None:
        """The step is over."""
        self.moments |= fired.parameters[Role.MOMENT]
        for recording in fired.roles:
            own = fired.of(recording)
            if any(steps.holds(fired.step) for steps in self._skipped[recording]):
                last = self._last.get(recording, Fired(fired.step))
                self._last[recording] = last.carried_over(Fired(own.step, {}, own.parameters))
            else:
                self._last[recording] = own
                if self.is_dirty(recording, own):
                    self.spoiled.add(recording)

    def last_update(self, recording: int) -> Fired | None:
        """What fired in the step whose update the current one began with; None if nothing did."""
        return self._last.get(recording)

    def doubtful(self, recording: int) -> bool:
        """Whether the last update may have spoiled weights."""
        last = self._last.get(recording)
        return last is not None and self.is_dirty(recording, last)

    def is_dirty(self, recording: int, fired: Fired) -> bool:
        """Whether gradients that the optimizer was given had fired, as far as they are recorded."""
        roles = fired.roles.get(recording, set())
        for kind, role in (("grad_reduced", Role.GRADIENT), ("grad_unreduced", Role.LOCAL_GRADIENT)):
            if self.recorded.anywhere(recording, kind) and recording not in fired.incomplete:
                return role in roles
        return bool(roles & {Role.GRADIENT, Role.ORIGINAL_WEIGHT, *IN_PASSES})

    def weights(self, fired: Fired) -> Weights:
        """What is known of the weights that a step began with in which ``fired`` fired."""
        doubtful = frozenset(one for one in self.recordings if self.doubtful(one))
        unknown = {one for one in doubtful if one in fired.incomplete or one in self._last[one].incomplete}
        weights = Weights(frozenset(where for where in self.recorded.weights if where[0] not in unknown), doubtful)
        bad = set(fired.parameters[Role.ORIGINAL_WEIGHT])
        bad.update(*(last.parameters[Role.UPDATED_WEIGHT] for last in self._last.values()))
        for recording, stage, chunk, name in bad:
            weights.modules.setdefault((recording, stage, chunk), set()).update(modules_around(parent(name)))
        return weights

    def _updated(self, recording: int, first: int, last: int) -> bool:
        """Whether the optimizer made a judged step strictly between the two."""
        skipped = max((one.between(first + 1, last - 1).count for one in self._skipped[recording]), default=0)
        return any(one.between(first + 1, last - 1).count > skipped for one in self._judged[recording])


class _Recorded:
    """Which kinds ranks record at all."""

    def __init__(self, job: Job) -> None:
        wired = [(one, one.wiring) for one in job.members if one.wiring is not None]
        kinds = {(one.recording, one.stage, id(wiring)): wiring.kinds for one, wiring in wired}
        self._kinds = {(recording, stage, chunk, kind) for (recording, stage, _), own in kinds.items() for kind, chunk in own}
        self._anywhere = {(recording, kind) for recording, _, _, kind in self._kinds}
        self._changed = {one.recording for one in job.members if notes_a_change(one.manifest)}

    @property
    def weights(self) -> frozenset[StageChunk]:
        """Where weights are recorded."""
        return frozenset((recording, stage, chunk) for recording, stage, chunk, kind in self._kinds if kind in _WEIGHTS)

    def by(self, where: StageChunk, kind: str) -> bool:
        """Whether any rank of the stage records the kind."""
        return (*where, kind) in self._kinds

    def anywhere(self, recording: int, kind: str) -> bool:
        return (recording, kind) in self._anywhere

    def changed_gradients(self, recording: int) -> bool:
        """Whether gradients were read after something had joined them all, as clipping by their norm does."""
        return recording in self._changed
