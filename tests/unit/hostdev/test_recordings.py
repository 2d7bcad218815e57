"""Devices that this machine lacks, from recordings, with the policies of examples/hostdev."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from drakit import AllocatedDevice, Device, DeviceNode, Edits
from drakit_drivers.hostdev import HostDevicePolicySpec, HostDevices
from drakit_formats import crds
from tests.fakes.hostdev import ONE, TWO, Rig, inventory, taints
from tests.fakes.node import StaticNode
from tests.fakes.recordings import plug, unplug
from tests.fakes.sysfs import FakeHost, policy, prepared
from tests.fakes.usb_descriptors import FTDI as FTDI_DESCRIPTORS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "hostdev"
PODS = [
    pytest.param(path, id=path.stem)
    for path in sorted([*EXAMPLES.glob("*-pod.yaml"), *EXAMPLES.glob("*-deployment.yaml")])
]


def example(file: str) -> dict[str, dict]:
    """The policy of the example with this name."""
    body = yaml.safe_load((EXAMPLES / f"{file}.yaml").read_text())
    assert (body["apiVersion"], body["kind"]) == (crds.API_VERSION, "HostDevicePolicy")
    spec = HostDevicePolicySpec.model_validate(body["spec"])
    return {body["metadata"]["name"]: spec.model_dump(mode="json", by_alias=True)}


def driver(host: FakeHost, policies: dict[str, dict]) -> HostDevices:
    dangerous = any(
        spec.get("allow", {}).get("dangerous") == "Always" for spec in policies.values()
    )
    config = host.config(policies, allowDangerous=dangerous)
    return HostDevices(config, StaticNode(name="node-1"))


async def devices(host: FakeHost, policies: dict[str, dict]) -> dict[str, Device]:
    return {each.name: each for each in (await inventory(driver(host, policies))).devices}


async def edits(host: FakeHost, policies: dict[str, dict], device: str) -> Edits:
    allocated = AllocatedDevice(name=device, pool="", request="main")
    return await prepared(driver(host, policies), allocated)


def facts(device: Device, *names: str) -> tuple[object, ...]:
    return tuple(device.attributes.get(name) for name in names)


CH340 = "serial-1a86-7523-pci-0000-00-14-0-usbv2-0-2-i0"
FTDI = "serial-0403-6001-a50285bi-i0"


async def test_serial_adapters_have_their_serial_number_or_their_port_in_their_name(host):
    plug(host, "ch340")
    found = await devices(host, example("serial"))
    assert list(found) == [CH340]
    assert facts(found[CH340], "usbVendorID", "usbPort", "usbVersion", "usbSpeed", "ttyPort") == (
        "1a86",
        "1-2",
        "02.64",
        12,
        0,
    )
    unplug(host, "ch340")
    plug(host, "ftdi")
    found = await devices(host, example("serial"))
    assert list(found) == [FTDI]
    assert facts(found[FTDI], "serial", "driver", "identity") == (
        "A50285BI",
        "ftdi_sio",
        "0403-6001-A50285BI-i0",
    )


async def test_a_container_gets_the_adapter_with_its_by_id_path_group_and_mode(host):
    plug(host, "ftdi")
    made = await edits(host, example("serial"), FTDI)
    by_id = "/dev/serial/by-id/usb-FTDI_FT232R_USB_UART_A50285BI-if00-port0"
    common = {
        "type": "c",
        "major": 188,
        "minor": 0,
        "permissions": "rw",
        "identity": "tty pci-0000:00:14.0-usbv2-0:3 i0 ttyUSB - 0403-6001-A50285BI",
    }
    assert made.device_nodes == (
        DeviceNode(path="/dev/ttyUSB0", gid=20, file_mode=0o660, **common),
        DeviceNode(path=by_id, host_path="/dev/ttyUSB0", gid=20, file_mode=0o660, **common),
    )
    assert made.env["HOSTDEV_MAIN"] == "/dev/ttyUSB0"


async def test_an_adapter_with_serial_number_is_the_same_device_at_another_port(host):
    plug(host, "ftdi")
    before = await devices(host, example("serial-unit"))
    unplug(host, "ftdi")
    plug(host, "ftdi-other-port")
    after = await devices(host, example("serial-unit"))
    (name,) = before
    assert list(after) == [name]
    assert (before[name].attributes["path"], after[name].attributes["path"]) == (
        "/dev/ttyUSB0",
        "/dev/ttyUSB3",
    )
    assert after[name].attributes["room"] == "cellar"
    made = await edits(host, example("serial-unit"), name)
    assert [(node.path, node.host_path, node.minor) for node in made.device_nodes] == [
        ("/dev/meter", "/dev/ttyUSB3", 3)
    ]
    assert (made.env["HOSTDEV_MAIN"], made.env["METER_BAUD"]) == ("/dev/meter", "9600")


async def test_identical_sticks_without_serial_number_are_distinguished_by_their_ports(host):
    plug(host, "twins")
    found = await devices(host, example("serial"))
    assert {name: device.attributes["path"] for name, device in found.items()} == {
        "serial-1a86-7523-pci-0000-00-14-0-usbv2-0-4-1-i0": "/dev/ttyUSB0",
        "serial-1a86-7523-pci-0000-00-14-0-usbv2-0-4-2-i0": "/dev/ttyUSB1",
    }
    left = await devices(host, example("serial-port"))
    assert [device.attributes["path"] for device in left.values()] == ["/dev/ttyUSB0"]


async def test_sticks_without_serial_number_keep_their_names_when_the_kernel_renumbers_the_buses(
    host, tmp_path
):
    plug(host, "controllers")
    before = await devices(host, example("serial"))
    rebooted = FakeHost(tmp_path / "rebooted")
    plug(rebooted, "controllers-rebooted")
    after = await devices(rebooted, example("serial"))
    first = "serial-1a86-7523-pci-0000-00-14-0-usbv2-0-2-i0"
    second = "serial-1a86-7523-pci-0000-00-1a-0-usbv2-0-2-i0"
    names = ("path", "usbPort", "usbPath")
    assert {name: facts(device, *names) for name, device in before.items()} == {
        first: ("/dev/ttyUSB0", "1-2", "pci-0000:00:14.0-usbv2-0:2"),
        second: ("/dev/ttyUSB1", "3-2", "pci-0000:00:1a.0-usbv2-0:2"),
    }
    assert {name: facts(device, *names) for name, device in after.items()} == {
        first: ("/dev/ttyUSB1", "3-2", "pci-0000:00:14.0-usbv2-0:2"),
        second: ("/dev/ttyUSB0", "1-2", "pci-0000:00:1a.0-usbv2-0:2"),
    }
    made = await edits(rebooted, example("serial"), first)
    assert made.env["HOSTDEV_MAIN"] == "/dev/ttyUSB1"


async def test_a_camera_with_several_nodes_is_one_device(host):
    plug(host, "uvc-camera")
    found = await devices(host, example("camera"))
    (name,) = found
    assert name == "camera-04f2-b6b6-0001"
    assert facts(found[name], "nodeCount", "videoCapture", "videoName") == (
        4,
        True,
        "HP Wide Vision HD Camera: HP Wi",
    )
    made = await edits(host, example("camera"), name)
    assert [(node.path, node.minor, node.gid) for node in made.device_nodes] == [
        (f"/dev/video{index}", index, 44) for index in range(4)
    ]
    assert made.env["HOSTDEV_MAIN"] == "/dev/video0:/dev/video1:/dev/video2:/dev/video3"


async def test_a_unit_that_loses_a_node_keeps_its_name(host):
    plug(host, "uvc-camera")
    before = await devices(host, example("camera"))
    (host.sys / "class/video4linux/video0").unlink()
    after = await devices(host, example("camera"))
    assert before.keys() == after.keys()
    assert [device.attributes["nodeCount"] for device in after.values()] == [3]


async def test_a_sound_card_is_one_device_with_control_and_streams(host):
    plug(host, "usb-sound")
    found = await devices(host, example("sound-card"))
    (name,) = found
    assert name == "sound-card-0d8c-0014-pci-0000-00-14-0-usbv2-0-7"
    assert facts(found[name], "nodeCount", "soundCardID", "soundPcmCount", "soundNode") == (
        3,
        "Device",
        1,
        "control",
    )
    made = await edits(host, example("sound-card"), name)
    assert {node.path for node in made.device_nodes} == {
        "/dev/snd/controlC1",
        "/dev/snd/pcmC1D0c",
        "/dev/snd/pcmC1D0p",
    }


async def test_only_the_matching_node_of_a_security_key_is_published(host):
    plug(host, "yubikey")
    found = await devices(host, example("security-key"))
    (name,) = found
    assert name == "security-key-1050-0407-pci-0000-00-14-0-usbv2-0-8-i1"
    assert facts(found[name], "path", "hidName", "usbInterface") == (
        "/dev/hidraw1",
        "Yubico YubiKey OTP+FIDO+CCID",
        1,
    )


async def test_the_keyboard_of_a_security_key_is_not_published(host):
    plug(host, "yubikey")
    every = {"key": {"match": [{"subsystem": "hidraw", "paths": ["/dev/hidraw*"]}]}}
    made = await inventory(driver(host, every))
    assert [each.attributes["path"] for each in made.devices] == ["/dev/hidraw1"]
    (refused,) = made.rejected
    assert (refused.device, refused.reason) == ("/dev/hidraw0", "Dangerous")
    assert "it is a keyboard of the node" in refused.message


async def test_a_tpm_is_shared_by_a_number_of_users(host):
    plug(host, "tpm")
    found = await devices(host, example("tpm"))
    assert list(found) == [f"tpm-tpmrm-platform-msft0101-00-{index}" for index in range(8)]
    assert {device.attributes["tpmVersion"] for device in found.values()} == {2}
    made = await edits(host, example("tpm"), "tpm-tpmrm-platform-msft0101-00-7")
    assert [(node.path, node.major, node.minor) for node in made.device_nodes] == [
        ("/dev/tpmrm0", 253, 65536)
    ]


async def test_a_render_node_is_shared_by_capacity_with_copies_as_fallback(host):
    plug(host, "gpu")
    made = await inventory(driver(host, example("render-node")))
    (gpu,) = made.devices
    name = "render-dri-renderd-pci-0000-01-00-0"
    assert (gpu.name, gpu.allow_multiple_allocations) == (name, True)
    capacity = gpu.capacity["users"]
    assert not isinstance(capacity, str)
    assert (capacity.value, capacity.default) == ("4", "1")
    assert facts(gpu, "pciVendorID", "iommuGroup", "resource.kubernetes.io/pcieRoot") == (
        "1002",
        16,
        "pci0000:00",
    )
    copies = made.fallback or ()
    assert [(each.name, each.capacity, each.allow_multiple_allocations) for each in copies] == [
        (f"{name}-{index}", {"users": "1"}, False) for index in range(4)
    ]
    for each in (name, f"{name}-3"):
        (node,) = (await edits(host, example("render-node"), each)).device_nodes
        assert (node.path, node.file_mode) == ("/dev/dri/renderD128", 0o666)


@pytest.mark.parametrize(
    ("recording", "policy", "missing"),
    [
        pytest.param("ftdi", "serial", {"byIdLink", "byPathLink"}, id="serial"),
        pytest.param(
            "uvc-camera",
            "camera",
            # Its by-id link is too long for the API.
            {"byPathLink", "videoCapture", "videoOutput"},
            id="camera",
        ),
        pytest.param("gpu", "render-node", {"byPathLink"}, id="gpu"),
    ],
)
async def test_without_a_udev_daemon_a_device_has_the_same_name_and_fewer_attributes(
    host, tmp_path, recording, policy, missing
):
    plug(host, recording)
    bare = FakeHost(tmp_path / "bare")
    plug(bare, recording, udev=False)
    (one,) = (await devices(host, example(policy))).values()
    (other,) = (await devices(bare, example(policy))).values()
    assert one.name == other.name
    assert one.attributes.keys() - other.attributes.keys() == missing


async def test_every_recording_stays_within_the_limit_of_attributes(host):
    """All devices at once, each with the maximum of attributes that a policy can add."""
    plug(host, "ftdi", "uvc-camera", "usb-sound", "yubikey", "tpm", "gpu")
    extra = {f"extra{index}": {"int": index} for index in range(4)}
    subsystems = ("tty", "video4linux", "sound", "hidraw", "tpm", "tpmrm", "drm")
    policies = {
        each: {
            "match": [{"subsystem": each}],
            "attributes": extra,
            "allow": {"dangerous": "Always"},
            "sharing": {"mode": "Users", "users": 1},
        }
        for each in subsystems
    }
    found = await devices(host, policies)
    assert {device.attributes["subsystem"] for device in found.values()} == set(subsystems)
    for device in found.values():
        assert len(device.attributes) + len(device.capacity) <= 32
        assert set(extra) <= device.attributes.keys()
        for name in device.attributes:
            identifier = name.removeprefix("resource.kubernetes.io/")
            assert identifier.isidentifier()
            assert len(identifier) <= 32


CONTROLLER = "pci0000:00/0000:00:14.0"


def usb(host: FakeHost, port: int, ids: str, *, node: str, serial: str = "") -> None:
    """Plug in a USB device: its own node, and that of its driver's subsystem if it has one."""
    vendor, product = ids.split(":")
    subsystem, _, name = node.partition("/")
    where = f"{CONTROLLER}/usb1/1-{port}"
    host.parent(CONTROLLER, "pci")
    host.parent(f"{CONTROLLER}/usb1", "usb", idVendor="1d6b", idProduct="2", speed="480")
    made = host.usb_device(where, f"189:{port}", FTDI_DESCRIPTORS, node=True)
    host.write(made, idVendor=vendor, idProduct=product)
    (made / "serial").unlink()
    if serial:
        host.write(made, serial=serial)
    if name:
        driver = {"usbmisc": "usblp", "tty": "cp210x"}[subsystem]
        host.parent(f"{where}/1-{port}:1.0", "usb", driver=driver, bInterfaceNumber="00")
        directory, number = f"{where}/1-{port}:1.0/{subsystem}/{name}", f"188:{port}"
        host.device(
            directory,
            number,
            subsystem=subsystem,
            devname=f"usb/{name}" if subsystem == "usbmisc" else name,
            node=True,
        )


