"""Train many steps of a tiny model with everything on, and watch the memory: ``soak.py [--steps 50000]``.

Prints the resident memory every thousand steps, and ends with 1 if it grew by more than 5 MB after the first tenth.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch
from cases import EVERYTHING
from torch import nn

ALLOWED: Final = 5_000_000
FORMATS: Final = ["csv", "hdf5", "parquet", "tensorboard"]
POINTS: Final = 50
BETWEEN: Final = 20
"""Steps after which the writer catches up. If it lags, the queue grows up to ``queue_bytes`` and keeps its memory. That depends
on what else the machine does, and would hide a leak.
"""


def main() -> int:
    options = parse_arguments()
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        curve = soaked(base, options.steps)
    finally:
        shutil.rmtree(base)
    settled, *later = curve[len(curve) // 10 :]
    grown = max(later) - settled
    print(f"after a tenth of the steps {settled / 1e6:.1f} MB, later up to {grown / 1e6:.1f} MB more")
    return int(grown > ALLOWED)


def soaked(base: Path, steps: int) -> list[int]:
    """Resident bytes, ``POINTS`` times. The recorded files are removed on the way: the disk is not the subject."""
    from monitor.pytorch import TrainerMon

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    config = {**EVERYTHING, "format": FORMATS, "step_count_per_record": 100, "update_ratio": True, "mg_direction": True}
    config["alert"] = {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 1e9}}, {"rule_name": "AnomalyNan"}]}
    (base / "config.json").write_text(json.dumps(config))
    os.environ["MONITOR_OUTPUT_DIR"] = str(base / "out")
    curve: list[int] = []
    with TrainerMon(base / "config.json", params_have_main_grad=False) as monitor:
        monitor.set_monitor(model, 1, optimizer)
        for step in range(steps):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % BETWEEN == 0:
                monitor.flush(60.0)
            if (step + 1) % max(1, steps // POINTS) == 0:
                monitor.flush(60.0)
                for path in base.glob("out/*/[!.]*_*-*.*"):
                    path.unlink(missing_ok=True)
                gc.collect()
                curve.append(resident())
                print(f"step {step + 1:6d}: {curve[-1] / 1e6:.1f} MB", flush=True)
    return curve


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50_000, help="steps to train (50,000)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
