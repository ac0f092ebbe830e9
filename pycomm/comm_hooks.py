"""Communication hooks for DistributedDataParallel."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from pycomm import _extension

_State = TypeVar("_State")
_Hook = Callable[[_State, GradBucket], Future[torch.Tensor]]

_EXIT_PATIENCE_S = 2.0
# Counted where hooks are wrapped, which every rank does in the same order: part of the operations'
# identity.
_ordinals = itertools.count()


def ordered(
    hook: _Hook[_State], *, describe: Callable[[GradBucket], str] | None = None
) -> _Hook[_State]:
    """Runs a DDP communication hook one bucket at a time, on a thread of its own.

    A hook that issues collectives from the callbacks of its futures, as torch's PowerSGD hook does,
    races with the backward pass: while a callback issues the second collective of bucket 0,
    autograd issues the first of bucket 1, on every rank in an order of its own. Here the chain of
    bucket 1 starts when that of bucket 0 has ended, so that every rank issues in the same order, on
    any backend. The backward pass goes on meanwhile.

        model.register_comm_hook(state, pycomm.comm_hooks.ordered(powerSGD_hook))

    Wrap the hook once and on all ranks in the same order. The chain must end: a hook whose future
    never completes holds up all later buckets, until the timeout of its collectives.

    Args:
        hook: ``hook(state, bucket)`` returning a future of the bucket's tensor.
        describe: What to call a bucket in a note to the exceptions that ``hook`` raises.

    Returns:
        A hook for ``register_comm_hook``. What ``hook`` raises, the backward pass raises.
    """
    worker = _Worker(hook, next(_ordinals), describe)

    @functools.wraps(hook)
    def ordered_hook(state: _State, bucket: GradBucket) -> Future[torch.Tensor]:
        return worker.submit(state, bucket)

    # Without annotations of its own torch would look at ours, which are strings here.
    ordered_hook.__signature__ = inspect.signature(hook)  # type: ignore[attr-defined]
    weakref.finalize(ordered_hook, worker.stop).atexit = False
    return ordered_hook


class _Job:
    """One bucket: what to run, in which surroundings, and where the result goes."""

    def __init__(self, state: Any, bucket: GradBucket, index: int) -> None:
        buffer = bucket.buffer()
        self.state = state
        self.bucket = bucket
        self.index = index
        self.grad_enabled = torch.is_grad_enabled()
        self.stream = torch.cuda.current_stream(buffer.device) if buffer.is_cuda else None
        self.outcome = _Outcome([buffer.device] if buffer.is_cuda else None)

    def surroundings(self) -> contextlib.ExitStack:
        """Those of the thread that called: gradient mode and CUDA stream are a thread's own."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
        if self.stream is not None:
            stack.enter_context(torch.cuda.stream(self.stream))
        return stack


class _Outcome:
    """A future that can also carry an exception to C++.

    ``Future.set_exception`` is understood by Python's ``wait`` only: to torch's reducer it looks
    like a result.
    """

    def __init__(self, devices: list[int | str | torch.device] | None) -> None:
        self._inner: Future[Any] = Future(devices=devices)
        self._extension = _extension.loaded()
        if self._extension is None:
            self.future: Future[torch.Tensor] = self._inner.then(_value_or_raise)
        else:
            self.future = self._inner

    def succeed(self, value: torch.Tensor) -> None:
        self._inner.set_result(value)

    def fail(self, error: BaseException) -> None:
        if self._extension is None:
            self._inner.set_result(error)
        else:
            self._extension.fail_future(self._inner, error)


def _value_or_raise(future: Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


class _Worker:
    """The thread of one wrapped hook: started by the first bucket, ended with the hook."""

    def __init__(
        self, hook: _Hook[Any], ordinal: int, describe: Callable[[GradBucket], str] | None
    ) -> None:
        self._hook = hook
        self._describe = describe
        self._ordinal = ordinal
        self._count = 0
        self._lock = threading.Lock()  # guards _count, _thread, _stopped and the order of _jobs
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def submit(self, state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        with self._lock:
            if self._stopped:
                raise RuntimeError("the interpreter is ending: no more buckets are reduced")
            job = _Job(state, bucket, self._count)
            self._count += 1
            self._jobs.put(job)
            if self._thread is None:
                # A daemon only so that a hook that never ends cannot keep the process alive: a
                # thread that can end is joined in join_at_exit, before the interpreter goes.
                self._thread = threading.Thread(
                    target=self._run, name="pycomm-ordered-hook", daemon=True
                )
                self._thread.start()
                _running.add(self)
            return job.outcome.future

    def stop(self) -> None:
        """Ends the thread once the buckets before this call are done. Does not wait."""
        with self._lock:
            self._stopped = True
            self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._reduce(job)
            del job  # else the bucket's memory stays until the next one comes
        _running.discard(self)

    def _reduce(self, job: _Job) -> None:
        try:
            with job.surroundings(), _issue_chain(self._ordinal, job.index):
                job.outcome.succeed(self._hook(job.state, job.bucket).wait())
        except BaseException as error:
            # The thread goes on: the next bucket's waiters need an answer, too.
            if self._describe is not None:
                _add_note(error, self._describe(job.bucket))
            job.outcome.fail(error)


def _add_note(error: BaseException, note: str) -> None:
    # What add_note() does since Python 3.11; before, tracebacks do not show it.
    error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), note]


def _issue_chain(ordinal: int, index: int) -> contextlib.AbstractContextManager[object]:
    extension = _extension.loaded()
    return contextlib.nullcontext() if extension is None else extension.IssueChain(ordinal, index)


_running: set[_Worker] = set()


def _join_at_exit() -> None:
    workers = list(_running)
    for worker in workers:
        worker.stop()
    stuck = [worker for worker in workers if not worker.join(_EXIT_PATIENCE_S)]
    extension = _extension.loaded()
    if stuck and extension is not None:
        # They wait for a collective that will not end by itself: abort it.
        extension.shutdown_all(int(_EXIT_PATIENCE_S * 1000))
        for worker in stuck:
            worker.join(_EXIT_PATIENCE_S)


# Runs before the interpreter joins its threads; atexit would run after that, with daemons already
# at their own mercy.
threading._register_atexit(_join_at_exit)  # type: ignore[attr-defined]
