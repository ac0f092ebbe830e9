"""Names callbacks of futures where they are added, so that what they issue has one id on all ranks.

The names, and the reasons, are in ``csrc/c10d/named_future.h``. This wraps, once, the six places
of torch through which Python adds callbacks to futures, completes them or waits for them.
``torch.futures.Future`` calls the methods of ``torch._C.Future``, which is also the class of what
``Work.get_future()`` returns; and ``torch.futures.collect_all`` calls ``torch._C._collect_all``.

A future without a name behaves as if nothing was wrapped: those of other backends, of NCCL, and
what follows them. A future that the program made itself (``torch.futures.Future()``) runs its
callbacks when and where torch does; only what they issue over pycomm is named, by the strand that
completes it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch.futures import Future

_wrapped = False


def wrap_futures(native: ModuleType) -> None:
    """Wraps them for the extension ``native``; from then on for the life of the process."""
    global _wrapped
    if _wrapped:
        return
    _wrapped = True
    base: Any = torch._C.Future
    torch_then, torch_add_done_callback = base.then, base.add_done_callback
    torch_set_result = base.set_result
    torch_wait, torch_collect_all = base.wait, torch._C._collect_all
    torch_jit_wait = torch._C.wait

    def promise_of(future: Any) -> Any:
        if not isinstance(future, Future):
            return None
        mine = future.__dict__.get("_pycomm_promise")
        # setdefault: another thread may be completing it
        return mine or future.__dict__.setdefault("_pycomm_promise", native.Promise())

    @functools.wraps(torch_set_result)
    def set_result(self: Any, result: Any) -> None:
        promise = promise_of(self)
        if promise is not None and not self.done():
            promise.complete()
        torch_set_result(self, result)

    @functools.wraps(torch_then)
    def then(self: Any, cb: Any) -> Any:
        named = native.named_then(self, cb, promise_of(self))
        return torch_then(self, cb) if named is None else named

    @functools.wraps(torch_add_done_callback)
    def add_done_callback(self: Any, cb: Any) -> None:
        if not native.named_done_callback(self, cb, promise_of(self)):
            torch_add_done_callback(self, cb)

    @functools.wraps(torch_wait)
    def wait(self: Any) -> Any:
        native.await_future(self)
        return torch_wait(self)

    @functools.wraps(torch_collect_all)
    def collect_all(futures: Any) -> Any:
        collected = torch_collect_all(futures)
        parts = list(futures)
        named = native.name_collected(collected, parts, [promise_of(each) for each in parts])
        return collected if named is None else named

    @functools.wraps(torch_jit_wait)
    def jit_wait(future: Any) -> Any:
        if isinstance(future, base):
            native.await_future(future)
        return torch_jit_wait(future)

    base.then, base.add_done_callback, base.wait = then, add_done_callback, wait
    base.set_result = set_result
    torch._C._collect_all = collect_all
    torch._C.wait = jit_wait  # type: ignore[assignment]
