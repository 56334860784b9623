"""MindSpore as its tests use it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")  # before it is imported: it says much on standard error
sys.path.insert(0, str(Path(__file__).parent))

from reading_back import Output


@pytest.fixture(autouse=True)
def _recording_is_off() -> Iterator[None]:
    """Fail a test that leaves MindSpore recording operations for a backward: otherwise later tests fail instead of it.

    Example: a parameter cannot be changed in place while MindSpore records.
    """
    from mindspore.common.api import _pynative_executor

    yield
    if _pynative_executor.grad_flag():
        _pynative_executor.clear_res()
        pytest.fail("MindSpore still records operations for a backward. If a forward fails, use the fixture recording_ends.")


@pytest.fixture
def recording_ends() -> Iterator[None]:
    """Stop the recording after a forward that fails. MindSpore itself leaves it on, in the whole process."""
    from mindspore.common.api import _pynative_executor

    yield
    _pynative_executor.clear_res()


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Output:
    """A base directory that this test's monitors write to."""
    base = tmp_path / "out"
    base.mkdir()
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(base))
    return Output(base)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of a module's job write."""
    return tmp_path_factory.mktemp("base")
