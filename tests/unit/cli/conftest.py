from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest

from drakit.layout import driver_directory
from drakit_cli.main import main
from drakit_nodeplugin.state.checkpoint import Checkpoint
from tests.fakes.checkpoints import DRIVER
from tests.unit.cli.projects import write

CONFIG = """
kubeletRoot: {root}/kubelet
cdiDirectory: {root}/cdi
bootIDFile: {root}/boot_id
podResourcesSocket: {root}/podresources.sock
drivers: [{{driver: hostdev}}]
"""


class Site:
    """A node's files, with a node plugin that may be running."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.cdi = root / "cdi"
        self.socket = root / "podresources.sock"
        self.config = root / "nodeplugin.yaml"
        self._capsys = capsys
        self.cdi.mkdir()
        (root / "boot_id").write_text("boot-1\n")
        self.config.write_text(CONFIG.format(root=root))

    def path(self, driver: str = DRIVER) -> Path:
        return driver_directory(self.root / "kubelet", driver) / "checkpoint.db"

    def spec(self, uid: str, driver: str = DRIVER) -> Path:
        return self.cdi / f"{driver}-claim_{uid}.json"

    async def store(self, *claims, endpoints=(), driver: str = DRIVER) -> None:
        """Write claims and endpoints, and the CDI files of claims that are prepared."""
        checkpoint = Checkpoint(self.path(driver))
        await checkpoint.open()
        outcome = await checkpoint.write(claims)
        assert not outcome.held
        assert not outcome.changed
        for endpoint in endpoints:
            await checkpoint.write_endpoints([endpoint])
        await checkpoint.close()
        for claim in claims:
            if claim.cdi_spec is not None:
                self.spec(claim.uid, driver).write_text(claim.cdi_spec)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run the command with this node's settings; give exit code, output and errors."""
        place = ["--config", str(self.config)] if arguments[0] == "node" else []
        code = main([*arguments, *place])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    async def run_beside(self, *arguments: str) -> tuple[int, str, str]:
        """The same while a node plugin runs in this loop."""
        return await asyncio.to_thread(self.run, *arguments)


@pytest.fixture
def site(capsys):
    # pytest's folder is too deep: the path of a socket has at most 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="drakit-"))
    yield Site(root, capsys)
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def lamps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project `lamps` of `drakit new`, which tests only read."""
    return write(tmp_path_factory.mktemp("new") / "lamps")
