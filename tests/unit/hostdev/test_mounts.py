"""The kernel's formats of mounts and swap areas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit_drivers.hostdev.block_usage import MountEntry, parse_mountinfo, parse_swaps, unescape


def escape(text: str) -> str:
    r"""Escape like the kernel's ``mangle``: space, tab, newline, backslash and hash."""
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\#" else c for c in text)


names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))


@given(names)
def test_escaped_characters_are_restored(text):
    assert unescape(escape(text)) == text


@given(root=names, point=names, source=names)
def test_a_mount_is_read_whatever_its_names_are(root, point, source):
    line = (
        f"36 35 98:0 {escape(root)} {escape(point)} rw shared:1 master:2 - ext3 {escape(source)} rw"
    )
    expected = MountEntry(
        number="98:0", root=root, mount_point=point, fs_type="ext3", source=source
    )
    assert parse_mountinfo(line + "\n") == [expected]


def test_optional_fields_may_be_missing():
    (mount,) = parse_mountinfo("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n")
    assert (mount.number, mount.source) == ("254:0", "/dev/vda")


@pytest.mark.parametrize(
    "text",
    [
        "27 1 254:0 / / rw,relatime\n",
        "x\n",
        "27 1 a:b / / rw - ext4 /dev/vda rw\n",
        "a b c - e f g",
    ],
)
def test_a_line_that_is_no_mount_is_an_error(text):
    with pytest.raises(ValueError, match="line of mountinfo"):
        parse_mountinfo(text)


def test_swap_areas():
    text = (
        "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
        "/dev/dm-1                               partition\t8388604\t0\t-2\n"
        "/my\\040swap\\040file\t file\t8\t0\t-3\n"
    )
    assert parse_swaps(text) == ["/dev/dm-1", "/my swap file"]


def test_a_file_that_is_no_list_of_swap_areas_is_an_error():
    with pytest.raises(ValueError, match="not with its header"):
        parse_swaps("")
