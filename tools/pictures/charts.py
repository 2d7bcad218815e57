"""Charts of the benchmarks, from the output of `make bench` in bench/results/node-plugin.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tools.pictures.svg import Picture

LEFT, FULL, STEP = 240, 420, 32

Row = Mapping[str, str]


def pictures(output: str) -> dict[str, Picture]:
    """Return the charts of the output of a whole run."""
    rows = list(_rows(output))
    return {"chart-prepare": _prepare(rows), "chart-memory": _memory(rows)}


def _rows(output: str) -> Iterator[Row]:
    for line in output.splitlines():
        if "=" in line and not line.startswith(("machine:", "budget")):
            name, _, rest = line.partition(" ")
            yield {"row": name, **dict(re.findall(r"(\w+)=(\S+)", rest))}


def _one(rows: Sequence[Row], **wanted: str) -> Row:
    (row,) = [row for row in rows if wanted.items() <= row.items()]
    return row


def _prepare(rows: Sequence[Row]) -> Picture:
    bars: list[tuple[str, float, float]] = []
    for batch in ("1", "8", "64"):
        for resident in ("0", "1000", "10000"):
            row = _one(rows, row="prepare", batch=batch, resident=resident, driver="effects")
            claims = f"{batch} claim{'' if batch == '1' else 's'}"
            name = f"{claims}, {int(resident):,} on the node"
            bars.append((name, float(row["floor_ms"]), float(row["p50_ms"])))
    most = max(total for _, _, total in bars)
    text = "; ".join(f"{name}: {total:g} ms, of which {floor:g} ms" for name, floor, total in bars)
    picture = Picture(
        "Time of one prepare call (p50), and the part of the API server",
        f"Milliseconds, and the part that reading the claims takes. {text}.",
        760,
        74 + STEP * len(bars),
    )
    _legend(picture, (("first", "reads from the API server"), ("second", "node plugin and driver")))
    for number, (name, floor, total) in enumerate(bars):
        y = 56 + STEP * number
        picture.text(LEFT - 12, y + 15, name, anchor="end")
        low, high = FULL * floor / most, FULL * total / most
        picture.bar(LEFT, y, low, 20, "first")
        picture.bar(LEFT + low, y, high - low, 20, "second")
        picture.text(LEFT + high + 8, y + 15, f"{total:g} ms", style="b")
    return picture


def _memory(rows: Sequence[Row]) -> Picture:
    idle = _one(rows, row="idle")
    bars = [("idle", idle)]
    for plugins, backends in (("50", "0"), ("25", "25"), ("0", "50")):
        names = [
            f"{count} {what}"
            for count, what in ((plugins, "device plugins"), (backends, "backends"))
            if count != "0"
        ]
        row = _one(rows, row="endpoints", device_plugins=plugins, backends=backends)
        bars.append((" and ".join(names), row))
    bars.append(("10,000 prepared claims", _one(rows, row="memory", driver="effects")))
    bars.append(("12,800 devices", _one(rows, row="slices-publish", devices="12800")))
    sizes = [(name, float(row["rss_mib"])) for name, row in bars]
    most = max(size for _, size in sizes)
    picture = Picture(
        "Memory of the node plugin (VmRSS)",
        "MiB. " + "; ".join(f"{name}: {size:g} MiB" for name, size in sizes) + ".",
        760,
        74 + STEP * len(sizes),
    )
    _legend(picture, (("second", "VmRSS of the node plugin with hostdev"),))
    for number, (name, size) in enumerate(sizes):
        y = 56 + STEP * number
        picture.text(LEFT - 12, y + 15, name, anchor="end")
        picture.bar(LEFT, y, FULL * size / most, 20, "second")
        picture.text(LEFT + FULL * size / most + 8, y + 15, f"{size:g} MiB", style="b")
    return picture


def _legend(picture: Picture, kinds: Sequence[tuple[str, str]]) -> None:
    x = LEFT
    for kind, text in kinds:
        picture.bar(x, 22, 14, 14, kind)
        picture.text(x + 20, 34, text)
        x += 240
