"""The settings of a user, and the only code that reads ``PYCOMM_*`` variables.

The first of these that sets a setting wins: ``pycomm.Options`` (passed as ``pg_options``), its own
variable, the variables that gloo and NCCL users have set already, the default. A misspelled name or
a value out of range is an error that names the field or variable, the value, and what is allowed.
Only another library's variable may have any value: the nearest that is allowed here counts, or it
is passed over.
A ``PYCOMM_*`` variable that resembles none of pycomm's is reported once and ignored: it may belong
to the cluster, or to another version of pycomm.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pycomm._settings import (
    FAULT_VARIABLE,
    OFF,
    PEERS_VARIABLE,
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    SETTINGS,
    Setting,
    is_misspelled,
    suggestion,
    unknown_variables,
    variable_error,
)

if TYPE_CHECKING:
    import torch

_DEFAULT_ORIGIN = "default"
FLIGHT_RECORD_NAME = "pycomm_rank_"
"""What the files of flight records are called, before the rank."""
_SECRET_FILE = "~/.config/pycomm/secret"
_NO_SECRET = "none"
logger = logging.getLogger("pycomm")
_reported: set[str] = set()  # variables of other libraries whose values are not allowed here
_BY_FIELD = {setting.field: setting for setting in SETTINGS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one process group, passed as ``init_process_group("pycomm", pg_options=...)``.

    A field left at None is read from the environment when a group is made. Groups made later by
    ``new_group`` without options of their own take those of the default group;
    ``new_group(timeout=...)`` wins over their ``timeout``. All ranks of a group must have the same
    ``algorithm``, ``transport``, ``segment_nbytes``, ``wire_dtype``, ``cuda_mode``,
    ``heartbeat_timeout``, ``check_call_sites`` and ``security``; the others may differ. Immutable,
    so any thread may use one for any number of groups.

    Example::

        options = pycomm.Options(interface="eth0", timeout=60, wire_dtype="fp16")
        dist.init_process_group("pycomm", pg_options=options)

    Args:
        interface: The network interface, in NCCL's notation: ``eth0,ib``: the first in this order
            that is up and whose name begins so; ``=eth0``: exactly that one; ``^lo,docker``: any
            but these. Automatic: the one that routes to the store's host. A list of interfaces
            (docs/interfaces.md). ``PYCOMM_SOCKET_IFNAME``, then ``GLOO_SOCKET_IFNAME``,
            ``NCCL_SOCKET_IFNAME``; default: automatic.
        socket_family: ``auto``, ``ipv4`` or ``ipv6``. ``PYCOMM_SOCKET_FAMILY``; default: auto.
        port_range: First and last port to listen on, within 1024 to 65535, as ``29600-29699`` or
            ``(29600, 29699)``: one port per rank of the host and group, if that has ranks on other
            hosts. Automatic: the kernel chooses. ``PYCOMM_PORT_RANGE``; default: automatic.
        timeout: Seconds, or a ``timedelta``, after which an operation or the making of a group
            fails. ``init_process_group(timeout=...)`` wins over the variable. ``PYCOMM_TIMEOUT``;
            default: 1800.0.
        heartbeat_timeout: Seconds of silence, 0.5 to 3600, or a ``timedelta``, after which a rank
            whose connections are open counts as gone: its process is stopped, or its host or
            network is down. A native thread sends six heartbeats in that time.
            ``PYCOMM_HEARTBEAT_TIMEOUT``; default: 3.0.
        debug: ``WARN``, ``INFO`` or ``TRACE``: lines of the native part below this level are not
            logged. ``PYCOMM_DEBUG``; default: WARN.
        algorithm: ``auto``, or the one all_reduce algorithm to use: ``ring``,
            ``recursive_doubling``, ``direct``, ``hierarchical``. ``PYCOMM_ALGO``; default: auto.
        transport: ``auto``: shared memory (docs/shared-memory.md) between ranks of one host, Unix
            sockets if there is none, TCP between hosts; ``shm``: shared memory for a group on one
            host, or an error that says why not; ``tcp``: TCP everywhere. ``PYCOMM_TRANSPORT``;
            default: auto.
        wire_dtype: The encoding of large float32 and float64 sums: ``fp32`` for their own dtype,
            ``fp16``, ``bf16`` or ``int8``. ``float32``, ``float16`` and ``bfloat16``, with or
            without ``torch.``, are the first three, and case does not matter, as in every
            ``wire_dtype``. ``DistributedDataParallel`` and ``StreamingDiLoCo`` do as the group
            unless their own ``wire_dtype`` is another; other averages that pycomm makes
            (docs/codecs.md) are exact. Codecs (docs/codecs.md). ``PYCOMM_WIRE_DTYPE``; default:
            fp32.
        cuda_mode: How CUDA tensors travel: ``host`` copies them through pinned memory of the host
            to the same engine that serves CPU tensors; ``nccl`` hands collectives to NCCL, or is an
            error that says why not; ``auto``: NCCL if every rank has a GPU of its own, NCCL loads
            and supports the group's ``algorithm`` and ``wire_dtype``, and it would send nothing in
            plain in spite of a secret, else ``host``. CUDA tensors (docs/cuda.md).
            ``PYCOMM_CUDA_MODE``; default: auto.
        segment_nbytes: Bytes of one pipelined piece of a collective over links, 4 KiB to 4 MiB, as
            ``262144``, ``"256K"``, ``"1M"``; above 1 MiB it counts as 1 MiB. No effect in shared
            memory (docs/options.md). ``PYCOMM_SEGMENT_NBYTES``; default: 262144.
        check_call_sites: ``1`` (in Python ``True``): also compare the lines of Python that issue an
            operation, so that two equal calls that one rank has swapped (docs/evidence/faults.md)
            end as ``COLLECTIVE_MISMATCH``, which names both lines. A correct program whose ranks
            issue one operation from different lines fails with it, so use it only to find mistakes.
            ``PYCOMM_CHECK_CALL_SITES``; default: False.
        security: ``auto``: use TLS if there is a secret (docs/security.md), else warn if there are
            several hosts. ``require``: raise an error instead of connecting by TCP without a secret
            (a job of one user on one host needs none). ``off``: do not warn that there is no
            secret; it does not turn TLS off, and with a secret it is an error. To run without TLS
            although there is a secret file: ``PYCOMM_SECRET_FILE=none``. ``PYCOMM_SECURITY``;
            default: auto.
        preflight: ``1`` (in Python ``True``): rank 0 compares the hosts when the default group is
            made, and logs what differs. Set it on all hosts; each sends about 1 KB. Preflight
            (docs/doctor.md). ``PYCOMM_PREFLIGHT``; default: False.
        flight_recorder_size: The number of last operations that a group remembers, 0 to 1000000;
            128 bytes each, 0 is off. ``PYCOMM_FLIGHT_RECORDER_SIZE``, then
            ``TORCH_FR_BUFFER_SIZE``, ``TORCH_NCCL_TRACE_BUFFER_SIZE``; default: 2000.
        flight_recorder_dir: A folder to which each rank writes what it remembers when a group
            fails; torch's variables are, as in torch, the beginning of the files' names. Reading
            the files (docs/troubleshooting.md). ``PYCOMM_FLIGHT_RECORDER_DIR``, then
            ``TORCH_FR_DUMP_TEMP_FILE``, ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``; default: off.
        metrics_dir: A folder to which each rank writes its metrics every 5 seconds or more, for
            Prometheus by node_exporter's textfile collector. One file per process: the last group
            that names a folder decides. Monitoring (docs/monitoring.md). ``PYCOMM_METRICS_DIR``;
            default: off.

    Raises:
        ValueError: A value is out of range.
        TypeError: A keyword is unknown; the text offers the nearest one.
    """

    interface: str | None = None
    socket_family: str | None = None
    port_range: tuple[int, int] | str | None = None
    timeout: float | timedelta | None = None
    heartbeat_timeout: float | timedelta | None = None
    debug: str | None = None
    algorithm: str | None = None
    transport: str | None = None
    wire_dtype: str | torch.dtype | None = None
    cuda_mode: str | None = None
    segment_nbytes: int | str | None = None
    check_call_sites: bool | None = None
    security: str | None = None
    preflight: bool | None = None
    flight_recorder_size: int | None = None
    flight_recorder_dir: str | os.PathLike[str] | None = None
    metrics_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for setting in SETTINGS:
            value = getattr(self, setting.field)
            if value is not None:
                parsed = setting.parse(f"Options.{setting.field}", value)
                object.__setattr__(self, setting.field, parsed)

    def resolve(self, environ: Mapping[str, str] | None = None) -> ResolvedOptions:
        """Fills the other fields from the environment and the defaults.

        Args:
            environ: Variables to read; default ``os.environ``.

        Raises:
            ValueError: A variable has a value that is not allowed, or a misspelled name.
        """
        environ = os.environ if environ is None else environ
        check_variable_names(environ)
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for setting in SETTINGS:
            values[setting.field], origins[setting.field] = self.find(setting, environ)
        algorithm, wire_dtype = values["algorithm"], values["wire_dtype"]
        if wire_dtype != "fp32" and algorithm not in ("auto", "direct"):
            raise ValueError(
                f"{origins['algorithm']}={algorithm!r} does not go with {origins['wire_dtype']}="
                f"{wire_dtype!r}: values that travel encoded are summed by 'direct'; use 'auto'"
            )
        if values["cuda_mode"] == "nccl" and not nccl_serves(algorithm, wire_dtype):
            raise ValueError(
                f"{origins['cuda_mode']}='nccl' does not go with algorithm={algorithm!r} and "
                f"wire_dtype={wire_dtype!r}: NCCL knows 'auto', 'ring' and 'direct', and no codecs"
            )
        return ResolvedOptions(**values, origins=origins)

    def find(self, setting: Setting, environ: Mapping[str, str]) -> tuple[Any, str]:
        """The value of one setting and where it comes from. Raises ValueError as ``resolve``."""
        explicit = getattr(self, setting.field)
        if explicit is not None:
            return explicit, f"Options.{setting.field}"
        # An empty variable counts as unset: `PYCOMM_DEBUG= torchrun …` is how to do that.
        if text := environ.get(setting.variable, "").strip():
            return setting.parse(setting.variable, text), setting.variable
        for variable in setting.fallbacks:
            if text := environ.get(variable, "").strip():
                value = _of_other_library(setting, variable, text)
                if value is not None:
                    return value, variable
        return setting.default, _DEFAULT_ORIGIN


