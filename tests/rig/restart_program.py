"""Lives of one job after another on one store: each is killed, and says no goodbye.

    python restart_program.py FOLDER WHERE LATE_S

Forks its ranks, so torch is imported once. Of each life that meets, every rank's sum stands in
FOLDER/LIFE-RANK. Nothing that was killed is reaped before the end: it stays a zombie, as under a
launcher that is busy. WHERE:

- "processes": the ranks are children of this process.
- "containers": each rank is the first process of a pid namespace with a /proc of its own, so it has
  the same pid in each life, and cannot see the processes of the last life. Needs root; exits with
  77 and the reason if the kernel does not let it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SIZE = 3
LIMIT_S = 60.0
LATE_S = float(sys.argv[3]) if len(sys.argv) > 3 and __name__ == "__main__" else 0.0
LIVES: tuple[tuple[int, ...], ...] = (
    (0, 1, 2),
    (1, 2, 0),
    (0,),
    (2, 1),
    (1, 2, 0),
    (0, 2, 1),
    (2, 0, 1),
)
"""The ranks of each life, in the order in which they start. Those that lack some are killed while
they wait. In the fifth, rank 0 is late."""
LATE_LIFE = 4
WAITS_S = 0.5
"""Ranks of a life that lacks some have to wait for so long: no former life's error ends them."""
NOT_ALLOWED = 77
_LIBC = ctypes.CDLL(None, use_errno=True)
ENDED_LAST: list[int] = []
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWPID, _MS_REC_PRIVATE = 0x20000, 0x20000000, 0x4000 | 0x40000


def spawn(body: Callable[[], None]) -> int:
    """Forks a child that ends with the body, and with nothing of this process."""
    pid = os.fork()
    if pid:
        return pid
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing is left behind, whatever fails
    code = 1
    try:
        body()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def called(what: str, result: int) -> None:
    if result != 0:
        print(f"{what}: {os.strerror(ctypes.get_errno())}", file=sys.stderr, flush=True)
        os._exit(NOT_ALLOWED)


def in_container(body: Callable[[], None]) -> int:
    """As spawn(), in a pid and a mount namespace; returns the pid that this process knows it by."""
    reader, writer = os.pipe()

    def contain() -> None:
        called("unshare", _LIBC.unshare(_CLONE_NEWPID | _CLONE_NEWNS))
        called("mount /", _LIBC.mount(b"none", b"/", None, _MS_REC_PRIVATE, None))

        def begin() -> None:
            os.close(writer)
            called("mount /proc", _LIBC.mount(b"proc", b"/proc", b"proc", 0, None))
            body()

        first = spawn(begin)
        os.write(writer, str(first).encode())
        os.close(writer)
        signal.pause()  # never waits for it

    outer = spawn(contain)
    ENDED_LAST.append(outer)
    os.close(writer)
    with os.fdopen(reader) as lines:
        text = lines.read()
    if not text:
        sys.exit(NOT_ALLOWED)
    return int(text)


def serve(writer: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    os.close(writer)
    signal.pause()


def live(folder: Path, life: int, rank: int) -> None:
    os.environ["RANK"] = str(rank)
    dist.init_process_group("pycomm", timeout=timedelta(seconds=LIMIT_S + LATE_S))
    value = torch.full((5,), float(10 * life + rank))
    dist.all_reduce(value)
    written = folder / f"{life}-{rank}.new"
    written.write_text(f"{value[0]:.0f} {os.getpid()}")
    written.rename(folder / f"{life}-{rank}")
    signal.pause()


def has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another's child: it is a zombie or runs
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state in "ZX"


def wait(what: str, done: Callable[[], bool], pids: list[int]) -> None:
    end = time.monotonic() + LIMIT_S
    while True:
        if any(has_ended(pid) for pid in pids):
            raise SystemExit(f"{what}: a rank ended by itself")
        if done():
            return
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {LIMIT_S:.0f} s")
        time.sleep(0.01)


def all_are_there(files: list[Path]) -> bool:
    return all(file.exists() for file in files)


def claims(store: dist.Store) -> set[str]:
    """The keys of the ranks that have a claim: ".../owner/RANK/CLAIM"."""
    return {key for key in map(str, store.list_keys()) if "/owner/" in key}


def main() -> None:
    folder, where = Path(sys.argv[1]), sys.argv[2]
    start = spawn if where == "processes" else in_container
    reader, writer = os.pipe()
    ENDED_LAST.append(spawn(lambda: serve(writer)))
    os.close(writer)
    with os.fdopen(reader) as lines:
        port = lines.read()
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(SIZE)}
    # A restart for other members keeps the count, and so the place in the store.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for life, order in enumerate(LIVES):
        pids: list[int] = []
        before = claims(store)
        for rank in order:
            if rank == 0 and rank == order[-1]:  # the others are there by now
                time.sleep(LATE_S if life == LATE_LIFE else 0.2)
            pids.append(start(functools.partial(live, folder, life, rank)))
        if len(order) == SIZE:
            files = [folder / f"{life}-{rank}" for rank in order]
            wait(f"life {life}", functools.partial(all_are_there, files), pids)
        else:
            wanted = {str(rank) for rank in order}

            def all_wait(before: set[str] = before, wanted: set[str] = wanted) -> bool:
                return {key.split("/")[-2] for key in claims(store) - before} == wanted

            wait(f"life {life} begins", all_wait, pids)
            waited_s = time.monotonic() + WAITS_S
            wait(f"life {life}", lambda end_s=waited_s: time.monotonic() > end_s, pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            while not has_ended(pid):
                time.sleep(0.01)


if __name__ == "__main__":
    try:
        main()
    finally:
        for pid in ENDED_LAST:
            os.kill(pid, signal.SIGKILL)
