"""Version and state folders on disk: whole or not there at all.

A folder is written under a draft's name, fsynced, renamed. A draft, or a folder that no database
row names, is what a dead learner left; it is deleted at the next start. No torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from online_sao.errors import LearnerError
from online_sao.manifest import Manifest, publish_folder
from online_sao.types import NewVersion, new_uuid7

DRAFT = ".draft-"
VERSION = "policy-"
STATE = "state-"
KEPT_STATES = 2


class VersionFolders:
    """The learner's own folders below the versions directory; others' are never touched."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, export: Callable[[Path], None], parent: int) -> NewVersion:
        """A new version, whole on disk, for the row that is yet to come.

        Raises LearnerError, with nothing left behind, when it cannot be written.
        """
        folder = _publish(self._root, f"{VERSION}{new_uuid7()}", export)
        return NewVersion(str(folder), Manifest.read(folder).sha256, parent)

    def remove(self, version: NewVersion) -> None:
        """Delete a version that got no row."""
        shutil.rmtree(version.path, ignore_errors=True)

    def remove_orphans(self, known: Collection[str]) -> list[str]:
        """Delete drafts and the learner's folders that are not among the paths `known`."""
        return _remove(
            folder
            for folder in _folders(self._root, VERSION)
            if folder.name.startswith(DRAFT) or str(folder) not in known
        )


class StateFolders:
    """The learner's full states, by the number of updates they come after; the last two.

    A number beyond the database's own count is of another history (a database that was put
    back): such a state is never read, and goes when the next one is written.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, save: Callable[[Path], None], updates: int) -> Path:
        """The state after `updates` updates; older ones go. Raises LearnerError as `write` above.

        A state of that number that is already there is replaced: after a reload the same number
        can be reached on another way.
        """
        final = self._root / _state_name(updates)
        if final.exists():
            shutil.rmtree(final)
        folder = _publish(self._root, final.name, save)
        kept = set(self.newest_first(updates)[:KEPT_STATES])
        _remove(path for path in self._whole() if path not in kept)
        return folder

    def newest_first(self, updates: int) -> list[Path]:
        """Whole states of at most `updates` updates."""
        newest = _state_name(updates)
        return sorted((f for f in self._whole() if f.name <= newest), reverse=True)

    def _whole(self) -> list[Path]:
        return [f for f in _folders(self._root, STATE) if not f.name.startswith(DRAFT)]

    def remove_drafts(self) -> list[str]:
        """Delete what was being written when a learner died."""
        return _remove(f for f in _folders(self._root, STATE) if f.name.startswith(DRAFT))


def _state_name(updates: int) -> str:
    return f"{STATE}{updates:012d}"


def _publish(root: Path, name: str, write: Callable[[Path], None]) -> Path:
    draft, final = root / f"{DRAFT}{name}", root.resolve() / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        write(draft)
        publish_folder(draft, final)
    except OSError as error:
        raise LearnerError(
            f"{final} could not be written ({error.strerror or error}): free disk space or mend "
            "the folder; the learner tries again, and what serves is not concerned"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _folders(root: Path, prefix: str) -> list[Path]:
    if not root.is_dir():
        return []
    names = (prefix, f"{DRAFT}{prefix}")
    return [f for f in root.resolve().iterdir() if f.is_dir() and f.name.startswith(names)]


def _remove(folders: Iterable[Path]) -> list[str]:
    removed = []
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder.name)
    return removed
