"""What a rank's metrics file says now: from the flight record, and from the wrappers' counters."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from pycomm._metrics.ddp_stats import DDPStats, wrappers
from pycomm._metrics.metrics_text import MetricsText
from pycomm._native.operation_counts import OperationCounts
from pycomm._version import __version__

_STATS_PATIENCE_S = 0.2


class MetricsContent:
    """Makes the text. It remembers what the flight record forgets.

    Not for several threads at a time.
    """

    def __init__(self) -> None:
        self.failed: frozenset[str] = frozenset()
        """The names of the groups that have failed, as the last text says."""
        self.reader: threading.Thread | None = None
        """Reads the wrappers' counters, which may block."""
        self._counts: dict[tuple[str, str], OperationCounts] = {}
        self._stats: list[tuple[dict[str, str], DDPStats]] = []

    def wants(self, group: Mapping[str, Any], ticket: int) -> bool:
        """For ``read_some``: whether ``text`` needs this operation of the group."""
        return self._counts_of(group).wants(ticket)

    def text(
        self,
        record: Mapping[str, Any],
        labels: Mapping[str, str],
        *,
        world_size: int,
        running: bool,
    ) -> str:
        """The text.

        Args:
            record: The flight record of the process, as ``read_some`` has it.
            labels: Of every sample.
            world_size: Of the job.
            running: False at the end of the process.
        """
        out = MetricsText(labels)
        out.add(
            "pycomm_info",
            1,
            version=__version__,
            torch=str(torch.__version__),
            host=record["host"],
            pid=str(record["pid"]),
        )
        out.add("pycomm_world_size", world_size)
        out.add("pycomm_running", int(running))
        # Not the record's time, which does not follow when somebody sets the clock.
        out.add("pycomm_written_timestamp_seconds", time.time())
        # By name: a series may be there only once, and the last group of a name is the newest.
        newest = {group["name"]: group for group in record["groups"]}
        closed = {name for name, group in newest.items() if "closed" in group["phases_ns"]}
        out.add("pycomm_groups", len(newest) - len(closed))
        self.failed = frozenset(name for name, group in newest.items() if "failure" in group)
        counts = {}
        for name, group in newest.items():
            if name not in closed or "failure" in group:
                counts[_key(group)] = now = self._counts_of(group)
                now.update(
                    group["tickets"], group["operations"], group["slots"], record["written_ns"]
                )
                _add_group(out, group, now)
        self._counts = counts  # without those of groups that were destroyed
        for of_wrapper, stats in self._read_stats():
            _add_stats(out, of_wrapper, stats)
        return out.text()

    def _counts_of(self, group: Mapping[str, Any]) -> OperationCounts:
        return self._counts.get(_key(group)) or OperationCounts()

    def _read_stats(self) -> list[tuple[dict[str, str], DDPStats]]:
        """Of each wrapper of this process, as its own thread finds them. ``stats()`` waits for no
        backward pass, but a group that is reconfigured holds up the counters of its codecs. A hang
        is when the file is wanted most: then these are the ones before."""
        if self.reader is None or not self.reader.is_alive():
            if not wrappers():
                return []
            reader = threading.Thread(target=self._take_stats, name="pycomm-stats", daemon=True)
            reader.start()
            self.reader = reader
        self.reader.join(_STATS_PATIENCE_S)
        return self._stats

    def _take_stats(self) -> None:
        found = []
        # Not held meanwhile: this may take as long as a hang, and the last to let go destroys.
        listed = sorted((number, weakref.ref(wrapper)) for wrapper, number in wrappers())
        for number, reference in listed:
            if (wrapper := reference()) is None:
                continue
            labels = {"wrapper": str(number), "model": type(wrapper.module).__name__}
            with contextlib.suppress(Exception):  # of a destroyed group, or without counters
                found.append((labels, wrapper.stats()))
            del wrapper
        self._stats = found


def _key(group: Mapping[str, Any]) -> tuple[str, str]:
    """A group made later may have the same name, but not the same run."""
    return group["name"], group["run"]


def _add_group(out: MetricsText, group: Mapping[str, Any], counts: OperationCounts) -> None:
    name = group["name"]
    failure = group.get("failure")
    out.add("pycomm_group_size", group["size"], group=name)
    out.add("pycomm_group_failed", int(failure is not None), group=name)
    if failure is not None:
        peer = failure.get("peer")
        out.add(
            "pycomm_group_failure_info",
            1,
            group=name,
            code=failure["code"],
            peer="" if peer is None else str(peer),
        )
    by_kind = {
        "pycomm_operations_issued_total": counts.issued,
        "pycomm_operations_completed_total": counts.completed,
        "pycomm_operations_failed_total": counts.failed,
        "pycomm_received_bytes_total": counts.received_nbytes,
    }
    for metric, counter in by_kind.items():
        for op in sorted(counts.issued):  # 0, too: a rate needs the value before the first
            out.add(metric, counter[op], group=name, op=op)
    if group["slots"]:  # else nobody knows: 0 would be a hang that looks healthy
        out.add("pycomm_operations_pending", counts.pending, group=name)
        out.add("pycomm_oldest_operation_age_seconds", counts.oldest_age_s, group=name)


def _add_stats(out: MetricsText, labels: Mapping[str, str], stats: DDPStats) -> None:
    values = {
        "passes": stats.passes,
        "steps": stats.steps,
        "syncs": stats.syncs,
        "wire_bytes": stats.wire_nbytes,
        "sent_bytes": stats.sent_nbytes,
        "exposed_seconds": stats.exposed_seconds,
        "overflowed_buckets": stats.overflowed_buckets,
        "nonfinite_buckets": stats.nonfinite_buckets,
        "forgotten_residuals": stats.forgotten_residuals,
        "codec_overflows": stats.codec_overflows,
        "redone_steps": stats.redone_steps,
        "lost_ranks": stats.lost_ranks,
        "left_ranks": stats.left_ranks,
        "joined_ranks": stats.joined_ranks,
        "agreeing_seconds": stats.agreeing_seconds,
        "meeting_seconds": stats.meeting_seconds,
        "redoing_seconds": stats.redoing_seconds,
    }
    for name, value in values.items():
        out.add(f"pycomm_ddp_{name}_total", value, **labels)
