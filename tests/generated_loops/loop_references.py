"""What a monitor has to record of a loop, by torch's own hooks, as ``docs/formats.md`` defines it.

Two unmonitored runs: ``Passing`` clones what passes by; ``Through`` gives each call of a module tensors of its own to
use, whose gradients are those through this call alone. Neither repeats calls in backward (checkpointing), which is to change
no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from hypothesis import assume
from loop_absences import COMPLETE_EARLY, LEAF, UNHELD
from loop_following import Call, Follower
from loop_rows import Expected, Place, Rows, Wide
from loop_training import Training
from loops import ADAMS, Loop
from torch import Tensor, nn

MOMENTS: Mapping[str, Mapping[str, str]] = {
    "sgd": {},
    "momentum": {"exp_avg": "momentum_buffer"},
    "muon": {"exp_avg": "momentum_buffer"},
    "adam": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "amsgrad": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq"},
}
"""By optimizer, the state behind each kind."""


def expected_rows(loop: Loop) -> Rows:
    """All rows of a loop."""
    passing, through = Passing(), Through()
    for one in (passing, through):
        Training(loop, checkpointing=False).run(one)
    # Of a parameter that the loss uses directly it is not told whose backward is running where forwards come first.
    assume(not (loop.each_micro_batch and loop.order != "each" and passing.loose))
    return {**passing.rows, **through.rows}


def named_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors among arguments, each with what is appended to ``input``."""
    if len(args) == 1 and not kwargs:
        return named_outputs(args[0])
    return [*_named("", {**dict(enumerate(args)), **kwargs})]


def named_outputs(result: Any) -> list[tuple[str, Tensor]]:
    """The tensors in a result, each with what is appended to ``output``: nothing where there is one alone."""
    if isinstance(result, (tuple, list)) and len(result) == 1 and isinstance(result[0], Tensor):
        return [("", result[0])]
    return [*_named("", result)]


