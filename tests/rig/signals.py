"""Waiting for a signal that another process sends."""

from __future__ import annotations

import signal
import time


class CaughtSignal:
    """Whether a signal has come, for a program that waits for it.

    It looks every hundredth of a second, as nothing that sleeps until its handler wakes it is safe:
    the handler that sets a ``threading.Event`` hangs if the signal comes while the same thread
    begins to wait and holds the event's lock, and a signal that comes just before a blocking call
    is only handled after that call. Made in the main thread, before the other process may send.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._came = False
        signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self._came = True

    def wait(self, timeout_s: float = 60.0) -> None:
        """Returns once the signal has come.

        Raises:
            TimeoutError: It did not come within ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not self._came:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {self._number.name} came within {timeout_s:g} s")
            time.sleep(0.01)
