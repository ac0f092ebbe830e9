"""The functions that torch calls to make a group, and those that users call on one."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend
from torch._C._distributed_c10d import HashStore
from torch.distributed.constants import default_pg_timeout

import _pycomm_autoload
from pycomm import errors
from pycomm._group import secrets
from pycomm._group.native_options import (
    launcher_life,
    native_options,
    store_host,
    store_outlives_ranks,
)
from pycomm._metrics import metrics_file, writer
from pycomm._native import loader
from pycomm._native.flight_record import GroupRecord, parse_record
from pycomm._settings import OFF, SETTINGS
from pycomm.options import (
    FLIGHT_RECORD_NAME,
    Options,
    Reconfigurable,
    ResolvedOptions,
    arguments_of,
    fault_points,
)

logger = logging.getLogger("pycomm")

_made_with: dict[str, _MadeWith] = {}
"""By the group's name; torch has no way to ask a plugin's group for it.

It does not keep the Python object of a backend either, so no weak key would live as long as the
group. What groups leave behind goes when the next one is made.
"""
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, collections.Counter[str]] = (
    weakref.WeakKeyDictionary()
)
_counts_lock = threading.Lock()
_default_of_groups: weakref.ref[dist.ProcessGroup] | str | None = None
"""The default group when this process last made a group of pycomm."""
_told = False
_level_set_here: int | None = None


@dataclasses.dataclass(frozen=True)
class OwnOptions:
    """The ``pg_options`` of a group that pycomm makes for itself, of ranks that have one."""

    options: Options
    known_address: str = ""
    """At which the other ranks' hosts reach this one; "" if they need none."""


@dataclasses.dataclass(frozen=True)
class _MadeWith:
    """What a group of pycomm was made with."""

    options: Options
    timeout_ms: int
    compared: Mapping[str, Any]
    """The settings that must be the same on all ranks."""


def register() -> None:
    """Registers the backend "pycomm" with torch, as importing pycomm does. Idempotent."""
    _pycomm_autoload.register()


def create_group(
    group: Any, pg_options: object, preflight: Callable[[ResolvedOptions], Any] | None = None
) -> Any:
    """Makes this rank's end of a group; torch calls it through the registration.

    Args:
        group: torch's ``_DistributedBackendOptions``.
        pg_options: The user's ``pg_options``, or ``OwnOptions``.
        preflight: Makes a ``pycomm.doctor.preflight.Preflight``, for a job that wants it.

    Returns:
        The native backend.

    Raises:
        TypeError: ``pg_options`` is not a ``pycomm.Options``.
        ValueError: A setting, the rank or the world size is wrong.
        TorchVersionError: The extension does not fit this torch.
        PycommError: The ranks did not come together.
    """
    rank, size = int(group.group_rank), int(group.group_size)
    if not 0 <= rank < size:
        raise ValueError(
            f"rank {rank} is not in a group of {size}: ranks go from 0 to world_size - 1. "
            "Try: compare RANK and WORLD_SIZE on every host"
        )
    own = pg_options if isinstance(pg_options, OwnOptions) else None
    pg_options = pg_options if own is None else own.options
    extension = loader.load()
    compared = None
    changes = bool(getattr(group, "enable_reconfigure", False))  # torch has it since 2.14
    changes = changes or isinstance(pg_options, Reconfigurable)
    others = contextlib.nullcontext() if changes else _told_to_the_others(extension, group)
    with others:
        options = _options_of(group, pg_options)
        resolved = options.resolve()
        if changes:
            _refuse_what_needs_a_store(resolved)
        # Not of a later group: what has become of the folder meanwhile must not end a job.
        if resolved.metrics_dir != OFF and not dist.is_initialized():
            metrics_file.check_folder(resolved.origins["metrics_dir"], resolved.metrics_dir)
        if faults := fault_points():
            extension.arm_fault_points(faults)
        _set_up_logging(extension, resolved, rank)
        timeout_ms = effective_timeout_ms(resolved, group.timeout)
        _forget_groups_that_are_gone()
        compared_here = {
            setting.field: getattr(resolved, setting.field)
            for setting in SETTINGS
            if setting.same_on_all_ranks
        }
        _made_with[str(group.group_id)] = _MadeWith(options, timeout_ms, compared_here)
        if resolved.preflight and preflight and size > 1 and not group.global_ranks_in_group:
            compared = preflight(resolved)
        native = native_options(
            resolved,
            store_host(group.store),
            list(group.global_ranks_in_group),
            launcher_restarts=store_outlives_ranks(group.store),
            launcher_life=launcher_life(group.store),
            enable_reconfigure=changes,
            known_address="" if own is None else own.known_address,
        )
    store = group.store
    if size == 1 and dist.is_initialized():
        # No other rank to meet. And torch, if new_subgroups(1, group=...) is called in different
        # subgroups, gives groups of different ranks one name and so one place in the store.
        store = HashStore()
    backend = extension.create_backend(
        store, rank, size, str(group.group_id), timeout_ms, native, _starts_world()
    )
    if changes:
        return backend  # it has no members yet
    _tell_once(extension, backend, rank)
    if resolved.metrics_dir != OFF:
        _start_metrics(extension, resolved.metrics_dir, backend, rank, size)
    if compared is not None:
        compared.run(backend, store, rank)
    return backend


