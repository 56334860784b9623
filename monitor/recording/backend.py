"""What a framework's room brings to what is common: all that touches a tensor, a module or an optimizer of its own.

``monitor.pytorch.backend`` and ``monitor.mindspore.backend`` are modules that have these names. Tensors, modules and optimizers
are ``Any`` here: what is common hands them on, and asks nothing of them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from monitor.config import MonitorConfig
from monitor.config.model import CcDistribution
from monitor.coordinator.ownership import Ownership
from monitor.failures import Failures
from monitor.recording.features.reading import Reading
from monitor.recording.gradients import GradientCollector
from monitor.recording.model_names import NamedParts
from monitor.recording.parameter_series import NamedParameter, SeriesOf
from monitor.recording.protocols import Calls, Removable
from monitor.recording.recorder import Recorder
from monitor.recording.run import ProcessTopology
from monitor.recording.step_clock import Clock
from monitor.recording.tensor_paths import TensorPaths
from monitor.series import Placement, SeriesTable

if TYPE_CHECKING:
    from monitor.recording.activations import ModuleCollector


Target = Any
"""Where a gradient goes: hashable, and equal to another of the same gradient."""

Write = Callable[[Any], None]
"""Takes a gradient."""


class Graph(Protocol):
    """What autograd knows of the tensors of a call."""

    def recording(self) -> bool:
        """Whether what is computed now is recorded for a backward."""

    def sequence_nr(self) -> int:
        """The number that nodes made from now on have, or exceed."""

    def requires_grad(self, x: Any) -> bool: ...

    def gradient_target(self, x: Any) -> Target:
        """Where the gradient of ``x`` goes, now. An in-place operation changes it later, so it is noted before the call."""

    def made_since(self, x: Any, start: int) -> bool:
        """Whether ``x`` is the result of a node with this number or a later one: its hooks go with the graph."""

    def producers(
        self, outputs: Iterable[Any], targets: Iterable[Target], start: int, *, others_call: bool
    ) -> Mapping[Target, Sequence[Any]]:
        """The edges into each target from nodes with sequence number ``start`` or later.

        Args:
            others_call: Whether other threads have called modules in this step.

        Raises:
            SeveralThreadsError: Other threads may have made some of these nodes.
        """

    def watch(self, target: Target, edges: Any, write: Write) -> list[Removable]:
        """Call ``write(gradient)`` once in each backward, with what these edges hand to the target.

        Returns:
            The handles of hooks on the target, which may outlive the graph.
        """

    def on_gradient(self, x: Any, write: Write) -> Removable:
        """Call ``write(gradient)`` with the whole gradient of ``x``."""

    def current_pass(self) -> int:
        """The number of the backward in progress; another one for every backward."""

    def backward_begins(self, x: Any, call: Write) -> None:
        """Call ``call`` when a backward comes to the result ``x`` of a forward, if it is one that a backward can begin from."""


class StepNotifier(Protocol):
    """What tells a ``StepListener`` of the steps of optimizers.

    Attributes:
        evaluating: Whether an optimizer is calling its closure: forwards that begin now are inside its step.
    """

    evaluating: bool

    @property
    def optimizers(self) -> Sequence[Any]:
        """Those that have a turn in each step; empty until one shows itself."""

    def remove(self) -> None:
        """Tell nobody any more, and undo every patch."""


class StepListener(Protocol):
    """What happens around one step of an optimizer, in this order."""

    def before_step(self, optimizer: Any) -> None: ...

    def gradients_ready(self, optimizer: Any) -> None:
        """Gradients are complete: at once, or after the closure's backward, as often as the optimizer calls it."""

    def after_step(self, optimizer: Any) -> None: ...

    def step_skipped(self, optimizer: Any) -> None:
        """Instead of ``after_step``: the gradients were not finite, and the optimizer was not called."""

    def all_stepped(self) -> None:
        """What holds all optimizers has stepped: the step ends, whether or not each of them has had its turn."""

    def loss_scale(self, optimizer: Any, scale: Any, scaler: int = 0) -> None:
        """Before the step: the gradients of this step were computed from a loss multiplied by ``scale``.

        Args:
            scaler: Which of the job's scalers it is of.
        """

    def scales_itself(self, optimizer: Any, found_inf: Any, still_scaled: bool) -> None:
        """Before the step of an optimizer that divides by the loss scale and skips on its own, inside its step.

        Args:
            found_inf: Shape (1,); not 0 where the step will be skipped.
            still_scaled: Whether gradients are multiplied by the loss scale until then.
        """


class Framework(Protocol):
    """Where gradients, weights and moments of a parameter are, and what other ranks hold of them.

    Attributes:
        name: As messages and the manifest have it.
        chunks: The model as given to ``set_monitor``.
        optimizers: What does the work; empty where the first that steps the model is to be found.
        unusable_state: What was found of optimizers' state that is no moment of one parameter, in sentences.
    """

    name: str
    chunks: Sequence[Any]
    optimizers: Sequence[Any]
    unusable_state: Sequence[str]

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of this rank that show in the model, by role. Those that the user passed come on top."""

    def notes(self) -> Mapping[str, str]:
        """What a reader of the numbers must know, for the manifest; by kind where it concerns one."""

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        """How what this rank records of a parameter relates to what others record; groups of the user's aside."""

    def completed(self, kind: str, parameter: NamedParameter, placed: Placement) -> Placement:
        """``placed``, with the replicas that the model shows or suggests, and no tensor and no group of the user's."""

    def aggregates(self, root: Any) -> bool:
        """Whether local gradients are replaced by the aggregated ones after the backward of the forward that begins now."""

    def weight(self, parameter: NamedParameter) -> Any:
        """What this rank holds of the weight that the optimizer steps, or None."""

    def moment(self, kind: str, parameter: NamedParameter, optimizer: Any) -> Any:
        """What this rank holds of a moment, or None."""

    def held(self, optimizer: Any) -> Collection[int] | None:
        """The ids of the parameters that an optimizer steps: the same object as long as they are the same. None for all."""

    def steps(self, listener: StepListener, failures: Failures) -> StepNotifier:
        """Tell ``listener`` of every step from now on."""


