import gzip
import json
import os

import numpy as np
import pytest
from hypothesis import given, strategies as st

from monitor.coordinator import series_file
from monitor.coordinator.manifest_format import ManifestError, ManifestRecord, SeriesReference
from monitor.coordinator.series_file import NO_FLOW, Edge, Flow, Measured, MeasuredSeries, Pass, read_flow, read_series
from monitor.series import LOCAL, Placement, Series, SeriesTable, Shard
from monitor.stats.partials import COLUMNS, KindRows, Partials, TensorLayout
from monitor.stats.table import StepRows

WEIGHT = Series("grad_reduced", 0, "h.0.weight")
BIAS = Series("grad_reduced", 1, "h.0.bias")
INPUT = Series("actv", 0, "h.0.input")
MATRIX, VECTOR = TensorLayout((4, 8), "torch.float32"), TensorLayout((8,), "torch.bfloat16")


def step_of(*measured, table, layouts, step=0):
    """A step in which each (series, layout) was measured, in that order."""
    kinds = {}
    for kind in dict.fromkeys(series.kind for series, _ in measured):
        rows = [(table.index_of(series), layouts.index(layout)) for series, layout in measured if series.kind == kind]
        index, layout = np.array(rows, np.int64).T
        call = np.arange(len(rows))
        kinds[kind] = KindRows(index, np.zeros_like(call), call, layout, Partials(np.zeros((len(COLUMNS), len(rows)))))
    return StepRows(step, ("norm",), kinds, layouts)


@pytest.fixture
def seen():
    """A table of three series, and what has been measured of it."""
    table = SeriesTable([WEIGHT, BIAS, INPUT])
    return table, Measured(table)


def saved(directory, measured):
    file = measured.file()
    (directory / file.name).write_bytes(file.content)
    return SeriesReference(file=file.name, count=file.count)


def manifest_of(reference):
    """The one field of a manifest that reading the series needs."""
    return ManifestRecord.model_construct(series=reference)


def read(directory, measured):
    return read_series(directory, manifest_of(saved(directory, measured)))


def test_before_the_first_step_there_is_no_file(seen):
    assert seen[1].file() is None


def test_series_read_back_with_what_they_were_first_measured_as(seen, tmp_path):
    table, measured = seen
    measured.see(step_of((WEIGHT, MATRIX), (BIAS, VECTOR), (INPUT, MATRIX), table=table, layouts=[MATRIX, VECTOR]))
    assert read(tmp_path, measured) == (
        MeasuredSeries(WEIGHT, MATRIX, False),
        MeasuredSeries(BIAS, VECTOR, False),
        MeasuredSeries(INPUT, MATRIX, False),
    )


def test_what_is_no_replica_any_more_is_not_said_to_be_one(seen):
    """``set_monitor`` was called again, without the group that it was given before."""
    table, _ = seen
    for placement in (Placement(replicas=(0, 1)), LOCAL):
        table.place(WEIGHT, placement)
        assert table.placement(WEIGHT) == placement


def test_a_series_not_measured_yet_has_no_layout(seen, tmp_path):
    table, measured = seen
    measured.see(step_of((INPUT, VECTOR), table=table, layouts=[MATRIX, VECTOR]))
    assert read(tmp_path, measured) == (
        MeasuredSeries(WEIGHT, None, False),
        MeasuredSeries(BIAS, None, False),
        MeasuredSeries(INPUT, VECTOR, False),
    )


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_series_whose_layout_changes_keeps_the_first_and_is_marked(seen, tmp_path, in_one_step):
    table, measured = seen
    rows = [(WEIGHT, VECTOR), (WEIGHT, MATRIX), (WEIGHT, VECTOR)]
    for part in [rows] if in_one_step else [[row] for row in rows]:
        measured.see(step_of(*part, table=table, layouts=[MATRIX, VECTOR]))
    assert read(tmp_path, measured) == (MeasuredSeries(WEIGHT, VECTOR, True),)


def test_a_step_that_brings_nothing_new_makes_no_new_file(seen):
    table, measured = seen
    step = step_of((WEIGHT, MATRIX), table=table, layouts=[MATRIX])
    measured.see(step)
    file = measured.file()
    measured.see(step)
    assert measured.file() is file


def test_a_new_layout_in_every_step_changes_the_file_once(seen):
    """Sequence lengths that never repeat must not leave a file a step."""
    table, measured = seen
    layouts = [TensorLayout((length,), "torch.float32") for length in range(100)]
    names = set()
    for layout in layouts:
        measured.see(step_of((INPUT, layout), table=table, layouts=layouts))
        names.add(measured.file().name)
    assert len(names) == 2
    assert json.loads(gzip.decompress(measured.file().content))["layouts"] == [[[0], "torch.float32"]]


