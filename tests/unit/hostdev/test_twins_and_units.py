"""Only one pod gets a piece of hardware, whichever of its names, nodes and links pods ask for."""

from __future__ import annotations

import asyncio

import pytest

from drakit import AllocatedClaim, AllocatedDevice, DriverError, HeldDevice
from tests.fakes.hostdev import ONE, TWO, Rig
from tests.fakes.sysfs import FakeHost, policy, prepared, unreadable
from tests.fakes.usb_descriptors import FTDI, MODEM, UVC_CAMERA

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


async def test_a_loop_of_links_hides_no_device(host):
    host.adapter("1", "ttyUSB0", serial="A1")
    host.udev_entry("c188:0", f"S:{BY_ID}")
    host.link(BY_ID, BY_ID.rpartition("/")[2])
    (device,) = (await Rig(host, {"all": policy("tty", "/dev/ttyUSB*")}).devices()).values()
    assert (device.taints, "byIdLink" in device.attributes) == ((), False)


# ------------------------------------------------------------ units

USB = "pci0000:00/0000:00:14.0/usb1/1-1"
GPU = "pci0000:00/0000:01:00.0"
SHARED = {"sharing": {"mode": "Users", "users": 2}}
ADAPTER = {"vendorID": "0403", "productID": "6001"}


@pytest.fixture
def machine(host: FakeHost) -> FakeHost:
    """Two of everything: adapters with two connectors, cameras and GPUs, each with all nodes."""
    for port in (1, 2):
        usb = USB.replace("1-1", f"1-{port}")
        host.adapter(str(port), f"ttyUSB{2 * port}", serial=f"A{port}")
        host.usb_device(usb, f"189:{port}", FTDI, node=True)
        host.write(host.sys / "devices" / usb, idVendor="0403", idProduct="6001")
        second = f"{usb}/1-{port}:1.1"
        host.parent(second, "usb", bInterfaceNumber="01")
        tty = f"ttyUSB{2 * port + 1}"
        host.device(f"{second}/{tty}/tty/{tty}", f"188:{2 * port + 1}", subsystem="tty", node=True)
        camera = USB.replace("1-1", f"1-{port + 4}")
        host.usb_device(camera, f"189:{port + 4}", UVC_CAMERA, node=True)
        host.parent(f"{camera}/1-{port + 4}:1.0", "usb", bInterfaceNumber="00")
        for n in range(2):
            video = f"video{2 * port + n}"
            host.device(f"{camera}/1-{port + 4}:1.0/video4linux/{video}", f"81:{2 * port + n}",
                        subsystem="video4linux", index=str(n), node=True)  # fmt: skip
        host.device(f"{camera}/media{port}", f"235:{port}", subsystem="media", node=True)
        gpu = GPU.replace("01:", f"0{port}:")
        host.parent(gpu, "pci", vendor="0x1002")
        for kernel, minor in ((f"card{port}", port), (f"renderD{127 + port}", 127 + port)):
            host.device(f"{gpu}/drm/{kernel}", f"226:{minor}", subsystem="drm",
                        devname=f"dri/{kernel}", node=True)  # fmt: skip
    return host


def by_path(devices: dict) -> dict[str, str]:
    return {str(each.attributes["path"]): name for name, each in devices.items()}


TTY, BUS = policy("tty", "/dev/ttyUSB*"), {"match": [{"subsystem": "usb", "usb": ADAPTER}]}
VIDEO, MEDIA = policy("video4linux", "/dev/video*"), policy("media", "/dev/media*")
CARD, RENDER = policy("drm", "/dev/dri/card*"), policy("drm", "/dev/dri/renderD*")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(TTY, BUS, id="tty-and-usb"),
        pytest.param(BUS, TTY, id="usb-and-tty"),
        pytest.param(VIDEO, MEDIA, id="video-and-media"),
        pytest.param(CARD, RENDER, id="card-and-render"),
        pytest.param(CARD | SHARED, RENDER, id="one-shares"),
    ],
)
async def test_two_policies_for_nodes_of_one_unit_conflict_and_the_older_one_gets_it(
    machine, one, other
):
    rig = Rig(machine, {"one": one, "other": other})
    inventory = await rig.scan()
    assert {each.attributes["policy"] for each in inventory.devices} == {"one"}
    of_one, of_other = inventory.policies
    assert {each.policy for each in of_one.conflicts} == {"other"}
    assert {each.policy for each in of_other.conflicts} == {"one"}
    assert of_other.matched >= 2


