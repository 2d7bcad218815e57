"""The pages show the output of `drakit node` as it is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from drakit_cli import checkpoint as commands
from drakit_nodeplugin.state.records import StoredEndpoint
from tests.fakes.checkpoints import DRIVER, prepared_claim, stored_claim, stored_device

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE = (DOCS / "reference" / "checkpoint.md").read_text()
RECOVERY = (DOCS / "admin" / "disaster-recovery.md").read_text()


def entry(number, name, *, make=stored_claim, **fields):
    device = stored_device(f"cam-{number - 1}")
    return replace(make(str(number), devices=(device,), **fields), name=name)


async def test_the_commands_of_the_pages_print_what_they_show(site, monkeypatch):
    monkeypatch.setattr(commands, "SETTLE_SECONDS", 0)
    show, verify = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", REFERENCE, re.M | re.S)
    (forget,) = re.findall(
        r"^```bash\n(plugin drakit node claim .*?)\n```\n\n```text[^\n]*\n(.*?)^```",
        RECOVERY,
        re.M | re.S,
    )
    pools = {"node-1": ("cam-0", "cam-1", "cam-2")}
    endpoint = StoredEndpoint(name=DRIVER, pools=pools, stopped_at=1772357400)
    await site.store(
        entry(1, "door", make=prepared_claim),
        entry(2, "gate", state="prepared", boot_id="boot-0"),
        entry(3, "yard", state="unpreparing"),
        endpoints=[endpoint],
    )
    assert await printed(site, show[0]) == show[1]
    site.spec("uid-1").unlink()
    site.spec("uid-9").write_text("{}")
    assert await printed(site, verify[0]) == verify[1]
    assert await printed(site, forget[0]) == forget[1]


async def printed(site, command):
    arguments = command.rpartition("drakit node ")[2].split()
    _, out, error = await site.run_beside("node", *arguments)
    assert error == ""
    text = out.replace(f"{site.root}/kubelet", "/var/lib/kubelet")
    return text.replace(str(site.cdi), "/var/run/cdi")
