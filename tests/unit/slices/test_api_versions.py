"""Slices are read and written in the version of the API that a cluster serves."""

from __future__ import annotations

import pytest

from tests.unit.slices.conftest import Published
from tests.unit.slices.world import device, many, pool, taint

pytestmark = pytest.mark.looptime


def slices_path(version: str) -> str:
    return f"/apis/resource.k8s.io/{version}/resourceslices"


def serve(published: Published, *versions: str) -> None:
    published.server.served["resource.k8s.io"] = [*versions]


@pytest.fixture
async def stopped(published: Published):
    """A publisher that is not started yet."""
    await published.stop()
    return published


@pytest.mark.parametrize(
    ("served", "used"),
    [
        pytest.param(["v1", "v1beta2", "v1beta1"], "v1", id="the-newest-of-all"),
        pytest.param(["v1beta1", "v1beta2"], "v1beta2", id="1.33"),
        pytest.param(["v1beta1", "v1alpha3"], "v1beta1", id="1.32"),
    ],
)
async def test_a_cluster_that_serves(stopped: Published, served, used):
    serve(stopped, *served)
    await stopped.start()
    assert await stopped.publish(pool("a", device("b", taint()))) == ["POST"]
    (body,) = stopped.slices(slices_path(used))
    assert body["apiVersion"] == f"resource.k8s.io/{used}"
    devices = body["spec"]["devices"]
    if used == "v1beta1":
        assert [each.keys() for each in devices] == [{"name", "basic"}] * 2
        assert devices[1]["basic"]["taints"][0]["effect"] == "NoSchedule"
    else:
        assert devices[1]["taints"][0]["effect"] == "NoSchedule"

    assert await stopped.publish(pool("a", "b")) == ["PUT"]
    await stopped.start()
    assert await stopped.settled() == [], "what is read is what was written"


async def test_no_version_that_is_known_is_an_error_and_waited_out(stopped: Published):
    serve(stopped, "v1alpha3")
    await stopped.start()
    assert await stopped.publish(pool("a"), seconds=60) == []
    assert "v1alpha3" in (stopped.publisher.last_error or "")
    serve(stopped, "v1")
    await stopped.settled(60)
    assert stopped.devices() == {"a"}
    assert stopped.publisher.last_error is None


async def test_a_version_that_is_served_no_more_is_noticed_by_a_write(stopped: Published):
    serve(stopped, "v1beta1")
    await stopped.start()
    await stopped.publish(pool("a"))
    serve(stopped, "v1")
    for key in [*stopped.server.cluster.objects]:  # a real server converts what it has stored
        if key[0] == slices_path("v1beta1"):
            del stopped.server.cluster.objects[key]
    await stopped.publish(pool("b"), seconds=120)
    stopped.server.drop_watches()
    await stopped.settled(120)
    assert {each["name"] for b in stopped.slices() for each in b["spec"]["devices"]} == {"b"}


async def test_slices_are_listed_in_pages(stopped: Published):
    await stopped.start()
    assert len(await stopped.publish(pool(*many(3000)))) == 54
    await stopped.stop()
    stopped.link.asked.clear()
    await stopped.start()
    assert await stopped.settled() == []
    lists = [path for method, path in stopped.link.asked if method == "GET" and "slices" in path]
    assert len(lists) == 3
