"""The core file of a rank: it has no byte of a secret that the rank has read from a file."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
from pathlib import Path

import pytest
import rings
import torch.distributed as dist
from ranks import run_ranks
from test_closed_group import forms_of, sum_and_say

from pycomm._group import secrets
from pycomm._native import loader

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(180)]

MARK = "a core file of a test of pycomm, rank "


@pytest.fixture
def cores() -> None:
    place = Path("/proc/sys/kernel/core_pattern")
    pattern = place.read_text().strip() if place.exists() else "nowhere"
    if not pattern.startswith("core") or "/" in pattern:
        pytest.skip(f"core files go to {pattern} here, not to the working directory")
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY:
        pytest.skip("this process may not write core files of any size")
    if "ASAN_OPTIONS" in os.environ:
        pytest.skip("sanitizers write no core files")


def crash(rank: int, world_size: int, folder: str, keeps: bool) -> None:
    """Ends by a signal, with a group whose connections are open. ``keeps``: has the file's text."""
    kept = Path(os.environ["PYCOMM_SECRET_FILE"]).read_text() if keeps else ""
    mark = bytearray(MARK.encode() + str(rank).encode())  # nowhere else in this form
    assert sum_and_say(rank, world_size)
    record = secrets.sealed("a key", "a value")
    dist.barrier()
    os.chdir(Path(folder) / str(rank))
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert record and mark and bool(kept) == keeps and loader.native
    signal.signal(signal.SIGABRT, signal.SIG_DFL)  # no stacks of faulthandler
    os.kill(os.getpid(), signal.SIGABRT)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("transport", rings.first_of(["auto", "tcp"]))
def test_a_core_file_has_no_byte_of_the_secret(tmp_path: Path, transport: str) -> None:
    assert _forms_found(tmp_path, transport, keeps=False) == [[], []]


@pytest.mark.usefixtures("cores")
def test_the_search_finds_a_secret_that_a_program_keeps(tmp_path: Path) -> None:
    for found in _forms_found(tmp_path, "auto", keeps=True):
        assert found


def _forms_found(tmp_path: Path, transport: str, keeps: bool) -> list[list[int]]:
    """By rank: which forms of the secret its core file has."""
    path = tmp_path / "secret"
    key_id = secrets.generate_file(str(path)).key_id
    env = {
        "PYCOMM_SECRET": None,
        "PYCOMM_SECRET_FILE": str(path),
        "PYCOMM_TRANSPORT": transport,
    }
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    args = (str(tmp_path), keeps)
    results = run_ranks(2, crash, args=args, env=env, check=False, fresh=True)
    assert [one.exit_code for one in results] == 2 * [-signal.SIGABRT], results.describe()
    every = []
    for rank, folder in enumerate(folders):
        (core,) = folder.glob("core*")
        with core.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as dump:
            assert dump.find(f"{MARK}{rank}".encode()) >= 0, "it does not have the heap"
            assert dump.find(key_id.encode()) >= 0
            every.append([i for i, form in enumerate(forms_of(path)) if dump.find(form) >= 0])
        with contextlib.suppress(FileNotFoundError):
            core.unlink()
    return every
