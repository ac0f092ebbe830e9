"""Ends pycomm's Python threads before the interpreter ends.

A daemon thread that needs the GIL after that is ended by ``pthread_exit``. In the middle of torch
the unwinding stack calls ``std::terminate``, and the process aborts (pytorch issue 38228). pycomm's
threads are daemons only because a wait that never ends must not keep the process alive. Those that
can end are joined here.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

from pycomm._native import loader

_PATIENCE_S = 2.0


class Ending(Protocol):
    """A thread's owner."""

    def stop(self) -> None:
        """Asks the thread to end soon. Does not wait."""

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended."""


running: set[Ending] = set()
"""Owners of threads to join. A thread that ends by itself removes its owner."""


def _join_all() -> None:
    owners = list(running)
    for owner in owners:
        owner.stop()
    stuck = [owner for owner in owners if not owner.join(_PATIENCE_S)]
    extension = loader.loaded()
    if stuck and extension is not None:
        # They wait for a collective that will not end by itself: abort it.
        extension.shutdown_all(int(_PATIENCE_S * 1000))
        for owner in stuck:
            owner.join(_PATIENCE_S)


# Runs before the interpreter joins its threads; atexit would run after that, when it does not wait
# for daemons any more.
with contextlib.suppress(RuntimeError):  # the main thread has ended: there is nothing to join for
    threading._register_atexit(_join_all)  # type: ignore[attr-defined]
