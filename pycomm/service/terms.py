"""What all workers of a service must agree on, and why one is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pycomm.service.frames import Hello


class UnfitWorkerError(Exception):
    """Why a worker cannot take part.

    Attributes:
        parameters: Of the server's model, if the worker has another one, as ``in_words()`` gives
            them. The worker finds the first difference.
    """

    def __init__(self, text: str, parameters: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.parameters = parameters


@dataclasses.dataclass(frozen=True)
class Terms:
    """What all workers must agree on; the first of them brings it, or the checkpoint."""

    server: int
    servers: int
    staleness: int | None
    sliced: bool
    digest: str

    @staticmethod
    def of(hello: Hello) -> Terms:
        return Terms(hello.server, hello.servers, hello.staleness, hello.sliced, hello.digest)


def disagreement(worker: int, mine: Terms, theirs: Terms) -> str | None:
    """What but the model differs between the service and a worker; None if nothing does."""
    if theirs.servers != mine.servers:
        return (
            f"worker {worker} lists {theirs.servers} servers, and the service has {mine.servers}. "
            "Try: give all workers the same list of servers"
        )
    if theirs.server != mine.server:
        return (
            f"this is server {mine.server} in the other workers' list, and server {theirs.server} "
            f"in that of worker {worker}. Try: give all workers the servers in the same order"
        )
    for name in ("staleness", "sliced"):
        if getattr(theirs, name) != getattr(mine, name):
            return (
                f"worker {worker} has {name}={getattr(theirs, name)}, and the service has "
                f"{name}={getattr(mine, name)}. Try: give all workers the same {name}"
            )
    return None
