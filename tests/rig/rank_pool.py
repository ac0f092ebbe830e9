"""Rank processes that stay alive from one program to the next.

    parent                             rank 0 … n-1
    RankPool.answers(program, 3)  -- pickle -->  run(rank, program), on the first three
    one answer per rank           <-- pickle --

A program that breaks a process, or hangs, ends all of them; the next one gets new ones.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from ranks import Ranks, start_ranks


class Broken(str):
    """The story of a rank whose part of a program raised, hung or ended its process."""


def serve(address: str, rank: int, run: Callable[[Any], Any]) -> None:
    """A rank: answers each program with ``run(program)`` until there is nothing more."""
    with Client(address) as parent:
        parent.send(rank)
        while (program := parent.recv()) is not None:
            try:
                answer = run(program)
            except Exception:
                answer = Broken(traceback.format_exc())
            parent.send(answer)


class RankPool:
    """Starts the processes when they are first needed, and again after a program has broken them.

    Args:
        world_size: Processes.
        target: ``target(rank, world_size, address, *args)`` calls ``serve``.
        patience_s: Ranks that give no answer for so long hang.
        options: Of ``start_ranks``.
    """

    def __init__(
        self, world_size: int, target: Callable[..., None], *, patience_s: float, **options: Any
    ) -> None:
        self._world_size, self._target, self._patience_s = world_size, target, patience_s
        self._args = tuple(options.pop("args", ()))
        self._options = options
        self._open = contextlib.ExitStack()
        self._connections: list[Connection] = []
        self._running: Ranks | None = None

    def _start(self) -> None:
        folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="pycomm-programs-"))
        address = str(Path(folder) / "socket")
        listener = self._open.enter_context(Listener(address, backlog=self._world_size))
        args = (address, *self._args)
        self._running = self._open.enter_context(
            start_ranks(self._world_size, self._target, args=args, **self._options)
        )
        by_rank: dict[int, Connection] = {}
        listener._listener._socket.settimeout(60.0)  # type: ignore[attr-defined]
        for _ in range(self._world_size):
            connection = self._open.enter_context(listener.accept())
            by_rank[connection.recv()] = connection
        self._connections = [by_rank[rank] for rank in range(self._world_size)]

    def close(self) -> None:
        """Ends the ranks, orderly where they are."""
        if self._running is not None:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send(None)
            self._running.collect(10.0)
        self._connections, self._running = [], None
        self._open.close()

    def answers(self, program: Any, ranks: int) -> list[Any]:
        """Runs a program on the first ``ranks`` ranks. An answer may be ``Broken``."""
        if self._running is None:
            self._start()
        connections = self._connections[:ranks]
        for connection in connections:
            connection.send(program)
        answers: list[Any] = []
        lost = False
        deadline = time.monotonic() + self._patience_s
        for connection in connections:
            try:
                ready = connection.poll(max(0.0, deadline - time.monotonic()))
                answers.append(connection.recv() if ready else Broken("no answer: it hangs"))
                lost = lost or not ready
            except (EOFError, ConnectionError):
                answers.append(Broken("no answer: the process has ended"))
                lost = True
        if lost:
            assert self._running is not None
            answers.append(Broken(self._running.collect(0.0).describe()))
            self.close()
        return answers

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stories(answers: list[Any]) -> str:
    """What the ranks that broke have to say, or ""."""
    return "\n".join(
        f"--- rank {rank}\n{answer}"
        for rank, answer in enumerate(answers)
        if isinstance(answer, Broken)
    )
