"""Scope, list and data mode."""

from __future__ import annotations

from typing import Any

import pytest

from monitor.dump.config import CallSelection, TaskSection


def selection(**fields: Any) -> CallSelection:
    return CallSelection(TaskSection.model_validate(fields))


def calls_within(chosen: CallSelection, *names: str) -> list[str]:
    """Which of calls that follow each other lie in the scope."""
    found = []
    for name in names:
        if chosen.begins(name):
            found.append(name)
        chosen.ended(name)
    return found


def test_without_a_choice_everything_is_recorded() -> None:
    chosen = selection()
    assert chosen.begins("Torch.add.0.forward")
    assert chosen.lists("Torch.add.0.forward", [])
    assert chosen.wants("backward", "output")


def test_a_scope_has_both_of_its_ends() -> None:
    chosen = selection(scope=["Torch.b.0.forward", "Torch.c.0.forward"])
    names = [f"Torch.{name}.0.forward" for name in "abcd"]
    assert calls_within(chosen, *names) == names[1:3]


def test_a_scope_may_end_with_the_backward_of_a_call() -> None:
    chosen = selection(scope=["Torch.a.0.forward", "Torch.b.0.backward"])
    assert calls_within(chosen, "Torch.b.0.forward", "Torch.a.0.forward", "Torch.b.0.forward", "Torch.c.0.forward") == [
        "Torch.a.0.forward",
        "Torch.b.0.forward",
    ]


@pytest.mark.parametrize(
    ("listed", "name", "enclosing", "is_listed"),
    [
        ("relu", "Functional.relu.0.forward", [], True),
        ("elu", "Functional.relu.0.forward", [], False),
        ("Functional.relu.1.forward", "Functional.relu.10.forward", [], False),
        ("Module.conv.Conv2d.forward.1", "Module.conv.Conv2d.forward.10", [], False),
        ("blocks.0", "Module.blocks.0.Block.forward.0", [], True),
        ("blocks.0", "Module.head.Linear.forward.0", [], False),
        ("blocks.0", "Torch.add.3.forward", ["Module.blocks.0.Block.forward.0"], True),
        ("relu.0.forward", "Functional.relu.0.backward", [], False),
    ],
)
def test_a_list_has_whole_parts_of_names_and_what_is_called_within(
    listed: str, name: str, enclosing: list[str], is_listed: bool
) -> None:
    assert selection(list=[listed]).lists(name, enclosing) is is_listed


@pytest.mark.parametrize(
    ("modes", "wanted"),
    [
        (["all"], {("forward", "input"), ("forward", "output"), ("backward", "input"), ("backward", "output")}),
        (["forward"], {("forward", "input"), ("forward", "output")}),
        (["input"], {("forward", "input"), ("backward", "input")}),
        (["backward", "output"], {("backward", "output")}),
    ],
)
def test_a_data_mode_narrows_what_it_names(modes: list[str], wanted: set[tuple[str, str]]) -> None:
    chosen = selection(data_mode=modes)
    found = {(d, s) for d in ("forward", "backward") for s in ("input", "output") if chosen.wants(d, s)}
    assert found == wanted
