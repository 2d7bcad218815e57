"""
The programs of a cluster, built from the Go modules in `binaries/` into a cache.

A local cluster needs :data:`LOCAL`; a kind cluster's node image contains those and :data:`KIND`.
Each minor release of Kubernetes has a separate go.mod and go.sum in the module `kubernetes`. The
cache key is a digest of the inputs: the modules' files, the Go version, and the build settings. The
first build takes minutes, so it always reports its progress. Two clones that need the same programs
build them only once.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...images.cache import cache_folder
from ...images.go import DEFAULT_MINOR
from ...images.go import ENVIRONMENT as BUILD_ENVIRONMENT
from ..api import ClusterError, run

SOURCES = Path(__file__).parent.parent / "binaries"

LOCAL = ("pause", "tools", "kubernetes")
"""The modules whose programs every cluster runs."""

KIND = ("kind", "coredns")
"""The modules that only a kind cluster needs. A change to these does not rebuild others."""

KUBELETS = {"1.33": "kubelet-1.33"}
"""The modules of kubelets whose releases no cluster of the tests runs, by release."""

KUBERNETES_PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
    "kubeadm",
)
"""The names under which the single program of the module `kubernetes` runs."""

FORM = "1"
"""Increase it when the build or the layout of programs changes, because the cache depends on it."""

ENVIRONMENT = {"CGO_ENABLED": "0"}
"""No C compiler is needed, and the programs run in images without libraries. Other variables only
make builds faster, and do not change the programs."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A Go module, and its build settings."""

    folder: str
    title: str
    arguments: tuple[str, ...]
    packages: str
    """Import paths of the packages to build, as in `go list`."""

    file: str = "go.mod"
    """The name of its go.mod."""

    c: bool = False
    """Whether it needs a C compiler."""


def minors(module: Path = SOURCES / "kubernetes") -> list[str]:
    """Return the minor releases of Kubernetes for which a module has a go.mod, oldest first."""
    others = (path.stem.removeprefix("go-") for path in module.glob("go-*.mod"))
    return sorted([DEFAULT_MINOR, *others])


def file_of(minor: str) -> str:
    """Return the name of the go.mod of a minor release: `go.mod` for the default release, and
    otherwise a name such as `go-1.36.mod`."""
    return "go.mod" if minor == DEFAULT_MINOR else f"go-{minor}.mod"


def minor_of(version: str) -> str:
    """Return the minor release of a version: 1.36 for v1.36.3."""
    return ".".join(version.removeprefix("v").split(".")[:2])


def module_file(minor: str, sources: Path = SOURCES) -> Path:
    """Return the go.mod of a minor release of Kubernetes. Raises ClusterError if there is none."""
    known = minors(sources / "kubernetes")
    if minor not in known:
        raise ClusterError(
            f"no cluster runs Kubernetes {minor}; KUBERNETES can be: {', '.join(known)}"
        )
    return sources / "kubernetes" / file_of(minor)


def kubernetes_version(minor: str = DEFAULT_MINOR, sources: Path = SOURCES) -> str:
    """Return the version that our module requires, such as v1.36.3."""
    return required_version(module_file(minor, sources), "k8s.io/kubernetes")


def containerd_version() -> str:
    """Return the version that our module requires, such as v2.4.2."""
    return required_version(SOURCES / "tools" / "go.mod", "github.com/containerd/containerd/v2")


def required_version(file: Path, path: str) -> str:
    """Return the version of a module that a go.mod requires."""
    pattern = rf"^\s*(?:require\s+)?{re.escape(path)} (v\S+)"
    found = re.search(pattern, file.read_text(), re.MULTILINE)
    if found is None:
        raise ClusterError(f"{file} does not require {path}")
    return found[1]


def module_folder(file: Path, path: str) -> Path:
    """Return the folder of a module that one of our go.mod files requires. Downloads it first."""
    argv = ["go", "-C", str(file.parent), "mod", "download", "-json", f"-modfile={file.name}", path]
    return Path(json.loads(run(argv, timeout_seconds=600).stdout)["Dir"])


