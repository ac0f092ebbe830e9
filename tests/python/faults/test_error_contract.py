"""What every error carries, and that it ends everything, sticks and can be asked for again."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import pickle
import re
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import read
from processes import run_python
from ranks import RankError, describe_exception, mark, run_ranks, start_ranks
from signals import CaughtSignal

import pycomm
from pycomm._group import creation
from pycomm._native import loader
from pycomm.errors import ErrorRecord
from pycomm.options import Options

pytestmark = pytest.mark.ci

# Of an operation that was under way when its group failed; `cause` only where there is one.
OF_AN_OPERATION = {
    *("code", "summary", "hint", "rank", "host", "peer", "peer_host", "group", "epoch"),
    *("op", "sequence", "dtype", "numel", "bytes_done", "bytes_total", "phase", "elapsed_ms"),
}
OF_A_CALL = {"code", "summary", "hint", "rank", "host", "group", "epoch", "op", "dtype", "numel"}
OF_A_JOIN = {*("code", "summary", "hint", "rank", "host", "group", "epoch", "phase", "elapsed_ms")}


def refused(call: Any) -> RankError:
    try:
        call()
    except pycomm.errors.PycommError as error:
        return describe_exception(error)
    raise AssertionError("nothing was raised")


def torchs_kind() -> str:
    """getError() of torch's interface to backends, which this torch does not offer in Python."""
    return str(loader.native.backend_error(creation.native_backend(None)))


def fails(rank: int, world_size: int, how: str) -> dict[str, Any]:
    dist.all_reduce(torch.ones(3))
    seen: dict[str, Any] = {
        "argument": refused(lambda: dist.all_reduce(torch.ones(3).expand(4, 3))),
        "before": (pycomm.last_error(), torchs_kind()),
    }
    if rank == 1:
        go_on = CaughtSignal(signal.SIGUSR2)
        mark("ready")
        if how == "killed":
            threading.Event().wait()
        go_on.wait()
        if how == "left":
            return seen  # and destroy_process_group
        elif how == "mismatch":
            dist.all_reduce(torch.ones(101))
        while pycomm.last_error() is None:
            threading.Event().wait(0.02)
        return seen
    options = dist.AllreduceOptions()
    if how == "late":
        options.timeout = timedelta(seconds=2)
    tensors = [torch.ones(100), torch.ones(50_000), torch.ones(7)]
    group = dist.group.WORLD
    assert group is not None
    works = [group.allreduce([tensor], options) for tensor in tensors]
    futures = [work.get_future() for work in works]
    mark("ready")
    seen["errors"] = [refused(work.wait) for work in works]
    seen["futures"] = [refused(future.wait) for future in futures]
    seen["done"] = [work.is_completed() for work in works]
    record = pycomm.last_error()
    assert record is not None
    seen["again"] = refused(lambda: dist.all_reduce(torch.ones(3)))
    assert pycomm.last_error() == record, "it sticks"
    seen["record"] = record
    seen["kind"] = torchs_kind()
    return seen


KINDS = [
    ("killed", "PEER_DEAD", "REMOTE_ERROR"),
    ("late", "TIMEOUT", "TIMEOUT"),
    ("mismatch", "COLLECTIVE_MISMATCH", "REMOTE_ERROR"),
    ("left", "PEER_LEFT", "REMOTE_ERROR"),
]


