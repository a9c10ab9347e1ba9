"""Version and state folders: whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from online_sao.errors import LearnerError
from online_sao.learner.checkpoints import StateFolders, VersionFolders
from online_sao.learner.scripted import ScriptedTrainer
from online_sao.manifest import Manifest

FULL = OSError(errno.ENOSPC, "No space left on device")


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def test_a_version_is_whole_and_named_by_its_own_hash(tmp_path: Path) -> None:
    version = VersionFolders(tmp_path).write(ScriptedTrainer().export_policy, parent=3)
    folder = Path(version.path)
    assert folder.is_absolute()
    assert folder.parent == tmp_path.resolve()
    manifest = Manifest.read(folder)
    manifest.verify(folder)
    assert (version.sha256, version.parent) == (manifest.sha256, 3)


def test_a_full_disk_leaves_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(faults={"export": [FULL], "save": [FULL]})
    what_to_do = r"No space left on device.*free disk space"
    with pytest.raises(LearnerError, match=what_to_do):
        VersionFolders(tmp_path).write(trainer.export_policy, 0)
    with pytest.raises(LearnerError, match=what_to_do):
        StateFolders(tmp_path).write(trainer.save_state, 1)
    assert names(tmp_path) == []


def test_any_other_failure_leaves_nothing_either(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(faults={"export": [RuntimeError("bug")]})
    with pytest.raises(RuntimeError):
        VersionFolders(tmp_path).write(trainer.export_policy, 0)
    assert names(tmp_path) == []


def test_orphans_are_drafts_and_own_folders_without_a_row(tmp_path: Path) -> None:
    versions = VersionFolders(tmp_path)
    kept = versions.write(ScriptedTrainer().export_policy, 0)
    orphan = versions.write(ScriptedTrainer().export_policy, 0)
    for name in (".draft-policy-1", "base", "notes"):
        (tmp_path / name).mkdir()
    removed = versions.remove_orphans({kept.path})
    assert sorted(removed) == [".draft-policy-1", Path(orphan.path).name]
    assert names(tmp_path) == sorted(["base", "notes", Path(kept.path).name])


def test_states_are_read_newest_first_and_two_are_kept(tmp_path: Path) -> None:
    states = StateFolders(tmp_path)
    written = [states.write(ScriptedTrainer().save_state, updates) for updates in (9, 10, 101)]
    assert states.newest_first(101) == written[:0:-1]
    assert names(tmp_path) == [f.name for f in written[1:]]


def test_a_state_of_the_same_number_is_replaced(tmp_path: Path) -> None:
    states = StateFolders(tmp_path)
    states.write(lambda folder: folder.mkdir(), 5)
    states.write(ScriptedTrainer().save_state, 5)
    (state,) = states.newest_first(5)
    assert names(state) == ["state.json"]


def test_states_of_another_history_are_not_read_and_make_room(tmp_path: Path) -> None:
    """The database was put back to 3 updates; the states of 80 and 90 belong to what is gone."""
    states = StateFolders(tmp_path)
    for updates in (80, 90):
        states.write(ScriptedTrainer().save_state, updates)
    assert states.newest_first(3) == []
    fourth = states.write(ScriptedTrainer().save_state, 4)
    assert states.newest_first(4) == [fourth]
    assert names(tmp_path) == [fourth.name]


def test_drafts_of_states_go_and_are_never_read(tmp_path: Path) -> None:
    states = StateFolders(tmp_path)
    (tmp_path / ".draft-state-000000000007").mkdir()
    assert states.newest_first(99) == []
    assert states.remove_drafts() == [".draft-state-000000000007"]
    assert names(tmp_path) == []


def test_folders_that_are_not_there_yet_hold_nothing(tmp_path: Path) -> None:
    assert StateFolders(tmp_path / "none").newest_first(9) == []
    assert VersionFolders(tmp_path / "none").remove_orphans(()) == []
