"""torch.compile: what compiled code computes has the rows of eager code, and nothing is compiled because of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config
from compiling import WAYS, Compile, Make, Place, Trained, Ways, batch, needs_a_compiler, recorded, trained
from evidence import sampled
from networks import AroundTorchsOwn, Attention, Checkpointed, Forked, InPlace, Interrupted, NoLayer, OneLayer, Shared
from observing import seeded
from torch import Tensor, nn
from watching import EVERYTHING, Output, attached, train


def assert_rows_are_those_of_eager_code(make: Make, way: Compile, output: Output, **options: Any) -> Trained:
    """Returns the compiled training."""
    trained(make, Ways.eager, output)
    eager = recorded(output)

    result = trained(make, way, output, **options)
    compiled = recorded(output)

    assert {place for place in compiled if not copies_in_compiled_code(place)} == eager.keys()
    for place, row in eager.items():
        assert compiled[place].values == pytest.approx(row.values, rel=1e-9, abs=1e-12), place
    return result


def copies_in_compiled_code(place: Place) -> bool:
    """Whether a row is of the input of a dropout that drops nothing. In eager code it gives its input back, so that there is
    none.
    """
    kind, name, *_ = place
    return kind == "actv_grad" and ".dropout" in name and name.endswith(".input")


# Not Shared layer by layer: a layer there returns a tensor that it uses itself, and what is within its graph is no part of that
# tensor's gradient outside.
CASES = [
    ("whole", InPlace, True),
    ("whole", Shared, False),
    ("whole", Checkpointed, False),
    ("whole", Forked, False),
    ("whole", Attention, False),
    ("whole", Interrupted, False),
    ("whole", InPlace, False),
    ("layer_by_layer", InPlace, False),
    ("layer_by_layer", Checkpointed, False),
    ("layer_by_layer", Forked, False),
    ("layer_by_layer", Attention, False),
    ("within_a_function", Shared, False),
]
"""How a model is compiled, which, and whether what is called is watched in its place."""


@pytest.mark.parametrize(("way", "model", "watch_what_is_called"), sampled(CASES, 0, 2, 4, 5, 9, 11))
def test_compiled_code_has_the_rows_of_eager_code_and_nothing_is_compiled_because_of_the_monitor(
    way: str, model: Make, watch_what_is_called: bool, output: Output
) -> None:
    """Fault 14 of the tool before: it recompiled until the limit."""
    options = {"backend": "aot_eager", "fullgraph": model is not Interrupted}
    alone = trained(model, WAYS[way], **options)

    monitored = assert_rows_are_those_of_eager_code(
        model, WAYS[way], output, watch_what_is_called=watch_what_is_called, **options
    )

    assert (monitored.graphs, monitored.breaks) == (alone.graphs, alone.breaks)
    assert all(map(torch.equal, alone.numbers, monitored.numbers))


def test_modules_of_torch_are_not_compiled_because_they_have_hooks_of_the_monitor(output: Output) -> None:
    alone = trained(AroundTorchsOwn, WAYS["whole"], backend="aot_eager")

    monitored = assert_rows_are_those_of_eager_code(AroundTorchsOwn, WAYS["whole"], output, backend="aot_eager")

    assert (monitored.graphs, alone.graphs) == (0, 0)
    assert all(map(torch.equal, alone.numbers, monitored.numbers))


@pytest.mark.parametrize("way", sampled(list(WAYS), 1, 2, 4))
def test_each_way_of_compiling_has_the_rows_of_eager_code(way: str, output: Output) -> None:
    assert_rows_are_those_of_eager_code(InPlace, WAYS[way], output, backend="eager")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("one_compiler")
@pytest.mark.parametrize("model", sampled([NoLayer, InPlace, Shared, Checkpointed]))
@needs_a_compiler
def test_what_inductor_compiles_has_the_rows_of_eager_code_and_trains_as_without(model: Make, output: Output) -> None:
    alone = trained(model, Ways.whole, fullgraph=True)

    monitored = assert_rows_are_those_of_eager_code(model, Ways.whole, output, fullgraph=True)

    assert (monitored.graphs, monitored.breaks) == (alone.graphs, alone.breaks) == (1, {})
    for expected, found in zip(alone.numbers, monitored.numbers, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_names_are_those_of_the_model_and_not_of_what_the_compiler_wraps_it_in(output: Output) -> None:
    """The same tool gave names with ``_orig_mod.``."""
    trained(InPlace, Ways.replaced_layer_by_layer, output, backend="eager", watch_what_is_called=True)
    assert not [name for _, name, *_ in recorded(output) if "_orig_mod" in name]


def test_layers_that_share_their_code_are_compiled_once_for_all(output: Output) -> None:
    assert trained(InPlace, Ways.layer_by_layer, output, backend="aot_eager", fullgraph=True).graphs == 1


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.square().mean(-1, keepdim=True)).sqrt()


class Weighing(nn.Module):
    """Attention without a projection. ``scale`` is one of the modules that only some layers have."""

    def __init__(self, scale: nn.Module | None) -> None:
        super().__init__()
        if scale is not None:
            self.scale = scale

    def forward(self, *args: Tensor) -> Tensor:
        query, value = args
        weights = torch.softmax(query @ value.T, dim=-1)
        return weights @ (self.scale(value) if hasattr(self, "scale") else value)


class AcrossThenToItself(nn.Module):
    """Two layers of one class that differ in their modules. Only the second one receives one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([Weighing(Scale()), Weighing(None)])

    def forward(self, x: Tensor) -> Tensor:
        across, within = self.layers
        y = across(self.first(x), self.second(x))
        return within(y, y)


def forward_by_forward(model: nn.Module, **options: Any) -> nn.Module:
    """Compile the method of each layer, and not the call of the layer."""
    for layer in model.layers:  # type: ignore[union-attr]
        layer.forward = torch.compile(layer.forward, **options)
    return model


def test_layers_that_differ_in_their_modules_are_compiled_again_for_a_tensor_that_is_passed_twice(output: Output) -> None:
    """Torch raises a ``KeyError`` here if a tensor that it compares with all others belongs to a module that is not there."""
    assert_rows_are_those_of_eager_code(AcrossThenToItself, forward_by_forward, output, backend="aot_eager")


def test_steps_that_are_not_collected_run_the_same_code_and_have_no_rows(output: Output) -> None:
    config = {**EVERYTHING, "step_interval": 2}

    graphs = trained(OneLayer, Ways.whole, output, backend="aot_eager", fullgraph=True, config=config).graphs

    assert graphs == 1
    assert {step for _, _, step, _ in recorded(output)} == {0, 2}


def test_calls_of_earlier_steps_are_released(output: Output) -> None:
    model = seeded(OneLayer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = Ways.within_a_function(model, backend="aot_eager", fullgraph=True)
    with attached(output, model, optimizer, **EVERYTHING):
        train(compiled, optimizer, 5, batch(0))
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        kept = [(len(hook._traced._observed.calls), len(hook._traced._observed.earlier)) for hook in hooks]
    assert {now for now, _ in kept} == {0}
    assert 1 <= max(before for _, before in kept) <= 2  # a call's beginning and its end
