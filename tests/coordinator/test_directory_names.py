from datetime import datetime

import pytest
from hypothesis import given, strategies as st

from monitor.coordinator.output import MONTHS, RankDirectory, timestamp_fields, timestamp_of

MOMENTS = st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2199, 1, 1))


def test_a_timestamp_is_written_with_month_day_and_time():
    assert timestamp_of(datetime(2024, 12, 3, 21, 34, 40)) == "Dec03_21-34-40"


def test_months_are_english_whatever_the_locale():
    spelled = [timestamp_of(datetime(2024, month, 1))[:3] for month in range(1, 13)]
    assert spelled == ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
    assert tuple(spelled) == MONTHS


@given(MOMENTS)
def test_a_timestamp_reads_back_as_its_month_day_and_time(moment):
    fields = (moment.month, moment.day, moment.hour, moment.minute, moment.second)
    assert timestamp_fields(timestamp_of(moment)) == fields


@pytest.mark.parametrize(
    "text", ["", "Dec3_21-34-40", "dec03_21-34-40", "Dez03_21-34-40", "Feb30_00-00-00", "Dec03_24-00-00", "Dec03_21-34-40\n"]
)
def test_what_is_no_timestamp_is_refused_by_name(text):
    with pytest.raises(ValueError, match="is not a timestamp like 'Dec03_21-34-40'"):
        timestamp_fields(text)


def test_february_29_is_a_day():
    assert timestamp_fields("Feb29_00-00-00") == (2, 29, 0, 0, 0)


@given(MOMENTS, st.integers(0, 10**6))
def test_a_directory_name_reads_back_as_its_parts(moment, rank):
    directory = RankDirectory.new(timestamp_of(moment), rank)
    assert RankDirectory.parse(str(directory)) == directory


def test_a_directory_is_named_by_timestamp_rank_and_suffix():
    assert str(RankDirectory("Dec03_21-34-40", 0, "1a2b3c4d")) == "Dec03_21-34-40-rank0-1a2b3c4d"


def test_two_runs_of_the_same_second_get_two_names():
    assert RankDirectory.new("Dec03_21-34-40", 0) != RankDirectory.new("Dec03_21-34-40", 0)


@pytest.mark.parametrize(
    "name",
    [
        "anomaly_detected",
        "Dec03_21-34-40-rank0",
        "Dec03_21-34-40-rank0-1a2b3c4",
        "Dec03_21-34-40-rank0-1A2B3C4D",
        "Dec03_21-34-40-rank01-1a2b3c4d",
        "Dec03_21-34-40-rank-1-1a2b3c4d",
        "Dec03_21-34-40-rank٣-1a2b3c4d",
        "Feb30_21-34-40-rank0-1a2b3c4d",
        "Dec03_21-34-40-rank0-1a2b3c4d\n",
        "Dec03_21-34-40-rank0-1a2b3c4d.csv",
    ],
)
def test_other_names_are_no_rank_directories(name):
    assert RankDirectory.parse(name) is None


@given(st.text())
def test_whatever_parses_is_written_as_it_was(name):
    parsed = RankDirectory.parse(name)
    assert parsed is None or str(parsed) == name
