"""The files of the images: libraries without the data that no process loads."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from e2e.images.root import stripped

MODULES = ("pydantic_core._pydantic_core", "uvloop.loop", "yaml._yaml")


@pytest.mark.parametrize("name", MODULES)
def test_a_stripped_module_is_smaller_and_python_loads_it(tmp_path, name):
    path = Path(str(import_module(name).__file__))
    content = path.read_bytes()
    less = stripped(content)
    assert len(less) <= len(content)
    assert content.startswith(less[:0x28])
    place = tmp_path / path.name
    place.write_bytes(less)
    script = (
        "import sys\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location({name!r}, {str(place)!r})\n"
        f"sys.modules[{name!r}] = module = module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        f"print(module.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(place), done.stderr


def test_the_data_for_debuggers_of_a_wheel_goes():
    path = Path(str(import_module("uvloop.loop").__file__))
    assert len(stripped(path.read_bytes())) < path.stat().st_size / 4


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01\x01"])
def test_what_is_not_an_elf_file_of_64_bits_stays(content):
    assert stripped(content) == content
