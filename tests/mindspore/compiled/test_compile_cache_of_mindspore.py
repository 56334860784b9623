"""Compiled code of an observed model is neither read from MindSpore's compile cache nor written to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mindspore as ms
import pytest
from attaching import Output, warnings_in
from compiled_steps import Deep, plain, recorded
from mindspore.graph import api


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "cache"
    place.mkdir()
    monkeypatch.setattr(api, "entry_script_path", __file__)  # MindSpore reads the program, and a worker of tests has no file
    ms.set_context(enable_compile_cache=True, compile_cache_path=str(place))
    yield place
    ms.set_context(enable_compile_cache=False)


def test_an_observed_model_has_its_rows_and_leaves_no_code_in_the_cache(
    cache: Path, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    bits, rows = recorded("graph", Deep, output)
    assert {kind for kind, *_ in rows} >= {"actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_updated", "exp_avg"}
    assert list(cache.rglob("*.mindir")) == []
    assert ms.get_context("enable_compile_cache") is True
    (said,) = warnings_in(caplog)
    assert "compile cache is not used" in said
    assert plain("graph", Deep) == bits
    assert list(cache.rglob("*.mindir")) != []
