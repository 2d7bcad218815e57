"""The sources of policies: the API server, and the copy on the node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from drakit_daemon.kube import ForbiddenError, Listing, NotFoundError, UnavailableError, WatchEvent
from drakit_daemon.kube.listing import Skipped
from drakit_driver.runtime.contract import traits_of
from drakit_driver.runtime.policies import PolicyFeed
from drakit_nodeplugin.host import policies
from drakit_nodeplugin.host.policies import (
    FILE,
    PolicyWatch,
    StoredPolicy,
    check,
    read_policies,
    write_policies,
)
from tests.fakes.lamps import LAMPS, Lamps
from tests.fakes.tasks import until

PATH = "/apis/lamps.example.com/v1/lamppolicies"
MISSING = NotFoundError(status=404, reason="NotFound", message="no", method="GET", path=PATH)
FORBIDDEN = ForbiddenError(status=403, reason="Forbidden", message="no", method="GET", path=PATH)
DOWN = UnavailableError.no_response("GET", PATH, why="nothing")


def body(
    name: str, lamps: Any, *, generation: int = 1, version: str = "1", uid: str = ""
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "uid": uid or f"uid-{name}",
            "generation": generation,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "resourceVersion": version,
            "managedFields": [{"manager": "somebody"}],
        },
        "spec": {"lamps": lamps},
        "status": {"large": "x" * 100},
    }


class Api:
    """The requests of a watch on policies."""

    def __init__(self, *items: dict[str, Any]) -> None:
        self.items = list(items)
        self.skipped: tuple[Skipped, ...] = ()
        self.failure: Exception | None = None
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.lists = 0

    async def read_list(self, path, keep, *, params=None, page_size=0):
        assert path == PATH
        self.lists += 1
        if self.failure is not None:
            raise self.failure
        items = [keep(item) for item in self.items]
        return Listing(items=items, resource_version="1", skipped=self.skipped)

    async def watch(self, path, *, resource_version, params=None):
        while True:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            yield event

    def send(self, kind: str, obj: dict[str, Any]) -> None:
        self.events.put_nowait(WatchEvent(type=kind, object=obj))


class Rig:
    def __init__(self, directory, api: Api) -> None:
        self.api, self.file = api, directory / FILE
        self.feed = PolicyFeed()
        self.session = asyncio.get_running_loop().create_future()
        self.watch = PolicyWatch(
            LAMPS,
            traits_of(Lamps).policies,
            directory=directory,
            session=self.session,
            feed=self.feed,
        )
        self.tasks: list[asyncio.Task] = []
        self.applies = asyncio.Event()
        self.applies.set()

    async def start(self) -> None:
        await self.watch.restore()
        self.session.set_result(self.api)
        self.tasks = [asyncio.create_task(self.watch.run()), asyncio.create_task(self.driver())]

    async def driver(self) -> None:
        """A driver that applies everything, while `applies` is set."""
        applied = None
        while True:
            applied = await self.feed.next(applied)
            await self.applies.wait()
            self.feed.report(applied, None)

    def generations(self) -> dict[str, tuple[str, int, int | None]]:
        return {
            each.name: (each.uid, each.observed_generation, each.generation)
            for each in self.watch.states()
        }

    @property
    def lamps(self) -> dict[str, int] | None:
        policies = self.feed.in_force
        return policies and {name: each.spec.lamps for name, each in policies.items()}


@pytest.fixture
async def start(tmp_path):
    rigs: list[Rig] = []

    async def start(api: Api) -> Rig:
        rig = Rig(tmp_path, api)
        rigs.append(rig)
        await rig.start()
        return rig

    yield start
    for rig in rigs:
        for task in rig.tasks:
            task.cancel()
        if rig.tasks:
            await asyncio.wait(rig.tasks)


HALL = StoredPolicy(
    name="hall", uid="uid-hall", created="2026-01-01T00:00:00Z", generation=1, spec={"lamps": 3}
)


async def test_lists_and_events_reach_the_driver_and_the_copy(start, tmp_path):
    rig = await start(Api(body("hall", 2)))
    await until(lambda: rig.lamps == {"hall": 2})
    rig.api.send("ADDED", body("porch", 1, version="2"))
    await until(lambda: rig.lamps == {"hall": 2, "porch": 1})
    rig.api.send("MODIFIED", body("hall", -1, generation=2, version="3"))
    rig.api.send("DELETED", body("porch", 1, version="4"))
    await until(lambda: rig.lamps == {"hall": 2})
    (state,) = rig.watch.states()
    assert (state.observed_generation, state.generation) == (2, 1)
    async with asyncio.timeout(5):
        while len(await asyncio.to_thread(read_policies, tmp_path / FILE) or ()) != 1:
            await asyncio.sleep(0.01)


async def test_a_generation_is_in_effect_once_the_driver_has_applied_it(start):
    rig = await start(Api(body("hall", 2), body("porch", 1), body("attic", 1)))
    await until(lambda: rig.lamps == {"hall": 2, "porch": 1, "attic": 1})
    rig.applies.clear()
    rig.api.send("MODIFIED", body("hall", 3, generation=2, version="2"))
    rig.api.send("DELETED", body("porch", 1, version="3"))
    rig.api.send("ADDED", body("porch", 1, version="4", uid="uid-new"))
    before = {
        "hall": ("uid-hall", 2, None),
        "porch": ("uid-new", 1, None),
        "attic": ("uid-attic", 1, 1),
    }
    await until(lambda: rig.generations() == before)
    assert rig.lamps == {"hall": 2, "porch": 1, "attic": 1}
    seen = rig.watch.revision.number
    rig.applies.set()
    after = before | {"hall": ("uid-hall", 2, 2), "porch": ("uid-new", 1, 1)}
    await until(lambda: rig.generations() == after)
    assert rig.watch.revision.number > seen, "so that the report is written again"


async def test_changes_of_a_status_alone_cause_no_work(start, monkeypatch):
    rig = await start(Api(body("hall", 2), body("porch", 1)))
    await until(lambda: rig.lamps == {"hall": 2, "porch": 1})
    await asyncio.sleep(0.1)
    checked: list[str] = []
    monkeypatch.setattr(
        policies, "check", lambda each, kind: (checked.append(each.name), check(each, kind))[1]
    )
    before = rig.watch.revision.number
    for number in range(3, 103):
        changed = body("hall", 2, version=str(number)) | {"status": {"nodes": number}}
        rig.api.send("MODIFIED", changed)
    rig.api.send("MODIFIED", body("porch", 7, generation=2, version="200"))
    await until(lambda: rig.lamps == {"hall": 2, "porch": 7})
    assert checked == ["porch"]
    # The new spec, and its application.
    assert rig.watch.revision.number <= before + 2


async def test_the_copy_counts_until_the_api_server_answers(start, tmp_path):
    await asyncio.to_thread(write_policies, tmp_path / FILE, [HALL])
    api = Api(body("hall", 3))
    api.failure = DOWN
    rig = await start(api)
    await until(lambda: rig.lamps == {"hall": 3})
    before = rig.feed.in_force
    api.failure = None
    await until(lambda: api.lists >= 2)
    await asyncio.sleep(0.1)
    assert rig.feed.in_force is before  # nothing has changed, so the driver is not asked again


async def test_a_policy_that_cannot_be_read_keeps_its_last_version(start, tmp_path):
    await asyncio.to_thread(write_policies, tmp_path / FILE, [HALL])
    api = Api()
    api.skipped = (
        Skipped(
            metadata={"name": "hall", "uid": "uid-hall", "generation": 2}, reason="it is too large"
        ),
    )
    rig = await start(api)
    await until(
        lambda: rig.watch.revision.number > 1 and rig.watch.states()[0].observed_generation == 2
    )
    assert rig.lamps == {"hall": 3}
    assert rig.watch.states()[0].problem.startswith("spec: it is missing, or too large")


@pytest.mark.parametrize(
    "failure", [pytest.param(MISSING, id="404"), pytest.param(FORBIDDEN, id="403")]
)
async def test_without_the_resource_or_the_permission_a_driver_starts_without_policies(
    start, tmp_path, failure
):
    api = Api(body("hall", 1))
    api.failure = failure
    rig = await start(api)
    await until(lambda: rig.lamps == {})
    assert not rig.file.exists()  # nobody knows whether there are policies
    api.failure = None
    await until(lambda: rig.lamps == {"hall": 1})


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("failures", "lamps"),
    [
        pytest.param([(MISSING, 30)], {"hall": 3}, id="404-for-a-moment"),
        pytest.param([(MISSING, 200)], {}, id="404-for-minutes"),
        pytest.param([(FORBIDDEN, 3600)], {"hall": 3}, id="403-for-an-hour"),
        pytest.param([(DOWN, 3600)], {"hall": 3}, id="no-answer-for-an-hour"),
        pytest.param(
            [(MISSING, 30), (DOWN, 200), (MISSING, 30)], {"hall": 3}, id="404-twice-for-a-moment"
        ),
    ],
)
async def test_known_policies_are_removed_only_if_the_resource_is_missing_for_long(
    tmp_path, failures, lamps
):
    rig = Rig(tmp_path, Api())
    # Without threads, which a virtual clock does not know.
    rig.watch._check = lambda stored: asyncio.sleep(0, [check_lamp(each) for each in stored])
    rig.watch._table.replace([check_lamp(HALL)])
    rig.watch._offer()
    rig.api.failure = failures[0][0]
    rig.session.set_result(rig.api)
    rig.tasks = [asyncio.create_task(rig.watch._follow()), asyncio.create_task(rig.driver())]
    for failure, seconds in failures:
        rig.api.failure = failure
        await asyncio.sleep(seconds)
    assert rig.lamps == lamps
    assert rig.api.lists >= 3
    for task in rig.tasks:
        task.cancel()
    await asyncio.wait(rig.tasks)


def check_lamp(stored: StoredPolicy):
    return check(stored, Lamps.policy_type)
