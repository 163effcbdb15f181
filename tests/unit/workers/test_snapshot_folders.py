"""Folders that several processes share: whole or not there, kept while held, trimmed to a budget."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers import snapshot_folders
from workers.snapshot_files import manifest_of
from workers.snapshot_folders import SnapshotFolders

FILES = {"weights": bytes(1000)}
_HOLDER = """
import sys
from pathlib import Path
from workers.snapshot_folders import SnapshotFolders
held = SnapshotFolders(Path(sys.argv[1]), budget_bytes=0).hold(sys.argv[2])
print(held.path.name, flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def aged(folders: SnapshotFolders, *snapshot_ids: str) -> None:
    """As if these had been used long ago, one after another."""
    for i, snapshot_id in enumerate(snapshot_ids):
        os.utime(folders.root / snapshot_id / "manifest.json", (1000 + i, 1000 + i))


def test_a_folder_is_not_there_until_it_is_whole(tmp_path: Path) -> None:
    folders = SnapshotFolders(tmp_path, budget_bytes=0)
    with folders.adding("s", manifest_of(FILES)) as folder:
        (folder / "weights").write_bytes(FILES["weights"])
        assert folders.hold("s") is None
    held = folders.hold("s")
    assert held is not None and held.damaged_file() is None
    held.close()


def test_nothing_is_left_of_a_folder_that_could_not_be_written(tmp_path: Path) -> None:
    folders = SnapshotFolders(tmp_path, budget_bytes=0)
    with pytest.raises(OSError), folders.adding("s", manifest_of(FILES)):
        raise OSError("no space left on device")
    assert names(tmp_path) == set()


def test_the_second_to_write_a_snapshot_changes_nothing(tmp_path: Path) -> None:
    folders = SnapshotFolders(tmp_path, budget_bytes=0)
    folders.add("s", FILES)
    before = os.stat(tmp_path / "s").st_ino
    folders.add("s", FILES)
    assert os.stat(tmp_path / "s").st_ino == before and names(tmp_path) == {"s"}


def test_the_least_recently_used_goes_first_and_what_is_kept_stays(tmp_path: Path) -> None:
    folders = SnapshotFolders(tmp_path, budget_bytes=2500)
    for snapshot_id in "abcd":
        folders.add(snapshot_id, FILES)
    aged(folders, *"abcd")
    held = folders.hold("b")
    assert held is not None
    held.close()
    folders.trim(keep={"a"})
    assert names(tmp_path) == {"a", "b"}


def test_what_another_process_holds_stays_until_that_ends(tmp_path: Path) -> None:
    folders = SnapshotFolders(tmp_path, budget_bytes=0)
    folders.add("s", FILES)
    command = [sys.executable, "-c", _HOLDER, str(tmp_path), "s"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "s\n"
        folders.trim()
        assert names(tmp_path) == {"s"}
        other.kill()
    folders.trim()
    assert names(tmp_path) == set()


def test_what_a_dead_process_left_half_way_goes_in_time(tmp_path: Path) -> None:
    folders = SnapshotFolders(tmp_path, budget_bytes=2**20)
    for name in (".new-old", ".new-young"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".new-old", (1000, 1000))
    folders.trim()
    assert names(tmp_path) == {".new-young"}


def test_a_trim_is_due_when_the_folder_has_grown_by_much_or_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks through everything that is there, which must not happen with every snapshot."""
    folders = SnapshotFolders(tmp_path, budget_bytes=1_000_000)
    assert folders.is_trim_due
    folders.trim()
    folders.add("small", {"file": b"x" * 20_000})
    assert not folders.is_trim_due
    folders.add("another", {"file": b"x" * 20_000})
    assert folders.is_trim_due
    folders.trim()
    assert not folders.is_trim_due
    monkeypatch.setattr(snapshot_folders, "_TRIM_EVERY_S", -1.0)
    assert folders.is_trim_due