@pytest.mark.parametrize(
    ("recipe", "ids", "serial", "node", "path"),
    [
        ("zigbee", "10c4:ea60", "5c3a1f0e7b9d", "tty/ttyUSB1", "/dev/ttyUSB1"),
        ("zwave", "0658:0200", "", "tty/ttyACM1", "/dev/ttyACM1"),
        ("coral", "1a6e:089a", "", "", "/dev/bus/usb/001/002"),
        ("coral", "18d1:9302", "", "", "/dev/bus/usb/001/002"),
        ("sdr", "0bda:2838", "00000001", "", "/dev/bus/usb/001/002"),
        ("printer", "04b8:0202", "L1", "usbmisc/lp0", "/dev/usb/lp0"),
        ("ups", "051d:0002", "AS1", "", "/dev/bus/usb/001/002"),
    ],
)
async def test_a_recipe_publishes_its_device_and_no_other(host, recipe, ids, serial, node, path):
    usb(host, 1, ids, serial=serial, node=node)
    usb(host, 2, "10c4:ea60", serial="0001", node="tty/ttyUSB2")
    found = await devices(host, example(recipe))
    assert [each.attributes["path"] for each in found.values()] == [path]


# ------------------------------------------------------------ twins, composite devices, new ids


def bus(*ids: str, **fields: object) -> dict:
    matchers = [dict(zip(("vendorID", "productID"), each.split(":"), strict=True)) for each in ids]
    return {"match": [{"subsystem": "usb", "usb": each} for each in matchers], **fields}


