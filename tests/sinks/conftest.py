from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def file_size_limit() -> Iterator:
    """Sets the size that no file may exceed: a write across it comes half through, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
