"""The adapter interface that a framework implements for the precision dump, and code that no framework affects."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from monitor.dump.values import TensorLeaf
from monitor.failures import Failures
from monitor.recording.arguments import flag
from monitor.recording.backend import Autograd, Removable
from monitor.recording.tensor_paths import TensorPaths


class DumpReader(Protocol):
    """Reads tensors on the thread that computes them; the writer does the rest."""

    def leaf(self, x: Any, file: str | None) -> TensorLeaf:
        """Read the current state of ``x``.

        Args:
            file: The name of the file for its elements; None if they are not stored.
        """


class ApiListener(Protocol):
    """Receives calls of APIs. Its methods must not raise."""

    def begins(self, prefix: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call is about to happen. Returns a token that is passed to ``ended`` or ``raised``; None to ignore the call."""

    def ended(self, call: Any, result: Any) -> None:
        """The call has returned."""

    def raised(self, call: Any) -> None:
        """The call has raised."""

    def warn(self, cause: str, message: str) -> None:
        """Warn the user, once for each cause."""


class ApiInterception(Protocol):
    """Intercepts calls of APIs."""

    def install(self) -> None: ...

    def remove(self) -> None:
        """Remove all patches. May be called repeatedly."""

    def register(self, module: Any, api: str, prefix: str) -> None:
        """Intercept one more API, from the next ``install`` on.

        Raises:
            ValueError: The module has no such function.
        """

    def restore(self, module: Any, api: str) -> None:
        """Stop intercepting an API, and restore it."""


class DumpBackend(Protocol):
    """A framework, implemented by the modules ``monitor.pytorch.dump.backend`` and ``monitor.mindspore.dump.backend``."""

    framework: str
    module_prefix: str
    tensor: type
    leaves: TensorPaths
    graph: Autograd

    def computing(self) -> AbstractContextManager[object]:
        """A context whose operations no graph records."""

    def new_reader(self, *, checksums: bool) -> DumpReader: ...

    def new_interception(self, listener: ApiListener, api_list: str | None, *, primitives_of: Sequence[Any]) -> ApiInterception:
        """Intercept calls of the APIs in the list, and of primitives that modules have.

        Raises:
            ConfigError: The list cannot be used.
        """

    def models_of(self, model: Any) -> Sequence[Any]:
        """The models that were passed, as a sequence.

        Raises:
            TypeError: One of them is no module.
        """

    def modules_of(self, model: Any, failures: Failures) -> Iterable[tuple[str, Any]]:
        """The modules below a model that take hooks, with their names."""

    def compiled_of(self, models: Sequence[Any]) -> Set[int]:
        """The ids of the modules of ``modules_of`` whose code is compiled, if the dump shows them in a part of their own."""

    def parameters_of(self, module: Any) -> Iterable[tuple[str, Any]]:
        """The parameters that a module has itself, with their names in it."""

    def on_parameter(self, parameter: Any, take: Callable[[Any], None]) -> Removable | None:
        """Call ``take(gradient)`` in each backward; None for a parameter that is not trained."""

    def before_forward(self, module: Any, call: Callable[..., None]) -> Removable: ...

    def after_forward(self, module: Any, call: Callable[..., None], *, always: bool = False) -> Removable: ...

    def traced(self) -> bool:
        """Whether calls are being traced into a graph: then nothing can be read."""

    def being_called(self) -> Sequence[int] | None:
        """The ids of the modules that this thread is calling, outermost first; None if hooks report calls that raised."""

    def backward_pass(self) -> int:
        """The number of the backward in progress; it differs between backwards."""

    def rank(self) -> int | None:
        """The rank of this process; None if the job has only one."""

    def refuse(self, level: str) -> None:
        """Refuse a level that cannot be recorded in the current mode.

        Raises:
            ValueError: The message says why, and what to do.
        """


# --- Failures while a dump is recorded: each is logged once, and written to a file beside the dump.

ERRORS: Final = "dump_error_info.log"


class DumpFailures(Failures):
    """Failures of a dump, which are also written to a file beside it.

    Attributes:
        directory: The directory of the rank's step, where the file is; None before the first step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory: Path | None = None

    def _once(self, cause: str, message: str, error: BaseException | None) -> None:
        super()._once(cause, message, error)
        if self.directory is not None:
            with suppress(OSError), open(self.directory / ERRORS, "a", encoding="utf-8") as file:
                file.write(f"{message.strip()}\n")


# --- Fixed randomness, as far as no framework is involved.

LARGEST = (1 << 32) - 1
"""The greatest seed that numpy accepts."""


def seed_python(seed: int, **flags: bool) -> None:
    """Seed the generators of Python and numpy, and the hashes of processes that this process starts.

    Args:
        flags: What else ``seed_all`` was given, checked here.

    Raises:
        ValueError: ``seed`` is no whole number from 0 to 2^32 - 1.
        TypeError: A flag is neither True nor False.
    """
    for name, value in flags.items():
        flag(value, name)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST:
        raise ValueError(f"seed is {seed!r}: expected a whole number from 0 to {LARGEST}.")
    random.seed(seed)
    np.random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)


def replace_everywhere(package: str, name: str, original: Any, replacement: Any) -> None:
    """Replace ``original`` in each module of a package in which ``name`` refers to it.

    A framework's modules import functions from each other, and each holds its own reference.
    """
    for path, module in list(sys.modules.items()):
        if (path == package or path.startswith(f"{package}.")) and vars(module).get(name) is original:
            setattr(module, name, replacement)
