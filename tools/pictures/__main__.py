"""Writes `docs/pictures/*.svg`: `make pictures`. With `--check`, they must be as committed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tools.pictures import charts, diagrams, flows, terminals

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
FIGURES = ROOT / "bench" / "results" / "node-plugin.txt"


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each picture."""
    for kind in (diagrams, flows):
        for name, draw in kind.PICTURES.items():
            yield name, draw().svg()
    for name, picture in charts.pictures(FIGURES.read_text()).items():
        yield name, picture.svg()
    for recording in sorted(FOLDER.glob("*.txt")):
        yield recording.stem, terminals.draw(recording)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tools.pictures", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--check", action="store_true", help="only compare with what is committed")
    check = parser.parse_args().check
    wanted = {f"{name}.svg": content for name, content in pictures()}
    found = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    if check:
        stale = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
        if stale:
            raise SystemExit(f"run `make pictures`: {', '.join(stale)}")
        return
    for name in sorted(found.keys() - wanted):
        (FOLDER / name).unlink()
    for name, content in wanted.items():
        (FOLDER / name).write_text(content)
        print(f"docs/pictures/{name}")


if __name__ == "__main__":
    main()
