"""Situations: what is missing, selectors, allocated and tainted devices."""

from __future__ import annotations

from collections.abc import Iterator

from drakit_explain.codes import Code
from tests.situations.scene import Scene, device, devices
from tests.situations.table import MODEL_X, MODEL_Z, fits, situation

TAINT = {"key": "example.com/broken", "value": "yes", "effect": "NoSchedule"}


# ------------------------------------------------------------ something is missing


@situation(
    Code.DEVICE_CLASS_MISSING,
    classless=True,
    words=(
        'of claim template "waits", request "gpu", does not exist; create it or correct',
        'DeviceClass "class-missing.test"',
    ),
)
def class_missing(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.request())
    yield
    s.device_class()


@situation(
    Code.DEVICE_CLASS_MISSING,
    words=(
        'DeviceClass "absent.test"',
        'request "gpu/best", does not exist; create it or correct deviceClassName',
    ),
)
def class_of_an_alternative_missing(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.alternatives(s.request("best", of="absent.test"), s.request("good")))
    yield
    s.device_class(name="absent.test")


@situation(
    Code.RESOURCE_CLAIM_MISSING,
    words=(
        'ResourceClaim "disk" for pod claim "claim-0" does not exist in namespace',
        "create it or correct resourceClaimName",
    ),
    unseen=True,
)
def claim_missing(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(claims=["disk"])
    yield
    s.claim("disk", s.request())


@situation(
    Code.RESOURCE_CLAIM_TEMPLATE_MISSING,
    words=(
        'ResourceClaimTemplate "disk" for pod claim "claim-0" does not exist',
        "create it (if the API server rejects it, correct the reported error), or correct",
    ),
    unseen=True,
)
def template_missing(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(templates=["disk"])
    yield
    s.template("disk", s.request())


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=(
        'no node publishes a device of DeviceClass "nothing-published.test" that matches request',
        "no slice of driver nothing-published.test has devices, so check that the driver is",
    ),
)
def nothing_published(s: Scene) -> Iterator[None]:
    s.pod(s.request())
    yield
    s.publish(device("a"))


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=(
        "asks for 3 devices of DeviceClass",
        "but only 2 matching devices are published; the pod would fit on node",
        'if request "gpu" asked for 2 instead of 3',
    ),
)
def count_above_published(s: Scene) -> Iterator[None]:
    s.publish(devices("a", "b"))
    s.pod(s.request(count=3))
    yield
    s.pod(s.request(count=2))


# ------------------------------------------------------------ selectors

FAST = 'device.attributes["DRIVER"].fast'


@situation(Code.NO_DEVICE_PUBLISHED, words=("rejects 2",), never=("had no selector",))
def class_selector_rejects(s: Scene) -> Iterator[None]:
    s.device_class(MODEL_Z)
    s.publish(device("a", {"model": "x"}), device("b", {"model": "y"}))
    s.pod(s.request())
    yield
    s.device_class(MODEL_X)


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=(
        "the request rejects 1 with selector device.attributes[",
        'if request "gpu" had no selector',
    ),
)
def request_selector_rejects(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"model": "x"}))
    s.pod(s.request("gpu", MODEL_Z))
    yield
    s.pod(s.request("gpu", MODEL_X))


@situation(
    Code.SELECTOR_FAILED,
    words=(
        "its selector fails: no such key: fast, on device a of pool",
        "the scheduler aborts its search on node",
        "check the spelling of fast; if only some devices have it, test for it first (has(device",
        ".fast)), or test device.driver first",
        'if no selector failed there, or if request "gpu" had no selector',
    ),
)
def selector_fails_on_a_device(s: Scene) -> Iterator[None]:
    s.publish(device("a"), device("b", {"fast": True}))
    s.pod(s.request("gpu", FAST))
    yield
    s.pod(s.request("gpu", f'"fast" in device.attributes["DRIVER"] && {FAST}'))


@situation(Code.SELECTOR_FAILED, words=("so check the spelling of fsat", "device a has fast"))
def attribute_is_misspelled(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"fast": True}))
    s.pod(s.request("gpu", FAST.replace("fast", "fsat")))
    yield
    s.pod(s.request("gpu", FAST))


@situation(
    Code.SELECTOR_FAILED,
    words=("its selector does not compile",),
    unreal="the API server refuses the selector",
)
def selector_does_not_compile(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"fast": True}))
    s.pod(s.request("gpu", "device.fast"))
    yield
    s.pod(s.request("gpu", FAST))


FIRMWARE = 'device.attributes["DRIVER"].firmware'


