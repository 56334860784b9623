from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sink_rows import Measured, Rank

from monitor.sinks import csv as lines, csv as row_text
from monitor.sinks.csv import CsvLines, header
from monitor.stats.histograms import LOSSES
from monitor.stats.host.array_kernel import VARIABLE
from monitor.stats.partials import TensorLayout
from monitor.stats.table import StepRows


def text_of(rank: Rank, rows: StepRows) -> dict[str, str]:
    """The lines of each kind."""
    texts: dict[str, bytes] = {}
    for _, kind, text in CsvLines(rank.series, rank.context.ndigits).of([rows]):
        texts[kind] = texts.get(kind, b"") + bytes(text)
    return {kind: text.decode() for kind, text in texts.items()}


@pytest.fixture(params=["1", "0"], ids=["native", "arrow"], autouse=True)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether lines are made in C."""
    monkeypatch.setenv(VARIABLE, request.param)
    assert row_text.is_native() is (request.param == "1")


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_the_header_names_the_ops_in_the_order_asked_for(rank: Rank) -> None:
    rows = rank.step(0, {}, ops=("nans", "norm", "min"))
    assert header(rows, "grad_reduced") == b"vpp_stage,name,step,nans,norm,min\n"


def test_a_kind_with_micro_steps_has_the_column_even_when_no_row_needs_it(rank: Rank) -> None:
    rows = rank.step(4, {"actv": [Measured("l.output", [1.0], micro_step=2), Measured("l.input", [1.0])]}, ops=("max",))
    assert header(rows, "actv") == b"vpp_stage,name,step,micro_step,max\n"
    assert text_of(rank, rows) == {"actv": "0,l.output,4,2,1.000000\n0,l.input,4,,1.000000\n"}


def test_rows_stand_in_the_order_in_which_they_were_measured(rank: Rank) -> None:
    rank.step(0, {"grad_reduced": [Measured("a"), Measured("b")]})
    rows = rank.step(1, {"grad_reduced": [Measured("b"), Measured("c"), Measured("a")]}, ops=("nans",))
    assert text_of(rank, rows) == {"grad_reduced": "0,b,1,0\n0,c,1,0\n0,a,1,0\n"}


def test_every_op_of_one_tensor(rank: Rank) -> None:
    ops = ("min", "max", "mean", "norm", "zeros", "nans", "infs", "absmax", "std", "shape", "dtype")
    rows = rank.step(7, {"param_origin": [Measured("w", [0.0, -3.0, 4.0, 3.0], vpp_stage=1)]}, ops=ops)
    cells = '-3.000000,4.000000,1.000000,5.830952,0.250000,0,0,4.000000,2.738613,"[1, 4]",torch.float32'
    assert {"param_origin": f"1,w,7,{cells}\n"} == text_of(rank, rows)


def test_a_mean_of_nothing_is_empty_and_a_nan_is_written(rank: Rank) -> None:
    rows = rank.step(0, {"other": [Measured("none", []), Measured("bad", [1.0, float("nan")])]})
    assert text_of(rank, rows) == {"other": "0,none,0,,,,0,,0\n0,bad,0,nan,nan,nan,nan,0,1\n"}


def test_layout_ops_alone_make_a_row(rank: Rank) -> None:
    rows = rank.step(0, {"actv_grad": [Measured("x", [1.0], micro_step=0)]}, ops=("dtype", "shape"))
    assert text_of(rank, rows) == {"actv_grad": '0,x,0,0,torch.float32,"[1, 1]"\n'}


NAMES = ["a,b", 'say "x"', "two\nlines", "cr\r\nlf", "ünï·çødé層", "a:b/c", " padded ", "'", "", '"', "#1;\t|", "nan"]


def test_any_name_survives_a_round_trip(rank: Rank) -> None:
    """Peers' fault 10: names with separators shifted the columns."""
    rows = rank.step(3, {"actv": [Measured(name, [2.0], micro_step=0) for name in NAMES]}, ops=("max",))
    read = list(csv.reader(io.StringIO(text_of(rank, rows)["actv"], newline="")))
    assert [["0", name, "3", "0", "2.000000"] for name in NAMES] == read


