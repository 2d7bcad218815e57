"""The first slice of a pool has the previous generation."""

from typing import Any

from drakit_nodeplugin.__main__ import main
from drakit_nodeplugin.slices.plan import SliceWrite

honest_body = SliceWrite.body


def body(self: SliceWrite) -> dict[str, Any]:
    made = honest_body(self)
    if self.name.startswith("00000-"):
        made["spec"]["pool"]["generation"] -= 1
    return made


SliceWrite.body = body  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
