"""Drivers whose prepare is wrong: the first time, the second time, or with concurrent calls."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from dataclasses import replace

from drakit import (
    Condition,
    Device,
    DeviceParameters,
    Driver,
    DriverError,
    Edits,
    Mount,
    ParameterVersion,
)
from tests.fakes.broken.tidy import Tidy, TidyConfig


class Refuses(Tidy):
    """Prepares nothing."""

    async def prepare(self, claim, device):
        raise DriverError("the lamp is not plugged in")


class ForgetsConditions(Tidy):
    """Only the first prepare of a device reports its condition."""

    def conditions(self, device):
        seen = self.config.root / f"seen-{device.name}"
        if seen.exists():
            return (Condition(type="Old", status="True", reason="Lit"),)
        seen.touch()
        return super().conditions(device)


class Misnamed(Driver[TidyConfig]):
    """The name of its prepare is misspelt, so that containers get nothing."""

    name = "misnamed.example.com"
    edits = Edits()

    async def devices(self):
        yield [Device(name="dark"), Device(name="lamp", edits=self.edits)]
        await asyncio.Event().wait()

    def prepair(self, claim, device):
        raise DriverError("nobody calls it")


class Nodes(Misnamed):
    """The same, but its devices carry edits."""

    edits = Edits.of_device_nodes("/dev/null")


class RelativePath(Tidy):
    """CDI does not take what containers get."""

    def mount(self, claim, device):
        return Mount(host_path=str(self.place(claim, device)), container_path="lamps")


class MissingPath(Tidy):
    """A path for containers does not exist on the host."""

    def mount(self, claim, device):
        return Mount(host_path=str(self.run / "elsewhere"), container_path="/lamps")


class MissingShare(Tidy):
    """The second share of the rail gets what is not on the host."""

    def mount(self, claim, device):
        place = self.place(claim, device)
        others = [path for path in self.run.glob(f"*-{device.name}-*") if path != place]
        return Mount(
            host_path=str(self.run / "elsewhere" if others else place), container_path="/lamps"
        )


class OnlyOnce(Tidy):
    """A second prepare of a claim is an error."""

    def make(self, claim, device, mode):
        self.notes.mkdir(exist_ok=True)
        try:
            self.note(claim, device).touch(exist_ok=False)
        except FileExistsError:
            raise DriverError("the claim has the lamp already") from None
        return super().make(claim, device, mode)


class OtherEdits(Tidy):
    """Containers get something else each time."""

    def make(self, claim, device, mode):
        edits = super().make(claim, device, mode)
        return Edits(env={**edits.env, "LAMP_TOKEN": uuid.uuid4().hex}, mounts=edits.mounts)


class OtherAttributes(Tidy):
    """Containers read something else each time."""

    async def prepare(self, claim, device):
        prepared = await super().prepare(claim, device)
        return replace(prepared, attributes={"token": uuid.uuid4().hex})


class BelievesItsNotes(Tidy):
    """Skips a claim that its notes list as prepared, even after a reboot."""

    def make(self, claim, device, mode):
        if not self.note(claim, device).exists():
            return super().make(claim, device, mode)
        env = {"LAMP": device.name, "LAMP_MODE": mode}
        return Edits(env=env, mounts=(self.mount(claim, device),))


class AllOrNothing(Tidy):
    """One claim in disorder fails all that come with it."""

    async def prepare_claims(self, claims):
        return {
            item.claim.uid: [await self.prepare(item.claim, device) for device in item.devices]
            for item in claims
        }


class OneAnswer(Tidy):
    """Returns a result for only the first of several claims."""

    async def prepare_claims(self, claims):
        first = claims[0]
        return {first.claim.uid: [await self.prepare(first.claim, d) for d in first.devices]}


class FormerClaim(Tidy):
    """Remembers the first claim of a device forever."""

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.first: dict[str, str] = {}

    def make(self, claim, device, mode):
        edits = super().make(claim, device, mode)
        owner = self.first.setdefault(device.name, claim.uid)
        return Edits(env={**edits.env, "LAMP_OWNER": owner}, mounts=edits.mounts)


class FormerName(FormerClaim):
    """The same, in the name of a variable."""

    def make(self, claim, device, mode):
        edits = super().make(claim, device, mode)
        owner = edits.env["LAMP_OWNER"].upper().replace("-", "_")
        return Edits(env={"LAMP": device.name, f"LAMP_OF_{owner}": "1"}, mounts=edits.mounts)


class ByClaim(Tidy):
    """Uses only the claim as the key of its results."""

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.given: dict[str, Edits] = {}

    def make(self, claim, device, mode):
        return self.given.setdefault(claim.uid, super().make(claim, device, mode))


class MixesUp(Tidy):
    """Keeps the claim that it works on in one place for all."""

    async def prepare(self, claim, device):
        self.current = claim
        await asyncio.sleep(0.1)
        edits = (await super().prepare(claim, device)).edits
        return Edits(env={**edits.env, "LAMP_OWNER": self.current.uid}, mounts=edits.mounts)


class OneAfterTheOther(Tidy):
    """Blocks its event loop while it works."""

    async def prepare(self, claim, device):
        time.sleep(0.4)  # noqa: ASYNC251  (it is what the test is about)
        return await super().prepare(claim, device)


class HoldsInterpreter(Tidy):
    """Computes in C, where no other thread of the process gets a turn."""

    async def prepare(self, claim, device):
        sum(range(200_000_000))
        return await super().prepare(claim, device)


class LeaksCancelled(Tidy):
    """Leaves the device marked as busy after a canceled call."""

    seconds = 0.3

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.busy: set[str] = set()

    async def prepare(self, claim, device):
        if device.name in self.busy:
            raise DriverError("the lamp is being prepared")
        self.busy.add(device.name)
        try:
            edits = await super().prepare(claim, device)
        except DriverError:
            self.busy.discard(device.name)
            raise
        self.busy.discard(device.name)
        return edits


class HalfDone(Tidy):
    """An interrupted prepare prevents the next one, even after unprepare."""

    async def prepare(self, claim, device):
        half = self.config.root / f"half-{device.name}"
        if half.exists():
            raise DriverError("an earlier prepare has not ended")
        half.touch()
        await asyncio.sleep(1.5)  # far longer than a busy machine adds to the measured prepare
        edits = await super().prepare(claim, device)
        half.unlink()
        return edits


class DiesOfParameters(Tidy):
    """Ends the process over parameters that it does not know."""

    def mode(self, device):
        if any("spec" in config for config in device.configs):
            os._exit(3)
        return super().mode(device)


class NeedsLabels(Tidy):
    """Expects a label that users need not write, and one consumer."""

    claim_data = True

    def mode(self, device):
        assert device.claim_data is not None
        if device.claim_data.reserved_for[0].resource != "pods":
            raise DriverError("only pods may use a lamp")
        return super().mode(device)


class StopsOverParameters(Tidy):
    """Ends its stream because of unknown parameters."""

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.confused = asyncio.Event()

    async def devices(self):
        yield self.listed()
        await self.confused.wait()

    def mode(self, device):
        if any("spec" in config for config in device.configs):
            self.confused.set()
        return super().mode(device)


class CountsTries(Tidy):
    """Each try has another error."""

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.tries = itertools.count(1)

    def mode(self, device):
        try:
            return super().mode(device)
        except DriverError as error:
            raise DriverError(f"{error} (try {next(self.tries)})") from None


class RawErrors(Tidy):
    """Users get the exceptions of its own code."""

    def mode(self, device):
        return {"bright": "bright", "dim": "dim"}[
            next((config["mode"] for config in device.configs), "bright")
        ]


class Mode(DeviceParameters):
    mode: str = "dim"


class FormerMode(DeviceParameters):
    light: str | None = None


class Versioned(Tidy):
    """Has two versions of parameters."""

    parameters_type = Mode
    parameter_versions = (
        ParameterVersion("tidy.example.com/v2", "Mode"),
        ParameterVersion(
            "tidy.example.com/v1",
            "Mode",
            type=FormerMode,
            convert=lambda former: Mode(mode=former.light or "dim"),
        ),
    )

    def mode(self, device):
        return device.parameters.mode


class ForgetsItsVersion(Versioned):
    """The conversion of the earlier version expects a key that was optional."""

    parameter_versions = (
        ParameterVersion("tidy.example.com/v2", "Mode"),
        ParameterVersion(
            "tidy.example.com/v1",
            "Mode",
            type=FormerMode,
            convert=lambda former: Mode(mode=former.light.lower()),
        ),
    )