@pytest.mark.parametrize("order", [("bus", "tty"), ("tty", "bus")])
async def test_a_policy_whose_node_is_refused_leaves_the_other_nodes_to_others(host, order):
    """The bus node of a modem is dangerous."""
    host.parent("pci0000:00/0000:00:14.0", "pci")
    for number in (1, 2):
        usb = USB.replace("1-1", f"1-{number}")
        host.usb_device(usb, f"189:{number}", MODEM, node=True)
        tty = f"ttyACM{number}"
        host.device(f"{usb}/1-{number}:1.0/tty/{tty}", f"166:{number}", subsystem="tty", node=True)
    specs = {"bus": policy("usb", "/dev/bus/usb/001/*"), "tty": policy("tty", "/dev/tty*")}
    rig = Rig(host, {name: specs[name] for name in order})
    assert by_path(await rig.devices()).keys() == {"/dev/ttyACM1", "/dev/ttyACM2"}
    assert {reason for reason, _ in (await rig.rejected()).values()} == {"Dangerous"}
    assert not any(each.conflicts for each in (await rig.scan()).policies)


async def test_policies_that_share_a_gpu_publish_its_nodes_side_by_side(machine):
    rig = Rig(machine, {"card": CARD | SHARED, "render": RENDER | SHARED})
    found = await rig.devices()
    assert len(found) == 8
    await rig.prepare(next(iter(found)), ONE)
    assert (await rig.devices()).keys() == found.keys()
    assert not any(each.taints for each in (await rig.devices()).values())
    assert not any(each.conflicts for each in (await rig.scan()).policies)


async def test_policies_of_two_subsystems_that_share_a_camera_prepare_both_nodes(machine):
    rig = Rig(machine, {"video": VIDEO | SHARED, "media": MEDIA | SHARED})
    names = by_path(await rig.devices())
    for path, claim in (("/dev/video2", ONE), ("/dev/media1", TWO)):
        await rig.prepare(names[path], claim)
        assert by_path(await rig.devices()) == names


async def test_a_unit_that_a_claim_holds_as_a_whole_is_not_shared_under_another_node(machine):
    shares = {"sharing": {"mode": "Capacity", "users": 2}}
    rig = Rig(machine, {"card": CARD})
    names = by_path(await rig.devices())
    await rig.prepare(names["/dev/dri/card1"])
    rig.apply({"card": CARD | shares, "render": RENDER | shares})
    found = await rig.devices()
    free = {name: each for name, each in found.items() if not each.taints}
    assert by_path(free).keys() == {"/dev/dri/card2", "/dev/dri/renderD129"}
    reason, message = (await rig.rejected())["/dev/dri/renderD128"]
    assert reason == "InUse"
    assert "claim default/one holds it as device" in message


