"""A rank's record of its last operations, as the native part writes it.

A dump is one JSON object per process: its identity, and for each of its groups the phases, the
failure if there was one, and the last operations, oldest first. Times are nanoseconds since 1970 by
the process's own clock. ``python -m pycomm trace`` puts the dumps of all ranks side by side.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

_FORMAT = "pycomm-flight-record"
_VERSION = 3
_LISTED = 8
_TICKET = b'{"ticket":'

_T = TypeVar("_T")


def ranks_text(ranks: Iterable[int], most: int | None = None) -> str:
    """ "rank 3", "ranks 0, 2 and 3", "ranks 0 to 7"; with ``most``, "ranks 0, 2, 5 and 9 more"."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 3 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]} to {numbers[-1]}"
    if most is not None and len(numbers) > most + 1:
        return f"ranks {', '.join(map(str, numbers[:most]))} and {len(numbers) - most} more"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def group_text(called: str, ranks: Iterable[int]) -> str:
    """What texts call a group that is not the whole job: "group 'dp' of ranks 1 and 3"."""
    return f"group {called!r} of {ranks_text(ranks, _LISTED)}"


class BadRecordError(ValueError):
    """A file is not a flight record, or not one that this version reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationRecord:
    """One operation of one rank. Fields that do not apply, or have no value yet, are None.

    Example::

        for one in pycomm.flight_record().operations:
            print(one.label, one.described, one.state)  # all_reduce #12 SUM, float32 x 3, ring done
    """

    ticket: int
    """Counts what this rank has issued, in order; numbers may be missing."""
    id: str
    """The same on all ranks."""
    sequence: int | None = None
    """The operation's number in its group; None if a callback issued it."""
    op: str
    """ "all_reduce"."""
    state: str
    """ "queued", "running", "done" or "failed"."""
    dtype: str
    numel: int
    reduce_op: str | None = None
    wire_dtype: str | None = None
    """Where it is another than ``dtype``."""
    algorithm: str
    root: int | None = None
    peer: int | None = None
    """Of send and recv; None where it receives from any rank."""
    tag: int | None = None
    splits: int | None = None
    """A hash of uneven split sizes."""
    issued_ns: int
    started_ns: int | None = None
    """When the native thread took it up."""
    first_byte_ns: int | None = None
    """When the first bytes for it had arrived."""
    ended_ns: int | None = None
    bytes_done: int
    """Received so far."""
    bytes_total: int
    code: str | None = None
    """Of the error that ended it."""
    blamed: int | None = None
    """The rank that the error names."""
    thread: int
    """The kernel's number of the thread that issued it."""

    @property
    def label(self) -> str:
        """ "all_reduce #12"."""
        if self.op in ("send", "recv"):
            whom = "any rank" if self.peer is None else f"rank {self.peer}"
            return f"{self.op} {'to' if self.op == 'send' else 'from'} {whom} (tag {self.tag or 0})"
        if self.sequence is not None:
            return f"{self.op} #{self.sequence}"
        return f"{self.op} issued in a callback ({int(self.id) & 0xFFFFFF:06x})"

    @property
    def described(self) -> str:
        """ "SUM, float32 x 1024, ring": the facts besides the kind that all ranks must agree on."""
        parts = [self.reduce_op or "", f"{self.dtype} x {self.numel}"]
        parts += [] if self.root is None else [f"root {self.root}"]
        parts += [] if self.wire_dtype is None else [f"wire {self.wire_dtype}"]
        parts += [self.algorithm]
        parts += [] if self.tag is None or self.op in ("send", "recv") else [f"tag {self.tag}"]
        parts += [] if self.splits is None else [f"splits {self.splits}"]
        return ", ".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """One group, as one rank recorded it.

    Example::

        record = pycomm.flight_record()
        print(record.name, record.hosts, [one.label for one in record.operations[-3:]])
    """

    name: str
    desc: str | None = None
    """torch's description of it (``group_desc``), once the rank has issued an operation."""
    rank: int
    """This rank's number in the group, as in ``hosts`` and ``global_ranks``; all else, such as the
    roots and peers of operations, has the numbers of the job."""
    size: int
    global_ranks: tuple[int, ...]
    """The world's numbers of the group's ranks; empty: the same numbers."""
    hosts: tuple[str, ...]
    """By rank; empty if the ranks have not met."""
    run: str
    """Tells this group from one of the same name in another run; "0" if the ranks have not met."""
    slots: int
    """How many operations are kept."""
    complete: bool
    """Nothing has been forgotten since the group was made."""
    phases_ns: Mapping[str, int]
    """When "rendezvous", "connect", "ready", "failed" and "closed" began."""
    failure: Mapping[str, Any] | None = None
    """Why the group failed: the fields of ``pycomm.errors.ErrorRecord``."""
    operations: tuple[OperationRecord, ...]

    def world_rank(self, rank: int) -> int:
        """The world's number of one of the group's ranks."""
        return self.global_ranks[rank] if self.global_ranks else rank

    @property
    def called(self) -> str:
        """Its description, else its name."""
        return self.desc or self.name

    @property
    def title(self) -> str:
        """ "group 0", "group 'dp' of ranks 1 and 3"."""
        if not self.global_ranks:
            return f"group {self.called}"
        return group_text(self.called, self.global_ranks)

    def host_of(self, rank: int) -> str | None:
        """The host of one of the group's ranks, if it is known."""
        return self.hosts[rank] if rank < len(self.hosts) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """One process: the content of a dump."""

    rank: int
    """In the world."""
    host: str
    pid: int
    written_ns: int
    groups: tuple[GroupRecord, ...]
    source: str
    """The file."""


