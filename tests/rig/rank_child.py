"""Inside a rank of ``ranks.py``: joins the group, calls the target, writes down its result."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idle import check_idle
from processes import thread_names

_PR_SET_PDEATHSIG = 1

_mark_fd: int | None = None


@dataclasses.dataclass(frozen=True)
class RankError:
    """An exception that ended a rank's target, as plain values: no class of it is needed here."""

    type_name: str
    classes: tuple[str, ...]
    text: str
    traceback: str
    record: Mapping[str, Any]
    monotonic_s: float
    """``time.monotonic()`` when it was caught: one clock for all processes of a host."""

    @property
    def code(self) -> str | None:
        """The error code of a pycomm error, "PEER_DEAD"."""
        code = self.record.get("code")
        return None if code is None else str(code)

    def is_a(self, name: str) -> bool:
        """Whether a class of this name is among the exception's classes."""
        return name in self.classes


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the parent tells every rank. Pickled, so that any argument may be passed."""

    module: str
    function: str
    args: tuple[Any, ...]
    world_size: int
    backend: str | None
    init_method: str
    """For ``init_process_group``; "" if the target joins the group by itself."""
    init_timeout_s: float
    pg_options: Mapping[str, Any] | None
    import_pycomm: bool
    destroy: bool
    only_pycomm: bool
    preload: tuple[str, ...]


def mark(name: str) -> None:
    """Tells the parent, from inside a rank, that this point is reached."""
    if _mark_fd is not None:
        os.write(_mark_fd, name.encode() + b"\n")


def forbid_other_backends() -> None:
    """From now on, making a group of one of torch's own backends is an error in this process."""
    import torch.distributed.distributed_c10d as c10d

    def raise_it(self: object, *args: object, **kwargs: object) -> None:
        name = type(self).__name__
        raise AssertionError(f"somebody makes a {name}: pycomm must not use other backends")

    for name in ("Gloo", "NCCL", "MPI", "UCC", "XCCL"):
        # A class, as torch also asks isinstance(…, ProcessGroupNCCL).
        name = f"ProcessGroup{name}"
        if hasattr(c10d, name):
            setattr(c10d, name, type(name, (), {"__init__": raise_it}))


def other_backends_threads() -> list[str]:
    """Names of this process's threads that belong to gloo or NCCL: none, if nobody got round."""
    return [name for name in thread_names() if "gloo" in name.lower() or "nccl" in name.lower()]


def describe_exception(error: BaseException) -> RankError:
    """An exception as plain values."""
    return RankError(
        type_name=type(error).__name__,
        classes=tuple(cls.__name__ for cls in type(error).__mro__),
        text=str(error),
        traceback="".join(traceback.format_exception(error)),
        record=dict(getattr(error, "record", {}) or {}),
        monotonic_s=time.monotonic(),
    )


def _store_result(folder: Path, rank: int, value: Any, error: RankError | None) -> None:
    # Renamed into place: a rank killed while writing leaves no half a result behind.
    partial = folder / f"{rank}.result.partial"
    partial.write_bytes(pickle.dumps((value, error)))
    partial.rename(folder / f"{rank}.result")


def _run_as_rank(folder: Path, rank: int) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # As from a terminal: what a script runs in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spec: Spec = pickle.loads((folder / "spec").read_bytes())
    value, error = None, None
    try:
        for module in spec.preload:
            importlib.import_module(module)
        target: Any = importlib.import_module(spec.module)
        for part in spec.function.split("."):
            target = getattr(target, part)
        if spec.only_pycomm:
            forbid_other_backends()
        if spec.init_method:
            _join_group(spec, rank)
        value = target(rank, spec.world_size, *spec.args)
        check_idle()
        if spec.init_method and spec.destroy and spec.backend != "gloo":
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
    except Exception as caught:
        error = describe_exception(caught)
    _store_result(folder, rank, value, error)
    code = 0 if error is None else 1
    if spec.backend == "gloo" and spec.init_method:
        # Where one of gloo's threads drops the last reference to its group, it joins itself, which
        # aborts: now and then at destroy or at exit. How gloo ends is not what any test is about.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _join_group(spec: Spec, rank: int) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    pg_options: Any = None
    if spec.import_pycomm:
        import pycomm

        if spec.pg_options is not None:
            pg_options = pycomm.Options(**spec.pg_options)
    from_environment = spec.init_method == "env://"
    dist.init_process_group(
        spec.backend,
        init_method=spec.init_method,
        rank=-1 if from_environment else rank,
        world_size=-1 if from_environment else spec.world_size,
        timeout=timedelta(seconds=spec.init_timeout_s),
        pg_options=pg_options,
    )


def main(folder: Path, rank: int, mark_fd: int) -> int:
    """Runs the rank and returns the exit code of its process."""
    global _mark_fd
    _mark_fd = mark_fd
    return _run_as_rank(folder, rank)


if __name__ == "__main__":
    # It ends with its parent, also where that is killed: nobody else would end it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Targets import this module, too: one object each for what it defines, not two.
    import rank_child as _this

    sys.exit(_this.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
