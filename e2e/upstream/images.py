"""
The images that the suite's pods use, under their public names: no registry is asked for them.

They are not the public images: agnhost and pause are built from the same sources, and the shell is
busybox. It must not know clusters.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from e2e.archive import write_image
from e2e.images.cache import digest, kept, run
from e2e.images.testimage import static_busybox

from .program import Programs

REGISTRY = "registry.k8s.io/"
KINDS = ("agnhost", "busybox", "hostpathplugin", "pause")
ENTRYPOINTS = {"agnhost": ("/agnhost",), "pause": ("/pause",)}


def wanted_images(listed: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each kind of image, out of the list that the suite prints."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in sorted({line.strip() for line in listed}):
        kind = name.rpartition("/")[2].partition(":")[0]
        if name.startswith(REGISTRY) and kind in found:
            found[kind].append(name)
    return found


def suite_images(programs: Programs, pause: Path) -> list[Path]:
    """Return docker-archives of the images; made if they are not in the cache."""
    listed = run([programs.suite, "-list-images"], what="listing images", timeout_seconds=60)
    wanted = wanted_images(listed.splitlines())
    busybox = static_busybox()
    applets = run([busybox, "--list"], what="asking busybox for its commands", timeout_seconds=10)
    names = [name for kind in KINDS for name in wanted[kind]]

    def make(folder: Path) -> None:
        links = {f"bin/{applet}": "busybox" for applet in applets.split() if applet != "busybox"}
        for kind in KINDS:
            files = {"bin/busybox": (busybox, 0o755)}
            if kind == "agnhost":
                files["agnhost"] = (programs.agnhost, 0o755)
            if kind == "pause":
                files = {"pause": (pause, 0o755)}
            name, *aliases = wanted[kind]
            write_image(
                folder / f"{kind}.tar",
                name=name,
                aliases=aliases,
                files=files,
                links={} if kind == "pause" else links,
                entrypoint=ENTRYPOINTS.get(kind, ()),
                env={"PATH": "/bin"},
            )

    parts = (*names, busybox, pause, programs.agnhost, Path(__file__))
    folder = kept("upstream-images", digest(*parts), make, keep=4)
    return [folder / f"{kind}.tar" for kind in KINDS]
