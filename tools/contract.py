"""
Refuse breaking changes of ``drakit.backend.v1``, the contract that vendors build programs against.

The contract as it is now is compared with the committed baseline by ``buf breaking``. The baseline
has all that the contract has, so that what was added yesterday is kept as well: additions are
written to it by ``--update``, which refuses anything else. It holds no comments; those may change.

It must not know what the contract means, nor how stubs are made of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tools.programs import go_is_there, go_programs

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = "drakit_proto/backend/v1/backend.proto"
BASELINE = ROOT / "tools" / "baselines" / "backend.v1.txtpb"
RULES = ROOT / "tools" / "buf" / "buf.yaml"
HEADER = """\
# proto-file: google/protobuf/descriptor.proto
# proto-message: google.protobuf.FileDescriptorSet
# The contract as it was last committed. Written by `make proto-baseline`, never by hand.
"""


class ContractError(Exception):
    """The contract cannot be read, or buf cannot run; the message explains why."""


def described(sources: Path, *, comments: bool) -> FileDescriptorSet:
    """
    Compile the contract that is below a folder.

    :param comments: with places in the file, which buf names, and comments.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "contract.binpb")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{sources}", CONTRACT]
        command += [f"--descriptor_set_out={made}", "--include_imports"]
        command += ["--include_source_info"] * comments
        done = subprocess.run(
            command, timeout=60, check=False, text=True, capture_output=True, cwd=sources
        )
        if done.returncode != 0:
            raise ContractError(f"{CONTRACT} cannot be compiled:\n{done.stderr}")
        return FileDescriptorSet.FromString(made.read_bytes())


def read_baseline(path: Path = BASELINE) -> FileDescriptorSet:
    """Read the contract as it was committed."""
    return text_format.Parse(path.read_text(), FileDescriptorSet())


def write_baseline(contract: FileDescriptorSet, path: Path = BASELINE) -> None:
    """Write the contract as text, so that a commit shows what was added."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + text_format.MessageToString(contract))


def breaking_changes(new: FileDescriptorSet, *, old: FileDescriptorSet) -> list[str]:
    """Return what is broken: place, what, and in brackets the rule's name."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"new": new, "old": old}
        for name, contract in files.items():
            Path(folder, f"{name}.binpb").write_bytes(contract.SerializeToString())
        done = subprocess.run(
            [
                *(go_programs("buf") / "buf", "breaking", "new.binpb", "--against", "old.binpb"),
                *("--config", RULES, "--error-format", "json"),
            ],
            cwd=folder,
            # buf keeps nothing of images, but wants a folder of its own in any case.
            env={"BUF_CACHE_DIR": folder, "HOME": folder},
            timeout=60,
            check=False,
            text=True,
            capture_output=True,
        )
    # 100 is for changes that break; any other code but 0 is a run without a result.
    if done.returncode not in (0, 100):
        raise ContractError(f"buf failed with code {done.returncode}:\n{done.stderr}{done.stdout}")
    return [_sentence(json.loads(line)) for line in done.stdout.splitlines()]


def _sentence(problem: dict[str, Any]) -> str:
    # What is gone has no place.
    place = [
        problem.get("path", CONTRACT),
        *(str(problem[k]) for k in ("start_line",) if k in problem),
    ]
    return f"{':'.join(place)}: {problem['message']} ({problem['type']})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write additions to the baseline")
    update = parser.parse_args().update
    if not go_is_there() and not update:
        print("Go is not installed: the contract is not compared with its baseline")
        return 0
    sources = ROOT / "proto"
    plain = described(sources, comments=False)
    if not BASELINE.exists() and update:
        write_baseline(plain)
    old = read_baseline()
    if broken := breaking_changes(described(sources, comments=True), old=old):
        print("\n".join(broken))
        print(
            "this breaks backends that are built against drakit.backend.v1: add to the contract "
            "and change nothing of it, or begin drakit.backend.v2 beside it"
        )
        return 1
    if update:
        write_baseline(plain)
        return 0
    if plain != old:
        print(
            f"{BASELINE.relative_to(ROOT)} does not have all of the contract: "
            "run 'make proto-baseline'"
        )
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ContractError as error:
        sys.exit(str(error))
