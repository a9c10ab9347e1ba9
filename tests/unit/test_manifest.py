"""The manifest: what a version folder must hold, to the byte."""

import json
import struct
from pathlib import Path

import pytest

from online_sao.errors import VersionFolderError
from online_sao.manifest import MANIFEST_NAME, Manifest, hash_file, publish_folder, read_header
from online_sao.types import ProbeTokens

PROBES = ProbeTokens((1, 2, 3), (-0.5, -0.25))


def write_safetensors(path: Path, values: bytes = b"\x01\x02\x03\x04") -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "w": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [0, 4]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "version"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors")
    (folder / MANIFEST_NAME).write_text(Manifest.describe(folder, PROBES).to_json())
    return folder


def test_written_manifest_reads_back_and_its_folder_verifies(folder: Path) -> None:
    manifest = Manifest.read(folder)
    assert manifest.tensors == {"w": ("BF16", (2, 1))}
    assert manifest.probes == PROBES
    manifest.verify(folder)


def test_hash_is_the_files_own_sha256(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert hash_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_one_changed_byte_is_found(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", b"\x01\x02\x03\x05")
    with pytest.raises(VersionFolderError, match=r"model\.safetensors"):
        Manifest.read(folder).verify(folder)


def test_file_that_is_missing_or_one_too_many_is_found(folder: Path) -> None:
    write_safetensors(folder / "more.safetensors")
    with pytest.raises(VersionFolderError, match=r"more\.safetensors"):
        Manifest.read(folder).verify(folder)


@pytest.mark.parametrize("keep", [4, 40, -1])
def test_weights_cut_short_are_found(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(VersionFolderError, match=r"cut short|no safetensors"):
        read_header(path)


def test_folder_without_manifest_is_not_whole(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(VersionFolderError, match="not whole"):
        Manifest.read(folder)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 9}', '{"format": 1}'])
def test_manifest_that_cannot_be_read_is_named(folder: Path, text: str) -> None:
    (folder / MANIFEST_NAME).write_text(text)
    with pytest.raises(VersionFolderError, match=r"manifest\.json"):
        Manifest.read(folder)


def test_manifest_whose_hash_was_edited_contradicts_itself(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    data = json.loads(path.read_text())
    data["files"]["model.safetensors"] = "0" * 64
    path.write_text(json.dumps(data))
    with pytest.raises(VersionFolderError, match="contradicts"):
        Manifest.read(folder)


def test_published_folder_appears_under_its_name_alone(folder: Path, tmp_path: Path) -> None:
    publish_folder(folder, tmp_path / "final")
    assert not folder.exists()
    Manifest.read(tmp_path / "final").verify(tmp_path / "final")


def test_all_is_on_disk_before_the_name_folders_inside_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    everything = {folder, *folder.rglob("*")}
    synced: list[Path] = []
    monkeypatch.setattr("online_sao.manifest._fsync", synced.append)
    publish_folder(folder, tmp_path / "final")
    assert set(synced[:-1]) == everything
    assert synced[-1] == tmp_path
    Manifest.read(tmp_path / "final").verify(tmp_path / "final")
