"""Frozen dataclasses that are looked up on every call: hashed once, and equal to themselves at a glance."""

from __future__ import annotations

from typing import Any


class Key:
    """Base of a frozen dataclass with eq=False: equality and hash over all fields, as dataclasses have them."""

    __dataclass_fields__: Any

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._values() == other._values()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        try:
            return self.__dict__["_hash"]
        except KeyError:
            self.__dict__["_hash"] = found = hash(self._values())
            return found

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and copy take: without the hash, since strings hash differently in another process."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_hash", "_tuple")}

    def _values(self) -> tuple[Any, ...]:
        try:
            return self.__dict__["_tuple"]
        except KeyError:
            self.__dict__["_tuple"] = found = tuple(getattr(self, name) for name in self.__dataclass_fields__)
            return found