def _refuse_what_needs_a_store(resolved: ResolvedOptions) -> None:
    """Of a group that can be reconfigured, which must not need the store of torch's."""
    for field, why in (
        ("check_call_sites", "keeps the lines of Python in the store for as long as the group is"),
        ("preflight", "compares the hosts of a group whose members are known when it is made"),
    ):
        if getattr(resolved, field):
            raise ValueError(
                f"{resolved.origins[field]}={getattr(resolved, field)!r} does not go with "
                f"enable_reconfigure: it {why}. Try: leave it unset for such a group"
            )
    if resolved.metrics_dir != OFF:
        raise ValueError(
            f"{resolved.origins['metrics_dir']} does not go with enable_reconfigure: the file is "
            "of one rank and size. Try: PYCOMM_METRICS_DIR=off, or let an ordinary group name it"
        )


@contextlib.contextmanager
def _told_to_the_others(extension: ModuleType, group: Any) -> Iterator[None]:
    """Tells the other ranks of a group why this one cannot join: they would wait for it."""
    try:
        yield
    except BaseException as error:  # such as a secret that cannot be used, or Ctrl-C
        if group.group_size > 1:
            with contextlib.suppress(Exception):  # what counts is the error
                _tell_the_others(extension, group, error)
        raise


def _tell_the_others(extension: ModuleType, group: Any, error: BaseException) -> None:
    rank, name, why = int(group.group_rank), str(group.group_id), _reason_of(error)
    life = launcher_life(group.store)
    extension.post_notice(group.store, name, life, rank, socket.gethostname(), why)
    if not isinstance(error, Exception):
        return
    # Ranks with a secret believe what has a seal; without one that can be used, this ends here.
    secret, _ = secrets.find()
    extension.refuse_to_join(
        group.store,
        rank,
        int(group.group_size),
        name,
        why,
        store_host(group.store),
        list(group.global_ranks_in_group),
        store_outlives_ranks(group.store),
        secret,
    )


def connect_pair(store: Any, rank: int, name: str, *, host: str, timeout: float) -> Any:
    """A group of two processes that need not be ranks of a job; torch does not list it.

    Args:
        store: Where the two meet; nobody else may use it.
        rank: 0 on one of them, 1 on the other.
        name: Of the group, in errors.
        host: An address of rank 0's host, as this process calls it: it chooses the interface.
        timeout: Seconds for the meeting, and for each operation until ``set_timeout()``.

    Returns:
        The native backend, with ``send``, ``recv``, ``set_timeout`` and ``abort``.

    Raises:
        ValueError: A setting is wrong.
        PycommError: The two did not come together.
    """
    extension, resolved = set_up_without_a_group()
    if faults := fault_points():
        extension.arm_fault_points(faults)
    native = native_options(resolved, host, [])  # no ranks of a job: their numbers are the pair's
    return extension.create_backend(store, rank, 2, name, round(timeout * 1000), native, None)


def set_up_without_a_group() -> tuple[ModuleType, ResolvedOptions]:
    """The extension and the settings, with logging set up, in a process that may be no rank.

    Raises:
        ValueError: A setting is wrong.
    """
    resolved = Options().resolve()
    extension = loader.load()
    _set_up_logging(extension, resolved, dist.get_rank() if dist.is_initialized() else None)
    return extension, resolved


def last_error(group: dist.ProcessGroup | None = None) -> errors.ErrorRecord | None:
    """Why a group has failed, as this rank knows it; it stays so until the group is destroyed.

    Args:
        group: Default: the default group.

    Returns:
        The fields of ``PycommError.record`` of the group's errors, without those about the
        operation that raised them; None if the group has not failed.

    Raises:
        ValueError: The group is not pycomm's, or there is no group.
    """
    extension = loader.loaded()
    backend = native_backend(group)
    record = None if extension is None else extension.last_error(backend)
    return None if record is None else errors.ErrorRecord(**record)


