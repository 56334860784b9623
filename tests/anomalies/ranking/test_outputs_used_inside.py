"""Whether a module itself uses an output of its own, told by the order in which gradients were measured."""

from __future__ import annotations

import pytest

from monitor.anomalies.ranking.graph import DataflowGraph, subject_of
from monitor.coordinator.series_file import Edge, Flow
from monitor.series import Series

BIAS = "m.output_1"


def graph_of(*names: str, same: tuple[tuple[str, str], ...] = ()) -> DataflowGraph:
    """Gradients in the order in which they were first measured."""
    numbers = {Series("actv_grad", 0, name): number for number, name in enumerate(names)}
    edges = tuple(Edge(names.index(source), names.index(target)) for source, target in same)
    return DataflowGraph(numbers, Flow(edges))


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (("m.output_0", "m.o.output", "m.o.input", BIAS, "m.input"), True),
        ((BIAS, "m.output_0", "m.o.output", "m.o.input", "m.input"), False),  # only what comes after the module uses it
        (("m.output_0", "m.o.output", BIAS, "m.o.input", "m.input"), False),  # it may be the same tensor as the inner output
        (("m.output_0", "m.o.output", "m.o.input", "m.input_1", BIAS), False),  # it may be an input that is given back
        (("m.output_0", "m.o.output", "m.o.input", BIAS), False),  # likewise, of which nothing is known
        (("m.output_0", "m.o.input", BIAS, "m.input", "m.output_0#1"), False),  # the inner gradient may be the other call's
    ],
)
def test_an_output_is_used_inside_if_its_gradient_is_complete_after_gradients_of_inputs_within(
    names: tuple[str, ...], used: bool
) -> None:
    assert graph_of(*names).uses_itself(subject_of(Series("actv_grad", 0, BIAS))) is used


@pytest.mark.parametrize("name", ["m.input", "m.o.input"])
def test_that_is_asked_of_outputs_alone(name: str) -> None:
    graph = graph_of("m.output_0", "m.o.output", "m.o.input", BIAS, "m.input")
    assert not graph.uses_itself(subject_of(Series("actv_grad", 0, name)))


def test_a_containers_gradient_is_that_of_the_innermost_module_with_the_tensor() -> None:
    names = ("m.o.x.input", "m.o.input", "m.input", "m.o.output")
    graph = graph_of(*names, same=(("m.o.x.input", "m.o.input"), ("m.o.input", "m.input")))
    found = graph.innermost(subject_of(Series("actv_grad", 0, "m.input")))
    assert found.series.name == "m.o.x.input"
