"""
Runs the steps of a page on a cluster and compares their output with the page.

A step that fails raises :class:`StepError`: page, line, command, output, and the cluster's state.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.api import Cluster
from e2e.images.go import cel_programs
from e2e.pages import helm
from e2e.pages.output import difference
from e2e.pages.page import ROOT, Action, Page, Step, short
from e2e.pages.shell import Ran, Shell, only_reads
from e2e.pages.state import placed
from e2e.release import VALUES, cluster_values

STEP_SECONDS = 180
SETTLE_SECONDS = 60
"""Seconds for which a read-only block is repeated until its output matches the page."""

FOLDERS = ("charts", "examples")
"""The folders of the repository in the working folder, as in a clone."""

IMAGES = (
    "image.repository=localhost/drakit",
    "image.tag=dev",
    "image.pullPolicy=Never",
    "image.digest.nodeplugin=",
    "image.digest.operator=",
)

OURS = {"PYTHONSAFEPATH", "PYTHONPATH", "KUBECONFIG", "CLUSTER", "VIRTUAL_ENV"}
"""Variables of the tests' environment that a reader does not have."""


class StepError(Exception):
    """A step of a page failed. The message is for the author of the page."""


@contextmanager
def opened(page: Page, cluster: Cluster, *, build: str, folder: Path) -> Iterator[Runner]:
    """Yield a runner for a page in an empty folder."""
    runner = Runner(page, cluster, build=build, folder=folder)
    try:
        yield runner
    finally:
        runner.close()


class Runner:
    """One bash session for one page."""

    def __init__(self, page: Page, cluster: Cluster, *, build: str, folder: Path) -> None:
        self._page = page
        self._cluster = cluster
        self._work = folder / "work"
        self._session = folder / "session"
        for one in (self._work, self._session / "bin", self._session / "values"):
            one.mkdir(parents=True)
        for name in FOLDERS:
            (self._work / name).symlink_to(ROOT / name)
        self._write_values(build)
        self._write_programs()
        self._shell = Shell(self._work, env=self._environment(), scratch=self._session)

    def close(self) -> None:
        self._shell.close()

    @property
    def changed_release(self) -> bool:
        """Whether the page called helm to change a release."""
        return (self._session / "changed").exists()

    def run(self) -> None:
        for step in self._page.steps:
            began = time.monotonic()
            self._take(step)
            seconds = time.monotonic() - began
            print(f"{short(self._page.path)}:{step.line}: {step.action}, {seconds:.1f} s")

    # ------------------------------------------------------------ steps

    def _take(self, step: Step) -> None:
        match step.action:
            case Action.SAVE:
                self._save(step)
            case Action.DRY_RUN:
                (self._session / "manifest.yaml").write_text(step.text)
                dry = f'kubectl apply --dry-run=server -f "{self._session}/manifest.yaml"\n'
                self._check(step, self._shell.run(dry, timeout_seconds=60))
            case Action.RUN_ON_NODE:
                self._check(step, self._on_node(step))
            case Action.RUN:
                self._run(step)

    def _save(self, step: Step) -> None:
        path = self._work / step.file
        if not path.parent.resolve().is_relative_to(self._work.resolve()):
            self._fail(step, f"{step.file} would be written into the repository")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step.text)

    def _run(self, step: Step) -> None:
        apart = step.fails or only_reads(step.text)
        repeats = only_reads(step.text)
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            ran = self._shell.run(step.text, timeout_seconds=STEP_SECONDS, apart=apart)
            problem = self._problem(step, ran)
            if problem is None:
                return
            if not repeats or ran.code is None or time.monotonic() > deadline:
                self._fail(step, problem, ran)
            time.sleep(0.3)

    def _on_node(self, step: Step) -> Ran:
        node = self._cluster.nodes[0]
        argv = ["bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{step.text}"]
        done = self._cluster.exec_on_node(node, argv, timeout=STEP_SECONDS, check=False)
        return Ran(done.returncode, done.stdout)

    def _check(self, step: Step, ran: Ran) -> None:
        if problem := self._problem(step, ran):
            self._fail(step, problem, ran)

    def _problem(self, step: Step, ran: Ran) -> str | None:
        if ran.code is None:
            return f"the command did not end within {STEP_SECONDS} s"
        if step.fails and ran.code == 0:
            return "the command succeeded, and the page says that it fails"
        if ran.code and not step.fails:
            failed = f": {ran.failed}" if ran.failed else ""
            return f"the command failed with code {ran.code}{failed}"
        if step.output is None:
            return None
        return difference(step.output, self._renamed(ran.output))

    def _renamed(self, output: str) -> str:
        """Replace the nodes' names in the output with those of the pages: node-1, node-2."""
        for number, name in enumerate(self._cluster.nodes, start=1):
            output = output.replace(name, f"node-{number}")
        return output

    def _fail(self, step: Step, problem: str, ran: Ran | None = None) -> None:
        parts = [f"{short(self._page.path)}:{step.line}: {problem}", "", *_indented(step.text)]
        if ran is not None:
            parts += ["", "output:", *_indented(ran.output)]
        for arguments in (
            ("get", "pods", "-A", "-o", "wide"),
            ("get", "resourceclaims", "-A"),
            ("get", "events", "-A", "--sort-by=.lastTimestamp"),
        ):
            lines = self._cluster.kubectl(*arguments, check=False).stdout.splitlines()
            parts += ["", f"kubectl {' '.join(arguments)}:", *_indented("\n".join(lines[-25:]))]
        raise StepError("\n".join(parts))

    # ------------------------------------------------------------ the reader's machine

    def _write_values(self, build: str) -> None:
        cluster, folder = self._cluster, self._session / "values"
        (folder / "1.yaml").write_text(json.dumps(common_values()))
        (folder / "2.yaml").write_text(json.dumps(cluster_values(cluster, build)))
        (folder / "3.yaml").write_text(json.dumps(placed(cluster, self._page.nodes)))
        (self._session / "images").write_text("\n".join(IMAGES))

    def _write_programs(self) -> None:
        folder = self._session / "bin"
        (folder / "kubectl").symlink_to(self._cluster.program("kubectl"))
        for program in cel_programs().iterdir():  # the wheel that a reader installs contains them
            (folder / program.name).symlink_to(program)
        script = folder / "helm"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -P {helm.__file__} "$@"\n')
        script.chmod(0o755)
        # Use a copy, because a page may set another namespace for its commands.
        (self._session / "kubeconfig").write_text(self._cluster.kubeconfig.read_text())

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in OURS}
        kept = {name: value for name, value in kept.items() if not name.startswith("PYTEST_")}
        path = [str(self._session / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {
            **kept,
            "PATH": ":".join([*path, "/usr/local/sbin", "/usr/sbin", "/sbin"]),
            "KUBECONFIG": str(self._session / "kubeconfig"),
            "TERM": "dumb",
            # The parts of a clone that a page may use: its path, and its targets for this cluster.
            "DRAKIT": str(ROOT),
            "CLUSTER_NAME": self._cluster.name,
            "CLUSTER": self._cluster.provider,
            "DRAKIT_PAGE": str(self._session),
            "DRAKIT_PAGE_HELM": self._cluster.program("helm"),
        }


def common_values() -> dict[str, Any]:
    """Return the common values of the tests' clusters, without an image, which the page sets."""
    values: dict[str, Any] = yaml.safe_load(VALUES.read_text())
    return {key: value for key, value in values.items() if key != "image"}


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.rstrip().splitlines()]