def test_the_same_content_has_the_same_name_and_another_has_another():
    def file_of(layout):
        table = SeriesTable([WEIGHT])
        measured = Measured(table)
        measured.see(step_of((WEIGHT, layout), table=table, layouts=[layout]))
        return measured.file()

    assert file_of(MATRIX) == file_of(MATRIX)
    assert file_of(MATRIX).name != file_of(VECTOR).name


SERIES = st.builds(Series, st.sampled_from(["actv", "other"]), st.integers(0, 3), st.text(max_size=20))
LAYOUTS = st.builds(
    TensorLayout, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), st.sampled_from(["torch.int8", "float"])
)


@given(st.dictionaries(SERIES, LAYOUTS, min_size=1, max_size=20))
def test_whatever_its_names_and_shapes_a_table_reads_back(tmp_path_factory, measured_as):
    table, layouts = SeriesTable(), list(dict.fromkeys(measured_as.values()))
    measured = Measured(table)
    measured.see(step_of(*measured_as.items(), table=table, layouts=layouts))
    expected = {MeasuredSeries(series, layout, False) for series, layout in measured_as.items()}
    assert set(read(tmp_path_factory.getbasetemp(), measured)) == expected


@pytest.fixture
def on_disk(seen, tmp_path):
    table, measured = seen
    measured.see(step_of((WEIGHT, MATRIX), table=table, layouts=[MATRIX]))
    reference = saved(tmp_path, measured)
    return tmp_path / reference.file, manifest_of(reference)


def test_a_manifest_without_series_reads_as_none(tmp_path):
    assert read_series(tmp_path, manifest_of(None)) == ()


def test_a_missing_file_is_named(on_disk):
    path, manifest = on_disk
    path.unlink()
    with pytest.raises(ManifestError, match=f"{path.name} cannot be read"):
        read_series(path.parent, manifest)


@pytest.mark.parametrize("cut", [0, 1, 15, -1])
def test_a_file_cut_off_is_refused(on_disk, cut):
    path, manifest = on_disk
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ManifestError, match=path.name):
        read_series(path.parent, manifest)


def test_a_file_that_is_no_gzip_is_refused(on_disk):
    path, manifest = on_disk
    path.write_bytes(b"{}")
    with pytest.raises(ManifestError, match=path.name):
        read_series(path.parent, manifest)


def test_content_that_its_name_does_not_represent_is_refused(on_disk):
    path, manifest = on_disk
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"weight", b"wright")))
    with pytest.raises(ManifestError, match="does not match the digest in its name"):
        read_series(path.parent, manifest)


def test_a_file_that_unpacks_without_end_is_refused(on_disk, monkeypatch):
    path, manifest = on_disk
    monkeypatch.setattr(series_file, "SERIES_LIMIT", 1000)
    path.write_bytes(gzip.compress(b" " * 10**7))
    with pytest.raises(ManifestError, match="larger than any series table"):
        read_series(path.parent, manifest)


