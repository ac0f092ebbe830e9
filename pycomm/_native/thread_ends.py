"""Ends pycomm's Python threads before the interpreter ends.

A daemon thread that needs the GIL after that is ended by ``pthread_exit``. In the middle of torch
the unwinding stack calls ``std::terminate``, and the process aborts (pytorch issue 38228). pycomm's
threads are daemons only because a wait that never ends must not keep the process alive. Those that
can end are joined here, by a handler of ``atexit``: Python has joined all threads of the program
that are no daemons by then. These may train, and need pycomm's until they end.
"""

from __future__ import annotations

import atexit
import os
from typing import Protocol

_PATIENCE_S = 2.0


class Ending(Protocol):
    """A thread's owner."""

    def stop(self) -> None:
        """Asks the thread to end soon. Does not wait."""

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended."""


running: set[Ending] = set()
"""Owners of threads to join. A thread that ends by itself removes its owner."""


def join_all() -> None:
    """Ends the threads, by an abort of all groups if need be. The second call does nothing."""
    from pycomm._native import loader  # which imports this

    owners = list(running)
    running.clear()
    for owner in owners:
        owner.stop()
    stuck = [owner for owner in owners if not owner.join(_PATIENCE_S)]
    extension = loader.loaded()
    if stuck and extension is not None:
        # They wait for a collective that will not end by itself: abort it.
        extension.shutdown_all(int(_PATIENCE_S * 1000))
        for owner in stuck:
            owner.join(_PATIENCE_S)


os.register_at_fork(after_in_child=running.clear)  # a child has none of these threads
atexit.register(join_all)  # for a process that never loads the extension: see process_end
