"""
The page of device attributes: those of the drivers that drakit includes, and of adapted device
plugins.

Types and examples come from the drivers' code, which describes the sample devices below. Each
attribute must have a description, and each description an attribute.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal

from drakit import AttributeValue, Device, Policy, Version
from drakit_drivers.hostdev.hardware import (
    Ancestor,
    BlockFacts,
    HostDevice,
    PciParent,
    UsbParent,
    identity_of_node,
    identity_of_unit,
)
from drakit_drivers.hostdev.matching import Matcher
from drakit_drivers.hostdev.policy import HostDevicePolicySpec, Sharing
from drakit_drivers.hostdev.policy_devices import Published, attributes, capacity
from drakit_drivers.simulated.config import NicProfile, SimulatedConfig
from drakit_drivers.simulated.inventory import all_devices
from drakit_formats.resource.device import TOPOLOGY_FIELDS
from drakit_nodeplugin.endpoints.deviceplugin.messages import list_devices
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from tools.reference import markdown

USB_SERIAL = HostDevice(
    subsystem="tty",
    kernel_name="ttyUSB0",
    path="/dev/ttyUSB0",
    type="c",
    major=188,
    minor=0,
    directory=Path("/sys/devices/pci0000:00/0000:00:14.0/usb1/1-2"),
    driver="ftdi_sio",
    links=(
        "/dev/serial/by-id/usb-FTDI_FT232R_A50285BI-if00-port0",
        "/dev/serial/by-path/pci-0000:00:14.0-usb-0:2:1.0-port0",
    ),
    usb=UsbParent(
        vendor_id="0403",
        product_id="6001",
        port="1-2",
        manufacturer="FTDI",
        product="FT232R USB UART",
        serial="A50285BI",
        interface=0,
        version="06.00",
        device_class="00",
        speed=12,
        path="pci-0000:00:14.0-usbv2-0:2",
    ),
    family={"ttyPort": 0},
)

ZRAM = HostDevice(
    subsystem="block",
    kernel_name="zram0",
    path="/dev/zram0",
    type="b",
    major=253,
    minor=0,
    directory=Path("/sys/devices/virtual/block/zram0"),
    devtype="disk",
    block=BlockFacts(size_bytes=536870912, has_backing_file=False),
)

GPU = HostDevice(
    subsystem="drm",
    kernel_name="renderD128",
    path="/dev/dri/renderD128",
    type="c",
    major=226,
    minor=128,
    directory=Path("/sys/devices/pci0000:00/0000:03:00.0/drm/renderD128"),
    devtype="drm_minor",
    driver="amdgpu",
    numa_node=0,
    ancestors=(Ancestor(name="0000:03:00.0", subsystem="pci", driver="amdgpu"),),
    pci=PciParent(
        bus_id="0000:03:00.0",
        root="pci0000:00",
        vendor_id="1002",
        device_id="744c",
        class_id="030000",
        subsystem_vendor_id="1da2",
        subsystem_device_id="e471",
        iommu_group=14,
    ),
    family={"drmNode": "render"},
)


def _of_family(subsystem: str, devname: str, **family: AttributeValue) -> HostDevice:
    """Return a device of which only the attributes of its kind matter."""
    return HostDevice(
        subsystem=subsystem,
        kernel_name=devname.rpartition("/")[2],
        path=f"/dev/{devname}",
        type="c",
        major=81,
        minor=0,
        directory=Path("/sys/devices/virtual") / devname,
        family=family,
    )


NODES = {
    "serial": USB_SERIAL,
    "zram": ZRAM,
    "ports": _of_family("tty", "ttyS0", uartType=4),
    "cameras": _of_family(
        "video4linux",
        "video0",
        videoName="HD Pro Webcam C920",
        videoCapture=True,
        videoOutput=False,
    ),
    "sound": _of_family(
        "sound", "snd/pcmC1D0c", soundNode="capture", soundCardID="Device", soundPcmCount=1
    ),
    "scanners": _of_family(
        "input", "input/event4", inputName="Barcode Scanner", inputKind="keyboard"
    ),
    "keys": _of_family("hidraw", "hidraw0", hidName="Yubico YubiKey OTP+FIDO+CCID"),
    "screens": _of_family("drm", "dri/card0", drmNode="primary", drmConnected=1),
    "rdma": _of_family(
        "infiniband_verbs",
        "infiniband/uverbs0",
        netInterface="enp1s0f0",
        netAddress="b8:ce:f6:00:00:01",
    ),
    "tpm": _of_family("tpmrm", "tpmrm0", tpmVersion=2),
}

STANDARD = {
    "resource.kubernetes.io/numaNode": "NUMA node.",
    "resource.kubernetes.io/pcieRoot": "PCIe root complex.",
    "resource.kubernetes.io/pciBusID": "PCI address.",
}

HOSTDEV = {
    "policy": "Policy that publishes the device.",
    "subsystem": "Kernel subsystem.",
    "path": "Device node on the host.",
    "devname": "Path without `/dev/`.",
    "devtype": "Type within the subsystem.",
    "major": "Major device number.",
    "minor": "Minor device number.",
    "driver": "Kernel driver.",
    "byIdLink": "udev symlink that identifies the device.",
    "byPathLink": "udev symlink that identifies the port or address.",
    "serial": "Serial number.",
    "identity": "The identity from which the device name is derived.",
    "nodeCount": "Number of device nodes, if the policy sets `group: Unit` or `group: Set`.",
    "usbVendorID": "USB vendor ID.",
    "usbProductID": "USB product ID.",
    "usbManufacturer": "Manufacturer of the USB device.",
    "usbProduct": "Product name of the USB device.",
    "usbInterface": "Interface number on the USB device.",
    "usbPort": "Bus number and port path of the USB device. The number can change with a reboot.",
    "usbPath": "Controller, root hub and port path of the USB device: the stable form of `usbPort`. "
    "Devices that usbip attaches do not have it.",
    "pciVendorID": "PCI vendor ID.",
    "pciDeviceID": "PCI device ID.",
    "pciClass": "PCI class.",
    "usbVersion": "Release number of the USB device.",
    "usbClass": "Class of the USB device. `00`: each interface has its own class.",
    "usbSpeed": "Speed of the USB device in Mbit/s.",
    "pciSubsystemVendorID": "PCI subsystem vendor ID.",
    "pciSubsystemDeviceID": "PCI subsystem device ID.",
    "iommuGroup": "IOMMU group of the PCI function.",
    "ttyPort": "Index of the port on a serial adapter, starting at 0.",
    "uartType": "The kernel's code for the UART type. `0`: no UART.",
    "videoName": "Name of the video device.",
    "videoCapture": "Whether the node captures video. Needs udev.",
    "videoOutput": "Whether the node is a video output. Needs udev.",
    "soundNode": "Kind of the node: `control`, `playback`, `capture`, `midi`, `hwdep` or `global`.",
    "soundCardID": "ID of the sound card.",
    "soundPcmCount": "Number of PCM devices of the sound card.",
    "inputName": "Name of the input device.",
    "inputKind": "Kind of the input device: `keyboard`, `mouse`, `touchscreen`, `touchpad`, `tablet`, `joystick` or `switch`. Needs udev.",
    "hidName": "Name of the HID device.",
    "drmNode": "Kind of the node: `primary` or `render`.",
    "drmConnected": "Number of connected outputs, on a primary node.",
    "netInterface": "Network interface of the same hardware.",
    "netAddress": "Hardware address of that interface.",
    "tpmVersion": "Major version of the TPM's specification.",
}

SIMULATED = {
    "type": "Kind of the device: `gpu`, `partition`, `nic` or `cpu`.",
    "index": "Index of the GPU, interface or CPU. With `cpu.grouping: capacity`, the ID of the NUMA node.",
    "model": "The value of `model` in the configuration.",
    "architecture": "The value of `architecture` in the configuration.",
    "driverVersion": "The value of `driverVersion` in the configuration.",
    "computeSlices": "Compute slices of the GPU or of the partition.",
    "parent": "Name of the GPU to which a partition belongs.",
    "profile": "Size of a partition: the number of its compute slices, followed by `g`.",
    "macAddress": "MAC address of the interface.",
    "vlans": "VLANs of the interface. Published only if `listAttributes` is set.",
}

PLUGIN = {
    "resource": "Name of the device plugin's resource.",
    "id": "ID of the device in the device plugin's list.",
    "numaNodes": "NUMA nodes of a device that has several, separated by commas.",
}

CAPACITIES = {
    "size": "Size of the block device, in bytes.",
    "users": "Number of claims that can share a device with `sharing.mode: Capacity`.",
    "memory": "Memory of the GPU or of the partition.",
    "bandwidth": "Bandwidth of the interface in bits per second. Claims share it.",
    "cpus": "CPUs of the NUMA node. Claims share them.",
}


def page() -> str:
    """Return the page."""
    return markdown.document(
        "Device attributes",
        description="The attributes and capacities of the devices that drakit's own drivers publish.",
        source="the drivers",
        body=[
            "Use these attributes and capacities in the CEL selectors of claims and DeviceClasses: [Select\n"
            "devices](../use/cel-recipes.md) has recipes.",
            "An attribute without a domain prefix belongs to the domain of the driver. A device has only the attributes that the\n"
            "node reports for it, and a selector that reads a missing attribute fails. Use\n"
            '`device.attributes["hostdev.drakit.dev"].?serial.orValue("")`, which returns `""` if the attribute is missing.',
            "## hostdev.drakit.dev",
            "`hostdev` omits strings longer than 64 bytes, and publishes at most 32 attributes and capacities per device. A policy\n"
            "can add attributes. The PCI attributes describe the PCI function to which a device belongs: for a USB device, its USB\n"
            "controller. USB devices do not have `iommuGroup` or the PCI subsystem IDs.",
            *_fields(_hostdev(), HOSTDEV),
            "## simulated.drakit.dev",
            "The driver `simulated` publishes these attributes. The examples come from its default configuration.",
            *_fields(_simulated(), SIMULATED),
            "## deviceplugin.drakit.dev",
            "The node plugin publishes these attributes for the devices of [device plugins](../admin/device-plugins.md).\n"
            "Each resource has a separate pool.",
            *_fields(_plugin(), PLUGIN),
        ],
    )


def _hostdev() -> list[Device]:
    return [_published(each, policy, group="Node") for policy, each in NODES.items()] + [
        _published(GPU, "gpus", group="Unit", users=4)
    ]


def _published(
    host: HostDevice, policy: str, *, group: Literal["Node", "Unit"], users: int | None = None
) -> Device:
    spec = HostDevicePolicySpec(
        match=(Matcher(subsystem=host.subsystem, paths=(host.path,)),),
        group=group,
        sharing=Sharing(mode="Capacity", users=users) if users else Sharing(),
    )
    published = Published(
        name=host.kernel_name,
        policy=Policy(name=policy, created=datetime.min, generation=1, spec=spec),
        hosts=(host,),
        identity=identity_of_unit(host) if group == "Unit" else identity_of_node(host),
    )
    return Device(
        name=host.kernel_name, attributes=attributes(published), capacity=capacity(published)
    )


def _simulated() -> list[Device]:
    config = SimulatedConfig(nic=NicProfile(list_attributes=True))
    inventory = all_devices(config)
    return [*inventory.devices, *(inventory.fallback or ())]


def _plugin() -> list[Device]:
    def listed(identity: str, *nodes: int) -> pb.Device:
        topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes])
        return pb.Device(ID=identity, health="Healthy", topology=topology)

    devices = (listed("card-0", 0), listed("card-1", 0, 1))
    found = list_devices(devices, resource="vendor.example/card", before=None)
    return list(found.inventory.devices)


def _fields(devices: Collection[Device], texts: Mapping[str, str]) -> Iterator[str]:
    examples: dict[str, AttributeValue] = {}
    amounts: dict[str, str] = {}
    for device in devices:
        for name, value in (*device.attributes.items(), *_standard(device)):
            examples.setdefault(name, value)
        for name, amount in device.capacity.items():
            amounts.setdefault(name, amount if isinstance(amount, str) else amount.value)
    texts = {**texts, **STANDARD}
    different = examples.keys() ^ texts.keys() - (STANDARD.keys() - examples.keys())
    if different or amounts.keys() - CAPACITIES.keys():
        raise SystemExit(f"attributes or capacities without text, or texts for none: {different}")
    lines = ["attributes:"]
    declared = [
        (f"{name}: {_example(examples[name])}", text)
        for name, text in texts.items()
        if name in examples
    ]
    lines += _commented(declared)
    if amounts:
        lines.append("capacity:")
        lines += _commented(
            [
                (f"{name}: {{value: {json.dumps(amount)}}}", CAPACITIES[name])
                for name, amount in amounts.items()
            ]
        )
    yield markdown.code_block("yaml", lines)


def _commented(declared: list[tuple[str, str]]) -> list[str]:
    """Return fields with their meanings: after them in a column, or above them if they are long."""
    lines: list[str] = []
    for line, text in declared:
        shown = f"  {line:<42}  # {text.replace('`', '')}"
        if len(shown) <= markdown.CODE_WIDTH:
            lines.append(shown)
        else:
            lines += markdown.members([(line, text)], "#", "  ")
    return lines


def _standard(device: Device) -> Iterator[tuple[str, AttributeValue]]:
    for name, field in TOPOLOGY_FIELDS.items():
        if (value := getattr(device.topology, field)) is not None:
            yield name, value


def _example(value: AttributeValue) -> str:
    """Return a value as in a ResourceSlice, with its type."""
    match value:
        case bool():
            return f"{{bool: {str(value).lower()}}}"
        case int():
            return f"{{int: {value}}}"
        case str():
            return f"{{string: {json.dumps(value)}}}"
        case Version(text=text):
            return f"{{version: {json.dumps(text)}}}"
        case _:
            return f"{{ints: {list(value)}}}"
