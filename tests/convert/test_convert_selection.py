"""Which directories, files and steps are converted; the same for both formats, and shown by the database."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from converted_job import at, files, job, plain, query

import monitor
from monitor.convert import ConversionError, Converted, CSV2DBConfig, csv2db, csv2tensorboard_by_step
from monitor.coordinator.manifest import Earlier
from monitor.coordinator.manifest_format import read_manifest

ROOT = Path(monitor.__path__[0]).parent
OTHER_JOB = "f" * 32


def converted(base: Path, **options: object) -> Converted:
    return csv2db(CSV2DBConfig(base, output_dirpath=base / "db", **options))  # type: ignore[arg-type]


def ranks_of(base: Path, **options: object) -> list[object]:
    return [rank for (rank,) in query(converted(base, **options).output, "SELECT DISTINCT rank FROM grad_reduced ORDER BY 1")]


class TestTimes:
    STAMPS = ("Dec30_10-00-00", "Dec31_23-59-59", "Jan01_00-00-00", "Jan02_10-00-00")

    @pytest.mark.parametrize(
        ("start", "end", "expected"),
        [
            ("Dec31_23-59-59", "Jan01_00-00-00", [1, 2]),
            ("Dec30_10-00-00", "Dec30_10-00-00", [0]),
            ("Dec30_10-00-01", "Dec31_23-59-58", None),
            ("Jan01_00-00-00", None, [0, 1, 2, 3]),
            ("Jan01_00-00-01", None, [0, 1, 3]),
            (None, "Jan01_00-00-00", [2]),
            (None, None, [0, 1, 2, 3]),
        ],
    )
    def test_both_ends_belong_to_the_range_and_new_year_may_lie_in_it(
        self, tmp_path: Path, start: str | None, end: str | None, expected: list[int] | None
    ) -> None:
        for rank, stamp in enumerate(self.STAMPS):
            at(plain(tmp_path, rank), stamp)
        if expected is None:
            with pytest.raises(ConversionError, match="There are some from Jan01_00-00-00 to Dec31_23-59-59"):
                converted(tmp_path, time_start=start, time_end=end)
        else:
            assert ranks_of(tmp_path, time_start=start, time_end=end) == expected


class TestJobs:
    def test_two_jobs_are_named_and_one_is_chosen_by_its_id(self, tmp_path: Path) -> None:
        plain(tmp_path)
        plain(tmp_path, 1, job=OTHER_JOB, suffix="b" * 8)
        with pytest.raises(ConversionError, match=rf"there are 2 jobs here(?s:.*) 1a2b3c4d(?s:.*) {OTHER_JOB}"):
            converted(tmp_path)
        with pytest.raises(ConversionError, match="'e' begins the ids of 0 jobs"):
            converted(tmp_path, job="e")
        assert ranks_of(tmp_path, job="ff") == [1]

    def test_of_a_job_that_was_resumed_each_step_is_there_once_as_it_was_carried_on(self, tmp_path: Path) -> None:
        first = plain(tmp_path, steps=range(6), value=1.0)
        earlier = Earlier.of(read_manifest(first / "manifest.json"))
        plain(tmp_path, steps=range(3, 5), value=2.0, job=OTHER_JOB, suffix="f" * 8, earlier=earlier)
        rows = query(converted(tmp_path).output, "SELECT step, norm FROM grad_reduced ORDER BY step")
        assert rows == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]

    def test_of_a_step_in_two_files_of_a_directory_the_last_one_counts(self, tmp_path: Path) -> None:
        directory = plain(tmp_path, steps=range(5))
        again = (directory / "grad_reduced_0-4.csv").read_text().splitlines(keepends=True)
        (directory / "grad_reduced_2-3.csv").write_text("".join([again[0], *(line.replace("1", "7") for line in again[3:5])]))
        rows = query(converted(tmp_path).output, "SELECT step, norm FROM grad_reduced ORDER BY step")
        assert rows == [(0, 1.0), (1, 1.0), (2, 7.0), (3, 7.0), (4, 1.0)]

    def test_directories_without_a_manifest_are_converted_if_each_rank_has_one(self, tmp_path: Path) -> None:
        for rank in range(2):
            directory = plain(tmp_path, rank)
            for path in directory.iterdir():
                if path.suffix != ".csv":
                    path.unlink()
        assert ranks_of(tmp_path) == [0, 1]
        shutil.copytree(directory, directory.with_name(f"{directory.name[:-1]}f"))
        with pytest.raises(ConversionError, match="rank 1 has 2 directories"):
            csv2db(CSV2DBConfig(tmp_path))

    def test_beside_a_directory_with_a_manifest_those_without_one_are_set_aside(self, tmp_path: Path) -> None:
        unknown = plain(tmp_path, 0)
        (unknown / "manifest.json").unlink()
        plain(tmp_path, 1)
        result = converted(tmp_path)
        assert result.ranks == (1,)
        assert [one.path for one in result.set_aside] == [unknown.name]

    def test_a_directory_whose_manifest_is_damaged_is_set_aside(self, tmp_path: Path) -> None:
        (plain(tmp_path) / "manifest.json").write_text("{")
        with pytest.raises(ConversionError, match=r"no directory of a rank .* can be read.*manifest\.json"):
            converted(tmp_path)
        plain(tmp_path, 1)
        result = converted(tmp_path)
        assert result.ranks == (1,)
        assert [Path(one.path).name for one in result.set_aside] == ["Dec03_21-34-40-rank0-00000000"]


HEADER = "vpp_stage,name,step,norm\n"


def _cut(directory: Path) -> Path:
    path = directory / "grad_reduced_5-9.csv"
    path.write_bytes(path.read_bytes()[:-3])
    return path


def _file(name: str, text: str) -> Callable[[Path], Path]:
    def written(directory: Path) -> Path:
        path = directory / name
        path.write_text(text)
        return path

    return written


def _link(directory: Path) -> Path:
    target = directory.parent / "elsewhere.csv"
    target.write_text(HEADER + "0,w,20,1\n")
    path = directory / "grad_reduced_20-24.csv"
    path.symlink_to(target)
    return path


class TestFiles:
    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (_cut, "cut off"),
            (_file("grad_reduced_20-24.csv", ""), "begin"),
            (_file("grad_reduced_20-24.csv", "a,b\n1,2\n"), "begin"),
            (_file("grad_reduced_20-24.csv", HEADER + "0,w,7,1\n"), "holds steps 7 to 7"),
            (_file("grad_reduced_20-24.csv", HEADER + "0,w,20,one\n"), "one"),
            (_file("grad_reduced_20-24.csv", 'vpp_stage,name,step,"norm) --"\n0,w,20,1\n'), "columns"),
            (_file("grad_reduced_20-24.csv", "vpp_stage,name,step,rank\n0,w,20,1\n"), "columns"),
            (_file("grad_reduced_20-24.csv", "vpp_stage,name,step,norm,norm\n0,w,20,1,1\n"), "columns"),
            (_file("linear_hook_20-24.csv", "vpp_stage,name,step,sr\n0,w,20,much\n"), "invalid value 'much'"),
            (_file("grad_reduced_20-24.csv", "vpp_stage,name,step,rank_of_it\n0,w,20,much\n"), "columns"),
            (_file("grad_reduced_24-20.csv", HEADER), "steps"),
            (_file("sqlite_master_0-4.csv", HEADER + "0,w,0,1\n"), "no kind"),
            (_file(".grad_reduced_20-24.csv.part", HEADER), "unfinished"),
            (_link, "another directory"),
        ],
    )
    def test_what_is_torn_or_foreign_is_set_aside_and_named_and_the_rest_converted(
        self, tmp_path: Path, spoil: Callable[[Path], Path], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        spoiled = spoil(plain(tmp_path, steps=range(10)))
        with caplog.at_level(logging.WARNING):
            result = converted(tmp_path)
        (aside,) = result.set_aside
        assert aside.path == str(spoiled)
        assert reason in aside.reason
        assert str(spoiled) in caplog.text
        assert result.rows == (5 if spoil is _cut else 10)
        assert csv2tensorboard_by_step(tmp_path, None, None).set_aside == result.set_aside

    def test_features_are_columns_as_ops_are(self, tmp_path: Path) -> None:
        text = "vpp_stage,name,step,sr,kernel_norm\n0,q,0,2.5,\n0,k,0,nan,1\n"
        (plain(tmp_path) / "linear_hook_0-4.csv").write_text(text)
        rows = query(converted(tmp_path).output, "SELECT name, sr, kernel_norm FROM linear_hook")
        assert rows == [("q", 2.5, None), ("k", "nan", 1.0)]

    def test_of_kinds_that_no_one_asked_for_nothing_is_said(self, tmp_path: Path) -> None:
        job(tmp_path, ranks=1)
        (directory,) = tmp_path.glob("*-rank0-*")
        (directory / "actv_0-4.csv").write_text("torn")
        result = converted(tmp_path, data_type_list=["grad_reduced", "other"])
        assert result.set_aside == ()
        assert query(result.output, "SELECT metric_name FROM monitoring_metrics") == [("grad_reduced",), ("other",)]

    def test_where_a_file_of_one_format_is_torn_the_rows_come_from_the_other(self, tmp_path: Path) -> None:
        torn = plain(tmp_path, format=["csv", "hdf5"]) / "metrics_0-4.h5"
        torn.write_text("torn")
        result = converted(tmp_path)
        assert [one.path for one in result.set_aside] == [str(torn)]
        assert query(result.output, "SELECT step, norm FROM grad_reduced") == [(0, 1.0), (1, 1.0), (2, 1.0)]


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"process_num": 0}, "process_num is 0"),
            ({"process_num": True}, "process_num is True"),
            ({"process_num": "4"}, "process_num is '4'"),
            ({"step_partition": -1}, "step_partition is -1"),
            ({"data_type_list": ["actvs"]}, "there is no data type 'actvs'"),
            ({"data_type_list": "actv"}, r"Give a list: \['actv'\]"),
            ({"time_start": "yesterday"}, "'yesterday' is not a timestamp"),
            ({"time_end": "Feb30_00-00-00"}, "'Feb30_00-00-00' is not a timestamp"),
            ({"time_start": 3}, "time_start is 3"),
            ({"data_type_list": ["actv"]}, "has no rows of actv"),
        ],
    )
    def test_what_cannot_be_meant_is_said_in_one_sentence_and_nothing_is_left(
        self, tmp_path: Path, options: dict[str, object], said: str
    ) -> None:
        plain(tmp_path)
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(ConversionError, match=said) as error:
            converted(tmp_path, **options)
        assert "\n" not in str(error.value)
        assert sorted(os.listdir(tmp_path)) == before

    def test_a_path_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match="nowhere cannot be read"):
            csv2db(CSV2DBConfig(tmp_path / "nowhere"))

    def test_a_path_without_ranks_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match="there is no directory of a rank in"):
            csv2db(CSV2DBConfig(tmp_path))

    def test_the_directory_of_a_rank_is_not_that_of_the_job(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match="is the directory of one rank"):
            csv2db(CSV2DBConfig(plain(tmp_path)))

    def test_no_data_types_are_all(self, tmp_path: Path) -> None:
        plain(tmp_path)
        assert converted(tmp_path, data_type_list=[]).rows == 3

    @pytest.mark.parametrize("convert", [csv2tensorboard_by_step, lambda path: csv2db(CSV2DBConfig(path))])
    def test_a_directory_is_all_that_has_to_be_given(self, tmp_path: Path, convert: Callable[[str], Converted]) -> None:
        plain(tmp_path)
        assert convert(str(tmp_path)).rows == 3

    @pytest.mark.parametrize(("convert", "ending"), [("db", "_csv2db"), ("curves", "_csv2tensorboard_by_step")])
    def test_the_output_lies_beside_the_ranks_and_is_named_after_the_time(
        self, tmp_path: Path, convert: str, ending: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain(tmp_path / "run")
        monkeypatch.setenv("HOME", str(tmp_path))
        before = set(os.listdir(tmp_path / "run"))
        if convert == "db":
            csv2db(CSV2DBConfig("~/run"))
        else:
            csv2tensorboard_by_step("~/run", "Dec03_21-34-40", "Dec03_21-34-40")
        (made,) = set(os.listdir(tmp_path / "run")) - before
        assert made.endswith(ending)
        assert at_time(made.removesuffix(ending))

    def test_a_script_with_a_thread_and_without_a_guard_gets_a_message_that_says_so(self, tmp_path: Path) -> None:
        thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        ended = self.converted_by_a_script_without_a_guard(tmp_path, thread)
        assert ended.returncode == 1
        assert "put the call under `if __name__ == '__main__':`" in ended.stderr.splitlines()[-1]
        assert [name for name in files(tmp_path) if "curves" in name] == []

    @pytest.mark.skipif(sys.platform != "linux", reason="a process is copied on Linux alone")
    def test_a_script_without_threads_needs_no_guard(self, tmp_path: Path) -> None:
        ended = self.converted_by_a_script_without_a_guard(tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert [name for name in files(tmp_path) if "curves" in name] != []

    @staticmethod
    def converted_by_a_script_without_a_guard(directory: Path, first: str = "") -> subprocess.CompletedProcess[str]:
        plain(directory / "run")
        plain(directory / "run", 1)
        call = "csv2tensorboard_by_step('run', None, None, process_num=2, output_dirpath='curves')"
        (directory / "script.py").write_text(f"{first}from monitor.convert import csv2tensorboard_by_step\n{call}\n")
        command, environment = [sys.executable, "script.py"], os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False)


def at_time(timestamp: str) -> bool:
    from monitor.coordinator.output import timestamp_fields

    return len(timestamp_fields(timestamp)) == 5
