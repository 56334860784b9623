import json

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from monitor.coordinator import manifest_format
from monitor.coordinator.manifest_format import (
    ManifestError,
    ManifestRecord,
    RecordedSteps,
    StepRanges,
    StepsRecord,
    read_manifest,
)

RECORD = ManifestRecord(
    schema_version=1,
    job_id="1a2b3c4d" * 4,
    job_agreed=True,
    timestamp="Dec03_21-34-40",
    started="2024-12-03T21:34:40+01:00",
    saved="2024-12-03T21:35:40+01:00",
    closed=False,
    rank=1,
    world_size=4,
    groups={"dp": (1, 3), "tp": (0, 1)},
    host="node7",
    pid=4711,
    versions={"torch": "2.13.0"},
    config_path="/data/config.json",
    config={"ops": ["norm"], "eps": 1e-8, "targets": {"h.0": {}}, "format": None},
    formats=("csv",),
    series={"file": "series-0123456789abcdef.json.gz", "count": 12},
    steps=RecordedSteps(
        written=StepsRecord.of(StepRanges(range(0, 1000, 10))),
        skipped=StepsRecord.of(StepRanges([20])),
        incomplete=StepsRecord.of(StepRanges()),
    ),
    dropped={"queue full": StepsRecord.of(StepRanges([5, 7, 100], most=1))},
    lost={"csv": {"OSError": StepsRecord.of(StepRanges([30]))}},
    failures={"sink csv: OSError": 3},
    notes={"grad_unreduced": "scaled by the loss scale", "loss_scale": 65536, "ratio": 0.5, "clipped": True},
)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "manifest.json").write_bytes(RECORD.to_json())
    return tmp_path / "manifest.json"


def changed(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


def test_a_manifest_reads_back_as_it_was_written(path):
    assert read_manifest(path) == RECORD


def test_a_manifest_has_a_line_for_each_field(path):
    lines = path.read_text().splitlines()
    assert len(lines) == len(ManifestRecord.model_fields) + 2
    assert (
        '"notes": {"grad_unreduced": "scaled by the loss scale", "loss_scale": 65536, "ratio": 0.5, "clipped": true}' in lines
    )


def test_steps_are_listed_and_looked_up():
    steps = StepsRecord.of(StepRanges([0, 10, 20, 25]))
    assert list(steps.steps()) == [0, 10, 20, 25]
    assert [step for step in range(30) if steps.holds(step)] == [0, 10, 20, 25]


@given(steps=st.sets(st.integers(0, 40)), first=st.integers(0, 45), last=st.integers(0, 45))
def test_steps_between_two_are_those_that_are_no_less_and_no_more(steps, first, last):
    between = StepsRecord.of(StepRanges(sorted(steps))).between(first, last)
    assert list(between.steps()) == [step for step in sorted(steps) if first <= step <= last]


def test_a_field_of_a_later_version_is_passed_over(path):
    assert read_manifest(changed(path, edges=[[0, 1]])) == RECORD


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("schema_version", 2, "schema version 2 is not known: this monitor reads up to 1"),
        ("rank", "1", "rank: Input should be a valid integer"),
        ("rank", True, "rank: Input should be a valid integer"),
        ("rank", 4, "rank 4 is not one of 4"),
        ("closed", 1, "closed: Input should be a valid boolean"),
        ("groups", {"dp": [0, -1]}, "groups.dp.1: Input should be greater than or equal to 0"),
        ("series", {"file": "../../etc/passwd", "count": 1}, "series.file: String should match pattern"),
        ("notes", {"a": None}, "notes.a"),
        ("steps", [], "steps: Input should be an object"),
        ("dropped", {"full": {"count": 2, "ranges": [[0, 3, 2]]}}, r"\[0, 3, 2\] is not a range of steps"),
        ("dropped", {"full": {"count": 2, "ranges": [[5, 5, 1], [5, 5, 1]]}}, r"\[5, 5, 1\] is not a range of steps after 5"),
        ("dropped", {"full": {"count": 2, "ranges": [[0, 0, 0]]}}, "dropped.full.ranges.0.2"),
        ("dropped", {"full": {"count": 2, "ranges": [[5, 5, 1]]}}, "the count is 2, the ranges hold 1"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_wrong(path, field, value, wrong):
    with pytest.raises(ManifestError, match=wrong) as raised:
        read_manifest(changed(path, **{field: value}))
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("field", sorted(name for name, one in ManifestRecord.model_fields.items() if one.is_required()))
def test_a_missing_field_is_named(path, field):
    fields = json.loads(path.read_text())
    del fields[field]
    path.write_text(json.dumps(fields))
    with pytest.raises(ManifestError, match=f"{field}: Field required"):
        read_manifest(path)


def test_a_missing_manifest_is_named(tmp_path):
    with pytest.raises(ManifestError, match=r"manifest\.json cannot be read: No such file"):
        read_manifest(tmp_path / "manifest.json")


def test_a_directory_is_no_manifest(tmp_path):
    with pytest.raises(ManifestError, match="cannot be read: this is not a regular file"):
        read_manifest(tmp_path)


def test_a_file_without_end_is_not_read_to_the_end(path, monkeypatch):
    monkeypatch.setattr(manifest_format, "MANIFEST_LIMIT", 1000)
    with pytest.raises(ManifestError, match="larger than any manifest"):
        read_manifest(path)


@given(st.integers(0, len(RECORD.to_json()) - 3))
def test_a_manifest_cut_off_anywhere_is_refused(tmp_path_factory, length):
    path = tmp_path_factory.getbasetemp() / "cut.json"
    path.write_bytes(RECORD.to_json()[:length])
    with pytest.raises(ManifestError, match=r"Invalid JSON"):
        read_manifest(path)


def manifest_or_message(path):
    try:
        return read_manifest(path)
    except ManifestError as error:
        return str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=8,
)


def test_a_manifest_from_before_pipelines_were_recorded_reads_without_one(path):
    fields = json.loads(path.read_text())
    del fields["pipeline"]
    path.write_text(json.dumps(fields))
    assert read_manifest(path).pipeline is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(sorted(ManifestRecord.model_fields)), value=JSON)
def test_whatever_a_field_holds_reading_gives_a_manifest_or_says_what_is_wrong(path, field, value):
    path.write_bytes(RECORD.to_json())
    outcome = manifest_or_message(changed(path, **{field: value}))
    assert isinstance(outcome, ManifestRecord) or str(path) in outcome


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        read_manifest(path)
