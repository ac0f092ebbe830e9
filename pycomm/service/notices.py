"""What a server logs while it waits for workers, and when it loses one."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time

from pycomm.errors import PycommError

logger = logging.getLogger("pycomm")
_NEVER_CONNECTED_S = 10.0
_GONE_S = 60.0
_BETWEEN_WARNINGS_S = 10.0


@dataclasses.dataclass(frozen=True)
class Attendance:
    """Which workers of a service have come, are live, and have said goodbye."""

    expected: int
    came: frozenset[int]
    live: frozenset[int]
    ended: frozenset[int]


class RareWarnings:
    """Logs warnings that any process can cause: of each kind one line in 10 s, with a count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Both by kind, and guarded by it.
        self._next_at: dict[str, float] = {}
        self._held: dict[str, tuple[int, str]] = {}  # how many, and the last of them

    def add(self, kind: str, *arguments: object) -> None:
        """Logs ``kind % arguments`` now, or with others of its kind later. On any thread."""
        with self._lock:
            number, _ = self._held.get(kind, (0, ""))
            self._held[kind] = (number + 1, kind % arguments)
        self.flush()

    def flush(self) -> None:
        """Logs what was held back for long enough. On any thread."""
        now = time.monotonic()
        due = []
        with self._lock:
            for kind in list(self._held):
                if now >= self._next_at.get(kind, now):
                    self._next_at[kind] = now + _BETWEEN_WARNINGS_S
                    due.append(self._held.pop(kind))
        for number, text in due:
            if number > 1:
                text += f" (the last of {number} in {_BETWEEN_WARNINGS_S:g} s)"
            logger.warning("%s", text)


class WaitNotices:
    """Logs which workers the server waits for. On the thread of serve()."""

    def __init__(self) -> None:
        self._text = ""
        self._next_at = 0.0

    def log(self, attendance: Attendance, now: float) -> None:
        """Logs if it is time to. ``now``: seconds of a clock that only grows."""
        text, delay, interval = _notice(attendance)
        if text != self._text:
            self._text = text
            self._next_at = now + delay
        if text and now >= self._next_at:
            logger.warning("%s", text)
            self._next_at = now + interval


def _notice(attendance: Attendance) -> tuple[str, float, float]:
    """The text, the seconds before it is logged first, and those between two times."""
    workers = range(attendance.expected)
    missing = [each for each in workers if each not in attendance.came]
    if attendance.came and missing:
        text = (
            f"the parameter service waits for {_named(missing)}, never connected so far "
            f"({attendance.expected - len(missing)} of {attendance.expected} have)"
        )
        return text, _NEVER_CONNECTED_S, _NEVER_CONNECTED_S
    absent = [each for each in workers if each in attendance.came - attendance.ended]
    if absent and not attendance.live:
        text = (
            f"all live workers have ended; the server waits for {_named(absent)}, gone without a "
            "goodbye. Try: start it again, or stop the server with SIGTERM"
        )
        return text, 0.0, _GONE_S
    return "", 0.0, 0.0


def _named(workers: list[int]) -> str:
    listed = ", ".join(map(str, workers[:10])) + (", …" if len(workers) > 10 else "")
    return f"worker {listed}" if len(workers) == 1 else f"workers {listed}"


def gone(worker: int, error: Exception) -> str:
    """What a server logs when a worker's connection ends without a goodbye."""
    host = error.peer_host if isinstance(error, PycommError) else None
    place = "" if host is None else f" on {host}"
    return (
        f"worker {worker}{place} of the parameter service is gone without a goodbye: "
        f"{cause_of(error)}"
    )


def cause_of(error: Exception) -> str:
    """The cause alone. An error of the group of two names ranks, which servers and workers lack."""
    if not isinstance(error, PycommError):
        return str(error).rstrip(".") or type(error).__name__
    cause = error.record.cause
    named = type(error).__name__
    return named if cause is None or "rank" in cause.lower() else f"{named}: {cause}"


def log_lost(worker: int, pushes: int) -> None:
    """Logs how many acknowledged pushes of a worker are lost, if any."""
    if pushes > 0:
        logger.warning(
            "%d pushes of worker %d are lost: they are not in the parameters that the server was "
            "started with",
            pushes,
            worker,
        )
