"""The end of a process that has used pycomm: its exit code is the one that Python gives.

A callback of a future is waited for like a thread that is no daemon. A daemon thread that is in
pycomm stays there (csrc/c10d/process_end.h).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType, ModuleType

from pycomm._native import thread_ends

_SLICE_MS = 100  # how often Ctrl-C is looked for
_SILENT_S = 2.0
_SETTLE_S = 0.3
_INTERVAL_S = 0.001  # instead of the usual 5 ms, which a thread that waits already sleeps once
_HOLD_S = 0.01
_MANY = 3  # sleeps in that time. gloo's thread has 1


def await_callbacks(extension: ModuleType) -> None:
    """Closes all groups when the interpreter ends, and waits for the callbacks that still run."""

    def end() -> None:
        try:
            thread_ends.join_all()  # first: from the next line on they could not end
            extension.begin_process_end()
            _wait(extension)
        except BaseException as error:
            _end_here(error)
        _let_threads_return()

    atexit.register(end)


def _wait(extension: ModuleType) -> None:
    began = time.monotonic()
    silent = True
    while not extension.shutdown_all(_SLICE_MS):
        if silent and time.monotonic() - began > _SILENT_S:
            silent = False
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
                print(
                    "pycomm: the process ends when its callbacks of futures have returned: "
                    f"{_running()}. Ctrl-C ends it now.",
                    file=sys.stderr,
                    flush=True,
                )


def _running() -> str:
    """Where the callbacks are: the frames of threads that Python has not started."""
    started = {
        thread.ident
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }
    frames = [frame for ident, frame in sys._current_frames().items() if ident not in started]
    return "; ".join(map(_place, frames)) or "they are not in Python"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _end_here(error: BaseException) -> None:
    """Ends the process without finalizing the interpreter, in which callbacks still run."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is sys.stderr and not isinstance(error, KeyboardInterrupt | SystemExit):
                traceback.print_exception(error)
            elif stream is sys.stderr and isinstance(getattr(error, "code", None), str):
                print(error.code, file=stream)  # type: ignore[attr-defined]  # as Python does
            if stream is not None:
                stream.flush()
    if isinstance(error, KeyboardInterrupt):  # as Python ends then
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    code = (error.code or 0) if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else 1)


def _let_threads_return() -> None:
    """Until no thread waits for the interpreter's lock.

    A thread that asks for it in C++ code when the interpreter is gone aborts the process: one of
    gloo's, say, that has run the last callback of a comm hook and frees it. One that runs Python
    code ends in silence.
    """
    sys.setswitchinterval(_INTERVAL_S)
    end = time.monotonic() + _SETTLE_S
    while time.monotonic() < end:
        time.sleep(_INTERVAL_S)  # without the lock, so that a thread that waits gets it
        before = _sleeps_of_others(0)
        ctypes.pythonapi.usleep(round(_HOLD_S * 1e6))  # with the lock, unlike time.sleep()
        after = _sleeps_of_others(_MANY)
        if all(after[thread] - before.get(thread, 0) < _MANY for thread in after):
            return


def _sleeps_of_others(awake: int) -> dict[str, int]:
    """How often each other thread has slept so far: one that waits for the lock, once an interval.

    One that is awake, perhaps without a core, has slept ``awake`` times more.
    """
    sleeps = {}
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(threading.get_native_id()):
            with contextlib.suppress(OSError):  # it has ended
                status = (task / "status").read_text()
                count = status.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0]
                sleeps[task.name] = int(count) + (awake if "\nState:\tR" in status else 0)
    return sleeps