def test_only_what_needs_quotes_has_them(rank: Rank) -> None:
    rows = rank.step(0, {"other": [Measured("plain"), Measured("a,b"), Measured("also plain")]}, ops=("nans",))
    assert text_of(rank, rows) == {"other": '0,plain,0,0\n0,"a,b",0,0\n0,also plain,0,0\n'}


def test_a_name_that_has_no_utf8_is_written_with_an_escape(rank: Rank) -> None:
    rows = rank.step(0, {"other": [Measured("half \ud800")]}, ops=("nans",))
    assert text_of(rank, rows) == {"other": "0,half \\ud800,0,0\n"}


def test_series_and_layouts_that_come_later_are_written_too(rank: Rank) -> None:
    spelled = CsvLines(rank.series, 6)
    list(spelled.of([rank.step(0, {"other": [Measured("a", [1.0])]}, ops=("shape",))]))
    rows = rank.step(1, {"other": [Measured("b", [1.0, 2.0]), Measured("a", [1.0])]}, ops=("shape",))
    assert list(spelled.of([rows])) == [(rows, "other", b'0,b,1,"[1, 2]"\n0,a,1,"[1, 1]"\n')]


def test_another_list_of_layouts_is_not_taken_for_the_one_before(rank: Rank) -> None:
    spelled = CsvLines(rank.series, 6)
    rows = rank.step(0, {"other": [Measured("a")]}, ops=("dtype",))
    list(spelled.of([rows]))
    other = StepRows(1, rows.ops, rows.kinds, [TensorLayout((), "torch.bfloat16")])
    assert list(spelled.of([other])) == [(other, "other", b"0,a,1,torch.bfloat16\n")]


def test_many_rows_are_written_in_blocks_and_none_is_lost(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind: [Measured(f"{kind}.{i}", [float(i + 1)]) for i in range(n)] for kind, n in (("exp_avg", 10), ("other", 3))}
    rows = rank.step(0, kinds, ops=("max", "nans"))
    whole = text_of(rank, rows)
    for block_rows in (1, 4, 7, 13):
        monkeypatch.setattr(lines, "BLOCK_ROWS", block_rows)
        assert whole == text_of(rank, rows)
    assert "".join(f"0,exp_avg.{i},0,{i + 1}.000000,0\n" for i in range(10)) == whole["exp_avg"]


def test_a_kind_without_rows_has_no_lines(rank: Rank) -> None:
    rows = rank.step(0, {"other": [Measured("a")]})
    empty = {
        "exp_avg": type(rows.kinds["other"])(*(np.empty(0, dtype=np.int64),) * 4, rows.kinds["other"].partials.take(slice(0)))
    }
    assert list(CsvLines(rank.series, 6).of([StepRows(0, rows.ops, empty, [])])) == []


def test_magnitudes_and_calls_are_written_where_there_are_any(rank: Rank) -> None:
    measured = [Measured("a", [1.0, 3.0, 0.0], magnitudes=True), Measured("b", [1.0])]
    rows = rank.step(0, {"param_origin": measured}, ops=("magnitude_histogram", "max", "shape"))
    (text,) = text_of(rank, rows).values()
    cells = list(csv.reader(io.StringIO(text)))
    assert [row[4:] for row in cells] == [["3.000000", "[1, 3]"], ["1.000000", "[1, 1]"]]
    assert [bool(row[3]) for row in cells] == [True, False]


