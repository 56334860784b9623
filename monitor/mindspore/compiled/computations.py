"""What a graph computes that MindSpore has compiled, as MindSpore describes it when all its passes are done.

Two graphs with equal computations train with the same bits: the same operators take the same values in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from mindspore.train import anf_ir_pb2 as ir

MEASURING: Final = "_tape"
"""In the name of the monitor's operator."""

IDENTITIES: Final = ("Depend", "TensorMove")
"""Operators that return their first argument: tied to an order of execution, or copied, since a later operator writes to it."""

WRITES: Final = "side_effect_mem", str(ir.ValueProto(dtype=ir.DT_BOOL, bool_val=True))
"""The attribute of operators that write to their parameters."""

UNUSED: Final = {"side_effect_hidden", "side_effect_mem", "input_names", "output_names"}
"""Attributes that do not say what an operator computes."""

SEED: Final = "seed"
"""How the attributes of random operators begin."""

STATE: Final = ("state",)
"""The value of a state of the memory. What has been written counts where it is read."""

Value = tuple[Any, ...]
"""Equal for equal computations."""


def computations(executor: Any, phase: str) -> Value | None:
    """What the graph of a phase returns, and what it writes to parameters, without what only measures.

    MindSpore computes constants from constants while it compiles, except those that are measured. Its description has no
    elements of them: constants of one type and shape are taken for equal.

    Returns:
        None if that cannot be told: the graph calls other graphs, since it has loops or branches on tensors.
    """
    try:
        described = executor._graph_executor.get_func_graph_proto(phase, "anf_ir", False)
        return _Graph().value(ir.ModelProto.FromString(described).graph)
    except Exception:  # private, so it may be missing in other versions
        return None


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

    def value(self, graph: Any) -> Value:
        self.values = {one.name: ("parameter", one.name) for one in graph.parameters}
        for constant in graph.const_vals:
            value = constant.value
            said = value.tensor_val if value.dtype == ir.DT_TENSOR else value
            self.values[constant.key] = STATE if value.str_val in ("U", "IO") else ("constant", str(said))
        for node in graph.node:
            measures = any(MEASURING in str(one.value) for one in node.attribute)
            self.values[node.name] = ("measured",) if measures else self._of(node)
        (output,) = graph.outputs
        return self.values[output.name], *sorted(value for value, _ in self.effects.values())

    def _of(self, node: Any) -> Value:
        inputs = [one.name for one in node.input]
        known = [self.values[name] for name in inputs]
        if node.op_type in IDENTITIES:
            return known[0]
        if node.op_type == "UpdateState":
            before = self.written.get(inputs[0], ())
            self.written[node.name] = before + tuple(self.effects[name] for name in inputs[1:] if name in self.effects)
            return STATE
        if known and all(value[0] == "constant" for value in known) and not self._keeps(node):
            return _constant(node.output_type.tensor_type)
        return self._computed(node, inputs, [value for value in known if value != STATE])

    def _keeps(self, node: Any) -> bool:
        """Whether MindSpore computes nothing of this node while it compiles: a tuple, or random numbers."""
        return node.op_type == "MakeTuple" or any(one.name.startswith(SEED) for one in node.attribute)

    def _computed(self, node: Any, inputs: list[str], known: list[Value]) -> Value:
        parameters = frozenset(name for kind, *names in known if kind == "parameter" for name in names)
        before = next((self.written[name] for name in inputs if name in self.written), ())
        earlier = [value for value, of in before if of & parameters]
        attributes = sorted((one.name, str(one.value)) for one in node.attribute)
        value = _digest(node.op_type, [one for one in attributes if one[0] not in UNUSED], known, earlier)
        if WRITES in attributes:
            self.effects[node.name] = value, parameters
        return value


def _digest(*parts: object) -> Value:
    """In place of the parts, whose texts would grow with the depth of a network."""
    return "computed", blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _constant(of: Any) -> Value:
    return "constant", str(ir.TensorProto(dims=[one.size for one in of.shape.dim], data_type=of.elem_type))