def cache_key(
    go_version: str,
    sources: Path = SOURCES,
    *,
    modules: Sequence[str] = LOCAL,
    minor: str = DEFAULT_MINOR,
) -> str:
    """Return the key of the programs: a digest of all their inputs."""
    digest = hashlib.sha256(f"{FORM} {go_version} {sorted(ENVIRONMENT.items())}".encode())
    # A change to one minor release's files does not rebuild other releases.
    unused = {
        path.with_suffix(suffix)
        for path in (
            module_file(other, sources)
            for other in minors(sources / "kubernetes")
            if other != minor
        )
        for suffix in (".mod", ".sum")
    }
    found = {path for module in modules for path in sources.glob(f"{module}/*")}
    for path in sorted(found - unused):
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(sources)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def programs_folder(modules: Sequence[str] = LOCAL, *, minor: str = DEFAULT_MINOR) -> Path:
    """
    Return the folder for the modules' programs, whether or not they are built.

    :param minor: the minor release of the module `kubernetes`.
    """
    return cache_folder() / "programs" / cache_key(go_version(), modules=modules, minor=minor)


def programs(modules: Sequence[str] = LOCAL, *, minor: str = DEFAULT_MINOR) -> Path:
    """Return the folder of the modules' programs. Builds missing ones first."""
    folder = programs_folder(modules, minor=minor)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _build_all(folder, modules, minor)
    return folder


def _build_all(folder: Path, modules: Sequence[str], minor: str) -> None:
    # This process has the lock, so nothing uses the remains of other builds.
    for remains in folder.parent.glob(f"{folder.name}.building.*"):
        shutil.rmtree(remains)
    partial = folder.with_suffix(f".building.{os.getpid()}")
    partial.mkdir()
    started = time.monotonic()
    chosen = [module for module in _modules(minor, partial) if module.folder in modules]
    print(
        f"building {', '.join(module.title for module in chosen)} into {folder}: this takes "
        "minutes the first time, and seconds later",
        flush=True,
    )
    for module in chosen:
        _build(module)
    if "kubernetes" in modules:
        for name in KUBERNETES_PROGRAMS:
            (partial / name).symlink_to("kubernetes")
    if "tools" in modules:
        (partial / "server").rename(partial / "etcd")  # the last part of its package's path
    partial.replace(folder)
    print(f"built all programs in {time.monotonic() - started:.0f} s", flush=True)


def _modules(minor: str, into: Path) -> Iterator[Module]:
    version = kubernetes_version(minor)
    common = ("build", "-v", "-ldflags")
    yield Module(
        folder="pause",
        title="the sandbox program",
        arguments=(*common, "-s -w", "-o", f"{into}/pause", "."),
        packages=".",
    )
    yield Module(
        folder="tools",
        title="etcd, containerd, CNI plugins and helm",
        arguments=(*common, "-s -w", "-o", f"{into}/", "tool"),
        packages="tool",
    )
    yield Module(
        folder="kubernetes",
        title=f"Kubernetes {version}",
        arguments=(*common, _stamped(version), "-o", f"{into}/kubernetes", "."),
        packages=".",
        file=module_file(minor).name,
    )
    yield Module(
        folder="kind",
        title="kind and crictl",
        arguments=(*common, "-s -w", "-o", f"{into}/", "tool"),
        packages="tool",
    )
    yield Module(
        folder="coredns",
        title="CoreDNS",
        arguments=(*common, "-s -w", "-o", f"{into}/coredns", "."),
        packages=".",
    )
    yield Module(
        folder="containerd-1.7",
        title="containerd 1.7",
        arguments=(*common, "-s -w", "-o", f"{into}/", "tool"),
        packages="tool",
    )
    yield Module(
        folder="runc-1.4",
        title="runc 1.4",
        arguments=(*common, "-s -w", "-tags=seccomp", "-o", f"{into}/", "tool"),
        packages="tool",
        c=True,
    )
    for release, module in KUBELETS.items():
        yield Module(
            folder=module,
            title=f"the kubelet of {release}",
            arguments=(*common, _stamped(_version_of(module)), "-o", f"{into}/kubelet", "."),
            packages=".",
        )


