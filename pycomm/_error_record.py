"""The known facts about one failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ErrorRecord(Mapping[str, Any]):
    """All known facts about one failure.

    Fields are attributes, None if unknown. As a mapping it holds the known fields, by
    name; so it equals a dict, and ``dict(record)`` and ``json.dumps(dict(record))`` work.

    Example::

        record = pycomm.last_error()  # None while the group works
        if record is not None:
            print(record.code, record.peer, record.peer_host, json.dumps(dict(record)))
    """

    code: str | None = None
    """The error code, "PEER_DEAD"."""
    summary: str | None = None
    """What failed, as a sentence."""
    hint: str | None = None
    """What to try."""
    cause: str | None = None
    """The kernel's reason, or the error underneath."""
    rank: int | None = None
    """The rank that raises the error. Ranks have their numbers in the job, also in a subgroup."""
    host: str | None = None
    """The host of ``rank``."""
    peer: int | None = None
    """The rank that is to blame, or that was waited for."""
    peer_host: str | None = None
    """The host of ``peer``."""
    group: str | None = None
    """What torch calls the group: its ``group_desc`` if it has one, else its name."""
    group_ranks: str | None = None
    """The ranks of the group, "1, 3"; None for the default group."""
    epoch: int | None = None
    """How often the group has changed its members: 0."""
    op: str | None = None
    """The operation, "all_reduce"."""
    sequence: int | None = None
    """The operation's number within its group."""
    dtype: str | None = None
    """Of the operation, "float32"."""
    numel: int | None = None
    """Elements of the operation."""
    bytes_done: int | None = None
    """Bytes that this rank had received in the operation."""
    bytes_total: int | None = None
    """Bytes that this rank was to receive in the operation."""
    phase: str | None = None
    """"rendezvous", "resolve", "connect", "nccl init", "matching", "copy_to_host", "transfer",
    "not_entered", "not_started" or "wait"."""
    elapsed_ms: int | None = None
    """Milliseconds since this rank issued the operation, or began to join."""
    missing: list[int] | None = None
    """Of ``monitored_barrier``: the ranks that did not come."""

    def __getitem__(self, key: str) -> Any:
        value = getattr(self, key) if key in self.__dataclass_fields__ else None
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.__dataclass_fields__ if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"ErrorRecord({', '.join(f'{key}={value!r}' for key, value in self.items())})"
