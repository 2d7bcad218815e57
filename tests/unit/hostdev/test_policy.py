"""Valid specs of a HostDevicePolicy, and errors with field and remedy."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from drakit import Version
from drakit_drivers.hostdev.policy import Attribute, HostDevicePolicySpec, LabelSelector
from drakit_formats.resource.nodes import selects_labels

SERIAL = {"subsystem": "tty", "usb": {"vendorID": "1a86", "productID": "7523"}}


def spec(*match: dict, **fields) -> HostDevicePolicySpec:
    return HostDevicePolicySpec.model_validate({"match": match or [SERIAL], **fields})


def problems(fields: dict) -> list[tuple[str, str]]:
    with pytest.raises(ValidationError) as caught:
        HostDevicePolicySpec.model_validate({"match": [SERIAL], **fields})
    return [
        (".".join(map(str, problem["loc"])), problem["msg"]) for problem in caught.value.errors()
    ]


def test_one_matcher_is_enough():
    made = spec()
    assert made.model_dump(mode="json", by_alias=True, exclude_defaults=True) == {"match": [SERIAL]}
    assert (made.group, made.sharing.mode, made.container.permissions) == (
        "Node",
        "Exclusive",
        "rw",
    )


EVERYTHING = {
    "nodeSelector": {"matchLabels": {"example.com/lab": "yes"}},
    "match": [
        {
            "subsystem": "tty",
            "paths": ["/dev/ttyUSB*"],
            "usb": {"vendorID": "0403", "productID": "6001", "serial": "A9", "port": "1-2.3"},
            "driver": "ftdi_sio",
            "udevProperties": {"ID_MODEL": "FT232*"},
            "parent": {"subsystem": "usb", "driver": "usb", "name": "1-*"},
        },
        {
            "subsystem": "drm",
            "pci": {"vendorID": "8086", "deviceID": "56a0", "classID": "03"},
        },
    ],
    "group": "Unit",
    "sharing": {"mode": "Capacity", "users": 4},
    "container": {
        "path": "/dev/lab/",
        "permissions": "r",
        "uid": 1000,
        "gid": 44,
        "mode": "0660",
        "env": {"BAUD": "9600"},
        "mounts": [{"hostPath": "/usr/share/lab", "containerPath": "/lab"}],
        "byIdLinks": "Always",
    },
    "attributes": {"room": {"string": "A1"}, "slot": {"int": 3}, "new": {"bool": False}},
    "onVanish": "Evict",
    "deviceClass": {"name": "serial.lab", "extendedResourceName": "lab.example.com/serial"},
    "allow": {"unstableIdentity": "Always"},
}


def test_all_fields_in_camel_case_are_read_and_written():
    made = HostDevicePolicySpec.model_validate(EVERYTHING)
    written = made.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    assert written == EVERYTHING
    assert HostDevicePolicySpec.model_validate(written) == made


def test_hexadecimal_digits_are_lower_case_as_in_sysfs():
    made = spec({"subsystem": "tty", "usb": {"vendorID": "1A86"}})
    assert made.match[0].usb
    assert made.match[0].usb.vendor_id == "1a86"


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ({"string": ""}, ""),
        ({"int": 0}, 0),
        ({"bool": False}, False),
        ({"version": "1.2.3"}, Version("1.2.3")),
    ],
)
def test_an_attribute_has_the_type_of_its_field(attribute, value):
    made = Attribute.model_validate(attribute).value
    assert made == value
    assert type(made) is type(value)


def tty(**fields) -> dict:
    return SERIAL | fields


@pytest.mark.parametrize(
    ("match", "where", "reason"),
    [
        pytest.param({"paths": ["/dev/a"]}, "match.0.subsystem", "required", id="no-subsystem"),
        pytest.param(tty(subsystem="a/b"), "match.0.subsystem", "pattern", id="a-path"),
        pytest.param(
            tty(subsystem="scsi_generic"),
            "match.0.subsystem",
            "use a CSI driver for disks",
            id="raw-access-to-disks",
        ),
        pytest.param(tty(path="/dev/a"), "match.0.path", "Extra inputs", id="unknown-field"),
        pytest.param(
            tty(paths=["/etc/passwd"]), "match.0.paths.0", "under /dev", id="outside-of-dev"
        ),
        pytest.param(
            tty(usb={"vendorID": 403}), "match.0.usb.vendorID", "in quotes", id="number-for-hex"
        ),
        pytest.param(
            tty(usb={"vendorID": "0x403"}), "match.0.usb.vendorID", "pattern", id="not-4-digits"
        ),
        pytest.param(tty(usb={}), "match.0.usb", "at least one field", id="empty-usb"),
        pytest.param(
            tty(usb={"port": "usb1"}), "match.0.usb.port", "pattern", id="port-is-no-port"
        ),
        pytest.param(
            tty(usb={"path": "1-2.3"}), "match.0.usb.path", "pattern", id="path-has-a-bus-number"
        ),
        pytest.param(
            tty(pci={"classID": "030000ff"}), "match.0.pci.classID", "pattern", id="long-class"
        ),
        pytest.param(tty(parent={}), "match.0.parent", "at least one field", id="empty-parent"),
        pytest.param(
            tty(parent={"name": "a/b"}), "match.0.parent.name", "not a path", id="parent-path"
        ),
        pytest.param(
            tty(udevProperties={"a b": "x"}), "match.0.udevProperties.a b.[key]", "pattern",
            id="property-name",
        ),
        pytest.param(
            {"subsystem": "tty"}, "", "match[0]: matches every device of tty", id="too-much"
        ),
        pytest.param(
            tty(paths=["/dev/t*", "/dev/*"]), "", "match[0].paths[1]: /dev/* matches every device",
            id="everything",
        ),
        pytest.param(
            {"subsystem": "mem", "paths": ["/dev/mem"]}, "",
            "match[0].paths[0]: /dev/mem is dangerous: it accesses", id="dangerous",
        ),
    ],
)  # fmt: skip
def test_a_bad_matcher_is_refused_with_field_and_reason(match, where, reason):
    ((place, text),) = problems({"match": [match]})
    assert place == where
    assert reason in text


@pytest.mark.parametrize(
    ("fields", "where", "reason"),
    [
        pytest.param({"match": []}, "match", "at least one", id="no-matcher"),
        pytest.param({"match": [SERIAL] * 17}, "match", "at most 16", id="too-many-matchers"),
        pytest.param(
            {"nodeSelector": {"matchLabels": {"a b": "c"}}},
            "nodeSelector.matchLabels.a b.[key]", "pattern", id="key",
        ),
        pytest.param(
            {"nodeSelector": {"zone": "a"}},
            "nodeSelector", "zone: write labels below matchLabels", id="labels-alone",
        ),
        pytest.param(
            {"nodeSelector": {"matchLabels": {"room": "lab"}, "zone": "a"}},
            "nodeSelector", "zone: write labels below matchLabels", id="labels-beside",
        ),
        pytest.param({"nodeSelector": {}}, "nodeSelector", "omit it", id="empty-selector"),
        pytest.param(
            {"nodeSelector": {"matchLabels": {}}}, "nodeSelector", "omit it", id="no-labels"
        ),
        pytest.param(
            {"nodeSelector": {"matchExpressions": [{"key": "zone", "operator": "In"}]}},
            "nodeSelector.matchExpressions.0", "need values", id="in-nothing",
        ),
        pytest.param(
            {"nodeSelector": {"matchExpressions": [
                {"key": "zone", "operator": "Exists", "values": ["a"]}
            ]}},
            "nodeSelector.matchExpressions.0", "the others have none", id="exists-with-values",
        ),
        pytest.param({"group": "unit"}, "group", "'Node', 'Unit' or 'Set'", id="group"),
        pytest.param({"sharing": {"users": 2}}, "sharing", "needs mode", id="users-alone"),
        pytest.param({"sharing": {"mode": "Users"}}, "sharing", "needs users", id="mode-alone"),
        pytest.param(
            {"sharing": {"mode": "Users", "users": 1025}}, "sharing.users", "1024", id="users-1025"
        ),
        pytest.param(
            {"match": [{"subsystem": "block", "paths": ["/dev/vdb"]}],
             "sharing": {"mode": "Capacity", "users": 2}},
            "", "sharing.mode: Capacity is not supported for block devices", id="shared-disk",
        ),
        pytest.param(
            {"match": [{"subsystem": "block", "paths": ["/dev/vdb"]}], "group": "Unit"},
            "", "group: Unit is not supported for block devices", id="grouped-disk",
        ),
        pytest.param({"onRelease": "Wipe"}, "onRelease", "Extra inputs", id="wipe"),
        pytest.param(
            {"group": "Unit", "container": {"path": "/dev/one"}},
            "", "container.path: a unit can have several device nodes", id="one-path-of-a-unit",
        ),
        pytest.param({"container": {"path": "/etc/x"}}, "container.path", "under /dev/", id="path"),
        pytest.param({"container": {"path": "/dev/"}}, "container.path", "under /dev/", id="root"),
        pytest.param({"container": {"path": "/dev/../x"}}, "container.path", "'..'", id="upwards"),
        pytest.param(
            {"container": {"path": "/dev/*/a"}}, "container.path", "last component", id="wildcard"
        ),
        pytest.param(
            {"container": {"permissions": "rx"}}, "container.permissions", "rwm", id="letters"
        ),
        pytest.param(
            {"container": {"permissions": "rr"}}, "container.permissions", "twice", id="twice"
        ),
        pytest.param({"container": {"mode": 660}}, "container.mode", "in quotes", id="mode-number"),
        pytest.param({"container": {"mode": "0888"}}, "container.mode", "octal", id="not-octal"),
        pytest.param({"container": {"gid": -1}}, "container.gid", "greater", id="gid"),
        pytest.param(
            {"container": {"env": {"A-B": "1"}}}, "container.env.A-B.[key]", "pattern", id="name"
        ),
        pytest.param(
            {"container": {"env": {"HOSTDEV_A": "1"}}}, "container.env", "reserved", id="own-name"
        ),
        pytest.param(
            {"container": {"env": {"A": "1\n2"}}}, "container.env", "control", id="control"
        ),
        pytest.param(
            {"container": {"mounts": [{"hostPath": "/etc", "containerPath": "/e"}]}},
            "", "container.mounts[0].hostPath: /etc is not under", id="mount-of-etc",
        ),
        pytest.param(
            {"container": {"mounts": [
                {"hostPath": "/usr/share/../../etc", "containerPath": "/e"}
            ]}},
            "container.mounts.0.hostPath", "'..'", id="mount-upwards",
        ),
        pytest.param(
            {"container": {"mounts": [{"hostPath": "/usr/share/a", "containerPath": "/proc"}]}},
            "container.mounts.0", "choose another path", id="mount-over-proc",
        ),
        pytest.param(
            {"container": {"mounts": [
                {"hostPath": f"/usr/share/{name}", "containerPath": "/x"} for name in "ab"
            ]}},
            "container.mounts", "two mounts have the containerPath /x", id="two-mounts-at-a-path",
        ),
        pytest.param(
            {"allow": {"dangerous": True}}, "allow.dangerous", "'Always' or 'Never'", id="boolean"
        ),
        pytest.param({"attributes": {"a": {}}}, "attributes.a", "exactly one", id="no-value"),
        pytest.param(
            {"attributes": {"path": {"int": 1}}}, "attributes", "is reserved", id="own-attribute"
        ),
        pytest.param(
            {"attributes": {"a": {"int": 1, "bool": True}}}, "attributes.a", "exactly one",
            id="two-values",
        ),
        pytest.param(
            {"attributes": {"a": {"string": "é" * 40}}}, "attributes.a", "64 bytes", id="long"
        ),
        pytest.param(
            {"attributes": {"a": {"version": "1.2"}}}, "attributes.a.version", "pattern",
            id="version-of-two-parts",
        ),
        pytest.param(
            {"attributes": {"a.b/c": {"int": 1}}}, "attributes.a.b/c.[key]", "pattern",
            id="attribute-with-domain",
        ),
        pytest.param(
            {"deviceClass": {"name": "A"}}, "deviceClass.name", "pattern", id="name-of-class"
        ),
        pytest.param(
            {"deviceClass": {"extendedResourceName": "cpu"}},
            "deviceClass.extendedResourceName", "pattern", id="resource-without-domain",
        ),
        pytest.param(
            {"deviceClass": {"extendedResourceName": "a.kubernetes.io/b"}},
            "deviceClass.extendedResourceName", "your own domain", id="resource-of-kubernetes",
        ),
        pytest.param({"allow": {"all": True}}, "allow.all", "Extra inputs", id="unknown-allowance"),
    ],
)  # fmt: skip
def test_a_bad_field_is_refused_with_field_and_reason(fields, where, reason):
    ((place, text),) = problems(fields)
    assert place == where
    assert reason in text


IN_LAB = {"key": "room", "operator": "In", "values": ["lab", "attic"]}
NOT_IN_LAB = IN_LAB | {"operator": "NotIn"}
HAS_ROOM = {"key": "room", "operator": "Exists"}
HAS_NO_ROOM = {"key": "room", "operator": "DoesNotExist"}


@pytest.mark.parametrize(
    ("requirement", "nodes"),
    [
        pytest.param(IN_LAB, {"lab"}, id="in"),
        pytest.param(NOT_IN_LAB, {"hall", "none"}, id="not-in-selects-nodes-without-the-label"),
        pytest.param(HAS_ROOM, {"lab", "hall"}, id="exists"),
        pytest.param(HAS_NO_ROOM, {"none"}, id="does-not-exist"),
    ],
)
def test_a_node_selector_has_the_operators_of_kubernetes(requirement, nodes):
    rooms = {"lab": {"room": "lab"}, "hall": {"room": "hall"}, "none": {"other": "lab"}}
    raw = {"matchExpressions": [requirement]}
    selector = LabelSelector.model_validate(raw)
    assert {name for name, labels in rooms.items() if selector.selects(labels)} == nodes
    # The operator reads the selector of the object.
    assert {name for name, labels in rooms.items() if selects_labels(raw, labels)} == nodes


def test_a_node_must_meet_all_requirements_of_a_node_selector():
    raw = {"matchLabels": {"zone": "a"}, "matchExpressions": [IN_LAB, {**HAS_ROOM, "key": "usb"}]}
    selector = LabelSelector.model_validate(raw)
    node = {"zone": "a", "room": "lab", "usb": ""}
    assert selector.selects(node)
    assert selects_labels(raw, node)
    for key in node:
        fewer = {name: node[name] for name in node if name != key}
        assert not selector.selects(fewer)
        assert not selects_labels(raw, fewer)
    assert selects_labels(None, {})
