"""The API server in memory that vendors get, too."""

from __future__ import annotations

from drakit.testing.apiserver import FakeApiServer
from drakit.testing.cluster import FakeCluster, Object, ObjectPath, StatusError

__all__ = ("FakeApiServer", "FakeCluster", "Object", "StatusError", "Target")

Target = ObjectPath
