"""What a worker and a server say to each other: a text to meet, then frames of one size.

No pickle, and no number that says how much to read: the sizes of tensors follow from the model,
which both have.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import struct

from pycomm.service.schedule import MOST_STEPS

_VERSION = 2
_HELLO_NBYTES = 4096
FRAME_NBYTES = 512
_MAGIC = b"pcs1"
_FIXED = struct.Struct("<4sHHqqq")
_MAX_WORKERS = 1 << 16
_MAX_SERVERS = 1 << 10


class Kind(enum.IntEnum):
    """Of a frame. HELLO and the first three come from workers; the others are answers.

    One PARAMETER for each parameter of the server's model comes before the REFUSED of a worker that
    has another model.
    """

    PUSH = 1
    PULL = 2
    GOODBYE = 3
    WELCOME = 4
    DONE = 5
    REFUSED = 6
    HELLO = 7
    PARAMETER = 8


@dataclasses.dataclass(frozen=True)
class Frame:
    """One message, before or without tensors."""

    kind: Kind
    clock: int = 0
    version: int = 0
    lost_pushes: int = 0
    text: str = ""

    def encode(self) -> bytes:
        fixed = _FIXED.pack(_MAGIC, self.kind, 0, self.clock, self.version, self.lost_pushes)
        text = self.text.encode()[: FRAME_NBYTES - len(fixed)]
        return (fixed + text).ljust(FRAME_NBYTES, b"\0")


def decode_frame(data: bytes) -> Frame:
    """Raises ValueError if it is no frame, or a number in it makes no sense."""
    if len(data) != FRAME_NBYTES:
        raise ValueError(f"a frame of {len(data)} bytes, not of {FRAME_NBYTES}")
    magic, kind, zero, clock, version, lost = _FIXED.unpack_from(data)
    if magic != _MAGIC or zero != 0 or kind not in set(Kind):
        raise ValueError("what came is no frame of the parameter service")
    if not all(0 <= number <= MOST_STEPS for number in (clock, version, lost)):
        raise ValueError("a frame with a number that is negative or too large")
    text = data[_FIXED.size :].rstrip(b"\0").decode(errors="replace")
    return Frame(Kind(kind), clock, version, lost, printable(text))


def printable(text: str) -> str:
    """A text of another process, as it can be logged."""
    return "".join(each if each.isprintable() else "?" for each in text)


def as_received(text: str) -> str:
    """The text that arrives if a frame is sent with this one: a long text is cut."""
    return decode_frame(Frame(Kind.PARAMETER, text=text).encode()).text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """A worker's request for a session, with what it expects of the service."""

    worker: int
    incarnation: int
    clock: int
    begun: int | None
    """The clock that the server gave this process first; None if it is new to the server."""
    server: int
    servers: int
    staleness: int | None
    digest: str
    sliced: bool
    host: str
    """The server's address, as the worker calls it."""
    connection: int
    """Drawn anew for each connection, so that no two hellos are equal."""

    def encode(self) -> bytes:
        return json.dumps({"pycomm_service": _VERSION, **dataclasses.asdict(self)}).encode()

    @property
    def fingerprint(self) -> str:
        """No other hello has it, and nobody can guess it before the worker writes the hello."""
        return hashlib.sha256(self.encode()).hexdigest()

    def frame(self) -> Frame:
        """Repeats within the session, which is the worker's own, what the store holds for it.

        With a secret the store's text has a seal, but one of an earlier run may stand there.
        """
        return Frame(Kind.HELLO, text=self.fingerprint)


_RANGES = {
    "worker": _MAX_WORKERS,
    "incarnation": MOST_STEPS,
    "clock": MOST_STEPS,
    "server": _MAX_SERVERS,
    "servers": _MAX_SERVERS,
    "connection": MOST_STEPS,
}


def decode_hello(data: bytes) -> Hello:
    """Raises ValueError if it is no hello, or a value in it makes no sense."""
    if len(data) > _HELLO_NBYTES:
        raise ValueError(f"a hello of {len(data)} bytes, more than {_HELLO_NBYTES}")
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a hello that is no JSON: {error}") from None
    if not isinstance(said, dict) or said.pop("pycomm_service", None) != _VERSION:
        raise ValueError("a hello of another version")
    if set(said) != {field.name for field in dataclasses.fields(Hello)}:
        raise ValueError("a hello with other fields")
    for name, most in _RANGES.items():
        value = said[name]
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"a hello whose {name} is not a number from 0 to {most}")
    for name in ("staleness", "begun"):
        value = said[name]
        if value is not None and (type(value) is not int or not 0 <= value <= MOST_STEPS):
            raise ValueError(f"a hello whose {name} is neither null nor a number")
    if not (isinstance(said["digest"], str) and isinstance(said["host"], str)):
        raise ValueError("a hello whose digest or host is no text")
    if type(said["sliced"]) is not bool:
        raise ValueError("a hello whose sliced is neither true nor false")
    if said["server"] >= said["servers"]:
        raise ValueError(f"a hello for server {said['server']} of {said['servers']}")
    return Hello(**said)
