"""The level ``debug``: single values of a program, saved by name."""

from __future__ import annotations

from typing import Any

from monitor.dump.calls import ADVICE, Recorded
from monitor.dump.measured import Slot
from monitor.dump.session import Backward


def save(recorded: Recorded, value: Any, name: str, *, backward: bool) -> None:
    """Save a value now, and its gradients when they come."""
    session, trees, graph = recorded.session, recorded.trees, recorded.backend.graph
    number = session.number(name)
    entry = f"{name}.{number}.debug"
    session.enter(entry, trees.of(value, entry, session.leaf), None, session.stack())
    if not (backward and graph.recording()):
        return
    gradients = Backward(f"{name}_grad.{number}.debug", None, None)

    def watch(x: Any, slot: Slot) -> bool:
        if not graph.requires_grad(x):
            return False
        take = recorded.failures.guarded("reading gradients", session.expect(gradients, slot), ADVICE, of=gradients.name)
        session.until_end.add(graph.on_gradient(x, take))
        return True

    gradients.content = trees.slots(value, gradients.name, watch)
