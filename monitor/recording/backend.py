"""The adapter interface that a framework implements: access to its tensors, modules, optimizers, autograd and ranks.

``monitor.pytorch.backend`` and ``monitor.mindspore.trainer_mon`` build a ``RecordingBackend`` from modules that implement these
protocols. Tensors, modules and optimizers are ``Any`` here: common code passes them on without using them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

if TYPE_CHECKING:
    from monitor.config.model import CcDistribution
    from monitor.failures import Failures
    from monitor.recording.activations import CallHooks, ModuleCollector, ModuleWatcher
    from monitor.recording.attached_model import Attached, NamedParameter, NamedParts
    from monitor.recording.collectives import Communication
    from monitor.recording.features.reading import FeatureReading
    from monitor.recording.gradient_edges import BackwardEngine
    from monitor.recording.module_calls import CallPlans
    from monitor.recording.parameters import GradientRows, GradientSource
    from monitor.recording.phases import Clipping, Collector
    from monitor.recording.recorder import TensorReader
    from monitor.recording.run import ProcessTopology
    from monitor.recording.tensor_paths import TensorPaths
    from monitor.series import Placement, SeriesTable

Target = Any
"""The place in the graph that a gradient flows to. Hashable; equal for the same gradient."""

Start = Any
"""The beginning of a call in the graph: 0, or what ``Autograd.sequence_nr`` returned."""

Write = Callable[[Any], None]
"""Receives a gradient."""


class Removable(Protocol):
    """The handle that frameworks return for a hook."""

    def remove(self) -> None: ...


class HookSet:
    """Handles of registered hooks."""

    def __init__(self) -> None:
        self._handles: list[Removable] = []

    def add(self, handle: Removable) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles.pop().remove()


class Autograd(Protocol):
    """The autograd graph of the tensors of a call."""

    @property
    def engine(self) -> BackwardEngine[Any]:
        """Hooks on the graph, and the number of the backward in progress."""

    def recording(self) -> bool:
        """Whether operations are recorded for a backward now."""

    def sequence_nr(self) -> Start:
        """The beginning of a call: tells nodes that are created from now on from earlier ones."""

    def requires_grad(self, x: Any) -> bool: ...

    def gradient_target(self, x: Any) -> Target:
        """The current target of the gradient of ``x``. Read it before a call: an in-place operation changes it."""

    def made_since(self, x: Any, start: Start) -> bool:
        """Whether ``x`` is the result of a node created after ``start``; any node, if it is 0. Its hooks are freed with the
        graph.
        """

    def producers(
        self, outputs: Iterable[Any], targets: Iterable[Target], start: Start, *, others_call: bool
    ) -> Mapping[Target, Sequence[Any]]:
        """The edges into each target from nodes created after ``start``.

        Args:
            others_call: Whether other threads have called modules in this step.

        Raises:
            SeveralThreadsError: Other threads may have created some of these nodes.
        """

    def on_gradient(self, x: Any, write: Write) -> Removable:
        """Call ``write(gradient)`` with the whole gradient of ``x``."""


class StepNotifier(Protocol):
    """Calls a ``StepListener`` at the steps of optimizers.

    Attributes:
        evaluating: Whether an optimizer is calling its closure, so that a forward that begins now is part of its step.
    """

    evaluating: bool

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers that have a turn in each step; empty until the first one is found."""

    def remove(self) -> None:
        """Stop calling the listener, and undo every patch."""


class StepListener(Protocol):
    """Receives the phases of one optimizer step, in this order."""

    def before_step(self, optimizer: Any) -> None: ...

    def gradients_ready(self, optimizer: Any) -> None:
        """Gradients are complete: at once, or after each backward of a closure that the optimizer calls."""

    def after_step(self, optimizer: Any, *, skipped: bool = False) -> None:
        """The turn of an optimizer ends.

        Args:
            skipped: Whether the gradients were not finite, and the optimizer was not called or has changed nothing.
        """

    def clipped(self, clipping: Clipping) -> None:
        """Gradients were clipped by their total norm, or the norm was computed, before the end of an optimizer's step."""

    def all_stepped(self) -> None:
        """The container of all optimizers has stepped: the step ends, even if some of them had no turn."""

    def others_stepped(self, old: Any, new: Any, stepped: Collection[int], *, elsewhere: bool = False) -> None:
        """An optimizer that was not passed has stepped: in the place of one that was, beside it, or in another model.

        Args:
            old: An optimizer that was passed, of which ``new`` has stepped all parameters; None if there is none.
            stepped: The ids of the parameters that ``new`` has stepped.
            elsewhere: Whether ``new`` was passed with another model, which may share parameters.
        """

    def loss_scale(self, optimizer: Any, scale: Any, scaler: int = 0, *, late: bool = False) -> None:
        """Called before the step: its gradients were computed from a loss multiplied by ``scale``.

        Args:
            scaler: Index of the scaler in the job.
            late: Whether the gradients are still multiplied by it. They are divided before ``gradients_ready``.
        """

    def scales_itself(self, optimizer: Any, found_inf: Any, still_scaled: bool) -> None:
        """Called before the step of an optimizer that divides by the loss scale and skips by itself, inside its step.

        Args:
            found_inf: Shape (1,); not 0 if the step will be skipped.
            still_scaled: Whether the gradients are still multiplied by the loss scale.
        """


