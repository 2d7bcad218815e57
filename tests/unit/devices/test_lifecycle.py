from __future__ import annotations

import pytest

from tests.unit.devices.conftest import DRIVER, NODE, Node, inventory, pass_time, shown

pytestmark = pytest.mark.looptime


async def test_an_endpoint_that_stops_is_tainted_at_once_and_untainted_when_it_returns(node: Node):
    async with node.plugin() as manager:
        manager.replaced(DRIVER, inventory("a", "b"))
        before = manager.publication()
        assert shown(before) == {NODE: {"a": [], "b": []}}
        assert before.complete
        manager.stopped(DRIVER, "it ended")
        assert shown(manager.publication()) == {NODE: {"a": ["stopped"], "b": ["stopped"]}}
        assert manager.stop_reason == "it ended"
        await pass_time(299)
        assert shown(manager.publication()) == {NODE: {"a": ["stopped"], "b": ["stopped"]}}
        manager.replaced(DRIVER, inventory("a", "b"))
        assert manager.publication() == before
        assert manager.stop_reason is None
        await pass_time(1000)
        assert manager.publication() == before
