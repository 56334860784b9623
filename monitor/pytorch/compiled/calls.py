"""Operators that show whole calls of modules in compiled code: arguments, results, and the attention that is computed inside.

At the end of a call, one operator is given all tensors together. So an argument is still there when the result is known. While
the call is traced, the functions that it calls are seen: the compiler interprets a graph, one function after another.
"""

from __future__ import annotations

import json
import math
import operator
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from monitor.pytorch.compiled import operators
from monitor.pytorch.features import attention
from monitor.pytorch.features.attention import PRODUCTS, SDPA, SDPA_ARGUMENTS, SOFTMAXES, AttentionCall, ReplayedSearch
from monitor.pytorch.features.flex import FLEX
from monitor.pytorch.tensors import TENSOR_PATHS

SOFTMAX: Final = "softmax"
READ_BY_SCORE: Final = "score "
READ_BY_MASK: Final = "mask "
"""What the names of tensors begin with that ``score_mod`` and ``mask_mod`` read."""

RESULT: Final = "="
"""What the name of a result begins with, among the names of arguments."""

HIGHER_ORDER: Final = "it calls {name} in compiled code, which hides its calls"
CHANGED: Final = "a tensor of its attention is changed in place in compiled code"
NOT_TRACED: Final = "its backend does not show its calls"
NOT_SEEN: Final = "the monitor failed to see a call in it"

_MODIFICATIONS: Final[dict[str, tuple[Any, Any]]] = {}
"""``score_mod`` and ``mask_mod`` of FlexAttention calls that were traced, by a key that no other process has."""

# --- When compiled code runs.


class SeenCall(NamedTuple):
    """A call that may compute attention.

    Attributes:
        name: ``SOFTMAX``, ``FLEX``, or that of ``SDPA``.
        tensors: Its tensors by argument: in a trace themselves, otherwise their index among those of the operator.
        others: Its other arguments.
        autocast: The dtype of autocast during the call; empty without it.
    """

    name: str
    tensors: Mapping[str, Any]
    others: Mapping[str, Any]
    autocast: str


class WholeCallObserver(operators.CallObserver):
    """An observer that calls a function with the arguments and results of a call, as far as these are tensors, and with a maker
    of searches that replay the calls inside.
    """

    def called(self, tensors: Sequence[Tensor], names: Sequence[str], mask: str, inside: str) -> None:
        seen = json.loads(inside)
        args, kwargs, results = [], {}, []
        for x, name in zip(tensors, names, strict=False):
            if name.startswith(RESULT):
                results.append((name.removeprefix(RESULT), x))
            elif name:
                kwargs[name] = x
            else:
                args.append(x)
        given = {**kwargs, "attn_mask_type": mask} if mask else kwargs
        searching = partial(_replayed, seen, tensors)
        self._call(self._module, tuple(args), given, _result_of(results), searching, seen["changed"])


def _result_of(leaves: Sequence[tuple[str, Tensor]]) -> Any:
    """A result with these tensors, by suffix: one tensor, or a tuple. A tuple inside has a tensor of a deeper structure."""
    if [suffix for suffix, _ in leaves] == [""]:
        return leaves[0][1]
    return tuple(x if suffix[1:].isdigit() else (x,) for suffix, x in leaves) or None


def _replayed(seen: Mapping[str, Any], tensors: Sequence[Tensor], *asked: Any) -> ReplayedSearch:
    calls = []
    for called, places, others, autocast in seen["calls"]:
        given = {**{name: tensors[place] for name, place in places.items()}, **others}
        if called == FLEX:
            flex = torch.ops.higher_order.flex_attention
            calls.append(AttentionCall(flex, _arguments_of_flex(**given), {}, _dtype_of(autocast)))
        elif called == SOFTMAX:
            calls.append(AttentionCall(torch.softmax, (given["input"], -1), {}, _dtype_of(autocast)))
        else:
            calls.append(AttentionCall(SDPA, (), given, _dtype_of(autocast)))
    return ReplayedSearch(calls, seen["named"], seen["hidden"], *asked)


def _arguments_of_flex(query: Tensor, key: Tensor, scale: float, modification: str, **read: Tensor) -> tuple[Any, ...]:
    """The operator's arguments, as far as they say what the scores are."""
    score, mask = _MODIFICATIONS[modification]
    by_score, by_mask = (
        tuple(x for name, x in read.items() if name.startswith(prefix)) for prefix in (READ_BY_SCORE, READ_BY_MASK)
    )
    return query, key, None, score, (mask,), scale, {}, by_score, by_mask


def _dtype_of(autocast: str) -> torch.dtype | None:
    return getattr(torch, autocast) if autocast else None


def _called(tensors: Sequence[Tensor], handle: Tensor, names: Sequence[str], mask: str, inside: str, autocast: str) -> None:
    observed = operators.OBSERVED.get(handle.data_ptr())
    if observed is not None and isinstance(observed.observer, WholeCallObserver):
        dtype = _dtype_of(autocast)
        with torch.no_grad(), torch.autocast(handle.device.type, dtype, enabled=dtype is not None):
            observed.observer.called(tensors, names, mask, inside)


