"""Writes a rank's metrics to a file for node_exporter's textfile collector (``metrics_dir``).

One daemon thread per process writes the file every 5 s, when a group fails, and at exit. It reads
the flight record of the process, which holds no group alive and also has groups that were just
destroyed. node_exporter exports a file for as long as it exists, so the file must not outlive what
it says: a process that ends well removes it, one whose group has failed leaves it with
``pycomm_running 0``, and each process that starts removes files of an hour ago.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from pycomm._metrics.metrics_content import MetricsContent
from pycomm._metrics.metrics_file import Identity, open_record, remove_old, replace
from pycomm._native import thread_ends
from pycomm._native.flight_record import read_some

logger = logging.getLogger("pycomm")

PERIOD_S = 5.0
_POLL_S = 0.25
"""Between two looks for a group that has failed."""
_SHARE = 0.01
"""Of a core's time, what writing may take: if it takes more, the period grows."""

FailedGroups = Callable[[], frozenset[str]]
"""The names of the groups that have failed and are not destroyed."""


def start(
    extension: ModuleType, identity: Identity, failed_groups: FailedGroups, *, within_job: bool
) -> None:
    """Has the file written from now on. Does not block.

    Args:
        extension: The native part.
        identity: Of this process. It takes the place of an earlier one, as after a restart within
            the process.
        failed_groups: Asked all the time.
        within_job: The job has begun before, so that an earlier identity keeps its rank and run.
    """
    global _writer, _forgets
    with _guard:
        if not _forgets:
            os.register_at_fork(after_in_child=_forget)
            _forgets = True
        if _writer is None:
            _writer = _Writer(extension, identity, failed_groups)
        elif within_job:
            _writer.move(dataclasses.replace(_writer.identity, folder=identity.folder))
        else:
            _writer.move(identity)


def write_now() -> None:
    """Writes the file on the calling thread."""
    if _writer is not None:
        _writer.write(running=True)


class _Writer:
    """The thread, and what it knows."""

    def __init__(
        self, extension: ModuleType, identity: Identity, failed_groups: FailedGroups
    ) -> None:
        self._extension = extension
        self.identity = identity
        self._failed_groups = failed_groups
        self._content = MetricsContent()
        self._written: Path | None = None
        self._warned = False
        self._ending = False
        self._lock = threading.Lock()  # one write at a time
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pycomm-metrics", daemon=True)
        thread_ends.running.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads: the job goes on without metrics
            thread_ends.running.discard(self)
            self._warn(error)

    def move(self, identity: Identity) -> None:
        """From now on the file is another one, as after a restart within the process."""
        self.identity = identity
        self._wake.set()

    def stop(self) -> None:
        """For ``_exit``."""
        self._ending = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """For ``_exit``. A folder on a network that hangs costs no more than this.

        True in any case: to end these threads no group has to be aborted.
        """
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        reader = self._content.reader  # the last write may have started it
        if reader is not None:
            reader.join(max(deadline - time.monotonic(), 0.0))
        return True

    def _run(self) -> None:
        try:
            remove_old(self.identity.folder)
            known: frozenset[str] = frozenset()
            identity, due = None, 0.0
            while not self._ending:
                failed = self._look(known)
                if failed - known or identity != self.identity or time.monotonic() >= due:
                    identity, began = self.identity, time.thread_time()
                    written = self.write(running=True)
                    took = time.thread_time() - began
                    # The record has a failure last, once all operations have ended.
                    lacks = written and not failed <= self._content.failed
                    due = time.monotonic() + max(0.0 if lacks else PERIOD_S, took / _SHARE)
                known = failed
                self._wake.wait(_POLL_S)
                self._wake.clear()
            self.write(running=False, any_failed=bool(self._look(known)))
        finally:
            thread_ends.running.discard(self)

    def _look(self, known: frozenset[str]) -> frozenset[str]:
        try:
            return self._failed_groups()
        except Exception as error:  # the job must not notice that this went wrong
            self._warn(error)
            return known

    def write(self, *, running: bool, any_failed: bool = False) -> bool:
        """Writes the file, or removes it after a good end; False if it could not. Never raises.

        ``any_failed``: a group has, also if the record does not know it yet.
        """
        with self._lock:
            try:
                identity = self.identity
                with open_record(self._extension, identity.folder) as file:
                    record = read_some(file, "the flight record", self._content.wants)
                text = self._content.text(
                    record, identity.labels, world_size=identity.world_size, running=running
                )
                if self._written not in (None, identity.path):
                    self._remove()
                if running or any_failed or self._content.failed:
                    replace(identity.path, text)
                    self._written = identity.path
                else:
                    self._remove()
                return True
            except Exception as error:
                self._warn(error)
                if not running:  # better no file than one that says that this process runs
                    with contextlib.suppress(OSError):
                        self._remove()
                return False

    def _remove(self) -> None:
        if self._written is not None:
            self._written.unlink(missing_ok=True)
        self._written = None

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "the metrics could not be written to %s: %s. The job goes on. "
                "This is logged once; the file keeps the time when it was last written",
                self.identity.path,
                error,
            )


_guard = threading.Lock()
_writer: _Writer | None = None
_forgets = False


def _forget() -> None:
    """In a child of fork(), which has no such thread: the file stays its parent's."""
    global _guard, _writer
    if _writer is not None:
        thread_ends.running.discard(_writer)
    _guard, _writer = threading.Lock(), None
