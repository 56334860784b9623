"""The page on training metrics says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from monitor.training.config import MonitorSection, TensorBoardSection, training_config_in

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "training-metrics.md").read_text()


@pytest.mark.parametrize("field", [*MonitorSection.model_fields, *TensorBoardSection.model_fields])
def test_every_field_has_a_row(field: str) -> None:
    assert f"\n| `{field}` |" in PAGE


def test_the_example_is_read() -> None:
    assert training_config_in("example", PAGE.split("```yaml\n")[1].split("```")[0]).monitor_config.monitor_on
