"""
The programs of the suite, built from the Go module in `suite/` into the cache.

The suite is built unmodified, and twice with drakit instead of Kubernetes' test driver: for the
specs of the cluster, and for those of a node. These two contain copies of the packages with the
specs, which Go's option `-overlay` adds to the module. The copies differ from the originals by
:data:`EDITS`, and use `suite/driver` instead of the test driver. The package with the specs of a
node also tests many other features, so `suite/node` replaces the parts that these specs need.

Each minor release of Kubernetes has a separate go.mod and go.sum there. The module does not depend
on clusters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.local import binaries
from e2e.images.cache import REPOSITORY, ImageError, digest, kept, run
from e2e.images.go import ENVIRONMENT, LINKED

SUITE = Path(__file__).with_name("suite")
BUILD_SECONDS = 3600
"""The first build compiles about 1,500 packages."""


STUBS = REPOSITORY / "proto" / "go" / "v1"
"""The contract of backends in Go. In the build, it is a package of the suite."""

UPSTREAM = "k8s.io/kubernetes/test/e2e/dra"
COPY = "drakit.dev/e2e/upstream/dra"
NODE_SPECS = Path("test", "e2e_node", "dra_test.go")
COPIED = ("*.go", "utils/*.go", "test-driver/app/options.go", "test-driver/gomega/*.go")
"""The files with the specs, and the parts of the test driver that they need."""

EDITS = (
    ("kubeletplugin.GRPCInterceptor(", "app.WithInterceptor("),
    (
        "kubeletplugin.PluginListener(d.listen(",
        "app.WithCluster(tCtx.Client()),\n\t\t\tapp.WithBackendListener(d.listen(",
    ),
    # The node plugin creates its own socket for the registration.
    ("kubeletplugin.RegistrarListener(d.listen(tCtx, &pod, &listenerPort)),", ""),
)
"""The changes where the specs start the driver: the node plugin cannot read these options."""

METADATA_EDIT = (
    "kubeletplugin.EnableDeviceMetadata(d.EnableDeviceMetadata, d.DeviceMetadataVersions)",
    "app.WithMetadata(d.EnableDeviceMetadata)",
)
"""The same for an option that Kubernetes 1.36 does not have. Every file of drakit contains all
versions."""


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The built programs of one minor release."""

    version: str
    """Such as v1.36.3."""

    folder: Path
    """Contains the suite, and the programs of its pods."""

    @property
    def minor(self) -> str:
        """Such as 1.36."""
        return binaries.minor_of(self.version)

    @property
    def ginkgo(self) -> Path:
        """Runs the specs of a suite in several processes."""
        return self.folder / "ginkgo"

    @property
    def suite(self) -> Path:
        """The suite with Kubernetes' test driver."""
        return self.folder / "dra.test"

    @property
    def drakit_suite(self) -> Path:
        """The suite with drakit instead of the test driver."""
        return self.folder / "drakit.test"

    @property
    def node_suite(self) -> Path:
        """The specs of a node, which run on it, with drakit instead of the test driver."""
        return self.folder / "node.test"


def module_file(minor: str, folder: Path = SUITE) -> Path:
    """Return the go.mod of a minor release. Raises ImageError if there is none."""
    known = binaries.minors(folder)
    if minor not in known:
        raise ImageError(
            f"there is no suite of Kubernetes {minor}; KUBERNETES can be: {', '.join(known)}"
        )
    return folder / binaries.file_of(minor)


def minors(folder: Path = SUITE) -> list[str]:
    """Return the minor releases whose suite can be built."""
    return binaries.minors(folder)


def required_version(module: Path) -> str:
    """Return the version of k8s.io/kubernetes that a go.mod requires."""
    return binaries.required_version(module, "k8s.io/kubernetes")


def programs(minor: str) -> Programs:
    """Return the programs. Builds them if they are not in the cache."""
    module = module_file(minor)
    compiler = run(["go", "-C", SUITE, "env", "GOVERSION"], what="asking Go", timeout_seconds=60)
    sources = [
        *(module, module.with_suffix(".sum"), *sorted(SUITE.rglob("*.go"))),
        *(*sorted(STUBS.glob("*.go")), Path(__file__)),
    ]

    def make(folder: Path) -> None:
        print(f"building the suite of Kubernetes {minor} (minutes the first time)", flush=True)
        common = (LINKED, f"-modfile={module}")
        overlay = folder / "overlay.json"
        overlay.write_text(json.dumps({"Replace": _overlay(module, folder)}))
        for name, options in (
            ("dra", ()),
            ("drakit", ("-tags=drakit", f"-overlay={overlay}")),
            ("node", ("-tags=node", f"-overlay={overlay}")),
        ):
            output = ("-o", folder / f"{name}.test", ".")
            _go("test", "-c", "-vet=off", *common, *options, *output, what=f"building {name}.test")
        programs = ("-o", f"{folder}/", "tool", "./hostpathplugin")
        _go("build", *common, *programs, what="building the programs of its pods")

    folder = kept("upstream", f"{minor}-{digest(compiler, *sources)}", make, keep=4)
    return Programs(version=required_version(module), folder=folder)


def _overlay(module: Path, folder: Path) -> dict[str, str]:
    """Write the copied packages to a folder. Return the files that they become in the module."""
    kubernetes = binaries.module_folder(module, "k8s.io/kubernetes")
    upstream = kubernetes / "test" / "e2e" / "dra"
    added = {SUITE / "backendv1" / stub.name: stub for stub in STUBS.glob("*.go")}
    for driver in SUITE.glob("driver/*.go"):
        added[SUITE / "dra" / "test-driver" / "app" / driver.name] = driver
    for path in (path for pattern in COPIED for path in upstream.glob(pattern)):
        name = Path("dra", path.relative_to(upstream))
        added[SUITE / name] = _copy(path, folder / name)
    # A package that others import must not have *_test.go files.
    added[SUITE / "e2e_node" / "dra.go"] = _copy(
        kubernetes / NODE_SPECS, folder / "node" / "dra.go"
    )
    for path in SUITE.glob("node/*.go"):
        added[SUITE / "e2e_node" / path.name] = path
    return {str(name): str(content) for name, content in added.items()}


def _copy(path: Path, copy: Path) -> Path:
    """Copy a file with specs, so that it imports the copied packages. Return the copy."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text()
    for package in ("utils", "test-driver/app", "test-driver/gomega"):
        text = text.replace(f'"{UPSTREAM}/{package}"', f'"{COPY}/{package}"')
    copy.write_text(edited_text(text, name=str(path)) if path.name == "deploy.go" else text)
    return copy


def edited_text(text: str, *, name: str) -> str:
    """Return a file of Kubernetes with :data:`EDITS`, each of which must match exactly once."""
    for old, new in (*EDITS, METADATA_EDIT) if METADATA_EDIT[0] in text else EDITS:
        if (places := text.count(old)) != 1:
            raise ImageError(
                f"{name} has {places} places with {old!r}: adapt EDITS to this release"
            )
        text = text.replace(old, new)
    return text


def _go(*command: str | Path, what: str) -> str:
    argv = ["go", "-C", SUITE, *command]
    return run(argv, what=what, timeout_seconds=BUILD_SECONDS, env=ENVIRONMENT)
