"""
The endpoints of a driver: those that are expected, those that were stored, those that have come.

What one of them becomes is :mod:`.endpoint_state`'s.

It must not know devices, the store, or who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from drakit_nodeplugin.config import Devices
from drakit_nodeplugin.devices.endpoint_state import SILENT, EndpointState, Moment
from drakit_nodeplugin.devices.lifecycle import Graces, Phase, accounted, phase_ends
from drakit_nodeplugin.devices.pool_state import Changes
from drakit_nodeplugin.devices.stored import StoredEndpoint

__all__ = ("EndpointRegistry",)


class EndpointRegistry:
    """Endpoints by name, and how long they are waited for. Times are the loop's."""

    def __init__(
        self,
        expected: Collection[str],
        *,
        settings: Devices,
        make: Callable[[str], EndpointState],
        now: Callable[[], float],
    ) -> None:
        """`expected` are those that nobody needs to name; if there are none, nobody knows how many
        come."""
        self._expected = frozenset(expected)
        self.open_ended = not self._expected
        """Whether nobody knows how many endpoints the driver has."""
        self._settings = settings
        self._make = make
        self._now = now
        self._graces: Graces | None = None
        self._strangers_until = 0.0
        """Until when endpoints may come whose pools nobody knows, if it is open which come."""
        self._states: dict[str, EndpointState] = {}

    def __iter__(self) -> Iterator[EndpointState]:
        """Give all of them, as they are now: one may be forgotten meanwhile."""
        return iter([*self._states.values()])

    @property
    def graces(self) -> Graces:
        """How long endpoints are waited for."""
        return self._graces or self.begin()

    def begin(self) -> Graces:
        """Say that the plugin starts now, if that was not said yet."""
        if self._graces is None:
            self._graces = self._begun()
            for name in self._expected:
                self.get(name)
        return self._graces

    def _begun(self, *, known: bool = False) -> Graces:
        """Begin to wait; `known` are pools of endpoints that are away, or none."""
        now, settings = self._now(), self._settings
        graces = Graces(
            start_until=now + settings.start_grace_period,
            stop_seconds=settings.endpoint_stop_grace_period,
        )
        # The store was lost, perhaps: then what is published may be of one that still returns.
        self._strangers_until = (
            graces.start_until if known else max(graces.start_until, now + graces.stop_seconds)
        )
        return graces

    @property
    def stop_reason(self) -> str | None:
        """Why an endpoint that should be there is away; None if all are, or may still come."""
        for state in self._states.values():
            # One that is not configured any more is away as well, and nobody waits for it.
            wanted = state.life.spoken or state.name in self._expected
            waiting = state.phase is Phase.AWAITED and state.reason is SILENT
            if wanted and state.phase is not Phase.PRESENT and not waiting:
                return f"endpoint {state.name}: {state.reason}" if self.open_ended else state.reason
        return None

    def find(self, name: str) -> EndpointState | None:
        """Give an endpoint, if there is one of that name."""
        self.begin()
        return self._states.get(name)

    def get(self, name: str) -> EndpointState:
        """Give an endpoint; one that is new has not come yet."""
        self.begin()
        if name not in self._states:
            self._states[name] = self._make(name)
        return self._states[name]

    def forget(self, state: EndpointState, *, changes: Changes) -> None:
        """What an endpoint had is deleted; if nobody expects it, nobody knows it any more."""
        if state.pools:
            state.forget(changes=changes)
        if state.name not in self._expected:
            del self._states[state.name]

    def restore(
        self, rows: Mapping[str, StoredEndpoint], moment: Moment, *, changes: Changes
    ) -> None:
        """Begin with the endpoints of an earlier life, or with what another instance has left of
        them; those that have spoken know better."""
        if self.open_ended:
            # It counts from when this instance is the primary one: such endpoints come to that.
            self._graces = self._begun(known=bool(rows))
        graces = self.graces
        for name, row in rows.items():
            state = self.get(name)
            if not state.life.spoken:
                state.restore(row, moment)
                state.age(graces, moment, changes=changes)
        for state in self:
            if state.name not in rows and not state.life.spoken and state.pools:
                state.forget(changes=changes)  # by who was the primary instance until now

    def rows(self, stored: Mapping[str, StoredEndpoint]) -> Mapping[str, StoredEndpoint]:
        """Say what is to be stored; of an endpoint that is still awaited, what is stored of it."""
        rows: dict[str, StoredEndpoint] = {}
        for name, state in self._states.items():
            row = stored.get(name) if state.phase is Phase.AWAITED else state.row()
            if row is not None:
                rows[name] = row
        return rows

    def ends(self) -> Iterator[float]:
        """Give until when something is waited for."""
        graces = self.graces
        yield graces.start_until
        if self.open_ended:
            yield self._strangers_until
        for state in self._states.values():
            if (end := phase_ends(state.life, graces)) is not None:
                yield end

    def accounted(self) -> bool:
        """Tell whether it is known of all which pools they have."""
        graces, now = self.graces, self._now()
        if self.open_ended and now < self._strangers_until:
            return False
        return all(accounted(state.life, graces, now=now) for state in self._states.values())