def _named(suffix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield suffix, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _named(f"{suffix}_{key}", one)
    elif isinstance(value, (tuple, list)):
        yield from _named(suffix, dict(enumerate(value)))


def _copies(*tensors: Tensor) -> tuple[Wide, ...]:
    return tuple(x.detach().to(torch.float64, copy=True).numpy() for x in tensors)


class Passing(Follower):
    """All but the gradients of inputs.

    Attributes:
        loose: Parameters that the network returns. Backward may come to one before any result tells whose backward it is.
    """

    def __init__(self) -> None:
        self.loose: set[nn.Parameter] = set()
        self.rows: Rows = {}
        self._in_backward: Sequence[int] = ()
        self._reached: set[nn.Parameter] = set()
        self._hooked: set[nn.Parameter] = set()
        self._changed = False
        self._steps: dict[nn.Parameter, Any] = {}

    def _add(self, place: Place, *tensors: Tensor, unless: str = "") -> None:
        self.rows[place] = Expected(_copies(*tensors), unless)

    # Activations

    def call_begins(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for suffix, x in named_inputs(args, kwargs):
            self._add(Place(call.step, "actv", f"{call.module}.input{suffix}{call.mark}", call.micro_step), x)
        return None, None

    def call_ends(self, call: Call, known: Any, result: Any) -> Any:
        del known
        if not call.module:
            self.loose |= {x for _, x in named_outputs(result) if isinstance(x, nn.Parameter)}
        for suffix, x in named_outputs(result):
            place = Place(call.step, "actv", f"{call.module}.output{suffix}{call.mark}", call.micro_step)
            self._add(place, x)
            if x.requires_grad:
                shared = x.is_leaf and self.training.loop.several_micro_steps
                x.register_hook(self._gradient_of(call, place._replace(kind="actv_grad"), LEAF if shared else ""))

    def _gradient_of(self, call: Call, place: Place, unless: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            # A parameter that is a result has gradients in the backwards of other micro-batches, too.
            if call.micro_batch in self._in_backward:
                self._add(place, gradient, unless=unless)

        return hook

    # Gradients of parameters

    def backward_begins(self, micro_batches: Sequence[int]) -> None:
        self._in_backward = micro_batches
        self._reached.clear()
        self._changed = False
        for parameter in [p for p in self.training.names if p.requires_grad and p not in self._hooked]:
            parameter.register_post_accumulate_grad_hook(self._reached.add)
            self._hooked.add(parameter)

    def backward_ended(self) -> None:
        each, last = self.training.loop.each_micro_batch, self.training.loop.micro_batches - 1
        micro_step = self._in_backward[-1] - (self.micro_batch - self.clock.micro_step)
        for parameter in self._reached:
            if self.clock.had_its_turn(self.training.owners.get(parameter)):
                continue  # what comes now is of no step that the parameter makes
            place = Place(self.clock.step, "grad_unreduced", self.training.names[parameter], micro_step if each else -1)
            in_time = each or (micro_step >= last and len(self._in_backward) == 1 and not self._is_loose(parameter))
            was_in_time = place in self.rows and not self.rows[place].unless
            self._add(place, parameter.grad, unless="" if in_time or was_in_time else COMPLETE_EARLY)

    def gradients_changed(self) -> None:
        self._changed = True

    def _is_loose(self, parameter: nn.Parameter) -> bool:
        return parameter in self.loose and self.training.loop.order != "each"

    def _complete(self, parameter: nn.Parameter) -> None:
        """The optimizer of a parameter is about to step: what the last micro-batch did not reach is known to be complete."""
        place = self._place("grad_unreduced", parameter)
        if place in self.rows and not self._changed and not self._is_loose(parameter):
            self.rows[place] = self.rows[place]._replace(unless="")

    # The optimizer's steps

    def before_step(self, index: int) -> None:
        for parameter in self._measured_around(index):
            unless = self._unless(parameter)
            self._record(parameter, "param_origin", parameter, unless=unless)
            self._record_moments(index, parameter)
            self._steps[parameter] = self._count(index, parameter)
            if self.training.owners.get(parameter) == index:
                self._complete(parameter)
            if not self.training.loop.closure:
                self._record_gradient(parameter)

    def after_step(self, index: int) -> None:
        for parameter in self._measured_around(index):
            unless = self._unless(parameter)
            self._record(parameter, "param_updated", parameter, unless=unless)
            (origin,) = self.rows[self._place("param_origin", parameter)].tensors
            self.rows[self._place("update_ratio", parameter)] = Expected((origin, *_copies(parameter)), unless)
            if self.training.loop.closure:
                self._record_gradient(parameter)
            self._record_updates(index, parameter)
        self._record_scale()

    def step_skipped(self, index: int) -> None:
        self.before_step(index)
        self._record_scale()

    def _measured_around(self, index: int) -> list[nn.Parameter]:
        """Those that the optimizer holds; those that none holds, since a monitor may read their gradients with any."""
        return [p for p in self.training.names if self.training.owners.get(p, index) == index]

    def _unless(self, parameter: nn.Parameter) -> str:
        return "" if parameter in self.training.owners else UNHELD

    def _place(self, kind: str, parameter: nn.Parameter) -> Place:
        return Place(self.clock.step, kind, self.training.names[parameter])

    def _record(self, parameter: nn.Parameter, kind: str, *tensors: Tensor, unless: str = "") -> None:
        self._add(self._place(kind, parameter), *tensors, unless=unless)

    def _record_gradient(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        self._record(parameter, "grad_reduced", parameter.grad, unless=self._unless(parameter))
        momentum = self.rows.get(self._place("exp_avg", parameter))
        if momentum is not None:
            self.rows[self._place("mg_direction", parameter)] = Expected((*_copies(parameter.grad), *momentum.tensors))

    def _state(self, index: int, parameter: nn.Parameter) -> Mapping[str, Any]:
        return self.training.optimizers[index].state.get(parameter, {})

    def _kind(self, index: int) -> str:
        return self.training.loop.optimizers[index].kind

    def _record_moments(self, index: int, parameter: nn.Parameter) -> None:
        for kind, name in MOMENTS[self._kind(index)].items():
            if (moment := self._state(index, parameter).get(name)) is not None:
                self._record(parameter, kind, moment)

    def _count(self, index: int, parameter: nn.Parameter) -> float:
        return float(self._state(index, parameter).get("step", 0.0))

    def _record_updates(self, index: int, parameter: nn.Parameter) -> None:
        kind, state, gradient = self._kind(index), self._state(index, parameter), parameter.grad
        had_none = self._place("exp_avg", parameter) not in self.rows
        if had_none and gradient is not None and MOMENTS[kind].get("exp_avg") in state:
            self._record(parameter, "mg_direction", gradient, gradient)
        step = self._count(index, parameter)
        if kind not in ADAMS or step == self._steps[parameter]:
            return
        (group,) = self.training.optimizers[index].param_groups
        first, second = group["betas"]
        mean = state["exp_avg"].double() / (1 - first**step)
        square = state["max_exp_avg_sq" if kind == "amsgrad" else "exp_avg_sq"].double() / (1 - second**step)
        self._record(parameter, "adam_update", mean / (square.sqrt() + group["eps"]))
        neither = (mean == 0) & (square == 0)
        self._record(parameter, "adam_ratio", torch.where(neither, 0.0, mean / square.sqrt()))

    def _record_scale(self) -> None:
        if self.training.loop.scaler:
            self._add(Place(self.clock.step, "other", "loss_scale"), torch.tensor(self.training.scaler.get_scale()))


class Through(Follower):
    """The gradients of inputs, through one call alone: each call is given copies."""

    def __init__(self) -> None:
        self.rows: Rows = {}

    def call_begins(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        slots: dict[Tensor, list[str]] = {}
        for suffix, x in named_inputs(args, kwargs):
            if x.requires_grad:
                slots.setdefault(x, []).append(suffix)
        copies = {x: x.clone() for x in slots}
        for x, suffixes in slots.items():
            for name in names_of(suffixes):
                place = Place(call.step, "actv_grad", f"{call.module}.{name}{call.mark}", call.micro_step)
                copies[x].register_hook(self._gradient_of(place))
        originals = {copy: (x, copy._version) for x, copy in copies.items()}
        return (_replaced(args, copies), _replaced(kwargs, copies)), originals

    def call_ends(self, call: Call, known: Any, result: Any) -> Any:
        """What the call gives back is given back as it came: what others do with it is not through this call."""
        del call
        return _replaced(result, {copy: x for copy, (x, version) in known.items() if copy._version == version})

    def _gradient_of(self, place: Place) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.rows[place] = Expected(_copies(gradient))

        return hook


def names_of(suffixes: Sequence[str]) -> list[str]:
    """What the rows of one tensor are called that stands in these places: one row, of all."""
    return ["input" + "+".join([suffixes[0], *(suffix.removeprefix("_") for suffix in suffixes[1:])])]


def _replaced(value: Any, others: Mapping[Tensor, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return others.get(value, value)
    if isinstance(value, Mapping):
        return {key: _replaced(one, others) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(one, others) for one in value)
    return value
