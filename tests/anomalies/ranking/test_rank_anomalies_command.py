"""``monitor-rank-anomalies`` as people run it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys

import pytest
from played_job import ROWS, PlayedRank, pipeline, replicas
from typer.testing import CliRunner

from monitor.anomalies.events import EVENTS_FOLDER
from monitor.anomalies.ranking import job as job_module
from monitor.anomalies.ranking.cli import app
from monitor.coordinator.series_file import Pass
from monitor.merge.discovery import discover

EVENT_FIELDS = {
    *("rank", "step", "micro_step", "pp_stage", "vpp_stage", "call_id", "tag_name", "message", "group_mates"),
}


def ran(base, *options):
    """Exit status and what was said, in one line."""
    result = CliRunner().invoke(app, ["-d", str(base / EVENTS_FOLDER), *options], env={"COLUMNS": "400"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, " ".join(result.output.split())


def written(base, *ranks):
    for rank in ranks:
        rank.write(base)
    return base


def analysed(path):
    return list(json.loads(path.read_text()).values())


@pytest.fixture
def job(tmp_path):
    """Two stages, in which a NaN is born in step 3 and comes again in the steps after."""
    first, second = pipeline(steps=range(20))
    for step in range(3, 13):
        first.fire("actv", "a.x.output", step=step, value=2.0).fire("actv", ".output", step=step, value=5.0)
        second.fire("actv", ".input", step=step, value=5.0)
    return written(tmp_path, first, second)


def test_the_earliest_events_are_written_as_they_stood_in_the_files_of_ranks(job):
    assert ran(job, "-k", "3")[0] == 1
    found = json.loads((job / EVENTS_FOLDER / "anomaly_analyse.json").read_text())
    known = {}
    for rank in (0, 1):
        known |= json.loads((job / EVENTS_FOLDER / f"rank{rank}" / "anomaly.json").read_text())
    assert [(one["rank"], one["step"], one["tag_name"]) for one in found.values()] == [
        (0, 3, "0:a.x.output:0/rank0/actv"),
        (0, 3, "0:.output:0/rank0/actv"),
        (1, 3, "0:.input:0/rank1/actv"),
    ]
    assert all(known[key] == event and set(event) == EVENT_FIELDS for key, event in found.items())


@pytest.mark.parametrize("name", ["anomaly.json", "judged.json"])
def test_a_file_that_is_read_is_not_replaced(job, name, monkeypatch):
    monkeypatch.chdir(job)
    files = list((job / EVENTS_FOLDER).glob("rank*/*.json"))
    before = {path: path.read_bytes() for path in files}
    for given in (job / EVENTS_FOLDER / "rank1" / name, f"{EVENTS_FOLDER}/rank0/{name}"):
        status, said = ran(job, "-o", str(given))
        assert (status, f"{name}, which a rank wrote and the ranking reads. Name another file." in said) == (2, True)
    assert {path: path.read_bytes() for path in files} == before


def test_eight_events_are_kept_unless_told_otherwise(job):
    ran(job)
    assert len(analysed(job / EVENTS_FOLDER / "anomaly_analyse.json")) == 8


def test_the_base_directory_may_be_named_too(job):
    result = CliRunner().invoke(app, ["--data_path", str(job), "--topk", "1"])
    assert (result.exit_code, len(analysed(job / EVENTS_FOLDER / "anomaly_analyse.json"))) == (1, 1)


def test_the_module_is_the_command(job):
    command = [sys.executable, "-m", "monitor.anomalies", "-d", str(job), "-k", "1"]
    environment = os.environ | {"COLUMNS": "300"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (result.returncode, "origin" in result.stdout) == (1, True)


@pytest.mark.parametrize("given", ["new/folder", "."])
def test_the_output_is_a_folder(job, tmp_path, given):
    assert ran(job, "-o", str(tmp_path / given))[0] == 1
    assert len(analysed(tmp_path / given / "anomaly_analyse.json")) == 8


def test_the_output_is_a_file_if_it_ends_in_json(job, tmp_path):
    assert ran(job, "-o", str(tmp_path / "new" / "first.json"))[0] == 1
    assert len(analysed(tmp_path / "new" / "first.json")) == 8


@pytest.mark.parametrize(
    ("spelled", "steps"),
    [
        ("[4,6]", {4, 6}),
        ("[4, 6]", {4, 6}),
        ("4,6", {4, 6}),
        ("5:7", {5, 6, 7}),
        ("11:", {11, 12}),
        ("[3,11:]", {3, 11, 12}),
        ("3::4", {3, 7, 11}),
        ("3:8:2,12", {3, 5, 7, 12}),
        ("[]", set(range(3, 13))),
        ("100", set()),
    ],
)
def test_steps_are_listed_or_given_as_ranges_with_both_ends(job, spelled, steps):
    assert ran(job, "-s", spelled, "-k", "1000")[0] == 1
    assert {one["step"] for one in analysed(job / EVENTS_FOLDER / "anomaly_analyse.json")} == steps


@pytest.mark.parametrize("spelled", ["x", "1-3", "3:1", "[1", "1,,2", ":5", "-1", "1:9:0", "1:9:"])
def test_steps_that_are_written_otherwise_are_refused_with_how_to_spell_them(job, spelled):
    status, said = ran(job, f"--step_list={spelled}")
    assert (status, f"--step_list is {spelled!r}. Write steps as in [1,2]" in said) == (2, True)


def test_steps_that_are_not_listed_still_tell_where_events_came_from(tmp_path):
    rank = PlayedRank().fire("param_updated", "b.weight", step=0).fire("param_origin", "b.weight", step=1)
    status, said = ran(written(tmp_path, rank), "-s", "1")
    assert (status, "propagated" in said, "0 origins" in said, "rank earlier steps, too" in said) == (1, True, True, True)


def test_no_event_is_good_news(tmp_path):
    status, said = ran(written(tmp_path, *replicas()))
    rows = 3 * len(list(PlayedRank().rows()))
    assert (status, said.endswith(f"No event in {2 * rows:,} rows of 2 ranks in 3 steps.")) == (0, True)
    assert "Not judged" not in said
    assert analysed(tmp_path / EVENTS_FOLDER / "anomaly_analyse.json") == []


def test_a_rank_without_events_need_not_have_a_file_of_them(tmp_path):
    written(tmp_path, PlayedRank())
    (tmp_path / EVENTS_FOLDER / "rank0" / "anomaly.json").unlink()
    assert ran(tmp_path)[0] == 0


def test_a_rank_of_a_group_that_left_nothing_is_missing(tmp_path):
    first, second = pipeline()
    second.judged = False
    status, said = ran(written(tmp_path, first.fire("actv", "b.output"), second))
    assert (status, "rank 1 wrote no events" in said) == (1, True)


def test_a_rank_that_is_not_monitored_is_not_missing(tmp_path):
    first, second = pipeline(module_ranks=[0])
    second.judged = False
    status, said = ran(written(tmp_path, first, second))
    assert (status, "Not monitored, as module_ranks says: rank 1." in said) == (0, True)


def test_a_rank_that_was_killed_is_reported_and_its_events_count(tmp_path):
    status, said = ran(written(tmp_path, PlayedRank(closed=False).fire("actv", "b.output")))
    assert (status, "rank 0 did not end cleanly, or still runs:" in said, "1 event of 1" in said) == (1, True, True)


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def emptied(path):
    path.write_bytes(b"")


def of_another_rank(path):
    path.write_text(path.read_text().replace('"rank": 0', '"rank": 7').replace("/rank0/", "/rank7/"))


def with_a_number_that_no_step_is(path):
    path.write_text(path.read_text().replace('"call_id": ', '"call_id": 9223372036854775807'))


def with_a_negative_number(path):
    path.write_text(path.read_text().replace('"step": ', '"step": -'))


def of_a_chunk_that_no_model_has(path):
    path.write_text(path.read_text().replace('"vpp_stage": 0', f'"vpp_stage": {10**30}').replace('": "0:', f'": "{10**30}:'))


def with_another_message(path):
    path.write_text(path.read_text().replace("reports anomaly", "says"))


def with_another_tag(path):
    path.write_text(path.read_text().replace('"tag_name": "0:', '"tag_name": "'))


def of_another_group(path):
    path.write_text(path.read_text().replace('"group_mates": [0, 1]', '"group_mates": [1, 0]'))


def turned_into_a_list(path):
    path.write_text(json.dumps(list(json.loads(path.read_text()).values())))


def removed(path):
    path.unlink()


def replaced_by_a_link(path):
    path.rename(path.parents[2] / "elsewhere.json")
    path.symlink_to(path.parents[2] / "elsewhere.json")


def replaced_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = [
    *(cut, emptied, of_another_rank, with_a_number_that_no_step_is, with_a_negative_number, with_another_message),
    *(of_a_chunk_that_no_model_has, with_another_tag, of_another_group, turned_into_a_list),
    *(removed, replaced_by_a_link, replaced_by_a_pipe),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_is_named_and_the_others_are_ranked(damage, tmp_path):
    first, second = pipeline()
    written(tmp_path, first.fire("actv", "b.output"), second.fire("actv", "b.output"))
    damage(tmp_path / EVENTS_FOLDER / "rank0" / "anomaly.json")
    status, said = ran(tmp_path)
    assert (status, "rank0/anomaly.json: " in said, "1 event of 1 of 1 rank" in said) == (1, True, True)


@pytest.mark.parametrize("damage", [cut, emptied, of_another_rank, removed, replaced_by_a_link, replaced_by_a_pipe])
def test_events_are_not_read_without_what_tells_what_they_are_of(damage, tmp_path):
    first, second = pipeline()
    written(tmp_path, first.fire("actv", "b.output"), second.fire("actv", "b.output"))
    path = tmp_path / EVENTS_FOLDER / "rank0" / "judged.json"
    path.write_text(path.read_text().replace('"rank":0', '"rank": 0'))
    damage(path)
    status, said = ran(tmp_path)
    assert (status, "rank0/anomaly.json: " in said, "1 event of 1 of 1 rank" in said) == (1, True, True)


@pytest.mark.parametrize("name", ["../Dec03_21-34-40-rank0-00000000", "/etc", "", "..", "Dec03_21-34-40-rank0-ffffffff"])
def test_a_directory_that_is_none_of_the_rank_in_the_base_is_refused_and_the_events_are_ranked_by_order(name, tmp_path):
    written(tmp_path, PlayedRank().fire("actv", "b.output"))
    path = tmp_path / EVENTS_FOLDER / "rank0" / "judged.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "directory": name}))
    status, said = ran(tmp_path)
    assert (status, "has no manifest to go with it" in said, "1 origin" in said) == (1, True, True)


@pytest.mark.parametrize("file", ["manifest.json", "series-*.json.gz"])
@pytest.mark.parametrize("damage", [cut, emptied, removed, replaced_by_a_link])
def test_a_damaged_manifest_leaves_the_order(damage, file, tmp_path):
    rank = PlayedRank().fire("actv", "b.output")
    written(tmp_path, rank)
    damage(next((tmp_path / rank.directory).glob(file)))
    status, said = ran(tmp_path)
    assert (status, "Rank 0 has no manifest. Only its order of calls is known" in said) == (1, True)


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("recording", [0, 1])
def test_a_rank_whose_directory_is_gone_gives_no_more_origins(gone, recording, tmp_path):
    """A weight of rank 1 is NaN in step 1. The gradients of both ranks take it in, and so does every later step."""
    launch, first = "f" * 32, [PlayedRank(rank, {"dp": (0, 1)}, launch="f" * 32) for rank in (0, 1)]
    ranks = [PlayedRank(rank, {"dp": (0, 1)}, launch=launch, recording=recording, job="8" * 32) for rank in (0, 1)]
    for step in (1, 2):
        ranks[1].fire("param_origin", "b.weight", step=step).fire("actv", "b.output", step=step)
        ranks[1].fire("grad_unreduced", "b.weight", step=step)
        for rank in ranks:
            rank.fire("grad_reduced", "b.weight", step=step).fire("param_updated", "b.weight", step=step)
    ranks[0].fire("param_origin", "b.weight", step=2).fire("actv", "b.output", step=2)
    written(tmp_path, *(first if recording else []), *ranks)
    assert "16 events of 2 of 2 ranks; 1 origin " in ran(tmp_path)[1]
    shutil.rmtree(tmp_path / ranks[gone].directory)
    _, said = ran(tmp_path)
    assert ("16 events of 2 of 2 ranks; 1 origin " in said, f"Rank {gone} has no manifest." in said) == (True, True)
    assert ("several recordings" in said) == bool(recording)


@pytest.mark.parametrize("seed", range(30))
def test_no_manifest_that_is_written_right_is_too_absurd(seed, tmp_path):
    """Passes that come twice or never end, edges in circles, stages that contradict each other."""
    draw = random.Random(seed)
    names = [(kind, name) for kind, all_names in ROWS.items() for name in all_names]
    ranks = pipeline(draw.randrange(1, 4))
    for rank in ranks:
        chunks = draw.choice([1, 1, 2, 10**6])
        passes = [Pass(draw.random() < 0.5, draw.randrange(chunks), draw.randrange(3)) for _ in range(draw.randrange(9))]
        rank.recorded_passes = [*passes, *draw.choice([[], rank.passes])]
        rank.edges = [(one[0], one[1], draw.choice(names)[1]) for one in draw.choices(names, k=40)]
        for kind, name in draw.sample(names, 8):
            rank.fire(kind, name)
    assert ran(written(tmp_path, *ranks))[0] == 1


def test_events_of_another_job_are_named_and_left_out(tmp_path):
    ranks = [PlayedRank(rank, {"dp": (0, 1, 2)}).fire("actv", "b.output") for rank in range(3)]
    ranks[1].job = "9" * 32
    status, said = ran(written(tmp_path, *ranks))
    assert (status, f"is of job {'9' * 32}" in said, "2 events of 2 of 2 ranks" in said) == (1, True, True)


@pytest.mark.parametrize("make", [lambda _: None, lambda path: path.mkdir(), lambda path: path.write_text("")])
def test_nothing_to_read_is_said_in_one_line(make, tmp_path):
    make(tmp_path / EVENTS_FOLDER)
    status, said = ran(tmp_path)
    assert (status, said.startswith("Nothing was ranked: ")) == (2, True)


def test_where_every_file_is_torn_nothing_was_read(tmp_path):
    written(tmp_path, PlayedRank().fire("actv", "b.output"))
    cut(tmp_path / EVENTS_FOLDER / "rank0" / "anomaly.json")
    status, said = ran(tmp_path)
    assert (status, "rank0/anomaly.json: " in said) == (2, True)


def test_a_name_in_a_file_does_not_steer_the_terminal(tmp_path):
    rank = PlayedRank(host="node\x1b]0;x\x07[red]").fire("actv", "b.output")
    assert "node\\x1b]0;x\\x07[red]" in ran(written(tmp_path, rank))[1]


def test_two_recordings_of_a_process_are_ranked_side_by_side(tmp_path):
    jobs = ({"recording": number, "job": f"{number}" * 32, "launch": "f" * 32} for number in range(2))
    first, second = (PlayedRank(**job).fire("actv", "b.output") for job in jobs)
    status, said = ran(written(tmp_path, first, second))
    assert (status, "2 origins" in said, "several recordings" in said) == (1, True, True)
    assert ("host recording step" in said, " of recording 1 in step" in said, "is of job" in said) == (True, True, False)
    assert len(analysed(tmp_path / EVENTS_FOLDER / "anomaly_analyse.json")) == 2


def test_a_recording_that_one_rank_has_more_does_not_part_those_of_the_others(tmp_path):
    """Rank 0 began with a copy, so that its recording of the model is its second one, and that of rank 1 its first."""
    launch, groups = "f" * 32, {"dp": (0, 1)}
    copy = PlayedRank(job="9" * 32, launch=launch).fire("actv", "b.output")
    ranks = [PlayedRank(rank, groups, recording=1 - rank, launch=launch).fire("param_origin", "b.weight") for rank in (0, 1)]
    status, said = ran(written(tmp_path, copy, *ranks))
    assert (status, "is of job" in said, "several recordings" in said) == (1, False, True)
    assert "3 events of 2 of 2 ranks" in said
    assert len(analysed(tmp_path / EVENTS_FOLDER / "anomaly_analyse.json")) == 3


def test_what_looks_like_markup_in_a_name_is_printed_as_it_is(tmp_path):
    names = ("a:on:b.output", "[red]b.output")
    rank = PlayedRank(odd=names)
    for name in names:
        rank.fire("actv", name)
    _, said = ran(written(tmp_path, rank))
    assert f"actv 0:{names[0]} " in said
    assert f"actv 0:{names[1]} " in said
    assert f"First came {names[0]} on rank 0" in said


def test_a_narrow_terminal_shows_every_name_whole(job):
    told = CliRunner().invoke(app, ["-d", str(job / EVENTS_FOLDER), "-k", "1"], env={"COLUMNS": "60"}).output.splitlines()
    assert told[:3] == ["origin: rank 0 (node0), step 3, micro-step 0", "  actv 0:a.x.output", "  nans 2, AnomalyNan"]


def test_a_rank_that_still_runs_may_move_on_to_another_series_file_meanwhile(tmp_path, monkeypatch):
    rank = PlayedRank().fire("actv", "b.output")
    rank.write(tmp_path)
    before = {path.name for path in (tmp_path / rank.directory).glob("series-*")}

    def then_it_moves_on(base):
        found = discover(base)
        for name in before:
            (tmp_path / rank.directory / name).unlink()
        rank.recorded_passes = [Pass(True, 0, 0), Pass(True, 0, 1)]
        rank.write(tmp_path)
        return found

    monkeypatch.setattr(job_module, "discover", then_it_moves_on)
    status, said = ran(tmp_path)
    assert before.isdisjoint(path.name for path in (tmp_path / rank.directory).glob("series-*"))
    assert (status, "has no manifest" in said, "1 origin" in said) == (1, False, True)