@pytest.mark.parametrize(
    ("specs", "held", "in_use"),
    [
        pytest.param([TTY, BUS], "/dev/ttyUSB2", {"/dev/bus/usb/001/002"}, id="tty-then-usb"),
        pytest.param(
            [TTY, BUS], "/dev/bus/usb/001/002", {"/dev/ttyUSB2", "/dev/ttyUSB3"}, id="usb-then-tty"
        ),
        pytest.param(
            [VIDEO, MEDIA], "/dev/video2", {"/dev/video3", "/dev/media1"}, id="one-of-a-camera"
        ),
        pytest.param([CARD, RENDER], "/dev/dri/card1", {"/dev/dri/renderD128"}, id="card"),
        pytest.param([RENDER, CARD], "/dev/dri/renderD129", {"/dev/dri/card2"}, id="render"),
    ],
)
@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
async def test_a_held_unit_is_in_use_under_its_other_nodes_and_its_twin_is_free(
    machine, specs, held, in_use, restarts
):
    policies = {"all": {"match": [match for spec in specs for match in spec["match"]]}}
    rig = Rig(machine, policies)
    before = by_path(await rig.devices())
    await rig.prepare(before[held])
    if restarts:
        rig.restart(policies)
    after = by_path(await rig.devices())
    assert after.items() <= before.items()
    assert before.keys() - after.keys() == in_use
    rejected = await rig.rejected()
    assert rejected.keys() == in_use
    for reason, message in rejected.values():
        assert reason == "InUse"
        assert message.startswith(f"claim default/one holds it as device {before[held]}")
    for path in in_use:
        with pytest.raises(DriverError, match="claim default/one holds it"):
            await rig.prepare(before[path], TWO)
    rig.holds.clear()
    assert by_path(await rig.devices()) == before


async def test_a_unit_stays_with_the_policy_of_its_holder(machine):
    rig = Rig(machine, {"older": policy("tty", "/dev/none"), "raw": BUS})
    before = by_path(await rig.devices())
    await rig.prepare(before["/dev/bus/usb/001/002"])
    rig.restart({"older": TTY, "raw": BUS})
    after = by_path(await rig.devices())
    assert after.keys() == {"/dev/bus/usb/001/002", "/dev/ttyUSB4", "/dev/ttyUSB5"}
    rig.holds.clear()
    rig.restart({"older": TTY, "raw": BUS})
    assert {path for path in by_path(await rig.devices()) if "usb/" in path} == set()


async def test_a_bus_node_is_in_use_while_a_claim_has_the_number_of_a_node_below_it(machine):
    """The container of the claim can open the serial port under the bus node."""
    rig = Rig(machine, {"serial": TTY})
    before = by_path(await rig.devices())
    await rig.prepare(before["/dev/ttyUSB2"])
    for port in (1, 2):
        machine.unplug(machine.sys / f"devices/{USB.replace('1-1', f'1-{port}')}")
    for port, tty in ((3, "ttyUSB2"), (4, "ttyUSB6")):
        usb = USB.replace("1-1", f"1-{port}")
        machine.adapter(str(port), tty, serial="C3")
        machine.usb_device(usb, f"189:{port}", FTDI, node=True)
        machine.write(machine.sys / "devices" / usb, idVendor="0403", idProduct="6001")
    rig.apply({"raw": BUS})
    for _ in range(2):
        assert by_path(await rig.devices()).keys() == {"/dev/bus/usb/001/005"}
        reason, message = (await rig.rejected())["/dev/bus/usb/001/004"]
        assert (reason, "number 188:2, which claim default/one" in message) == ("InUse", True)
        rig.restart({"raw": BUS})
    rig.holds.clear()
    assert len(await rig.devices()) == 2


async def test_the_connectors_of_an_adapter_are_claimed_one_by_one(machine):
    """As on a stick with a Zigbee and a Z-Wave radio."""
    specs = {"zigbee": policy("tty", "/dev/ttyUSB[24]"), "zwave": policy("tty", "/dev/ttyUSB[35]")}
    rig = Rig(machine, specs)
    before = by_path(await rig.devices())
    assert len(before) == 4
    await rig.prepare(before["/dev/ttyUSB2"], ONE)
    assert by_path(await rig.devices()) == before
    await rig.prepare(before["/dev/ttyUSB3"], TWO)
    assert not any(each.conflicts for each in (await rig.scan()).policies)


async def test_two_nodes_of_a_unit_that_are_prepared_at_once_have_one_tenant(machine):
    """Before the node plugin reports either as held."""
    rig = Rig(machine, {"gpu": policy("drm", "/dev/dri/*")})
    names = by_path(await rig.devices())
    claims = [
        AllocatedClaim(
            claim=claim,
            devices=(AllocatedDevice(name=names[f"/dev/dri/{node}"], pool="", request="gpu"),),
        )
        for claim, node in ((ONE, "card1"), (TWO, "renderD128"))
    ]
    answers = await asyncio.gather(*(rig.driver.prepare_claims([each]) for each in claims))
    first, second = (answer[each.claim.uid] for answer, each in zip(answers, claims, strict=True))
    assert not isinstance(first, Exception)
    assert "claim default/one holds it as device" in str(second)


