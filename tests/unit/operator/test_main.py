"""The daemon's log, and the end of a leader that lost its Lease."""

from __future__ import annotations

import logging
import subprocess
import sys

from drakit_daemon.logs import JsonFormatter
from drakit_operator import __main__ as main
from drakit_operator.kopf_import import kopf


def test_kopfs_lines_name_the_object_and_nothing_else():
    facts = {
        "msg": "Handler 'reconcile' failed",
        "settings": kopf.OperatorSettings(),
        "k8s_skip": False,
        "k8s_ref": {"kind": "HostDevicePolicy", "name": "serial", "uid": "u"},
    }
    record = logging.makeLogRecord(facts)
    assert main._name_object(record)
    line = JsonFormatter().format(record)
    assert '"object": "HostDevicePolicy serial"' in line
    assert "Settings" not in line
    assert "k8s" not in line


def test_a_leader_ends_when_nobody_reads_its_log():
    program = (
        "import logging, threading, time;"
        "from drakit_operator.leadership import _end_process;"
        "logging.basicConfig();"
        "logging.getLogger().handlers[0].acquire();"  # as a write that hangs does
        "threading.Thread(target=_end_process, args=['lost'], daemon=True).start();"
        "time.sleep(20)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=15, check=False)
    assert done.returncode == 1