class CommunicationRecorder(Protocol):
    """Listens to communication, until it is closed."""

    wanted: CcDistribution

    def record_into(self, recorder: Any, roles: Mapping[str, Sequence[int]], note: Callable[[str, str], None]) -> None:
        """Give what is communicated from now on rows in ``recorder``, unless it has them in another already."""

    def end_log(self, directory: Any) -> Any:
        """Write the log; None if that was done before."""

    def close(self) -> None:
        """Listen no longer. Any number of times."""


class RecordingBackend(Protocol):
    """A framework.

    Attributes:
        leaves: Finds its tensors.
        graph: Its autograd.
        reading_of_features: Where the numbers of features are, and what they come to.
        never_called: Classes of modules that only hold others.
        optimizer_expected: What an optimizer may be, in words.
        asked_per_second: How often all ranks together may ask the job's store.
    """

    leaves: TensorPaths
    graph: Graph
    reading_of_features: Reading
    never_called: tuple[type, ...]
    optimizer_expected: str
    asked_per_second: float

    # tensors

    def computing(self) -> AbstractContextManager[object]:
        """What is computed inside is recorded by no graph, and changes nothing of the user's."""

    def layout_of(self, x: Any) -> object | None:
        """How a tensor that knows it is laid out over ranks; compares. None for any other tensor."""

    def placement_of(self, x: Any) -> Placement | None:
        """How the local part of a tensor that knows it relates to the parts of other ranks; None for any other tensor."""

    def activation_placement(self, x: Any) -> Placement:
        """The same for an activation or its gradient."""

    # modules

    def chunks_of(self, model: Any) -> Sequence[Any]:
        """The chunks of a virtual pipeline, or the one module as a list of itself.

        Raises:
            TypeError: Something in it is no module.
            ValueError: It cannot be observed. The message says why, and what to do.
        """

    def parts(self, chunk: Any) -> NamedParts: ...

    def takes_hooks(self, module: Any) -> bool: ...

    def before_forward(self, module: Any, call: Callable[..., None], *, compiled: bool = False) -> Removable:
        """Have ``call(module, args, kwargs)`` called before each forward.

        Args:
            compiled: Also where it is compiled together with its hooks, then without arguments, as far as the framework can.
        """

    def after_forward(
        self, module: Any, call: Callable[..., None], *, always: bool = False, compiled: bool = False
    ) -> Removable:
        """Have ``call(module, args, kwargs, result)`` called after each forward.

        Args:
            always: Also where it has raised, then with None, as far as the framework can.
            compiled: As above, then without a result.
        """

    def trains(self, module: Any) -> bool:
        """Whether a call of the module that begins now is one of training."""

    def root_trains(self, root: Any) -> bool:
        """Whether a forward of the whole model that begins now is one of training."""

    def repeating(self) -> bool:
        """Whether a forward that begins now repeats an earlier one, inside a backward."""

    def new_calls(self) -> Calls: ...

    # the job

    def is_settled(self) -> bool:
        """Whether rank and world size are final."""

    def initialized(self) -> bool:
        """Whether there is communication between ranks."""

    def has_others(self) -> bool:
        """Whether there are other ranks, which may add to what this one has computed."""

    def place(self, found: Callable[[], Mapping[str, Sequence[int]]] = ..., chunks: int = 1, **groups: Any) -> ProcessTopology:
        """Where this process stands now.

        Args:
            found: Ranks of groups that show in the model, by role.
            chunks: How many parts of the model this rank trains.
            groups: Process groups that were passed, by role, None where there is none. They come first.
        """

    def group_ranks(self, role: str, group: Any) -> tuple[int, ...] | None:
        """The global ranks of a process group; None where there is none that this rank belongs to. Raises ``TypeError``."""

    def versions(self) -> dict[str, str]:
        """Of the framework and of the device's runtime, for the manifest."""

    # what is made of it

    def framework_of(self, chunks: Sequence[Any], optimizer: Any, *, main_grad: bool) -> Any:
        """What keeps gradients, weights and moments of a model (``Framework``). Raises ``TypeError`` and ``ValueError``."""

    def new_recorder(self, series: SeriesTable, eps: float, *, magnitudes: bool) -> Recorder: ...

    def new_modules(self, recorder: Any, clock: Clock, failures: Failures) -> ModuleCollector: ...

    def new_gradients(
        self,
        parameters: Sequence[NamedParameter],
        recorder: Any,
        clock: Clock,
        failures: Failures,
        series_of: SeriesOf,
        framework: Any,
        ownership: Ownership,
        note: Callable[[str, str], None],
        *,
        each_micro_step: bool,
    ) -> GradientCollector: ...

    def new_updates(self, config: MonitorConfig, watched: Any) -> Any:
        """``Updates`` of what a configuration asks for."""

    def communication(self, wanted: CcDistribution, failures: Failures) -> CommunicationRecorder | None:
        """Listen from now on, if that is wanted and possible; a sentence says where it is not."""
