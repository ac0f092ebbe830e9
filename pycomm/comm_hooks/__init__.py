"""Communication hooks for DistributedDataParallel."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from pycomm._group.creation import next_number
from pycomm._group.queries import by_nccl, is_pycomm, pycomm_backend
from pycomm._native import loader, thread_ends
from pycomm.comm_hooks.sparse import TopK
from pycomm.errors import ForkedError

_State = TypeVar("_State")
_Hook = Callable[[_State, GradBucket], Future[torch.Tensor]]


def ordered(
    hook: _Hook[_State],
    *,
    group: dist.ProcessGroup | None = None,
    describe: Callable[[GradBucket], str] | None = None,
    codec_of: Callable[[GradBucket], str | None] | None = None,
) -> _Hook[_State]:
    """Runs a DDP communication hook one bucket at a time, in one order on all ranks.

    A hook that issues collectives from the callbacks of its futures, as torch's PowerSGD hook does,
    races with the backward pass: while a callback issues the second collective of bucket 0,
    autograd issues the first of bucket 1, and each rank may have another order. Here the chain of
    bucket 1 starts when that of bucket 0 has ended. Over a group of pycomm it runs on a thread of
    its own, and the backward pass goes on meanwhile.

    Other backends, such as gloo, match collectives by the order in which a rank issues them, also
    those of the model and the wrapper. So over such a group the hook runs on the thread of the
    backward pass, which waits for the chain of each bucket: right, but nothing overlaps.

    Buckets on a device whose collectives NCCL runs need no thread: futures are complete, and
    callbacks run, as soon as a collective is on its stream. NCCL matches collectives by their
    order, so the hook runs where autograd issues its own, on the thread of the backward pass.

        model.register_comm_hook(state, pycomm.comm_hooks.ordered(powerSGD_hook))

    Wrap hooks on all ranks of a group in the same order. One that another ordered hook calls, as
    our wrapper's does, is a part of that: what counts is the outer one's group, codec and note.
    The chain must end: a hook whose future never completes holds up all later buckets, until the
    timeout of its collectives.

    Args:
        hook: ``hook(state, bucket)`` returning a future of the averages, a tensor as
            ``bucket.buffer()``: (numel,) in the gradients' dtype, contiguous, on their device;
            ``bucket.gradients()`` are views of it in the shapes of the parameters.
        group: The group of the hook's collectives. None: the state, or its ``process_group``,
            if that is a group; else the default group. Then hooks are in the order of their first
            buckets, not in that of these calls. pycomm matches collectives of hooks by this order,
            and its errors number hooks by it, from 1.
        describe: The name of a bucket in a note to the exceptions that ``hook`` raises.
        codec_of: The name of the codec for the sums that ``hook`` issues for a bucket over pycomm;
            None for that of the group's options.

    Returns:
        A hook for ``register_comm_hook``. The backward pass raises the exceptions of ``hook``.

    Raises:
        ForkedError: (from the hook) This process is a child of ``fork()``.
    """
    worker = _Worker(hook, group, describe, codec_of)

    @functools.wraps(hook)
    def ordered_hook(state: _State, bucket: GradBucket) -> Future[torch.Tensor]:
        return worker.submit(state, bucket)

    # Without annotations of its own torch would look at ours, which are strings here.
    ordered_hook.__signature__ = inspect.signature(hook)  # type: ignore[attr-defined]
    weakref.finalize(ordered_hook, worker.stop).atexit = False
    return ordered_hook


def top_k(*, fraction: float, module: nn.Module | None = None) -> CompressedHook:
    """Sends the ``fraction`` of a bucket's gradient entries that are largest, 8 bytes each.

    The rest stays on its rank and is added to the next gradient (error feedback), so every entry
    arrives in the end. All ranks hold the same bits. A rank holds back all of a parameter in a step
    in which it has no gradient for it, or one of zeros.

        model.register_comm_hook(None, pycomm.comm_hooks.top_k(fraction=0.01))

    Args:
        fraction: More than 0, at most 1. From about 0.5 on fp32 is fewer bytes.
        module: The wrapped model: needed only to save and load the hook's state.

    Returns:
        A hook for ``register_comm_hook`` of torch's DDP or pycomm's, on any backend. Its buckets
        are (numel,) float32, contiguous, on the CPU. Its ``state`` is the process group, None for
        the default one.

    Raises:
        ValueError: ``fraction`` is out of range.
    """
    return CompressedHook(TopK(fraction, module), "top_k")


class CompressedHook:
    """A communication hook with a state to save: the values that this rank has not sent yet.

    Every rank saves and loads its own: ``state_dict`` differs from rank to rank.
    """

    def __init__(self, method: TopK, name: str) -> None:
        self._method = method
        self.__qualname__ = self.__name__ = name  # DDP logs this name

        def reduce(state: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
            reduced: Future[torch.Tensor] = Future()
            reduced.set_result(method.reduce(state, bucket))
            return reduced

        reduce.__annotations__.clear()  # torch compares them, and here they are strings
        self._ordered = ordered(reduce)
        self.__signature__ = inspect.signature(reduce)

    def __call__(self, state: dist.ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
        """Averages ``bucket.buffer()``, (numel,) float32 on the CPU, and returns a future of it."""
        return self._ordered(state, bucket)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """By parameter name, in float32. Not while a backward pass is running.

        Raises:
            RuntimeError: The hook was made without ``module``.
        """
        self._method.settle()
        return self._method.residuals.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads the result of ``state_dict``; parameters that are not in it begin with zeros.

        Raises:
            RuntimeError: The hook was made without ``module``.
            KeyError: The module has no such parameter.
            ValueError: A shape differs.
        """
        self._method.settle()
        self._method.residuals.load_state_dict(state)


