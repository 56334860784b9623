"""What is kept of a window that is done, and when it need not be done again."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import astuple, fields
from pathlib import Path

import pytest
from recorded_job import FORMATS, RecordedRank
from sink_rows import Measured

from monitor.merge.bits import BitDifference
from monitor.merge.combine import Disagreement, Outcome
from monitor.merge.discovery import SetAside, choose, discover
from monitor.merge.finished import FinishedWindow
from monitor.merge.merge import Wanted, Window, crew_of, planned_merge
from monitor.sinks.files import StepSpan

NAN_BESIDE_A_NUMBER = Disagreement("actv", "w", 3, 0, 1, 0, "norm", math.nan, math.inf)

FULL = Outcome(
    rows=7,
    tensors=3,
    steps=[1, 2, 5],
    gaps={0: [1], 12: [2, 5]},
    duplicates={3: [5]},
    newest={"Dec03_21-34-40-rank0-aa": 5},
    set_aside=[SetAside("a/b.h5", "it is\n“torn”")],
    disagreements=[NAN_BESIDE_A_NUMBER],
    incomplete={"w": [1, 2]},
    without_global={("w", "each rank has a term"): [5]},
    missing=Counter({("kurtosis", "not recorded"): 4}),
    unplaced=Counter({1: 2}),
    not_compared=Counter({0: 1}),
    bits_compared=Counter({1: 3, 2: 3}),
    bits_differing=Counter({2: 1}),
    bit_differences=[BitDifference(2, 0, "w", 3, 0, (1,), 2)],
)


def test_every_field_of_an_outcome_comes_back_as_it_was() -> None:
    assert all(getattr(FULL, field.name) for field in fields(Outcome))
    window = FinishedWindow("actv", StepSpan(1, 9), "f" * 64, ("per_rank/actv_1-9.csv",), (FULL, Outcome()))
    text = window.to_json()
    json.loads(text)
    again = FinishedWindow.from_json(text)
    first, empty = again.outcomes
    assert (again.kind, again.steps, again.fingerprint, again.files) == ("actv", StepSpan(1, 9), "f" * 64, window.files)
    assert empty == Outcome()
    for field in fields(Outcome):
        kept, was = getattr(first, field.name), getattr(FULL, field.name)
        assert type(kept) is type(was)
        if field.name != "disagreements":
            assert kept == was
    assert repr(astuple(first.disagreements[0])) == repr(astuple(NAN_BESIDE_A_NUMBER))
    assert again.to_json() == text


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '["actv", 0'])
def test_a_record_that_is_damaged_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        FinishedWindow.from_json(text)


def fingerprints(base: Path, **wanted: object) -> dict[tuple[str, StepSpan], str]:
    found, draft = discover(base), base / "draft"
    draft.mkdir()
    asked = Wanted(base, base / "merged", **{"rows": 20, **wanted})  # type: ignore[arg-type]
    with crew_of(asked) as crew:
        work = planned_merge(asked, found, choose(found, None), draft, crew)
        prints = {(one.kind, one.steps): work.plan.fingerprint(one) for one in work.windows}
    for path in (*draft.glob("work/*/*"), *draft.glob("work/*")):
        path.rmdir() if path.is_dir() else path.unlink()
    for name in ("work", "per_rank", "global", ""):
        (draft / name).rmdir()
    return prints


@pytest.fixture(params=FORMATS)
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> RecordedRank:
    """Which has written two windows, and has not ended."""
    return write(RecordedRank(tmp_path, format=request.param), range(10))


def write(rank: RecordedRank, steps: range, *more: str, value: float = 1.0) -> RecordedRank:
    for step in steps:
        rank.write(step, {"actv": [Measured(name, [value], micro_step=micro) for name in ("w", *more) for micro in (0, 1, 2)]})
    rank.flush()
    rank.manifest.save()
    return rank


FIRST, SECOND = ("actv", StepSpan(0, 4)), ("actv", StepSpan(5, 9))


def test_it_is_the_same_each_time(rank: RecordedRank) -> None:
    base = rank.directory.parent
    assert fingerprints(base) == fingerprints(base)
    assert set(fingerprints(base)) == {FIRST, SECOND}
    assert len(set(fingerprints(base).values())) == 2


def test_a_later_record_changes_nothing_of_the_windows_before(rank: RecordedRank) -> None:
    base = rank.directory.parent
    before = fingerprints(base)
    write(rank, range(10, 15))
    after = fingerprints(base)
    assert len(after) == 3
    assert {key: after[key] for key in before} == before


def test_a_shard_that_was_written_again_changes_the_window_that_has_it_alone(rank: RecordedRank) -> None:
    base = rank.directory.parent
    before = fingerprints(base)
    write(rank, range(5, 10), value=2.0)
    after = fingerprints(base)
    assert after[FIRST] == before[FIRST]
    assert after[SECOND] != before[SECOND]


def test_a_shard_that_is_gone_or_came_beside_another_changes_it(rank: RecordedRank) -> None:
    base = rank.directory.parent
    before = fingerprints(base)
    (shard,) = [path for path in rank.directory.iterdir() if "_0-4" in path.name]
    copy = shard.with_name(shard.name.replace("_0-4", "_0-4.2"))
    copy.write_bytes(shard.read_bytes())
    beside = fingerprints(base)
    shard.unlink()
    assert len({one.get(FIRST) for one in (before, beside, fingerprints(base))}) == 3


def test_a_tensor_that_is_new_changes_all_windows_of_its_kind(rank: RecordedRank) -> None:
    base = rank.directory.parent
    before = fingerprints(base)
    write(rank, range(10, 11), "new")
    after = fingerprints(base)
    assert all(after[key] != before[key] for key in before)


def test_another_rank_changes_it_and_so_do_the_format_and_the_step_that_a_later_run_begins_with(rank: RecordedRank) -> None:
    base = rank.directory.parent
    before = fingerprints(base)
    assert all(fingerprints(base, format="csv")[key] != before[key] for key in before)
    later = RecordedRank(base, suffix="ffffffff")
    write(later, range(7, 8))
    after = fingerprints(base)
    assert after[FIRST] == before[FIRST]
    assert SECOND not in after or after[SECOND] != before[SECOND]


def test_what_only_touched_the_file_counts_as_a_change(rank: RecordedRank) -> None:
    base = rank.directory.parent
    before = fingerprints(base)
    for path in rank.directory.iterdir():
        if "_0-4" in path.name:
            os.utime(path, ns=(0, 1))
    after = fingerprints(base)
    assert after[FIRST] != before[FIRST]
    assert after[SECOND] == before[SECOND]


def test_a_window_is_a_key() -> None:
    spans = (StepSpan(0, 1), StepSpan(2, 3))
    assert len({Window("actv", StepSpan(0, 3), spans, (range(2),)), Window("actv", StepSpan(0, 3), spans, (range(2),))}) == 1
