"""Where a process stands in its job: what a launcher's environment may say, and what becomes of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import Output, attached, train

from monitor.pytorch.place import is_settled, place
from monitor.run import Place


@pytest.mark.parametrize(
    ("rank", "world_size", "expected"),
    [
        (None, None, Place(0, 1)),
        ("1", "2", Place(1, 2)),
        ("0", "1", Place(0, 1)),
        ("3", None, Place(0, 1)),
        ("2", "2", Place(0, 2)),
        ("-1", "2", Place(0, 2)),
        ("0", "0", Place(0, 1)),
        ("first", "many", Place(0, 1)),
        ("", "", Place(0, 1)),
    ],
)
def test_a_process_without_a_group_stands_where_its_environment_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, world_size: str | None, expected: Place
) -> None:
    for variable, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert place() == expected
    assert is_settled() == (expected.world_size == 1)


@pytest.mark.parametrize(("variables", "agreed"), [({"RANK": "3"}, True), ({"RANK": "1", "WORLD_SIZE": "2"}, False)])
def test_a_rank_that_was_announced_and_never_joined_a_group_says_that_its_names_are_its_own(
    output: Output, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], agreed: bool
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, wg_distribution=True):
        train(model, optimizer, 1, torch.ones(1, 2))
    manifest = output.manifest()
    assert manifest["closed"]
    assert manifest["job_agreed"] == agreed
