"""Pages for administrators have the numbers of the code that no other test compares."""

from __future__ import annotations

import pytest

from drakit_daemon import httpserver
from drakit_driver.runtime import endpoint
from drakit_drivers.hostdev.policy import HostDevicesConfig
from drakit_nodeplugin.claims import queue, recovery
from drakit_nodeplugin.config import Devices, StaleClaims
from drakit_nodeplugin.devices import taints
from drakit_nodeplugin.endpoints.deviceplugin import plugins
from drakit_nodeplugin.host import policies, report
from drakit_nodeplugin.kubelet import server
from drakit_nodeplugin.slices import packing, publisher
from drakit_nodeplugin.state import quarantine, schema
from drakit_operator.config import Config
from drakit_operator.policies import controller
from tests.unit.docs.listings import ROOT

TAKE_OVER_SECONDS = 20
"""After a kill: the duration of the Lease, two looks of the other replica, and a margin."""

WORDS = {1: "a", 2: "two", 3: "three", 5: "five"}
PACKING = packing.PackingLimits()
OPERATOR = Config()


def minutes(seconds: float) -> str:
    assert seconds % 60 == 0
    return WORDS[int(seconds) // 60]


SENTENCES = {
    "reference/slices": [
        f"at most {PACKING.max_devices}. The plugin puts at most {PACKING.fill_devices} into a new",
        f"{publisher.SETTLE_SECONDS:g} s after the first change",
        f"a deleted slice within {publisher.UNDO_SECONDS[0]:.0f} s",
        {0.5: "at most twice a second"}[endpoint.POLICIES_PACE_SECONDS],
        f"or after {minutes(endpoint.POLICIES_RETRY_SECONDS)} minute, and reports the reason",
        f"The plugin retries within {minutes(policies.RETRY_SECONDS[1])} minute",
        f"{report.MAX_LISTED} [rejected devices]",
        f"{report.MAX_POLICIES} policies with {report.MAX_CONFLICTS} conflicts each",
        f"{report.MAX_STUCK} claims that have been preparing or unpreparing for more "
        f"than {minutes(report.STUCK_SECONDS)} minute",
        f"when it changes, at most once every {report.PACE_SECONDS:.0f} s",
        f"have more than {report.MAX_NAME - 1}",
    ],
    "reference/checkpoint": [
        f"Keeps the {WORDS[quarantine.KEPT]} newest damaged files",
        f"rebuilds lost claims within {recovery.REBUILD_SECONDS:.0f} s",
        f"or after {recovery.ATTEMPTS * recovery.AGAIN_SECONDS / 60:.0f} minutes if the kubelet",
        f"The database has schema version {schema.VERSION}",
    ],
    "reference/node-plugin": [
        f"A call times out after {server.RESPONSE_SECONDS:.0f} s",
        f"A request times out after {httpserver.REQUEST_SECONDS:.0f} s",
        f"Each port accepts at most {httpserver.MAX_CONNECTIONS} connections",
        f"otherwise after {minutes(queue.SLOW_SECONDS)} minutes",
    ],
    "reference/device-health": [
        f"after {minutes(taints.SILENCE_SECONDS)} minute or `recoveryPeriod`, whichever is longer",
    ],
    "reference/device-plugins": [
        f"removed after {Devices().endpoint_stop_grace_period / 60:.0f} minutes "
        "(`nodeplugin.devices.endpointStopGracePeriod`)",
        f"`nodeplugin.devices.startGracePeriod` ({Devices().start_grace_period:.0f} s)",
    ],
    "reference/host-device-policy": [
        f"`nodeplugin.devices.goneEvictionDelay` ({Devices().gone_eviction_delay:.0f} s by",
        f"at most once every {controller.WRITE_SECONDS:.0f} seconds",
    ],
    "reference/operator": [
        f"at least {OPERATOR.events.debounce:.0f} s after an object is created",
        f"the operator waits {OPERATOR.events.change_pause / 60:.0f} minute",
        f"repeats an unchanged Event every {OPERATOR.events.repeat_pause / 60:.0f} minutes",
        f"only if they last {OPERATOR.events.patience / 60:.0f} minutes",
        f"takes over within {TAKE_OVER_SECONDS:.0f} s",
        f"cannot renew its Lease for {OPERATOR.election.renew_deadline:.0f} s, or",
    ],
    "admin/device-plugins": [
        f"kubelet's list for {minutes(plugins.CLEAR_SECONDS)} minutes",
    ],
    "admin/disaster-recovery": [f"keeps the {WORDS[quarantine.KEPT]} newest damaged files"],
    "admin/host-devices": [
        "every `hostdev.rescanInterval` "
        f"({HostDevicesConfig().rescan_interval.total_seconds():.0f} s by default)",
    ],
    "admin/sizing": [
        f"at most one every {report.PACE_SECONDS:.0f} s; about one every "
        f"{report.REPEAT_SECONDS / 60:.0f} minutes if nothing changes",
        f"{-(-1000 // PACKING.fill_devices)} for 1,000 devices on a node",
    ],
}


@pytest.mark.parametrize("page", SENTENCES)
def test_the_page_has_the_numbers_of_the_code(page):
    text = " ".join((ROOT / f"docs/{page}.md").read_text().split())
    assert [sentence for sentence in SENTENCES[page] if sentence not in text] == []


def test_stale_claims_are_searched_as_often_as_the_page_says():
    text = (ROOT / "docs/reference/checkpoint.md").read_text()
    assert StaleClaims().period == 60
    assert "Every minute, the plugin searches for stale claims" in text