def group_of(state: Any) -> dist.ProcessGroup | None:
    """The group in a hook's state, where torch's hooks have it: the state, or a part of it."""
    for each in (state, getattr(state, "process_group", None)):
        if isinstance(each, dist.ProcessGroup):
            return each
    return None


def group_of_hook(hook: object, state: object, wrappers: Any) -> Any:
    """The group of the hook's collectives, as far as it can be known: its state's group.

    Without one there, torch's hooks and ours take the default group. A hook of the user's may have
    its group from anywhere: ``wrappers`` then, the group of the wrapper.
    """
    if found := group_of(state):
        return found
    means_default = getattr(state, "process_group", state) is None
    known = means_default and (_known(hook) or _known(type(state)))
    return dist.group.WORLD if known else wrappers


def _known(hook: object) -> bool:
    """Whether it is torch's or ours, and so is the hook in it, as in fp16_compress_wrapper's."""
    while hasattr(hook, "__wrapped__"):
        hook = hook.__wrapped__
    if not str(getattr(hook, "__module__", "")).startswith(("torch.", "pycomm.")):
        return False
    names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(hook, "__closure__", None) or (), strict=True))
    return "hook" not in cells or _known(cells["hook"].cell_contents)


class _Chain(NamedTuple):
    """What the call of a hook for one bucket issues."""

    hook: int
    """With ``call``, the same for this chain on all ranks, and for no other."""
    call: int
    """Of the hook over its group, from 1: errors name it, and the two below."""
    number: int
    """Of the hook among those of its group, from 1."""
    group: int
    """Of the group among this process's, from 1; 0 if it is not pycomm's."""


class _Job:
    """One bucket: the hook's call, its context, and the future for the result."""

    def __init__(self, state: Any, bucket: GradBucket, chain: _Chain | None) -> None:
        buffer = bucket.buffer()
        extension = loader.loaded()
        # What pycomm's wrapper lets ranks compare: the bucket's names, and a checksum of its state.
        self.tag: int = 0 if extension is None else extension.call_tag()
        self.state = state
        self.bucket = bucket
        self.chain = chain
        self.grad_enabled = torch.is_grad_enabled()
        self.filled = None
        if buffer.is_cuda:
            self.filled = torch.accelerator.current_stream(buffer.device).record_event()
        self.outcome = _Outcome([buffer.device] if buffer.is_cuda else None)

    def surroundings(self, stream: torch.Stream | None) -> contextlib.ExitStack:
        """The context of the calling thread; ``stream`` waits for the work that filled the bucket.

        Not the caller's own stream: the hook's waits would hold up the backward pass.
        """
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
        if stream is not None and self.filled is not None:
            stream.wait_event(self.filled)
            stack.enter_context(stream)
        return stack


class _Outcome:
    """A future that can also carry an exception to C++.

    ``Future.set_exception`` is understood by Python's ``wait`` only: to torch's reducer it looks
    like a result.
    """

    def __init__(self, devices: list[int | str | torch.device] | None) -> None:
        self._inner: Future[Any] = Future(devices=devices)
        self._extension = loader.loaded()
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


class _Chains:
    """What one hook runs over one group. A chain's name is the same on all ranks of the group.

    Hooks and buckets are counted per group, as a rank may have hooks that others do not have; and
    the name has the group in it, as a hook may issue over another group than this one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._number = next_number(group, "hook")
        text = f"{group.group_name} {self._number}"
        self._hook = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        self._group = _group_number(group)
        self._calls = 0

    def begin(self) -> _Chain:
        """The name of the next bucket's chain."""
        self._calls += 1
        return _Chain(self._hook, self._calls, self._number, self._group)


def _group_number(group: dist.ProcessGroup) -> int:
    backend = pycomm_backend(group)
    return 0 if backend is None else int(loader.native.group_number(backend))


class _InChain(threading.local):
    """Whether this thread is in a hook that runs through ``ordered``."""

    now = False

    def run(self, hook: _Hook[Any], job: _Job) -> Future[Any]:
        self.now = True
        try:
            return hook(job.state, job.bucket)
        finally:
            self.now = False


