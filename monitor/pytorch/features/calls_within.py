"""What a module hands to torch's functions while its forward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from monitor.pytorch.features.attention import Scores
from monitor.pytorch.features.sources import SDPA, called_scores
from monitor.recording.features.reading import NO_SCORES, MisfitError
from monitor.stats.torch.tensors import unseen


class CallsWithin(TorchFunctionMode):
    """Looks for the first call that an attention is made of, and hands every call on as it came.

    Attributes:
        saw: Whether the search has ended.
        reason: Why nothing was found, if nothing was.
    """

    def __init__(self, seen: Callable[[Scores], object], does_not_fit: Callable[[str], object]) -> None:
        self.saw = False
        self.reason = NO_SCORES
        self._seen = seen
        self._does_not_fit = does_not_fit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # In code that is being compiled this is traced, and must come to nothing.
        if not torch.compiler.is_compiling() and not self.saw:
            with unseen():  # by the user's modes, which are below this one
                self._look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            if self.reason != NO_SCORES and func is not SDPA:
                return  # what follows the product of Q and K is one, too
            scores = called_scores(func, args, kwargs)
            if scores is None:
                return
            self.saw = True
            self._seen(scores)
        except MisfitError as misfit:
            if func is not SDPA:  # it may be of something else, and what it is made of may still come
                self.reason = str(misfit)
                return
            self.saw = True
            self._does_not_fit(str(misfit))
        except Exception as error:  # this runs amid the module's own operations
            self.saw = True
            self._does_not_fit(f"a call in it could not be looked at: {error!r}")

    def enter(self) -> None:
        """Look from now on, until ``leave``."""
        _push_mode(self)

    def leave(self) -> None:
        """Look no longer, wherever this one stands among the modes of this thread by now.

        Another monitor's hooks come in the same order after a forward as before it, so that its mode is still on top; and a
        forward that was interrupted may have left modes behind.
        """
        self.saw = True
        above: list[Any] = []
        while torch._C._len_torch_function_stack():
            mode = _pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
