"""What the graphs compute that MindSpore has compiled, as it describes them itself when all its passes are done.

Two graphs with equal computations train with the same bits: the same operators take the same values in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from mindspore.nn.cell import _cell_graph_executor
from mindspore.train import anf_ir_pb2 as ir

MEASURING = "_tape"
"""In the name of the monitor's operator."""

IDENTITIES = ("Depend", "TensorMove")
"""Operators that return their first argument: tied to an order of execution, or copied, since a later operator writes to it."""

WRITES = "side_effect_mem", str(ir.ValueProto(dtype=ir.DT_BOOL, bool_val=True))
"""The attribute of operators that write to their parameters."""

UNUSED = {"side_effect_hidden", "side_effect_mem", "input_names", "output_names"}
"""Attributes that do not say what an operator computes."""

Value = tuple[Any, ...]
"""Equal for equal computations."""


@contextmanager
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Value]]:
    """The computations of the networks that are compiled from here on (``computations``), in the order of their compilation."""
    found: list[Value] = []
    compilers = type(_cell_graph_executor)
    original = compilers.compile

    def compile_(executor: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(executor, *args, **kwargs)
        found.append(computations(executor._graph_executor.get_func_graph_proto(result[0], "anf_ir", False)))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(compilers, "compile", compile_)
        yield found


@dataclass
class _Graph:
    """The values of the nodes so far.

    Attributes:
        written: What has been written before each state of the memory, in that order: values of operators, with the
            parameters that they write to.
        effects: These, by the name of the operator.
    """

    values: dict[str, Value] = field(default_factory=dict)
    written: dict[str, tuple[tuple[Value, frozenset[str]], ...]] = field(default_factory=dict)
    effects: dict[str, tuple[Value, frozenset[str]]] = field(default_factory=dict)

    def of(self, node: Any) -> Value:
        inputs = [one.name for one in node.input]
        known = [self.values[name] for name in inputs]
        if node.op_type in IDENTITIES:
            return known[0]
        if node.op_type == "UpdateState":
            before = self.written.get(inputs[0], ())
            self.written[node.name] = before + tuple(self.effects[name] for name in inputs[1:] if name in self.effects)
            return ("state",)
        parameters = frozenset(name for value, name in zip(known, inputs, strict=True) if value[0] == "parameter")
        before = next((self.written[name] for name in inputs if name in self.written), ())
        earlier = tuple(value for value, of in before if of & parameters)
        attributes = sorted((one.name, str(one.value)) for one in node.attribute)
        if all(value[0] == "constant" for value in known) and node.op_type not in ("MakeTuple", "Load"):
            return _constant(node.output_type.tensor_type)
        computed = [one for one in attributes if one[0] not in UNUSED]
        value = (_numbered(node.op_type, computed, [one for one in known if one != ("state",)], earlier),)
        if WRITES in attributes:
            self.effects[node.name] = value, parameters
        return value


_NUMBERS: dict[str, int] = {}


def _numbered(*parts: object) -> int:
    """A number for each computation: texts of nested ones would grow with the depth of a network."""
    return _NUMBERS.setdefault(repr(parts), len(_NUMBERS))


def computations(serialized: bytes) -> Value:
    """What a graph returns, and what it writes to parameters, without what only measures.

    MindSpore computes constants from constants while it compiles, except those that are measured. Its description has no
    elements of them: constants of one type and shape are taken for equal.

    Raises:
        KeyError: The graph calls other graphs: it has loops or branches on tensors.
    """
    graph = ir.ModelProto.FromString(serialized).graph
    found = _Graph({one.name: ("parameter", one.name) for one in graph.parameters})
    for constant in graph.const_vals:
        value, is_state = constant.value, constant.value.str_val in ("U", "IO")
        tensor = value.dtype == ir.DT_TENSOR
        found.values[constant.key] = ("state",) if is_state else ("constant", str(value.tensor_val if tensor else value))
    for node in graph.node:
        if any(MEASURING in str(one.value) for one in node.attribute):
            found.values[node.name] = ("measured",)
        else:
            found.values[node.name] = found.of(node)
    (output,) = graph.outputs
    return found.values[output.name], *sorted(value for value, _ in found.effects.values())


def _constant(of: Any) -> Value:
    return "constant", str(ir.TensorProto(dims=[one.size for one in of.shape.dim], data_type=of.elem_type))
