from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sink_rows import Rank


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path / "run")


@pytest.fixture
def out(rank: Rank) -> Path:
    return rank.context.directory


@pytest.fixture
def file_size_limit() -> Iterator:
    """Sets the size that no file may exceed: a write across it comes half through, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def ordinary_user():
    """A directory of a user whom permissions hold back, who runs the test even if root started it."""
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() != 0:
            yield Path(directory)
            return
        os.chown(directory, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(directory)
        finally:
            os.seteuid(0)
