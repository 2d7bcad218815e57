"""
Diagrams of the parts of drakit: the architecture, and what runs where.

The facts are those of docs/reference/node-plugin.md and docs/admin/security.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tools.pictures.svg import Picture


def architecture() -> Picture:
    picture = Picture(
        "Architecture of drakit",
        "The node plugin publishes devices as ResourceSlices. The scheduler allocates them to"
        " claims. The kubelet asks the node plugin to prepare a claim, the node plugin writes a CDI"
        " file, and the container runtime gives the device to the container. The operator"
        " explains in Events why a pod is waiting.",
        760,
        640,
    )
    picture.box(16, 16, 728, 128, "Control plane", kind="zone", top=True)
    scheduler = picture.box(36, 62, 160, 58, "Scheduler", ["allocates devices"])
    picture.box(
        280, 48, 200, 82, "API server", ["ResourceSlices, DeviceClasses", "ResourceClaims, pods"]
    )
    picture.box(560, 56, 168, 66, "drakit operator", ["a Deployment"], kind="ours")
    picture.arrow([scheduler.right(), (280, 91)], "claims", both=True)
    picture.arrow([(560, 78), (480, 78)], "Events")
    picture.arrow([(480, 106), (560, 106)], "watch", at=(520, 124))

    picture.box(16, 186, 728, 438, "Node", kind="zone", top=True)
    kubelet = picture.box(36, 240, 160, 60, "kubelet")
    plugin = picture.box(
        290, 232, 180, 190, "drakit node plugin", ["a DaemonSet"], kind="ours", top=True
    )
    picture.box(302, 280, 156, 28, "", ["claims, checkpoint"])
    picture.box(302, 316, 156, 28, "", ["devices, slices"])
    picture.box(302, 352, 156, 58, "", ["drivers in Python:", "hostdev, simulated,", "your own"])
    backend = picture.box(560, 240, 168, 66, "Backend", ["your driver, any language", "own pod"])
    adapter = picture.box(560, 340, 168, 66, "Device plugin", ["without changes", "own pod"])
    cdi = picture.box(300, 470, 160, 44, "CDI file", ["one for each claim"])
    runtime = picture.box(36, 462, 160, 60, "Container runtime", ["containerd, CRI-O"])
    pod = picture.box(36, 562, 160, 48, "Container", ["with its device"], kind="good")
    devices = picture.box(
        300, 562, 428, 48, "Devices of the node", ["/dev/kvm, cameras, serial ports, ..."]
    )

    picture.arrow([(350, plugin.y), (350, 130)], "ResourceSlices", at=(342, 208), anchor="end")
    picture.arrow([(410, 130), (410, plugin.y)], "claims", at=(418, 170), anchor="start")
    picture.arrow(
        [(116, kubelet.y), (116, 158), (310, 158), (310, 130)],
        "pods",
        at=(124, 174),
        anchor="start",
        both=True,
    )
    picture.arrow([kubelet.right(), (290, 270)], ["prepare,", "unprepare"], both=False)
    picture.arrow([(470, 273), backend.left()], "gRPC", both=True)
    picture.arrow([(470, 373), adapter.left()], "gRPC", both=True)
    picture.arrow([plugin.bottom(), cdi.top()], "writes", at=(388, 450), anchor="start")
    picture.arrow([cdi.left(), runtime.right()], "reads", at=(248, 486))
    picture.arrow([kubelet.bottom(), runtime.top()], "starts", at=(124, 385), anchor="start")
    picture.arrow([runtime.bottom(), pod.top()], "creates", at=(124, 546), anchor="start")
    picture.arrow([devices.left(), pod.right()], "opens", at=(248, 580), both=True)
    return picture


def what_runs_where() -> Picture:
    picture = Picture(
        "What runs where",
        "The operator runs on the pod network. The node plugin runs on the pod network of its node,"
        " without privileges, and reaches the kubelet, backends, device plugins and the container"
        " runtime only through sockets and files in directories of the host.",
        760,
        668,
    )
    picture.box(16, 16, 728, 76, "Control plane", kind="zone", top=True)
    api = picture.box(300, 34, 190, 44, "API server")
    picture.box(16, 124, 728, 156, "Pod network", kind="zone", top=True)
    operator = picture.box(
        36,
        160,
        210,
        104,
        "Operator",
        ["Deployment, user 65532", "8081 probes", "8080 metrics"],
        kind="ours",
    )
    plugin = picture.box(
        290,
        160,
        210,
        104,
        "Node plugin",
        ["DaemonSet, user 0,", "no capabilities", "8081 probes, 8080 metrics"],
        kind="ours",
    )
    picture.box(
        540, 160, 184, 104, "Your pods", ["backends,", "device plugins,", "pods with claims"]
    )
    picture.arrow([operator.top(), (141, 56), api.left()], "HTTPS", at=(220, 50))
    picture.arrow([plugin.top(), api.bottom()], "HTTPS", at=(404, 114), anchor="start")

    picture.box(
        16, 312, 728, 340, "Host of the node: processes, sockets and files", kind="zone", top=True
    )
    rows: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
        ("plugins_registry/", ("<driver>-<uid>-reg.sock",), ("the kubelet finds drivers",)),
        (
            "plugins/drakit.dev/drivers/<driver>/",
            ("dra-<uid>.sock", "checkpoint.db"),
            ("the kubelet prepares claims", "the node plugin stores claims"),
        ),
        ("plugins/drakit.dev/backends/<entry>/", ("*.sock",), ("a backend listens",)),
        (
            "plugins/drakit.dev/device-plugins/<entry>/",
            ("kubelet.sock",),
            ("a device plugin registers",),
        ),
        ("pod-resources/", ("kubelet.sock",), ("the kubelet lists used devices",)),
        ("/var/run/cdi/", ("<driver>-claim_<UID>.json",), ("the container runtime reads",)),
        ("/dev, /run/udev, /proc/1/mountinfo", ("read-only",), ("hostdev finds devices",)),
    )
    heads = (("Directory (below /var/lib/kubelet)", 36), ("Socket or file", 318), ("Use", 528))
    for text, x in heads:
        picture.text(x, 362, text, style="b")
    y = 372.0
    for directory, files, uses in rows:
        picture.line([(32, y), (728, y)])
        picture.text(36, y + 22, directory, size=11.5, style="m")
        for number, (file, use) in enumerate(zip(files, uses, strict=True)):
            picture.text(318, y + 22 + 17 * number, file, size=11.5, style="m")
            picture.text(528, y + 22 + 17 * number, use)
        y += 18 + 17 * len(files)
    return picture


PICTURES: Final[Mapping[str, Callable[[], Picture]]] = {
    "architecture": architecture,
    "what-runs-where": what_runs_where,
}
