"""Is asked for HDF5 while it trains, and ends by itself some steps later."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from small_run import SmallRun

os.environ["DYNAMIC_MONITOR"] = "True"
run = SmallRun()
assert "h5py" not in sys.modules
run.train_to(3)
path = Path(os.environ["MONITOR_CONFIG"])
path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "hdf5"}))
recording = run.monitor._recordings[0]
recording.switching._control._watching.turn()
run.train_to(6)
until = time.monotonic() + 30
while "h5py" not in sys.modules and time.monotonic() < until:
    time.sleep(0.01)
