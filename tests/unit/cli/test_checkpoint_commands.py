"""``drakit node checkpoint show`` and ``verify``: what people and programs see."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from drakit_cli import checkpoint as commands
from drakit_cli.main import main
from drakit_nodeplugin.state import schema
from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.fakes.checkpoints import DRIVER, copy, stored_claim, stored_device
from tests.fakes.checkpoints import prepared_claim as prepared

CONFIGURED = stored_device("cam-1", configs=(0,), share_id="share-1")
CONFIGS = ('{"password":"secret"}',)

OTHERS_ONE = stored_device("cam-e", cdi_devices=("v.com/c=0",))
OTHERS_TWO = stored_device("cam-f", cdi_devices=("v.com/c=1", "v.com/c=2"))

SHOW = ("node", "checkpoint", "show")
VERIFY = ("node", "checkpoint", "verify")


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(commands, "SETTLE_SECONDS", 0)


def digest(site):
    return {
        path: path.stat().st_mtime_ns if path.is_file() else None for path in site.root.rglob("*")
    }


def change(site, statement):
    with closing(sqlite3.connect(site.path())) as connection, connection:
        connection.execute(statement)


# ---------------------------------------------------------------- show


async def test_the_entries_are_shown_as_a_table(site):
    await site.store(
        prepared("a"),
        prepared("b", boot_id="boot-0", devices=(CONFIGURED,), configs=CONFIGS),
        stored_claim("c", devices=(stored_device("cam-2", admin_access=True),)),
        prepared("d"),
        prepared("e", devices=(OTHERS_ONE, OTHERS_TWO)),
    )
    site.spec("uid-b").unlink()
    site.spec("uid-d").unlink()
    site.spec("uid-e").write_text("{}")

    code, out, error = await site.run_beside(*SHOW)

    assert (code, error) == (0, "")
    head, *lines = out.splitlines()
    assert head == f"{DRIVER}: 5 claims ({site.path()})"
    assert "\n".join(lines) == (
        f"CLAIM  UID    STATE      {'DEVICES':61}  BOOT     CDI FILE\n"
        f"lab/a  uid-a  prepared   {'node-1/cam-a':61}  this     ok\n"
        f"lab/b  uid-b  prepared   {'node-1/cam-1 (share)':61}  earlier  -\n"
        f"lab/c  uid-c  preparing  {'node-1/cam-2 (admin)':61}  this     -\n"
        f"lab/d  uid-d  prepared   {'node-1/cam-d':61}  this     missing\n"
        "lab/e  uid-e  prepared   node-1/cam-e + v.com/c=0, node-1/cam-f + v.com/c=1 and 1 more  "
        "this     differs"
    )


async def test_opaque_parameters_are_in_json_alone(site):
    await site.store(prepared("a", devices=(CONFIGURED,), configs=CONFIGS))
    _, table, _ = await site.run_beside(*SHOW)
    assert "secret" not in table
    code, out, _ = await site.run_beside(*SHOW, "--json")
    assert code == 0
    (checkpoint,) = json.loads(out)["checkpoints"]
    (claim,) = checkpoint["claims"]
    assert checkpoint["driver"] == DRIVER
    assert checkpoint["schemaVersion"] == schema.VERSION
    assert claim["configs"] == [{"password": "secret"}]
    assert claim["devices"][0]["cdi_devices"] == []
    assert (claim["uid"], claim["boot"], claim["cdi"]) == ("uid-a", "this", "ok")


ENDPOINTS = (
    StoredEndpoint(
        name="usb",
        pools={"node-1": ("cam-0", "cam-1"), "node-1/usb": ("hub",)},
        gone={"node-1": ("cam-1",)},
    ),
    StoredEndpoint(name="net", pools={"node-1/net": ()}, stopped_at=1795251182.9),
    StoredEndpoint(name="gone", pools={}, stopped_at=1e99, removing=True),
)


async def test_endpoints_are_shown_below_the_claims(site):
    await site.store(prepared("a"), endpoints=ENDPOINTS)

    code, out, error = await site.run_beside(*SHOW)

    assert (code, error) == (0, "")
    assert out.partition("\n\n")[2] == (
        "ENDPOINT  STATE     SINCE                 POOLS\n"
        "gone      removing  1e+99                 -\n"
        "net       stopped   2026-11-21T08:53:02Z  node-1/net (0 devices)\n"
        "usb       running   -                     node-1 (2 devices, 1 gone), "
        "node-1/usb (1 device)\n"
    )

    _, out, _ = await site.run_beside(*SHOW, "--json")
    (checkpoint,) = json.loads(out)["checkpoints"]
    assert checkpoint["endpoints"][1] == {
        "name": "net",
        "pools": {"node-1/net": []},
        "gone": {},
        "evicting": {},
        "held": {},
        "stopped_at": 1795251182.9,
        "removing": False,
    }


async def test_only_a_damaged_endpoint_is_reported(site):
    await site.store(prepared("a"), endpoints=ENDPOINTS)
    change(site, "UPDATE endpoints SET checksum = 1 WHERE name = 'net'")
    told = (
        f"{DRIVER}: the row of endpoint net: its checksum does not match; the node plugin drops "
        f"it at its next start: the driver reports its devices again\n"
    )
    code, out, error = await site.run_beside(*SHOW)
    assert (code, error) == (1, told)
    assert "uid-a" in out
    assert "\nnet " not in out
    assert await site.run_beside(*VERIFY) == (1, told, "")


async def test_each_driver_has_its_table_unless_one_is_asked_for(site):
    await site.store(prepared("a"))
    await site.store(driver="gpu.example.com")
    _, out, _ = await site.run_beside(*SHOW)
    assert [line.split(" (")[0] for line in out.splitlines() if "(" in line] == [
        f"{DRIVER}: 1 claim",
        "gpu.example.com: 0 claims",
    ]
    _, out, _ = await site.run_beside(*SHOW, "--driver", "gpu.example.com")
    assert DRIVER not in out


async def test_a_look_changes_nothing_also_while_the_plugin_runs(site):
    await site.store(prepared("a"))
    before = digest(site)
    assert (await site.run_beside(*SHOW))[0] == (await site.run_beside(*VERIFY))[0] == 0
    assert digest(site) == before

    checkpoint = Checkpoint(site.path())
    await checkpoint.open()
    await checkpoint.write([stored_claim("b")])
    _, out, _ = await site.run_beside(*SHOW)
    assert "uid-b" in out
    assert (await checkpoint.write([stored_claim("c")])).written
    await checkpoint.close()
    assert sorted(file.name for file in site.path().parent.iterdir()) == ["checkpoint.db"]


async def test_a_look_at_what_a_crash_has_left(site, tmp_path):
    checkpoint = Checkpoint(site.path())
    await checkpoint.open()
    await checkpoint.write([stored_claim("a")])
    (tmp_path / "kept").mkdir()
    copy(site.path(), tmp_path / "kept" / "checkpoint.db")
    await checkpoint.close()
    copy(tmp_path / "kept" / "checkpoint.db", site.path())
    log = site.path().with_name("checkpoint.db-wal").read_bytes()
    code, out, _ = await site.run_beside(*SHOW)
    assert code == 0
    assert "uid-a" in out
    assert site.path().with_name("checkpoint.db-wal").read_bytes() == log


async def test_a_damaged_database_shows_readable_rows_and_reports_the_rest(site):
    await site.store(prepared("a"), prepared("b"))
    change(site, "UPDATE bodies SET checksum = 1 WHERE id = 1")
    before = digest(site)

    code, out, error = await site.run_beside(*SHOW)

    assert code == 1
    assert "uid-b" in out
    assert "uid-a" not in out
    assert error == (
        f"{DRIVER}: the row of claim uid-a: its checksum does not match\n"
        f"{DRIVER}: the node plugin quarantines it at its next start, and keeps the intact rows\n"
    )
    assert digest(site) == before


async def test_a_database_that_was_quarantined_is_named(site):
    await site.store(prepared("a"), prepared("b"))
    change(site, "UPDATE bodies SET checksum = 1 WHERE id = 1")
    checkpoint = Checkpoint(site.path())
    await checkpoint.open()
    await checkpoint.close()
    code, out, error = await site.run_beside(*SHOW)
    assert code == 1
    assert "\nquarantined: checkpoint.db.damaged-" in out
    assert "entries were lost, and are not rebuilt yet: the row of claim uid-a" in error


async def test_a_newer_database_is_not_read_and_not_changed(site):
    await site.store(prepared("a"))
    change(site, "PRAGMA user_version = 99")
    code, out, error = await site.run_beside(*SHOW)
    assert (code, out) == (1, "")
    assert "it needs schema version 99 or later, and this drakit has version 3" in error


async def test_files_of_other_programs_are_passed_over_unless_they_are_asked_for(site):
    await site.store(prepared("a"))
    other = site.path("other.example.com")
    other.parent.mkdir()
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE songs (name)")
    code, out, _ = await site.run_beside(*SHOW)
    assert code == 0
    assert "other.example.com" not in out
    code, _, error = await site.run_beside(*SHOW, "--driver", "other.example.com")
    assert code == 1
    assert "is not a checkpoint: it is a database of another program" in error


@pytest.mark.parametrize(
    ("driver", "code", "told"),
    [
        pytest.param("none.example.com", 1, "driver none.example.com has no checkpoint", id="none"),
        pytest.param("../x", 2, "'../x' is not a valid driver name", id="a-path"),
    ],
)
def test_a_driver_that_is_not_there(site, driver, code, told):
    found, out, error = site.run(*SHOW, "--driver", driver)
    assert (found, out) == (code, "")
    assert told in error


def test_a_node_without_checkpoints(site):
    assert site.run(*SHOW) == (
        0,
        f"no driver has a checkpoint in {site.root}/kubelet/plugins/drakit.dev/drivers\n",
        "",
    )


async def test_directories_on_the_command_line_come_first(site, capsys, monkeypatch):
    await site.store(prepared("a"))
    missing = site.root / "none.yaml"
    monkeypatch.setattr("drakit_cli.main.DEFAULT_CONFIG", missing)
    folders = ["--kubelet-root", f"{site.root}/kubelet", "--cdi-dir", str(site.cdi)]
    assert await asyncio.to_thread(main, [*SHOW, *folders]) == 0
    assert "uid-a" in capsys.readouterr().out
    site.config.write_text(site.config.read_text().replace(f"{site.root}/kubelet", "/nowhere"))
    assert "uid-a" in (await site.run_beside(*SHOW, *folders))[1]


# ---------------------------------------------------------------- verify


async def test_nothing_is_wrong(site):
    await site.store(prepared("a"), prepared("b", boot_id="boot-0"), stored_claim("c"))
    assert await site.run_beside(*VERIFY) == (
        0,
        "1 checkpoint with 3 claims: no problems found\n",
        "",
    )


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        pytest.param(
            lambda site: site.spec("uid-a").unlink(),
            "claim lab/a (uid-a): its CDI file {site.cdi}/camera.example.com-claim_uid-a.json is "
            "missing",
            id="a-file-that-is-missing",
        ),
        pytest.param(
            lambda site: site.spec("uid-a").write_text("{}"),
            "claim lab/a (uid-a): its CDI file {site.cdi}/camera.example.com-claim_uid-a.json "
            "differs from the prepared one",
            id="a-file-that-differs",
        ),
        pytest.param(
            lambda site: site.spec("uid-z").write_text("{}"),
            "CDI file {site.cdi}/camera.example.com-claim_uid-z.json belongs to no known claim",
            id="a-file-of-no-claim",
        ),
        pytest.param(
            lambda site: change(site, "UPDATE claims SET state = 'preparing' WHERE id = 1"),
            "the row of claim uid-a: its columns do not match its body",
            id="a-row-that-contradicts-itself",
        ),
        pytest.param(
            lambda site: site.path().write_text("no database"),
            "file is not a database",
            id="no-database",
        ),
    ],
)
async def test_problems_are_printed_with_exit_code_1(site, spoil, told):
    await site.store(prepared("a"), prepared("b"))
    spoil(site)
    before = digest(site)
    code, out, _ = await site.run_beside(*VERIFY)
    assert code == 1
    assert f"{DRIVER}: {told.format(site=site)}" in out.splitlines()

    code, out, _ = await site.run_beside(*VERIFY, "--json")

    assert code == 1
    (checkpoint,) = json.loads(out)["checkpoints"]
    assert told.format(site=site) in checkpoint["problems"]
    assert digest(site) == before


async def test_problems_that_the_plugin_repairs_in_the_meantime_are_not_reported(site, monkeypatch):
    await site.store(prepared("a"), prepared("b"))
    site.spec("uid-a").unlink()
    text = prepared("a").cdi_spec

    def mend(_):
        site.spec("uid-a").write_text(text)
        site.spec("uid-b").unlink()  # and something new, that it has not had the time for

    monkeypatch.setattr(commands.time, "sleep", mend)
    assert (await site.run_beside(*VERIFY))[0] == 0


async def test_a_uid_that_can_be_no_file_name_needs_no_file(site):
    strange = replace(stored_claim("a", state="prepared"), uid="../../etc/passwd", cdi_spec="{}")
    checkpoint = Checkpoint(site.path())
    await checkpoint.open()
    await checkpoint.write([strange])
    await checkpoint.close()
    code, out, _ = await site.run_beside(*SHOW)
    assert code == 0
    assert "../../etc/passwd" in out