async def test_one_of_two_cp2102_with_one_serial_number_has_their_link(host):
    plug(host, "cp2102-twins")
    link = "serial/by-id/usb-Silicon_Labs_CP2102_USB_to_UART_Bridge_Controller_0001-if00-port0"
    policies = {"zigbee": policy("tty", f"/dev/{link}", container={"byIdLinks": "Always"})}
    rig = Rig(host, policies | {"other": bus("10c4:ea60")})
    found = {path: name for name, path in (await rig.paths()).items()}
    assert found.keys() == {"/dev/ttyUSB0", "/dev/bus/usb/001/006"}, "and no bus node of the first"
    assert "which leads to that device" in (await rig.rejected())["/dev/ttyUSB1"][1]
    first = await rig.prepare(found["/dev/ttyUSB0"])
    assert [node.minor for node in first.device_nodes] == [0, 0]
    unplug(host, "cp2102-twins", below="/1-1/")
    twin = await rig.paths()
    assert found["/dev/ttyUSB0"] not in twin, "the link leads to the twin, and the claim does not"
    plug(host, "cp2102-twins", below="/1-1/")
    unplug(host, "cp2102-twins", below="/1-2/")
    again = await rig.devices()
    assert [(name, taints(each)) for name, each in again.items()] == [(found["/dev/ttyUSB0"], {})]


