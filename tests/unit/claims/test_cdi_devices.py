"""CDI devices of other CDI files: their names pass from the driver to the kubelet."""

from __future__ import annotations

import json

import pytest

from tests.fakes.claims import DRIVER, claim_body, reference

A = "uid-a"

GPU, TOOLS = "vendor.example/gpu=0", "vendor.example/tools=all"


def own(index: int) -> str:
    return f"{DRIVER}/claim={A}-{index}"


@pytest.fixture(autouse=True)
def claim(claims, devices):
    devices.others = {"cam-0": (GPU, TOOLS, GPU), "cam-1": (TOOLS,), "cam-2": (TOOLS,)}
    claims.store(claim_body(A, "cam-0"))


async def named(plugin) -> list[tuple[str, ...]]:
    answer = (await plugin.prepare(reference(A)))[A]
    assert answer.error is None
    return [device.cdi_ids for device in answer.devices]


async def test_they_are_answered_after_our_own_and_stored_but_not_in_our_file(plugin):

    assert await named(plugin) == [(own(0), GPU, TOOLS)]

    (entry,) = (await plugin.checkpoint.find([A])).values()
    assert entry.devices[0].cdi_devices == (GPU, TOOLS)
    text = (plugin.cdi / f"{DRIVER}-claim_{A}.json").read_text()
    assert "vendor.example" not in text
    assert json.loads(text)["devices"][0]["containerEdits"] == {
        "deviceNodes": [{"path": "/dev/cam-0"}]
    }


async def test_a_repeat_and_a_restart_answer_them_without_the_driver(start, claims, devices):
    plugin = await start()
    first = await named(plugin)
    assert await named(plugin) == first
    plugin = await start()
    assert await named(plugin) == first
    claims.answers = False
    assert await named(plugin) == first
    assert devices.prepares == 1


async def test_after_a_reboot_the_latest_answer_of_the_driver_counts(start, devices):
    await named(await start())
    devices.others = {"cam-0": (TOOLS,)}
    plugin = await start(boot_id="boot-2")
    assert await named(plugin) == [(own(0), TOOLS)]
    devices.others = {}
    plugin = await start(boot_id="boot-3")
    assert await named(plugin) == [(own(0),)]
    assert await named(plugin) == [(own(0),)]
    assert devices.prepares == 3


async def test_a_name_comes_once_in_a_request_and_in_each_request_that_needs_it(plugin, claims):
    claims.store(
        claim_body(
            A,
            {"device": "cam-0", "request": "main/large"},
            {"device": "cam-1", "request": "main/large"},
            {"device": "cam-2", "request": "spare"},
        )
    )
    assert await named(plugin) == [(own(0), GPU, TOOLS), (own(1),), (own(2), TOOLS)]
    assert await named(plugin) == [(own(0), GPU, TOOLS), (own(1),), (own(2), TOOLS)]


async def test_a_bad_name_fails_its_claim_alone_and_undoes_it(plugin, claims, devices):
    devices.others = {"cam-0": ("gpu0",)}
    claims.store(claim_body("uid-b", "cam-9"))
    answers = await plugin.prepare(reference(A), reference("uid-b"))
    assert "cdi_devices[0] must be a qualified CDI name" in answers[A].error
    assert answers["uid-b"].error is None
    assert await plugin.states() == {"uid-b": "prepared"}
    assert devices.prepared == {"cam-9": "uid-b"}
