"""The image of a pod's sandbox. It contains our own program, so that no registry is needed."""

from pathlib import Path

from ...archive import write_image

NAME = "localhost/drakit-pause:1"


def archive(programs: Path) -> Path:
    """Return the image's archive, next to the programs. Creates it if it is missing."""
    path = programs / "pause.tar"
    if not path.exists():
        files = {"/pause": (programs / "pause", 0o755)}
        write_image(path, name=NAME, files=files, entrypoint=["/pause"], user="65535:65535")
    return path
