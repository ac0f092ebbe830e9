"""The exceptions that pycomm raises.

Each belongs to one error code and derives from ``PycommError`` and from torch's own
``DistBackendError`` or ``DistNetworkError``, so that code which knows only torch catches it too.
Four families group them by what a program can do: ``PeerError``, ``RendezvousError``,
``ConfigError`` and ``ResourceError``. A deadline that passed is also a ``TimeoutError``, and a lost
connection also a ``ConnectionError``.
``record`` holds all known facts about the failure. The text is one sentence, the same facts as
``key=value``, and a hint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed import DistBackendError, DistError, DistNetworkError

__all__ = [
    "BY_CODE",
    "AbortedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConfigError",
    "ConfigMismatchError",
    "ConnectFailedError",
    "ConnectionBrokenError",
    "DataCorruptError",
    "DuplicateRankError",
    "ErrorRecord",
    "ForkedError",
    "InternalError",
    "InvalidArgumentError",
    "NoInterfaceError",
    "NoSharedMemoryError",
    "OutOfMemoryError",
    "PeerDeadError",
    "PeerError",
    "PeerLeftError",
    "PeerUnresponsiveError",
    "PortsExhaustedError",
    "ProtocolViolationError",
    "PycommBackendError",
    "PycommError",
    "PycommNetworkError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "ResourceError",
    "ShutDownError",
    "StoreLostError",
    "SystemCallError",
    "TooManyFilesError",
    "TorchVersionError",
    "UnsupportedError",
    "VersionMismatchError",
]


class TorchVersionError(ImportError):
    """pycomm's extension is missing, or was built for another torch than is installed."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ErrorRecord(Mapping[str, Any]):
    """All known facts about one failure.

    Fields are attributes, None if unknown. As a mapping it holds the known fields, by
    name; so it equals a dict, and ``dict(record)`` and ``json.dumps(dict(record))`` work.
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
    """The rank that raises the error, in the group's numbers, as ``peer``."""
    host: str | None = None
    """The host of ``rank``."""
    peer: int | None = None
    """The rank that is to blame, or that was waited for."""
    peer_host: str | None = None
    """The host of ``peer``."""
    group: str | None = None
    """torch's name of the group."""
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
    """"rendezvous", "connect", "matching", "copy_to_host", "transfer", "not_entered", "not_started"
    or "wait"."""
    elapsed_ms: int | None = None
    """How long the operation, or the making of the group, had taken."""
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


class PycommError(DistError):
    """An error of pycomm's native part.

    Args:
        text: The whole message.
        record: The known facts, by the names of ``ErrorRecord``'s fields. ``code`` is that of the
            class if it is left out.
    """

    record: ErrorRecord

    def __init__(self, text: str, record: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        own = next((code for code, each in BY_CODE.items() if isinstance(self, each)), None)
        self.record = ErrorRecord(**{"code": own, **(record or {})})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), dict(self.record))

    @property
    def code(self) -> str | None:
        """The error code, "PEER_DEAD"."""
        return self.record.code

    @property
    def rank(self) -> int | None:
        """The rank that noticed."""
        return self.record.rank

    @property
    def host(self) -> str | None:
        """The host of ``rank``."""
        return self.record.host

    @property
    def peer(self) -> int | None:
        """The rank that is to blame, or that was waited for."""
        return self.record.peer

    @property
    def peer_host(self) -> str | None:
        """The host of ``peer``."""
        return self.record.peer_host

    @property
    def op(self) -> str | None:
        """The operation, "all_reduce"."""
        return self.record.op

    @property
    def sequence(self) -> int | None:
        """The operation's number within its group."""
        return self.record.sequence

    @property
    def hint(self) -> str | None:
        """What to try."""
        return self.record.hint

    @property
    def elapsed_ms(self) -> int | None:
        """How long the operation had run."""
        return self.record.elapsed_ms


class PycommBackendError(PycommError, DistBackendError):
    """An operation was used wrongly, ran out of time, or this process cannot go on."""


class PycommNetworkError(PycommError, DistNetworkError):
    """Another rank, its host or the way there has failed."""


class RendezvousError(PycommError):
    """A group could not be made, or its store was lost."""


class ConfigError(PycommError):
    """The settings of this rank, or those of two ranks, do not fit."""


class ResourceError(PycommError):
    """This process or host has run out of something: memory, files, ports, kernel objects."""


