"""The tensors that MindSpore compiles into an optimizer's step: it continues with them if the program replaces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import mindspore as ms
from mindspore import Parameter, nn

from monitor.failures import Failures
from monitor.mindspore.frameworks.optimizer_state import OptimizerState
from monitor.series import LEARNING_RATE, kinds_asked_for
from monitor.stats.mindspore.tensors import on_host

REPLACED: Final = (
    "{what} of {name} were replaced after its first step (set_data, load_param_into_net). MindSpore has compiled this "
    "optimizer, and it continues with the earlier tensors: it uses no new learning rate or moment, and changes no new weight. "
    "So learning rates, moments and what follows from them have no rows from here on. Write new values into the "
    "tensors with mindspore.ops.assign. Or make a new optimizer after loading, and pass it to set_monitor."
)
_OF_STATE: Final = ("mv_distribution", "ur_distribution", "mg_direction", "optimizer_health")
ABSENT: Final = f"{kinds_asked_for(_OF_STATE)}, {LEARNING_RATE} of replaced tensors"
"""The cause of the warning names what has no rows."""


class KeptTensors:
    """The weights and the state of one optimizer, and where they were when MindSpore compiled its step.

    Classes whose ``construct`` is not compiled use what the program puts in place.
    """

    def __init__(self, state: OptimizerState) -> None:
        self._state = state
        self._is_compiled = bool(getattr(type(state.optimizer).construct, "__wrapped_by_jit__", False))
        self._kept: Mapping[str, Sequence[Parameter]] = {}
        self._smallest: Parameter | None = None
        self._addresses: Mapping[str, Sequence[int]] = {}
        self._are_replaced = False

    def stepped(self) -> None:
        """The optimizer was called, so it is compiled. The first call takes the addresses, and waits.

        Raises:
            EarlierFailure: An operation of training has failed.
        """
        if self._is_compiled and self._smallest is None:
            optimizer = self._state.optimizer
            weights = tuple(optimizer.parameters)
            moments = self._state.tensors()[len(weights) :]
            rates = tuple(_rates(optimizer))
            self._kept = {"The learning rate or the count of steps": rates, "Moments": moments, "Weights": weights}
            self._smallest = min((*rates, *moments, *weights), key=lambda one: one.size)
            self._addresses = self._addresses_now(self._smallest)

    def step_ended(self) -> None:
        """A step has ended that compiled code may have made: the optimizer's own count tells. GRAPH_MODE uses new tensors.

        Raises:
            EarlierFailure: An operation of training has failed.
        """
        if self._is_compiled and self._smallest is None and ms.get_context("mode") != ms.GRAPH_MODE:
            count = getattr(self._state.optimizer, "global_step", None)
            if count is not None and on_host(count).any():
                self.stepped()

    def are_replaced(self, failures: Failures | None) -> bool:
        """Whether the program has replaced one of them since then; the first time this warns. It waits for the operations so
        far, as the call of the optimizer will.

        Raises:
            EarlierFailure: An operation of training has failed.
        """
        if self._smallest is None or self._are_replaced:
            return self._are_replaced
        now = self._addresses_now(self._smallest)
        replaced = [what for what in now if now[what] != self._addresses[what]]
        self._are_replaced = bool(replaced)
        if replaced and failures is not None:
            failures.nothing_of(ABSENT, REPLACED.format(what=replaced[0], name=type(self._state.optimizer).__name__))
        return self._are_replaced

    def _addresses_now(self, smallest: Parameter) -> Mapping[str, Sequence[int]]:
        on_host(smallest)  # ``data_ptr`` waits, too, and would take the error of an operation of training
        return {what: [one.data_ptr() for one in each] for what, each in self._kept.items()}


def _rates(optimizer: Any) -> Iterator[Parameter]:
    """The parameters that hold learning rates, or from which schedules compute them. Own classes may have none."""
    kept = getattr(optimizer, "learning_rate", None)
    each = (*(kept if isinstance(kept, (tuple, list)) else (kept,)), getattr(optimizer, "global_step", None))
    for one in {id(one): one for one in each}.values():
        if isinstance(one, nn.Cell):
            yield from one.get_parameters()
        elif isinstance(one, Parameter):
            yield one
