"""
``drakit setup``: installs and upgrades drakit's CustomResourceDefinitions, rewrites stored objects
in the current version, applies the policies of a release, and checks the device in a `helm test`.

The chart runs it in hooks, because Helm never upgrades the definitions of a chart, and because
`helm --wait` would wait until each policy of a release matches a device. Each object records the
release that owns it. The command does not change objects that belong to another release, or
policies that a user created. It takes over definitions that record no release. :mod:`.removal`
prepares to uninstall a release.

Does not depend on the content of a definition or a policy, because the API server validates both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from drakit.text import plural
from drakit_cli.answers import CommandError, UsageError
from drakit_cli.connection import fetch_checked
from drakit_daemon.kube import ApiError, ConflictError, NotFoundError, Session, resource_path
from drakit_formats.crds import API_VERSION
from drakit_formats.crds import POLICIES as POLICIES_PLURAL
from drakit_formats.crds import REPORTS as REPORTS_PLURAL

FIELD_MANAGER = "drakit-setup"
CRDS = ("apiextensions.k8s.io/v1", "customresourcedefinitions")
POLICIES = (API_VERSION, POLICIES_PLURAL)

ResultT = TypeVar("ResultT")

_NAME_LABEL = "drakit.dev/release-name"
_NAMESPACE_LABEL = "drakit.dev/release-namespace"

SERVED_SECONDS = 30.0
"""How long to wait until the API server serves a new kind, which usually takes about a second."""

STORAGE_SECONDS = 10.0
"""How long to wait until all API servers store the objects of a changed definition in the new
version. Each API server watches the definitions."""

POLL_SECONDS = 0.5

PAGE_SIZE = 500
"""The number of objects per page of a list."""

MAX_CONFLICTS = 5
"""Maximum number of conflicting writes to one object before the command fails."""


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
    """Install or upgrade the definitions. Return the exit code."""
    owner = Owner.parse(options.release)
    definitions = tuple(read_definitions())
    return fetch_checked(options, lambda session: apply_crds(session, owner, definitions))


def migrate(options: argparse.Namespace) -> int:
    """Rewrite all objects, so that the API server stores them in the current version. Return the
    exit code."""
    names = [each["metadata"]["name"] for each in read_definitions()]
    return fetch_checked(options, lambda session: migrate_objects(session, names))


def policies(options: argparse.Namespace) -> int:
    """Apply the HostDevicePolicies in a file for a release, and delete the other policies of the
    release. Return the exit code."""
    owner = Owner.parse(options.release)
    wanted = _read(options.file)
    return fetch_checked(options, lambda session: apply_policies(session, owner, wanted))


def test(options: argparse.Namespace) -> int:
    """
    Check that this container has the device of its claim. Return the exit code.

    If a container runtime does not support CDI, it starts the container without the device.

    :raises CommandError: the driver's environment variable, or a path in it, does not exist.
    """
    if options.variable is None:
        print("the container has started with its claim")
        return 0
    value = os.environ.get(options.variable, "")
    if not value:
        raise CommandError(
            f"the container has no variable {options.variable}, so the container runtime has not "
            "applied the CDI file of the claim; enable CDI in the container runtime"
        )
    for path in value.split(":"):
        if path.startswith("/") and not os.path.lexists(path):
            raise CommandError(f"{options.variable} has {path}, which the container does not have")
    print(f"the container has its device: {options.variable}={value}")
    return 0


# ------------------------------------------------------------ definitions


async def apply_crds(
    session: Session, owner: Owner, definitions: Iterable[Mapping[str, Any]]
) -> int:
    """
    Apply definitions that no other release owns. Return the exit code.

    If objects are stored in a version that a new definition does not have, the command changes
    nothing, and CommandError explains how to save the objects. Otherwise, the API server would read
    them in another version, and drop fields that this version does not have, such as a policy's
    node selector.
    """
    wanted: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
    refusals: list[str] = []
    for definition in definitions:
        metadata: dict[str, Any] = {**definition["metadata"], "labels": owner.labels}
        body = {**definition, "metadata": metadata}
        old = await _find(session, metadata["name"])
        holder = None if old is None else Owner.of(old)
        if holder not in (None, owner):
            print(f"{metadata['name']}: release {holder} owns it, unchanged")
            continue
        wanted.append((body, old))
        if old is not None and (lost := _lost_versions(old, body)):
            refusals += await _refusals(session, old, lost)
    if refusals:
        raise CommandError("\n".join(refusals))
    for body, old in wanted:
        name, path = body["metadata"]["name"], resource_path(*CRDS, name=body["metadata"]["name"])
        if old is not None and (lost := _lost_versions(old, body)):
            await _drop_versions(session, path, body, old, lost)
        applied = await session.apply(path, body, field_manager=FIELD_MANAGER)
        await _served(session, path)
        print(f"{name}: applied")
        if _stored_versions(applied) not in ([], [_storage_version(applied)]):
            await asyncio.sleep(STORAGE_SECONDS)
            await migrate_objects(session, [name])
    return 0


async def _find(session: Session, name: str) -> dict[str, Any] | None:
    with suppress(NotFoundError):
        return await session.get(resource_path(*CRDS, name=name))
    return None


def _stored_versions(definition: Mapping[str, Any]) -> list[str]:
    return list(definition.get("status", {}).get("storedVersions") or [])


def _storage_version(definition: Mapping[str, Any]) -> str:
    return next(each["name"] for each in definition["spec"]["versions"] if each["storage"])


def _lost_versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the versions in which objects are stored but that the new definition does not have."""
    known = {each["name"] for each in new["spec"]["versions"]}
    return [each for each in _stored_versions(old) if each not in known]