class PeerError(PycommNetworkError, ConnectionError):
    """Another rank of the group, or the way to it, is gone."""


class InvalidArgumentError(PycommBackendError, ValueError):
    """An argument that no rank could have served; nothing was sent."""


class UnsupportedError(PycommBackendError, NotImplementedError):
    """pycomm does not support this."""


class RendezvousTimeoutError(RendezvousError, PycommNetworkError, TimeoutError):
    """Not all ranks came to the store in time; the text names the missing ones."""


class StoreLostError(RendezvousError, PycommNetworkError, ConnectionError):
    """The store could not be reached any more."""


class ConnectFailedError(RendezvousError, PeerError):
    """A rank could not be connected to: while a group is made, or at the first bytes to it."""


class DuplicateRankError(RendezvousError, PycommBackendError):
    """Two processes claim the same rank of one group."""


class ConfigMismatchError(ConfigError, PycommBackendError):
    """Ranks were started with settings that do not fit together, as another world size."""


class VersionMismatchError(ConfigError, PycommBackendError):
    """A rank runs another version of pycomm's protocol."""


class NoInterfaceError(ConfigError, PycommBackendError):
    """No network interface fits the setting; the text lists those that exist."""


class PortsExhaustedError(ResourceError, PycommBackendError):
    """Every port of the range is taken."""


class CollectiveMismatchError(PycommBackendError):
    """Ranks called different operations, or one operation with different arguments."""


class CollectiveTimeoutError(PycommBackendError, TimeoutError):
    """An operation's deadline has passed; the text names the rank that was waited for."""


class PeerDeadError(PeerError):
    """A rank's process ended without a goodbye."""


class PeerUnresponsiveError(PeerError):
    """A rank is connected and silent."""


class PeerLeftError(PeerError):
    """A rank left the group in good order while it was still needed."""


class ConnectionBrokenError(PeerError):
    """A connection broke for an unknown reason."""


class ProtocolViolationError(PycommNetworkError):
    """Something arrived that no pycomm of this version sends."""


class DataCorruptError(PycommNetworkError):
    """Bytes changed on the way."""


class AbortedError(PycommBackendError):
    """The group was aborted on this rank."""


class ShutDownError(PycommBackendError):
    """The group was shut down on this rank."""


class ForkedError(PycommBackendError):
    """The group was used in a forked child of the process that made it."""


class OutOfMemoryError(ResourceError, PycommBackendError, MemoryError):
    """Memory could not be allocated."""


class TooManyFilesError(ResourceError, PycommBackendError):
    """The limit of open files is reached."""


class NoSharedMemoryError(ResourceError, PycommBackendError):
    """There is no room for the memory that the ranks of a host share."""


class SystemCallError(PycommBackendError):
    """The kernel refused something."""


class InternalError(PycommBackendError):
    """A mistake in pycomm; please report it."""


BY_CODE: Mapping[str, type[PycommError]] = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "UNSUPPORTED": UnsupportedError,
    "RENDEZVOUS_TIMEOUT": RendezvousTimeoutError,
    "STORE_LOST": StoreLostError,
    "CONNECT_FAILED": ConnectFailedError,
    "DUPLICATE_RANK": DuplicateRankError,
    "CONFIG_MISMATCH": ConfigMismatchError,
    "VERSION_MISMATCH": VersionMismatchError,
    "NO_INTERFACE": NoInterfaceError,
    "PORTS_EXHAUSTED": PortsExhaustedError,
    "COLLECTIVE_MISMATCH": CollectiveMismatchError,
    "TIMEOUT": CollectiveTimeoutError,
    "PEER_DEAD": PeerDeadError,
    "PEER_UNRESPONSIVE": PeerUnresponsiveError,
    "PEER_LEFT": PeerLeftError,
    "CONN_RESET": ConnectionBrokenError,
    "PROTOCOL_VIOLATION": ProtocolViolationError,
    "DATA_CORRUPT": DataCorruptError,
    "ABORTED": AbortedError,
    "SHUT_DOWN": ShutDownError,
    "FORKED": ForkedError,
    "OUT_OF_MEMORY": OutOfMemoryError,
    "TOO_MANY_FILES": TooManyFilesError,
    "SHM_NO_SPACE": NoSharedMemoryError,
    "SYSTEM_ERROR": SystemCallError,
    "INTERNAL": InternalError,
}
"""The class of every error code; the extension raises by this table."""
