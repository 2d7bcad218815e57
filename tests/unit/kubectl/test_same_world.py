"""`kubectl drakit explain` knows what the operator knows."""

from __future__ import annotations

import pytest

from drakit_cli.kubectl import questions
from drakit_explain.kinds import DRIVERS, KINDS, MAINTENANCES, PODS, Kind
from drakit_explain.world import World


@pytest.fixture
def full(site):
    """An object of each kind that decides about a pod; a waiting pod has a template."""
    site.served = {"resource.k8s.io": ["v1", "v1beta2"], "drakit.dev": ["v1beta1"]}
    site.node("n1")
    site.device_class("gpu")
    site.slice("s1", "gpu-0")
    site.claim("held", device="gpu-0", pod="other", namespace="elsewhere")
    site.template("t")
    site.report("n1")
    site.policy("fuse", observedGeneration=1)
    site.store("/api/v1/namespaces/lab", {"metadata": {"labels": {"a": "b"}}})
    hard = {"count/resourceclaims.resource.k8s.io": "9"}
    site.store("/api/v1/namespaces/lab/resourcequotas/q", {"status": {"hard": hard}})
    taint = {"key": "repair", "effect": "NoSchedule"}
    rule = {"deviceSelector": {"driver": "x"}, "taint": taint}
    site.store("/apis/resource.k8s.io/v1beta2/devicetaintrules/r", {"spec": rule})
    site.pod("p", resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "t"}])
    return site


def path_of(kind: Kind) -> str:
    version = {"devicetaintrules": "v1beta2"}.get(kind.plural, kind.versions[0])
    return f"/apis/{kind.group}/{version}/{kind.plural}" if kind.group else f"/api/v1/{kind.plural}"


@pytest.mark.parametrize("target", ["pod/p", "-A", "-f"])
async def test_all_kinds_of_the_operator_are_loaded(full, run, monkeypatch, tmp_path, target):
    worlds: list[World] = []

    def keep(session, found, **options):
        worlds.append(found.world)
        return allocator(session, found, **options)

    allocator = questions.open_allocator
    monkeypatch.setattr(questions, "open_allocator", keep)
    arguments = [target]
    if target == "-f":
        path = tmp_path / "pod.yaml"
        metadata = "apiVersion: v1, kind: Pod, metadata: {name: new}"
        claims = "[{name: gpu, resourceClaimTemplateName: t}]"
        path.write_text(f"{{{metadata}, spec: {{resourceClaims: {claims}}}}}")
        arguments.append(str(path))
    await run("explain", *arguments)
    (world,) = worlds
    unread = (DRIVERS, MAINTENANCES)  # no explanation reads these
    for kind in (each for each in KINDS if each not in unread):
        facts = [
            kind.project(body, path_of(kind).split("/")[-2]) for body in full.objects(path_of(kind))
        ]
        assert facts, kind
        if kind is not PODS:
            assert list(world.of(kind.type).values()) == facts, kind
