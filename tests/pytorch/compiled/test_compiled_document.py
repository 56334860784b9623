"""What ``docs/compiled.md`` shows can be done as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[3] / "docs" / "compiled.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_example_has_the_rows_of_eager_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "output"))

    exec(compile(EXAMPLE, "compiled.md", "exec"), {})

    (first, *_) = sorted((tmp_path / "output").rglob("actv_0*.csv"))
    names = [line.split(",")[1] for line in first.read_text().splitlines()[1:]]
    assert {"0.input", "0.output", "1.input", "1.output", "2.output"} <= set(names)