class FrameworkAdapter(Protocol):
    """Reads gradients, weights and moments of parameters, and knows their placement on the ranks.

    One protocol for both, because each place of a parameter's data decides how it is read and which ranks hold it.

    Attributes:
        name: Name in messages and the manifest.
        chunks: The model as passed to ``set_monitor``.
        optimizers: The innermost optimizers; empty if the first one that steps the model is still to be found.
        unusable_state: Sentences about optimizer state that is not a moment of one parameter.
    """

    name: str
    chunks: Sequence[Any]
    optimizers: Sequence[Any]
    unusable_state: Sequence[str]

    def groups(self) -> Mapping[str, Sequence[int]]:
        """The groups of this rank that the model contains, by role. Groups that the user passes are added to them."""

    def notes(self) -> Mapping[str, str]:
        """Notes for the manifest about how to read the numbers; by kind if a note is about one kind."""

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        """The placement of a kind of a parameter, without the groups that the user passed."""

    def completed(self, kind: str, parameter: NamedParameter, placed: Placement, *, around: bool) -> Placement:
        """``placed``, with further replicas that the model shows or suggests, but neither tensors nor passed groups show.

        Args:
            around: Whether ranks that hold no part of this rank's model may hold replicas.
        """

    def weight(self, parameter: NamedParameter) -> Any:
        """This rank's part of the weight that the optimizer steps; None if there is none."""

    def moments(self, kinds: Sequence[str], parameter: NamedParameter, optimizer: Any) -> Sequence[Any]:
        """This rank's part of each moment; None if there is none."""

    def held(self, optimizer: Any) -> Collection[int] | None:
        """The ids of the parameters that an optimizer steps; None for all. Returns the same object until the ids change."""

    def learning_rates(self, optimizer: Any) -> Sequence[Any]:
        """The learning rate of each parameter group, with which the optimizer steps next: a number, or a tensor of one element;
        None for a group that has none. Does not wait.
        """

    def steps(self, listener: StepListener, failures: Failures) -> StepNotifier:
        """Call ``listener`` at every step from now on."""


class Tensors(Protocol):
    """Access to tensors.

    Attributes:
        paths: Finds tensors in arguments and results.
    """

    paths: TensorPaths

    def scalar(self) -> Any:
        """A tensor of one element on the host, for rows of numbers that the host knows."""

    def number_of(self, x: Any) -> Any:
        """A snapshot of a number: a float, or for a tensor on a device a tensor of one element there. Does not wait.

        Raises:
            TypeError: ``x`` is neither a real number nor a tensor of one element whose value this rank has.
        """

    def computing(self) -> AbstractContextManager[object]:
        """A context for the monitor's own operations: autograd does not record them, and they change no state of the user."""

    def layout_of(self, x: Any) -> object | None:
        """The layout over ranks of a tensor that knows it, comparable with ``==``; None for any other tensor."""

    def placement_of(self, x: Any) -> Placement | None:
        """The placement of a tensor that knows its layout over ranks; None for any other tensor."""

    def activation_placement(self, x: Any) -> Placement:
        """The placement of an activation or its gradient."""

    def has_gradient(self, parameter: Any) -> bool:
        """Whether a parameter holds a gradient. False if the framework keeps gradients elsewhere."""


Shown = Literal["results", "arguments", "calls"]
"""What compiled code shows of a call."""


