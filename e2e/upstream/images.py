"""
The images that the suite's pods use, under their public names, so that no registry is needed.

They are not the public images: the programs are built from the same sources or in `suite/`, and the
shell is busybox. The module does not depend on clusters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from e2e.archive import Content, write_image
from e2e.images.cache import digest, kept, run
from e2e.images.testimage import static_busybox

from .program import Programs

REGISTRY = "registry.k8s.io/"

MANIFESTS_IMAGES = (
    "registry.k8s.io/e2e-test-images/sample-device-plugin:1.7",
    "registry.k8s.io/e2e-test-images/sample-device-plugin:1.8.0",
)
"""Images that only the suite's manifests name, for 1.36 and 1.37."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The content of the images with one name."""

    program: str = ""
    """The path of its program in the image."""

    entrypoint: tuple[str, ...] = ()
    shell: bool = True


KINDS = {
    "agnhost": Kind(program="agnhost", entrypoint=("/agnhost",)),
    "busybox": Kind(),
    "hostpathplugin": Kind(program="hostpathplugin"),
    "pause": Kind(program="pause", entrypoint=("/pause",), shell=False),
    "sample-device-plugin": Kind(
        program="sampledeviceplugin", entrypoint=("/sampledeviceplugin", "-alsologtostderr")
    ),
}


def wanted_images(listed: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each kind of image, from the list that the suite prints."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in sorted({line.strip() for line in listed}):
        kind = name.rpartition("/")[2].partition(":")[0]
        if name.startswith(REGISTRY) and kind in found:
            found[kind].append(name)
    return found


def suite_images(programs: Programs, pause: Path) -> list[Path]:
    """Return docker-archives of the images. Creates them if they are not in the cache."""
    listed = run([programs.suite, "-list-images"], what="listing images", timeout_seconds=60)
    wanted = wanted_images([*listed.splitlines(), *MANIFESTS_IMAGES])
    busybox = static_busybox()
    applets = run([busybox, "--list"], what="asking busybox for its commands", timeout_seconds=10)
    links = {f"bin/{applet}": "busybox" for applet in applets.split() if applet != "busybox"}
    built = {kind: programs.folder / kind for kind in KINDS} | {"pause": pause}

    def make(folder: Path) -> None:
        for name, kind in KINDS.items():
            files: dict[str, tuple[Content, int]] = {}
            if kind.shell:
                files["bin/busybox"] = (busybox, 0o755)
            if kind.program:
                files[kind.program] = (built[name], 0o755)
            first, *aliases = wanted[name]
            write_image(
                folder / f"{name}.tar",
                name=first,
                aliases=aliases,
                files=files,
                links=links if kind.shell else {},
                entrypoint=kind.entrypoint,
                env={"PATH": "/bin"},
            )

    names = [name for kind in KINDS for name in wanted[kind]]
    contents = [built[name] for name, kind in KINDS.items() if kind.program]
    key = digest(*names, busybox, *contents, Path(__file__))
    folder = kept("upstream-images", key, make, keep=4)
    return [folder / f"{kind}.tar" for kind in KINDS]
