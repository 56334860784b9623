"""What a graph computes that MindSpore has compiled, as MindSpore describes it when all its passes are done.

Two graphs with equal computations train with the same bits: the same operators take the same values in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from mindspore.train import anf_ir_pb2 as ir, mind_ir_pb2 as mind_ir

from monitor.failures import LOGGER

MEASURING: Final = "monitor/mindspore/_tape"
"""In the file name of the monitor's operator."""

IDENTITIES: Final = ("Depend", "TensorMove")
"""Operators that return their first argument: tied to an order of execution, or copied, since a later operator writes to it."""

CARRIERS: Final = "Depend", "MakeTuple"
"""Operators that carry what has been written to where it counts."""

WRITES: Final = "side_effect_mem", str(ir.ValueProto(dtype=ir.DT_BOOL, bool_val=True))
"""The attribute of operators that write to their parameters."""

UNUSED: Final = {"side_effect_hidden", "side_effect_mem", "input_names", "output_names"}
"""Attributes that do not say what an operator computes."""

EXACT: Final = {
    *("Reshape", "Tile", "Transpose", "ExpandDims", "Squeeze", "BroadcastTo", "Concat", "Stack", "Slice", "StridedSlice"),
    *("Gather", "Cast", "ZerosLike", "OnesLike", "FillV2", "Neg", "Add", "Sub", "Mul", "Muls", "RealDiv", "Divs"),
}
"""Operators with the same result in the compiler as in a kernel: they move elements, or IEEE 754 says how to round."""

FLOATS: Final = ir.DT_FLOAT16, ir.DT_FLOAT32, ir.DT_FLOAT64
"""The types of numbers that are compared as elements."""

CONSTANT: Final = "Constant"
"""The operator of constants in the description that has their elements."""

STATE: Final = ("state",)
"""The value of a state of the memory. What has been written counts where it is read."""

Value = tuple[Any, ...]
"""Equal for equal computations."""


class Constant(NamedTuple):
    """A constant tensor, or a constant number.

    Attributes:
        computed: How the graph computes it from other constants.
        elements: Its elements, or those of these constants.
    """

    computed: Value
    elements: Value


@dataclass(frozen=True)
class Computations:
    """What a graph computes.

    Attributes:
        returned: What it returns, and what it writes to parameters. Constants of one type and shape are equal in it.
        constants: Where operators take constants: what these are, by the operator and the index of its input.
    """

    returned: Value
    constants: Mapping[tuple[Value, int], set[Constant]]

    def differs_in_constants(self, other: Computations) -> bool:
        """Whether elements differ. This cannot be told where MindSpore has computed a constant in one of both graphs only."""
        both = [(self.constants[place], other.constants[place]) for place in self.constants.keys() & other.constants.keys()]
        return any(one != two and len({constant.computed for constant in one | two}) == 1 for one, two in both)


def computations(executor: Any, phase: str) -> Computations | None:
    """What the graph of a phase returns, and what it writes to parameters, without what only measures.

    MindSpore computes constants from constants while it compiles, except those that are measured. What ``EXACT`` operators make
    of constants is a constant in both cases. Others, such as ``Log``, have other last bits in a kernel.

    Returns:
        None if that cannot be told: the graph calls other graphs, since it has loops or branches on tensors.
    """
    try:
        described, with_elements = (
            kind.ModelProto.FromString(executor._graph_executor.get_func_graph_proto(phase, name, False)).graph
            for name, kind in (("anf_ir", ir), ("mind_ir", mind_ir))
        )
        graph = _Graph(_elements(described, with_elements), _arguments(with_elements))
        return Computations(graph.value(described), graph.constants)
    except Exception as error:  # private, so it may be missing in other versions; the caller says and counts what that costs
        LOGGER.info("What MindSpore compiles as %s cannot be compared: %r", phase, error)
        return None