class ForwardHooks(Protocol):
    """Hooks around the forwards of modules."""

    def takes_hooks(self, module: Any) -> bool: ...

    def before_forward(self, module: Any, call: Callable[..., None], *, compiled: bool = False) -> Removable:
        """Register ``call(module, args, kwargs)`` before each forward.

        Args:
            compiled: Also call it, without arguments, where the module is compiled with its hooks, if the framework can.
        """

    def after_forward(
        self, module: Any, call: Callable[..., None], *, always: bool = False, compiled: bool = False
    ) -> Removable:
        """Register ``call(module, args, kwargs, result)`` after each forward.

        Args:
            always: Also call it with None if forward raised, if the framework can.
            compiled: As for ``before_forward``, without a result.
        """

    def around_forward(
        self,
        module: Any,
        before: Callable[..., None],
        after: Callable[..., None],
        whole: Callable[..., None],
        shows: Shown,
    ) -> Sequence[Removable]:
        """Register both, as ``before_forward`` and ``after_forward`` with ``always`` do.

        Args:
            whole: Called in place of both where the module is compiled with its hooks, if the framework can. It is given what
                ``after`` is, a function that makes a ``Search`` of the calls inside, and whether an argument was changed in
                place. Arguments and results are tensors without their structure; there are none if they are sharded.
            shows: What ``whole`` needs: results, arguments as well, or also the calls inside. Compiled code keeps these tensors
                until the module's call ends.
        """


class Modules(ForwardHooks, Protocol):
    """Access to modules and their calls."""

    def chunks_of(self, model: Any) -> Sequence[Any]:
        """The chunks of a virtual pipeline, or the one module as a list of itself.

        Raises:
            TypeError: The model, or an item of the list, is not a module.
            ValueError: The model cannot be observed. The message gives the reason and what to do.
        """

    def parts(self, chunk: Any) -> NamedParts: ...

    def never_called(self, module: Any) -> bool:
        """Whether a module only contains others."""

    def trains(self, module: Any) -> bool:
        """Whether a call of the module that begins now is part of training."""

    def repeating(self) -> bool:
        """Whether a forward that begins now is a recomputation inside a backward."""

    def new_hooks(self, collector: ModuleCollector) -> CallHooks:
        """The hooks of the modules of a collector."""


class ProcessGroups(Protocol):
    """The ranks of the job.

    Attributes:
        asked_per_second: The maximum rate of requests of all ranks together to the job's store.
    """

    asked_per_second: float

    def is_settled(self) -> bool:
        """Whether rank and world size are final."""

    def initialized(self) -> bool:
        """Whether there is communication between ranks."""

    def has_others(self) -> bool:
        """Whether there are other ranks, whose results may be added to this rank's."""

    def place(self, found: Callable[[], Mapping[str, Sequence[int]]] = ..., chunks: int = 1, **groups: Any) -> ProcessTopology:
        """The current topology of this process.

        Args:
            found: Returns the ranks of groups that the model contains, by role.
            chunks: Number of model chunks that this rank trains.
            groups: Process groups that were passed, by role; None if not passed. They have precedence over ``found``.
        """

    def group_ranks(self, role: str, group: Any) -> tuple[int, ...] | None:
        """The global ranks of a process group; None if this rank belongs to none. Raises ``TypeError`` if it is no group."""

    def versions(self) -> dict[str, str]:
        """The versions of the framework and of the device's runtime, for the manifest."""


class Factories(Protocol):
    """Creates the objects of a framework.

    Attributes:
        optimizer_expected: The accepted types of optimizers, in words.
    """

    optimizer_expected: str

    def framework_of(self, chunks: Sequence[Any], optimizer: Any, *, main_grad: bool) -> Any:
        """The ``FrameworkAdapter`` of a model and its optimizers. Raises ``TypeError`` and ``ValueError``."""

    def new_reader(
        self, series: SeriesTable, eps: float, *, magnitudes: bool, higher: bool, check_sums: bool
    ) -> TensorReader: ...

    def new_plans(self, watcher: ModuleWatcher) -> CallPlans | None:
        """Faster ways for the calls of a module; None if there are none."""

    def new_gradients(self, rows: GradientRows) -> GradientSource:
        """Take gradients from now on, and record them in ``rows``."""

    def new_updates(self, attached: Attached) -> Iterable[tuple[str, Collector]]:
        """Create the configured collectors of updates, in the order of their calls, each with the field that asks for it."""

    def communication(self, wanted: CcDistribution, failures: Failures) -> Communication | None:
        """Observe communication from now on, if configured and possible; logs a warning if it is impossible."""


@final
@dataclass(frozen=True, slots=True)
class RecordingBackend:
    """A framework. Code that runs in each step keeps the protocol that it calls, to save a lookup."""

    tensors: Tensors
    autograd: Autograd
    modules: Modules
    job: ProcessGroups
    features: FeatureReading
    factories: Factories
