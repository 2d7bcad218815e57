"""
The page of HostDevicePolicies: the fields of the model with their docstrings, the dangerous device
nodes of the code, and the rules that no single field explains.

It must not know the host.
"""

from __future__ import annotations

from drakit_drivers.hostdev.dangerous import DANGEROUS_NODES
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from tools.reference import configuration, markdown

FIELDS = """\
The chart applies each entry of `hostdev.policies` in its values as a HostDevicePolicy with this `spec`. In the values, a
policy also has `enabled` (default: `true`). The predefined policies `kvm`, `tun` and `fuse` are disabled by default."""

MATCHING = """\
## Matching

- It is not an error if a matcher matches no device on a node.
- If two policies match a device, only the older policy publishes it. If both were created in the same second, the policy
  whose name sorts first publishes it.
- From the subsystem `block`, hostdev publishes only test devices: see [Disks](../admin/disks.md). You cannot share them with
  `sharing`, or publish them with `group: Unit`.
- The subsystems `bsg`, `nvme`, `nvme-generic` and `scsi_generic` are invalid, because their devices can write to mounted
  disks.
- hostdev accepts no opaque parameters: a claim that has parameters for `hostdev.drakit.dev` fails.

The name of a policy has at most 40 characters. [Limits](limits.md) lists the limits for the number of policies and devices."""

NAMES = """\
## Device names

The name of a device does not change when you reboot the node or replug the device. It consists of the policy's name
and the identity of the device:

| Device | Identity | Device name |
|---|---|---|
| USB device with a serial number | vendor, product, serial number and interface | `serial-10c4-ea60-0001-i0` |
| USB device without a serial number | vendor, product, address of the controller, port path and interface | `serial-1a86-7523-pci-0000-00-14-0-usbv2-0-1-2-i0` |
| Device behind a PCI function or on the mainboard | address of the hardware | `gpu-dri-renderd-pci-0000-03-00-0` |
| Chip on an I2C or SPI bus | address of the bus and of the chip | `sensor-iio-device-platform-fe804000-i2c-i2c-0068` |
| Virtual device, or a device whose kernel name is stable | kernel name | `tun-net-tun` |
| Device with `sharing.mode: Users` | also the index of the [entry](#sharing) | `kvm-0` |

A USB device with a serial number keeps its name in any port. Without a serial number, it keeps its name only in the same
port. To select a port, use `usbPath`: the kernel's bus number in `usbPort` can change with a reboot.

If only a kernel-assigned number identifies a device, a different device can have that number after a reboot. hostdev
publishes such a device only if the policy sets `allow.unstableIdentity`."""

HELD = """\
## Devices held by claims

A claim holds a device from the start of its preparation until the node plugin has unprepared the claim. While a claim holds a
device, the device's name always refers to the same hardware, even after a restart of the node plugin. hostdev identifies the
hardware by its serial number *and* its port, because several adapters can have the same serial number.

| Event while a claim holds the device | New pods | Pods that have the device |
|---|---|---|
| It is unplugged, or plugged into a different port | do not get it: it has the taint `drakit.dev/gone` | if the policy sets `onVanish: Evict`, are evicted after `nodeplugin.devices.goneEvictionDelay` (10 s by default) |
| It returns to the same port with the same number | get it when it is free | keep it |
| It returns with a different number, for example after a hub reset | do not get it: it has the taint `hostdev.drakit.dev/renumbered` | if the policy sets `onVanish: Evict`, are evicted immediately |
| Another device gets its number | do not get the other device, which is not published (reason `InUse`) | are not affected |
| The policy is deleted, no longer matches the device, or changes `sharing` or `group` | do not get it, not even under a different name | keep it: they are never evicted |
| The node plugin cannot read a host file that it must check | do not get it: it has the taint `hostdev.drakit.dev/unreadable` | keep it: they are never evicted |

- After a device returns with a different number, a running container can still open whichever device now has the old number.
  The node plugin prepares the claim again within seconds, and containers that restart get the new number. The taint stays until
  the claim is released. To release the claim, delete the pod.
- If you reduce `sharing.users` while a claim holds one of the removed entries, hostdev publishes no free entry of this
  device until the claim is released.
- A change of the policy or of the DRAConsumableCapacity feature gate can switch a device between separate entries and one
  device with a capacity. While a claim holds a device in its old form, hostdev taints the
  devices in the new form with `hostdev.drakit.dev/shared`.

When the cause is resolved, hostdev publishes or prepares the device. You do not need to restart anything.
[Device health](device-health.md#devices-that-vanish) describes the grace period."""

