"""A server that is written to by others, and connections that end and come back."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import free_port
from test_service import Counter, count, counter_server, serving
from test_service_words import wait_for_log
from time_bound import assert_within
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import pycomm
from pycomm.service import ParameterClient, ParameterServer, RefusedError
from pycomm.service.checkpoint import CheckpointFile
from pycomm.service.endpoint import parse_endpoint
from pycomm.service.frames import FRAME_NBYTES, Frame, Hello, Kind, decode_hello
from pycomm.service.session import PREFIX, SESSIONS, Session

HELLO = Hello(
    worker=0,
    incarnation=1,
    clock=0,
    begun=None,
    server=0,
    servers=1,
    staleness=0,
    digest="",
    sliced=True,
    host="127.0.0.1",
    connection=1,
)

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(120)]


def store_of(address: str) -> TCPStore:
    host, port = parse_endpoint(address)
    return TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


def test_a_worker_that_comes_back_late_is_in_step_with_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = counter_server(workers=2, rejoin=0.3)
    with serving(server) as address:
        model, slow_model = Counter(), Counter()
        slow = ParameterClient(slow_model, servers=address, worker=1)
        with ParameterClient(model, servers=address, worker=0) as client:

            def both(steps: int) -> None:
                other = threading.Thread(target=steps_of, args=(slow, slow_model, steps))
                other.start()
                steps_of(client, model, steps)
                other.join(30)

            both(2)
            slow._servers[0].drop()  # the network, while it computes
            wait_for_log(caplog, "worker 1 of the parameter service has not come back within 0.3 s")
            assert count(client, model, 5) == 7
            slow_model.count.grad = torch.ones(1)  # of parameters that five steps have replaced
            slow.push()
            wait_for_log(caplog, "worker 1 is back")
            assert server.stats().lost_pushes == 1
            # It counts as being in step 8, which is the other's next.
            first = threading.Thread(target=slow.pull)
            first.start()
            assert count(client, model, 1) == 8
            first.join(30)
            assert float(slow_model.count.detach()) == -8
            both(3)
            assert float(model.count.detach()) == float(slow_model.count.detach()) == -11
        slow.close()
    stats = server.stats()
    assert (stats.version, stats.steps, stats.lost_pushes) == (11, 11, 1)


def steps_of(client: ParameterClient, model: Counter, steps: int) -> None:
    for _ in range(steps):
        count(client, model, 1)


def test_the_end_of_an_old_connection_is_not_the_end_of_the_worker() -> None:
    server = counter_server(workers=1, rejoin=30.0)
    with serving(server) as address:
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            core = server._core
            (newest,) = core._session_of.values()
            core.lost_sight(0, newest - 1)
            assert core._gone_at == {}
            core.lost_sight(0, newest)
            assert list(core._gone_at) == [0]
            assert count(client, model, 1) == 1
            worker = core._now().schedule.workers[0]
            hello = dataclasses.replace(
                HELLO,
                incarnation=worker.incarnation,
                clock=1,
                begun=0,
                digest=core._now().layout.digest,
            )
            core._session_of[0] = newest + 2
            with pytest.raises(ConnectionAbortedError, match="later connection"):
                core.join(hello, newest + 1)  # one that was slow to begin


@pytest.mark.parametrize("value", ["abc", "-5", "9" * 30, "", "1" * 17, "9" * 17, "7\n"])
def test_whatever_is_written_over_the_counter_new_workers_come_in(value: str) -> None:
    """Any process that reaches the store can do that."""
    server = counter_server(workers=2)
    with serving(server) as address:
        first, second = Counter(), Counter()
        with ParameterClient(first, servers=address, worker=0, staleness=None) as client:
            store_of(address).set(SESSIONS, value)
            time.sleep(0.3)  # until the server has seen it
            with ParameterClient(second, servers=address, worker=1, staleness=None) as other:
                assert count(other, second, 1) == 1
                assert count(client, first, 1) == 2


def test_a_million_numbers_without_a_hello_do_not_delay_a_worker() -> None:
    server = counter_server()
    with serving(server) as address:
        assert store_of(address).add(SESSIONS, 10**6) == 10**6
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            assert count(client, model, 1) == 1


class Deleting:
    """The server's store, in which somebody deletes the counter as soon as the server sees it.

    That is once it has looked, and also before a read by get(), which waits for a missing key.
    """

    def __init__(self, store: TCPStore, stranger: TCPStore) -> None:
        self._store, self._stranger = store, stranger
        self.deleted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _delete(self, key: str) -> None:
        if key == SESSIONS:
            self.deleted += self._stranger.delete_key(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value: bytes = self._store.compare_set(key, expected, desired)
        if value != expected.encode():  # else the server has not seen it yet
            self._delete(key)
        return value

    def get(self, key: str) -> bytes:
        self._delete(key)
        value: bytes = self._store.get(key)
        return value


def one_step(server: ParameterServer, address: str) -> float:
    """The seconds in which a worker joins and counts one step. Then the server ends."""
    begin = time.monotonic()
    model = Counter()
    with ParameterClient(model, servers=address, worker=0, staleness=None) as client:
        assert count(client, model, 1) == 1
        took = time.monotonic() - begin
        server.stop()
    return took


@pytest.mark.time_bound
def test_a_hello_that_is_deleted_holds_up_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the server's look and its read, by any process that reaches the store."""
    server = counter_server(workers=2)
    with serving(server) as address:
        stranger = store_of(address)
        serve_one = ParameterServer._serve_one
        deleted = threading.Event()

        def too_late(self: ParameterServer, number: int, order: int) -> None:
            if not deleted.is_set():
                stranger.delete_key(f"{PREFIX}/{number}/hello")
                deleted.set()
            serve_one(self, number, order)

        monkeypatch.setattr(ParameterServer, "_serve_one", too_late)
        number = stranger.add(SESSIONS, 1)
        stranger.set(f"{PREFIX}/{number}/hello", HELLO.encode().decode())
        assert deleted.wait(30)
        assert_within(one_step(server, address), 10, "the server waited for the hello")


