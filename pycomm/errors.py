"""The exceptions that pycomm raises.

Each belongs to one error code and derives from ``PycommError`` and from torch's own
``DistBackendError`` or ``DistNetworkError``, so that code which knows only torch catches it too.
Four families group them by what a program can do: ``PeerError``, ``RendezvousError``,
``ConfigError`` and ``ResourceError``. A deadline that passed is also a ``TimeoutError``, and a lost
connection also a ``ConnectionError``. ``record`` holds all known facts about the failure. The text
is one sentence, the same facts as ``key=value``, and a hint.

tools/doc_tables.py writes a part of docs/errors.md from the docstrings of the classes below.
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
    "JoinRefusedError",
    "LeftBehindError",
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
    "QuorumLostError",
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
    """The uuid of the ``reconfigure()`` that made the group, in an elastic training the number of
    the members' epoch; else 0. None for a negative uuid, and for an error of the training itself,
    as ``QUORUM_LOST``."""
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


class TorchVersionError(ImportError):
    """The extension is not built, or not for the minor version of torch that is installed.

    Try: what the text says.
    """


class PycommError(DistError):
    """An error of pycomm's native part.

    Example::

        try:
            dist.all_reduce(tensor)
        except pycomm.errors.PeerError as error:  # a family: the peer, or the way to it, is gone
            print(error.code, error.peer, error.peer_host, error.hint)
        except pycomm.errors.PycommError as error:
            print(error.code, error.record)

    Args:
        text: The whole message.
        record: The known facts, by ``ErrorRecord``'s fields. ``code`` defaults to the class's own.
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
        """The rank that raises this error."""
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
        """Milliseconds since this rank issued the operation, or began to join."""
        return self.record.elapsed_ms


class PycommBackendError(PycommError, DistBackendError):
    """An operation was used wrongly, ran out of time, or this process cannot go on."""


class PycommNetworkError(PycommError, DistNetworkError):
    """Another rank, its host or the way there has failed."""


class PeerError(PycommNetworkError, ConnectionError):
    """Another rank of the group, or the way to it, is gone.

    Try: restart from a checkpoint, or make a new group without that rank.
    """


class RendezvousError(PycommError):
    """A group could not be made, or its store was lost.

    Try: start again once all ranks run.
    """


class ConfigError(PycommError):
    """The settings of this rank, or those of two ranks, do not fit.

    Try: correct the settings first; a restart would fail in the same way.
    """


class ResourceError(PycommError):
    """This process or host has run out of something: memory, files, ports, kernel objects.

    Try: free something, or raise a limit.
    """


class InvalidArgumentError(PycommBackendError, ValueError):
    """An argument that no rank can serve, or a setting that cannot hold: a secret file that others
    may read, ``PYCOMM_SECURITY=off`` with a secret, ``PYCOMM_SECURITY=require`` without one. No
    tensor was sent.

    Try: read what stands behind "Try:" in the error.
    """


class UnsupportedError(PycommBackendError, NotImplementedError):
    """pycomm does not do this: a CUDA tensor without the CUDA library, a sparse CUDA tensor, an
    integer AVG, an option of DDP, a secret without OpenSSL 3.

    Try: the alternative in the hint.
    """


class RendezvousTimeoutError(RendezvousError, PycommNetworkError, TimeoutError):
    """Not all ranks came to the store in time. The text lists who is missing and who came.

    Try: look for errors in the output of the missing ranks. Set the same ``MASTER_ADDR``,
    ``MASTER_PORT`` and ``WORLD_SIZE`` everywhere. Give ranks that start slowly a longer timeout.
    """


class StoreLostError(RendezvousError, PycommNetworkError, ConnectionError):
    """torch's store, which rank 0 or torchrun serves, cannot be reached any more.

    Try: look for the first error in rank 0's output: it has probably ended.
    """


class ConnectFailedError(RendezvousError, PeerError):
    """A rank could not be connected to, accepted no connection until the deadline, or never
    connected. Both addresses are in the text.

    Try: run ``python -m pycomm doctor`` to test firewall and interface: docs/two-machines.md.
    """


class DuplicateRankError(RendezvousError, PycommBackendError):
    """Two processes claim one rank of a group. The second is refused; the first does not notice.

    Try: give each process its own ``RANK`` and each job its own port. After a crash, give
    ``file://`` a new file.
    """


class ConfigMismatchError(ConfigError, PycommBackendError):
    """Ranks were started with different world sizes, options, address families or secrets, or wrap
    different models. Both values are in the text.

    Try: start every rank with the same command and the same ``PYCOMM_*`` variables; if the text
    names a secret, copy one secret file to every host (``python -m pycomm secret --id`` on each
    must print the same).
    """


class VersionMismatchError(ConfigError, PycommBackendError):
    """A rank runs another version of pycomm's wire format.

    Try: install the same pycomm on all hosts.
    """


class NoInterfaceError(ConfigError, PycommBackendError):
    """No network interface fits the setting. The text lists those that exist.

    Try: set ``PYCOMM_SOCKET_IFNAME``; see docs/interfaces.md#how-pycomm-chooses.
    """


