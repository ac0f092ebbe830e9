"""The table of exceptions: complete, catchable the way torch users catch, and able to travel."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest
import torch.distributed as dist

import pycomm
from pycomm import errors

RECORD = {
    "code": "PEER_DEAD",
    "summary": "rank 2 has died",
    "hint": "look at its log",
    "rank": 0,
    "host": "a",
    "peer": 2,
    "peer_host": "b",
    "op": "all_reduce",
    "sequence": 7,
    "elapsed_ms": 12,
}


def test_a_record_is_readable_as_attributes() -> None:
    error = errors.PeerDeadError("rank 2 has died [code=PEER_DEAD]", RECORD)
    assert str(error) == "rank 2 has died [code=PEER_DEAD]"
    assert error.record == RECORD
    facts = (error.code, error.rank, error.host, error.peer, error.peer_host)
    assert facts == ("PEER_DEAD", 0, "a", 2, "b")
    assert (error.op, error.sequence, error.elapsed_ms) == ("all_reduce", 7, 12)
    assert error.hint == "look at its log"


def test_what_is_not_known_is_none() -> None:
    error = errors.InternalError("text")
    assert error.record == {"code": "INTERNAL"}
    assert (error.code, error.rank, error.peer_host) == ("INTERNAL", None, None)


@pytest.mark.parametrize(("code", "error_type"), errors.BY_CODE.items())
def test_every_class_has_its_code_also_without_a_record(
    code: str, error_type: type[errors.PycommError]
) -> None:
    error = error_type("text")
    assert error.code == error.record["code"] == code
    assert pickle.loads(pickle.dumps(error)).code == code


def test_what_python_refuses_has_a_code() -> None:
    with pytest.raises(errors.InvalidArgumentError) as refused:
        pycomm.empty(-1)
    assert refused.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("error_type", errors.BY_CODE.values())
def test_every_class_is_torchs_and_travels(error_type: type[errors.PycommError]) -> None:
    error = error_type("text", RECORD)
    assert isinstance(error, errors.PycommError)
    assert isinstance(error, dist.DistBackendError | dist.DistNetworkError)
    assert isinstance(error, RuntimeError)  # what gloo raises, so what callers catch today
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is error_type
        assert (str(copied), copied.record) == ("text", RECORD)
    assert "\n\nTry: " in inspect.cleandoc(str(error_type.__doc__))


def test_classes_and_codes_are_one_to_one() -> None:
    assert len(set(errors.BY_CODE.values())) == len(errors.BY_CODE)
    exported = {getattr(errors, name) for name in errors.__all__ if name.endswith("Error")}
    abstract = {
        errors.ConfigError,
        errors.PeerError,
        errors.RendezvousError,
        errors.ResourceError,
        errors.PycommError,
        errors.PycommBackendError,
        errors.PycommNetworkError,
        errors.TorchVersionError,
    }
    assert exported == set(errors.BY_CODE.values()) | abstract


def test_the_table_has_every_code_of_the_native_part() -> None:
    folder = Path(__file__).resolve().parents[3] / "csrc" / "base"
    named = re.findall(
        r'case ErrorCode::(\w+):\s+return "([A-Z_]+)";', (folder / "error.cc").read_text()
    )
    assert {name for _, name in named} - {"OK"} == set(errors.BY_CODE)
    (enumeration,) = re.findall(
        r"enum class ErrorCode : uint16_t \{(.*?)\};", (folder / "error.h").read_text(), re.S
    )
    assert {each for each, _ in named} == set(re.findall(r"^ +(\w+) = \d+,", enumeration, re.M))


def test_families_hold_what_a_program_treats_alike() -> None:
    def codes(family: type[Exception]) -> set[str]:
        return {code for code, each in errors.BY_CODE.items() if issubclass(each, family)}

    gone = {"PEER_DEAD", "PEER_UNRESPONSIVE", "PEER_LEFT", "CONN_RESET"}
    too_few = {"QUORUM_LOST", "LEFT_BEHIND"}
    assert codes(errors.PeerError) == gone | too_few | {"CONNECT_FAILED"}
    joining = {"RENDEZVOUS_TIMEOUT", "STORE_LOST", "CONNECT_FAILED", "DUPLICATE_RANK"}
    assert codes(errors.RendezvousError) == joining
    assert codes(errors.ConfigError) == {"CONFIG_MISMATCH", "VERSION_MISMATCH", "NO_INTERFACE"}
    used_up = {"PORTS_EXHAUSTED", "OUT_OF_MEMORY", "TOO_MANY_FILES", "SHM_NO_SPACE"}
    assert codes(errors.ResourceError) == used_up
    assert codes(TimeoutError) == {"RENDEZVOUS_TIMEOUT", "TIMEOUT"}
    assert codes(ConnectionError) == gone | too_few | {"STORE_LOST", "CONNECT_FAILED"}
    assert codes(MemoryError) == {"OUT_OF_MEMORY"}


def test_wrong_arguments_are_also_pythons_own_errors() -> None:
    assert issubclass(errors.InvalidArgumentError, ValueError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.TorchVersionError, ImportError)
