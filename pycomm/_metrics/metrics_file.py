"""The file of a rank's metrics: its name, and how it gets there and goes away again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

_OLD_S = 3600.0
_OURS = re.compile(r"pycomm_rank_\d+_[0-9a-f]{16}\.prom(\.\d+\.tmp)?")
_RECORDS = re.compile(r"pycomm-metrics-\d+-[0-9a-f]{16}\.json(\.partial)?")
_MODE = 0o644  # node_exporter runs as another user
_SHARED_MEMORY = "/dev/shm"  # where the record passes through, so that no disk has to write it


@dataclasses.dataclass(frozen=True)
class Identity:
    """What tells this process from others whose files are in the same folder."""

    folder: str
    rank: int
    """In the world."""
    run: int
    """A random number that the ranks of one job share (``GroupRecord.run``)."""
    world_size: int

    @property
    def labels(self) -> dict[str, str]:
        """Of every sample."""
        return {"rank": str(self.rank), "run": f"{self.run:016x}"}

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.folder) / f"pycomm_rank_{self.rank}_{self.run:016x}.prom"


def check_folder(origin: str, folder: str) -> None:
    """Makes the folder if there is none, and tries to write there.

    Raises:
        ValueError: That fails; the text begins with ``origin``.
    """
    probe = os.path.join(folder, f"pycomm_probe.{os.urandom(8).hex()}.tmp")
    try:
        os.makedirs(folder, exist_ok=True)
        try:
            _write_whole(probe, "")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(probe)
    except OSError as error:
        raise ValueError(
            f"{origin}={folder!r} cannot be used: {error.strerror} ({error.filename}). "
            "Try: a folder that this user may write and node_exporter may read, or 'off'"
        ) from error


def open_record(extension: ModuleType, folder: str) -> BinaryIO:
    """The flight record of all groups. The native part writes it to files only."""
    places = [_SHARED_MEMORY, tempfile.gettempdir(), folder]
    for place in places:
        path = os.path.join(place, f"pycomm-metrics-{os.getpid()}-{os.urandom(8).hex()}.json")
        try:
            extension.write_flight_record(path)
        except Exception:
            if place == places[-1]:
                raise
            continue
        try:
            return open(path, "rb")
        finally:
            os.unlink(path)
    raise AssertionError("there are places")


def replace(path: Path, text: str) -> None:
    """Nobody sees a part of it: the collector reads only names that end with .prom."""
    partial = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    try:
        _write_whole(partial, text)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _write_whole(path: str, text: str) -> None:
    # Never through somebody's link: the folder may be one that everybody may write.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
        os.fchmod(file.fileno(), _MODE)
        file.write(text)


def remove_old(folder: str) -> None:
    """Files of processes that could not remove theirs. A living one writes its file again."""
    for place, ours in ((folder, _OURS), (_SHARED_MEMORY, _RECORDS)):
        with contextlib.suppress(OSError):
            for entry in os.scandir(place):
                if ours.fullmatch(entry.name):
                    with contextlib.suppress(OSError):  # another user's, or another has removed it
                        if time.time() - entry.stat(follow_symlinks=False).st_mtime > _OLD_S:
                            os.unlink(entry.path)
