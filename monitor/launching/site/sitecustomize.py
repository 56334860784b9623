"""Found by every interpreter that ``trainermon run`` has started, and by those that these start."""

import os
import sys
from importlib import machinery, util

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_one_behind() -> None:
    """An environment may have a ``sitecustomize`` of its own, which this one hides."""
    spec = machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != _HERE])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(util.module_from_spec(spec))


_run_the_one_behind()
try:
    from monitor.launching.imports import begin

    begin()
except Exception as error:
    print(f"[monitor] WARNING trainermon run: nothing is monitored in this process: {error!r}", file=sys.stderr)