async def test_the_radios_of_a_combined_stick_have_two_tenants_and_no_third_by_the_usb_node(host):
    plug(host, "husbzb-1")
    radios = {
        name: policy("tty", f"/dev/serial/by-id/usb-Silicon_Labs_HubZ_*-if0{n}-port0")
        for n, name in enumerate(("zwave", "zigbee"))
    }
    rig = Rig(host, radios | {"raw": bus("10c4:8a2a")})
    inventory = await rig.scan()
    assert sorted(each.name for each in inventory.devices) == [
        *("zigbee-10c4-8a2a-00000a01-i1", "zigbee-10c4-8a2a-00000a02-i1"),
        *("zwave-10c4-8a2a-00000a01-i0", "zwave-10c4-8a2a-00000a02-i0"),
    ]
    assert {each.policy: len(each.conflicts) for each in inventory.policies} == {
        "zwave": 2,
        "zigbee": 0,
        "raw": 2,
    }
    await rig.prepare("zwave-10c4-8a2a-00000a01-i0", ONE)
    await rig.prepare("zigbee-10c4-8a2a-00000a01-i1", TWO)
    assert len(await rig.devices()) == 4


@pytest.mark.parametrize("identity", ["Device", "Port"])
async def test_a_coral_keeps_its_claim_when_its_firmware_is_loaded(host, identity):
    plug(host, "coral")
    spec = bus("1a6e:089a", "18d1:9302", identity=identity)
    rig = Rig(host, {"coral": spec})
    before = {path: name for name, path in (await rig.paths()).items()}
    held = before["/dev/bus/usb/002/003"]
    await rig.prepare(held)
    unplug(host, "coral", below="/2-1/")
    plug(host, "coral-loaded", below="/2-1/")
    rig.restart({"coral": spec})
    found = await rig.devices()
    assert {each.attributes["path"]: name for name, each in found.items()} == {
        "/dev/bus/usb/002/004": before["/dev/bus/usb/002/004"],
        "/dev/bus/usb/002/005": held,
    }
    assert found[held].prepare_again
    assert [node.minor for node in (await rig.prepare(held)).device_nodes] == [132]
    assert found[before["/dev/bus/usb/002/004"]].taints == ()