async def _refusals(session: Session, old: Mapping[str, Any], lost: Sequence[str]) -> list[str]:
    """Return the reasons why a definition cannot be replaced. Empty if no objects are stored in
    removed versions."""
    group, plural = old["spec"]["group"], old["spec"]["names"]["plural"]
    name, storage = old["metadata"]["name"], _storage_version(old)
    if not await _exist(session, f"{group}/{storage}", plural):
        return []
    versions = ", ".join(lost)
    problem = f"{name}: objects are stored in version {versions}, which this release does not have"
    if storage not in lost:
        return [f"{problem}; run 'drakit setup migrate' before you upgrade"]
    if plural == REPORTS_PLURAL:
        return [
            f"{problem}; run 'kubectl delete crd {name}', and upgrade again: node plugins write "
            "new reports"
        ]
    return [
        f"{problem}. Save them: 'kubectl get {plural}.{storage}.{group} -o yaml > {plural}.yaml'. "
        f"In the file, change apiVersion to {API_VERSION}, and the fields that the release notes "
        f"name. Run 'kubectl delete crd {name}', which deletes the objects, and upgrade again. "
        f"Then run 'kubectl apply -f {plural}.yaml'"
    ]


async def _exist(session: Session, api_version: str, plural: str) -> bool:
    page = await session.get(resource_path(api_version, plural), params={"limit": "1"})
    return bool(page["items"])


