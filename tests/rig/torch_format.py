"""The records as torch's flight recorder writes them, for torch's own analyser as an oracle.

Source: the keys of torch/csrc/distributed/c10d/FlightRecorder.hpp of torch 2.13 (version 2.10 of
its format), and torch/distributed/flight_recorder, which reads them. torch's reader knows a fixed
set of backends and pycomm is not among them: operations go under the name of gloo.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm._native.flight_record import GroupRecord, OperationRecord, ProcessRecord
from pycomm.trace.align import POINT_TO_POINT

FORMAT_VERSION = "2.10"
FILE_PREFIX = "comm_lib_trace_rank_"

_STATES = {"queued": "scheduled", "running": "started", "done": "completed", "failed": "started"}
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
}


def write_torch_records(processes: Sequence[ProcessRecord], folder: Path) -> list[Path]:
    """Writes one pickle a rank into ``folder`` and returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for process in processes:
        paths.append(folder / f"{FILE_PREFIX}{process.rank}")
        paths[-1].write_bytes(pickle.dumps(torch_record(process)))
    return paths


def torch_record(process: ProcessRecord) -> dict[str, Any]:
    """What ``pickle.load`` gives for a dump of torch's."""
    config, status, entries = {}, {}, []
    for number, group in enumerate(process.groups):
        ranks = [group.world_rank(rank) for rank in range(group.size)]
        desc = group.desc or "undefined"
        config[group.name] = {"name": group.name, "desc": desc, "ranks": str(ranks)}
        collectives = [one for one in group.operations if one.op not in POINT_TO_POINT]
        status[str(number)] = {
            "last_enqueued_collective": _last(collectives),
            "last_started_collective": _last([one for one in collectives if one.started_ns]),
            "last_completed_collective": _last([one for one in collectives if one.state == "done"]),
        }
        entries += [_entry(number, group, operation) for operation in group.operations]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for record_id, entry in enumerate(entries):
        entry["record_id"] = record_id
    return {
        "version": FORMAT_VERSION,
        "comm_lib_version": "pycomm",
        "pg_config": config,
        "pg_status": status,
        "entries": entries,
    }


def _last(operations: Sequence[OperationRecord]) -> int:
    return max((one.sequence for one in operations if one.sequence is not None), default=-1)


def _entry(number: int, group: GroupRecord, operation: OperationRecord) -> dict[str, Any]:
    done = operation.state == "done"
    dtype = _DTYPES.get(operation.dtype, operation.dtype)
    sizes_in, sizes_out = _sizes(group, operation)
    duration_ns = (operation.ended_ns or 0) - (operation.started_ns or 0)
    return {
        "record_id": 0,
        "pg_id": number,
        "process_group": (group.name, group.desc or "undefined"),
        "collective_seq_id": operation.sequence or 0,
        "p2p_seq_id": 0,
        "op_id": operation.sequence or 0,
        "is_p2p": operation.op in POINT_TO_POINT,
        "profiling_name": f"gloo:{_name(group, operation)}",
        "input_sizes": [[sizes_in]],
        "input_dtypes": [dtype],
        "output_sizes": [[sizes_out]],
        "output_dtypes": [dtype],
        "time_created_ns": operation.issued_ns,
        "time_discovered_started_ns": operation.started_ns,
        "time_discovered_completed_ns": operation.ended_ns if done else None,
        "duration_ms": duration_ns / 1e6 if done else None,
        "timeout_ms": 0,
        "state": _STATES[operation.state],
        "retired": operation.ended_ns is not None,
        "frames": [],
        "thread_id": str(operation.thread),
        "thread_name": "",
    }


def _name(group: GroupRecord, operation: OperationRecord) -> str:
    # torch's reader wants to know who sends to whom, by their numbers in the group.
    if operation.op in ("send", "recv"):
        ranks = [group.world_rank(rank) for rank in range(group.size)]
        peer = 0 if operation.peer is None else ranks.index(operation.peer)
        return f"{operation.op} {group.rank}{'->' if operation.op == 'send' else '<-'}{peer}"
    return operation.op


def _sizes(group: GroupRecord, operation: OperationRecord) -> tuple[int, int]:
    """Elements of what goes in and comes out: ``numel`` is one rank's part in some of them."""
    numel, whole = operation.numel, operation.numel * group.size
    if operation.op in ("all_gather", "gather"):
        return numel, whole
    if operation.op in ("reduce_scatter", "scatter"):
        return whole, numel
    return (whole, whole) if operation.op == "all_to_all" else (numel, numel)
