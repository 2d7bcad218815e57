"""
The only module that imports Kopf, without the client libraries that Kopf would import.

``import kopf`` imports kubernetes-asyncio, kubernetes and pykube if they are merely installed, to
offer their logins (Kopf 1.45): 40 MiB that are never used, because Kopf gets our own session.

It must not know what Kopf is used for.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ("Insights", "kopf")

_UNWANTED = ("kubernetes_asyncio", "kubernetes", "pykube")


@contextmanager
def _hidden(*names: str) -> Generator[None]:
    """Make imports of these packages fail within; what is already loaded stays loaded."""
    loaded = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names, None))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(loaded)


with _hidden(*_UNWANTED):
    import kopf
    from kopf._cogs.structs.references import Insights