def flight_record(group: dist.ProcessGroup | None = None) -> GroupRecord:
    """The flight record of a group: its last operations on this rank. Does not block.

    Args:
        group: Default: the default group.

    Raises:
        ValueError: The group is not pycomm's, or there is no group.
    """
    backend = native_backend(group)
    (record,) = parse_record(loader.native.flight_record(backend), "flight_record()").groups
    return record


def dump_flight_record(folder: str | os.PathLike[str]) -> Path:
    """Writes the flight record of all groups of this process, as a failing group does by itself.

    Any thread may call it, and a signal handler: waiting for an operation lets handlers run.

    Args:
        folder: Made if there is none. An older file of this rank is replaced.

    Returns:
        The file, which ``python -m pycomm trace`` reads.

    Raises:
        SystemCallError: It could not be written.
    """
    path = Path(folder) / f"{FLIGHT_RECORD_NAME}{_world_rank(0)}.json"
    loader.native.write_flight_record(str(path))
    return path


def topology_text(group: dist.ProcessGroup | None = None) -> str:
    """The distribution of a group's ranks over hosts, as ``2 hosts with 4 ranks each``.

    Args:
        group: Default: the default group.

    Raises:
        ValueError: The group is not pycomm's, or there is no group.
    """
    return loader.native.topology_text(native_backend(group))


def native_backend(group: dist.ProcessGroup | None = None) -> Any:
    """The backend object of pycomm inside a group; None is the default group.

    Raises:
        ValueError: The group has none.
    """
    group = dist.distributed_c10d._get_default_group() if group is None else group
    if dist.distributed_c10d._rank_not_in_group(group):
        raise ValueError(f"rank {dist.get_rank()} is not in this group")
    for device in group._device_types:
        backend = group._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around every backend.
        backend = getattr(backend, "wrapped_pg", backend)
        if backend.name() == "pycomm":
            return backend
    raise ValueError(f"group {group.group_name!r} is not a group of pycomm")


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout that a group of pycomm was made with.

    Raises:
        ValueError: The group is not pycomm's.
    """
    return timedelta(milliseconds=_what_made(group).timeout_ms)


def group_options(group: dist.ProcessGroup) -> Options:
    """The options that a group of pycomm was made with.

    Raises:
        ValueError: The group is not pycomm's.
    """
    return _what_made(group).options


def group_wire_dtype(group: dist.ProcessGroup) -> str:
    """The ``wire_dtype`` of a group; "fp32" for one that is not pycomm's."""
    try:
        return str(_what_made(group).compared["wire_dtype"])
    except ValueError:
        return "fp32"


def compared_options(group: dist.ProcessGroup) -> Mapping[str, Any]:
    """The settings of a group that all of its ranks have alike, by name.

    Raises:
        ValueError: The group is not pycomm's.
    """
    return _what_made(group).compared


def _what_made(group: dist.ProcessGroup) -> _MadeWith:
    native_backend(group)  # another library's group may have the name of a former one
    return _made_with[group.group_name]


def _forget_groups_that_are_gone() -> None:
    names = {group.group_name for group in list(dist.distributed_c10d._world.pg_map)}
    for name in _made_with.keys() - names:
        del _made_with[name]


def next_number(group: dist.ProcessGroup, what: str) -> int:
    """Counts this process's calls for a group, from 1: equal on all ranks that call alike.

    Only per group. The process may be in other groups than the other ranks are; and in a former one
    of this name, when some of the others did not run yet.
    """
    with _counts_lock:
        counts = _counts.setdefault(group, collections.Counter())
        counts[what] += 1
        return counts[what]


def _starts_world() -> bool:
    """Whether the group that is made now is this process's first one since the job's began.

    The job's groups begin with the default one. torch names that only when its backend is there;
    and it may be another library's.
    """
    global _default_of_groups
    before = _default_of_groups
    if not dist.is_initialized():
        _default_of_groups = "being made"
        return True
    default = dist.distributed_c10d._get_default_group()
    _default_of_groups = weakref.ref(default)
    if isinstance(before, str):
        return False
    return before is None or before() is not default


