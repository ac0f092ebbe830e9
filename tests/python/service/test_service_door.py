"""Workers that a server refuses, and texts that strangers write where workers arrive."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import pytest
from test_service import Counter, count, counter_server, serving
from test_service_strangers import HELLO, store_of
from test_service_words import wait_for_log
from time_bound import assert_within
from torch import nn, optim
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.service import ParameterClient, RefusedError, notices
from pycomm.service.client import _check_answer
from pycomm.service.core import ServerCore
from pycomm.service.session import PREFIX, SESSIONS, WORKER, Session
from pycomm.service.shard import Layout
from pycomm.service.terms import UnfitWorkerError

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(120)]


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


@pytest.mark.time_bound
def test_a_counter_that_was_far_ahead_for_a_while_keeps_no_worker_out() -> None:
    """Neither the worker whose number was large, nor a new process that takes its place."""
    server = counter_server()
    with serving(server) as address:
        stranger = store_of(address)
        stranger.set(SESSIONS, str(10**16))
        model = Counter()
        with ParameterClient(model, servers=address, worker=0, reconnect=20.0) as client:
            stranger.set(SESSIONS, "5")
            assert count(client, model, 1) == 1
            client._servers[0].drop()
            assert count(client, model, 1) == 2
            # A connection whose end the server does not notice, and a new process.
            stranger.set(SESSIONS, str(10**16))
            client._servers[0].drop()
            assert count(client, model, 1) == 3
            stranger.set(SESSIONS, "5")
            begin = time.monotonic()
            with ParameterClient(model, servers=address, worker=0, reconnect=20.0) as new:
                assert count(new, model, 1) == 4
            assert_within(time.monotonic() - begin, 10, "the older connection kept it out")


def junk_hellos(store: TCPStore, number: int) -> None:
    last = store.add(SESSIONS, number)
    for each in range(last - number + 1, last + 1):
        store.set(f"{PREFIX}/{each}/hello", "no hello")


def test_a_thousand_hellos_that_are_junk_are_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    server = counter_server()
    begin = time.monotonic()
    with serving(server) as address:
        stranger = store_of(address)
        junk_hellos(stranger, 1000)
        for number in range(1, 1001):
            stranger.get(f"{PREFIX}/{number}/answer")
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            assert count(client, model, 1) == 1
    lines = [each for each in caplog.messages if "refuses a worker" in each]
    between_s = notices._BETWEEN_WARNINGS_S
    assert 1 <= len(lines) <= 2 + (time.monotonic() - begin) / between_s, lines


def test_a_counter_that_is_overwritten_again_and_again_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = counter_server()
    begin = time.monotonic()
    with serving(server) as address:
        stranger = store_of(address)
        for _ in range(20):
            stranger.set(SESSIONS, "abc")
            time.sleep(0.1)
        server.stop()
    lines = [each for each in caplog.messages if "another process has written" in each]
    assert 1 <= len(lines) <= 1 + (time.monotonic() - begin) / notices._BETWEEN_WARNINGS_S, lines


def test_a_server_greets_64_connections_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these hellos can be read, and nobody meets the server."""
    monkeypatch.setattr("pycomm.service.session.MEETING_S", 6.0)
    server = counter_server()
    with serving(server) as address:
        stranger = store_of(address)
        for connection in range(100):
            text = dataclasses.replace(HELLO, connection=connection).encode().decode()
            stranger.set(f"{PREFIX}/{stranger.add(SESSIONS, 1)}/hello", text)
        until = time.monotonic() + 30
        while len(server._door._greeting) < 64 and time.monotonic() < until:
            time.sleep(0.02)
        most = 0
        for _ in range(50):
            most = max(most, len(server._door._greeting))
            time.sleep(0.02)
        assert most == 64
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            assert count(client, model, 1) == 1


def test_a_connection_that_never_repeats_its_hello_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds one of the 64 places."""
    monkeypatch.setattr("pycomm.service.session.MEETING_S", 3.0)
    server = counter_server()
    with serving(server) as address:
        store = store_of(address)
        number = store.add(SESSIONS, 1)
        store.set(f"{PREFIX}/{number}/hello", HELLO.encode().decode())
        store.get(f"{PREFIX}/{number}/answer")
        session = Session(store, number, WORKER, HELLO)
        wait_for_log(caplog, "a worker that the store calls 0 is sent away")
        session.abort()
        server.stop()


def test_a_thread_that_cannot_start_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failed = threading.Thread.start, []

    def fails_once(thread: threading.Thread) -> None:
        if thread.name.startswith("session") and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    server = counter_server()
    with serving(server) as address:
        monkeypatch.setattr(threading.Thread, "start", fails_once)
        stranger = store_of(address)
        stranger.set(f"{PREFIX}/{stranger.add(SESSIONS, 1)}/hello", "no hello")
        wait_for_log(caplog, "can't start new thread")
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            assert count(client, model, 1) == 1
    assert not server._door._greeting


def test_an_answer_in_the_open_store_is_shown_without_control_characters() -> None:
    text = json.dumps({"refused": "no\x1b[2J\n" + "x" * 10_000})
    with pytest.raises(Exception, match=r"^no\?\[2J\?x+$") as caught:
        _check_answer(text.encode(), "key", HELLO)
    assert len(str(caught.value)) < 1000
