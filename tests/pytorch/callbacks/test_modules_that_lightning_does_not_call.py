"""On one device Lightning calls ``training_step`` and not the module. The callback tells where micro-batches begin."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import monitor

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

from monitor.pytorch.callbacks.lightning import MonitorCallback

BATCHES, TOGETHER = 6, 2
FIELDS: dict[str, Any] = {
    "targets": {"layers.0": {"output": "all", "output_grad": "all"}},
    "xy_distribution": True,
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "format": "parquet",
}


class Regression(LightningModule):
    def __init__(self, *, by_hand: bool, optimizers: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.automatic_optimization = not by_hand
        self.number = optimizers

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss: Tensor = self.layers(batch).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if (index + 1) % TOGETHER == 0:
                for one in self.optimizers() if self.number > 1 else [self.optimizers()]:
                    one.step()
                    one.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        parts = [self.layers[0], self.layers[2]] if self.number > 1 else [self]
        return [torch.optim.AdamW(part.parameters()) for part in parts]


def fitted(module: Regression, tmp_path: Path, callback: MonitorCallback, checkpoint: Path | None = None) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_epochs=1 if checkpoint is None else 2,
        accelerator="cpu",
        accumulate_grad_batches=TOGETHER if module.automatic_optimization else 1,
        callbacks=[callback],
        default_root_dir=tmp_path,
        **quiet,  # type: ignore[arg-type]
    )
    data = torch.utils.data.DataLoader(torch.randn(4 * BATCHES, 8), batch_size=4)
    trainer.fit(module, data, ckpt_path=None if checkpoint is None else str(checkpoint))
    return trainer


def places(base: Path, kind: str) -> set[tuple[int, int]]:
    table = monitor.open_run(base).rows(kind)
    return set(zip(table["step"].to_pylist(), table["micro_step"].to_pylist(), strict=True))


@pytest.mark.parametrize(("by_hand", "first"), [(False, 0), (True, 1)])
def test_each_batch_is_a_micro_batch(by_hand: bool, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    callback = MonitorCallback(None, **FIELDS)
    fitted(Regression(by_hand=by_hand), tmp_path, callback)
    steps = range(first, BATCHES // TOGETHER)
    for kind in ("actv", "actv_grad", "grad_unreduced"):
        assert places(tmp_path / "out", kind) == {(step, micro_step) for step in steps for micro_step in range(TOGETHER)}
    assert copy.deepcopy(callback).monitor is None
    assert pickle.loads(pickle.dumps(callback)).monitor is None


def test_after_a_checkpoint_steps_go_on_also_with_several_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    callback = MonitorCallback(None, wg_distribution=True, wg_reduced_only=True, format="parquet")
    trainer = fitted(Regression(by_hand=True, optimizers=2), tmp_path, callback)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    fitted(Regression(by_hand=True, optimizers=2), tmp_path, callback, tmp_path / "saved.ckpt")
    found = [
        pq.read_table(path, filters=[("kind", "=", "grad_reduced")])["step"].to_pylist()
        for path in (tmp_path / "out").glob("*-rank*/*.parquet")
    ]
    assert sorted({step for steps in found for step in steps}) == [1, 2, 4, 5]  # the first of each training is not recorded
