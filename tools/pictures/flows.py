"""
Diagrams of sequences: the life of a claim and of a device, a prepare, a device change.

The facts are those of docs/reference/device-health.md and docs/reference/node-plugin.md; a test
compares the modules in the pictures with the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tools.pictures.svg import Picture

RECOVERY = "recoveryPeriod (30 s)"
EVICTION = "evictionDelay (10 s)"
GRACE = "endpointStopGracePeriod (5 min)"


def life_of_a_claim() -> Picture:
    picture = Picture(
        "Life of a claim",
        "A claim is created, allocated by the scheduler, prepared by the node plugin, used by the"
        " containers of a pod, and unprepared when the pod ends. Then other claims can get the"
        " device.",
        760,
        560,
    )
    steps = (
        (
            "Pending",
            ("no device yet",),
            "box",
            "You",
            "create a claim, or Kubernetes does so from a template",
        ),
        (
            "Allocated, reserved",
            ("for one pod, on one node",),
            "box",
            "Scheduler",
            "selects a node and free devices of its ResourceSlices",
        ),
        (
            "preparing",
            ("in the node's checkpoint",),
            "ours",
            "kubelet",
            "calls NodePrepareResources of the node plugin",
        ),
        (
            "prepared",
            ("the CDI file exists",),
            "ours",
            "Node plugin",
            "calls the driver, stores the result, writes the CDI file",
        ),
        (
            "In use",
            ("the containers have the device",),
            "good",
            "Container runtime",
            "applies the CDI file and starts the containers",
        ),
        (
            "unpreparing",
            ("other claims are refused",),
            "warn",
            "kubelet",
            "calls NodeUnprepareResources after the pod has ended",
        ),
        (
            "Released",
            ("others can get the device",),
            "box",
            "Node plugin",
            "calls the driver, removes CDI file and entry",
        ),
    )
    for number, (state, lines, kind, actor, action) in enumerate(steps):
        y = 22 + 76 * number
        picture.box(170, y, 200, 50, state, lines, kind=kind)
        picture.text(156, y + 30, actor, style="b", anchor="end")
        picture.text(386, y + 30, action, size=11.5)
        if number:
            picture.arrow([(270, y - 26), (270, y)])
    return picture


def life_of_a_device() -> Picture:
    picture = Picture(
        "Life of a device",
        "A published device is free or allocated. An unhealthy device is tainted with"
        " drakit.dev/unhealthy until it has been healthy for recoveryPeriod. A device that its"
        " driver does not list any more is tainted with drakit.dev/gone while a claim holds it,"
        " and then removed. The devices of a stopped driver are tainted with drakit.dev/stopped"
        " and removed after endpointStopGracePeriod.",
        760,
        520,
    )
    picture.box(16, 16, 728, 410, "Published in a ResourceSlice", kind="zone", top=True)
    free = picture.box(40, 70, 180, 60, "Healthy, free", ["new claims get it"], kind="good")
    used = picture.box(530, 70, 190, 60, "Healthy, allocated", ["a pod uses it"], kind="good")
    undo = picture.box(
        280, 150, 196, 66, "Unpreparing", ["drakit.dev/unpreparing", "NoSchedule"], kind="warn"
    )
    sick = picture.box(
        40, 256, 196, 66, "Unhealthy", ["drakit.dev/unhealthy", "NoSchedule"], kind="warn"
    )
    evict = picture.box(
        40, 378, 196, 40, "", ["drakit.dev/unhealthy", "NoSchedule and NoExecute"], kind="bad"
    )
    stopped = picture.box(
        524, 256, 196, 66, "Driver stopped", ["drakit.dev/stopped", "NoSchedule"], kind="warn"
    )
    vanished = picture.box(
        282,
        256,
        196,
        66,
        "Gone, still held",
        ["drakit.dev/gone", "NoSchedule or NoExecute"],
        kind="warn",
    )
    removed = picture.box(524, 456, 196, 44, "Not published", ["device or pool removed"])
    picture.arrow([free.right(), used.left()], "allocated and prepared")
    picture.arrow(
        [(580, 130), (580, 183), undo.right()], "the pod ends", at=(572, 176), anchor="end"
    )
    picture.arrow(
        [undo.left(), (200, 183), (200, 130)], "driver confirms", at=(208, 150), anchor="start"
    )
    picture.arrow([(70, 130), (70, 256)], ["unhealthy:", "at once"], at=(78, 228), anchor="start")
    picture.arrow(
        [(150, 256), (150, 130)], ["healthy for", RECOVERY], at=(158, 228), anchor="start"
    )
    picture.arrow(
        [sick.bottom(), evict.top()],
        [f"evict_pods for {EVICTION}:", "pods are evicted"],
        at=(146, 346),
        anchor="start",
    )
    picture.arrow(
        [(640, 130), (640, 256)],
        ["driver fails or is", "unavailable: at once"],
        at=(632, 228),
        anchor="end",
    )
    picture.arrow([(680, 256), (680, 130)], "it returns", at=(686, 176), anchor="start")
    picture.arrow(
        [(540, 130), (540, 164), (488, 164), (488, 289), vanished.right()],
        ["not listed:", "at once"],
        at=(480, 234),
        anchor="end",
    )
    picture.arrow(
        [(380, 322), (380, 478), removed.left()],
        ["the claim is", "released"],
        at=(372, 400),
        anchor="end",
    )
    picture.arrow(
        [stopped.bottom(), removed.top()], ["unavailable for", GRACE], at=(614, 370), anchor="end"
    )
    picture.arrow([(690, 456), (690, 426)], dashed=True)
    picture.text(364, 464, "A free device that is not listed is removed at once.", anchor="end")
    picture.text(
        364, 484, "If the driver lists a device again, it is published again.", anchor="end"
    )
    return picture


def prepare() -> Picture:
    actors = (
        "kubelet",
        "kubelet/dra",
        "claims/queue",
        "claims/prepare",
        "claims/checkpoint",
        "endpoints/batches",
        "connection",
    )
    picture = Picture(
        "A prepare, through the modules of the node plugin",
        "The call of the kubelet goes through kubelet/dra, claims/queue and claims/prepare. The"
        " intent is written to claims/checkpoint, endpoints/batches calls the driver, and the"
        " result is written before the CDI files.",
        900,
        630,
    )
    at = [70 + 127 * number for number in range(len(actors))]
    for x, actor in zip(at, actors, strict=True):
        picture.box(x - 61, 16, 122, 34, "", [actor])
        picture.line([(x, 50), (x, 612)], dashed=True)
    K, D, Q, P, C, E, V = range(7)
    y = 84

    def call(begin: int, end: int, text: str, back: bool = False) -> None:
        nonlocal y
        middle = (at[begin] + at[end]) / 2
        picture.arrow([(at[begin], y), (at[end], y)], text, at=(middle, y - 7), dashed=back)
        y += 34

    def note(x: int, text: str) -> None:
        nonlocal y
        picture.text(at[x] + 10, y - 8, text, style="label dim")
        y += 28

    call(K, D, "NodePrepare")
    call(D, Q, "prepare, claims")
    note(Q, "one queue for each claim UID; a retry joins work in flight")
    call(Q, P, "batch")
    call(P, C, "find entries")
    note(P, "fetch claims, check allocations")
    call(P, C, "intent")
    call(P, E, "prepare(batch)")
    note(P, "calls for one device never overlap")
    call(E, V, "prepare(claims)")
    call(V, E, "edits or errors", back=True)
    call(E, P, "results, in groups", back=True)
    call(P, C, "result, CDI files")
    call(P, Q, "answers", back=True)
    call(Q, D, "answers", back=True)
    note(Q, 'or "still preparing" after 40 s')
    call(D, K, "response", back=True)
    return picture


def device_change() -> Picture:
    picture = Picture(
        "A device change, through the modules of the node plugin",
        "A connection reports an inventory or health to endpoints/latest_value, endpoints/endpoint"
        " passes it to devices/manager, which wakes slices/publisher. Writes that differ go to the"
        " API server. For devices that are not listed any more, devices/gone asks claims/checkpoint"
        " whether claims hold them.",
        760,
        330,
    )
    source = picture.box(
        20, 30, 200, 74, "Connection", ["driver thread, backend", "or device plugin"]
    )
    latest = picture.box(
        280, 30, 200, 74, "endpoints/latest_value", ["newest value,", "rate limit"], kind="ours"
    )
    endpoint = picture.box(540, 30, 200, 74, "endpoints/endpoint", kind="ours")
    manager = picture.box(
        540, 164, 200, 74, "devices/manager", ["devices/pool_state", "devices/taints"], kind="ours"
    )
    rows = picture.box(540, 274, 200, 40, "", ["claims/checkpoint"], kind="ours")
    publisher = picture.box(
        280,
        164,
        200,
        74,
        "slices/publisher",
        ["slices/pool_publisher:", "rate limit for each pool"],
        kind="ours",
    )
    plan = picture.box(280, 274, 200, 40, "", ["slices/plan, slices/packing"], kind="ours")
    picture.box(20, 254, 200, 60, "API server")
    picture.arrow([source.right(), latest.left()], ["inventory", "health"])
    picture.arrow([latest.right(), endpoint.left()])
    picture.arrow(
        [endpoint.bottom(), manager.top()],
        "replaced, reported, stopped",
        at=(632, 138),
        anchor="end",
    )
    picture.arrow([manager.left(), publisher.right()], "wake")
    picture.arrow(
        [manager.bottom(), rows.top()], "devices/gone: held?", at=(632, 262), anchor="end"
    )
    picture.arrow([publisher.bottom(), plan.top()])
    picture.arrow([plan.left(), (220, 294)], "writes")
    picture.arrow([(120, 254), (120, 201), publisher.left()], "watch", at=(190, 194))
    return picture


PICTURES: Final[Mapping[str, Callable[[], Picture]]] = {
    "life-of-a-claim": life_of_a_claim,
    "life-of-a-device": life_of_a_device,
    "prepare": prepare,
    "device-change": device_change,
}
