"""
The cluster of the tests: one per session, which is started if it is not up, and stopped at the end.

It differs from the cluster of `make cluster-up` and `make demo`, because tests kill, cut off and
uninstall components. With KEEP_CLUSTER=1 it keeps running, and the next run uses it. CLUSTER_NAME
names another cluster.
"""

import os
from collections.abc import Iterator

import pytest

from e2e.cluster.api import Cluster, Options
from e2e.cluster.choice import cluster_of_tests
from e2e.cluster.gates import defaults, gates_of_tests, in_range
from e2e.features import FEATURES, UnknownFeatureError, names_of, selected

pytest_plugins = ["e2e.fixtures"]

MARKERS = ("needs", "gate", "kubernetes")
"""The markers of tests that need certain clusters."""

TIMEOUT_SECONDS = 300
"""Default time limit for a test on a cluster. The first test also starts the cluster and the
releases."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cluster")
    nodes = int(os.environ.get("CLUSTER_NODES") or 2)
    group.addoption("--cluster-nodes", type=int, default=nodes, help="nodes of the tests' cluster")
    group.addoption(
        "--gate",
        action="append",
        default=[],
        metavar="NAME[=false]",
        help="a feature gate of the tests' cluster",
    )
    group.addoption(
        "--features",
        action="append",
        default=[],
        metavar="NAME,NAME",
        help=f"only tests of these features: {', '.join(FEATURES)}",
    )
    group.addoption(
        "--exclude-feature",
        action="append",
        default=[],
        metavar="NAME,NAME",
        help="leave out the tests of these features",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    try:
        wanted = names_of(*config.option.features)
        excluded = names_of(*config.option.exclude_feature)
        features = {item: _features(item) for item in items}
    except UnknownFeatureError as error:
        raise pytest.UsageError(str(error)) from error
    left_out = [
        item for item in items if not selected(features[item], wanted=wanted, excluded=excluded)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    skip_unsupported(items)
    # The pages install a release with the name that the other tests share.
    items.sort(key=lambda item: "pages" not in features[item])
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


def skip_unsupported(items: list[pytest.Item]) -> None:
    """Skip the tests whose marker `needs` names a capability that the provider lacks, and those
    whose markers `gate` and `kubernetes` require another release of Kubernetes."""
    if not any(item.get_closest_marker(name) for item in items for name in MARKERS):
        return
    chosen = cluster_of_tests("")
    known = defaults(chosen.minor)
    for item in items:
        if missing := sorted(set(_named(item, "needs")) - chosen.capabilities):
            reason = f"the provider {chosen.provider} cannot do this: {', '.join(missing)}"
            item.add_marker(pytest.mark.skip(reason=reason))
        if missing := sorted(set(_named(item, "gate")) - known.keys()):
            reason = f"Kubernetes {chosen.minor} does not know {', '.join(missing)}"
            item.add_marker(pytest.mark.skip(reason=reason))
        for marker in item.iter_markers("kubernetes"):
            if not in_range(chosen.minor, **marker.kwargs):
                limits = " and ".join(f"{name} {minor}" for name, minor in marker.kwargs.items())
                reason = f"not for Kubernetes {chosen.minor} ({limits})"
                item.add_marker(pytest.mark.skip(reason=reason))


def _named(item: pytest.Item, name: str) -> Iterator[str]:
    for marker in item.iter_markers(name):
        yield from marker.args


def cluster_gates(config: pytest.Config) -> dict[str, bool]:
    """Return the gates of the session's cluster, or those with which it will be started."""
    gates = gates_of_tests(cluster_of_tests("").minor)
    for text in config.option.gate:
        name, _, value = text.partition("=")
        gates[name] = value != "false"
    return gates


def _features(item: pytest.Item) -> frozenset[str]:
    return names_of(*(name for marker in item.iter_markers("feature") for name in marker.args))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The session's cluster, with its nodes ready."""
    chosen = cluster_of_tests("")
    found_up = chosen.is_up()
    keep = os.environ.get("KEEP_CLUSTER") == "1"
    nodes: int = request.config.option.cluster_nodes
    chosen.start(Options(nodes=nodes, gates=cluster_gates(request.config), kept=keep))
    yield chosen
    if not found_up and not keep:
        chosen.stop()
        assert chosen.leftovers() == []
