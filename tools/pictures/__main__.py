"""Draws `docs/pictures/terminal-*.svg`: `make pictures`. With `--check`, compares them."""

from __future__ import annotations

import argparse

from tools.pictures.terminals import FOLDER, draw


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.pictures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a picture is not as drawn")
    check = parser.parse_args().check
    for recording in sorted(FOLDER.glob("*.txt")):
        picture, drawn = recording.with_suffix(".svg"), draw(recording)
        if not check:
            picture.write_text(drawn)
        elif not picture.exists() or picture.read_text() != drawn:
            raise SystemExit(f"docs/pictures/{picture.name} is stale: run `make pictures`")


if __name__ == "__main__":
    main()
