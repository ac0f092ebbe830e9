"""The parameter service with a secret: its sessions are in TLS, and nobody else has a say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm import ParameterClient, ParameterServer
from pycomm._group import secrets
from pycomm._native import loader
from pycomm.errors import InvalidArgumentError
from pycomm.service import RefusedError
from pycomm.service.endpoint import parse_endpoint
from pycomm.service.frames import Hello
from pycomm.service.session import PREFIX, SESSIONS
from pycomm.service.shard import Layout

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(120)]


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("PYCOMM_SECRET", raising=False)
    monkeypatch.setenv("PYCOMM_SECRET_FILE", str(tmp_path / "secret"))
    return secrets.generate_file(str(tmp_path / "secret"))


def one_weight_server(listen: str) -> ParameterServer:
    model = nn.Linear(1, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    return ParameterServer(model, optimizer, listen=listen, workers=1)


class Serving:
    """A server of one weight on a thread."""

    def __enter__(self) -> Serving:
        self.server = one_weight_server("127.0.0.1:0")
        self._thread = threading.Thread(target=self.server.serve, name="the server")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()


def step(client: ParameterClient, model: nn.Linear) -> None:
    model.weight.grad = torch.ones(1, 1)
    before = float(model.weight.detach())
    client.push()
    client.pull()
    assert float(model.weight.detach()) == pytest.approx(before - 1)


@pytest.mark.parametrize(
    ("transport", "ending"), [("tcp", "TLS with"), ("auto", "Unix sockets, with")]
)
def test_a_session_is_in_tls_or_within_the_host(
    secret: Any, monkeypatch: pytest.MonkeyPatch, transport: str, ending: str
) -> None:
    monkeypatch.setenv("PYCOMM_TRANSPORT", transport)
    model = nn.Linear(1, 1, bias=False)
    with (
        Serving() as serving,
        ParameterClient(model, servers=serving.server.address, worker=0) as client,
    ):
        step(client, model)
        session = client._servers[0].session
        assert session is not None
        said = loader.native.describe_backend(session._backend)
        assert said.endswith(f"{ending} the secret of key id {secret.key_id}")


@pytest.mark.parametrize("worker", ["none", "another"])
def test_a_worker_with_another_secret_or_none_is_refused_by_name(
    secret: Any, worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = secrets.generate_file(str(tmp_path / "other"))
    own = None if worker == "none" else other
    workers_thread = threading.current_thread()

    def find(_: Any = None) -> tuple[Any, str]:
        mine = secret if threading.current_thread() is not workers_thread else own
        return mine, "" if mine is None else "here"

    with Serving() as serving:
        monkeypatch.setattr(secrets, "find", find)
        with pytest.raises(RefusedError) as caught:
            ParameterClient(
                nn.Linear(1, 1, bias=False),
                servers=serving.server.address,
                worker=0,
                reconnect=1.0,
            )
        text = str(caught.value)
        assert secret.key_id in text
        assert "and this process has none" in text if own is None else other.key_id in text
        assert "secret file" in text
        monkeypatch.undo()
        monkeypatch.setattr(secrets, "find", lambda _=None: (secret, "here"))
        model = nn.Linear(1, 1, bias=False)
        with ParameterClient(model, servers=serving.server.address, worker=0) as client:
            step(client, model)


def test_a_strangers_hello_does_not_settle_what_the_workers_must_agree_on(secret: Any) -> None:
    with Serving() as serving:
        host, port = parse_endpoint(serving.server.address)
        store = TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
        )
        number = store.add(SESSIONS, 1)
        model = serving.server._core._model
        hello = Hello(
            worker=0,
            incarnation=1,
            clock=0,
            begun=None,
            server=0,
            servers=1,
            staleness=7,
            digest=Layout(model, 1, sliced=True).digest,  # which a worker's hello shows
            sliced=True,
            host=host,
            connection=1,
        )
        store.set(f"{PREFIX}/{number}/hello", hello.encode().decode())
        answer = store.get(f"{PREFIX}/{number}/answer").decode()
        assert answer.startswith("pcs1 ")
        assert "has no secret" in json.loads(answer.partition("\n")[2])["refused"]
        assert serving.server._core._begun is None
        own = nn.Linear(1, 1, bias=False)
        with ParameterClient(own, servers=serving.server.address, worker=0) as client:
            step(client, own)


def test_a_hello_counts_under_its_own_number_only(secret: Any) -> None:
    text = secret.seal("service/1/hello", "hello")
    assert secret.open("service/1/hello", text) == "hello"
    with pytest.raises(Exception, match="changed by somebody") as caught:
        secret.open("service/2/hello", text)
    assert type(caught.value).__name__ == "ProtocolViolationError"


def store_of(address: str) -> TCPStore:
    host, port = parse_endpoint(address)
    return TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


def replay(address: str, hello: str) -> None:
    """A stranger's first connection, with a sealed hello that a worker wrote elsewhere.

    Its seal is good, so the server answers that it has read it, and waits for the session.
    """
    stranger = store_of(address)
    assert stranger.add(SESSIONS, 1) == 1
    stranger.set(f"{PREFIX}/1/hello", hello)
    key = f"{PREFIX}/1/answer"
    assert json.loads(secrets.opened(key, stranger.get(key).decode()))["refused"] is None


def values_set(patched: pytest.MonkeyPatch, then: Callable[[str, str], None]) -> None:
    """From now on ``then`` is called with each key and value that this process sets."""
    put = TCPStore.set

    def puts(store: Any, key: str, value: str) -> None:
        put(store, key, value)
        then(key, value)

    patched.setattr(TCPStore, "set", puts)


def test_a_hello_of_another_server_settles_no_terms(
    secret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest fits: that covers the slices of all servers."""
    monkeypatch.setattr("pycomm.service.session.MEETING_S", 3.0)
    model = nn.Linear(1, 1, bias=False)
    with Serving() as first, Serving() as second, monkeypatch.context() as patched:

        def copy(key: str, value: str) -> None:
            if key == f"{PREFIX}/1/hello":
                patched.undo()
                replay(second.server.address, value)

        values_set(patched, copy)
        addresses = [first.server.address, second.server.address]
        with ParameterClient(model, servers=addresses, worker=0) as client:
            step(client, model)


