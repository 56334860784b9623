"""The course of configurations: what each agreement makes of those before. It goes by the agreements alone, in their order, so
it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from monitor.dynamic.proposal import RETURN, C, Fields, Proposal, Switch


class Course(Generic[C]):
    """Where the agreements so far lead.

    Args:
        prepare: Makes a configuration of its fields; raises where this rank cannot use it.

    Attributes:
        base: The fields that hold until the next change, without what holds for some steps only.
    """

    def __init__(self, base: Fields, prepare: Callable[[Fields], C]) -> None:
        self.base = base
        self._prepare = prepare

    def prepared(self, proposal: Proposal) -> C:
        """The configuration that ``proposal`` leads to. Raises what ``prepare`` raises."""
        return self._prepare(proposal.over(self.base))

    def after(self, number: int, from_step: int, proposal: Proposal, config: C) -> list[Switch[C]]:
        """What agreement ``number`` on ``proposal`` brings, in the order of steps. It replaces all that was to come from
        ``from_step`` on.
        """
        switches = [Switch(from_step, config, number, proposal.origin)]
        if proposal.steps is None:
            self.base = proposal.fields
        else:
            switches.append(Switch(from_step + proposal.steps, self._prepare(self.base), number, RETURN))
        return switches
