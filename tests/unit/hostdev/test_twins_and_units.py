"""Only one pod gets a piece of hardware, whichever of its names, nodes and links pods ask for."""

from __future__ import annotations

import pytest

from tests.fakes.hostdev import ONE, TWO, Rig
from tests.fakes.sysfs import FakeHost, policy

BY_ID = "serial/by-id/usb-CP2102_0001-if00-port0"


# ------------------------------------------------------------ links


def twins(host: FakeHost, *, link_to: str) -> None:
    """Two adapters with one serial number: udev's database lists one link for both."""
    for index in range(2):
        host.adapter(str(index + 1), f"ttyUSB{index}", serial="0001")
        host.udev_entry(f"c188:{index}", f"S:{BY_ID}", "E:ID_BUS=usb")
    host.link(BY_ID, f"../../{link_to}")


@pytest.mark.parametrize(("link_to", "other"), [("ttyUSB0", "ttyUSB1"), ("ttyUSB1", "ttyUSB0")])
async def test_a_link_selects_the_device_to_which_it_leads_and_its_twin_is_reported(
    host, link_to, other
):
    twins(host, link_to=link_to)
    rig = Rig(host, {"zwave": policy("tty", f"/dev/{BY_ID}"), "all": policy("tty", "/dev/tty*")})
    found = await rig.devices()
    facts = {each.attributes["policy"]: each.attributes for each in found.values()}
    assert facts["zwave"]["path"] == f"/dev/{link_to}"
    assert facts["zwave"]["byIdLink"] == f"/dev/{BY_ID}"
    assert facts["all"]["path"] == f"/dev/{other}"
    assert "byIdLink" not in facts["all"]
    reason, message = (await rig.rejected())[f"/dev/{other}"]
    assert reason == "NoIdentity"
    assert f"/dev/{BY_ID}, which leads to that device" in message
    assert "match each device by usb.path" in message


async def test_only_the_container_of_one_twin_gets_their_link(host):
    twins(host, link_to="ttyUSB1")
    links = {"container": {"byIdLinks": "Always"}}
    rig = Rig(host, {"zwave": policy("tty", "/dev/ttyUSB*", **links)})
    nodes = []
    for name, claim in zip(await rig.paths(), (ONE, TWO), strict=True):
        nodes += (await rig.prepare(name, claim)).device_nodes
    assert [(node.path, node.minor) for node in nodes] == [
        ("/dev/ttyUSB0", 0),
        ("/dev/ttyUSB1", 1),
        (f"/dev/{BY_ID}", 1),
    ]


async def test_a_link_of_the_database_that_leads_nowhere_is_not_a_link(host):
    twins(host, link_to="ttyUSB9")
    rig = Rig(host, {"zwave": policy("tty", f"/dev/{BY_ID}")})
    assert await rig.devices() == {}
    assert await rig.rejected() == {}
