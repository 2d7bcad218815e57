"""Names of devices and pools: valid labels, readable, and unique."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit_formats.resource.limits import is_dns_label, is_dns_subdomain
from drakit_nodeplugin.endpoints.deviceplugin.messages import (
    MAX_POOL,
    device_name,
    pool_of,
    resource_name_problem,
)

# Texts that come close to names: most of any others would be hashed.
NEAR = st.text(alphabet="ab0xyjnkXY-:._/ é", min_size=1, max_size=24)
ANY = st.text(min_size=1, max_size=80)
PART = st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", fullmatch=True)
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
DOMAIN = st.from_regex(rf"{LABEL}(\.{LABEL}){{0,3}}", fullmatch=True)


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        pytest.param("video-0", "video-0", id="a-label-stays"),
        pytest.param("0000:01:00.0", "0000--k01--k00--p0", id="pci-address"),
        pytest.param("GPU-8f4c-11aa", "x--ygpu-8--nf4c-11aa", id="capitals"),
        pytest.param("/dev/ttyUSB0", "x--sdev--stty--yusb0", id="path"),
        pytest.param("a_b c", "a--ub--wc", id="underscore-and-space"),
        pytest.param("a--b", "a--h-b", id="looks-like-an-escape"),
        pytest.param("x:", "x--nx--k", id="looks-like-the-mark-of-an-escape"),
        pytest.param(":", "x--k", id="only-an-escape"),
        pytest.param("-a-", "x--ha--h", id="hyphens-at-both-ends"),
        pytest.param("é", "x--c3--a9", id="not-ascii"),
    ],
)
def test_names_are_readable_and_stay_the_same(identity, name):
    assert device_name(identity) == name


def test_an_id_that_does_not_fit_becomes_a_hash():
    name = device_name("Card " + "x" * 70)
    assert is_dns_label(name)
    assert name.startswith("card-xxxxx")


@given(st.one_of(NEAR, ANY), st.one_of(NEAR, ANY))
def test_every_name_is_a_label_and_two_ids_have_two_names(one, other):
    names = device_name(one), device_name(other)
    assert all(map(is_dns_label, names))
    assert len({*names}) == len({one, other})


@given(NEAR)
def test_no_id_has_the_name_of_another_as_its_own(identity):
    """An ID that looks like the name of another one gets a name of its own."""
    name = device_name(identity)
    assert name == identity or device_name(name) != name


def test_ten_thousand_similar_ids_have_as_many_names():
    stems = ("gpu-{}", "GPU-{}", "gpu_{}", "gpu:{}", "gpu--{}", "x--{}", "-{}-", "{}." + "y" * 70)
    identities = {stem.format(n) for stem in stems for n in range(1250)}
    assert len(identities) == 10_000
    assert len({device_name(identity) for identity in identities}) == 10_000


# ------------------------------------------------------------ resources


@pytest.mark.parametrize(
    ("resource", "pool"),
    [
        pytest.param("vendor.example/thing", "thing.vendor.example", id="plain"),
        pytest.param("a.b/C_d.e", "x--yc--u--nd--pe.a.b", id="escaped"),
    ],
)
def test_a_pool_is_named_after_its_resource(resource, pool):
    assert pool_of(resource) == pool


@given(DOMAIN, PART)
def test_every_pool_is_a_subdomain(domain, part):
    pool = pool_of(f"{domain}/{part}")
    assert is_dns_subdomain(pool)
    assert len(pool) <= MAX_POOL


@given(DOMAIN, NEAR, NEAR)
def test_two_resources_have_two_pools(domain, one, other):
    pools = {pool_of(f"{domain}/{one}"), pool_of(f"{domain}/{other}")}
    assert len(pools) == len({one, other})


@pytest.mark.parametrize(
    "resource",
    [
        pytest.param("", id="empty"),
        pytest.param("cpu", id="native"),
        pytest.param("kubernetes.io/gpu", id="kubernetes"),
        pytest.param("alpha.kubernetes.io/gpu", id="below-kubernetes"),
        pytest.param("requests.vendor.example/gpu", id="quota"),
        pytest.param("vendor.example/", id="empty-name"),
        pytest.param("Vendor.example/gpu", id="capital-in-domain"),
        pytest.param("vendor.example/a/b", id="two-slashes"),
        pytest.param("vendor.example/-gpu", id="begins-with-a-hyphen"),
        pytest.param(f"vendor.example/{'x' * 64}", id="long-name"),
        pytest.param(f"{'a.' * 122}a/x", id="long-domain"),
        pytest.param("vendor.example/gpu\n", id="line-break"),
    ],
)
def test_names_that_the_kubelet_refuses_are_refused(resource):
    assert resource_name_problem(resource)


def test_a_name_that_can_be_no_attribute_is_refused():
    problem = resource_name_problem(f"ab/{'x' * 62}")
    assert problem is not None
    assert "at most 64 characters" in problem