async def _drop_versions(
    session: Session,
    path: str,
    new: Mapping[str, Any],
    old: Mapping[str, Any],
    lost: Collection[str],
) -> None:
    """
    Remove versions without objects from a definition's stored versions.

    The API server allows this only if the definition still contains these versions, with a
    different storage version. Therefore, the old versions are kept for a moment, unserved, with a
    permissive schema and without selectable fields: the API server rejects two versions that have
    only one of these in common. If an object is created in the meantime, restore the old
    definition.
    """
    spec = old["spec"]
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    unserved = [
        {"name": each, "served": False, "storage": False, "schema": schema} for each in lost
    ]
    both = {**new["spec"], "versions": [*new["spec"]["versions"], *unserved]}
    # Omit the checksum, which indicates that the update of the definition is complete.
    metadata = {key: value for key, value in new["metadata"].items() if key != "annotations"}
    between = {**new, "metadata": metadata, "spec": both}
    await session.apply(path, between, field_manager=FIELD_MANAGER)
    storage = _storage_version(new)
    group, plural = spec["group"], spec["names"]["plural"]
    if await _retry(lambda: _exist(session, f"{group}/{storage}", plural)):
        restored = {**between, "spec": {key: spec[key] for key in new["spec"]}}
        await session.apply(path, restored, field_manager=FIELD_MANAGER)
        raise CommandError(
            f"{new['metadata']['name']}: objects were created in the meantime; try again"
        )
    await session.patch(f"{path}/status", {"status": {"storedVersions": [storage]}})


def read_definitions() -> Iterator[dict[str, Any]]:
    """Read drakit's definitions from the package or the repository."""
    packaged = resources.files("drakit_cli") / "crds"
    folder = packaged if packaged.is_dir() else Path(__file__).parents[2] / "charts/drakit/crds"
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        if file.name.endswith(".yaml"):
            yield yaml.safe_load(file.read_text(encoding="utf-8"))


async def migrate_objects(session: Session, definitions: Iterable[str]) -> int:
    """
    Rewrite all objects of definitions, so that they are stored in the current version, and remove
    the other versions from the definitions' stored versions. Return the exit code.

    The content of a rewritten object does not change. You can run the command again.
    """
    for name in definitions:
        if await _find(session, name) is None:
            print(f"{name}: not installed")
        else:
            await _unless_changed(lambda name=name: _migrate(session, name))
    return 0


async def _migrate(session: Session, name: str) -> None:
    definition = await session.get(resource_path(*CRDS, name=name))
    spec, storage = definition["spec"], _storage_version(definition)
    place = (f"{spec['group']}/{storage}", spec["names"]["plural"])
    listed = await session.read_list(
        resource_path(*place), lambda item: item["metadata"]["name"], page_size=PAGE_SIZE
    )
    for each in listed.items:
        path = resource_path(*place, name=each)
        with suppress(NotFoundError):  # the object was deleted
            await _unless_changed(lambda path=path: _rewrite(session, path))
    # Send the version that was read: if the definition has changed in the meantime, its objects may
    # be stored in a third version.
    version = definition["metadata"]["resourceVersion"]
    await session.patch(
        resource_path(*CRDS, name=name, subresource="status"),
        {"metadata": {"resourceVersion": version}, "status": {"storedVersions": [storage]}},
    )
    print(f"{name}: rewrote {plural(len(listed.items), 'object')} in version {storage}")


async def _rewrite(session: Session, path: str) -> None:
    await session.replace(path, await session.get(path))


async def _unless_changed(work: Callable[[], Awaitable[None]]) -> None:
    """Run a function that reads and writes an object. Run it again if another client changed the
    object."""
    for _ in range(MAX_CONFLICTS):
        with suppress(ConflictError):
            return await work()
    return await work()


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
    """Apply the policies of a release, and delete the other policies of the release. Return 1 if a
    policy is rejected. A rejected policy does not affect the others."""
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
    """List all policies, keyed by name. Wait for their kind, which may have just been installed."""
    found = await _retry(
        lambda: session.list(resource_path(*POLICIES)), seconds=SERVED_SECONDS if wait else 0
    )
    return {body["metadata"]["name"]: body for body in found.items}


async def _retry(
    ask: Callable[[], Awaitable[ResultT]], *, seconds: float = SERVED_SECONDS
) -> ResultT:
    """Send a request, and retry it while its kind is not served yet."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await ask()
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
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(body, dict):
        raise UsageError(f"{path} must be a mapping from the names of policies to their specs")
    return cast("dict[str, Any]", body)