@pytest.mark.time_bound
def test_a_counter_that_is_deleted_holds_up_no_worker() -> None:
    server = counter_server(workers=2)
    with serving(server) as address:
        stranger = store_of(address)
        server._store = store = Deleting(server._store, stranger)
        took = one_step(server, address)
        assert store.deleted >= 1
        assert_within(took, 10, "the server waited for the counter")


class Failing:
    """The server's store, of which one call fails the first time, and which counts its clones."""

    def __init__(self, store: TCPStore, call: str = "") -> None:
        self._store, self._call, self.clones = store, call, 0

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            self.clones += 1
        if name == self._call:
            self._call = ""
            return self._fail
        return getattr(self._store, name)

    def _fail(self, *_: Any) -> None:
        raise OSError(24, "Too many open files")


def test_a_hello_that_is_refused_costs_no_connection_to_the_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = counter_server()
    with serving(server) as address:
        stranger = store_of(address)
        server._store = store = Failing(server._store)
        for text in ("", "no hello", "[1]"):
            number = stranger.add(SESSIONS, 1)
            stranger.set(f"{PREFIX}/{number}/hello", text)
            assert json.loads(stranger.get(f"{PREFIX}/{number}/answer"))["refused"]
        assert "refuses a worker" in caplog.text
        assert store.clones == 0
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            assert count(client, model, 1) == 1
        assert store.clones == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("clone", "worker 0 (connection 1) did not connect: [Errno 24] Too many open files"),
        ("set", "worker 0 (connection 1) did not connect: [Errno 24] Too many open files"),
        ("delete_key", "worker 0 (connection 1): its hello stays in the store: [Errno 24]"),
    ],
)
def test_a_call_of_the_store_that_fails_is_logged_and_ends_no_worker(
    caplog: pytest.LogCaptureFixture, call: str, said: str
) -> None:
    server = counter_server()
    with serving(server) as address:
        server._store = Failing(server._store, call)
        model = Counter()
        with ParameterClient(model, servers=address, worker=0, reconnect=4.0) as client:
            assert count(client, model, 1) == 1
    assert said in caplog.text


def test_a_refusal_that_cannot_be_written_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = counter_server()
    with serving(server) as address:
        server._store = Failing(server._store, "set")
        stranger = store_of(address)
        number = stranger.add(SESSIONS, 1)
        stranger.set(f"{PREFIX}/{number}/hello", "no hello")
        wait_for_log(caplog, f"connection 1 to the parameter service at {address} has failed: [Err")
        server.stop()


@pytest.mark.parametrize("value", ["-", "+"])
def test_a_counter_that_holds_no_number_is_not_taken_for_a_missing_one(value: str) -> None:
    server = counter_server(workers=1)
    with serving(server) as address:
        store_of(address).set(SESSIONS, value)
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            assert count(client, model, 1) == 1


def test_a_hello_for_too_many_servers_is_refused() -> None:
    hello = dataclasses.replace(HELLO, servers=1024)
    assert decode_hello(hello.encode()) == hello
    with pytest.raises(ValueError, match="servers is not a number from 0 to 1024"):
        decode_hello(dataclasses.replace(hello, servers=1025).encode())


