"""The reconciler with one worker and a recorder in memory, for tests on a virtual clock."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from drakit_daemon.kube import UnavailableError
from drakit_explain.cel.library import Library
from drakit_operator.allocating import AllocatorQueries
from drakit_operator.announcing import Announcer
from drakit_operator.config import Events
from drakit_operator.kinds import name_of
from drakit_operator.metrics import Metrics
from drakit_operator.reconciler import Reconciler, Refresh, new_queue
from drakit_operator.store import Store
from tests.fakes.world import allocator_of

GPU = {"metadata": {"name": "gpu.example", "uid": "k"}, "spec": {}}
"""A class."""


class Bench:
    """The reconciler with one worker; ``told`` lists the Events with their times."""

    def __init__(self, *, failures=0, store=None, selectors=None, **options):
        self.told = []
        self.notes = {}
        self.failures = failures
        self.store = store or Store()
        self.queue = new_queue(retry_limit_seconds=300.0)
        self.metrics = Metrics()
        self.current = True
        self.refreshed = []
        self.refreshed_reports = []
        self.refreshed_drivers = []
        self.reconciler = Reconciler(
            store=self.store,
            queue=self.queue,
            announcer=Announcer(self.record, timing=Events(), metrics=self.metrics),
            metrics=self.metrics,
            debounce_seconds=1.0,
            selectors=selectors or Library(),
            allocator=AllocatorQueries(allocator_of(None), self.metrics),
            refresh={
                "policy": Refresh(call=self.refresh),
                "report": Refresh(call=self.refresh_report),
                "driver": Refresh(call=self.refresh_drivers),
            },
            is_current=lambda: self.current,
            **options,
        )

    async def refresh(self, name):
        self.refreshed.append((asyncio.get_running_loop().time(), name))
        if self.failures:
            self.failures -= 1
            raise UnavailableError.no_response("GET", name, why="it is away")

    async def refresh_report(self, name):
        self.refreshed_reports.append(name)

    async def refresh_drivers(self, name):
        self.refreshed_drivers.append(asyncio.get_running_loop().time())

    async def record(self, announcement):
        if self.failures:
            self.failures -= 1
            raise OSError("the API server is away")
        now = asyncio.get_running_loop().time()
        self.told.append((now, announcement.regarding.name, str(announcement.code)))
        self.notes[announcement.regarding.name] = announcement.note
        return True

    @asynccontextmanager
    async def running(self):
        reconciler = self.reconciler
        parts = (reconciler.work(), reconciler.work(urgent=True), reconciler.evaluate())
        tasks = [asyncio.create_task(each) for each in parts]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            self.queue.close()

    def see(self, kind, body, *, gone=False):
        if gone:
            change = self.store.remove(kind, name_of(body), uid=body["metadata"]["uid"])
        else:
            change = self.store.apply(kind, kind.project(body, "v1"))
        if change is not None:
            self.reconciler.changed([change])


def pod(name="train", claim="gone"):
    return {
        "metadata": {"namespace": "lab", "name": name, "uid": name},
        "spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": claim}]},
        "status": {"phase": "Pending"},
    }


def template(device_class):
    request = {"name": "gpu", "exactly": {"deviceClassName": device_class}}
    return {
        "metadata": {"namespace": "lab", "name": "tpl", "uid": "t"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
