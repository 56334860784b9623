"""Sees every communication operator where all of them pass: in torch's dispatcher, below autograd and above every backend.

Explicit calls, the reducer of DistributedDataParallel, FSDP, DTensor and functional collectives meet there and nowhere above.
The key is ``BackendSelect``, which every call passes whatever its device. At the autograd keys we would miss what is issued
below autograd (the dispatch of DTensor, ``torch.inference_mode``), and would displace the derivatives that torch has registered
there for functional collectives. Modes and tracers stand above, so that no compiler meets us. A kernel of ours costs other
operators nothing, and stands only while somebody listens.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from monitor.pytorch.collectives.operators import Operator, operators, wait_operator

KEY: Final = "BackendSelect"
_BELOW: Final = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)

Ended = Callable[[Any], None]
"""Told of the result of a call."""


class CollectiveListener:
    """Whoever wants to know of communication. Must not raise."""

    def call_begins(self, operator: Operator, args: Sequence[Any]) -> Ended | None:
        """``operator`` is about to be called.

        Returns:
            What to tell its result; None if nobody wants to know.
        """

    def tensor_waited_for(self, tensor: Tensor) -> None:
        """The functional collective that gave ``tensor`` has completed for the current stream."""


class _Inside(threading.local):
    """How deep this thread is in operators that are made of others."""

    depth = 0


class Interception:
    """The kernels, and who is told by them."""

    def __init__(self) -> None:
        self._listeners: tuple[weakref.ref[CollectiveListener], ...] = ()
        self._libraries: list[torch.library.Library] = []
        self._inside = _Inside()

    @property
    def installed(self) -> bool:
        return bool(self._libraries)

    def add(self, listener: CollectiveListener) -> None:
        """Tell ``listener`` of every call from now on, as long as it lives."""
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))
        if not self._libraries:
            self._install()

    def remove(self, listener: CollectiveListener) -> None:
        """Tell it nothing more. Any number of times."""
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def _forget(self, gone: weakref.ref[CollectiveListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone and known() is not None)
        if not self._listeners:
            while self._libraries:
                self._libraries.pop()._destroy()

    def _install(self) -> None:
        libraries: dict[str, torch.library.Library] = {}
        for operator in operators():
            library = libraries.get(operator.namespace)
            if library is None:
                library = libraries[operator.namespace] = torch.library.Library(operator.namespace, "IMPL")
                self._libraries.append(library)
            library.impl(operator.schema_name, partial(self._call, operator), KEY, with_keyset=True)
        libraries["_c10d_functional"].impl("wait_tensor", self._wait, KEY, with_keyset=True)

    def _call(self, operator: Operator, keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if self._inside.depth:
            return operator.overload.redispatch(keys & _BELOW, *args, **kwargs)
        ended = [told for known in self._listeners if (one := known()) and (told := one.call_begins(operator, args))]
        self._inside.depth += 1
        try:
            result = operator.overload.redispatch(keys & _BELOW, *args, **kwargs)
        finally:
            self._inside.depth -= 1
        for told in ended:
            told(result)
        return result

    def _wait(self, keys: DispatchKeySet, tensor: Tensor) -> Any:
        result = wait_operator().redispatch(keys & _BELOW, tensor)
        if not self._inside.depth:
            for known in self._listeners:
                listener = known()
                if listener is not None:
                    listener.tensor_waited_for(tensor)
        return result


INTERCEPTION: Final = Interception()
"""Of this process, which has one dispatcher."""
