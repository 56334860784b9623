"""What calls are called in the files."""

from __future__ import annotations

from typing import NamedTuple


class CallName(NamedTuple):
    """A call among those of its step.

    Attributes:
        base: ``Module.conv1.Conv2d`` of a module, ``Functional.relu`` of an API.
        number: How many calls of the same came before.
        of_module: Modules have the direction before the number, APIs behind it.
    """

    base: str
    number: int
    of_module: bool

    def of(self, direction: str) -> str:
        """The name of its forward or its backward."""
        return f"{self.base}.{direction}.{self.number}" if self.of_module else f"{self.base}.{self.number}.{direction}"