REFUSED = """\
## Devices that are not published

hostdev leaves out a matching device for one of these reasons. The
[NodeDeviceReport](slices.md#nodedevicereport) and the log contain the message:

| Reason | Causes |
|---|---|
| `Dangerous` | the device is [dangerous](#dangerous-devices), and the chart or the policy does not allow it |
| `InUse` | the node uses the block device, or a claim holds one of these: the device under a different name, its device number, or another device with the same identity |
| `NoIdentity` | the device has no [stable identity](#device-names) |
| `NotSupported` | the device is a [disk](../admin/disks.md), or a loop or zram device that writes to one |
| `Other` | the zram device has no `disksize` |
| `TooMany` | the policy has reached its [limit](limits.md) on this node |
| `Unreadable` | a file of the host cannot be read, or the device node does not have the number that sysfs reports |
| `WrongKind` | the device belongs to a different subsystem than the matcher specifies |

| Reason for a block device | Remedy |
|---|---|
| `it is a disk, and hostdev publishes no disk; ...` | use a [CSI driver](../admin/disks.md), and narrow the policy's matchers |
| `it is a loop device with a backing file; ...` | detach the file: `losetup --detach` |
| `it is a zram device that writes to ...` | set up the zram device without `backing_dev` |
| `it has no size: ...` | set the zram device's `disksize` |
| `it is mounted at ...`, `a swap area`, `part of a mounted btrfs`, `the backing file of ...` | stop this use on the node |
| `... is built on it` | remove the volume or the array from the device |
| `the driver cannot determine which block devices are in use: ...` | correct the problem that the reason names |"""

DANGEROUS = """\
## Dangerous devices

A dangerous device gives a container control of the node or its data. hostdev publishes such a device only if both of these
settings allow it:

- `hostdev.allowDangerous: true` in the chart's values. Changing this value restarts the node plugin.
- `allow.dangerous: true` in the policy.

Without `allow.dangerous`, a policy is invalid in each of these cases:

- a path names a dangerous device, or matches all devices
- a matcher contains only a subsystem
- the policy mounts a host path that needs `allow.dangerous`: see [container.mounts](#pathmount)

With `allow.dangerous` but without `hostdev.allowDangerous`, such a policy is valid but publishes no device, and its `Ready`
condition has the reason `NodeProblems`. If only a glob, a link or another property matches a dangerous device, hostdev
publishes the other devices of the policy.

These device nodes under `/dev` are dangerous:"""

HARDWARE = """\
For other devices, hostdev reads the properties of the hardware:

| Device | Dangerous |
|---|---|
| Terminal (`tty`) | if the kernel uses it as its console |
| USB hub or root hub (`usb`) | always |
| USB device (`usb`) with a disk, network adapter, Bluetooth adapter or keyboard in sysfs | always |
| Other USB device (`usb`) | if an interface has USB class 02 (communications), 08 (mass storage), 0a (CDC data) or e0 (wireless controller), is an RNDIS network adapter, or has the boot protocol of a keyboard or mouse |
| Input device (`input/event*`) | if it has a letter key, a digit key, SysRq or a power key, or udev identifies it as a keyboard |
| Raw HID device (`hidraw*`, `usb/hiddev*`) | if it belongs to a keyboard, or its interface has the boot protocol of a keyboard or mouse |
| I2C bus (`i2c-*`) | if it is an SMBus controller on PCI |

hostdev reads the USB descriptors of all configurations and alternate settings. A device with malformed descriptors is
dangerous. hostdev does not publish a device whose properties it cannot read.

A device node in the subsystem `usb` (a path under `/dev/bus/usb`) gives a pod the whole USB device. If possible, publish a
more specific device node, such as the `tty` of a modem or the `hidraw` node of a security key.

!!! warning "The list is not complete"

    Decide for each device whether you trust the pods that can claim it."""

CONDITION = """\
## The Ready condition

| Reason | Status | Meaning |
|---|---|---|
| `Applied` | `True` | at least one node has a matching device, and every node that reports the policy applies its current version |
| `NoDeviceMatched` | `False` | no node has a device that the policy matches |
| `NoNodes` | `Unknown` | no node plugin has reported the policy |
| `Pending` | `Unknown` | some nodes have not yet reported the current version |
| `NodeProblems` | `False` | some nodes cannot apply the policy: the message names the nodes and the problem |
| `DeviceClassConflict` | `False` | a DeviceClass with that name exists and does not belong to the policy |

The condition ignores nodes whose node plugin has never reported the policy. `Applied` does not mean that a device is published:
hostdev might leave out every matching device. `status.devices` is the number of published devices. If a new version is invalid,
the last valid version stays in effect."""


def page() -> str:
    """Return the page."""
    return markdown.document(
        "Host device policies",
        description="The fields of a HostDevicePolicy, device names, dangerous devices, and the reasons why a device is not published.",
        source="the model of HostDevicePolicy",
        body=[
            "A HostDevicePolicy (`drakit.dev/v1alpha1`, short name `hdp`) is a cluster-scoped object that selects devices of nodes for\n"
            "the driver `hostdev`. [Publish host devices](../admin/host-devices.md) shows how to write one.",
            *configuration.section("Fields", FIELDS, HostDevicePolicySpec),
            MATCHING,
            NAMES,
            HELD,
            REFUSED,
            DANGEROUS,
            markdown.table(
                ("Device nodes", "Such a device"),
                [
                    (", ".join(map(markdown.code, globs)), danger)
                    for globs, danger in DANGEROUS_NODES.items()
                ],
            ),
            HARDWARE,
            CONDITION,
        ],
    )
