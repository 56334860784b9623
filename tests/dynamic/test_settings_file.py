"""The user's file is seen to change when its content does, and is changed whole, in one place, under a lock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from monitor.config import ConfigError, MonitorConfig, load_config
from monitor.dynamic import config_file
from monitor.dynamic.config_file import FileWatch, Refused, change_file

LATER = time.time_ns() + 10**15
"""A look at a moment when no file is fresh."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text('{"dynamic_on": true} // all\n')
    return path


@pytest.fixture
def watch(path: Path) -> FileWatch:
    watch = FileWatch(str(path), load_config(path))
    assert watch.look(LATER) is None
    return watch


def test_a_change_of_content_is_reported_once(path: Path, watch: FileWatch) -> None:
    path.write_text('{"dynamic_on": true, "collect_times": 5}')
    assert watch.look(LATER) == MonitorConfig(dynamic_on=True, collect_times=5)
    assert watch.look(LATER) is None


@pytest.mark.parametrize("text", ['{"dynamic_on": true} // all\n', '{"dynamic_on": /* yes */ true, "step_interval": 1,}'])
def test_another_time_or_another_spelling_is_no_change(path: Path, watch: FileWatch, text: str) -> None:
    path.write_text(text)
    os.utime(path)
    assert watch.look(LATER) is None


def test_what_the_file_held_when_it_was_read_first_is_no_change_unless_it_was_another(path: Path) -> None:
    assert FileWatch(str(path), MonitorConfig(dynamic_on=True)).look(LATER) is None
    assert FileWatch(str(path), MonitorConfig()).look(LATER) == MonitorConfig(dynamic_on=True)


def test_a_change_within_a_tick_of_the_file_system_is_seen(path: Path, watch: FileWatch) -> None:
    """Same time, same size, same inode."""
    path.write_text('{"collect_times": 5}')
    status = path.stat()
    now = status.st_mtime_ns + 10**8
    assert watch.look(now) == MonitorConfig(collect_times=5)
    path.write_text('{"collect_times": 6}')
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert watch.look(now) == MonitorConfig(collect_times=6)


def test_an_unchanged_file_is_not_read(watch: FileWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "_regular", lambda _: pytest.fail("it was read"))
    assert watch.look(LATER) is None


def test_a_bad_edit_is_reported_once_with_field_and_reason_and_so_is_the_next(path: Path, watch: FileWatch) -> None:
    path.write_text('{"collect_times": "5"}')
    told = [watch.look(LATER) for _ in range(4)]
    assert [type(one) for one in told] == [type(None), Refused, type(None), type(None)]
    assert isinstance(told[1], Refused)
    assert told[1].reason.startswith(f'{path}: line 1: collect_times: "5" is not allowed')
    path.write_text('{"colect_times": 5}')
    told = [watch.look(LATER) for _ in range(3)]
    assert isinstance(told[1], Refused)
    assert "did you mean `collect_times`?" in told[1].reason
    assert watch.known == MonitorConfig(dynamic_on=True)


def test_after_a_bad_edit_the_old_content_is_no_change_and_a_good_one_is(path: Path, watch: FileWatch) -> None:
    before = path.read_text()
    path.write_text("{")
    assert isinstance([watch.look(LATER) for _ in range(2)][1], Refused)
    path.write_text(before)
    assert watch.look(LATER) is None
    path.write_text("{}")
    assert watch.look(LATER) == MonitorConfig()


@pytest.mark.parametrize("half_way", [lambda path: path.write_text('{"coll'), lambda path: path.unlink()])
def test_a_file_that_is_being_written_is_not_told_of(path: Path, watch: FileWatch, half_way: Callable[[Path], object]) -> None:
    half_way(path)
    assert watch.look(LATER) is None
    path.write_text('{"collect_times": 5}')
    assert watch.look(LATER) == MonitorConfig(collect_times=5)


def test_a_file_that_stays_away_is_reported_once(path: Path, watch: FileWatch) -> None:
    path.unlink()
    told = [watch.look(LATER) for _ in range(3)]
    assert isinstance(told[1], Refused)
    assert told[1].reason == f"{path}: there is no such file"
    assert (told[0], told[2]) == (None, None)


def test_a_pipe_in_its_place_hangs_no_one(path: Path, watch: FileWatch) -> None:
    path.unlink()
    os.mkfifo(path)
    told = [watch.look(LATER) for _ in range(2)]
    assert isinstance(told[1], Refused)


def test_a_value_is_written_with_all_else_as_it_was(path: Path) -> None:
    before = '\ufeff{\r\n  // on\r\n  "dynamic_on": true, /* ü */ "ops": []\r\n}'.encode()
    path.write_bytes(before)
    path.chmod(0o640)
    inode = path.stat().st_ino
    assert change_file(str(path), {("dynamic_on",): False}) == (before.replace(b"true", b"false"), MonitorConfig(ops=()))
    assert path.read_bytes() == before.replace(b"true", b"false")
    assert path.stat().st_mode & 0o7777 == 0o640
    assert path.stat().st_ino != inode
    assert [path.name] == os.listdir(path.parent)


def test_of_several_values_all_are_written_or_none(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="step_interval: 0 is not allowed"):
        change_file(str(path), {("collect_times",): 5, ("step_interval",): 0})
    assert path.read_bytes() == before
    change_file(str(path), {("collect_times",): 5, ("step_interval",): 3})
    assert path.read_text() == '{"dynamic_on": true, "collect_times": 5, "step_interval": 3} // all\n'


def test_a_link_stays_one(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    change_file(str(tmp_path / "link"), {("dynamic_on",): False})
    assert (tmp_path / "link").is_symlink()
    assert not load_config(path).dynamic_on


def test_what_would_be_no_usable_configuration_is_not_written(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigError, match='collect_times: "many" is not allowed'):
        change_file(str(path), {("collect_times",): "many"})
    path.write_text('{"collect_tims": 1}')
    with pytest.raises(ConfigError, match="collect_tims: unknown field"):
        change_file(str(path), {("collect_tims",): 2})
    assert before != path.read_bytes() == b'{"collect_tims": 1}'


def test_what_somebody_else_has_changed_meanwhile_is_left_alone(path: Path, watch: FileWatch) -> None:
    path.write_text('{"dynamic_on": true, "collect_times": 7}')
    assert change_file(str(path), {("dynamic_on",): False}, watch.holds) is None
    assert watch.look(LATER) == MonitorConfig(dynamic_on=True, collect_times=7)


def test_what_this_process_wrote_is_no_change(path: Path, watch: FileWatch) -> None:
    written = change_file(str(path), {("dynamic_on",): False}, watch.holds)
    assert written is not None
    watch.wrote(*written)
    assert watch.look(LATER) is None
    path.write_text('{"dynamic_on": true} // all\n')
    assert watch.look(LATER) == MonitorConfig(dynamic_on=True)


def test_of_many_who_write_at_once_none_is_lost(path: Path) -> None:
    fields = ["collect_times", "step_interval", "ndigits", "step_count_per_record", "start_step"]

    def write(field: str) -> None:
        for value in range(1, 9):
            change_file(str(path), {(field,): value})

    threads = [threading.Thread(target=write, args=(field,)) for field in fields]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    config = load_config(path)
    assert [getattr(config, field) for field in fields] == [8] * 5
    assert path.read_text().endswith("} // all\n")


def test_a_lock_that_is_never_released_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "LOCK_S", 0.1)
    with FileLock(path.with_name(".config.json.lock")), pytest.raises(TimeoutError, match="another process has held"):
        change_file(str(path), {("dynamic_on",): False})
