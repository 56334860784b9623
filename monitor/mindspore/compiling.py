"""Whether MindSpore compiles what is called, wherever a version keeps the answer."""

from __future__ import annotations

from typing import Any

__all__ = ["jit_context"]

try:
    from mindspore.graph.jit_context import jit_context
except ImportError:  # before 2.9
    try:
        from mindspore.common.jit_context import jit_context
    except ImportError:  # where nothing is traced

        def jit_context() -> Any:
            """None: nothing is being traced."""
            return None
