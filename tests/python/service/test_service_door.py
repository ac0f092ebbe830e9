"""Workers that a server refuses, and texts that strangers write where workers arrive."""

from __future__ import annotations

import dataclasses
import time

import pytest
from test_service import Counter, count, counter_server, serving
from test_service_strangers import HELLO, store_of
from time_bound import assert_within
from torch import nn, optim

from pycomm.service import ParameterClient, RefusedError
from pycomm.service.core import ServerCore
from pycomm.service.session import PREFIX, SESSIONS
from pycomm.service.shard import Layout
from pycomm.service.terms import UnfitWorkerError

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(120)]


def test_the_first_of_two_workers_settles_the_terms() -> None:
    """Both may have been greeted before either has joined."""
    model = nn.Linear(1, 1, bias=False)
    core = ServerCore(model, optim.SGD(model.parameters(), lr=1.0), None, 2)
    first = dataclasses.replace(HELLO, digest=Layout(model, 1, sliced=True).digest)
    with pytest.raises(UnfitWorkerError, match="another model"):
        core.join(dataclasses.replace(first, digest="another"), 1)
    core.join(first, 2)
    with pytest.raises(UnfitWorkerError, match="worker 1 has staleness=3, and the service has"):
        core.join(dataclasses.replace(first, worker=1, incarnation=2, staleness=3), 3)
    core.join(dataclasses.replace(first, worker=1, incarnation=2), 4)


def test_a_process_that_was_replaced_does_not_end_the_new_ones_connection() -> None:
    with serving(counter_server()) as address:
        model = Counter()
        old = ParameterClient(model, servers=address, worker=0, staleness=None)
        with ParameterClient(model, servers=address, worker=0, staleness=None) as new:
            session = new._servers[0].session
            with pytest.raises(RefusedError, match="another process has become worker 0"):
                count(old, model, 1)
            assert count(new, model, 1) == 1
            assert new._servers[0].session is session


@pytest.mark.time_bound
def test_a_server_ends_although_it_waits_for_workers_to_meet_it() -> None:
    server = counter_server()
    with serving(server) as address:
        stranger = store_of(address)
        for connection in range(1, 5):
            text = dataclasses.replace(HELLO, connection=connection).encode().decode()
            number = stranger.add(SESSIONS, 1)
            stranger.set(f"{PREFIX}/{number}/hello", text)
            assert b'"refused": null' in stranger.get(f"{PREFIX}/{number}/answer")
            time.sleep(0.5)
        begin = time.monotonic()
        server.stop()
    assert_within(time.monotonic() - begin, 15, "the server waited for each meeting")
    again = counter_server(listen=address)  # the port is free, too
    again.stop()
    again.serve()