def test_native_lines_are_those_of_arrow_character_by_character(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal((40, 5)) * 10.0 ** random.integers(-40, 40, (40, 1))).tolist()
    values[3][2], values[4][0], values[5] = math.nan, -math.inf, [0.0]
    ops = ("min", "max", "mean", "norm", "zeros", "nans", "infs", "absmax", "std", "shape", "dtype", "magnitude_histogram")
    kinds = {
        "actv": [Measured(f"l.{i}", value, micro_step=i % 3 - 1, magnitudes=i % 2 == 0) for i, value in enumerate(values)],
        "param_origin": [Measured(NAMES[i % len(NAMES)], value, vpp_stage=i % 2) for i, value in enumerate(values)],
    }
    texts = []
    for wanted in ("0", "1"):
        monkeypatch.setenv(VARIABLE, wanted)
        texts.append(text_of(rank, rank.step(7, kinds, ops=ops)))
    assert texts[0] == texts[1]
    assert len(texts[0]["actv"].splitlines()) == 40


@pytest.mark.parametrize("block_rows", [1, 5, 8192])
def test_lines_of_many_steps_are_those_of_each_alone(rank: Rank, monkeypatch: pytest.MonkeyPatch, block_rows: int) -> None:
    monkeypatch.setattr(lines, "BLOCK_ROWS", block_rows)
    kinds = {
        "actv": [Measured(f"l.{i}", [float(i), 1e-9], micro_step=i % 3 - 1) for i in range(7)],
        "grad_reduced": [Measured(name, [2.0, math.inf]) for name in NAMES],
    }
    some = {"grad_reduced": kinds["grad_reduced"][:2]}
    steps = [rank.step(9, kinds), rank.step(10, some), rank.step(11, {}), rank.step(12, kinds, ops=("shape", "nans"))]
    steps += [
        rank.step(13, kinds),
        StepRows(14, ("dtype",), rank.step(14, some).kinds, [TensorLayout((), "torch.bfloat16")] * 2),
    ]
    texts: dict[tuple[int, str], bytes] = {}
    for rows, kind, text in CsvLines(rank.series, 6).of(steps):
        texts[rows.step, kind] = texts.get((rows.step, kind), b"") + bytes(text)
    alone = {(rows.step, kind): text.encode() for rows in steps for kind, text in text_of(rank, rows).items()}
    assert texts == alone


def test_a_step_without_histograms_has_none_beside_one_that_has_them(rank: Rank) -> None:
    ops = ("magnitude_histogram", *LOSSES[:1], "nans")
    bare = rank.step(0, {"param_origin": [Measured("w", [math.nan, math.nan])]}, ops=ops)
    counted = rank.step(1, {"param_origin": [Measured("w", [1.0, 2.0], magnitudes=True)]}, ops=ops)
    together = {rows.step: bytes(text) for rows, _, text in CsvLines(rank.series, 6).of([bare, counted])}
    assert together == {rows.step: text_of(rank, rows)["param_origin"].encode() for rows in (bare, counted)}
    assert together[0] == b"0,w,0,,,2\n"


def test_high_micro_steps_of_few_rows_cost_no_cell_each(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_text, "TextCache", counted := Counted(row_text.TextCache))
    micro_steps = [0, 90_000, -1, 5]
    steps = [
        rank.step(
            n, {"actv": [Measured("l", [1.0], micro_step=i) for i in micro_steps], "other": [Measured("w")]}, ops=("nans",)
        )
        for n in range(3)
    ]
    spelled = CsvLines(rank.series, 6)
    text = b"".join(bytes(text) for _, _, text in spelled.of(steps)).decode()
    assert text == "".join(f"0,l,{n},0,0\n0,l,{n},90000,0\n0,l,{n},,0\n0,l,{n},5,0\n0,w,{n},0\n" for n in range(3))
    assert max(counted.lengths) <= 15


class Counted:
    """``TextCache``, and how many texts there were to make."""

    def __init__(self, cells: type) -> None:
        self._cells = cells
        self.lengths: list[int] = []

    def __call__(self, of: Sequence[object], spelled: Callable[[Any], str]) -> Any:
        self.lengths.append(len(of))
        return self._cells(of, spelled)