def read_record(path: Path) -> ProcessRecord:
    """Reads one dump.

    Raises:
        BadRecordError: It cannot be read, or is no flight record; the text names the file.
    """
    try:
        return parse_record(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except OSError as error:
        raise BadRecordError(f"{path} cannot be read: {error.strerror}") from error


def parse_record(text: str, source: str) -> ProcessRecord:
    """Makes a record of its JSON text. Raises BadRecordError, naming ``source``."""
    top = load_record(text, source)
    try:
        groups = tuple(_group(group) for group in top["groups"])
        return _made(ProcessRecord, top | {"groups": groups, "source": source})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRecordError(f"{source} is not a flight record: {error!r}") from error


def load_record(text: str, source: str) -> dict[str, Any]:
    """The JSON object of a record, of which only format and version are checked."""
    try:
        top = json.loads(text)
    except ValueError as error:
        raise BadRecordError(
            f"{source} is not a flight record: it is not JSON, or not all of it ({error})"
        ) from error
    return _checked(top, source)


def read_some(
    lines: Iterable[bytes], source: str, wants: Callable[[Mapping[str, Any], int], bool]
) -> dict[str, Any]:
    """The JSON object of a record, with those operations only that are wanted.

    The native part writes a line for the process, one for each group and one for each operation
    (csrc/engine/report/flight_json.cc). So the interpreter's lock is never held for long, although
    a record may have 40 MB.

    Args:
        lines: Of the record.
        source: Of the record, in errors.
        wants: Called with a group and the ticket of one of its operations.

    Returns:
        As ``load_record``. Each group also has "tickets": those of all its operations.

    Raises:
        BadRecordError: It is not a flight record, or its lines are others.
    """
    top: dict[str, Any] = {}
    group: dict[str, Any] = {}
    try:
        for line in lines:
            if line.startswith(_TICKET):
                ticket = int(line[len(_TICKET) : line.index(b",")])
                group["tickets"].append(ticket)
                if wants(group, ticket):
                    operation = line.rstrip(b",\n").removesuffix(b"]}")
                    group["operations"].append(json.loads(operation))
                continue
            line = line.rstrip(b",\n")
            if line != b"]}":
                item = json.loads(line + b"]}" if line.endswith(b"[") else line)
                if not top:
                    top = _checked(item, source)
                else:
                    group = {**item, "tickets": []}
                    top["groups"].append(group)
    except (ValueError, KeyError, TypeError) as error:
        raise BadRecordError(f"{source} is not a flight record: {error!r}") from error
    return top


def _checked(top: Any, source: str) -> dict[str, Any]:
    if not isinstance(top, dict) or top.get("format") != _FORMAT:
        raise BadRecordError(f"{source} is not a flight record: it says nothing of {_FORMAT!r}")
    if top.get("version") != _VERSION:
        raise BadRecordError(
            f"{source} is of version {top.get('version')!r} and this pycomm reads {_VERSION}"
        )
    return top


def _group(fields: Mapping[str, Any]) -> GroupRecord:
    operations = tuple(_made(OperationRecord, operation) for operation in fields["operations"])
    lists = {name: tuple(fields[name]) for name in ("global_ranks", "hosts")}
    return _made(GroupRecord, {**fields, **lists, "operations": operations})


def _made(cls: type[_T], fields: Mapping[str, Any]) -> _T:
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in ("rank", "size", "numel", "issued_ns", "ticket", "written_ns"):
        if name in known and not isinstance(fields[name], int):
            raise TypeError(f"{name} is {fields[name]!r}")
    return cls(**{name: value for name, value in fields.items() if name in known})
