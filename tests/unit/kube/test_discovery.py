"""Discovery finds the served version of a group, from an API server in memory."""

from __future__ import annotations

import json

import pytest

from drakit_daemon.kube import UnavailableError
from drakit_daemon.kube.discovery import VersionNotServedError, minor_release, served_version

GROUP = "resource.k8s.io"
KNOWN = ("v1", "v1beta2", "v1beta1")


@pytest.mark.parametrize(
    ("served", "chosen"),
    [
        pytest.param(["v1", "v1beta2", "v1beta1"], "v1", id="all-are-served"),
        pytest.param(["v1beta1", "v1alpha3", "v1"], "v1", id="our-order-counts-not-the-servers"),
        pytest.param(["v1alpha3", "v1beta1", "v1beta2"], "v1beta2", id="no-v1"),
        pytest.param(["v1beta1", "v1alpha3"], "v1beta1", id="only-the-oldest-that-we-know"),
        pytest.param(["v2", "v1"], "v1", id="beside-one-that-we-do-not-know-yet"),
    ],
)
async def test_the_first_version_that_we_know_is_taken(session, api_server, served, chosen):
    api_server.served = {GROUP: served}
    assert await served_version(session, GROUP, KNOWN) == chosen
    assert api_server.requests == [("GET", f"/apis/{GROUP}")]


@pytest.mark.parametrize(
    ("served", "says"),
    [
        pytest.param([], "does not serve it at all", id="no-such-group"),
        pytest.param(["v1alpha3", "v2"], "serves it in v1alpha3, v2", id="other-versions"),
    ],
)
async def test_a_group_that_is_not_served_is_an_error_that_lists_what_is(
    session, api_server, served, says
):
    api_server.served = {GROUP: served}
    with pytest.raises(VersionNotServedError) as raised:
        await served_version(session, GROUP, KNOWN)
    sentence = str(raised.value)
    assert GROUP in sentence
    assert "v1, v1beta2, v1beta1" in sentence
    assert says in sentence


async def test_a_server_that_does_not_answer_serves_nothing_and_everything(session, api_server):
    api_server.fail("GET", f"/apis/{GROUP}", status=503)
    with pytest.raises(UnavailableError):
        await served_version(session, GROUP, KNOWN)
    assert await served_version(session, GROUP, KNOWN) == "v1"


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        pytest.param("v1.36.3", 36, id="a-release"),
        pytest.param("v1.34.13-eks-a737599", 34, id="of-a-vendor"),
        pytest.param("v2.0.0", None, id="not-of-kubernetes-1"),
        pytest.param(None, None, id="none"),
    ],
)
async def test_the_minor_release_is_read(session, api_server, version, minor):
    api_server.texts["/version"] = json.dumps({"gitVersion": version})
    assert await minor_release(session) == minor