class PortsExhaustedError(ResourceError, PycommBackendError):
    """Every port of ``PYCOMM_PORT_RANGE`` is taken.

    Try: set a wider range: a rank of this host needs one port per process group of several hosts.
    """


class CollectiveMismatchError(PycommBackendError):
    """Ranks called different operations, or one with different shapes, dtypes, reduce ops or roots.
    Both sides are in the text.

    Try: call the same operations in the same order on all ranks. If callbacks of futures issue
    collectives, add them to the same futures in the same order.
    """


class CollectiveTimeoutError(PycommBackendError, TimeoutError):
    """An operation's deadline has passed. The text names the rank that was waited for and, if it
    has not entered the operation, what it did last.

    Try: look at that rank for uneven data, a slow loader or an exception, or set a longer timeout.
    """


class PeerDeadError(PeerError):
    """A rank's process ended without a goodbye.

    Try: look for that rank's first error, and in its host's ``dmesg`` for the out-of-memory killer.
    """


class PeerUnresponsiveError(PeerError):
    """A rank's connection is open and has been silent for 3 s (``heartbeat_timeout``). Its
    heartbeats come from a native thread, so a busy interpreter does not cause it.

    Try: check its host, cable and switch. If such silences are usual, set a longer
    ``PYCOMM_HEARTBEAT_TIMEOUT`` on all ranks. A debugger or Ctrl-Z stops a rank, too.
    """


class PeerLeftError(PeerError):
    """A rank left the group in good order while it was still needed, perhaps after another failed.

    Try: run equal numbers of batches on all ranks, and wait for everything before
    ``destroy_process_group()``. Look for that rank's own error.
    """


class ConnectionBrokenError(PeerError):
    """A connection between two ranks broke although both are still there. One that breaks before
    the peer has accepted it is retried and is no error.

    Try: find the firewall, proxy or duplicate address that resets connections between these hosts.
    """


class QuorumLostError(PeerError):
    """A group whose steps survive deaths cannot go on: this rank has not reached more than half of
    its members within ``quorum_wait``, or more than half answer and have not agreed within three
    times that, or fewer than ``min_ranks`` are left. The text names the missing ones.

    Try: see whether they run and this host reaches theirs. Restart from a checkpoint.
    """


class LeftBehindError(PeerError):
    """The other members of a group whose steps survive deaths went on without this rank, which was
    stopped or cut off for longer than ``heartbeat_timeout``.

    Try: end this process: its parameters are those of an earlier step.
    """


class JoinRefusedError(PycommBackendError):
    """A process cannot become a member of an elastic training that runs: its model, options, secret
    or state differ from the members', or their state did not reach it within ``join_pause``.

    Try: what the text names. The members go on without this process.
    """


class ProtocolViolationError(PycommNetworkError):
    """A message, a record in the store or shared memory has contents that this version of pycomm
    never writes.

    Try: run one build on all ranks and nothing else on pycomm's ports and store; else report it.
    With a secret, somebody without it may have written to torch's store or to a rank's port: let
    only the hosts of the job reach both (docs/security.md#close-the-ports).
    """


class DataCorruptError(PycommNetworkError):
    """Bytes changed on the way. With a secret pycomm checks all bytes between hosts; without one,
    only fp16 gradient buckets.

    Try: start again. If it comes back, try another cable and switch port, then look for a proxy or
    router in between. If the text names a bucket, report it; over another backend, use pycomm or
    another ``wire_dtype``."""


class AbortedError(PycommBackendError):
    """A rank aborted the group or an operation.

    Try: look at that rank for the reason.
    """


class ShutDownError(PycommBackendError):
    """The group was closed on this rank while the operation was under way, or before it.

    Try: wait for every operation before ``destroy_process_group()``.
    """


class ForkedError(PycommBackendError):
    """The group was used in a forked child of the process that made it.

    Try: start workers with the spawn method, or make a new group in the child.
    """


class OutOfMemoryError(ResourceError, PycommBackendError, MemoryError):
    """Memory for a transfer could not be allocated.

    Try: use a smaller batch, or fewer operations at once.
    """


class TooManyFilesError(ResourceError, PycommBackendError):
    """The limit of open files is reached. The text has it.

    Try: run ``ulimit -n 65536`` before the command, on that host.
    """


class NoSharedMemoryError(ResourceError, PycommBackendError):
    """There is no room for the memory that the ranks of a host share.

    Try: give the container more memory, or set ``PYCOMM_TRANSPORT=tcp``.
    """


class SystemCallError(PycommBackendError):
    """A system call failed; ``cause`` says which and why.

    Try: read ``cause``: it names the system call and the kernel's error.
    """


class InternalError(PycommBackendError):
    """A mistake in pycomm.

    Try: report it, with the whole text of the error.
    """


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
    "QUORUM_LOST": QuorumLostError,
    "LEFT_BEHIND": LeftBehindError,
    "JOIN_REFUSED": JoinRefusedError,
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