@situation(
    Code.SELECTOR_FAILED,
    words=("firmware is a version, which is compared with compareTo", 'compareTo(semver("1.2.0"))'),
)
def version_is_compared_like_a_string(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"firmware": {"version": "1.3.0"}}))
    s.pod(s.request("gpu", f'{FIRMWARE} >= "1.2.0"'))
    yield
    s.pod(s.request("gpu", f'{FIRMWARE}.compareTo(semver("1.2.0")) >= 0'))


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=('no device has the value "A100" of', 'model: they have "NVIDIA A100-SXM4-40GB"'),
)
def no_device_has_the_value(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"model": "NVIDIA A100-SXM4-40GB"}))
    s.pod(s.request("gpu", MODEL_X.replace('"x"', '"A100"')))
    yield
    s.pod(s.request("gpu", MODEL_X.replace('"x"', '"NVIDIA A100-SXM4-40GB"')))


@situation(Code.NO_DEVICE_PUBLISHED, words=("/modle, but some have", "/model"))
def tested_attribute_is_misspelled(s: Scene) -> Iterator[None]:
    s.publish(device("a", {"model": "x"}))
    s.pod(s.request("gpu", '"modle" in device.attributes["DRIVER"]'))
    yield
    s.pod(s.request("gpu", '"model" in device.attributes["DRIVER"]'))


@situation(
    Code.NO_DEVICE_PUBLISHED,
    words=("no slice of driver driver-is-mispelled.test has devices, but driver", "publishes some"),
)
def driver_is_misspelled(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.request("gpu", 'device.driver == "driver-is-mispelled.test"'))
    yield
    s.pod(s.request("gpu", 'device.driver == "DRIVER"'))


@situation(
    Code.DEVICE_CLASS_MISSING,
    words=('deviceClassName ("class-is-misspelled.test" exists)',),
)
def class_is_misspelled(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.request(of="class-is-mispelled.test"))
    yield
    s.pod(s.request())


@situation(
    Code.RESOURCE_CLAIM_TEMPLATE_MISSING,
    words=('resourceClaimTemplateName ("disks" exists)',),
    unseen=True,
)
def template_is_misspelled(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.template("disks", s.request())
    s.pod(templates=["disk"])
    yield
    s.pod(templates=["disks"])


# ------------------------------------------------------------ allocated devices


@situation(
    Code.DEVICES_ALLOCATED,
    words=(
        "the only device of DeviceClass",
        "is allocated to claim explain-",
        "(pod holder); the pod would fit on node",
        "(pod holder) released its devices",
    ),
    never=("preempt",),
)
def allocated_to_a_pod(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.holder(s.request())
    s.pod(s.request())
    yield
    s.delete("pods", "holder")


# ------------------------------------------------------------ taints


@situation(Code.DEVICES_TAINTED, words=("example.com/broken",))
def tainted_by_the_driver(s: Scene) -> Iterator[None]:
    s.publish(device("a", taints=[TAINT]))
    s.pod(s.request())
    yield
    s.publish(device("a"), generation=2)


@situation(
    Code.DEVICES_TAINTED,
    words=(
        "which the request does not tolerate; the pod would fit on node",
        'if request "gpu" tolerated the taint example.com/broken:NoSchedule',
    ),
)
def tainted_until_tolerated(s: Scene) -> Iterator[None]:
    s.publish(device("a", taints=[TAINT]))
    s.pod(s.request())
    yield
    s.pod(s.request(tolerations=[{"key": TAINT["key"], "operator": "Exists"}]))


@situation(Code.DEVICES_TAINTED, words=("example.com/broken:NoExecute",))
def toleration_of_another_effect(s: Scene) -> Iterator[None]:
    s.publish(device("a", taints=[{**TAINT, "effect": "NoExecute"}]))
    s.pod(s.request(tolerations=[{"operator": "Exists", "effect": "NoSchedule"}]))
    yield
    # Without the effect, the scheduler finds the taint tolerated, but the controller that evicts
    # pods from tainted devices does not, and deletes the pod at once.
    s.pod(s.request(tolerations=[{"operator": "Exists", "effect": "NoExecute"}]))


@situation(
    Code.DEVICES_TAINTED,
    words=(
        "is tainted with example.com/broken, which the request does not tolerate; DeviceTaintRule",
        "-rule sets a taint, which is removed when the rule is deleted",
    ),
)
def tainted_by_a_rule(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    rule = s.taint_rule(**TAINT)
    s.pod(s.request())
    yield
    s.delete("devicetaintrules", rule)


# Kubernetes 1.34 does not have the effect None.
@fits(oldest="1.35")
def rule_without_an_effect(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.taint_rule(**{**TAINT, "effect": "None"})
    s.pod(s.request())
    yield


@situation(
    Code.DEVICES_ALLOCATED,
    words=(
        "of the 2 devices of DeviceClass",
        "(pod holder); 1 is tainted with example.com/broken, which the request does not tolerate",
        'released its devices, or if request "gpu" tolerated the taint',
    ),
)
def one_tainted_one_allocated(s: Scene) -> Iterator[None]:
    s.publish(device("a"), device("b", taints=[TAINT]))
    s.holder(s.request())
    s.pod(s.request())
    yield
    s.delete("pods", "holder")
