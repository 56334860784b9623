from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._inductor.config
from torch._inductor import codecache

QUICK = {"compile_threads": 1, "cpp.vec_isa_ok": False, "aot_inductor.debug_compile": True}


@pytest.fixture
def one_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor without a pool of processes that would outlive the test. For speed it does not optimize, and compiles torch's
    headers once for all tests.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    headers = Path(os.environ["TORCH_EXTENSIONS_DIR"], "headers")  # inductor's own place would be left behind
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(headers))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(headers / "locks"))
    with torch._inductor.config.patch(QUICK):
        yield