def test_what_a_worker_sends_ends_its_own_connection_at_most() -> None:
    chosen = random.Random(3)
    server = counter_server(workers=2)
    with serving(server) as address:
        model, other = Counter(), Counter()
        with ParameterClient(model, servers=address, worker=0, staleness=None) as client:
            for number in range(60):
                stranger = ParameterClient(
                    other, servers=address, worker=1, staleness=None, reconnect=5.0
                )
                session = stranger._servers[0].session
                assert session is not None
                data = bytearray(Frame(Kind(chosen.randint(1, 6)), number).encode())
                for _ in range(chosen.randint(1, 4)):
                    data[chosen.randrange(40)] = chosen.randrange(256)
                nbytes = FRAME_NBYTES if chosen.random() < 0.8 else chosen.choice([1, 511, 4096])
                tensor = torch.frombuffer(data.ljust(nbytes, b"\0")[:nbytes], dtype=torch.uint8)
                session._backend.send([tensor], 0, 0).wait()
                stranger._drop_all()
            before = count(client, model, 0)
            assert count(client, model, 1) == before + 1
            with ParameterClient(other, servers=address, worker=1, staleness=None) as healthy:
                assert count(healthy, other, 1) == before + 2


def test_a_client_that_cannot_be_made_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Session] = []
    begin = Session.__init__

    def kept(session: Session, *args: Any, **kwargs: Any) -> None:
        begin(session, *args, **kwargs)
        if args[2] == 1:  # the worker's end
            made.append(session)

    server = counter_server()
    with serving(server) as address:
        monkeypatch.setattr(Session, "__init__", kept)
        nobody = f"127.0.0.1:{free_port()}"
        with pytest.raises(ConnectionError, match="server 1 at"):
            ParameterClient(
                Counter(), servers=f"{address},{nobody}", worker=0, sliced=False, reconnect=0.3
            )
        (session,) = made
        with pytest.raises(pycomm.errors.PycommError):
            session.receive()
        server.stop()


@pytest.mark.parametrize(
    ("answer", "said"),
    [(Frame(Kind.DONE, clock=4), "DONE of clock 4"), (Frame(Kind.PULL, clock=1), "PULL of clock")],
)
def test_an_answer_to_something_else_is_an_error(
    monkeypatch: pytest.MonkeyPatch, answer: Frame, said: str
) -> None:
    with serving(counter_server()) as address:
        model = Counter()
        client = ParameterClient(model, servers=address, worker=0)
        with monkeypatch.context() as patched:
            mine = client._servers[0].session  # the server has one, too
            patched.setattr(mine, "receive", lambda: answer)
            model.count.grad = torch.ones(1)
            with pytest.raises(ConnectionError, match=said):
                client.push()
        with ParameterClient(model, servers=address, worker=0) as again:
            again.pull()


def test_a_goodbye_that_is_lost_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Frame] = []
    send = Session.send

    def cut(session: Session, frame: Frame, *tensors: Any) -> None:
        if frame.kind is Kind.GOODBYE and not lost:
            lost.append(frame)
            session.abort()
            raise ConnectionResetError("the test cut the connection")
        send(session, frame, *tensors)

    with serving(counter_server()) as address:  # which ends once it has heard the goodbye
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            assert count(client, model, 1) == 1
            monkeypatch.setattr(Session, "send", cut)
        assert lost


def test_a_file_that_a_killed_server_left_half_written_goes(tmp_path: Path) -> None:
    path = tmp_path / "server[1].pt"
    half, foreign = (
        tmp_path / ".server[1].pt.abcd.unfinished",
        tmp_path / ".server1.pt.x.unfinished",
    )
    for each in (half, foreign):
        each.write_bytes(b"x")
    file = CheckpointFile(path)
    assert not half.exists()
    assert foreign.exists()
    file.write({"value": 1})
    state = file.read()
    assert state is not None and state["value"] == 1
    file.close()


def test_a_first_worker_with_wrong_settings_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "server.pt"
    for staleness in (3, None):
        server = counter_server(checkpoint=path)
        with serving(server) as address:
            model = Counter()
            client = ParameterClient(model, servers=address, worker=0, staleness=staleness)
            if staleness is None:
                assert count(client, model, 1) == 1
                client.close()
            else:
                with pytest.raises(RefusedError, match="staleness"):
                    ParameterClient(model, servers=address, worker=0, staleness=None)
                client._drop_all()
                server.stop()
    assert path.exists()


def test_a_step_that_only_took_over_kept_pushes_is_in_the_checkpoint(tmp_path: Path) -> None:
    """The version may stay as it is; what counts is that something has changed."""
    path = tmp_path / "server.pt"
    server = counter_server(workers=1, checkpoint=path)
    with serving(server) as address:
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            assert count(client, model, 1) == 1
            server.write_checkpoint()
            before = path.stat().st_ino  # each time a new file takes its place
            server.write_checkpoint()
            assert path.stat().st_ino == before, "written although nothing has changed"
            server._core._now().schedule.version += 5  # as if it had gone on alone
            assert count(client, model, 1) == 2
            server.write_checkpoint()
            assert path.stat().st_ino != before
