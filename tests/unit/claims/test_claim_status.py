"""The status of claims: what the API server has afterwards, whatever it answers meanwhile."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from drakit import Condition, Edits, NetworkData, PreparedDevice
from drakit_daemon.kube import ApiError, ForbiddenError, NotFoundError, UnavailableError
from drakit_nodeplugin.claims.claim_status import MAX_WAITING, ClaimStatuses
from drakit_nodeplugin.claims.source import ApiClaims
from drakit_nodeplugin.claims.work import ClaimResult, KubeletDevice
from tests.fakes.claims import DRIVER, NODE, claim_body, reference
from tests.fakes.tasks import running

OTHER = "nic.example.com"
READY = Condition(type="Ready", status="True", reason="Configured")
LATE = Condition(type="Ready", status="False", reason="Late")


class Server:
    """An API server with claims, and server-side apply for their ``status.devices``."""

    def __init__(self) -> None:
        self.claims: dict[str, dict[str, Any]] = {}
        self.owned: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
        """The keys of the entries of each claim and field manager."""
        self.failures: list[ApiError] = []
        self.requests: list[tuple[str, str]] = []
        self.changed = asyncio.Event()

    def add(self, uid: str, *devices: str | dict[str, Any], entries: Any = ()) -> None:
        body = claim_body(uid, *devices)
        body["status"]["reservedFor"] = [{"resource": "pods", "name": "pod", "uid": "p"}]
        body["status"]["devices"] = list(entries)
        self.claims[f"claim-{uid}"] = body

    def status(self, uid: str) -> dict[str, Any]:
        return self.claims[f"claim-{uid}"]["status"]

    async def get(self, path: str, *, timeout_seconds: float = 10) -> Any:
        name = path.rpartition("/")[2]
        self.requests.append(("get", name))
        self._fail()
        if name not in self.claims:
            raise refusal(NotFoundError, 404, "NotFound", {"name": name})
        return self.claims[name]

    async def apply(self, path: str, body: Any, *, field_manager: str) -> None:
        name = path.split("/")[-2]
        self.requests.append(("apply", name))
        self._fail()
        claim = self.claims[name]
        assert body["metadata"]["uid"] == claim["metadata"]["uid"]
        assert len(field_manager) <= 128
        devices = body.get("status", {}).get("devices", [])
        before = self.owned.get((name, field_manager), [])
        keys = [key(each) for each in devices]
        kept = [each for each in claim["status"]["devices"] if key(each) not in {*before, *keys}]
        claim["status"]["devices"] = [*kept, *devices]
        self.owned[name, field_manager] = keys
        self.changed.set()

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


def key(entry: Any) -> tuple[Any, ...]:
    return entry["driver"], entry["pool"], entry["device"], entry.get("shareID")


def refusal(
    kind: type[ApiError], status: int, reason: str, details: dict[str, Any] | None = None
) -> ApiError:
    return kind(
        status=status, reason=reason, message="no", method="GET", path="/x", details=details or {}
    )


class World:
    def __init__(self) -> None:
        self.server = Server()
        self.results: list[str] = []
        self.hour = 10
        session: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        session.set_result(self.server)
        self._session = session

    def statuses(self, driver: str = DRIVER) -> ClaimStatuses:
        return ClaimStatuses(
            driver,
            ApiClaims(self._session),
            node=NODE,
            on_write=self.results.append,
            now=lambda: datetime(2026, 11, 27, self.hour, tzinfo=UTC),
        )

    async def after(self, seconds: float = 1.0) -> None:
        await asyncio.sleep(seconds)


@pytest.fixture
async def world() -> World:
    return World()


def prepared(
    statuses: ClaimStatuses,
    uid: str,
    had_status: bool | None = False,
    **devices: PreparedDevice | None,
) -> None:
    """Report that the kubelet has received the result for a claim with these devices."""
    answer = ClaimResult(
        devices=tuple(
            KubeletDevice(requests=("main",), pool=NODE, device=name.replace("_", "-"), cdi_ids=())
            for name in devices
        ),
        prepared=tuple(each or PreparedDevice() for each in devices.values()),
        had_status=had_status,
    )
    statuses.finished(reference(uid), "prepare", answer, 0.1)


def unprepared(statuses: ClaimStatuses, uid: str) -> None:
    statuses.finished(reference(uid), "unprepare", ClaimResult(), 0.1)


def of(*conditions: Condition, **fields: Any) -> PreparedDevice:
    return PreparedDevice(conditions=conditions, **fields)


FOREIGN = {"driver": OTHER, "pool": "rack", "device": "nic-0", "data": {"vf": 3}}


@pytest.mark.looptime
async def test_two_claims_get_the_entries_of_their_devices(world):
    world.server.add("a", "cam-0", "cam-1", entries=[FOREIGN])
    world.server.add("b", "cam-2")
    allocation = world.server.status("a")["allocation"]
    statuses = world.statuses()
    prepared(statuses, "a", cam_0=None, cam_1=of(READY, data={"vf": 1}))
    prepared(statuses, "b", cam_2=of(network_data=NetworkData(ips=("192.0.2.5/24",))))
    async with running(statuses.run()):
        await world.after()
    place = {"driver": DRIVER, "pool": NODE}
    condition = {"type": "Ready", "status": "True", "reason": "Configured", "message": ""}
    condition["lastTransitionTime"] = "2026-11-27T10:00:00Z"
    assert world.server.status("a") == {
        "allocation": allocation,
        "reservedFor": [{"resource": "pods", "name": "pod", "uid": "p"}],
        "devices": [
            FOREIGN,
            {**place, "device": "cam-1", "conditions": [condition], "data": {"vf": 1}},
        ],
    }
    assert world.server.status("b")["devices"] == [
        {**place, "device": "cam-2", "networkData": {"ips": ["192.0.2.5/24"]}}
    ]
    assert world.results == ["success", "success"]


@pytest.mark.looptime
async def test_two_drivers_write_the_status_of_one_claim(world):
    world.server.add("a", "cam-0", {"driver": OTHER, "device": "nic-0"})
    cameras, nics = world.statuses(), world.statuses(OTHER)
    prepared(cameras, "a", cam_0=of(READY))
    prepared(nics, "a", nic_0=of(READY))
    async with running(cameras.run(), nics.run()):
        await world.after()
        drivers = [each["driver"] for each in world.server.status("a")["devices"]]
        assert sorted(drivers) == [DRIVER, OTHER]
        unprepared(cameras, "a")
        await world.after()
        assert [each["driver"] for each in world.server.status("a")["devices"]] == [OTHER]


@pytest.mark.looptime
async def test_a_condition_keeps_its_time_until_its_status_changes(world):
    world.server.add("a", "cam-0")
    statuses = world.statuses()
    times = []
    async with running(statuses.run()):
        for hour, condition in ((10, READY), (11, READY), (12, LATE)):
            world.hour = hour
            prepared(statuses, "a", cam_0=of(condition))
            await world.after()
            (entry,) = world.server.status("a")["devices"]
            times.append(entry["conditions"][0]["lastTransitionTime"])
    assert times == ["2026-11-27T10:00:00Z", "2026-11-27T10:00:00Z", "2026-11-27T12:00:00Z"]


@pytest.mark.looptime
async def test_a_driver_that_returns_edits_costs_no_request(world):
    world.server.add("a", "cam-0")
    statuses = world.statuses()
    async with running(statuses.run()):
        prepared(statuses, "a", cam_0=None)
        unprepared(statuses, "a")
        statuses.finished(reference("a"), "prepare", ClaimResult(error="no", reason="X"), 0.1)
        await world.after()
    assert world.server.requests == []


@pytest.mark.looptime
async def test_a_result_without_status_removes_the_one_before(world):
    world.server.add("a", "cam-0", entries=[FOREIGN])
    statuses = world.statuses()
    async with running(statuses.run()):
        prepared(statuses, "a", cam_0=of(READY))
        await world.after()
        prepared(statuses, "a", cam_0=None)
        await world.after()
    assert world.server.status("a")["devices"] == [FOREIGN]


@pytest.mark.looptime
@pytest.mark.parametrize("had_status", [True, None], ids=["claim-read", "claim-not-read"])
@pytest.mark.parametrize("refused", [False, True])
async def test_a_result_without_status_removes_the_one_from_before_a_restart(
    world, had_status, refused
):
    """Degraded=True must not stay because the next process got nothing to report. A removal that
    the API server refuses is left to the unprepare."""
    world.server.add("a", "cam-0", entries=[FOREIGN])
    before, statuses = world.statuses(), world.statuses()
    async with running(before.run()):
        prepared(before, "a", cam_0=of(LATE))
        await world.after()
    async with running(statuses.run()):
        if refused:
            world.server.failures += [refusal(ForbiddenError, 403, "Forbidden")] * 5
        prepared(statuses, "a", had_status, cam_0=None)
        await world.after(200)
        assert (world.server.status("a")["devices"] == [FOREIGN]) is not refused
        requests = len(world.server.requests)
        unprepared(statuses, "a")
        await world.after()
    assert world.server.status("a")["devices"] == [FOREIGN]
    assert (len(world.server.requests) == requests) is not refused


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("pool", "writes"),
    [
        pytest.param(None, 0, id="nothing-of-this-driver"),
        pytest.param(NODE, 1, id="entry"),
        pytest.param("node-9", 0, id="entry-of-the-claims-next-node"),
    ],
)
async def test_an_unprepare_after_a_restart_removes_what_is_there_of_its_node(world, pool, writes):
    entries = [{"driver": DRIVER, "pool": pool, "device": "cam-0"}] if pool else []
    world.server.add("a", "cam-0", entries=[*entries, FOREIGN])
    manager = f"{DRIVER}/drakit-nodeplugin"
    world.server.owned["claim-a", manager] = [(DRIVER, pool or NODE, "cam-0", None)]
    statuses = world.statuses()
    # The result of a claim that was prepared before comes from the checkpoint.
    statuses.finished(reference("a"), "prepare", ClaimResult(), 0.1)
    async with running(statuses.run()):
        unprepared(statuses, "a")
        await world.after()
    left = [] if writes else entries
    assert world.server.status("a")["devices"] == [*left, FOREIGN]
    assert [verb for verb, _ in world.server.requests].count("apply") == writes


@pytest.mark.looptime
async def test_a_claim_that_is_another_one_or_gone_or_deallocated_is_left_alone(world):
    world.server.add("a", "cam-0")
    world.server.claims["claim-a"]["metadata"]["uid"] = "other"
    world.server.add("b", "cam-0")
    del world.server.status("b")["allocation"]
    statuses = world.statuses()
    for uid in ("a", "b", "c"):
        prepared(statuses, uid, cam_0=of(READY))
    async with running(statuses.run()):
        await world.after(200)
    assert sorted(world.server.requests) == [("get", f"claim-{uid}") for uid in "abc"]


@pytest.mark.looptime
async def test_a_device_that_is_no_longer_allocated_gets_no_entry(world):
    world.server.add("a", "cam-1")
    statuses = world.statuses()
    prepared(statuses, "a", cam_0=of(READY), cam_1=of(READY))
    async with running(statuses.run()):
        await world.after()
    assert [each["device"] for each in world.server.status("a")["devices"]] == ["cam-1"]


@pytest.mark.looptime
async def test_a_write_is_repeated_while_the_api_server_is_unavailable(world):
    world.server.add("a", "cam-0")
    world.server.failures = [
        UnavailableError.no_response("GET", "/x", why="refused"),
        refusal(ApiError, 500, "InternalError"),
    ] * 6
    statuses = world.statuses()
    prepared(statuses, "a", cam_0=of(READY))
    async with running(statuses.run()):
        await world.after(1200)
    assert len(world.server.status("a")["devices"]) == 1
    assert world.results == ["error"] * 12 + ["success"]


@pytest.mark.looptime
async def test_a_conflict_reads_the_claim_again(world):
    world.server.add("a", "cam-0")
    statuses = world.statuses()
    prepared(statuses, "a", cam_0=of(READY))

    async def replaced(path: str, body: Any, *, field_manager: str) -> None:
        # The claim was deleted and created again between the read and the write.
        world.server.claims["claim-a"]["metadata"]["uid"] = "other"
        raise refusal(ApiError, 409, "Conflict")

    world.server.apply = replaced
    async with running(statuses.run()):
        await world.after(200)
    assert world.server.requests == [("get", "claim-a")] * 2
    assert world.results == ["error", "success"]


@pytest.mark.looptime
async def test_a_refused_write_is_dropped_after_some_attempts(world, caplog):
    world.server.add("a", "cam-0")
    world.server.add("b", "cam-1")
    world.server.failures = []
    statuses = world.statuses()
    prepared(statuses, "a", cam_0=of(READY))
    allowed = world.server.apply

    async def refuses(path: str, body: Any, *, field_manager: str) -> None:
        if "claim-a" in path:
            raise refusal(ForbiddenError, 403, "Forbidden")
        await allowed(path, body, field_manager=field_manager)

    world.server.apply = refuses
    async with running(statuses.run()):
        await world.after(600)
        assert world.results == ["error"] * 4 + ["dropped"]
        assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [
            "claim status not written"
        ]
        prepared(statuses, "b", cam_1=of(READY))
        await world.after()
    assert len(world.server.status("b")["devices"]) == 1


@pytest.mark.looptime
async def test_only_the_newest_result_is_written(world):
    world.server.add("a", "cam-0")
    world.server.failures = [UnavailableError.no_response("GET", "/x", why="refused")]
    statuses = world.statuses()
    prepared(statuses, "a", cam_0=of(LATE))
    async with running(statuses.run()):
        await world.after(0.1)
        prepared(statuses, "a", cam_0=of(READY))
        await world.after(60)
    (entry,) = world.server.status("a")["devices"]
    assert entry["conditions"][0]["reason"] == "Configured"
    assert world.results == ["error", "success"]


@pytest.mark.looptime
async def test_a_status_that_the_api_server_could_not_store_is_not_sent(world, caplog):
    statuses = world.statuses()
    many = tuple(
        replace(READY, type=f"T{n}", reason="A" * 1024, message="\N{FULL BLOCK}" * 1024)
        for n in range(8)
    )
    names = [f"cam_{n}" for n in range(32)]
    world.server.add("a", *(name.replace("_", "-") for name in names))
    world.server.add("b", "cam-40")
    prepared(statuses, "a", **dict.fromkeys(names, of(*many)))
    prepared(statuses, "b", cam_40=of(*many))
    assert world.results == ["dropped"]
    assert [each.error for each in caplog.records] == ["its entries have more than 1024 KiB"]
    async with running(statuses.run()):
        await world.after()
    assert world.server.requests == [("get", "claim-b"), ("apply", "claim-b")]


@pytest.mark.looptime
@pytest.mark.parametrize("status", [400, 413])
async def test_a_status_that_the_api_server_cannot_use_is_not_sent_forever(world, status):
    world.server.add("a", "cam-0")
    world.server.failures = [refusal(ApiError, status, "Unusable") for _ in range(100)]
    statuses = world.statuses()
    prepared(statuses, "a", cam_0=of(READY))
    async with running(statuses.run()):
        await world.after(24 * 3600)
    assert world.results == ["error"] * 4 + ["dropped"]


class BigEdits(Edits):
    """Edits that can be found among all objects."""


@pytest.mark.looptime
async def test_what_waits_has_no_edits(world):
    statuses = world.statuses()
    world.server.add("a", "cam-0")
    prepared(statuses, "a", cam_0=of(READY, edits=BigEdits(env={"BLOB": "x" * 100_000})))
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is BigEdits]
    async with running(statuses.run()):
        await world.after()
    assert world.results == ["success"]


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("number", "data", "written"),
    [
        pytest.param(MAX_WAITING + 2, {}, MAX_WAITING, id="claims"),
        pytest.param(450, {"text": "x" * 10_000}, 410, id="bytes"),
    ],
)
async def test_what_waits_is_bounded(world, caplog, number, data, written):
    statuses = world.statuses()
    for uid in range(number):
        world.server.add(str(uid), "cam-0")
        prepared(statuses, str(uid), cam_0=of(READY, data=data))
    assert world.results == ["dropped"] * (number - written)
    assert [each.message for each in caplog.records] == ["too many claim statuses to write"]
    async with running(statuses.run()):
        await world.after(120)
        assert world.results.count("success") == written
        # There is room again.
        prepared(statuses, "0", cam_0=of(LATE))
        await world.after()
    assert world.server.status("0")["devices"][0]["conditions"][0]["reason"] == "Late"
