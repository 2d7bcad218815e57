"""What a page that failed leaves must not reach the pages after it."""

from __future__ import annotations

from subprocess import CompletedProcess

from e2e.pages.state import State


class FakeCluster:
    """Records the calls of kubectl, and has no releases."""

    nodes = ("node-1", "node-2")

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def kubectl(self, *args: str, **_: object) -> CompletedProcess[str]:
        self.calls.append(args)
        return CompletedProcess(args, 0, stdout="", stderr="")

    def helm(self, *args: str, **_: object) -> CompletedProcess[str]:
        return CompletedProcess(args, 0, stdout="[]", stderr="")


def test_recovery_uncordons_the_nodes_and_removes_rules_and_policies_after_the_pods():
    cluster = FakeCluster()
    State(cluster, build="").recover({("DeviceClass", "<none>", "kvm"), ("Pod", "default", "kvm")})
    assert ("uncordon", "node-1", "node-2") in cluster.calls
    deleted = [call[1] for call in cluster.calls if call[0] == "delete"]
    assert deleted[:4] == ["Pod", "DeviceClass", "devicetaintrules", "hostdevicepolicies"]
