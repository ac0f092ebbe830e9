"""Which records, groups and operations of many ranks belong together."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pycomm._native.flight_record import (
    BadRecordError,
    GroupRecord,
    OperationRecord,
    ProcessRecord,
    read_record,
)

NS_PER_S = 1_000_000_000

# They end on all ranks at the same moment, but for the way of one message.
_END_TOGETHER = {"all_reduce", "barrier", "all_gather", "reduce_scatter", "all_to_all"}
_ENOUGH_ENDS = 3
_NO_RECORDS = (
    "Set PYCOMM_FLIGHT_RECORDER_DIR before the job starts: each rank writes there when its group "
    "fails"
)
_SMALLEST_SHIFT_NS = 1_000_000

POINT_TO_POINT = {"send", "recv"}


@dataclasses.dataclass(frozen=True)
class Member:
    """One rank of a group, with what it remembers."""

    process: ProcessRecord
    group: GroupRecord
    shift_ns: int = 0
    """What its clock is ahead of the lowest rank's."""

    @property
    def rank(self) -> int:
        """In the job."""
        return self.group.world_rank(self.group.rank)

    @functools.cached_property
    def by_id(self) -> Mapping[str, OperationRecord]:
        """What it took part in, point-to-point operations left out: those have ids of their own."""
        return {
            operation.id: operation
            for operation in self.group.operations
            if operation.op not in POINT_TO_POINT and not self.came_too_late(operation)
        }

    def came_too_late(self, operation: OperationRecord) -> bool:
        """Whether the group had failed here before it was issued: then nobody saw it enter."""
        failed_ns = self.group.phases_ns.get("failed")
        return failed_ns is not None and operation.issued_ns >= failed_ns

    def issued_ns(self, operation: OperationRecord) -> int:
        """When, by the common clock."""
        return operation.issued_ns - self.shift_ns

    def may_have_forgotten(self, operation: OperationRecord) -> bool:
        """Whether an operation that is not here may have been, before what the ring still has."""
        if self.group.complete:
            return False
        kept = [mine.sequence for mine in self.group.operations if mine.sequence is not None]
        if operation.sequence is None or not kept:
            return True
        return operation.sequence < min(kept)


@dataclasses.dataclass(frozen=True)
class Aligned:
    """One group of one run, as all ranks saw it whose records there are."""

    name: str
    size: int
    members: Mapping[int, Member]
    """By rank of the job, as all ranks here."""

    @property
    def ranks(self) -> list[int]:
        """All, by their number in the group."""
        group = next(iter(self.members.values())).group
        return [group.world_rank(rank) for rank in range(self.size)]

    @property
    def title(self) -> str:
        """ "group 0", "group '7' of ranks 1 and 3"."""
        return next(iter(self.members.values())).group.title

    @property
    def missing(self) -> list[int]:
        """Ranks without a record."""
        return [rank for rank in self.ranks if rank not in self.members]

    def host_of(self, rank: int) -> str | None:
        """The host of a rank, also of one whose record is missing."""
        number = self.ranks.index(rank)
        hosts = (member.group.host_of(number) for member in self.members.values())
        return next((host for host in hosts if host), None)

    def operations(self) -> list[tuple[str, dict[int, OperationRecord]]]:
        """Every operation that some rank remembers, by rank; in the order of their beginning."""
        found: dict[str, dict[int, OperationRecord]] = {}
        for rank, member in self.members.items():
            for key, operation in member.by_id.items():
                found.setdefault(key, {})[rank] = operation

        def first_entered(item: tuple[str, dict[int, OperationRecord]]) -> int:
            return min(self.members[rank].issued_ns(mine) for rank, mine in item[1].items())

        return sorted(found.items(), key=first_entered)


@dataclasses.dataclass(frozen=True)
class Records:
    """All that was read."""

    processes: Sequence[ProcessRecord]
    groups: Sequence[Aligned]
    notes: Sequence[str]
    """Files that were left out, and why."""