def _options_of(group: Any, pg_options: object) -> Options:
    if _is_another_backends(group, pg_options):
        pg_options = None
    if pg_options is not None and not isinstance(pg_options, Options):
        raise TypeError(
            f"pg_options must be a pycomm.Options, not {type(pg_options).__qualname__}. "
            "Try: init_process_group('pycomm', pg_options=pycomm.Options(interface='eth0'))"
        )
    if pg_options is not None:
        return pg_options
    # Libraries make groups of their own without options: what the user said of the default group
    # holds for them, but for a timeout that is passed for this very group.
    inherited = Options()
    if dist.is_initialized():
        with contextlib.suppress(ValueError):  # it is another library's
            of_default = group_options(dist.distributed_c10d._get_default_group())
            # Not its class: a group whose members can change is asked for.
            inherited = Options(**arguments_of(of_default))
    if inherited.timeout is not None and _is_wished(group.timeout):
        return dataclasses.replace(inherited, timeout=group.timeout)
    return inherited


def _is_another_backends(group: Any, pg_options: object) -> bool:
    """Whether these are the options of a backend that torch has made before, for this group.

    For ``cuda:nccl,cpu:pycomm`` torch makes NCCL's options, also if the program has passed none,
    writes the group's name into them, and passes them to the next backend as well.
    """
    named = getattr(pg_options, "group_name", None)
    return isinstance(pg_options, C10dBackend.Options) and named == str(group.group_id)


def _reason_of(error: BaseException) -> str:
    """The error for a sentence of another rank, which has facts of its own."""
    text = str(error) or type(error).__name__
    if isinstance(error, errors.PycommError) and error.record.summary:
        record = error.record
        cause = f" ({record.cause})" if record.cause else ""
        hint = f". Try there: {record.hint}" if record.hint else ""
        text = f"{record.summary}{cause}{hint}"
    return text.encode(errors="replace").decode()  # the store takes nothing but UTF-8


def effective_timeout_ms(resolved: ResolvedOptions, from_torch: timedelta) -> int:
    """The timeout of a group with these settings, for which torch has passed ``from_torch``."""
    explicit = resolved.origins["timeout"].startswith("Options.")
    if (_is_wished(from_torch) and not explicit) or resolved.is_default("timeout"):
        seconds = from_torch.total_seconds()
    else:
        seconds = resolved.timeout
    return max(1, round(seconds * 1000))


def _is_wished(from_torch: timedelta) -> bool:
    """Whether the program has set it, whose word goes before a variable's: torch always passes
    one, and without a wish its default."""
    return from_torch != default_pg_timeout


def _set_up_logging(extension: ModuleType, resolved: ResolvedOptions, rank: int | None) -> None:
    """``rank``: None in a process that is no rank of a job."""
    configured = logger.handlers or logging.getLogger().handlers
    chosen = logger.level != logging.NOTSET and logger.level != _level_set_here
    if not configured:
        handler = logging.StreamHandler()
        mark = "" if rank is None else f"rank{_world_rank(rank)}@"
        prefix = f"[{mark}{socket.gethostname()}]"
        handler.setFormatter(logging.Formatter(f"{prefix} pycomm %(levelname)s: %(message)s"))
        # Once the program sets logging up, its own handlers write these lines.
        handler.addFilter(lambda _: logger.handlers == [handler] and not logging.root.handlers)
        logger.addHandler(handler)
    # A level that the program has set itself is its own; ours may be set again, for a later group.
    if not chosen and not resolved.is_default("debug"):
        _set_level(loader.LOG_LEVELS[resolved.debug])
    elif not chosen and not configured:
        _set_level(logging.INFO)  # for the one line of _tell_once; native lines start at WARN
    loader.set_debug_level(extension, resolved.debug)


def _set_level(level: int) -> None:
    global _level_set_here
    _level_set_here = level
    logger.setLevel(level)


def _world_rank(rank: int) -> int:
    return dist.get_rank() if dist.is_initialized() else rank


def _start_metrics(extension: ModuleType, folder: str, backend: Any, rank: int, size: int) -> None:
    """The file is the process's: a later group of the job changes nothing but the folder."""
    within_job = dist.is_initialized()
    identity = metrics_file.Identity(
        folder,
        rank=_world_rank(rank),
        run=extension.group_run(backend),
        world_size=dist.get_world_size() if within_job else size,
    )
    writer.start(extension, identity, _failed_groups, within_job=within_job)


def _failed_groups() -> frozenset[str]:
    """The names of torch's groups that have failed."""
    extension = loader.loaded()
    failed = set()
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(ValueError, RuntimeError):  # not pycomm's, or destroyed just now
            if extension is not None and extension.last_error(native_backend(group)) is not None:
                failed.add(group.group_name)
    return frozenset(failed)


def _tell_once(extension: ModuleType, backend: Any, rank: int) -> None:
    global _told
    if not _told and _world_rank(rank) == 0:
        logger.info("%s", extension.describe_backend(backend))
    _told = True
