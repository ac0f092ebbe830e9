"""The text of a metrics file, in the format that Prometheus and node_exporter's textfile collector
read. ``METRICS`` has every metric; docs/monitoring.md has the same table.

node_exporter refuses a scrape in which two files have the same series, or one metric with two HELP
texts. So every series has the labels of its process, and a HELP text has no part that varies.
"""

from __future__ import annotations

from collections.abc import Mapping

_COUNTER, _GAUGE = "counter", "gauge"

METRICS: dict[str, tuple[str, str]] = {
    "pycomm_info": (_GAUGE, "Versions, host and pid of the rank's process; always 1."),
    "pycomm_world_size": (_GAUGE, "Ranks of the job."),
    "pycomm_running": (_GAUGE, "1 while the process runs, 0 once it has ended."),
    "pycomm_written_timestamp_seconds": (_GAUGE, "When this file was written, since 1970."),
    "pycomm_groups": (_GAUGE, "Process groups that are not destroyed."),
    "pycomm_group_size": (_GAUGE, "Ranks of the group."),
    "pycomm_group_failed": (_GAUGE, "1 if the group has failed, else 0."),
    "pycomm_group_failure_info": (
        _GAUGE,
        "The error code of a failed group, and the rank that it names; always 1.",
    ),
    "pycomm_operations_issued_total": (_COUNTER, "Operations that this rank has issued."),
    "pycomm_operations_completed_total": (_COUNTER, "Operations that ended without an error."),
    "pycomm_operations_failed_total": (_COUNTER, "Operations that ended with an error."),
    "pycomm_operations_pending": (_GAUGE, "Operations that have not ended."),
    "pycomm_oldest_operation_age_seconds": (
        _GAUGE,
        "Time since the oldest operation that has not ended was issued; 0 if there is none.",
    ),
    "pycomm_received_bytes_total": (_COUNTER, "Bytes that operations which have ended received."),
    "pycomm_ddp_passes_total": (_COUNTER, "Backward passes, without those in no_sync()."),
    "pycomm_ddp_steps_total": (_COUNTER, "Backward passes whose gradients were reduced."),
    "pycomm_ddp_syncs_total": (_COUNTER, "Times that parameters were averaged between hosts."),
    "pycomm_ddp_wire_bytes_total": (_COUNTER, "Bytes of buckets handed to all_reduce."),
    "pycomm_ddp_sent_bytes_total": (_COUNTER, "Bytes that a ring all_reduce sends for them."),
    "pycomm_ddp_exposed_seconds_total": (
        _COUNTER,
        "Time that backward had ended and waited for the network.",
    ),
    "pycomm_ddp_overflowed_buckets_total": (
        _COUNTER,
        "fp16 buckets reduced again because the first scale was too large.",
    ),
    "pycomm_ddp_nonfinite_buckets_total": (
        _COUNTER,
        "fp16 buckets with Inf or NaN among some rank's gradients.",
    ),
    "pycomm_ddp_forgotten_residuals_total": (
        _COUNTER,
        "Steps after which error feedback kept nothing, since an average was not finite.",
    ),
    "pycomm_ddp_codec_overflows_total": (
        _COUNTER,
        "Finite values that became infinite in int8 on this rank.",
    ),
    "pycomm_ddp_redone_steps_total": (
        _COUNTER,
        "Times that a step was summed again after a failure (elastic).",
    ),
    "pycomm_ddp_lost_ranks_total": (
        _COUNTER,
        "Ranks that have died, or gone otherwise, since the model was wrapped (elastic).",
    ),
    "pycomm_ddp_left_ranks_total": (
        _COUNTER,
        "Ranks that have left in order (elastic).",
    ),
    "pycomm_ddp_joined_ranks_total": (
        _COUNTER,
        "Processes that have joined since the model was wrapped (elastic).",
    ),
    "pycomm_ddp_agreeing_seconds_total": (
        _COUNTER,
        "Time that steps waited for all members, and after a failure for those who are left "
        "(elastic).",
    ),
    "pycomm_ddp_meeting_seconds_total": (
        _COUNTER,
        "Time that members of new groups took to meet (elastic).",
    ),
    "pycomm_ddp_redoing_seconds_total": (
        _COUNTER,
        "Time in which steps were summed again (elastic).",
    ),
}


class MetricsText:
    """Collects the samples of one file.

    Args:
        labels: Of every sample: what tells this process from all others.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._samples: dict[str, list[str]] = {name: [] for name in METRICS}

    def add(self, name: str, value: float, **labels: str) -> None:
        """One sample of a metric of ``METRICS``. Raises KeyError for another name."""
        given = self._labels | labels
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in given.items())
        self._samples[name].append(f"{name}{{{pairs}}} {value!r}")

    def text(self) -> str:
        """The file: metrics without a sample are left out."""
        lines: list[str] = []
        for name, samples in self._samples.items():
            if samples:
                kind, meaning = METRICS[name]
                lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *samples]
        return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
