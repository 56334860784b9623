"""What a monitor has to record of a loop of cells: forward and backward by numpy in float64, weights and state as they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from cell_loops import Observer, Training, array
from loop_absences import LEAF
from loop_clock import Clock
from loop_rows import Expected, Place, Rows, Wide
from mindspore import Parameter

UNREACHED = "MindSpore gives zeros for a parameter that the loss does not depend on, and may call no hook"


class Known:
    """A tensor: its numbers, and its gradient so far; ``differentiable``: whether it depends on a parameter, or is one."""

    def __init__(self, numbers: Wide, *, differentiable: bool, is_parameter: bool = False) -> None:
        self.is_parameter = is_parameter
        self.numbers = numbers
        self.differentiable = differentiable
        self.gradient: Wide | None = None

    def add(self, gradient: Wide) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass
class Made:
    """A call of a cell: what it took, what it made, and what it returned."""

    name: str
    mark: str
    kind: str
    taken: list[Known]
    made: Known
    returned: list[Known]
    before: Wide = field(default_factory=lambda: np.zeros(0))


class Reference(Observer):
    def __init__(self) -> None:
        self.rows: Rows = {}

    def attach(self, training: Training) -> None:
        self.training = training
        self.clock = Clock(len(training.optimizers))
        self._weights = self._wide_weights()
        self._steps: Counter[int] = Counter()

    def _wide_weights(self) -> dict[str, Wide]:
        return {name: array(one).astype(np.float64) for name, one in self.training.parameters.items()}

    def _add(self, kind: str, name: str, *tensors: np.ndarray, micro_step: int = -1, unless: str = "") -> None:
        place = Place(self.clock.step, kind, name, micro_step)
        self.rows[place] = Expected(tuple(x.astype(np.float64) for x in tensors), unless)

    # Forward and backward

    def micro_batch_ended(self, x: np.ndarray, gradients: Sequence[np.ndarray]) -> None:
        self.clock.micro_step += 1
        self._weights = self._wide_weights()
        values, calls = self._forward(Known(x.astype(np.float64), differentiable=False))
        returned = [values[one] for one in self.training.loop.returned]
        for place, one in enumerate(returned):
            one.add((2 * one.numbers + place) / one.numbers.size)
        self._activation("actv", ".input", values[0].numbers)
        reached = self._backward(calls)
        self._results("", returned, "")
        self._unreduced(gradients, reached)

    def _forward(self, x: Known) -> tuple[list[Known], list[Made]]:
        values, calls, counts = [x], [], Counter[int]()
        mine = {name: one for name, one in self._weights.items() if name.endswith(".own")}
        own = {name: Known(one, differentiable=True, is_parameter=True) for name, one in mine.items()}
        for call in self.training.loop.calls:
            kind, name, taken = self.training.loop.cells[call.cell], f"layers.{call.cell}", [values[one] for one in call.values]
            before, numbers = self._computed(kind, name, [one.numbers for one in taken])
            made = Known(numbers, differentiable=kind != "tanh" or taken[0].differentiable)
            beside = {"gives back": taken[:1], "gives own": [own[f"{name}.own"]] if kind == "gives own" else []}
            returned = [made, *beside.get(kind, [])]
            mark = f"#{counts[call.cell]}" if counts[call.cell] else ""
            counts[call.cell] += 1
            calls.append(Made(name, mark, kind, taken, made, returned, before))
            values += returned
            for place, one in enumerate(taken):
                self._activation("actv", f"{name}.input{f'_{place}' if len(taken) > 1 else ''}{mark}", one.numbers)
        return values, calls

    def _computed(self, kind: str, name: str, given: Sequence[Wide]) -> tuple[Wide, Wide]:
        """The sum before a tanh, and the result."""
        if kind == "dense":
            made = given[0] @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
            return made, made
        if kind == "gives own":
            made = given[0] * self._weights[f"{name}.own"]
            return made, made
        if kind == "tanh":
            return given[0], np.tanh(given[0])
        factors = self._weights[f"{name}.factors"]
        made = sum((x * factor for x, factor in zip(given, factors, strict=True)), np.zeros_like(given[0]))
        return made, np.tanh(made) if len(given) > 1 else made

    def _backward(self, calls: Sequence[Made]) -> set[str]:
        """The names of parameters that were reached."""
        reached: set[str] = set()
        for call in reversed(calls):
            if call.made.gradient is None:
                continue
            reached |= {name for name in self._weights if name.startswith(f"{call.name}.")}
            through: defaultdict[int, list[tuple[int, Wide]]] = defaultdict(list)
            for place, gradient in enumerate(self._gradients(call)):
                through[id(call.taken[place])].append((place, gradient))
            for parts in through.values():
                self._input_gradient(call, parts)
        for call in calls:
            self._results(call.name, call.returned, call.mark)
            reached |= {f"{call.name}.own"} if call.kind == "gives own" and call.returned[1].gradient is not None else set()
        return reached

    def _gradients(self, call: Made) -> list[Wide]:
        """Of each argument, through this call alone."""
        gradient = call.made.gradient
        assert gradient is not None
        if call.kind == "dense":
            return [gradient @ self._weights[f"{call.name}.weight"]]
        if call.kind == "gives own":
            own = self._weights[f"{call.name}.own"]
            if call.taken[0] is call.returned[1]:  # one tensor, as the argument and as the parameter: all of its uses
                return [2 * gradient * own]
            call.returned[1].add(gradient * call.taken[0].numbers)
            return [gradient * own]
        if call.kind == "tanh" or len(call.taken) > 1:
            gradient = gradient * (1 - np.tanh(call.before) ** 2)
        return [gradient] if call.kind == "tanh" else [gradient * one for one in self._weights[f"{call.name}.factors"]]

    def _input_gradient(self, call: Made, parts: Sequence[tuple[int, Wide]]) -> None:
        """Of one tensor, which may stand in several places: one row for all of them."""
        tensor, total = call.taken[parts[0][0]], sum((one for _, one in parts[1:]), parts[0][1])
        if tensor.differentiable:
            tensor.add(total)
            places = "_" + "+".join(str(place) for place, _ in parts) if len(call.taken) > 1 else ""
            self._activation("actv_grad", f"{call.name}.input{places}{call.mark}", total)

    def _results(self, name: str, returned: Sequence[Known], mark: str) -> None:
        for place, one in enumerate(returned):
            slot = f"{name}.output{f'_{place}' if len(returned) > 1 else ''}{mark}"
            self._activation("actv", slot, one.numbers)
            if one.is_parameter:
                gradient = np.zeros_like(one.numbers) if one.gradient is None else one.gradient
                several = LEAF if self.training.loop.several_micro_steps else ""
                unless = UNREACHED if one.gradient is None else several
                self._add("actv_grad", slot, gradient, micro_step=self.clock.micro_step, unless=unless)
            elif one.differentiable and one.gradient is not None:
                self._activation("actv_grad", slot, one.gradient)

    def _activation(self, kind: str, name: str, numbers: Wide) -> None:
        self._add(kind, name, numbers, micro_step=self.clock.micro_step)

    def _unreduced(self, gradients: Sequence[np.ndarray], reached: set[str]) -> None:
        loop = self.training.loop
        for (name, one), gradient in zip(self.training.parameters.items(), gradients, strict=True):
            if not self.clock.had_its_turn(self._owner(one)):
                unless = "" if name in reached else UNREACHED
                if not loop.each_micro_batch and loop.micro_batches > 1:
                    continue
                micro_step = self.clock.micro_step if loop.each_micro_batch else -1
                self._add("grad_unreduced", name, gradient, micro_step=micro_step, unless=unless)

    # Optimizers

    def _owner(self, parameter: Parameter) -> int:
        return next(index for index, held in enumerate(self.training.held) if any(parameter is one for one in held))

    def _of(self, index: int) -> list[tuple[str, Parameter]]:
        return [(name, one) for name, one in self.training.parameters.items() if self._owner(one) == index]

    def _moments(self, index: int) -> dict[str, Sequence[Parameter]]:
        """The state behind each kind; none before the first step."""
        optimizer = self.training.optimizers[index]
        if self.training.loop.optimizers[index] == "adam":
            return {"exp_avg": optimizer.moment1, "exp_avg_sq": optimizer.moment2}
        return {"exp_avg": optimizer.moments}

    def optimizer_begins(self, index: int, gradients: Sequence[np.ndarray]) -> None:
        self.clock.optimizer_begins(index)
        for place, (name, one) in enumerate(self._of(index)):
            gradient = gradients[place]
            self._add("param_origin", name, array(one))
            self._add("grad_reduced", name, gradient)
            momentum = gradient
            if self._steps[index]:
                for kind, moments in self._moments(index).items():
                    self._add(kind, name, array(moments[place]))
                momentum = array(self._moments(index)["exp_avg"][place])
            self._add("mg_direction", name, gradient, momentum)

    def optimizer_ended(self, index: int) -> None:
        self._steps[index] += 1
        for place, (name, one) in enumerate(self._of(index)):
            (origin,) = self.rows[Place(self.clock.step, "param_origin", name)].tensors
            self._add("param_updated", name, array(one))
            self._add("update_ratio", name, origin, array(one))
            if self.training.loop.optimizers[index] == "adam":
                mean, square = (array(moments[place]).astype(np.float64) for moments in self._moments(index).values())
                self._adam(name, mean, square, self._steps[index])
        self.clock.optimizer_ends(index)

    def _adam(self, name: str, mean: Wide, square: Wide, steps: int) -> None:
        """``nn.Adam`` adds eps to the root of what is not corrected."""
        first, second = (1 - beta**steps for beta in (0.9, 0.999))
        mean = mean / first
        self._add("adam_update", name, mean / ((np.sqrt(square) + 1e-3) / np.sqrt(second)))
        self._add("adam_ratio", name, np.divide(mean, np.sqrt(square / second), out=np.zeros_like(mean), where=square != 0))
