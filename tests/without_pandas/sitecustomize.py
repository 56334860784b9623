"""Hides pandas from an interpreter that begins with this folder on its path.

Arrow imports pandas, where it is installed, with the first column of a process: 0.3 s for each of the hundreds of
processes that tests start. The tests themselves have it. So has a process that imports datasets, which needs it.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class WithoutPandas(PathFinder):
    """Finds all other modules."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        hidden = fullname == "pandas" and "datasets" not in sys.modules
        return None if hidden else super().find_spec(fullname, path, target)


sys.meta_path = [WithoutPandas if finder is PathFinder else finder for finder in sys.meta_path]
