"""The metadata files of claims: each claim has exactly its files, and a failure affects only it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from drakit_nodeplugin.state.metadata_files import MetadataFiles
from drakit_nodeplugin.state.records import StoredClaim, StoredDevice, checksum, dump, load

DRIVER = "camera.example.com"
A, B = (f"3f0d9a52-7c1c-4ad3-a7de-0f6bb5d1fd7{n}" for n in "ab")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "drivers" / DRIVER / "metadata"


@pytest.fixture
def files(folder: Path) -> MetadataFiles:
    return MetadataFiles(DRIVER, folder)


def claim(uid: str, *requests: str, pod_claim: str | None = None, generation: int = 1):
    """A claim with a device for each request, and the requests' content."""
    return StoredClaim(
        uid=uid,
        namespace="lab",
        name=f"claim-{uid[-1]}",
        state="prepared",
        boot_id="boot-1",
        devices=tuple(
            StoredDevice(pool="node-1", device=f"cam-{index}", request=request)
            for index, request in enumerate(requests)
        ),
        metadata={request: f'{{"name":"{request}"}}' for request in requests},
        metadata_generation=generation,
        pod_claim_name=pod_claim,
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def content(path: Path) -> dict:
    return json.loads(path.read_text().splitlines()[0])


def test_a_claim_has_a_file_for_each_request_that_containers_can_read(files, folder):
    before = os.umask(0o077)
    try:
        assert files.place([claim(A, "front/big", "back"), claim(B, "front")]) == {}
    finally:
        os.umask(before)
    assert names(folder) == {f"{A}_front.json", f"{A}_back.json", f"{B}_front.json"}
    front = folder / f"{A}_front.json"
    assert front.stat().st_mode & 0o777 == 0o644
    assert content(front)["metadata"]["uid"] == A
    assert content(front)["requests"] == [{"name": "front/big"}]
    assert files.unlink([A]) == {}
    assert names(folder) == {f"{B}_front.json"}


def test_the_first_device_of_each_request_mounts_its_file(files, folder):
    mounts = files.mounts(claim(A, "front", "front", "back", pod_claim="my-cam"))
    assert {index: mount.host_path for index, mount in mounts.items()} == {
        0: f"{folder}/{A}_front.json",
        2: f"{folder}/{A}_back.json",
    }
    root = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/my-cam"
    assert mounts[2].container_path == f"{root}/back/{DRIVER}-metadata.json"
    assert "ro" in mounts[0].options


def test_a_change_replaces_the_file_and_removes_those_of_former_requests(files, folder):
    files.place([claim(A, "front", "back")])
    running = (folder / f"{A}_front.json").open()
    assert files.place([claim(A, "front", generation=2)]) == {}
    assert names(folder) == {f"{A}_front.json"}
    assert content(folder / f"{A}_front.json")["metadata"]["generation"] == 2
    assert '"generation":1' in running.read(), "a running container keeps its own"
    running.close()
    assert files.place([replace(claim(A), metadata={})]) == {}
    assert names(folder) == set()


def test_an_unchanged_file_is_not_written_again(files, folder):
    files.place([claim(A, "front")])
    inode = (folder / f"{A}_front.json").stat().st_ino
    assert files.place([claim(A, "front")]) == {}
    assert (folder / f"{A}_front.json").stat().st_ino == inode


def test_a_removed_file_is_missing_until_it_is_placed(files, folder):
    files.place([claim(A, "front", "back"), claim(B, "front")])
    assert files.missing() == set()
    (folder / f"{A}_back.json").unlink()
    assert files.missing() == {A}
    files.place([claim(A, "front", "back")])
    assert files.missing() == set()


def test_a_later_process_knows_the_files_of_an_earlier_one(files, folder):
    files.place([claim(A, "front"), claim(B, "front")])
    later = MetadataFiles(DRIVER, folder)
    assert later.missing() == set()
    assert not later.differs(claim(A, "front"))
    assert later.differs(claim(A, "front", generation=2))
    assert later.differs(claim(A, "front", "back"))
    assert later.unlink([A, "unknown"]) == {}
    assert names(folder) == {f"{B}_front.json"}


def test_a_start_removes_half_written_files_and_those_that_nobody_needs(files, folder):
    files.place([claim(A, "front"), claim(B, "front")])
    (folder / f".{A}_front.json.0123abcd.drakit").write_text("{")
    later = MetadataFiles(DRIVER, folder)
    later.clean({A})
    assert names(folder) == {f"{A}_front.json"}


def test_a_driver_without_metadata_has_no_directory(files, folder):
    assert files.place([replace(claim(A, "front"), metadata={})]) == {}
    assert files.unlink([A]) == {}
    files.clean({A})
    assert (files.missing(), files.mounts(replace(claim(A, "front"), metadata={}))) == (set(), {})
    assert not folder.exists()


def test_a_file_that_cannot_be_written_fails_its_claim_alone(files, folder):
    folder.mkdir(parents=True)
    (folder / f"{A}_front.json").mkdir()
    assert set(files.place([claim(A, "front"), claim(B, "front")])) == {A}
    assert content(folder / f"{B}_front.json")["metadata"]["uid"] == B
    assert set(files.unlink([A, B])) == {A}
    assert names(folder) == {f"{A}_front.json"}


def test_the_checkpoint_keeps_the_content_and_reads_rows_of_earlier_versions():
    stored = claim(A, "front", pod_claim="my-cam", generation=4)
    body = dump(stored)
    assert load(body, expected=checksum(body)) == stored
    fields = json.loads(body)
    for name in ("metadata", "metadata_generation", "pod_claim_name"):
        del fields[name]
    earlier = json.dumps(fields).encode()
    loaded = load(earlier, expected=checksum(earlier))
    assert (loaded.metadata, loaded.metadata_generation, loaded.pod_claim_name) == ({}, 0, None)