# --- While a compiler traces.


class TracedSearch:
    """Sees the functions that a module calls while its call is traced.

    Args:
        arguments: The tensors that the module is given.

    Attributes:
        looks: Whether it sees calls; otherwise only changes of the arguments.
        calls: Those that may compute attention.
        named: The names of others that may be parts of one.
        hidden: Why some calls are not seen; empty if all are.
    """

    def __init__(self, arguments: Sequence[Tensor] = (), *, looks: bool = True, hidden: str = "") -> None:
        self.looks = looks
        self.calls: list[SeenCall] = []
        self.named: set[str] = set()
        self.hidden = hidden
        self._products: set[tuple[str, ...]] = set()
        self._arguments, self._taken = _versions_of(arguments), _versions_of(())

    def changed(self) -> bool:
        """Whether an argument of the module has changed in place since its call began."""
        return _have_changed(self._arguments)

    def reason(self) -> str:
        """``hidden``, or that a tensor of an attention call has changed in place since then."""
        return self.hidden or (CHANGED if _have_changed(self._taken) else "")

    def look(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a call."""
        name = getattr(function, "__name__", "").partition(".")[0]
        if isinstance(function, torch._ops.HigherOrderOperator):
            if name == FLEX:
                self._take_flex(*args)
            else:
                self.hidden = HIGHER_ORDER.format(name=name)
        elif name in attention.ATTENDING or name in attention.LAYERS:
            self.named.add(name)
        if function is SDPA:
            given = {**dict(zip(SDPA_ARGUMENTS, args, strict=False)), **kwargs}
            self._take(SDPA.__name__, given)
        elif function in SOFTMAXES:
            scores = args[0] if args else kwargs.get("input")
            over = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(scores, Tensor) and scores.dim() == 4 and over in (-1, 3) and _shape_of(scores) in self._products:
                self._take(SOFTMAX, {"input": scores})

    def _take_flex(
        self,
        query: Tensor,
        key: Tensor,
        _value: Tensor,
        score: Any,
        block_mask: Sequence[Any],
        scale: float,
        _options: Any = None,
        read_by_score: Sequence[Any] = (),
        read_by_mask: Sequence[Any] = (),
    ) -> None:
        """The arguments of the operator of ``flex_attention``."""
        modification = uuid.uuid4().hex
        _MODIFICATIONS[modification] = score, block_mask[-1]
        read = {f"{READ_BY_SCORE}{i}": x for i, x in enumerate(read_by_score)}
        read |= {f"{READ_BY_MASK}{i}": x for i, x in enumerate(read_by_mask)}
        self._take(FLEX, {"query": query, "key": key, "scale": scale, "modification": modification, **read})

    def _take(self, name: str, given: Mapping[str, Any]) -> None:
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        others = {name: x for name, x in given.items() if x is not None and name not in tensors}
        if all(isinstance(x, bool | int | float | str) for x in others.values()):
            self.calls.append(SeenCall(name, tensors, others, _autocast_on(next(iter(tensors.values())).device)))
            self._taken += _versions_of(tensors.values())
        else:
            self.hidden = "an argument of its attention is not a constant in compiled code"

    def note(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """After a call."""
        if function in PRODUCTS and isinstance(result, Tensor) and result.dim() in (3, 4):
            given = (*args, *(value for name, value in kwargs.items() if name != "out"))
            factors = [one for one in given if isinstance(one, Tensor)][-2:]
            # A weight, or a part of one, lacks the batch.
            if all(one.dim() == result.dim() and str(one.shape[0]) == str(result.shape[0]) for one in factors):
                self._products.add(_shape_of(result))


def _versions_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    return [(x, x._version) for x in tensors if not x.is_inference()]


def _have_changed(tensors: Iterable[tuple[Tensor, int]]) -> bool:
    return any(x._version != version for x, version in tensors)


def _autocast_on(device: torch.device) -> str:
    """The name of autocast's dtype on a device; empty without autocast."""
    kind = device.type
    return str(torch.get_autocast_dtype(kind)).rpartition(".")[2] if torch.is_autocast_enabled(kind) else ""


def _shape_of(x: Tensor) -> tuple[str, ...]:
    """Matrices, queries and keys. As text, since a comparison of dynamic sizes would become a guard of compiled code."""
    return str(math.prod(x.shape[:-2])), str(x.shape[-2]), str(x.shape[-1])


_SEARCHES: Final = "_monitor_searches"
"""The attribute of an interpreter with its open searches, each with the handle of its hook."""

_FUNCTIONS: Final = {operator.matmul: torch.matmul, operator.imatmul: torch.matmul}


def _interpreter() -> torch.fx.Interpreter | None:
    """The interpreter of the graph that is traced on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, torch.fx.Interpreter):
            return found
        frame = frame.f_back
    return None


def _search(arguments: Sequence[Tensor], handle: Tensor, looks: bool) -> None:
    if operators.is_within(handle) or (interpreter := _interpreter()) is None:
        return
    open_searches: list[tuple[Tensor, TracedSearch]] = vars(interpreter).setdefault(_SEARCHES, [])
    open_searches.append((handle, TracedSearch(arguments, looks=looks)))
    if len(open_searches) == 1:
        for how in ("call_function", "call_method"):
            setattr(interpreter, how, _seeing(getattr(interpreter, how), open_searches))


def _seeing(call: Callable[..., Any], searches: Sequence[tuple[Tensor, TracedSearch]]) -> Callable[..., Any]:
    """A method of an interpreter, which lets searches see the call."""

    def seen(target: Any, args: Any, kwargs: Any) -> Any:
        function = getattr(Tensor, target, None) if isinstance(target, str) else _FUNCTIONS.get(target, target)
        looking = [search for _, search in searches if search.looks]
        _each(looking, lambda search: search.look(function, args, kwargs))
        result = call(target, args, kwargs)
        _each(looking, lambda search: search.note(function, args, kwargs, result))
        return result

    return seen


def _each(searches: Iterable[TracedSearch], see: Callable[[TracedSearch], None]) -> None:
    for search in searches:
        try:
            see(search)
        except Exception as error:  # a failure here must not reach the compiler
            search.hidden = NOT_SEEN
            operators.FAILURES.report("observing compiled code", error, operators.MISSING_ROWS)


def _found(handle: Tensor) -> TracedSearch:
    """End the search of a call, and return it."""
    interpreter = _interpreter()
    searches = [] if interpreter is None else vars(interpreter).get(_SEARCHES, [])
    place = next((place for place in reversed(range(len(searches))) if searches[place][0] is handle), None)
    if place is None:
        return TracedSearch(hidden=NOT_TRACED)
    found: TracedSearch = searches.pop(place)[1]  # those behind it may be of another monitor
    if not searches:
        for name in ("call_function", "call_method", _SEARCHES):
            delattr(interpreter, name)
    return found


def _call(tensors: Sequence[Tensor], handle: Tensor, names: Sequence[str], mask: str) -> None:
    if operators.is_within(handle):
        return
    try:
        search = _found(handle)
        flat = [x for one in search.calls for x in one.tensors.values()]
        inside, count = [], len(tensors)
        for one in search.calls:
            inside.append((one.name, {name: count + i for i, name in enumerate(one.tensors)}, one.others, one.autocast))
            count += len(one.tensors)
        seen = {"calls": inside, "named": sorted(search.named), "hidden": search.reason(), "changed": search.changed()}
        every = [*tensors, *flat]
        if any(is_traceable_wrapper_subclass(x) and not isinstance(x, FunctionalTensor) for x in every):
            every, names, seen["calls"] = [], [], []
        with operators.saved():
            torch.ops.monitor.called.default(every, handle, names, mask, json.dumps(seen), _autocast_on(handle.device))
    except Exception as error:
        operators.FAILURES.report("observing compiled code", error, operators.MISSING_ROWS)


def _define() -> torch.library.Library:
    library = torch.library.Library("monitor", "FRAGMENT")
    library.define("called(Tensor[] tensors, Tensor handle, str[] names, str mask, str inside, str autocast) -> ()")
    library.define("search(Tensor[] arguments, Tensor handle, bool looks) -> ()")
    library.define("call(Tensor[] tensors, Tensor handle, str[] names, str mask) -> ()")
    operators.define_effect(library, "called", _called)
    library.impl("called", operators.nothing, "Meta")
    operators.define_traced(library, "search", _search)
    operators.define_traced(library, "call", _call)
    return library


LIBRARY: Final = _define()
"""Keeps the operators registered."""


class TracedBegin(operators.TracedHook):
    """Before a module's forward: from now on changes of its arguments are seen.

    Args:
        looks: Whether the functions that it calls are seen, too.
    """

    def __init__(self, observed: operators.ObservedHook, *, looks: bool) -> None:
        super().__init__(observed)
        self._looks = looks

    def __call__(self, _module: nn.Module, args: Any = (), kwargs: Any = None) -> None:
        given = (*args, *(kwargs or {}).values())
        torch.ops.monitor.search.default([x for x in given if isinstance(x, Tensor)], self._handle, self._looks)


class TracedWhole(operators.TracedHook):
    """After a module's forward: its results, as far as they are tensors.

    Args:
        arguments: Whether its arguments are shown with them. They stay in memory until then.
    """

    def __init__(self, observed: operators.ObservedHook, *, arguments: bool) -> None:
        super().__init__(observed, ends=True)
        self._arguments = arguments

    def __call__(self, _module: nn.Module, args: Any = (), kwargs: Any = None, result: Any = None) -> None:
        args, kwargs = (args, kwargs or {}) if self._arguments else ((), {})
        given = [x for x in args if isinstance(x, Tensor)]
        named = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
        leaves = TENSOR_PATHS.outputs(result)
        names = ["" for _ in given] + list(named) + [RESULT + leaf.suffix for leaf in leaves]
        tensors = given + list(named.values()) + [leaf.tensor for leaf in leaves]
        mask = kwargs.get("attn_mask_type")
        mask = getattr(mask, "name", mask)
        torch.ops.monitor.call.default(tensors, self._handle, names, mask if isinstance(mask, str) else "")