def dump_files(places: Iterable[Path]) -> list[Path]:
    """The files that are meant: files as they are, of folders those that end in .json.

    Raises:
        BadRecordError: A place is not there, or a folder has no such file.
    """
    files: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = sorted(path for path in place.iterdir() if path.suffix == ".json")
            if not inside:
                raise BadRecordError(
                    f"{place} has no flight records: none of its files is *.json. {_NO_RECORDS}"
                )
            files += inside
        elif place.exists():
            files.append(place)
        else:
            raise BadRecordError(f"{place} does not exist. {_NO_RECORDS}")
    return list(dict.fromkeys(files))


def read_records(files: Sequence[Path]) -> Records:
    """Reads dumps and aligns them. Leaves out a file that it cannot read, with a note.

    Raises:
        BadRecordError: Not one of them can be read.
    """
    processes: list[ProcessRecord] = []
    notes: list[str] = []
    for path in files:
        try:
            processes.append(read_record(path))
        except BadRecordError as error:
            notes.append(str(error))
    if not processes:
        raise BadRecordError("; ".join(notes))
    kept, others = _newest_run(processes)
    notes += [
        f"{process.source} is of another run than {kept[-1].source}, which is newer: left out"
        for process in others
    ]
    kept.sort(key=lambda process: process.rank)
    return Records(kept, align(kept), notes)


def align(processes: Sequence[ProcessRecord]) -> list[Aligned]:
    """The groups of these processes, those of the whole world first."""
    found: dict[tuple[str, str], dict[int, Member]] = {}
    for process in processes:
        for group in process.groups:
            member = Member(process, group)
            found.setdefault((group.name, group.run), {})[member.rank] = member
    groups = [
        Aligned(name, max(member.group.size for member in members.values()), _one_clock(members))
        for (name, _), members in found.items()
    ]
    return sorted(groups, key=lambda group: -group.size)


def _identities(process: ProcessRecord) -> set[tuple[str, str]]:
    return {(group.name, group.run) for group in process.groups if group.run != "0"}


def _newest_run(
    processes: Sequence[ProcessRecord],
) -> tuple[list[ProcessRecord], list[ProcessRecord]]:
    """The records that have a group in common with the newest, oldest first, and all others."""
    by_age = sorted(processes, key=lambda process: process.written_ns)
    shared = _identities(by_age[-1])
    if not shared:  # the ranks have not met, so nothing tells runs apart
        return by_age, []
    kept: list[ProcessRecord] = []
    others = by_age
    while joined := [process for process in others if _identities(process) & shared]:
        kept += joined
        others = [process for process in others if process not in joined]
        shared = shared.union(*(_identities(process) for process in joined))
    loose = [process for process in others if not _identities(process)]
    kept += loose
    kept.sort(key=lambda process: process.written_ns)
    return kept, [process for process in others if process not in loose]


def _one_clock(members: Mapping[int, Member]) -> dict[int, Member]:
    """How far apart the hosts' clocks are, from operations that end everywhere at once."""
    ranks = sorted(members)
    reference = members[ranks[0]]
    shifts: dict[str, int] = {reference.process.host: 0}
    aligned = {}
    for rank in ranks:
        member = members[rank]
        host = member.process.host
        if host not in shifts:
            shifts[host] = _shift_ns(reference, member)
        aligned[rank] = dataclasses.replace(member, shift_ns=shifts[host])
    return aligned


def _shift_ns(reference: Member, member: Member) -> int:
    apart = []
    for key, operation in member.by_id.items():
        other = reference.by_id.get(key)
        both = operation, other
        if other is None or operation.op not in _END_TOGETHER:
            continue
        ends = [one.ended_ns for one in both if one is not None and one.state == "done"]
        if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
            apart.append(ends[0] - ends[1])
    if len(apart) < _ENOUGH_ENDS:
        return 0
    shift = round(statistics.median(apart))
    return shift if abs(shift) >= _SMALLEST_SHIFT_NS else 0
