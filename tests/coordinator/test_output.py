import os
import resource
import stat
import threading
from pathlib import Path

import pytest

from monitor.coordinator.output import OutputError, base_directory, prepare, write_whole


@pytest.fixture
def _locked(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)


@pytest.fixture
def _as_an_ordinary_user():
    """Root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_output_goes_below_the_working_directory_unless_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert base_directory({}) == tmp_path / "monitor_output"
    assert base_directory({"MONITOR_OUTPUT_DIR": ""}) == tmp_path / "monitor_output"


def test_the_variable_names_the_base_directory():
    assert base_directory({"MONITOR_OUTPUT_DIR": "/data/run"}) == Path("/data/run")


def test_the_base_directory_stays_when_training_changes_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = base_directory({"MONITOR_OUTPUT_DIR": "out"})
    monkeypatch.chdir("/")
    assert base == tmp_path / "out"


def test_a_leading_tilde_is_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert base_directory({"MONITOR_OUTPUT_DIR": "~/out"}) == tmp_path / "out"


def test_the_home_of_no_one_known_is_a_clear_error():
    with pytest.raises(OutputError, match="MONITOR_OUTPUT_DIR is '~no-such-user/out'"):
        base_directory({"MONITOR_OUTPUT_DIR": "~no-such-user/out"})


def test_preparing_makes_the_directory_with_its_parents_and_leaves_it_empty(tmp_path):
    directory = prepare(tmp_path / "a" / "b")
    assert directory.is_dir()
    assert list(directory.iterdir()) == []


def test_preparing_twice_is_preparing_once(tmp_path):
    assert prepare(prepare(tmp_path / "a")) == tmp_path / "a"


def test_a_file_in_the_way_is_named_with_what_to_do(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match=rf"{tmp_path}/out: .*name another one in MONITOR_OUTPUT_DIR"):
        prepare(tmp_path / "out")


def test_a_file_above_is_a_clear_error_too(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="Not a directory"):
        prepare(tmp_path / "out" / "below")


@pytest.mark.usefixtures("_locked", "_as_an_ordinary_user")
def test_a_directory_that_may_not_be_written_is_found_out(tmp_path):
    with pytest.raises(OutputError, match=r"Permission denied.*Make it a directory that this process may write"):
        prepare(tmp_path / "locked")


def test_a_whole_file_replaces_the_one_before(tmp_path):
    write_whole(tmp_path / "file", b"one")
    write_whole(tmp_path / "file", b"two", durable=True)
    assert (tmp_path / "file").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_whole_file_has_the_rights_that_any_new_file_gets(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_whole(tmp_path / "whole", b"")
    plain, whole = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "whole"))
    assert whole == plain


@pytest.mark.parametrize(("durable", "waited_for"), [(True, [(4, b"old")]), (False, [])])
def test_a_file_that_is_to_survive_a_crash_is_on_the_disk_before_it_replaces_the_one_before(
    tmp_path, monkeypatch, durable, waited_for
):
    path, seen = tmp_path / "manifest.json", []
    path.write_bytes(b"old")

    def fsync(descriptor, reach_the_disk=os.fsync):
        reach_the_disk(descriptor)
        seen.append((os.fstat(descriptor).st_size, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(path, b"new!", durable=durable)
    assert seen == waited_for
    assert path.read_bytes() == b"new!"


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        write_whole(tmp_path / "file", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_takes_no_more_is_an_error_and_no_torn_file(tmp_path):
    write_whole(tmp_path / "file", b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(tmp_path / "file", b"after" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"before"}


def test_a_reader_never_finds_a_torn_file(tmp_path):
    path = tmp_path / "file"
    contents = {bytes([65 + i]) * 100_000 for i in range(4)}
    write_whole(path, min(contents))
    writers = [threading.Thread(target=lambda c=c: [write_whole(path, c) for _ in range(20)]) for c in contents]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(path.read_bytes())
    assert seen <= contents
