"""Pages of which a device of MindSpore holds what their rows are made of."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from mindspore import Tensor, mint
from reference import assert_agrees, normal

from monitor.failures import EarlierFailure
from monitor.series import NO_MICRO_STEP, Series, SeriesTable
from monitor.stats.mindspore.kernels import MindSporeDeviceKernel, combined
from monitor.stats.mindspore.tensors import MindSporeDevicePage
from monitor.stats.partials import COLUMNS, WRITES
from monitor.stats.table import SealedTable, StatsTable

EPS = 1e-8


def write(page: MindSporeDevicePage, row: int, x: np.ndarray) -> None:
    page.write(row, MindSporeDeviceKernel(EPS, piece=100).reduce(Tensor(x)), combined)


def test_a_sealed_copy_has_the_rows_of_tensors_of_any_size_and_precision() -> None:
    page = MindSporeDevicePage(6)
    tensors = {0: normal(5), 3: normal(7, 70), 4: normal(30).astype(np.float64), 5: np.arange(250)}
    for row, x in tensors.items():
        write(page, row, x)
    copy = page.new_copy()
    copy.take(6)
    rows = copy.rows()
    for row, x in tensors.items():
        assert_agrees(rows[row], x, EPS)
    assert not rows[[1, 2]].any()
    assert copy.nbytes > 0


def test_a_seal_leaves_the_page_empty_and_the_copy_alone() -> None:
    page = MindSporeDevicePage(2)
    copy = page.new_copy()
    write(page, 0, normal(5))
    copy.take(2)
    write(page, 1, normal(5, seed=1))
    assert copy.rows()[:, WRITES].tolist() == [1, 0]
    assert page.rows_now()[:, WRITES].tolist() == [0, 1]
    copy.take(2)
    assert copy.rows()[:, WRITES].tolist() == [0, 1]


def test_a_row_written_again_is_the_later_one_and_a_row_forgotten_is_none() -> None:
    page = MindSporeDevicePage(2)
    write(page, 0, normal(5))
    write(page, 0, normal(9, seed=2))
    write(page, 1, normal(5))
    page.forget(1)
    rows = page.rows_now()
    assert_agrees(rows[0], normal(9, seed=2), EPS)
    assert not rows[1].any()


def test_sealing_waits_for_nothing_and_reading_raises_what_went_wrong_in_training() -> None:
    page = MindSporeDevicePage(1)
    write(page, 0, normal(5))
    copy = page.new_copy()
    mint.mul(Tensor(normal(3)), 2.0).asnumpy()
    mint.zeros_like(Tensor(normal(3)))  # has no kernel on CPU
    copy.take(1)
    with pytest.raises(EarlierFailure):
        copy.rows()
    for _ in range(3):  # the error may reach more waits, which must not be those of another test
        with suppress(RuntimeError):
            mint.mul(Tensor(normal(3)), 2.0).asnumpy()


def test_the_table_seals_such_pages_as_any_other() -> None:
    table = StatsTable(SeriesTable())
    page = table.add_page(MindSporeDevicePage(4), 4)
    slot = table.allot(page, Series("param_origin", 0, "weight"), (NO_MICRO_STEP,))
    write(page.memory, slot.local_row, normal(12))
    table.note(slot.row, table.layout_of((12,), "Float32"))
    sealed = SealedTable()
    table.seal(sealed)
    rows = sealed.rows().kinds["param_origin"]
    assert len(rows) == 1
    assert_agrees(rows.partials.columns[:, 0], normal(12), EPS)
    assert len(COLUMNS) == rows.partials.columns.shape[0]