def _elements(described: Any, with_elements: Any) -> dict[str, Constant]:
    """The elements of constants by name. Only one of MindSpore's two descriptions has them, with other names."""
    constants = {one.name: _digest(str(one.attribute)) for one in with_elements.node if one.op_type == CONSTANT}
    nodes = [one for one in with_elements.node if one.op_type != CONSTANT]
    names = {one.key for one in described.const_vals}
    pairs = [pair for both in zip(described.node, nodes, strict=True) for pair in zip(*map(_inputs, both), strict=True)]
    return {name: Constant((), constants[other]) for name, other in pairs if name in names}


def _arguments(graph: Any) -> dict[str, Value]:
    """The inputs of a graph, by their positions: a cell with taps has other names for its arguments."""
    return {one.name.rpartition(":")[2]: ("input", i) for i, one in enumerate(graph.input)}


def _inputs(node: Any) -> list[str]:
    return [one if isinstance(one, str) else one.name for one in node.input]


@dataclass
class _Graph:
    """The values of the nodes so far.

    Attributes:
        written: What has been written before each state of the memory, in that order: values of operators, with the
            parameters that they write to.
        effects: The values of operators that write.
        carried: What a node has written, by its name: one operator, or those of a tuple.
        elements: The constants by name.
        inputs: What the graph takes, by name.
        constants: As in ``Computations``.
    """

    elements: dict[str, Constant]
    inputs: dict[str, Value]
    constants: dict[tuple[Value, int], set[Constant]] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    written: dict[str, tuple[tuple[Value, frozenset[str]], ...]] = field(default_factory=dict)
    effects: list[Value] = field(default_factory=list)
    carried: dict[str, tuple[tuple[Value, frozenset[str]], ...]] = field(default_factory=dict)

    def value(self, graph: Any) -> Value:
        self.values.update({one.name: ("parameter", one.name) for one in graph.parameters})
        self.values.update(self.inputs)
        for constant in graph.const_vals:
            value = constant.value
            said = value.tensor_val if value.dtype == ir.DT_TENSOR else value.dtype if value.dtype in FLOATS else value
            self.values[constant.key] = STATE if value.str_val in ("U", "IO") else ("constant", str(said))
        for node in graph.node:
            measures = any(MEASURING in str(one.value) for one in node.attribute)
            self.values[node.name] = ("measured",) if measures else self._of(node)
        (output,) = graph.outputs
        return self.values[output.name], *sorted(self.effects)

    def _of(self, node: Any) -> Value:
        inputs = [one.name for one in node.input]
        known = [self.values[name] for name in inputs]
        if node.op_type in CARRIERS:
            self.carried[node.name] = tuple(effect for name in inputs for effect in self.carried.get(name, ()))
        if node.op_type in IDENTITIES:
            if inputs[0] in self.elements:
                self.elements[node.name] = self.elements[inputs[0]]
            return known[0]
        if node.op_type == "UpdateState":
            before = self.written.get(inputs[0], ())
            self.written[node.name] = before + tuple(effect for name in inputs[1:] for effect in self.carried.get(name, ()))
            return STATE
        if node.op_type in EXACT and known and all(value[0] == "constant" for value in known):
            parts = [self.elements.get(name) for name in inputs]
            computed = _digest(node.op_type, _attributes(node), [part and part.computed for part in parts])
            self.elements[node.name] = Constant(computed, _digest([part and part.elements for part in parts]))
            return _constant(node.output_type.tensor_type)
        return self._computed(node, inputs, [value for value in known if value != STATE])

    def _computed(self, node: Any, inputs: list[str], known: list[Value]) -> Value:
        parameters = frozenset(name for kind, *names in known if kind == "parameter" for name in names)
        before = next((self.written[name] for name in inputs if name in self.written), ())
        earlier = [value for value, of in before if of & parameters]
        value = _digest(node.op_type, _attributes(node), known, earlier)
        if any((one.name, str(one.value)) == WRITES for one in node.attribute):
            self.effects.append(value)
            self.carried[node.name] = ((value, parameters),)
        for i, name in enumerate(inputs):
            if name in self.elements:
                self.constants.setdefault((value, i), set()).add(self.elements[name])
        return value