def test_a_hello_of_an_earlier_run_settles_no_terms(
    secret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pycomm.service.session.MEETING_S", 3.0)
    model = nn.Linear(1, 1, bias=False)
    hellos: list[str] = []
    with Serving() as earlier, monkeypatch.context() as patched:
        values_set(patched, lambda key, value: hellos.append(value) if "/hello" in key else None)
        ParameterClient(
            model, servers=earlier.server.address, worker=0, staleness=7, reconnect=5.0
        ).close()
    with Serving() as serving:
        replay(serving.server.address, hellos[0])
        with ParameterClient(model, servers=serving.server.address, worker=0) as client:
            step(client, model)


def test_a_refusal_names_no_parameter_in_the_open_store(
    secret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: list[str] = []
    with Serving() as serving, monkeypatch.context() as patched:
        values_set(patched, lambda _, value: values.append(str(value)))
        with pytest.raises(RefusedError) as caught:
            ParameterClient(
                nn.Linear(2, 1, bias=False), servers=serving.server.address, worker=0, reconnect=1.0
            )
    named = "first difference: weight (1, 2) float32 here, weight (1, 1) float32 there"
    assert named in str(caught.value)
    assert any('"refused": null' in each for each in values), "the answer is among them"
    assert not [each for each in values if "weight" in each or "float32" in each]


@pytest.mark.parametrize(
    ("security", "listen", "warns"),
    [
        ("auto", "0.0.0.0:0", True),
        ("auto", "127.0.0.1:0", False),
        ("off", "0.0.0.0:0", False),
        ("require", "127.0.0.1:0", False),
        ("require", "localhost:0", False),
    ],
)
def test_a_server_without_a_secret_warns_that_it_is_open(
    security: str,
    listen: str,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYCOMM_SECRET_FILE", "none")
    monkeypatch.setenv("PYCOMM_SECURITY", security)
    server = one_weight_server(listen)
    server.stop()
    server.serve()
    assert ("without encryption" in caplog.text) == warns


def expect_both_end(said: str, listen: str, servers: str) -> None:
    """A server and a worker; nothing answers the worker, which would try for a minute."""
    with pytest.raises(InvalidArgumentError, match=said):
        one_weight_server(listen)
    with pytest.raises(InvalidArgumentError, match=said):
        ParameterClient(nn.Linear(1, 1), servers=servers, worker=0)


def test_require_without_a_secret_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_SECRET_FILE", "none")
    monkeypatch.setenv("PYCOMM_SECURITY", "require")
    said = r"PYCOMM_SECURITY=require, but there is no secret, and \S+ may be reached from other"
    expect_both_end(said, "0.0.0.0:0", "127.0.0.1:1,192.0.2.1:6170")


def test_off_with_a_secret_is_an_error(secret: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_SECURITY", "off")
    said = r"there is a secret \(.+\) and PYCOMM_SECURITY=off"
    expect_both_end(said, "127.0.0.1:0", "127.0.0.1:1")


def test_a_server_with_a_secret_does_not_warn(
    secret: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for security in ("auto", "require"):
        monkeypatch.setenv("PYCOMM_SECURITY", security)
        server = one_weight_server("0.0.0.0:0")
        server.stop()
        server.serve()
    assert "without encryption" not in caplog.text
