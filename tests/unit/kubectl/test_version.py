"""``kubectl drakit version``."""

from __future__ import annotations

import asyncio

import pytest

from drakit_cli.kubectl import versions
from drakit_cli.kubectl.main import main


@pytest.fixture(autouse=True)
def installed(monkeypatch, tmp_path):
    """The plugin 0.3.1, with the allocators of two releases."""
    monkeypatch.setattr(versions, "version", lambda name: "0.3.1")
    for release in ("1.35", "1.36"):
        (tmp_path / f"drakit-cel-{release}").touch()
    monkeypatch.setenv("DRAKIT_CEL", str(tmp_path / "drakit-cel-1.36"))


async def test_what_fits_together_has_no_warning(site, run):
    site.release("one", "n1", version="0.2.9")
    site.release("two", "n2", version="0.4.0", operator=0)
    code, out, error = await run("version")
    assert (code, error) == (0, "")
    assert out.splitlines()[:3] == [
        "Plugin: 0.3.1",
        "Kubernetes' allocators on this machine: 1.35, 1.36",
        "Kubernetes: 1.36.3",
    ]
    assert [line.split() for line in out.splitlines()[4:]] == [
        ["NAMESPACE", "RELEASE", "COMPONENT", "VERSION"],
        ["one-system", "one", "nodeplugin", "0.2.9"],
        ["one-system", "one", "operator", "0.2.9"],
        ["two-system", "two", "nodeplugin", "0.4.0"],
    ]


@pytest.mark.parametrize("skewed", ["0.1.0", "0.5.0", "1.3.1"])
async def test_a_release_that_is_too_far_away_is_named(site, run, skewed):
    site.release("one", "n1", version="0.3.0")
    site.release("two", "n2", version=skewed, operator=0)
    code, body = await run.json("version")
    assert (code, body["kind"]) == (0, "Version")
    (warning,) = body["warnings"]
    assert f"nodeplugin of release two in namespace two-system is version {skewed}" in warning


async def test_a_missing_allocator_is_a_warning(site, run):
    site.runs("v1.37.0")
    _, out, _ = await run("version")
    assert "Warning: the allocator of Kubernetes 1.37 is not installed" in out


async def test_without_a_server_the_own_versions_are_shown(site, run, capsys):
    site.fail("*", "/", status=503, times=10)
    code, out, error = await run("version")
    assert (code, out.splitlines()[0]) == (3, "Plugin: 0.3.1")
    assert error.startswith("error: ")
    site.requests.clear()
    assert await asyncio.to_thread(main, ["version", "--client", "--kubeconfig", "/absent"]) == 0
    assert capsys.readouterr().out.startswith("Plugin: 0.3.1\n")
