"""The settings of a process group: their names, allowed values and variables.

``pycomm.options`` reads them; this module does not read the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

OFF = "off"
_KIB = 1024
_SUFFIXES = {"": 1, "K": _KIB, "KIB": _KIB, "M": _KIB * _KIB, "MIB": _KIB * _KIB}
_MIN_SEGMENT_NBYTES = 4 * _KIB
_MAX_SEGMENT_NBYTES = 4 * _KIB * _KIB  # a frame's payload is never larger
_MIN_PORT, _MAX_PORT = 1024, 65535
_MAX_RECORDED = 1_000_000
_LONGEST_TIMEOUT_S = 365.0 * 24 * 3600
_ALLOWED_TIMEOUT = "seconds above 0 and up to one year, as 300 or 2.5"
_MIN_SILENCE_S, _MAX_SILENCE_S = 0.5, 3600.0
WIRE_DTYPES = ("fp32", "fp16", "bf16", "int8")
"""The names of all wire dtypes: as ``Options``, the wrapper, the codecs and the native part use."""
# torch's names of the same, by their texts, so that this module does not import torch. torch.int8
# is not here: it has no scales, as the wire dtype of that name has.
_OF_TORCH = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_OF_TORCH |= {f"torch.{dtype}": name for dtype, name in _OF_TORCH.items()}


AS_THE_GROUP = "group"
"""The default ``wire_dtype`` of a wrapper: as the group's own."""


def wire_dtype_name(where: str, value: object) -> str:
    """One of ``WIRE_DTYPES``: "fp16" for "FP16", "float16", "torch.float16", ``torch.float16``.

    Every wire dtype that a user may pass goes through here.

    Args:
        where: The option or variable, in errors.
        value: A name, in upper or lower case, or a dtype of torch.

    Raises:
        ValueError: It is no wire dtype.
    """
    return _wire_dtype_name(where, value, WIRE_DTYPES)


def wrapper_wire_dtype(where: str, value: object) -> str:
    """What a wrapper may be given: also None, which is "fp32", and ``AS_THE_GROUP``.

    Raises:
        ValueError: It is no wire dtype.
    """
    if value is None:
        return "fp32"
    return _wire_dtype_name(where, value, (AS_THE_GROUP, *WIRE_DTYPES), " or None")


