"""The image of a pod's sandbox: our own program, for no registry is asked for one."""

from pathlib import Path

from ...archive import write_image

NAME = "localhost/drakit-pause:1"


def archive(programs: Path) -> Path:
    """Return the image's archive, beside the programs; write it where it is missing."""
    path = programs / "pause.tar"
    if not path.exists():
        files = {"/pause": (programs / "pause", 0o755)}
        write_image(path, name=NAME, files=files, entrypoint=["/pause"], user="65535:65535")
    return path