def _version_of(module: str) -> str:
    return required_version(SOURCES / module / "go.mod", "k8s.io/kubernetes")


def _stamped(version: str) -> str:
    """Return the linker's flags. Without these values, the servers report the version v0.0.0, and
    clients cannot detect their features."""
    major, _, number = minor_of(version).partition(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": number}
    package = "k8s.io/component-base/version"
    return " ".join(["-s -w", *(f"-X {package}.{key}={value}" for key, value in values.items())])


def _build(module: Module) -> None:
    progress = Progress(module.title)
    env = {**os.environ, **BUILD_ENVIRONMENT, **ENVIRONMENT}
    if module.c:
        env["CGO_ENABLED"] = "1"
    folder = SOURCES / module.folder
    go, file = ["go", "-C", str(folder)], f"-modfile={module.file}"
    if (folder / module.file).with_suffix(".sum").exists():
        with progress.step("downloading modules"):
            run([*go, "mod", "download", file], timeout_seconds=1800, env=env)
    with progress.step("listing packages"):
        argv = [*go, "list", file, "-deps", module.packages]
        total = len(run(argv, timeout_seconds=600, env=env).stdout.split())
    command, *arguments = module.arguments
    argv = [*go, command, file, *arguments]
    _compile(module, argv, total=total, progress=progress, env=env)


def _compile(
    module: Module,
    argv: Sequence[str],
    *,
    total: int,
    progress: "Progress",
    env: Mapping[str, str],
) -> None:
    output: list[str] = []
    compiled = 0
    with (
        progress.step(f"compiling at most {total} packages") as report,
        subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(env),
        ) as build,
    ):
        assert build.stderr is not None
        for line in build.stderr:
            output = [*output[-30:], line]
            compiled += 1
            # Packages of earlier builds are not listed again, so this is a lower bound.
            report(
                f"compiling, {compiled} of at most {total} packages ({100 * compiled // total} %)"
            )
    if build.returncode != 0:
        raise ClusterError(f"building {module.title} failed:\n{''.join(output)}")


class Progress:
    """Reports the current step and its time: one changing line on a terminal, otherwise separate
    lines."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._terminal = sys.stdout.isatty()
        self._every_seconds = 1.0 if self._terminal else 15.0

    @contextlib.contextmanager
    def step(self, text: str) -> Generator["Report"]:
        started, ended = time.monotonic(), threading.Event()
        report = Report(text)

        def show() -> None:
            seconds = time.monotonic() - started
            line = f"  {self._title}: {report.text}, {seconds:.0f} s"
            print(f"\r{line}\033[K" if self._terminal else line, end="", flush=True)
            if not self._terminal:
                print(flush=True)

        def keep_showing() -> None:
            while not ended.wait(self._every_seconds):
                show()

        thread = threading.Thread(target=keep_showing, daemon=True)
        thread.start()
        try:
            yield report
        finally:
            ended.set()
            thread.join()
            show()
            if self._terminal:
                print(flush=True)


class Report:
    """A function that changes the text of the progress."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, text: str) -> None:
        self.text = text


def go_version() -> str:
    """Return the version of Go, such as go1.26.6. Raises ClusterError if it is missing or too
    old."""
    if shutil.which("go") is None:
        raise ClusterError(
            f"Go is missing: install Go {_needed_go()} or newer, and put it on the PATH"
        )
    found = run(["go", "-C", str(SOURCES / "kubernetes"), "env", "GOVERSION"], check=False)
    version = found.stdout.strip()
    if found.returncode != 0 or _numbers(version) < _numbers(_needed_go()):
        installed = run(["go", "env", "GOVERSION"], check=False).stdout.strip() or "unknown"
        raise ClusterError(f"Go {_needed_go()} or newer is needed, this is {installed}: install it")
    return version


def _needed_go() -> str:
    found = re.search(r"^go (\S+)", (SOURCES / "kubernetes" / "go.mod").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("a") as holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process builds the same programs: waiting for it", flush=True)
            fcntl.flock(holder, fcntl.LOCK_EX)
        yield