def _wire_dtype_name(where: str, value: object, names: tuple[str, ...], more: str = "") -> str:
    text = str(value).strip().lower()
    name = _OF_TORCH.get(text, text)
    if name in names:
        return name
    allowed = " or ".join(map(repr, names)) + more
    nearest = difflib.get_close_matches(text.removeprefix("torch."), WIRE_DTYPES, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise _bad(where, value, allowed + hint)


def _bad(where: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{where}={value!r} is not allowed: use {allowed}")


def _one_of(*allowed: str, upper: bool = False) -> Callable[[str, object], str]:
    def parse(where: str, value: object) -> str:
        text = value.strip() if isinstance(value, str) else ""
        text = text.upper() if upper else text.lower()
        if text not in allowed:
            nearest = difflib.get_close_matches(text, allowed, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise _bad(where, value, " or ".join(repr(name) for name in allowed) + hint)
        return text

    return parse


def _interface(where: str, value: object) -> str:
    allowed = (
        "interface names or their beginnings, as 'eth0', 'eth0,ib', '=eth0' (exactly this) "
        "or '^lo,docker' (all but these)"
    )
    if not isinstance(value, str):
        raise _bad(where, value, allowed)
    names = value.strip().lstrip("^=").split(",")
    if any(not name.strip() or any(sign in name for sign in "^=/ ") for name in names):
        raise _bad(where, value, allowed)
    return value.strip()


def _port_range(where: str, value: object) -> tuple[int, int]:
    allowed = f"FIRST-LAST within {_MIN_PORT}-{_MAX_PORT}, as '29600-29699'"
    parts: list[object] = []
    if isinstance(value, str):
        parts = [part.strip() for part in value.split("-")]
        parts = parts * 2 if len(parts) == 1 else parts
    elif isinstance(value, tuple | list):
        parts = list(value)
    if len(parts) != 2:
        raise _bad(where, value, allowed)
    first, last = (_whole_number(part) for part in parts)
    if first is None or last is None or not _MIN_PORT <= first <= last <= _MAX_PORT:
        raise _bad(where, value, allowed)
    return first, last


def _whole_number(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: object) -> float:
    """NaN if it is no number."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    return math.nan


def _timeout(where: str, value: object) -> float:
    seconds = _seconds(value)
    if not 0.0 < seconds <= _LONGEST_TIMEOUT_S:  # also refuses NaN
        raise _bad(where, value, _ALLOWED_TIMEOUT)
    return seconds


def timeout_seconds(where: str, value: object) -> float:
    """Of an argument: seconds or a timedelta, and no text, which variables may have.

    Raises:
        ValueError: It is neither, or out of range.
    """
    if isinstance(value, str):
        raise _bad(where, value, _ALLOWED_TIMEOUT)
    return _timeout(where, value)


def _heartbeat_timeout(where: str, value: object) -> float:
    seconds = _seconds(value)
    if not _MIN_SILENCE_S <= seconds <= _MAX_SILENCE_S:  # also refuses NaN
        raise _bad(where, value, f"seconds from {_MIN_SILENCE_S} to {_MAX_SILENCE_S:.0f}, as 3")
    return seconds


def _segment_nbytes(where: str, value: object) -> int:
    number = _whole_number(value)
    if isinstance(value, str) and number is None:
        text = value.strip().upper()
        digits = text.rstrip("KMIB")
        scale = _SUFFIXES.get(text[len(digits) :])
        count = _whole_number(digits)
        number = None if scale is None or count is None else count * scale
    if number is None or not _MIN_SEGMENT_NBYTES <= number <= _MAX_SEGMENT_NBYTES:
        raise _bad(where, value, "bytes from 4K to 4M, as 262144, '256K' or '1M'")
    return number


def _switch(where: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in ("0", "1"):
        raise _bad(where, value, "True or False" if where.startswith("Options.") else "0 or 1")
    return text == "1"


def _count(first: int, last: int, allowed: str) -> Callable[[str, object], int]:
    def parse(where: str, value: object) -> int:
        number = _whole_number(value)
        if number is None or not first <= number <= last:
            raise _bad(where, value, allowed)
        return number

    return parse


def _nearest_count(first: int, last: int) -> Callable[[str], int | None]:
    def nearest(text: str) -> int | None:
        with contextlib.suppress(ValueError):
            return min(max(int(text), first), last)
        return None

    return nearest


def _path_or_off(allowed: str) -> Callable[[str, object], str]:
    def parse(where: str, value: object) -> str:
        if not isinstance(value, str | os.PathLike) or not str(value).strip():
            raise _bad(where, value, f"{allowed}, or 'off'")
        if str(value).strip().lower() == OFF:
            return OFF
        path = os.path.abspath(os.path.expanduser(str(value).strip()))
        # torch's variables are the beginning of a file's path: of /data/fr/ its name is empty.
        is_beginning = where.startswith("TORCH_") and str(value).strip().endswith(os.sep)
        return os.path.join(path, "") if is_beginning else path

    return parse


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting."""

    field: str
    parse: Callable[[str, object], Any]
    default: object
    variable: str
    doc: str
    """Markdown, as docs/options.md has it; tools/doc_tables.py writes it there and into the
    docstring of ``Options``."""
    fallbacks: tuple[str, ...] = ()
    """Variables of other libraries with the same meaning, the first one found wins."""
    nearest: Callable[[str], Any] = lambda _: None
    """Of a value that a fallback has and that is not allowed here: the nearest, or None."""
    same_on_all_ranks: bool = False
    """The ranks compare it when they join (``config_text`` in csrc/bindings/backend.cc)."""


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "interface",
        _interface,
        "",
        "PYCOMM_SOCKET_IFNAME",
        "The network interface, in NCCL's notation: `eth0,ib`: the first in this order that is up "
        "and whose name begins so; `=eth0`: exactly that one; `^lo,docker`: any but these. "
        "Automatic: the one that routes to the store's host. "
        "[A list of interfaces](interfaces.md#a-list-of-interfaces)",
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    ),
    Setting(
        "socket_family",
        _one_of("auto", "ipv4", "ipv6"),
        "auto",
        "PYCOMM_SOCKET_FAMILY",
        "`auto`, `ipv4` or `ipv6`.",
    ),
    Setting(
        "port_range",
        _port_range,
        (0, 0),
        "PYCOMM_PORT_RANGE",
        "First and last port to listen on, within 1024 to 65535, as `29600-29699` or "
        "`(29600, 29699)`: one port per rank of the host and group, if that has ranks on other "
        "hosts. Automatic: the kernel chooses.",
    ),
    Setting(
        "timeout",
        _timeout,
        1800.0,
        "PYCOMM_TIMEOUT",
        "Seconds, or a `timedelta`, after which an operation or the making of a group fails. "
        "`init_process_group(timeout=...)` wins over the variable.",
    ),
    Setting(
        "heartbeat_timeout",
        _heartbeat_timeout,
        3.0,
        "PYCOMM_HEARTBEAT_TIMEOUT",
        "Seconds of silence, 0.5 to 3600, or a `timedelta`, after which a rank whose connections "
        "are open counts as gone: its process is stopped, or its host or network is down. A native "
        "thread sends six heartbeats in that time.",
        same_on_all_ranks=True,
    ),
    Setting(
        "debug",
        _one_of("WARN", "INFO", "TRACE", upper=True),
        "WARN",
        "PYCOMM_DEBUG",
        "`WARN`, `INFO` or `TRACE`: lines of the native part below this level are not logged.",
    ),
    Setting(
        "algorithm",
        _one_of("auto", "ring", "recursive_doubling", "direct", "hierarchical"),
        "auto",
        "PYCOMM_ALGO",
        "`auto`, or the one all_reduce algorithm to use: `ring`, `recursive_doubling`, `direct`, "
        "`hierarchical`.",
        same_on_all_ranks=True,
    ),
    Setting(
        "transport",
        _one_of("auto", "shm", "tcp"),
        "auto",
        "PYCOMM_TRANSPORT",
        "`auto`: [shared memory](shared-memory.md) between ranks of one host, Unix sockets if "
        "there is none, TCP between hosts; `shm`: shared memory for a group on one host, or an "
        "error that says why not; `tcp`: TCP everywhere.",
        same_on_all_ranks=True,
    ),
    Setting(
        "wire_dtype",
        wire_dtype_name,
        "fp32",
        "PYCOMM_WIRE_DTYPE",
        "The encoding of large float32 and float64 sums: `fp32` for their own dtype, `fp16`, "
        "`bf16` or `int8`. `float32`, `float16` and `bfloat16`, with or without `torch.`, "
        "are the first three, and case does not matter, as in every `wire_dtype`. "
        "`DistributedDataParallel` and `StreamingDiLoCo` do as the group unless their own "
        "`wire_dtype` is another; [other averages that pycomm makes]"
        "(codecs.md#what-is-encoded-and-what-is-not) are exact. "
        "[Codecs](codecs.md)",
        same_on_all_ranks=True,
    ),
    Setting(
        "cuda_mode",
        _one_of("auto", "nccl", "host"),
        "auto",
        "PYCOMM_CUDA_MODE",
        "How CUDA tensors travel: `host` copies them through pinned memory of the host to the same "
        "engine that serves CPU tensors; `nccl` hands collectives to NCCL, or is an error that "
        "says why not; `auto`: NCCL if every rank has a GPU of its own, NCCL loads and supports "
        "the group's `algorithm` and `wire_dtype`, and it would send nothing in plain in spite of "
        "a secret, else `host`. "
        "[CUDA tensors](cuda.md)",
        same_on_all_ranks=True,
    ),
    Setting(
        "segment_nbytes",
        _segment_nbytes,
        256 * _KIB,
        "PYCOMM_SEGMENT_NBYTES",
        "Bytes of one pipelined piece of a collective over links, 4 KiB to 4 MiB, as `262144`, "
        '`"256K"`, `"1M"`; above 1 MiB it counts as 1 MiB. '
        "[No effect in shared memory](#where-an-option-has-no-effect)",
        same_on_all_ranks=True,
    ),
    Setting(
        "check_call_sites",
        _switch,
        False,
        "PYCOMM_CHECK_CALL_SITES",
        "`1` (in Python `True`): also compare the lines of Python that issue an operation, so that "
        "two [equal calls that one rank has swapped](evidence/faults.md) end as "
        "`COLLECTIVE_MISMATCH`, "
        "which names both lines. A correct program whose ranks issue one operation from different "
        "lines fails with it, so use it only to find mistakes.",
        same_on_all_ranks=True,
    ),
    Setting(
        "security",
        _one_of("auto", "require", "off"),
        "auto",
        "PYCOMM_SECURITY",
        "`auto`: use TLS if there is a [secret](security.md), else warn if there are several "
        "hosts. `require`: raise an error instead of connecting by TCP without a secret (a job of "
        "one user on one host needs none). `off`: do not warn that there is no secret; it does not "
        "turn TLS off, and with a secret it is an error. To run without TLS although there is a "
        "secret file: `PYCOMM_SECRET_FILE=none`.",
        same_on_all_ranks=True,
    ),
    Setting(
        "preflight",
        _switch,
        False,
        "PYCOMM_PREFLIGHT",
        "`1` (in Python `True`): rank 0 compares the hosts when the default group is made, and "
        "logs what differs. Set it on all hosts; each sends about 1 KB. "
        "[Preflight](doctor.md#preflight)",
    ),
    Setting(
        "flight_recorder_size",
        _count(0, _MAX_RECORDED, f"a number of operations from 0 to {_MAX_RECORDED}; 0 is off"),
        2000,
        "PYCOMM_FLIGHT_RECORDER_SIZE",
        "The number of last operations that a group remembers, 0 to 1000000; 128 bytes each, 0 is "
        "off.",
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        nearest=_nearest_count(0, _MAX_RECORDED),
    ),
    Setting(
        "flight_recorder_dir",
        _path_or_off("a folder"),
        OFF,
        "PYCOMM_FLIGHT_RECORDER_DIR",
        "A folder to which each rank writes what it remembers when a group fails; torch's "
        "variables are, as in torch, the beginning of the files' names. "
        "[Reading the files](troubleshooting.md#who-was-where)",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ),
    Setting(
        "metrics_dir",
        _path_or_off("a folder"),
        OFF,
        "PYCOMM_METRICS_DIR",
        "A folder to which each rank writes its metrics every 5 seconds or more, for Prometheus by "
        "node_exporter's textfile collector. One file per process: the last group that names a "
        "folder decides. [Monitoring](monitoring.md)",
    ),
)


# The names of options and variables, and what an unknown one was meant to be

_PREFIX = "PYCOMM_"
# setup.py and tools/ read them; left in a shell they do no harm.
_BUILD_VARIABLES = {
    "PYCOMM_BUILD_CUDA",
    "PYCOMM_TORCH",
    "PYCOMM_TORCHES",
    "PYCOMM_UNITY",
    "PYCOMM_UNTESTED_TORCH",
}
FAULT_VARIABLE = "PYCOMM_FAULT"  # of test builds only, so no setting and in no list
# No settings: those are printed, and published to the other ranks. Two to choose from at most.
SECRET_FILE_VARIABLE = "PYCOMM_SECRET_FILE"
SECRET_VARIABLE = "PYCOMM_SECRET"
PEERS_VARIABLE = "PYCOMM_PEERS"  # of one training, and not of a group: pycomm.Elastic(peers=...)
# Of the part after PYCOMM_: difflib's ratio of names that are one name misspelled.
_NEAR = 0.75
# Names of a secret with two letters exchanged, or another word behind: a job whose secret is not
# found is open to everybody.
_LIKE_SECRET = ("secret", "secert", "sercet", "serect", "scret", "secrt")
# What a setting is called elsewhere.
_OTHER_WORDS = {"tls": "security", "encryption": "security", "nic": "interface"}
# A name of these words alone may be anybody's.
_COMMON_WORDS = {"dir", "file", "size", "mode", "call", "site", "check", "range", "flight"}


def is_misspelled(name: str) -> bool:
    """Whether an unknown variable's name resembles one of pycomm's, or says the same."""
    return _meant_by(name) is not None


def _meant_by(name: str) -> str | None:
    """The variable that is probably meant; None if the name resembles none."""
    stem = _stem(name)
    names = {setting.field: setting.variable for setting in SETTINGS}
    names |= {_stem(variable): variable for variable in [*variables(), PEERS_VARIABLE]}
    if stem in _OTHER_WORDS:
        return names[_OTHER_WORDS[stem]]
    if any(word in stem for word in _LIKE_SECRET):
        return SECRET_FILE_VARIABLE
    said = _words(stem)
    if len(said) == 1 and said <= _COMMON_WORDS:
        return None
    if near := difflib.get_close_matches(stem, names, 1, _NEAR):
        return names[near[0]]
    for known, variable in names.items():
        words = _words(known)
        if said >= words or (said <= words and not said <= _COMMON_WORDS):
            return variable
    return None


def _words(stem: str) -> set[str]:
    return {word.removesuffix("s") for word in stem.split("_") if word}


def variable_error(name: str) -> str:
    """The text about an unknown name. It offers the known one that the name resembles."""
    if meant := _meant_by(name):
        known = [*variables(), SECRET_FILE_VARIABLE, SECRET_VARIABLE, PEERS_VARIABLE]
        return f"{name} is not a variable of pycomm{_offer(meant, known)}"
    return f"{name} is not a variable of pycomm, and has no effect"


def _stem(name: str) -> str:
    return name.removeprefix(_PREFIX).lower()


def unknown_variables(environ: Iterable[str]) -> list[str]:
    """The ``PYCOMM_*`` names in ``environ`` that pycomm does not know, sorted."""
    known = {*variables(), *_BUILD_VARIABLES, FAULT_VARIABLE}
    known |= {SECRET_FILE_VARIABLE, SECRET_VARIABLE, PEERS_VARIABLE}
    return sorted(name for name in environ if name.startswith(_PREFIX) and name not in known)


def variables() -> list[str]:
    """Names of all variables of pycomm's own."""
    return [setting.variable for setting in SETTINGS]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Of an unknown name: the nearest of the known ones, and all of them."""
    known = list(known)
    # Compared in lower case: options and variables are misspelled in case, too.
    lowered = {candidate.lower(): candidate for candidate in known}
    nearest = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.0)
    return _offer(lowered[nearest[0]] if nearest else "", known)


def _offer(meant: str, known: Iterable[str]) -> str:
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{hint} Known: {', '.join(known)}"
