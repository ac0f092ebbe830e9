"""The connection of one worker to one server: a meeting in the server's store, a group of two."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from pycomm._group.creation import connect_pair
from pycomm.service.frames import FRAME_NBYTES, Frame, Hello, Kind, decode_frame

PREFIX = "pycomm_service"
SESSIONS = f"{PREFIX}/sessions"
"""Counts the numbers that workers take, one for each connection."""
MOST_NUMBERS = 10**17
"""They are smaller. Beyond it one that another process has written begins again from 0."""
MEETING_S = 30.0
"""For the two to form their group, once the server has read the hello; then for the hello."""
_LAST_FRAME_S = 5.0
SERVER, WORKER = 0, 1


class Session:
    """Frames and tensors between a worker and a server. One thread at a time, but for abort()."""

    def __init__(self, store: Any, number: int, rank: int, hello: Hello) -> None:
        self._peer = 1 - rank
        # The fingerprint keeps apart what others have written in advance, or an earlier session.
        prefix = f"{PREFIX}/{number}/group/{hello.fingerprint}"
        self._backend = connect_pair(
            PrefixStore(prefix, store),
            rank,
            f"service/{number}",
            host=hello.host,
            timeout=MEETING_S,
        )

    def set_timeout(self, seconds: float) -> None:
        """For each later operation; before the first call it is ``MEETING_S``."""
        self._backend.set_timeout(timedelta(seconds=seconds))

    def send(self, frame: Frame, tensors: Mapping[Any, torch.Tensor] | None = None) -> None:
        """The frame, then the tensors in their order. Raises PycommError if the peer is gone."""
        header = torch.frombuffer(bytearray(frame.encode()), dtype=torch.uint8)
        sent = (header, *(tensors or {}).values())
        works = [self._backend.send([each], self._peer, 0) for each in sent]
        for work in works:
            work.wait()

    def receive(self) -> Frame:
        """The next frame. Raises ValueError if it is none, PycommError if the peer is gone."""
        header = torch.empty(FRAME_NBYTES, dtype=torch.uint8)
        self._backend.recv([header], self._peer, 0).wait()
        return decode_frame(bytes(header.numpy()))

    def receive_tensors(self, tensors: Mapping[Any, torch.Tensor]) -> None:
        """Those that follow a frame, into ``tensors``."""
        works = [self._backend.recv([each], self._peer, 0) for each in tensors.values()]
        for work in works:
            work.wait()

    def refuse(self, text: str, parameters: Sequence[str] = ()) -> None:
        """Sends the reason why the peer is not taken, after ``parameters``. Never raises."""
        with contextlib.suppress(Exception):
            self.set_timeout(_LAST_FRAME_S)
            for each in parameters:
                self.send(Frame(Kind.PARAMETER, text=each))
            self.send(Frame(Kind.REFUSED, text=text))
            self.wait_for_the_peers_end()

    def wait_for_the_peers_end(self) -> None:
        """Waits a little until the peer has ended the session. After a last frame: an abort would
        take it back from a peer that has not begun to receive it."""
        with contextlib.suppress(Exception):
            self.set_timeout(_LAST_FRAME_S)
            self.receive()

    def abort(self) -> None:
        """Ends what is under way, on any thread; the peer notices."""
        self._backend.abort()
