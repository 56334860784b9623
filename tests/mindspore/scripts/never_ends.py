"""A rank that hangs, but for the last one, which fails; ``never_ends.py all`` is one of which all hang, the scheduler too."""

from __future__ import annotations

import os
import sys
import time

if "all" not in sys.argv:
    if os.environ["MS_ROLE"] == "MS_SCHED":
        sys.exit(0)
    if os.environ["RANK_ID"] == "1":
        print("fails", flush=True)
        sys.exit(3)
time.sleep(600)
