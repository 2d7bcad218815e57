"""Properties of any edits, specs and bytes: the result is a spec or an error with a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drakit.device import DeviceNode, Edits, Hook, IntelRdt, Mount, NetDevice
from drakit_formats.cdi import InvalidEditsError, InvalidNameError, build_spec, dump_spec, lint_spec
from drakit_formats.cdi.checks import split_qualified_name
from drakit_formats.cdi.text import UnreadableSpecError, parse_json, parse_yaml

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may have other things to do."""

KIND = "camera.example.com/claim"

junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3)
) | st.sampled_from([(), [], {}, {"a": 1}, ("a",), [None], object(), int, 10**5000, "\udc80"])
"""Values that a vendor's defect can leave anywhere."""

odd = st.text(st.characters(codec=None), max_size=20) | st.sampled_from(["", "a\0b", "/a/../b"])
"""Texts of any characters, also of those that are none."""

right_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
right_name = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True)
right_path = st.from_regex(r"(/[a-z0-9]{1,5}){1,3}", fullmatch=True)


def is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def made(wrong: st.SearchStrategy) -> st.SearchStrategy:
    """Edits that are right, but for what is `wrong` here and there."""

    def build(type_: type, **fields: st.SearchStrategy) -> st.SearchStrategy:
        return st.builds(type_, **{name: right(field) for name, field in fields.items()})

    def right(strategy: st.SearchStrategy) -> st.SearchStrategy:
        return st.integers(0, 9).flatmap(lambda n: strategy if n else strategy | wrong)

    def tuples(strategy: st.SearchStrategy) -> st.SearchStrategy:
        return st.lists(right(strategy), max_size=2).map(tuple)

    def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
        return st.none() | strategy

    env = st.dictionaries(right(right_name).filter(is_hashable), right(right_text), max_size=3)
    device_id = st.fixed_dictionaries({"major": st.integers(1, 4095), "minor": st.integers(0, 999)})
    node = st.builds(
        lambda node, numbers: replace(node, **numbers),
        build(
            DeviceNode,
            path=right_path,
            host_path=maybe(right_path),
            type=st.sampled_from([None, "b", "c", "u", "p"]),
            permissions=st.sampled_from([None, "none", "rw", "rwm"]),
            file_mode=maybe(st.integers(0, 0o777)),
            uid=maybe(st.integers(0, 2**32 - 1)),
            gid=maybe(st.integers(0, 2**32 - 1)),
        ),
        right(st.just({}) | device_id).filter(
            lambda numbers: isinstance(numbers, dict) and set(numbers) <= {"major", "minor"}
        ),
    )
    mount = build(
        Mount,
        host_path=right_path,
        container_path=right_path,
        options=st.lists(st.sampled_from(["ro", "nodev"])).map(lambda some: ("bind", *some)),
        type=st.sampled_from([None, "none", "tmpfs"]),
    )
    hook = build(
        Hook,
        name=st.sampled_from(["prestart", "createRuntime", "poststop"]),
        path=right_path,
        args=tuples(right_text),
        env=env,
        timeout_seconds=maybe(st.integers(1, 600)),
    )
    rdt = build(
        IntelRdt,
        clos_id=maybe(right_name),
        l3_cache_schema=maybe(right_text),
        mem_bw_schema=maybe(right_text),
        schemata=tuples(right_name),
        enable_monitoring=st.booleans(),
    )
    return build(
        Edits,
        env=env,
        device_nodes=tuples(node),
        mounts=tuples(mount),
        hooks=tuples(hook),
        net_devices=tuples(build(NetDevice, host_interface_name=right_name, name=right_name)),
        additional_gids=tuples(st.integers(1, 2**31 - 1)),
        intel_rdt=maybe(rdt),
    )


def text_of(edits: object) -> tuple[str, str]:
    """The text of the spec, or the sentence with which the edits were refused."""
    try:
        return dump_spec(build_spec(KIND, [("a", edits)])), ""
    except InvalidEditsError as error:
        return "", str(error)


