"""Operators in place of hooks, for code that MindSpore compiles: GRAPH_MODE and ``@jit``."""
