"""A worker with a secret, and what processes without it write into the server's store."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from test_closed_service import Serving, secret, step, store_of
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.service import ParameterClient, RefusedError
from pycomm.service.session import PREFIX, SESSIONS

__all__ = ["secret"]  # a fixture
pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(120)]

REFUSAL = json.dumps({"refused": "worker 0 has a different secret"})


def sealed_refusal(secret: Any, number: int) -> str:
    """As a server of an earlier run has written it."""
    text: str = secret.seal(f"{PREFIX}/{number}/answer", REFUSAL)
    return text


@pytest.mark.parametrize("kind", ["text", "bytes", "sealed"])
def test_an_answer_written_in_advance_ends_no_training(secret: Any, kind: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    with Serving() as serving:
        address = serving.server.address
        with ParameterClient(model, servers=address, worker=0, reconnect=10.0) as client:
            step(client, model)
            stranger = store_of(address)
            for number in range(2, 100):
                value = {"text": "junk", "bytes": b"\xff\xfe"}.get(kind)
                stranger.set(f"{PREFIX}/{number}/answer", value or sealed_refusal(secret, number))
            client._servers[0].drop()
            step(client, model)
            assert client._servers[0].session is not None
            assert stranger.add(SESSIONS, 0) == 2, "the first new connection was not used"


@pytest.mark.parametrize("kind", ["text", "bytes", "list", "sealed"])
def test_an_answer_that_a_stranger_replaces_is_tried_again(
    secret: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pycomm.service.session.MEETING_S", 3.0)  # for which the server waits
    get, replaced = TCPStore.get, []

    def gets(store: Any, key: str) -> bytes:
        if (found := re.search(r"/(\d+)/answer$", key)) is None or len(replaced) == 3:
            return bytes(get(store, key))
        replaced.append(key)
        values = {"text": b"junk", "bytes": b"\xff\xfe"}
        text = sealed_refusal(secret, int(found[1]))
        if kind == "list":
            text = secret.seal(key, "[1]")
        return values.get(kind, text.encode())

    model = nn.Linear(1, 1, bias=False)
    with Serving() as serving:
        address = serving.server.address
        with ParameterClient(model, servers=address, worker=0, reconnect=30.0) as client:
            step(client, model)
            client._servers[0].drop()
            monkeypatch.setattr(TCPStore, "get", gets)
            step(client, model)
    assert len(replaced) == 3


def test_what_is_refused_until_the_end_is_named(
    secret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pycomm.service.session.MEETING_S", 3.0)

    def gets(store: Any, key: str) -> bytes:
        text: str = secret.seal(key, REFUSAL)
        return text.encode()

    model = nn.Linear(1, 1, bias=False)
    with Serving() as serving, monkeypatch.context() as patched:
        patched.setattr(TCPStore, "get", gets)
        begin = time.monotonic()
        with pytest.raises(RefusedError, match=r"server 0 at .*: worker 0 has a different secret"):
            ParameterClient(model, servers=serving.server.address, worker=0, reconnect=1.0)
        assert time.monotonic() - begin >= 1


@pytest.mark.parametrize("kind", ["junk", "earlier"])
def test_a_hello_that_a_stranger_replaces_is_said_again(
    secret: Any, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``earlier``: with one that this worker wrote in an earlier run, so that its seal fits."""
    put, replaced = TCPStore.set, []

    def puts(store: Any, key: str, value: str) -> None:
        if key.endswith("/hello") and not replaced:
            replaced.append(key)
            earlier = json.loads(secret.open(key, value)) | {"incarnation": 12345}
            value = "junk" if kind == "junk" else secret.seal(key, json.dumps(earlier))
        put(store, key, value)

    model = nn.Linear(1, 1, bias=False)
    with Serving() as serving:
        address = serving.server.address
        with ParameterClient(model, servers=address, worker=0, reconnect=20.0) as client:
            step(client, model)
            client._servers[0].drop()
            monkeypatch.setattr(TCPStore, "set", puts)
            step(client, model)
        assert replaced
        assert 12345 not in {
            each.incarnation for each in serving.server._core._now().schedule.workers.values()
        }


def test_junk_where_a_session_will_meet_ends_no_training(secret: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    with Serving() as serving:
        address = serving.server.address
        with ParameterClient(model, servers=address, worker=0, reconnect=20.0) as client:
            step(client, model)
            stranger = store_of(address)
            keys = [str(each) for each in stranger.list_keys() if "/1/group/" in str(each)]
            assert keys
            for number in range(2, 60):
                for key in keys:
                    moved = key.replace("/1/group/", f"/{number}/group/")
                    stranger.set(moved.replace("/service/1/", f"/service/{number}/"), "junk")
            client._servers[0].drop()
            step(client, model)
            assert 2 <= stranger.add(SESSIONS, 0) < 60, "no session met where the junk lies"
