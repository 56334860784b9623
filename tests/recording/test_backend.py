"""The size of the adapter interface that a framework implements."""

from types import ModuleType
from typing import Final

import pytest

from monitor.recording import activations, backend, module_calls

MOST: Final = 8
"""Methods of a protocol. The framework of a model has nine, and says why."""


def methods(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if not name.startswith("_") and callable(value)]


@pytest.mark.parametrize("module", [activations, backend, module_calls])
def test_a_protocol_of_a_framework_has_at_most_eight_methods(module: ModuleType) -> None:
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    protocols = {one.__name__: one for one in own if getattr(one, "_is_protocol", False)}
    assert len(protocols) >= 2
    assert {name for name, one in protocols.items() if len(methods(one)) > MOST} <= {"Framework", "FrameworkAdapter"}
