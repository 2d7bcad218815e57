"""Paths of the API server."""

import pytest

from drakit_daemon.kube import resource_path
from drakit_daemon.kube.request import Target, parse_path


@pytest.mark.parametrize(
    ("args", "path"),
    [
        (("v1", "nodes", {}), "/api/v1/nodes"),
        (("v1", "pods", {"namespace": "a", "name": "b"}), "/api/v1/namespaces/a/pods/b"),
        (("v1", "namespaces", {"name": "a"}), "/api/v1/namespaces/a"),
        (
            ("resource.k8s.io/v1", "resourceclaims", {"namespace": "a"}),
            "/apis/resource.k8s.io/v1/namespaces/a/resourceclaims",
        ),
        (
            ("a.b/v1", "cs", {"namespace": "a", "name": "b", "subresource": "status"}),
            "/apis/a.b/v1/namespaces/a/cs/b/status",
        ),
    ],
)
def test_a_path_is_made_and_read_back(args, path):
    version, resource, names = args
    assert resource_path(version, resource, **names) == path
    group = version.rpartition("/")[0]
    assert parse_path(path) == Target(group=group, resource=resource, **names)


@pytest.mark.parametrize(
    "names", [{"name": ""}, {"namespace": "", "name": "a"}, {"subresource": "status"}]
)
def test_a_missing_part_is_refused(names):
    """Deleting an object without a name would delete all of them."""
    with pytest.raises(ValueError):
        resource_path("v1", "pods", **names)


def test_a_name_cannot_leave_its_place():
    assert resource_path("v1", "nodes", name="../secrets") == "/api/v1/nodes/..%2Fsecrets"


@pytest.mark.parametrize("path", ["/version", "/apis", "/api/v1", "/"])
def test_other_paths_name_no_resource(path):
    assert parse_path(path) is None