async def test_receivers_with_the_serial_number_of_the_factory_are_told_apart_by_port(host):
    plug(host, "rtl-sdr-twins")
    path = "pci-0000:00:14.0-usbv2-0:5"
    one = {"subsystem": "usb", "usb": {"vendorID": "0bda", "productID": "2838", "path": path}}
    rig = Rig(host, {"adsb": {"match": [one]}, "sdr": bus("0bda:2838", identity="Port")})
    assert await rig.paths() == {
        "adsb-0bda-2838-00000001": "/dev/bus/usb/001/009",
        "sdr-usb-pci-0000-00-14-0-usbv2-0-6": "/dev/bus/usb/001/010",
    }
    unplug(host, "rtl-sdr-twins", below="/1-5/")
    assert list(await rig.paths()) == ["sdr-usb-pci-0000-00-14-0-usbv2-0-6"]


async def test_a_webcam_in_use_is_not_free_by_its_other_nodes_and_its_microphone_is(host):
    plug(host, "c920")
    rig = Rig(
        host,
        {
            "camera": policy("video4linux", "/dev/video*", group="Unit"),
            "media": policy("media", "/dev/media*"),
            "raw": bus("046d:082d"),
            "microphone": policy("sound", "/dev/snd/pcm*c"),
        },
    )
    inventory = await rig.scan()
    assert sorted(each.name for each in inventory.devices) == [
        "camera-046d-082d-c0ffee01",
        "camera-046d-082d-c0ffee02",
        "microphone-046d-082d-c0ffee01-i2",
        "microphone-046d-082d-c0ffee02-i2",
    ]
    conflicting = {each.policy for each in inventory.policies if each.conflicts}
    assert conflicting == {"camera", "media", "raw"}
    await rig.prepare("camera-046d-082d-c0ffee01")
    rig.apply({"media": policy("media", "/dev/media*"), "raw": bus("046d:082d")})
    assert set((await rig.paths()).values()) == {"/dev/media1"}
    assert (await rig.rejected())["/dev/media0"][0] == "InUse"


