"""A remote store that simulated instances share: one tier, of whose changes each tells what it has put there."""

from __future__ import annotations

from penstock.kv.tier import Tier


class SimStore(Tier):
    """All instances' tier of this name. What one that ends has put there stays, and another one tells of it."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, "remote")
        self._told_by: dict[bytes, str] = {}
        self._gone: dict[str, list[bytes]] = {}  # instance -> what it told of, and has not told to have gone

    def changes_of(self, instance: str) -> tuple[list[bytes], list[bytes]]:
        """What an instance tells of: keys that became findable and that nobody has told, and of its own those that no
        longer are."""
        added, removed = self.take_changes()
        for key in removed:
            teller = self._told_by.pop(key, None)
            if teller is not None:
                self._gone.setdefault(teller, []).append(key)
        self._told_by.update(dict.fromkeys(added, instance))
        return added, self._gone.pop(instance, [])

    def keys_of(self, instance: str) -> list[bytes]:
        """Everything that it tells of."""
        return [key for key, teller in self._told_by.items() if teller == instance]

    def leave(self, instance: str) -> None:
        """It has ended: nobody has told of its keys now."""
        self.changes_of(instance)
        for key in self.keys_of(instance):
            del self._told_by[key]
            self._added[key] = None

    def check(self) -> None:
        super().check()
        told = self._told_by.keys() | self._added.keys()
        assert set(self.keys()) <= told, "nobody tells of a copy"
