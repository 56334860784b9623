"""What ``docs/mindspore.md`` shows can be done as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from reading_back import Output
from watching_cells import TwoLayers, batch

DOCUMENT = Path(__file__).parents[2] / "docs" / "mindspore.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "monitor_config.json").write_text(json.dumps({"wg_distribution": True, "ops": ["norm"]}))
    monkeypatch.chdir(tmp_path)


def run(example: str, **names: Any) -> None:
    exec(compile(example, DOCUMENT.name, "exec"), {"__name__": "__main__", **names})


def test_the_loop_is_recorded(output: Output) -> None:
    run(EXAMPLES[0])
    assert {row.step for row in output.rows("grad_reduced")} == set(range(10))


def test_a_run_of_model_is_recorded(output: Output) -> None:
    net = TwoLayers()
    model = Model(net, nn.MSELoss(), nn.Adam(net.trainable_params()))
    run(EXAMPLES[1], model=model, epochs=1, dataset=GeneratorDataset([batch(0), batch(1)], ["x", "y"], shuffle=False))
    assert {row.step for row in output.rows("grad_reduced")} == {0, 1}
    assert len(EXAMPLES) == 2