def _of_other_library(setting: Setting, variable: str, text: str) -> Any:
    """What its variable means here, or None: it was not set for pycomm, so it ends no job."""
    try:
        return setting.parse(variable, text)
    except ValueError as error:
        nearest = setting.nearest(text)
        if variable not in _reported:
            _reported.add(variable)
            taken = "passes it over" if nearest is None else f"takes {nearest}"
            logger.warning("%s. It is another library's, so pycomm %s.", error, taken)
        return nearest


def nccl_serves(algorithm: str, wire_dtype: str) -> bool:
    """Whether NCCL supports these settings."""
    return algorithm in ("auto", "ring", "direct") and wire_dtype == "fp32"


_generated_init = Options.__init__


def _init_with_nearest_name(self: Options, *args: Any, **values: Any) -> None:
    if args:
        raise TypeError("pycomm.Options takes keywords only, as Options(interface='eth0')")
    for name in values:
        if name not in _BY_FIELD:
            raise TypeError(f"pycomm.Options has no {name!r}{suggestion(name, _BY_FIELD)}")
    _generated_init(self, **values)


# Replaced, not written by hand: the generated one keeps its signature for type checkers and
# editors.
_init_with_nearest_name.__wrapped__ = _generated_init  # type: ignore[attr-defined]
Options.__init__ = _init_with_nearest_name  # type: ignore[method-assign]


