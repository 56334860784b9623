from __future__ import annotations

import sys
from pathlib import Path

import pytest

from monitor.stats.mindspore import tensors

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Computed as on the host, and as on a device: in MindSpore's operations, which run on the host as well."""
    monkeypatch.setattr(tensors, "on_the_host", lambda: request.param == "host")
    return request.param
