"""
``drakit setup``: installs and upgrades drakit's CustomResourceDefinitions, and the policies of a
release.

The chart runs it in hooks, because Helm never upgrades the definitions of a chart, and `helm
--wait` would wait until each policy of a release matches a device. Each object carries the release
that owns it. What another release or a person owns is never changed.

It must not know what is in a definition or a policy: the API server checks both.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml

from drakit_cli.answers import CommandError, UsageError
from drakit_daemon.kube import ApiError, ConfigError, NotFoundError, Session, connect, resource_path
from drakit_formats.crds import API_VERSION
from drakit_formats.crds import POLICIES as POLICIES_PLURAL

FIELD_MANAGER = "drakit-setup"
CRDS = ("apiextensions.k8s.io/v1", "customresourcedefinitions")
POLICIES = (API_VERSION, POLICIES_PLURAL)

_NAME_LABEL = "drakit.dev/release-name"
_NAMESPACE_LABEL = "drakit.dev/release-namespace"

SERVED_SECONDS = 30.0
"""Longest wait until the API server serves a new kind; it takes about a second."""

POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A release of the chart."""

    namespace: str
    name: str

    @staticmethod
    def parse(text: str) -> Owner:
        """Read ``NAMESPACE/NAME``; raises UsageError."""
        namespace, slash, name = text.partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise UsageError(f"--release {text} must be NAMESPACE/NAME")
        return Owner(namespace=namespace, name=name)

    @staticmethod
    def of(body: Mapping[str, Any]) -> Owner | None:
        """Return the release that owns an object."""
        labels: dict[str, str] = body["metadata"].get("labels") or {}
        namespace, name = labels.get(_NAMESPACE_LABEL), labels.get(_NAME_LABEL)
        return Owner(namespace=namespace, name=name) if namespace and name else None

    @property
    def labels(self) -> dict[str, str]:
        return {
            "app.kubernetes.io/managed-by": FIELD_MANAGER,
            _NAMESPACE_LABEL: self.namespace,
            _NAME_LABEL: self.name,
        }

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def crds(options: argparse.Namespace) -> int:
    """Install or upgrade the definitions; return the exit code."""
    owner = Owner.parse(options.release)
    definitions = tuple(read_definitions())
    return _run(options, lambda session: apply_crds(session, owner, definitions))


def policies(options: argparse.Namespace) -> int:
    """Make the HostDevicePolicies of a release those of a file; return the exit code."""
    owner = Owner.parse(options.release)
    wanted = {} if options.file is None else _read(options.file)
    return _run(options, lambda session: apply_policies(session, owner, wanted))


def _run(options: argparse.Namespace, work: Callable[[Session], Awaitable[int]]) -> int:
    async def run() -> int:
        async with await connect(
            options.kubeconfig, context=options.context, user_agent="drakit-setup"
        ) as session:
            return await work(session)

    try:
        return asyncio.run(run())
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except ApiError as error:
        raise CommandError(str(error)) from error


# ------------------------------------------------------------ definitions


async def apply_crds(
    session: Session, owner: Owner, definitions: Iterable[Mapping[str, Any]]
) -> int:
    """Apply definitions, but none that another release owns; return the exit code."""
    for definition in definitions:
        metadata: dict[str, Any] = {**definition["metadata"], "labels": owner.labels}
        body = {**definition, "metadata": metadata}
        name = body["metadata"]["name"]
        path = resource_path(*CRDS, name=name)
        with suppress(NotFoundError):
            holder = Owner.of(await session.get(path))
            if holder not in (None, owner):
                print(f"{name}: release {holder} owns it, unchanged")
                continue
        await session.apply(path, body, field_manager=FIELD_MANAGER)
        await _served(session, path)
        print(f"{name}: applied")
    return 0


def read_definitions() -> Iterator[dict[str, Any]]:
    """Read drakit's definitions, which the package or the repository contains."""
    packaged = resources.files("drakit_cli") / "crds"
    folder = packaged if packaged.is_dir() else Path(__file__).parents[2] / "charts/drakit/crds"
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        if file.name.endswith(".yaml"):
            yield yaml.safe_load(file.read_text(encoding="utf-8"))


async def _served(session: Session, path: str) -> None:
    try:
        async with asyncio.timeout(SERVED_SECONDS):
            while not _established(await session.get(path)):  # noqa: ASYNC110  (it is remote)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError as error:
        raise CommandError(
            f"the API server does not serve {path.rpartition('/')[2]} after {SERVED_SECONDS:g} s; "
            "run 'kubectl describe crd' for its conditions"
        ) from error


def _established(body: Mapping[str, Any]) -> bool:
    conditions: list[dict[str, Any]] = body.get("status", {}).get("conditions") or []
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)


# ------------------------------------------------------------ policies


async def apply_policies(session: Session, owner: Owner, wanted: Mapping[str, Any]) -> int:
    """
    Apply the policies of a release, and delete its others; return 1 if one is refused.

    A refused policy does not affect the others.
    """
    try:
        listed = await _list(session, wait=bool(wanted))
    except NotFoundError:
        print(
            "HostDevicePolicy is not installed: run 'helm show crds CHART | kubectl apply "
            "--server-side -f -' to install it"
        )
        return 1 if wanted else 0
    refused = [
        name
        for name, spec in sorted(wanted.items())
        if not await _apply(session, owner, name, spec, old=listed.get(name))
    ]
    for name, body in sorted(listed.items()):
        if Owner.of(body) == owner and name not in wanted:
            with suppress(NotFoundError):
                await session.delete(
                    resource_path(*POLICIES, name=name), uid=body["metadata"]["uid"]
                )
            print(f"hostdevicepolicy {name}: deleted")
    return 1 if refused else 0


async def _list(session: Session, *, wait: bool) -> dict[str, dict[str, Any]]:
    """List all policies by name; their kind may have been installed a moment ago."""
    deadline = asyncio.get_running_loop().time() + (SERVED_SECONDS if wait else 0)
    while True:
        try:
            found = await session.list(resource_path(*POLICIES))
            return {body["metadata"]["name"]: body for body in found.items}
        except NotFoundError:
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(POLL_SECONDS)


async def _apply(
    session: Session, owner: Owner, name: str, spec: object, *, old: Mapping[str, Any] | None
) -> bool:
    if old is not None and Owner.of(old) != owner:
        holder = Owner.of(old)
        whose = f"release {holder}" if holder else "another owner"
        _complain(name, f"it exists, and {whose} owns it; rename this one, or delete the other")
        return False
    body = {
        "apiVersion": POLICIES[0],
        "kind": "HostDevicePolicy",
        "metadata": {"name": name, "labels": owner.labels},
        "spec": spec,
    }
    try:
        await session.apply(resource_path(*POLICIES, name=name), body, field_manager=FIELD_MANAGER)
    except ApiError as error:
        _complain(name, str(error))
        return False
    print(f"hostdevicepolicy {name}: applied")
    return True


def _complain(name: str, reason: str) -> None:
    print(f"hostdev.policies.{name}: {reason}", file=sys.stderr)


def _read(path: Path) -> dict[str, Any]:
    try:
        body: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(body, dict):
        raise UsageError(f"{path} must be a mapping from the names of policies to their specs")
    return cast("dict[str, Any]", body)
