"""The live table, what a seal takes from it, and what is present afterwards."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from hypothesis import given, strategies as st

from monitor.series import NO_MICRO_STEP, RUN_KIND, Series, SeriesTable
from monitor.stats.partials import COLUMNS, COUNT, SUM, WRITES
from monitor.stats.table import HostPage, LateNumber, Postscript, SealedTable, StatsTable


class Live:
    """A table with one page, written by hand."""

    def __init__(self, rows: int = 8) -> None:
        self.table = StatsTable(SeriesTable())
        self.memory = HostPage(rows)
        self.page = self.table.add_page(self.memory, rows)

    def slot(self, name: str, kind: str = "actv", micro_steps: tuple[int, ...] = (0, 1)) -> int:
        return self.table.allot(self.page, Series(kind, 0, name), micro_steps).row

    def write(self, row: int, total: float, count: int = 1) -> None:
        numbers = np.zeros(len(COLUMNS))
        numbers[[WRITES, COUNT, SUM]] = 1, count, total
        self.memory.numbers[row] = numbers
        self.table.note(row, self.table.layout_of((count,), "float32"))

    def sealed(self, **what: object) -> SealedTable:
        sealed = SealedTable()
        for name, value in what.items():
            setattr(sealed, name, value)
        self.table.seal(sealed)
        return sealed


def names(live: Live, sealed: SealedTable, kind: str = "actv") -> list[tuple[str, int, float]]:
    rows = sealed.rows().kinds[kind]
    series = [live.table.series[index].name for index in rows.series.tolist()]
    return list(zip(series, rows.micro_step.tolist(), rows.partials["sum"].tolist(), strict=True))


def test_rows_stand_in_the_order_in_which_they_were_measured() -> None:
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    live.write(b + 1, 4.0)
    live.write(a, 1.0)
    live.write(b, 2.0)
    sealed = live.sealed()
    assert names(live, sealed) == [("b", 1, 4.0), ("a", 0, 1.0), ("b", 0, 2.0)]
    assert sealed.rows().kinds["actv"].call_id.tolist() == [0, 1, 2]


def test_a_row_of_the_last_step_is_absent_from_the_next() -> None:
    """Peers, fault 1: a branch that did not run is written again with the values of an earlier step."""
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    live.write(a, 1.0)
    live.write(b, 2.0)
    live.sealed()
    live.write(a, 3.0)
    assert names(live, live.sealed()) == [("a", 0, 3.0)]


def test_an_empty_tensor_is_present() -> None:
    live = Live()
    live.write(live.slot("a"), 0.0, count=0)
    assert names(live, live.sealed()) == [("a", 0, 0.0)]


def test_an_alias_has_the_numbers_of_its_source() -> None:
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    live.write(a, 5.0)
    live.table.note(b, 0, alias=a)
    assert names(live, live.sealed()) == [("a", 0, 5.0), ("b", 0, 5.0)]


def test_an_alias_whose_source_was_written_again_is_absent() -> None:
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    live.write(a, 5.0)
    live.table.note(b, 0, alias=a)
    live.write(a, 6.0)
    assert names(live, live.sealed()) == [("a", 0, 6.0)]


def test_a_row_that_was_an_alias_is_its_own_once_it_is_written() -> None:
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    live.write(a, 5.0)
    live.table.note(b, 0, alias=a)
    live.write(b, 7.0)
    assert names(live, live.sealed()) == [("a", 0, 5.0), ("b", 0, 7.0)]


def test_an_alias_of_an_earlier_step_means_nothing_in_the_next() -> None:
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    live.write(a, 5.0)
    live.table.note(b, 0, alias=a)
    live.sealed()
    live.write(a, 6.0)
    assert names(live, live.sealed()) == [("a", 0, 6.0)]


def test_a_sealed_copy_keeps_its_step_while_the_table_continues_and_grows() -> None:
    live = Live()
    a = live.slot("a")
    live.write(a, 1.0)
    first = live.sealed(step=3)
    second_page = live.table.add_page(HostPage(4), 4)
    live.table.allot(second_page, Series("actv", 0, "late"), (0,))
    live.write(a, 2.0)
    assert (first.rows().step, names(live, first)) == (3, [("a", 0, 1.0)])


def test_a_sealed_copy_is_reused_after_the_table_has_grown() -> None:
    live = Live(rows=2)
    live.write(live.slot("a"), 1.0)
    sealed = live.sealed()
    before = sealed.nbytes
    memory = HostPage(4)
    late = live.table.allot(live.table.add_page(memory, 4), Series("grad_reduced", 0, "w"), (NO_MICRO_STEP,))
    memory.numbers[late.local_row, WRITES] = 1
    live.table.note(late.row, 0)
    live.table.seal(sealed)
    assert sealed.nbytes > before
    assert names(live, sealed, "grad_reduced") == [("w", NO_MICRO_STEP, 0.0)]


def test_combined_micro_steps_are_one_row_where_the_first_stood() -> None:
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    live.write(b + 1, 10.0, count=3)
    live.write(a, 1.0)
    live.write(b, 2.0)
    live.write(a + 1, 5.0)
    rows = live.sealed(combined_kinds=frozenset({"actv"})).rows().kinds["actv"]
    assert [live.table.series[i].name for i in rows.series.tolist()] == ["a", "b"]
    assert rows.partials["sum"].tolist() == [6.0, 12.0]
    assert rows.partials["count"].tolist() == [2.0, 4.0]
    assert rows.micro_step.tolist() == [NO_MICRO_STEP, NO_MICRO_STEP]


def test_combined_micro_steps_stand_in_the_order_of_calls_and_not_of_series() -> None:
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    for row in (b, a, b + 1, a + 1):
        live.write(row, 1.0)
    rows = live.sealed(combined_kinds=frozenset({"actv"})).rows().kinds["actv"]
    assert [live.table.series[i].name for i in rows.series.tolist()] == ["b", "a"]
    assert rows.call_id.tolist() == [0, 1]


def test_rows_are_parted_by_kind() -> None:
    live = Live()
    live.write(live.slot("x"), 1.0)
    live.write(live.slot("w", "grad_reduced", (NO_MICRO_STEP,)), 2.0)
    kinds = live.sealed().rows().kinds
    assert {kind: rows.partials["sum"].tolist() for kind, rows in kinds.items()} == {"actv": [1.0], "grad_reduced": [2.0]}


def test_the_step_in_progress_can_be_looked_at_without_ending_it() -> None:
    live = Live()
    a = live.slot("a")
    live.write(a, 1.0)
    assert live.table.kinds_now()["actv"].partials["sum"].tolist() == [1.0]
    assert names(live, live.sealed()) == [("a", 0, 1.0)]


def test_a_step_that_is_released_leaves_nothing_to_the_next() -> None:
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    live.write(a, 1.0)
    live.table.discard()
    live.write(b, 2.0)
    assert names(live, live.sealed()) == [("b", 0, 2.0)]


def test_layouts_are_numbered_once() -> None:
    table = StatsTable(SeriesTable())
    assert [table.layout_of((2, 3), "f"), table.layout_of((3,), "f"), table.layout_of((2, 3), "f")] == [0, 1, 0]
    assert table.layouts[1].shape == (3,)


STEPS = st.lists(st.one_of(st.lists(st.integers(0, 7), max_size=12), st.sampled_from([[0, 4, 1], [4, 0, 1]])), max_size=8)
"""The rows that are written in each step, in this order; some steps repeat others."""


@given(STEPS)
def test_whatever_the_step_before_was_rows_stand_as_if_there_had_been_none(steps: list[list[int]]) -> None:
    live = Live()
    for name in range(8):
        live.slot(str(name), "actv" if name % 3 else "grad_reduced", (0,))
    for number, written in enumerate(steps):
        for row in written:
            live.write(row, 10.0 * number + row)
        found = live.sealed(step=number).rows().kinds
        last = list(dict.fromkeys(reversed(written)))[::-1]  # a row that is written again stands where it was written last
        expected = {
            kind: [(str(row), 0, 10.0 * number + row) for row in last if (row % 3 == 0) is (kind == "grad_reduced")]
            for kind in ("actv", "grad_reduced")
        }
        sums = {
            kind: [
                (live.table.series[index].name, micro_step, total)
                for index, micro_step, total in zip(
                    rows.series.tolist(), rows.micro_step.tolist(), rows.partials["sum"].tolist(), strict=True
                )
            ]
            for kind, rows in found.items()
        }
        assert sums == {kind: rows for kind, rows in expected.items() if rows}
        places = sorted(place for rows in found.values() for place in rows.call_id.tolist())
        assert places == list(range(len(last)))


def test_steps_that_repeat_each_other_share_how_their_rows_stand() -> None:
    live = Live()
    a, b = live.slot("a"), live.slot("b")
    kept = []
    for order in ((a, b), (a, b), (b, a)):
        for row in order:
            live.write(row, 1.0)
        kept.append(live.sealed().rows().kinds["actv"].series)
    assert kept[0].base is kept[1].base
    assert kept[0].tolist() != kept[2].tolist()
    assert not kept[0].flags.writeable


# --- Numbers that come after a step.


def test_a_number_that_was_accepted_after_the_step_is_in_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the writer stops waiting. Training learns of a number that came too late."""
    monkeypatch.setattr("monitor.stats.table.MOST_WAITED", 1e-4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    accepted = []
    try:
        for _ in range(300):
            postscript, last = Postscript({}), [0]

            def log(postscript: Postscript = postscript, last: list[int] = last) -> None:
                while postscript.add(LateNumber(3, 0, float(last[0] + 1), 1)):
                    last[0] += 1

            training = threading.Thread(target=log)
            training.start()
            kinds = postscript.added_to({})
            training.join()
            accepted.append(last[0])
            if last[0]:
                (total,) = kinds[RUN_KIND].partials.columns[SUM]
                assert total >= last[0]
    finally:
        sys.setswitchinterval(interval)
    assert max(accepted) > 0


def test_the_last_number_of_a_series_replaces_earlier_rows_and_the_others_stay() -> None:
    before, after = Postscript({}), Postscript({})
    for series, total in ((1, 5.0), (2, 6.0)):
        before.add(LateNumber(series, 0, total, 1))
    after.add(LateNumber(2, 0, 7.0, 1))
    after.add(LateNumber(2, 0, 8.0, 2))
    before.end()
    after.end()
    rows = after.added_to(before.added_to({}))[RUN_KIND]
    assert rows.series.tolist() == [1, 2]
    assert rows.partials.columns[SUM].tolist() == [5.0, 8.0]
    assert rows.partials.columns[COUNT].tolist() == [1.0, 2.0]
    assert not after.add(LateNumber(2, 0, 9.0, 1))
