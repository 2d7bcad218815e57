"""
Prometheus and its `promtool`, unmodified, built from their Go module, and an image of Prometheus.

The service discovery of platforms other than Kubernetes is omitted, because it takes most of the
build's time. Debian's package cannot be used, because it does not include service discovery for
Kubernetes.
"""

from __future__ import annotations

from pathlib import Path

from e2e.archive import write_image
from e2e.images.cache import REPOSITORY, digest, kept, run
from e2e.images.go import ENVIRONMENT, LINKED

__all__ = ("BUILD_SECONDS", "IMAGE", "prometheus_image", "prometheus_program")

IMAGE = "localhost/drakit-prometheus:dev"
"""The name of the image in a cluster."""

BUILD_SECONDS = 3600
"""Time with an empty module cache, on a busy machine."""

SOURCES = REPOSITORY / "e2e" / "prometheus"


def prometheus_program(name: str) -> Path:
    """
    Return the path of `prometheus` or `promtool`. Builds it if it is not in the cache.

    :raises ImageError: Go is missing, or a module is not available.
    """
    version = run(
        ["go", "-C", SOURCES, "env", "GOVERSION"], what="asking Go's version", timeout_seconds=60
    )
    key = digest(version, SOURCES / "go.mod", SOURCES / "go.sum", Path(__file__))
    return kept("prometheus", key, _build) / name


def _build(folder: Path) -> None:
    run(
        [
            *("go", "build", LINKED, "-tags=remove_all_sd,enable_kubernetes_sd"),
            *("-o", f"{folder}/", "tool"),
        ],
        what="building Prometheus",
        timeout_seconds=BUILD_SECONDS,
        cwd=SOURCES,
        env=ENVIRONMENT,
    )


def prometheus_image() -> Path:
    """Return the image's archive. Builds it if it is not in the cache."""
    program = prometheus_program("prometheus")

    def make(folder: Path) -> None:
        write_image(
            folder / "prometheus.tar",
            name=IMAGE,
            files={"prometheus": (program, 0o755)},
            entrypoint=["/prometheus"],
        )

    key = digest(IMAGE, program.parent.name, Path(__file__), REPOSITORY / "e2e" / "archive.py")
    return kept("images", f"prometheus-{key}", make, keep=6) / "prometheus.tar"