async def test_one_claim_can_have_several_nodes_of_a_unit(machine):
    rig = Rig(machine, {"gpu": policy("drm", "/dev/dri/*")})
    names = by_path(await rig.devices())
    pair = [names[path] for path in ("/dev/dri/card1", "/dev/dri/renderD128")]
    devices = [AllocatedDevice(name=name, pool="", request="gpu") for name in pair]
    await prepared(rig.driver, *devices)
    rig.holds = dict.fromkeys(pair, HeldDevice(claims=(ONE,)))
    assert by_path(await rig.devices()) == names
    await prepared(rig.driver, *devices)


# ------------------------------------------------------------ sets and exclusions

CAMERA = {"subsystem": "video4linux", "usb": {"path": "pci-0000:00:14.0-usbv2-0:5"}}
STAGE = {"subsystem": "tty", "paths": ["/dev/ttyUSB2"]}
SET = {"match": [STAGE, CAMERA], "group": "Set"}


async def test_several_usb_devices_are_claimed_as_one_set(machine):
    rig = Rig(machine, {"bench": SET, "video": VIDEO})
    found = await rig.devices()
    assert {name: each.attributes["nodeCount"] for name, each in found.items()
            if each.attributes["policy"] == "bench"} == {"bench": 3}  # fmt: skip
    twin = {path for path in by_path(found) if path.startswith("/dev/video")}
    assert twin == {"/dev/video4", "/dev/video5"}
    edits = await rig.prepare("bench")
    assert edits.env["HOSTDEV_MAIN"] == "/dev/ttyUSB2:/dev/video2:/dev/video3"
    rig.apply({"video": VIDEO, "tty": TTY})
    free = by_path(await rig.devices())
    assert free.keys() == {"/dev/video4", "/dev/video5", *(f"/dev/ttyUSB{n}" for n in (3, 4, 5))}


@pytest.mark.parametrize("on_vanish", ["Taint", "Evict"])
async def test_a_set_without_one_of_its_devices_is_not_published_and_a_held_one_is_gone(
    machine, on_vanish
):
    rig = Rig(machine, {"bench": SET | {"onVanish": on_vanish}})
    assert list(await rig.devices()) == ["bench"]
    await rig.prepare("bench")
    machine.unplug(machine.sys / "devices/pci0000:00/0000:00:14.0/usb1/1-5")
    for _ in range(2):
        inventory = await rig.scan()
        assert (inventory.devices, inventory.withdrawn) == ([], ())
        (rejected,) = inventory.rejected
        assert rejected.message == "it is not a complete set: match[1] matches no device"
        with pytest.raises(DriverError, match="not a complete set"):
            await rig.prepare("bench", TWO)
        rig.restart({"bench": SET | {"onVanish": on_vanish}})


async def test_a_held_set_is_gone_while_another_device_is_in_place_of_one_of_its_own(machine):
    rig = Rig(machine, {"bench": SET})
    await rig.devices()
    await rig.prepare("bench")
    camera = machine.sys / "devices" / USB.replace("1-1", "1-5")
    machine.write(camera, serial="another")
    inventory = await rig.scan()
    assert (inventory.devices, inventory.withdrawn) == ([], ())
    assert inventory.rejected[0].message.startswith(
        "claim default/one holds it with another device, which is gone"
    )
    machine.write(camera, serial="s5")
    assert list(await rig.devices()) == ["bench"]


async def test_a_held_set_is_not_gone_while_a_part_of_it_is_unreadable(machine):
    rig = Rig(machine, {"bench": SET | {"onVanish": "Evict"}})
    await rig.devices()
    await rig.prepare("bench")
    rig.restart({"bench": SET | {"onVanish": "Evict"}})
    with unreadable(machine.sys / "class/video4linux"):
        assert (await rig.scan()).withdrawn == ("bench",)


