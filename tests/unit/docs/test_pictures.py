"""The pictures of the documentation: in light and dark, complete in themselves, and on a page."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from drakit_nodeplugin.config import DeviceHealthSettings, Devices
from tests.unit.docs.listings import ROOT
from tools.pictures.terminals import FOLDER

FILES = sorted(FOLDER.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_loads_nothing(path):
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    assert "prefers-color-scheme: dark" in text
    # A URL in text is only shown.
    values = [value for each in root.iter() for value in each.attrib.values()]
    values += [each.text or "" for each in root.iter(f"{SVG}style")]
    loads = re.compile(r"https?://|@import|@font-face|url\((?!#)")
    assert [each for each in values if loads.search(each)] == []
    assert not [*root.iter(f"{SVG}script")]


def test_the_life_of_a_device_shows_the_defaults():
    text = (FOLDER / "life-of-a-device.svg").read_text()
    health, devices = DeviceHealthSettings(), Devices()
    assert f"recoveryPeriod ({health.recovery_period:g} s)" in text
    assert f"evictionDelay ({health.eviction_delay:g} s)" in text
    assert f"endpointStopGracePeriod ({devices.endpoint_stop_grace_period / 60:g} min)" in text


def test_every_picture_is_on_a_page():
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert [path.name for path in FILES if f"pictures/{path.name})" not in pages] == []
