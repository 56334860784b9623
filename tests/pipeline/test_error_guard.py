import errno
import threading

import pytest

from monitor.failures import Failures
from monitor.pipeline.delivery import ErrorGuard


def raise_(error: BaseException):
    raise error


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "Permission is missing"),
        (errno.EROFS, "read-only"),
        (errno.ENOENT, "directory may have been removed"),
    ],
)
def test_an_error_of_the_file_system_is_reported_with_what_to_do(caplog, code, advice):
    sink = ErrorGuard("sink 'csv'", [], Failures())
    sink.use(lambda _: raise_(OSError(code, "no")))
    [record] = caplog.records
    assert advice in record.getMessage()
    assert "sink 'csv'" in record.getMessage()


def test_a_panic_that_is_no_exception_does_not_get_out():
    class Panic(BaseException): ...

    panic = Panic()
    assert ErrorGuard("x", [], Failures()).use(lambda _: raise_(panic)) is panic


def test_after_the_last_use_nothing_is_called_any_more():
    used: list[int] = []
    guarded = ErrorGuard("x", used, Failures())
    assert guarded.use(lambda inner: inner.append(1), last=True) is None
    assert isinstance(guarded.use(lambda inner: inner.append(2)), ValueError)
    assert guarded.use(lambda inner: inner.append(3), last=True) is None
    assert used == [1]


def test_one_that_is_stuck_is_passed_over_by_those_who_do_not_wait():
    guarded = ErrorGuard("x", threading.Event(), Failures())
    stuck = threading.Event()
    thread = threading.Thread(target=lambda: guarded.use(lambda inner: stuck.set() or inner.wait()))
    thread.start()
    stuck.wait()
    assert guarded.busy
    assert isinstance(guarded.use(lambda inner: inner.set(), wait=False), TimeoutError)
    guarded.inner.set()
    thread.join()
    assert guarded.use(lambda inner: inner.set(), wait=False) is None
