from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from watching import Output
from ways import WAYS, use

BOTH_WAYS = frozenset({
    "test_activation_gradients", "test_activations", "test_calls_on_threads", "test_checkpointing", "test_leaves",
    "test_micro_steps", "test_same_bits", "test_shared_inputs", "test_tensor_reader_aliases", "test_tensor_reader_freed",
})  # fmt: skip
"""The files whose tests run with the code in C, and with that in Python alone."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in BOTH_WAYS:
        metafunc.parametrize("way", WAYS, indirect=True)


@pytest.fixture(autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of the test, if it has one (``ways``)."""
    if hasattr(request, "param"):
        use(request.param, monkeypatch)


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device of ``--device``. What is computed there depends on nothing but what goes in, if torch can tell it so."""
    if (name := request.config.getoption("--device")) is None:
        yield
        return
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.device(name):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """Nothing is compiled yet: torch no longer compiles a function that earlier tests have had compiled eight times."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Output:
    """A base directory that this test's monitors write to."""
    base = tmp_path / "out"
    base.mkdir()
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(base))
    return Output(base)
