"""A memory limit for processes of a test, where the machine lets this user make one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def _own_group() -> tuple[Path, str]:
    """The control group that this process's memory counts in, and the name of its limit."""
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in _memberships()}
    if "memory" in own:
        return ROOT / "memory" / own["memory"].lstrip("/"), "memory.limit_in_bytes"
    return ROOT / own.get("", "/").lstrip("/"), "memory.max"


def _memberships() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[Path | None]:
    """A control group with this limit: None if none can be made. ``join`` it in each process."""
    parent, limit = _own_group()
    group = parent / f"pycomm-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        try:
            (group / limit).write_text(str(nbytes))
        except OSError:  # version 2 has no such file if the group above does not hand the limit on
            yield None
        else:
            yield group
    finally:
        for _ in range(200):  # the processes have ended, and the kernel may not be done with them
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def join(group: Path) -> None:
    """The memory that this process takes from now on counts in the group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def room_in(group: Path) -> int:
    """How many bytes its limit leaves, without what the kernel would get back first."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        if (group / limit).exists():
            return int((group / limit).read_text()) - int((group / usage).read_text())
    raise FileNotFoundError(f"{group} has no memory limit")
