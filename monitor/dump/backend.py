"""What a framework's room brings to its precision dump: a module of the names of ``DumpBackend``."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from monitor.dump.values import Leaf
from monitor.failures import Failures
from monitor.recording.backend import Graph
from monitor.recording.protocols import Removable
from monitor.recording.tensor_paths import TensorPaths


class Reader(Protocol):
    """Reads tensors on the thread that computes them; the rest is done by the writer."""

    def leaf(self, x: Any, file: str | None) -> Leaf:
        """What is to be known of ``x`` as it is now.

        Args:
            file: The name of the file that its elements are to be kept in; None where they are not.
        """


class ApiListener(Protocol):
    """Who is told of calls of APIs. Must not raise."""

    def begins(self, prefix: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call is about to happen. Returns what is to be handed to ``ended``; None if nobody wants to know of that."""

    def ended(self, call: Any, result: Any) -> None:
        """It has returned."""

    def raised(self, call: Any) -> None:
        """It has raised."""

    def warn(self, cause: str, message: str) -> None:
        """Say something to the user, once for each cause."""


class Interception(Protocol):
    """What sees calls of APIs."""

    def install(self) -> None: ...

    def remove(self) -> None:
        """Take everything away. Any number of times."""

    def register(self, module: Any, api: str, prefix: str) -> None:
        """See one more from the next ``install`` on.

        Raises:
            ValueError: There is no such function.
        """

    def restore(self, module: Any, api: str) -> None:
        """See it no more, and leave it as it was."""


class DumpBackend(Protocol):
    """See the module."""

    framework: str
    module_prefix: str
    tensor: type
    leaves: TensorPaths
    graph: Graph

    def computing(self) -> AbstractContextManager[object]:
        """What is called inside is recorded by nobody."""

    def new_reader(self, *, checksums: bool) -> Reader: ...

    def new_interception(self, listener: ApiListener, api_list: str | None, *, primitives_of: Sequence[Any]) -> Interception:
        """What sees calls of the APIs in the list, and those of primitives that modules have.

        Raises:
            ConfigError: The list cannot be used.
        """

    def models_of(self, model: Any) -> Sequence[Any]:
        """The models that were passed.

        Raises:
            TypeError: Something among them is no module.
        """

    def modules_of(self, model: Any, failures: Failures) -> Iterable[tuple[str, Any]]:
        """The modules below a model that take hooks, and their names."""

    def parameters_of(self, module: Any) -> Iterable[tuple[str, Any]]:
        """Those that are a module's own, and their names in it."""

    def on_parameter(self, parameter: Any, take: Callable[[Any], None]) -> Removable | None:
        """Have ``take(gradient)`` called in each backward; None for one that is not trained."""

    def before_forward(self, module: Any, call: Callable[..., None]) -> Removable: ...

    def after_forward(self, module: Any, call: Callable[..., None], *, always: bool = False) -> Removable: ...

    def traced(self) -> bool:
        """Whether what is called is written into a graph of the user's: then nothing is to be read."""

    def being_called(self) -> Sequence[int] | None:
        """The ids of the modules that this thread is calling, outermost first; None where hooks tell of what has raised."""

    def backward_pass(self) -> int:
        """The number of the backward in progress; another one for each."""

    def rank(self) -> int | None:
        """Of this process in its job; None where there is no job of several."""

    def refuse(self, level: str) -> None:
        """Raise where a level cannot be recorded in the mode that is set.

        Raises:
            ValueError: It says why, and what to do.
        """


# --- What goes wrong while a dump is recorded: said once, and kept beside what was dumped.

ERRORS: Final = "dump_error_info.log"


class DumpFailures(Failures):
    """Attributes:
    directory: Of the rank's step.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.directory: Path | None = None

    def _once(self, cause: str, message: str, error: BaseException | None) -> None:
        super()._once(cause, message, error)
        if self.directory is not None:
            with suppress(OSError), open(self.directory / ERRORS, "a", encoding="utf-8") as file:
                file.write(f"{message.strip()}\n")


# --- Randomness fixed, as far as no framework has a part in it.

LARGEST = (1 << 32) - 1
"""Of the seeds that numpy takes."""


def seed_python(seed: int) -> None:
    """Seed Python's generator and numpy's, and the hashes of processes that this one starts.

    Raises:
        ValueError: ``seed`` is no whole number from 0 to 2^32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST:
        raise ValueError(f"seed is {seed!r}: expected a whole number from 0 to {LARGEST}.")
    random.seed(seed)
    np.random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)


def replace_everywhere(package: str, name: str, original: Any, replacement: Any) -> None:
    """Let ``name`` stand for ``replacement`` in each module of a package where it stands for ``original``.

    A framework's modules import functions from each other, and each holds a reference of its own.
    """
    for path, module in list(sys.modules.items()):
        if (path == package or path.startswith(f"{package}.")) and vars(module).get(name) is original:
            setattr(module, name, replacement)