_in_chain = _InChain()


class _Worker:
    """The thread of one wrapped hook: started by the first bucket, ended with the hook."""

    def __init__(
        self,
        hook: _Hook[Any],
        group: dist.ProcessGroup | None,
        describe: Callable[[GradBucket], str] | None,
        codec_of: Callable[[GradBucket], str | None] | None,
    ) -> None:
        self._hook = hook
        self._group = group
        self._streams: dict[torch.device, torch.Stream] = {}  # the thread's
        self._describe = describe
        self._codec_of = codec_of
        self._chains: weakref.WeakKeyDictionary[dist.ProcessGroup, _Chains] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()  # guards _chains, _thread, _stopped and the order of _jobs
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stopped = False
        if group is not None:
            self._chains[group] = _Chains(group)

    def submit(self, state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        if os.getpid() != self._pid:
            raise ForkedError(
                "a comm hook was called in a child of fork(): its thread, and the process groups, "
                "belong to the parent. Try: start workers with the spawn method, or wrap the model "
                "and register the hook in the child"
            )
        if _in_chain.now:
            return self._hook(state, bucket)
        group = self._group or group_of(state) or dist.group.WORLD
        inline = group is not None and by_nccl(group, bucket.buffer().device)
        # Where operations have no names, all are issued on one thread.
        waits = not inline and group is not None and not is_pycomm(group, bucket.buffer().device)
        with self._lock:
            if self._stopped:
                raise RuntimeError("the interpreter is ending: no more buckets are reduced")
            chain = None if group is None else self._chains_of(group).begin()
            job = _Job(state, bucket, chain)
            threaded = not inline and not waits
            if threaded and self._thread is None:
                # A daemon only so that a hook that never ends cannot keep the process alive.
                thread = threading.Thread(target=self._run, name="pycomm-ordered-hook", daemon=True)
                thread.start()  # raises if there are too many
                self._thread = thread
                thread_ends.running.add(self)
            if threaded:
                self._jobs.put(job)
        if waits:
            self._reduce(job)
        return self._issue(job) if inline else job.outcome.future

    def _chains_of(self, group: dist.ProcessGroup) -> _Chains:
        if group not in self._chains:
            self._chains[group] = _Chains(group)
        return self._chains[group]

    def _issue(self, job: _Job) -> Future[torch.Tensor]:
        """Runs the hook here; its future ends when the streams have been ordered."""
        try:
            codec = None if self._codec_of is None else self._codec_of(job.bucket)
            with _issue_chain(job.chain, codec, job.tag):
                # torch's reducer needs a Python value, and that of Work.get_future() is none.
                return _in_chain.run(self._hook, job).then(_value)
        except BaseException as error:
            self._fail(job, error)
            return job.outcome.future

    def stop(self) -> None:
        """Ends the thread once the buckets before this call are done. Does not wait."""
        if os.getpid() != self._pid:
            return  # it is the parent's, and so may be the lock
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
        thread_ends.running.discard(self)

    def _reduce(self, job: _Job) -> None:
        try:
            codec = None if self._codec_of is None else self._codec_of(job.bucket)
            stream = self._stream(job.bucket.buffer())
            with job.surroundings(stream):
                with _issue_chain(job.chain, codec, job.tag):
                    result = _in_chain.run(self._hook, job).wait()
                # A chain of its own: callbacks of this future are not those of the hook's futures.
                ends = None if job.chain is None else job.chain._replace(hook=job.chain.hook ^ 1)
                with _issue_chain(ends, codec, job.tag):
                    job.outcome.succeed(result)
        except BaseException as error:
            # The thread goes on: the next bucket's waiters need an answer, too.
            self._fail(job, error)

    def _stream(self, buffer: torch.Tensor) -> torch.Stream | None:
        if not buffer.is_cuda:
            return None
        if buffer.device not in self._streams:
            self._streams[buffer.device] = torch.Stream(device=buffer.device)
        return self._streams[buffer.device]

    def _fail(self, job: _Job, error: BaseException) -> None:
        try:
            if self._describe is not None:
                with contextlib.suppress(Exception):  # what counts is the error
                    _add_note(error, self._describe(job.bucket))
        finally:  # who waits for the future has no timeout
            job.outcome.fail(error)


def _value(future: Future[Any]) -> Any:
    return future.value()


def _add_note(error: BaseException, note: str) -> None:
    # As add_note() of Python 3.11; older tracebacks do not show it.
    error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), note]


def _issue_chain(
    chain: _Chain | None, codec: str | None, tag: int
) -> contextlib.AbstractContextManager[object]:
    if loader.loaded() is None or chain is None:
        return contextlib.nullcontext()
    return loader.native.IssueChain(
        chain.hook, chain.call, number=chain.number, group=chain.group, codec=codec, tag=tag
    )
