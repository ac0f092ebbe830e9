"""Signals that come when a program is where they are meant for, and waiting for one."""

from __future__ import annotations

import os
import signal
import threading
import time

from thread_state import wait_until_asleep


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


def interrupt_main_thread(number: signal.Signals, begun: threading.Event) -> list[float]:
    """The main thread gets a signal once it has set ``begun`` and then blocks.

    A timer may fire before the main thread has come to what the signal is to interrupt.

    Returns:
        ``time.monotonic()`` of that moment, as soon as it has come.
    """
    main = threading.main_thread().ident
    assert main is not None
    sent_s: list[float] = []

    def send() -> None:
        assert begun.wait(60.0)
        wait_until_asleep(os.getpid())  # the main thread's, which no fork makes wrong
        sent_s.append(time.monotonic())
        signal.pthread_kill(main, number)

    threading.Thread(target=send, daemon=True).start()
    return sent_s
