"""Intercepts calls of MindSpore's functions, methods and primitives.

MindSpore has no hook for them. So attributes of modules and classes are replaced while the dump runs, and restored exactly: a
replacement of an inherited attribute is deleted. Compiled code does not use the replacements: they are removed while it is
compiled and runs, and tracing is detected by its context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from mindspore import Tensor, mint, nn, ops
from mindspore.communication import comm_func
from mindspore.mint import distributed
from mindspore.ops import Primitive

from monitor.dump.backend import ApiListener
from monitor.dump.levels import api_list as read_list, packaged_list
from monitor.mindspore.dump.jit import CompiledFunctions
from monitor.mindspore.hooks import jit_context

PLACES: Final = {
    "Functional": ops,
    "Tensor": Tensor,
    "Mint": mint,
    "MintFunctional": mint.nn.functional,
    "MintDistributed": distributed,
    "Distributed": comm_func,
}
"""The modules and classes in which the names of a prefix are looked up."""

SECTIONS: Final = {
    "ops": "Functional",
    "tensor": "Tensor",
    "mint": "Mint",
    "mint.nn.functional": "MintFunctional",
    "mint.distributed": "MintDistributed",
    "communication.comm_func": "Distributed",
}
"""The prefixes by the section names that ``support_wrap_ops.yaml`` uses."""

PRIMITIVE: Final = "Primitive"

Function = Callable[..., Any]
Named = Callable[[Sequence[Any]], tuple[str, str] | None]
"""Prefix and name of a call, given its arguments; None to ignore the call."""


class Patch:
    """The replacement of one attribute.

    Args:
        owner: The module or class in which callers look it up.
        first: The index of the first argument to report.
    """

    def __init__(self, owner: Any, name: str, named: Named, listener: ApiListener, first: int = 0) -> None:
        self._owner, self._name = owner, name
        self._was_its_own = name in vars(owner)
        self._original: Function = vars(owner)[name] if self._was_its_own else getattr(owner, name)
        self._ours = _intercepting(self._original, named, listener, first)

    def install(self) -> None:
        setattr(self._owner, self._name, self._ours)

    def remove(self) -> None:
        if vars(self._owner).get(self._name) is not self._ours:
            return  # others have patched it since: this patch stays in their chain, muted
        if self._was_its_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)


class MindSporeApiInterception:
    """All patches that intercept API calls.

    Args:
        primitives_of: Models whose primitives are intercepted too.
    """

    def __init__(self, listener: ApiListener, api_list: str | None, primitives_of: Sequence[nn.Cell]) -> None:
        self._listener = _Muted(listener)
        self._custom: dict[tuple[int, str], str] = {}
        listed = read_list(packaged_list(__file__) if api_list is None else api_list, tuple(PLACES), SECTIONS)
        self._patches = {(id(owner), name): self._patch(owner, name, prefix) for owner, name, prefix in _found(listed)}
        self._listed = frozenset(self._patches)
        self._primitives = _primitives(primitives_of)
        for kind in {type(one): None for one, _ in self._primitives.values()}:
            self._patches[id(kind), "__call__"] = Patch(kind, "__call__", self._named_primitive, self._listener, first=1)
        self._compiled = CompiledFunctions(self._listener, self._pause, self._resume)
        self._compiled_calls = 0

    def install(self) -> None:
        self._listener.muted = False
        self._compiled.install()
        self._put_in_place()

    def remove(self) -> None:
        self._listener.muted = True
        self._compiled.remove()
        self._take_away()

    def _put_in_place(self) -> None:
        for patch in self._patches.values():
            patch.install()

    def _take_away(self) -> None:
        for patch in self._patches.values():
            patch.remove()

    def _pause(self) -> None:
        """A compiled function is called, perhaps inside another one."""
        self._compiled_calls += 1
        if self._compiled_calls == 1 and not self._listener.muted:
            self._take_away()

    def _resume(self) -> None:
        self._compiled_calls -= 1
        if self._compiled_calls == 0 and not self._listener.muted:
            self._put_in_place()

    def register(self, module: Any, api: str, prefix: str) -> None:
        key = id(module), api
        self._custom[key] = prefix
        if key in self._patches:
            return
        self._patches[key] = self._patch(module, api, prefix)
        if not self._listener.muted:
            self._patches[key].install()

    def restore(self, module: Any, api: str) -> None:
        """An API of the list stays intercepted, under its prefix there."""
        key = id(module), api
        self._custom.pop(key, None)
        patch = None if key in self._listed else self._patches.pop(key, None)
        if patch is not None:
            patch.remove()

    def _patch(self, owner: Any, name: str, prefix: str) -> Patch:
        """A patch of an API. A prefix that the user has registered overrides that of the list."""
        key = id(owner), name
        return Patch(owner, name, lambda _: (self._custom.get(key, prefix), name), self._listener)

    def _named_primitive(self, args: Sequence[Any]) -> tuple[str, str] | None:
        _, name = self._primitives.get(id(args[0]), (None, None))
        return None if name is None else (PRIMITIVE, name)


class _Muted:
    """A listener that can be muted, for patches that could not be removed from a chain of patches."""

    def __init__(self, listener: ApiListener) -> None:
        self._listener = listener
        self.muted = True

    def begins(self, prefix: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return None if self.muted else self._listener.begins(prefix, name, args, kwargs)

    def ended(self, call: Any, result: Any) -> None:
        self._listener.ended(call, result)

    def raised(self, call: Any) -> None:
        self._listener.raised(call)

    def warn(self, cause: str, message: str) -> None:
        self._listener.warn(cause, message)


def _intercepting(original: Function, named: Named, listener: ApiListener, first: int) -> Function:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        called = None if jit_context() is not None else named(args)
        call = None if called is None else listener.begins(*called, args[first:], kwargs)
        if call is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            listener.raised(call)
            raise
        listener.ended(call, result)
        return result

    return patched


def _found(listed: Mapping[str, Sequence[str]]) -> Iterable[tuple[Any, str, str]]:
    """The functions of the list that this version of MindSpore has."""
    for prefix, owner in PLACES.items():
        for name in listed.get(prefix, ()):
            if callable(getattr(owner, name, None)):
                yield owner, name, prefix


def _primitives(models: Sequence[nn.Cell]) -> dict[int, tuple[Primitive, str]]:
    """The primitives of all cells by their ids, each with its attribute and class: ``conv2d.Conv2D``."""
    return {
        id(value): (value, f"{attribute}.{type(value).__name__}")
        for model in models
        for _, cell in model.cells_and_names()
        for attribute, value in {**vars(cell), **getattr(cell, "_primitives", {})}.items()
        if isinstance(value, Primitive)
    }