async def test_a_set_is_not_published_if_a_matcher_matches_two_devices(machine):
    cameras = {"subsystem": "video4linux", "paths": ["/dev/video*"]}
    rig = Rig(machine, {"bench": SET | {"match": [STAGE, cameras]}})
    assert await rig.devices() == {}
    ((reason, message),) = (await rig.rejected()).values()
    assert reason == "Other"
    assert "match[1] matches several devices; narrow it, for example by usb.path" in message


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        pytest.param([{"paths": ["/dev/ttyUSB[23]"]}], {4, 5}, id="paths"),
        pytest.param([{"usb": {"serial": "A2"}}], {2, 3}, id="usb"),
        pytest.param([{"parent": {"name": "1-2:1.1"}}], {2, 3, 4}, id="parent"),
        pytest.param(
            [{"paths": ["/dev/ttyUSB2"]}, {"paths": ["/dev/ttyUSB5"]}], {3, 4}, id="any-of-two"
        ),
        pytest.param(
            [{"paths": ["/dev/ttyUSB[25]"], "usb": {"serial": "A2"}}], {2, 3, 4}, id="all-of-one"
        ),
    ],
)
async def test_a_matcher_excludes_devices(machine, exclude, left):
    machine.write(machine.sys / "devices/pci0000:00/0000:00:14.0/usb1/1-1", serial="A1")
    machine.write(machine.sys / "devices/pci0000:00/0000:00:14.0/usb1/1-2", serial="A2")
    match = {"subsystem": "tty", "paths": ["/dev/ttyUSB*"], "exclude": exclude}
    rig = Rig(machine, {"serial": {"match": [match]}})
    assert set(by_path(await rig.devices())) == {f"/dev/ttyUSB{number}" for number in left}


async def test_the_nodes_of_a_tape_drive_have_one_tenant_and_another_drive_is_free(host):
    """Two drives at one controller; each has a node that rewinds and one that does not."""
    controller = "pci0000:00/0000:00:17.0"
    host.parent(controller, "pci")
    for n in range(2):
        drive = f"{controller}/host4/target4:0:{n}/4:0:{n}:0"
        host.parent(drive, "scsi", wwid=f"naa.500110a0013f7b8{n}")
        for kernel, minor in ((f"st{n}", n), (f"nst{n}", 128 + n)):
            host.device(f"{drive}/scsi_tape/{kernel}", f"9:{minor}", subsystem="scsi_tape",
                        node=True)  # fmt: skip
    rig = Rig(host, {"tape": policy("scsi_tape", "/dev/st*", "/dev/nst*")})
    names = by_path(await rig.devices())
    assert len(names) == 4
    await rig.prepare(names["/dev/nst0"])
    assert by_path(await rig.devices()).keys() == names.keys() - {"/dev/st0"}


@pytest.mark.parametrize(
    ("exclude", "entry"),
    [({"paths": ["/dev/zigbee"]}, "S:zigbee"), ({"udevProperties": {"MODEL": "z"}}, "E:MODEL=z")],
)
async def test_a_device_matches_only_after_udev_has_processed_what_excludes_it(
    host, exclude, entry
):
    for index in range(2):
        host.adapter(str(index), f"ttyUSB{index}", serial=f"A{index}")
    host.link("zigbee", "ttyUSB1")
    host.udev_entry("c188:0", "E:ID_BUS=usb")
    match = {"subsystem": "tty", "paths": ["/dev/ttyUSB*"], "exclude": [exclude]}
    rig = Rig(host, {"serial": {"match": [match]}})
    assert by_path(await rig.devices()).keys() == {"/dev/ttyUSB0"}
    host.udev_entry("c188:1", entry)
    assert by_path(await rig.devices()).keys() == {"/dev/ttyUSB0"}
    host.udev_entry("c188:1", "E:ID_BUS=usb")
    assert by_path(await rig.devices()).keys() == {"/dev/ttyUSB0", "/dev/ttyUSB1"}
