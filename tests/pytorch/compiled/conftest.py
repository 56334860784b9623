from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._inductor.config

QUICK = {
    "compile_threads": 1,
    "cpp.vec_isa_ok": False,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.debug_compile": True,
}


@pytest.fixture
def one_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor without a pool of processes that would outlive the test, and without optimization, for speed."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with torch._inductor.config.patch(QUICK):
        yield