@patient
@given(made(st.nothing()))
def test_edits_that_are_right_become_a_spec_with_all_of_them(edits):
    text, sentence = text_of(edits)
    if " twice" in sentence:  # the one thing that chance makes wrong
        return
    written = json.loads(text)["devices"][0]["containerEdits"]
    given = {
        "env": edits.env,
        "deviceNodes": edits.device_nodes,
        "mounts": edits.mounts,
        "hooks": edits.hooks,
        "netDevices": edits.net_devices,
        "additionalGids": edits.additional_gids,
    }
    sizes = {name: len(field) for name, field in given.items() if field}
    if not sizes and edits.intel_rdt is None:
        sizes = {"env": 1}  # the variable that a device without edits gets
    assert {name: len(written[name]) for name in written if name != "intelRdt"} == sizes
    assert ("intelRdt" in written) == (edits.intel_rdt is not None)
    assert lint_spec(parse_json(text.encode())) == []


@patient
@given(made(odd) | made(junk))
def test_other_edits_become_a_spec_that_the_linter_finds_nothing_in_or_a_sentence(edits):
    text, sentence = text_of(edits)
    if text:
        assert lint_spec(parse_json(text.encode())) == []
    else:
        assert sentence.startswith(f"CDI device {KIND}=a: ")
        assert sentence.encode()  # it ends in an Event


@patient
@given(st.dictionaries(right_name, right_text, min_size=1, max_size=3))
def test_what_is_written_is_the_same_for_readers_of_json_and_of_yaml(variables):
    text, _ = text_of(Edits(env=variables))
    spec = json.loads(text)
    assert spec["devices"][0]["containerEdits"]["env"] == [
        f"{name}={value}" for name, value in variables.items()
    ]
    assert yaml.safe_load(text) == parse_yaml(text.encode()) == spec


@patient
@given(st.text())
def test_a_device_name_is_accepted_only_if_it_cannot_be_misread(name):
    try:
        found = split_qualified_name(f"{KIND}={name}")
    except InvalidNameError:
        return
    assert found == (KIND, name)
    assert name.isascii()
    assert name[0].isalnum()
    assert name[-1].isalnum()


FIELDS = [
    *("cdiVersion", "kind", "annotations", "devices", "containerEdits", "name", "env", "path"),
    *("deviceNodes", "netDevices", "hooks", "mounts", "intelRdt", "additionalGids", "hostPath"),
    *("type", "major", "minor", "fileMode", "permissions", "uid", "gid", "containerPath"),
    *("options", "hookName", "args", "timeout", "hostInterfaceName", "closID", "schemata"),
    *("l3CacheSchema", "memBwSchema", "enableMonitoring", "enableCMT", "else", "", "a\n"),
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5)
    ),
)
near_specs = st.fixed_dictionaries(
    {
        "cdiVersion": st.sampled_from(["0.3.0", "1.1.0", "v0.7.0", "2.0.0", ""]) | values,
        "kind": st.sampled_from(["a.b/c", "a.b/c.d", "c"]) | values,
        "devices": st.lists(
            st.fixed_dictionaries({"name": st.text(max_size=3), "containerEdits": values})
        ),
    }
)


@patient
@given(near_specs | values)
def test_the_linter_has_a_sentence_for_whatever_was_parsed(spec):
    for problem in lint_spec(spec):
        assert problem.severity in ("error", "warning")
        assert problem.text
        assert len(str(problem)) < 1000
        assert "\n" not in str(problem)


@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
@patient
@given(
    data=st.binary(max_size=64)
    | st.text(
        st.sampled_from(" \n\t\"'{}[]:,-&*!|>%@`#~<0123456789.eoxtrufalsn\\/y"), max_size=30
    ).map(str.encode)
)
def test_whatever_a_file_holds_is_a_value_or_a_sentence(parse, data):
    with suppress(UnreadableSpecError):
        parse(data)


def test_the_library_reads_yaml_without_loading_it_for_those_who_do_not():
    program = "import sys, drakit_formats.cdi; assert 'yaml' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