@pytest.mark.needs_native
@pytest.mark.faults
@pytest.mark.parametrize(("how", "code", "kind"), KINDS)
def test_an_error_says_everything_ends_everything_and_sticks(
    how: str, code: str, kind: str
) -> None:
    with start_ranks(2, fails, args=(how,)) as running:
        for rank in range(2):
            running.wait_for_mark(rank, "ready")
        if how == "killed":
            running.kill(1, signal.SIGKILL)
        else:
            running.kill(1, signal.SIGUSR2)
        results = running.collect(60)
    seen = results[0].value
    assert seen is not None, results.describe()
    assert seen["before"] == (None, "ErrorType.SUCCESS")
    argument = seen["argument"]
    assert set(argument.record) >= OF_A_CALL, OF_A_CALL - set(argument.record)
    assert argument.record["rank"] == 0 and "ValueError" in argument.classes

    assert seen["done"] == [True] * 3
    for error in [*seen["errors"], *seen["futures"]]:
        record = error.record
        assert set(record) >= OF_AN_OPERATION, OF_AN_OPERATION - set(record)
        assert record["code"] == code and record["rank"] == 0
        # Of two ranks that differ either may be called the odd one out, by both alike.
        assert record["peer"] in ({0, 1} if how == "mismatch" else {1})
        assert record["host"] == record["peer_host"] == os.uname().nodename
        unsaid = {"group", "epoch"}  # the default group, which has not changed
        for key in OF_AN_OPERATION - {"summary", "hint", "bytes_done", "bytes_total"} - unsaid:
            in_text = {"sequence": "seq", "elapsed_ms": "elapsed"}.get(key, key)
            assert f" {in_text}={record[key]}" in error.text.replace("[", " "), (key, error.text)
        assert record["group"] == "0" and record["epoch"] == 0
        assert not re.search(r" (group|epoch)=|bytes=\d+/0 ", error.text), error.text
        assert f"[code={code} peer={record['peer']} " in error.text
        if record["bytes_total"]:
            assert f"bytes={record['bytes_done']}/{record['bytes_total']}" in error.text
        assert error.text.startswith(record["summary"]) and error.text.endswith(record["hint"])
        assert "\n" not in error.text
        if how == "late":
            assert "timed out" in error.text and "TimeoutError" in error.classes
        elif how != "mismatch":
            assert {"PeerError", "ConnectionError"} <= set(error.classes)
    assert seen["errors"][0].record["sequence"] in (2, 3, 4)
    again = seen["again"]
    assert again.code == code and again.record["peer"] == seen["errors"][0].record["peer"]
    assert set(again.record) >= OF_AN_OPERATION, OF_AN_OPERATION - set(again.record)
    told = seen["record"]
    assert isinstance(told, ErrorRecord)
    kind = kind if told.peer == 1 else "COMM_ERROR"  # see above: it may be this rank
    assert seen["kind"] == f"ErrorType.{kind}"
    assert dict(told) | {"elapsed_ms": 0} == seen["errors"][0].record | {"elapsed_ms": 0}


def aborts(rank: int, world_size: int) -> list[str]:
    dist.barrier()
    assert dist.group.WORLD is not None
    dist.group.WORLD.abort()
    at_once = torchs_kind()
    while pycomm.last_error() is None:
        threading.Event().wait(0.02)
    return [at_once, torchs_kind()]


@pytest.mark.needs_native
def test_a_rank_that_aborts_has_an_error_at_once() -> None:
    """Also if another has aborted, too, and is the cause that the ranks agree on."""
    for seen in run_ranks(3, aborts).values():
        assert seen == ["ErrorType.COMM_ERROR"] * 2


@pytest.mark.needs_native
def test_an_error_of_joining_says_everything(tmp_path: Path) -> None:
    options = {"pg_options": {"timeout": 1.0}, "ranks": [1], "init": f"file://{tmp_path}/store"}
    error = run_ranks(2, fails, args=("",), check=False, **options)[0].error
    assert error is not None and error.code == "RENDEZVOUS_TIMEOUT"
    assert "timed out" in error.text and {"RendezvousError", "TimeoutError"} <= set(error.classes)
    assert set(error.record) >= OF_A_JOIN, OF_A_JOIN - set(error.record)
    assert (error.record["rank"], error.record["phase"]) == (1, "rendezvous")


def waits_shortly(rank: int, world_size: int) -> RankError | None:
    seen = None
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        seen = refused(lambda: work.wait(timedelta(milliseconds=20)))
        mark("waited")
    else:
        go_on = CaughtSignal(signal.SIGUSR2)
        mark("listens")
        go_on.wait()
        dist.all_reduce(torch.ones(10))
    if rank == 0:
        work.wait()
    return seen


