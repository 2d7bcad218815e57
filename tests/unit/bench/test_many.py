"""The driver of many devices: what it says it has is what the measurement waits for."""

from __future__ import annotations

import pytest

from bench.many import LEVEL, Many, ManyConfig, levels, names
from tests.fakes.node import StaticNode


def published(inventory):
    return {device.name: device.attributes[LEVEL] for device in inventory}


@pytest.mark.parametrize("devices", [1, 67, 134, 200])
@pytest.mark.parametrize("changes", [0, 1, 150, 401])
async def test_the_devices_after_so_many_changes(tmp_path, devices, changes):
    file = tmp_path / "changes"
    file.write_text("0")
    config = ManyConfig(devices=devices, changes=file)
    stream = Many(config, StaticNode(name="node-1")).devices()
    first = published(await anext(stream))
    file.write_text(str(changes))
    found = [first, *[published(await anext(stream)) for _ in range(changes)]]
    await stream.aclose()
    wanted = [
        dict(zip(names(devices), levels(devices, changes=done), strict=True))
        for done in range(changes + 1)
    ]
    assert found == wanted