@pytest.mark.parametrize(
    ("column", "value", "wrong"),
    [
        ("name", [], "the columns differ in length"),
        ("kind", [1], "an index is out of range"),
        ("layout", [1], "an index is out of range"),
        ("layout", [-2], "a layout or placement below -1"),
        ("varies", [1], "an index is out of range"),
        ("vpp_stage", ["0"], "vpp_stage.0: Input should be a valid integer"),
        ("flow_from", [0], "the columns differ in length"),
        ("passes", [[1, 0, 0]], "passes.0.0: Input should be a valid boolean"),
        ("schema_version", 2, "schema version 2 is not known"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(on_disk, column, value, wrong):
    with pytest.raises(ManifestError, match=wrong):
        read_series(*changed(on_disk, lambda columns: columns | {column: value}))


def changed(on_disk, change):
    """The directory, and a manifest that points at the columns as ``change`` makes them."""
    path, _ = on_disk
    content = json.dumps(change(json.loads(gzip.decompress(path.read_bytes())))).encode()
    name = series_file._name(content)
    (path.parent / name).write_bytes(gzip.compress(content))
    return path.parent, manifest_of(SeriesReference(file=name, count=1))


def test_an_edge_beyond_the_last_series_is_refused(on_disk):
    with pytest.raises(ManifestError, match="an index is out of range"):
        read_flow(*changed(on_disk, lambda columns: columns | {"flow_from": [0], "flow_to": [1]}))


def test_a_file_from_before_there_were_edges_reads_as_having_none(on_disk):
    def old(columns):
        return {name: column for name, column in columns.items() if not name.startswith("flow") and name != "passes"}

    place = changed(on_disk, old)
    assert [one.series for one in read_series(*place)] == [WEIGHT]
    assert read_flow(*place) == NO_FLOW


def test_a_manifest_without_series_has_no_flow(tmp_path):
    assert read_flow(tmp_path, manifest_of(None)) == NO_FLOW


def test_edges_and_passes_read_back(seen, tmp_path):
    table, measured = seen
    measured.see(step_of((WEIGHT, MATRIX), (BIAS, VECTOR), (INPUT, MATRIX), table=table, layouts=[MATRIX, VECTOR]))
    flow = Flow((Edge(2, 0), Edge(2, 1)), (Pass(True, 0, 0), Pass(False, 0, 0)), cut=True)
    measured.flows(flow)
    assert read_flow(tmp_path, manifest_of(saved(tmp_path, measured))) == flow


def test_an_edge_waits_until_both_of_its_series_were_seen(seen, tmp_path):
    table, measured = seen
    measured.flows(Flow((Edge(0, 1), Edge(1, 2))))
    for series, edges in ((WEIGHT, ()), (BIAS, (Edge(0, 1),)), (INPUT, (Edge(0, 1), Edge(1, 2)))):
        measured.see(step_of((series, MATRIX), table=table, layouts=[MATRIX]))
        assert read_flow(tmp_path, manifest_of(saved(tmp_path, measured))).edges == edges


def test_the_kinds_of_a_parameter_are_joined_as_soon_as_they_are_there(tmp_path):
    kinds = ["grad_unreduced", "exp_avg", "param_origin", "grad_reduced", "param_updated", "adam_update", "update_ratio"]
    table = SeriesTable(Series(kind, 0, name) for name in ("weight", "bias") for kind in kinds)
    measured = Measured(table)
    measured.see(step_of(*((series, VECTOR) for series in table), table=table, layouts=[VECTOR]))
    found = read_flow(tmp_path, manifest_of(saved(tmp_path, measured))).edges
    one = {Edge(0, 3), Edge(1, 4), Edge(2, 4), Edge(3, 4), Edge(1, 5), Edge(3, 5)}
    assert set(found) == one | {Edge(source + 7, target + 7) for source, target in one}


class Group(tuple):
    """Ranks that count how often a dictionary looked for them."""

    __slots__ = ()
    looked_up = 0

    def __hash__(self):
        Group.looked_up += 1
        return tuple.__hash__(self)


def test_placements_in_many_groups_take_time_for_each_and_not_for_each_pair_and_share_their_ranks(tmp_path):
    table, names = SeriesTable(), [f"w{number}" for number in range(300)]
    for number, name in enumerate(names):
        replicas, parts = (Group(range(number % 50, number % 50 + width)) for width in (3, 4))
        table.place(Series("grad_reduced", 0, name), Placement(replicas, (), Shard(parts, (8,), (number,), True)))
    series = [Series("grad_reduced", 0, name) for name in names]
    assert table.placement(series[0]).replicas is table.placement(series[50]).replicas
    assert table.placement(series[0]).shard.ranks is table.placement(series[50]).shard.ranks
    measured = Measured(table)
    measured.see(step_of(*((one, MATRIX) for one in series), table=table, layouts=[MATRIX]))
    Group.looked_up = 0
    reference = saved(tmp_path, measured)
    assert Group.looked_up < 4 * len(series)
    read_back = read_series(tmp_path, manifest_of(reference))
    assert [one.placement for one in read_back] == [table.placement(one) for one in series]


PLACEMENTS = st.sampled_from([LOCAL, Placement(replicas=(0, 1)), Placement(shard=Shard((0, 1), (8, 8), (4, 0)), partial=True)])
ENTRIES = st.builds(
    MeasuredSeries,
    st.builds(Series, st.sampled_from(["actv", "replica", "grad_reduced"]), st.integers(0, 2), st.text(max_size=3)),
    st.sampled_from([None, MATRIX, VECTOR]),
    st.booleans(),
    PLACEMENTS,
)


@given(st.lists(ENTRIES, max_size=8))
def test_columns_of_series_hold_what_their_entries_hold(entries):
    columns = series_file.MeasuredColumns.of(entries)
    layouts, placements = [*columns.layouts, None], [*columns.placements, LOCAL]
    numbers = zip(
        *(each.tolist() for each in (columns.kind, columns.vpp_stage, columns.layout, columns.placement)), strict=True
    )
    assert entries == [
        MeasuredSeries(Series(columns.kinds[kind], chunk, name), layouts[layout], varies, placements[placement])
        for (kind, chunk, layout, placement), name, varies in zip(numbers, columns.name, columns.varies.tolist(), strict=True)
    ]


def test_a_table_that_is_no_file_is_not_opened(seen, tmp_path):
    """To open a pipe would wait for ever."""
    table, measured = seen
    measured.see(step_of((WEIGHT, MATRIX), table=table, layouts=[MATRIX]))
    reference = saved(tmp_path, measured)
    (tmp_path / reference.file).unlink()
    os.mkfifo(tmp_path / reference.file)
    with pytest.raises(ManifestError, match="this is not a regular file"):
        read_series(tmp_path, manifest_of(reference))
