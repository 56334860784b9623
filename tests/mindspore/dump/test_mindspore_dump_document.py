"""What ``docs/precision-dump.md`` shows of MindSpore can be done as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cells_to_dump import Dump

TEXT = (Path(__file__).parents[3] / "docs" / "precision-dump.md").read_text(encoding="utf-8")
_, TRAINING, _ = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_example_dumps_the_steps_that_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(TRAINING, "precision-dump.md", "exec"), {"__name__": "__main__"})
    assert sorted(path.name for path in (tmp_path / "dump_path").iterdir()) == ["step0", "step2"]
    names = set(Dump(tmp_path / "dump_path", 2).data)
    assert {"Cell.0.Conv2d.forward.0", "Cell.3.Dense.parameters_grad.0", "Primitive.relu.ReLU.0.backward"} <= names