def _attributes(node: Any) -> list[tuple[str, str]]:
    return sorted((one.name, str(one.value)) for one in node.attribute if one.name not in UNUSED)


def _digest(*parts: object) -> Value:
    """A digest in place of the parts, whose texts would grow with the depth of a network."""
    return "computed", blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _constant(of: Any) -> Value:
    return "constant", str(ir.TensorProto(dims=[one.size for one in of.shape.dim], data_type=of.elem_type))


# --- Whether compiled code sums gradients over ranks before an optimizer is given them.
#
# A copy of a gradient (``copies``) is followed in the graph to the sums that it is computed from.

SUM: Final = "AllReduce"
ASSIGNS: Final = "Assign"
PASSES_ON: Final = ("Depend", "TensorMove", "Load", "TupleGetItem")
"""Operators that return their first argument, or an element of it."""
OF_ELEMENTS: Final = ("Cast", "Neg", "Mul", "Muls", "RealDiv", "Div", "Divs", "Minimum", "Maximum", "ClipByValue", "Select")
"""Operators with which gradients are averaged, unscaled and clipped."""

Groups = frozenset[str]
"""The groups that a value was summed over; empty if it is the same on all ranks."""


def groups_of(executor: Any, phase: str, names: Iterable[str]) -> Mapping[str, Groups]:
    """The groups over which the values were summed that code assigns to parameters, by the parameter's name.

    Parameters without such a sum are left out, and so are all if MindSpore does not describe the code.
    """
    try:
        described = executor._graph_executor.get_func_graph_proto(phase, "anf_ir", False)
        return _Sums(ir.ModelProto.FromString(described).graph).of(set(names))
    except Exception as error:  # private, so it may be missing in other versions; the rows are missing then
        LOGGER.info("Sums over ranks in what MindSpore compiles as %s cannot be seen: %r", phase, error)
        return {}


class _Sums:
    """The sums of a graph.

    Attributes:
        summed: The groups of each value that is a sum over ranks, or that is computed from one, element by element.
    """

    def __init__(self, graph: Any) -> None:
        self._nodes = list(graph.node)
        self._sizes = {one.name: _sizes(one.type) for one in graph.parameters}
        self._sizes |= {one.name: _sizes(one.output_type) for one in self._nodes}
        self._constants = {one.key for one in graph.const_vals}
        self.summed: dict[str, Groups] = {}
        for node in self._nodes:
            if (groups := self._groups(node)) is not None:
                self.summed[node.name] = groups

    def of(self, names: set[str]) -> Mapping[str, Groups]:
        assigned = [[one.name for one in node.input] for node in self._nodes if node.op_type == ASSIGNS]
        return {to: self.summed[value] for to, value, *_ in assigned if to in names and value in self.summed}

    def _groups(self, node: Any) -> Groups | None:
        inputs = [one.name for one in node.input]
        if node.op_type == SUM:
            said = {one.name: one.value.str_val for one in node.attribute}
            return self.summed.get(inputs[0], frozenset()) | {said["group"]} if said.get("op") == "sum" else None
        if node.op_type in PASSES_ON:
            return self.summed.get(inputs[0])
        if node.op_type not in OF_ELEMENTS:
            return None
        # A value of the same shape that is no sum may differ between ranks, whatever else the operator takes.
        alike = [one for one in inputs if one not in self._constants and self._sizes.get(one) == self._sizes[node.name]]
        every = [self.summed.get(one) for one in alike]
        return frozenset.union(*every) if every and None not in every else None  # type: ignore[arg-type]


def _sizes(of: Any) -> tuple[int, ...]:
    return tuple(one.size for one in of.tensor_type.shape.dim)