class Reconfigurable(Options):
    """Options of a group whose members can change; the arguments are those of ``Options``.

    ``init_process_group("pycomm", pg_options=pycomm.Reconfigurable(...))`` does on any torch what
    ``enable_reconfigure=True`` does since torch 2.14: the group has no members, and every
    collective raises, until all members have called ``pycomm.reconfigure`` (docs/reconfigure.md).
    Groups made later by ``new_group`` are ordinary ones.

    Example::

        dist.init_process_group("pycomm", pg_options=pycomm.Reconfigurable(timeout=30))
        pycomm.reconfigure(1, [pycomm.reconfigure_handle()])  # a group of this process alone
    """


def arguments_of(options: Options) -> dict[str, Any]:
    """Of its constructor, by name: for one of another class, or with others changed."""
    return {each.name: getattr(options, each.name) for each in dataclasses.fields(Options)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedOptions:
    """Every setting with its value and where it comes from. Made by ``Options.resolve``."""

    interface: str
    """Empty: choose by the route to the store's host."""
    socket_family: str
    port_range: tuple[int, int]
    """(0, 0): the kernel chooses."""
    timeout: float
    heartbeat_timeout: float
    debug: str
    algorithm: str
    transport: str
    wire_dtype: str
    cuda_mode: str
    segment_nbytes: int
    check_call_sites: bool
    security: str
    preflight: bool
    flight_recorder_size: int
    flight_recorder_dir: str
    """"off": nothing is written."""
    metrics_dir: str
    """The same."""
    origins: Mapping[str, str]
    """By field: "Options.timeout", "PYCOMM_TIMEOUT", "GLOO_SOCKET_IFNAME" or "default"."""

    @property
    def flight_recorder_prefix(self) -> str:
        """The beginning of the paths of flight records, before the rank; empty: none are written.

        torch's variables name the beginning of a file, pycomm's own and the option a folder.
        """
        if self.flight_recorder_dir == OFF:
            return ""
        if self.origins["flight_recorder_dir"].startswith("TORCH_"):
            return self.flight_recorder_dir
        return os.path.join(self.flight_recorder_dir, FLIGHT_RECORD_NAME)

    def is_default(self, field: str) -> bool:
        """Whether this field is not set."""
        return self.origins[field] == _DEFAULT_ORIGIN


def check_variable_names(environ: Iterable[str]) -> None:
    """Raises ValueError for a misspelled ``PYCOMM_*`` name, and warns of other unknown ones."""
    for name in unknown_variables(environ):
        if is_misspelled(name):
            raise ValueError(variable_error(name))
        warnings.warn(variable_error(name), RuntimeWarning, stacklevel=2)


def fault_points() -> str:
    """The faults of a test: "site:nth:action", several separated by commas. See
    csrc/base/fault_point.h; an ordinary build raises for anything but ""."""
    return os.environ.get(FAULT_VARIABLE, "").strip()


def peers() -> str:
    """``PYCOMM_PEERS``: what ``pycomm.Elastic(peers=...)`` is if a program does not set it."""
    return os.environ.get(PEERS_VARIABLE, "").strip()


def secret_file(environ: Mapping[str, str] | None = None) -> str:
    """The file that holds the secret: ``PYCOMM_SECRET_FILE``, else ``~/.config/pycomm/secret``.

    Raises:
        ValueError: ``PYCOMM_SECRET_FILE`` says that there is none.
    """
    environ = os.environ if environ is None else environ
    if wants_no_secret(environ):
        raise ValueError(
            f"{SECRET_FILE_VARIABLE}={_NO_SECRET}: this job has no secret. Try: unset "
            f"{SECRET_FILE_VARIABLE}, or let it name a file"
        )
    named = environ.get(SECRET_FILE_VARIABLE, "").strip()
    return os.path.abspath(os.path.expanduser(named or _SECRET_FILE))


def wants_no_secret(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``PYCOMM_SECRET_FILE=none``: then no file counts, not even in the home folder."""
    environ = os.environ if environ is None else environ
    return environ.get(SECRET_FILE_VARIABLE, "").strip() == _NO_SECRET


def names_secret_file(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``PYCOMM_SECRET_FILE`` is set: then the file has to exist."""
    environ = os.environ if environ is None else environ
    return bool(environ.get(SECRET_FILE_VARIABLE, "").strip())


def secret_text(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """``PYCOMM_SECRET``, which is for tests, and its name; ("", "") if it is not set.

    Other processes of the user, and everyone who may describe the container, can read it.

    Raises:
        ValueError: There is also ``PYCOMM_SECRET_FILE``, or one of the two is set and empty.
    """
    environ = os.environ if environ is None else environ
    for name in (SECRET_VARIABLE, SECRET_FILE_VARIABLE):
        if not environ.get(name, "set").strip():
            # As of "$(cat FILE)" without the file: taken for unset, the job would be open.
            raise ValueError(f"{name} is set and empty: unset it, or give it a value")
    text = environ.get(SECRET_VARIABLE, "").strip()
    if text and environ.get(SECRET_FILE_VARIABLE, "").strip():
        raise ValueError(
            f"both {SECRET_VARIABLE} and {SECRET_FILE_VARIABLE} are set: unset {SECRET_VARIABLE}"
        )
    return (text, SECRET_VARIABLE) if text else ("", "")
