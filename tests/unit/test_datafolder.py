"""The data folder: one service at a time, a key only its owner reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from online_sao.datafolder import DataFolder
from online_sao.errors import ConfigError, DataFolderInUse

HOLD = """
import sys, pathlib
from online_sao.datafolder import DataFolder
with DataFolder(pathlib.Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    folder = DataFolder(tmp_path / "data")
    folder.create()
    return folder


def test_second_service_is_refused_and_told_who_has_the_folder(folder: DataFolder) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DataFolderInUse, match=str(holder.pid)), folder.lock():
            pass
        holder.kill()
    with folder.lock():
        pass  # the lock died with its process


def test_made_key_is_printed_once_and_only_its_owner_reads_the_file(folder: DataFolder) -> None:
    key, made = folder.ensure_key(None)
    assert made
    assert key.startswith("sk-sao-")
    assert len(key) > 40
    assert folder.key_file.stat().st_mode & 0o777 == 0o600
    assert folder.ensure_key(None) == (key, False)


def test_given_key_wins_and_is_found_by_the_chat(folder: DataFolder) -> None:
    folder.ensure_key(None)
    assert folder.ensure_key("mine") == ("mine", False)
    assert folder.read_key() == "mine"


def test_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match="/dev/null"):
        DataFolder(Path("/dev/null/data")).create()