async def test_a_board_in_its_boot_loader_stays_with_its_claim(host):
    plug(host, "stm32")
    match = [{"subsystem": "tty", "usb": {"vendorID": "0483", "productID": "5740"}}]
    spec = {"match": [*match, *bus("0483:df11")["match"]], "identity": "Port"}
    rig = Rig(host, {"board": spec})
    ports = [f"board-tty-pci-0000-00-14-0-usbv2-0-{port}-i0" for port in (9, 10)]
    assert sorted(await rig.paths()) == sorted(ports)
    await rig.prepare(ports[0])
    unplug(host, "stm32")
    plug(host, "stm32-dfu")
    assert await rig.paths() == {
        ports[0]: "/dev/bus/usb/001/015",
        "board-usb-pci-0000-00-14-0-usbv2-0-10": "/dev/bus/usb/001/016",
    }
    unplug(host, "stm32-dfu", below="/1-9/")
    plug(host, "stm32", below="/1-9/")
    assert (await rig.paths())[ports[0]] == "/dev/ttyACM0"
    raw = {"raw": bus("0483:5740")}
    ((reason, message),) = (await Rig(host, raw).rejected()).values()
    assert reason == "Dangerous"
    assert "use subsystem tty: its node is /dev/ttyACM0; to publish it in spite" in message


async def test_the_nodes_of_one_gpu_have_one_tenant_unless_the_policies_share_them(host):
    plug(host, "two-gpus")
    every = policy("drm", "/dev/dri/card*", "/dev/dri/renderD*")
    rig = Rig(host, {"gpu": every})
    found = {path: name for name, path in (await rig.paths()).items()}
    await rig.prepare(found["/dev/dri/renderD128"])
    assert set((await rig.paths()).values()) == found.keys() - {"/dev/dri/card0"}
    shared = every | {"sharing": {"mode": "Capacity", "users": 2}}
    rig = Rig(host, {"gpu": shared})
    found = {path: name for name, path in (await rig.paths()).items()}
    await rig.prepare(found["/dev/dri/renderD128"], ONE)
    await rig.prepare(found["/dev/dri/card0"], TWO)
    assert set((await rig.paths()).values()) == found.keys()


def test_every_example_is_used_here():
    text = Path(__file__).read_text()
    policies = [
        path.stem
        for path in EXAMPLES.glob("*.yaml")
        if not path.stem.endswith(("-pod", "-deployment"))
    ]
    assert [name for name in policies if f'"{name}"' not in text] == []


@pytest.mark.parametrize("path", PODS)
def test_a_pod_of_the_examples_claims_the_class_of_its_policy(path):
    ((policy, spec),) = example(re.sub("-(pod|deployment)$", "", path.stem)).items()
    template, pod = yaml.safe_load_all(path.read_text())
    pod = pod["spec"]["template"] if pod["kind"] == "Deployment" else pod
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == f"{policy}.drakit.dev"
    (claim,) = pod["spec"]["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": claim["name"]}]
    read = f"$HOSTDEV_{request['name'].upper()}"
    assert {read, spec["container"]["path"]} & {
        *re.findall(r"[$/][\w/]+", container["command"][-1])
    }
    groups = pod["spec"].get("securityContext", {}).get("supplementalGroups", [])
    gid = spec["container"]["gid"]
    assert groups == ([gid] if gid is not None else [])