@pytest.mark.needs_native
def test_a_wait_that_is_given_less_time_says_everything() -> None:
    with start_ranks(2, waits_shortly) as running:
        running.wait_for_mark(1, "listens")
        running.wait_for_mark(0, "waited")
        running.kill(1, signal.SIGUSR2)
        error = running.collect(60).check()[0].value
    assert error.code == "TIMEOUT" and "timed out" in error.text
    local = OF_AN_OPERATION - {"peer", "peer_host", "bytes_done", "bytes_total"}
    assert set(error.record) >= local, local - set(error.record)


# The record


RECORD = ErrorRecord(code="PEER_DEAD", peer=2, bytes_done=0)


def test_a_record_is_frozen_a_mapping_of_what_is_known_and_travels() -> None:
    assert dict(RECORD) == {"code": "PEER_DEAD", "peer": 2, "bytes_done": 0} == RECORD
    assert RECORD.peer == RECORD["peer"] == 2 and RECORD.op is None
    assert RECORD.get("op") is None and "op" not in RECORD and len(RECORD) == 3
    with pytest.raises(KeyError):
        RECORD["op"]
    with pytest.raises(KeyError):
        RECORD["no field at all"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECORD.peer = 3  # type: ignore[misc]
    assert json.loads(json.dumps(dict(RECORD))) == RECORD
    for same in (pickle.loads(pickle.dumps(RECORD)), copy.copy(RECORD)):
        assert same == RECORD and isinstance(same, ErrorRecord)
    assert "peer=2" in repr(RECORD) and "op" not in repr(RECORD)


def test_its_fields_are_the_native_parts() -> None:
    native = read("csrc/c10d/record_dict.h")
    found = re.findall(r'(?:text|number)\("(\w+)"|dict\["(\w+)"\]', native)
    fields = {field.name for field in dataclasses.fields(ErrorRecord)}
    fields.remove("missing")  # monitored_barrier's, which is written in Python
    assert {a or b for a, b in found} == fields
    flight = read("csrc/engine/report/flight_json.cc").split("jsonOf(const ErrorRecord& record)")[1]
    in_dumps = set(re.findall(r'out\.\w+\("(\w+)"', flight.split("return out.end()")[0]))
    assert in_dumps == fields


def test_only_a_group_of_pycomms_has_an_error() -> None:
    with pytest.raises(ValueError, match="Default process group"):
        pycomm.last_error()


# Logging


class SilentExtension:
    def set_log_callback(self, callback: object, level: str) -> None:
        self.level = level


@pytest.mark.parametrize("own", [logging.ERROR, logging.DEBUG])
def test_the_programs_own_log_level_stays(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "_level_set_here", None)
    extension: Any = SilentExtension()
    before = creation.logger.level
    try:
        creation.logger.setLevel(own)
        for environ in ({}, {"PYCOMM_DEBUG": "INFO"}):
            creation._set_up_logging(extension, Options().resolve(environ), 0)
            assert creation.logger.level == own
        creation.logger.setLevel(logging.NOTSET)  # nobody's: then PYCOMM_DEBUG decides, each time
        for level in ("INFO", "TRACE"):
            creation._set_up_logging(extension, Options(debug=level).resolve({}), 0)
            assert creation.logger.level == {"INFO": logging.INFO, "TRACE": logging.DEBUG}[level]
            assert extension.level == level
    finally:
        creation.logger.setLevel(before)


LOGS_BEFORE_AND_AFTER = """
import logging
from typing import Any

from pycomm._group import creation
from pycomm.options import Options

class Extension:
    def set_log_callback(self, callback: object, level: str) -> None:
        pass

extension: Any = Extension()
creation._set_up_logging(extension, Options(debug="INFO").resolve({}), 0)
creation.logger.info("first")
logging.basicConfig(format="the program's: %(message)s")
creation.logger.info("second")
creation._set_up_logging(extension, Options(debug="INFO").resolve({}), 0)
creation.logger.info("third")
"""


def test_each_line_is_logged_once_if_the_program_sets_logging_up_later() -> None:
    done = run_python(["-c", LOGS_BEFORE_AND_AFTER])
    assert done.returncode == 0, done.stderr
    first, second, third = done.stderr.splitlines()
    assert re.fullmatch(r"\[rank0@.*\] pycomm INFO: first", first)
    assert (second, third) == ("the program's: second", "the program's: third")
