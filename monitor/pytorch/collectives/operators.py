"""The communication operators that pass torch's dispatcher: what people call them, and which arguments hold what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import torch
from torch import Tensor

NAMESPACES: Final = ("c10d", "_c10d_functional")

Rooted = Literal["inputs", "outputs", ""]


@dataclass(frozen=True, slots=True)
class _Known:
    """An operator of ``c10d``: the positions of its input and output, and which of them only the root has."""

    name: str
    inputs: int | None
    outputs: int | None
    rooted: Rooted = ""


_C10D: Final[Mapping[str, _Known]] = {
    "allreduce_": _Known("all_reduce", 0, 0),
    "allreduce_coalesced_": _Known("all_reduce_coalesced", 0, 0),
    "broadcast_": _Known("broadcast", 0, 0, "inputs"),
    "reduce_": _Known("reduce", 0, 0, "outputs"),
    "allgather_": _Known("all_gather", 1, 0),
    "_allgather_base_": _Known("all_gather_into_tensor", 1, 0),
    "allgather_coalesced_": _Known("all_gather_coalesced", 1, 0),
    "allgather_into_tensor_coalesced_": _Known("all_gather_into_tensor_coalesced", 1, 0),
    "reduce_scatter_": _Known("reduce_scatter", 1, 0),
    "_reduce_scatter_base_": _Known("reduce_scatter_tensor", 1, 0),
    "reduce_scatter_tensor_coalesced_": _Known("reduce_scatter_tensor_coalesced", 1, 0),
    "alltoall_": _Known("all_to_all", 1, 0),
    "alltoall_base_": _Known("all_to_all_single", 1, 0),
    "gather_": _Known("gather", 1, 0, "outputs"),
    "scatter_": _Known("scatter", 1, 0, "inputs"),
    "send": _Known("send", 0, None),
    "recv_": _Known("recv", None, 0),
    "recv_any_source_": _Known("recv", None, 0),
    "barrier": _Known("barrier", None, None),
}

_NO_TRAFFIC: Final = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "monitored_barrier_"})
_P2P_BATCH: Final = "batch_p2p_ops"


@dataclass(frozen=True, slots=True)
class Operator:
    """One overload of an operator.

    Attributes:
        namespace: Where torch has it.
        schema_name: Its name there, with the overload's.
        name: What people call it.
        overload: The operator itself.
        inputs, outputs: Positions of the arguments that hold them; None where there are none, or where they are the result.
        group: Position of the process group or of its name.
        root: Position of the root's rank in the group; None where all ranks are alike.
        rooted: What only the root has.
        functional: Whether the result holds the outputs, which are there once ``wait_tensor`` has returned.
    """

    namespace: str
    schema_name: str
    name: str
    overload: Any
    inputs: int | None
    outputs: int | None
    group: int
    root: int | None
    rooted: Rooted
    functional: bool

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        """The tensors that go in; those of a list together are one input."""
        if self.inputs is None:
            return []
        return list(_tensors(args[self.inputs]))

    def given(self, args: Sequence[Any], result: Any) -> list[Tensor]:
        """The tensors that come out once it has completed."""
        if self.functional:
            return list(_tensors(result))
        return [] if self.outputs is None else list(_tensors(args[self.outputs]))


class BatchedSendsAndReceives(Operator):
    """``batch_p2p_ops``: the tensors that are sent go in, those that are received come out."""

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        return [tensor for kind, tensor in zip(args[0], args[3], strict=True) if kind == "isend"]

    def given(self, args: Sequence[Any], result: Any) -> list[Tensor]:
        return [tensor for kind, tensor in zip(args[0], result, strict=True) if kind == "irecv"]


@cache
def operators() -> tuple[Operator, ...]:
    """Every operator that moves tensors between ranks, as this version of torch has them."""
    import torch.distributed._functional_collectives  # registers the functional ones

    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in NAMESPACES and name not in _NO_TRAFFIC:
            found.append(_described(namespace, name, schema))
    return tuple(one for one in found if one is not None)


def wait_operator() -> Any:
    """The operator that all functional ones are waited for with."""
    return torch.ops._c10d_functional.wait_tensor.default


def _described(namespace: str, name: str, schema: Any) -> Operator | None:
    """None for an operator of another version of torch, of which it is not known what goes in and what comes out."""
    known = _C10D.get(name) if namespace == "c10d" else _functional(name)
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    group = places.get("process_group", places.get("group_name"))
    if known is None or group is None:
        return None
    packet = getattr(getattr(torch.ops, namespace), name)
    full_name = f"{name}.{schema.overload_name}" if schema.overload_name else name
    made = BatchedSendsAndReceives if name == _P2P_BATCH else Operator
    root = places.get("root_rank", places.get("src")) if known.rooted else None
    overload = getattr(packet, schema.overload_name or "default")
    functional = namespace != "c10d"
    where = (known.inputs, known.outputs, group, root, known.rooted)
    return made(namespace, full_name, known.name, overload, *where, functional)


def _functional(name: str) -> _Known | None:
    """Named like the function, with what tells an in-place or out variant apart at the end; the first argument goes in."""
    if name == _P2P_BATCH:
        return _Known("batch_isend_irecv", None, None)
    if name in ("isend", "irecv"):
        return _Known(name.removeprefix("i"), 0 if name == "isend" else None, None)
    plain = name.removesuffix("_out").rstrip("_")
    return _Known(plain, 0, None, "inputs" if plain == "broadcast" else "")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
