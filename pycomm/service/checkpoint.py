"""A server's state on disk: written whole or not at all, and by one server at a time."""

from __future__ import annotations

import fcntl
import glob
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

_FORMAT = 1
_UNFINISHED = ".unfinished"


class CheckpointFile:
    """The file, and a lock that lasts as long as this object or its process.

    Raises:
        BlockingIOError: Another server uses the file.
        FileNotFoundError: The folder does not exist.
        OSError: The folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        if not self.path.parent.is_dir():
            raise FileNotFoundError(
                f"the folder of the checkpoint does not exist: {self.path.parent}"
            )
        self._lock = os.open(f"{self.path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise BlockingIOError(
                f"another server uses the checkpoint {self.path}: give each server its own file"
            ) from error
        for unfinished in self.path.parent.glob(f".{glob.escape(self.path.name)}.*{_UNFINISHED}"):
            unfinished.unlink(missing_ok=True)  # of a server that was killed while it wrote

    def read(self) -> dict[str, Any] | None:
        """The state that was written last; None if there is no file.

        Raises:
            ValueError: It is no checkpoint of a server, or of another version.
        """
        if not self.path.exists():
            return None
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{self.path} cannot be read as a checkpoint of the parameter service. It was not "
                "changed. Try: move it away, which begins a new run"
            ) from error
        if not isinstance(state, dict) or state.get("pycomm_service") != _FORMAT:
            raise ValueError(f"{self.path} is no checkpoint of this version's parameter service")
        return state

    def write(self, state: dict[str, Any]) -> None:
        """The old file stays until the new one is on the disk."""
        folder = self.path.parent
        handle, name = tempfile.mkstemp(
            dir=folder, prefix=f".{self.path.name}.", suffix=_UNFINISHED
        )
        try:
            with os.fdopen(handle, "wb") as file:
                _save({**state, "pycomm_service": _FORMAT}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(entry)  # the name, too
        finally:
            os.close(entry)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _save(state: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # On a disk that has become full torch closes its archive, which fails in another way.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
