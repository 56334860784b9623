"""The snippets of the reference's page on dumps of MindSpore, run as they stand but for import paths and the device.

The page has lost its indentation: what follows a ``for`` is in it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from test_migration_document import MOVED

REFERENCE = Path(os.environ.get("MONITOR_REFERENCE", Path(__file__).resolve().parents[3] / "shared" / "reference"))
PAGE = REFERENCE.joinpath("precision-dump-mindspore.en" + ".md")

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason=f"the documents are not in {REFERENCE}: set MONITOR_REFERENCE")

CODE = re.compile(r"^(import |from |#|debugger|model|trainer|for |grad_net|output|loss|ms\.|set_device|$)")


class Network(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Dense(3, 2)
        self.relu = nn.ReLU()

    def construct(self, x: Tensor) -> Tensor:
        return self.relu(self.fc(x))


def snippets() -> list[str]:
    """From one import of MindSpore to the next line that is no code."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else []
    found = []
    for start in (number for number, line in enumerate(lines) if line.startswith("import mindspore as ms")):
        code, inside = [], False
        for line in lines[start:]:
            if not CODE.match(line):
                break
            code.append(f"    {line}" if inside else line)
            inside = inside or line.startswith("for ")
        found.append("\n".join(code))
    return found


def ours(code: str) -> str:
    for theirs, moved in MOVED.items():
        (their_module, _, name), (our_module, _, _) = theirs.rpartition("."), moved.rpartition(".")
        code = re.sub(rf"from {re.escape(their_module)} import {name}\b", f"from {our_module} import {name}", code)
    # A device can be set once in a process, before anything runs.
    return re.sub(r"^set_device\(.*\)$", "", code.replace('"Ascend"', '"CPU"'), flags=re.MULTILINE)


class Loss:
    """Of a framework in front of MindSpore, whose tensors have ``backward``."""

    def backward(self) -> None:
        ms.grad(lambda x: self.model(x).sum())(self.given)

    def __init__(self, model: nn.Cell, given: Tensor) -> None:
        self.model, self.given = model, given


def namespace() -> dict[str, Any]:
    x, y = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
    model = Network()
    batches = ms.dataset.GeneratorDataset([(row, label) for row, label in zip(x, y, strict=True)], ["x", "y"]).batch(2)
    return {
        "Network": Network,
        "model": model,
        "data_loader": [(Tensor(x), Tensor(y))] * 2,
        "loss": Loss(model, Tensor(x)),
        "loss_fn": nn.MSELoss(),
        "optimizer": nn.SGD(model.trainable_params(), 0.01),
        "train_dataset": batches,
    }


def test_the_snippets_were_found() -> None:
    assert len(snippets()) >= 8


@pytest.mark.parametrize("code", [one for one in snippets() if "PYNATIVE" in one])
def test_those_of_the_dynamic_graph_dump(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    level = "L0" if "callbacks" in code and "L1" not in code else "L1"
    (tmp_path / "config.json").write_text(json.dumps({"level": level, "extra_info": True, "acc_check": {}}))
    code = code.replace("metrics={'accuracy'}", "metrics=None").replace("model = Network()", "pass")
    names = namespace()
    exec(compile(ours(code), "snippet", "exec"), names)
    names["debugger"].close()
    assert list(tmp_path.glob("dump_path/step0/*/dump.json"))


@pytest.mark.parametrize("code", [one for one in snippets() if "GRAPH_MODE" in one])
def test_those_of_the_static_graph_are_refused_with_the_reason(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"level": "L1"}))
    try:
        with pytest.raises(ValueError, match="GRAPH_MODE: dumps of that mode need an Ascend device"):
            exec(compile(ours(code), "snippet", "exec"), namespace())
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
