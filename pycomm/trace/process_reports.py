"""Asks the processes of this user on this host what they are doing.

Every process with a group of several ranks listens on a Unix socket without a file, so that the
other ranks of its host notice its death (csrc/engine/monitor/local_peers.h). A process of the same
user that connects there may ask for a report: the flight record, without what is long over. The
native control loop answers, so a rank whose Python or whose collective hangs answers, too; one that
is stopped (SIGSTOP, a debugger) does not.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
import socket
import struct
import time
from pathlib import Path

from pycomm._native.flight_record import BadRecordError, ProcessRecord, parse_record

_UNIX_SOCKETS = Path("/proc/net/unix")
_LISTENS = 0x10000  # __SO_ACCEPTCON
_NAME = re.compile(r"@pycomm/[0-9a-f]{16}")
_GREETING = struct.Struct("=II")
_GREETING_MAGIC = 0x61776370
_ASK = struct.Struct("=IIQ")
_REPORT_MAGIC = 0x72736370
_SILENT = "it is stopped, or out of memory or files"
_CREDENTIALS = struct.Struct("=iII")
_DESCRIPTOR = struct.calcsize("i")
_MOST_NBYTES = 64 << 20
_MOST_THREADS = 256


@dataclasses.dataclass(frozen=True)
class Report:
    """What one process said."""

    pid: int | None
    """None: not even that is known."""
    record: ProcessRecord | None
    """None: it did not answer."""
    why: str = ""
    """Why there is no record."""


class _NotPycommError(Exception):
    """That socket is another program's, or another user's."""


def reports(timeout_s: float) -> list[Report]:
    """One for each process of this user in this network namespace that has groups, by pid.

    Args:
        timeout_s: For all; they are asked at the same time.

    Raises:
        OSError: /proc/net/unix cannot be read.
    """
    names = _names(_UNIX_SOCKETS.read_text(errors="replace"))
    if not names:
        return []
    deadline = time.monotonic() + timeout_s
    with concurrent.futures.ThreadPoolExecutor(min(len(names), _MOST_THREADS)) as pool:
        found = pool.map(lambda name: _ask(name, deadline), names)
        return sorted((one for one in found if one is not None), key=lambda one: one.pid or 0)


def _names(table: str) -> list[str]:
    """The sockets that may be pycomm's, of a table as /proc/net/unix has it."""
    found = []
    for line in table.splitlines()[1:]:
        # Num RefCount Protocol Flags Type St Inode Path
        fields = line.split()
        if len(fields) != 8 or not _NAME.fullmatch(fields[7]):
            continue
        if int(fields[3], 16) & _LISTENS and int(fields[4], 16) == socket.SOCK_SEQPACKET:
            found.append(fields[7][1:])
    return found


def _ask(name: str, deadline: float) -> Report | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.settimeout(_left_s(deadline))
        try:
            asked.connect("\0" + name)
            credentials = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except (TimeoutError, BlockingIOError):  # whose it is, only a connection tells
            return Report(None, None, f"the socket {name} takes no connection: {_SILENT}")
        except OSError:  # it has ended
            return None
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.geteuid():
            return None
        try:
            return Report(pid, parse_record(_report(asked, deadline), f"process {pid}"))
        except _NotPycommError:
            return None
        except TimeoutError:
            return Report(pid, None, f"it does not answer: {_SILENT}")
        except (BadRecordError, OSError) as error:
            return Report(pid, None, str(error))


def _report(asked: socket.socket, deadline: float) -> str:
    greeting = _message(asked, deadline)
    if not greeting:
        raise BadRecordError("it hung up: 512 processes watch it already, or it ends just now")
    if len(greeting) != _GREETING.size or _GREETING.unpack(greeting)[0] != _GREETING_MAGIC:
        raise _NotPycommError
    descriptors: list[int] = []
    try:
        try:
            asked.send(_ASK.pack(_REPORT_MAGIC, 0, 0))
            answer = _message(asked, deadline, descriptors)
        except ConnectionError:
            answer = b""
        if not answer:
            raise BadRecordError("its version of pycomm does not tell, or it ends just now")
        magic, there, nbytes = _ASK.unpack(answer)
        if magic != _REPORT_MAGIC or not there or not descriptors or nbytes > _MOST_NBYTES:
            raise BadRecordError("it could not make the memory for an answer")
        return os.pread(descriptors[0], nbytes, 0).decode("utf-8", "replace")
    except struct.error as error:
        raise BadRecordError(f"it answered with something else: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _message(asked: socket.socket, deadline: float, descriptors: list[int] | None = None) -> bytes:
    """One message; descriptors that come with it are closed unless there is a list for them."""
    asked.settimeout(_left_s(deadline))
    room = socket.CMSG_SPACE(4 * _DESCRIPTOR)
    message, ancillary, _, _ = asked.recvmsg(256, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) - len(data) % _DESCRIPTOR
            for (descriptor,) in struct.iter_unpack("i", data[:whole]):
                if descriptors is None:
                    os.close(descriptor)
                else:
                    descriptors.append(descriptor)
    return message


def _left_s(deadline: float) -> float:
    """For settimeout(), for which 0 would mean something else."""
    return max(deadline - time.monotonic(), 0.001)
