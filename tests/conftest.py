"""What every test may rely on, and which tests run in which process.

Tests of MindSpore run alone (``--mindspore``). A process that has used it cannot be forked any more: a child that uses it
hangs, and one that does not crashes when it exits.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from subprocess import SubprocessError
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import torch
    from launching import Nursery, Requests

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell that runs the tests in the background starts them with SIGINT ignored, and every process that they start, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may fail because the machine is slow.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

TESTS = Path(__file__).parent
NEWEST_PYTHON_OF_MINDSPORE = (3, 12)
REQUESTS: pytest.StashKey[Requests] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mindspore", action="store_true", help="run the tests of MindSpore, and only those")
    parser.addoption("--device", help="make the tensors of tests/pytorch there, as far as a test does not name a place (cuda)")


def pytest_sessionstart(session: pytest.Session) -> None:
    missing = session.config.getoption("--mindspore") and find_spec("mindspore") is None
    if missing and sys.version_info[:2] > NEWEST_PYTHON_OF_MINDSPORE:
        pytest.exit("MindSpore is not there for this version of Python", returncode=0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.is_file():
        # What such a directory's conftest.py imports has no place in a process of torch's tests.
        of_others = collection_path.name == "mindspore" and not config.getoption("--mindspore")
        return True if of_others else None
    of_mindspore = "mindspore" in str(collection_path.relative_to(TESTS))
    return True if of_mindspore != config.getoption("--mindspore") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files first that start processes, then those with few tests. They take long, so they must not begin last.

    Ranks of MindSpore mostly wait: their files are spread, so that not all workers wait at the same time.
    """
    tests_in = Counter(item.path for item in items)
    with_processes = {item.path for item in items if "nursery" in getattr(item, "fixturenames", ())}
    starting = {"run_ranks", "ended_job"}
    with_ranks = {item.path for item in items if starting & vars(getattr(item, "module", item)).keys()}
    files = sorted(tests_in, key=lambda path: (path not in with_processes, tests_in[path]))
    others = [path for path in files if path not in with_ranks]
    waiting = [path for path in files if path in with_ranks]
    place = {path: 2 * number for number, path in enumerate(others)}
    place |= {path: 6 * number - 1 for number, path in enumerate(waiting)}
    items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what a child wrote that failed a test. An error of ``subprocess`` has it and does not say it."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, SubprocessError):
        for stream in ("stdout", "stderr"):
            if written := getattr(call.excinfo.value, stream, None):
                text = written if isinstance(written, str) else written.decode(errors="replace")
                report.sections.append((f"{stream} of the child", text))
    return report


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    """The processes that fork scripts for the tests of all folders; see ``processes/launching.py``."""
    return launching().Nursery.of_all_tests()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The current accelerator. Without one the test is left out."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        pytest.skip("there is no accelerator")
    return torch.device(found.type, torch.accelerator.current_device_index())


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    launching()  # tests of other folders import it
    if is_worker or not config.getoption("numprocesses", None):  # a process that runs tests
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(TESTS / "without_pandas"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    if not is_worker:  # the process that starts the workers, or the only one
        config.stash[REQUESTS] = requests = launching().Requests()
        os.environ[launching().NURSERY] = str(requests.directory)
        # A build that was killed leaves a lock that no later one may take.
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(requests.directory / "extensions"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if (requests := config.stash.get(REQUESTS, None)) is not None:
        requests.close()


def launching() -> ModuleType:
    if (folder := str(TESTS / "processes")) not in sys.path:
        sys.path.append(folder)
    return import_module("launching")
