"""How many files of ``monitor`` a row passes on its way: ``python tools/trips.py``.

One process trains a small model with gradients as CSV and counts the files whose functions run in one step, by thread. Another
merges what it recorded and counts the files of the merge.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGE = str(ROOT / "monitor") + os.sep
CONFIG = '{"wg_distribution": true, "format": "csv", "ops": ["min", "max", "mean", "norm"]}'


@contextmanager
def counted(files: dict[str, list[str]]) -> Iterator[None]:
    """Note in ``files`` in which files functions are called, by thread: of this one, and of those that begin meanwhile."""

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            seen = files.setdefault(threading.current_thread().name, [])
            if (short := name.removeprefix(PACKAGE)) not in seen:
                seen.append(short)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def train(base: Path) -> None:
    """Print the files of the third of four steps; of the writer those of all steps."""
    import torch
    from torch import nn

    from monitor.pytorch import TrainerMon

    (base / "monitor.json").write_text(CONFIG)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    files: dict[str, list[str]] = {}
    with counted(files):
        TrainerMon(str(base / "monitor.json"), params_have_main_grad=False).set_monitor(model, 1, optimizer)
        for step in range(4):
            if step == 2:
                del files["MainThread"]
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                third = list(files["MainThread"])
    time.sleep(1)  # the writer gathers the steps of a tenth of a second
    show(files | {"MainThread": third})


def merge(base: Path) -> None:
    """Print the files of a merge."""
    from monitor.merge.cli import app

    files: dict[str, list[str]] = {}
    with counted(files):
        app([str(base / "out")], standalone_mode=False)
    show({"merge": sorted({name for names in files.values() for name in names})})


def show(files: dict[str, list[str]]) -> None:
    for thread, names in files.items():
        print(f"{thread}: {len(names)} files\n    {' '.join(names)}")


def main() -> None:
    if len(sys.argv) == 3:
        {"train": train, "merge": merge}[sys.argv[1]](Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as base:
        environment = os.environ | {"MONITOR_OUTPUT_DIR": f"{base}/out"}
        for part in ("train", "merge"):
            subprocess.run([sys.executable, __file__, part, base], env=environment, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
