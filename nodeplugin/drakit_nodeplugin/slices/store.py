"""
The slices of our driver on our node, as the API server last told of them.

They are told of twice: by the answer to a write, and by the watch, in any order; the newer counts.
After a restore of etcd what is new has a lower version than what was there before. So a list, and
a read after a conflict, count whatever their versions are.

It must not know what is wanted, or how it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from drakit_nodeplugin.slices.stored import StoredSlice, newer

__all__ = ("SliceStore",)


class SliceStore:
    """Slices by name; empty until all have been listed once."""

    def __init__(self) -> None:
        self.listed = asyncio.Event()
        self._slices: dict[str, StoredSlice] = {}

    def of_pool(self, pool: str) -> list[StoredSlice]:
        """Give the slices of one pool."""
        return [each for each in self._slices.values() if each.pool == pool]

    def pools(self) -> set[str]:
        """Give the pools of which there are slices."""
        return {each.pool for each in self._slices.values()}

    def hold(self, slices: Iterable[StoredSlice]) -> set[str]:
        """These are all there are; give the pools of which slices are gone."""
        before, self._slices = self._slices, {each.name: each for each in slices}
        self.listed.set()
        return {each.pool for name, each in before.items() if name not in self._slices}

    def find(self, name: str) -> StoredSlice | None:
        """Give one slice."""
        return self._slices.get(name)

    def correct(self, new: StoredSlice, *, held: StoredSlice | None) -> None:
        """Keep what was read, as `held` is wrong; if something else is held meanwhile, the newer
        of that and this."""
        if self._slices.get(new.name) is held:
            self._slices[new.name] = new
        else:
            self.apply(new)

    def apply(self, new: StoredSlice) -> bool:
        """Keep the newer of two; tell whether it is the new one."""
        old = self._slices.get(new.name)
        if old is not None and not newer(new.version, old.version):
            return False
        self._slices[new.name] = new
        return True

    def remove(self, name: str, uid: str) -> StoredSlice | None:
        """It is gone; give it if it was there: another of the same name is not meant."""
        old = self._slices.get(name)
        if old is None or old.uid != uid:
            return None
        return self._slices.pop(name)
