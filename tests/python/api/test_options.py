"""Settings: where they come from, what is refused, and that nothing is ignored."""

from __future__ import annotations

import dataclasses
import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pycomm import Options, codecs, options
from pycomm._group.creation import group_wire_dtype
from pycomm._settings import SETTINGS, unknown_variables, variables
from pycomm._wire_patterns import named_wire_dtype
from pycomm.options import ResolvedOptions

# A new option need not stand here.
DEFAULTS = {
    "interface": "",
    "socket_family": "auto",
    "port_range": (0, 0),
    "timeout": 1800.0,
    "heartbeat_timeout": 3.0,
    "debug": "WARN",
    "algorithm": "auto",
    "transport": "auto",
    "wire_dtype": "fp32",
    "cuda_mode": "auto",
    "segment_nbytes": 256 * 1024,
    "check_call_sites": False,
    "security": "auto",
    "preflight": False,
    "flight_recorder_size": 2000,
    "flight_recorder_dir": "off",
    "metrics_dir": "off",
}


def test_defaults() -> None:
    resolved = Options().resolve({})
    assert {field: getattr(resolved, field) for field in DEFAULTS} == DEFAULTS
    for setting in SETTINGS:
        assert getattr(resolved, setting.field) == setting.default
        assert resolved.is_default(setting.field)


def test_every_field_has_one_setting_and_stands_in_the_docstring() -> None:
    fields = [field.name for field in dataclasses.fields(Options)]
    assert fields == [setting.field for setting in SETTINGS]
    resolved = [field.name for field in dataclasses.fields(ResolvedOptions)]
    assert resolved == [*fields, "origins"]
    for setting in SETTINGS:
        assert f"        {setting.field}: " in str(Options.__doc__)
        assert f"``{setting.variable}``" in str(Options.__doc__)
    named = re.findall(r"PYCOMM_\w+", str(Options.__doc__))
    assert len(named) - named.count("PYCOMM_SECRET_FILE") == len(SETTINGS)  # which is no setting


# field, text of the variable, the same as a field's value, what both must become
SAME_EITHER_WAY = [
    ("interface", "^lo,docker", "^lo,docker", "^lo,docker"),
    ("interface", " =eth0 ", "=eth0", "=eth0"),
    ("socket_family", "IPv6", "ipv6", "ipv6"),
    ("port_range", "29600-29699", (29600, 29699), (29600, 29699)),
    ("port_range", "29600", "29600-29600", (29600, 29600)),
    ("timeout", "2.5", 2.5, 2.5),
    ("timeout", "300", timedelta(minutes=5), 300.0),
    ("heartbeat_timeout", "0.5", timedelta(milliseconds=500), 0.5),
    ("heartbeat_timeout", "10", 10, 10.0),
    ("debug", "info", "INFO", "INFO"),
    ("algorithm", "Recursive_Doubling", "recursive_doubling", "recursive_doubling"),
    ("transport", "TCP", "tcp", "tcp"),
    ("check_call_sites", "1", True, True),
    ("check_call_sites", "0", False, False),
    ("security", "Require", "require", "require"),
    ("preflight", "1", True, True),
    ("wire_dtype", "INT8", "int8", "int8"),
    ("cuda_mode", "HOST", "host", "host"),
    ("segment_nbytes", "64K", 65536, 65536),
    ("segment_nbytes", "1MiB", "1M", 1 << 20),
    ("segment_nbytes", "4096", "4096", 4096),
    ("flight_recorder_size", "0", 0, 0),
    ("flight_recorder_dir", "Off", "off", "off"),
    ("flight_recorder_dir", "/tmp/fr/", Path("/tmp/fr"), "/tmp/fr"),
    ("metrics_dir", "OFF", "off", "off"),
    ("metrics_dir", "/tmp/metrics", Path("/tmp/metrics/"), "/tmp/metrics"),
]


@pytest.mark.parametrize(("field", "text", "value", "wanted"), SAME_EITHER_WAY)
def test_a_field_and_its_variable_mean_the_same(
    field: str, text: str, value: object, wanted: object
) -> None:
    variable = next(setting.variable for setting in SETTINGS if setting.field == field)
    from_variable = Options().resolve({variable: text})
    assert getattr(from_variable, field) == wanted
    assert from_variable.origins[field] == variable
    arguments: dict[str, Any] = {field: value}
    from_field = Options(**arguments).resolve({variable: "nonsense that nobody must read"})
    assert getattr(from_field, field) == wanted
    assert from_field.origins[field] == f"Options.{field}"


def test_precedence_of_interfaces() -> None:
    environ = {
        "NCCL_SOCKET_IFNAME": "nccl0",
        "GLOO_SOCKET_IFNAME": "gloo0",
        "PYCOMM_SOCKET_IFNAME": "own0",
    }
    found = [("explicit0", "Options.interface")]
    resolved = Options(interface="explicit0").resolve(environ)
    assert [(resolved.interface, resolved.origins["interface"])] == found
    for variable in ("PYCOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        resolved = Options().resolve(environ)
        assert resolved.origins["interface"] == variable
        assert resolved.interface == environ.pop(variable)
    assert Options().resolve(environ).is_default("interface")


def test_flight_records_are_named_as_torch_names_them_or_in_a_folder() -> None:
    assert Options().resolve({}).flight_recorder_prefix == ""
    ours = Options().resolve({"PYCOMM_FLIGHT_RECORDER_DIR": "/tmp/fr"})
    assert ours.flight_recorder_prefix == "/tmp/fr/pycomm_rank_"
    assert Options(flight_recorder_dir="/x").resolve({}).flight_recorder_prefix.startswith("/x/")
    torchs = Options().resolve({"TORCH_FR_DUMP_TEMP_FILE": "/tmp/fr/trace_"})
    assert torchs.flight_recorder_prefix == "/tmp/fr/trace_"
    of_no_name = Options().resolve({"TORCH_FR_DUMP_TEMP_FILE": "/tmp/fr/"})
    assert of_no_name.flight_recorder_prefix == "/tmp/fr/"
    assert Options().resolve({"TORCH_FR_BUFFER_SIZE": "7"}).flight_recorder_size == 7


def test_an_empty_variable_is_an_unset_one() -> None:
    assert Options().resolve({"PYCOMM_DEBUG": "", "PYCOMM_TIMEOUT": " "}).is_default("debug")


REFUSED = [
    ("interface", "", "interface names"),
    ("interface", "eth0,,eth1", "interface names"),
    ("interface", "eth0,^eth1", "interface names"),
    ("interface", 7, "interface names"),
    ("flight_recorder_size", "-1", "0 to 1000000"),
    ("flight_recorder_size", 2_000_000, "0 to 1000000"),
    ("flight_recorder_dir", 7, "a folder"),
    ("metrics_dir", 7, "a folder"),
    ("socket_family", "ipv5", "'auto' or 'ipv4' or 'ipv6'"),
    ("port_range", "29699-29600", "29600-29699"),
    ("port_range", "80-90", "1024-65535"),
    ("port_range", "29600-70000", "1024-65535"),
    ("port_range", "a-b", "FIRST-LAST"),
    ("port_range", (1, 2, 3), "FIRST-LAST"),
    ("port_range", (29600, True), "FIRST-LAST"),
    ("timeout", "0", "above 0"),
    ("timeout", -1, "above 0"),
    ("timeout", math.nan, "above 0"),
    ("timeout", math.inf, "above 0"),
    ("timeout", "soon", "above 0"),
    ("timeout", True, "above 0"),
    ("debug", "LOUD", "'WARN' or 'INFO' or 'TRACE'"),
    ("algorithm", "rign", "'ring'"),
    ("transport", "shn", "did you mean 'shm'"),
    ("transport", "rdma", "'auto' or 'shm' or 'tcp'"),
    ("cuda_mode", "gpu", "'auto' or 'nccl' or 'host'"),
    ("segment_nbytes", "1K", "4K to 4M"),
    ("heartbeat_timeout", 0.4, "from 0.5 to 3600"),
    ("heartbeat_timeout", "soon", "from 0.5 to 3600"),
    ("heartbeat_timeout", 3601, "from 0.5 to 3600"),
    ("segment_nbytes", "5M", "4K to 4M"),
    ("segment_nbytes", "64KM", "4K to 4M"),
    ("segment_nbytes", "K", "4K to 4M"),
    ("segment_nbytes", 65536.0, "4K to 4M"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), REFUSED)
def test_a_bad_value_names_place_value_and_what_is_allowed(
    field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Options(**{field: value})  # type: ignore[arg-type]
    for part in (f"Options.{field}={value!r}", allowed):
        assert part in str(caught.value)
    if not isinstance(value, str) or not value:
        return
    variable = next(setting.variable for setting in SETTINGS if setting.field == field)
    with pytest.raises(ValueError) as caught:
        Options().resolve({variable: value})
    for part in (f"{variable}={value!r}", allowed):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("misspelled", "nearest"),
    [
        ("PYCOMM_ALOG", "PYCOMM_ALGO"),
        ("PYCOMM_SOCKET_IFNAMES", "PYCOMM_SOCKET_IFNAME"),
        ("PYCOMM_PORTRANGE", "PYCOMM_PORT_RANGE"),
        ("PYCOMM_debug", "PYCOMM_DEBUG"),
        # Other words for the same, as the option's name or a part of the variable's.
        ("PYCOMM_ALGORITHM", "PYCOMM_ALGO"),
        ("PYCOMM_INTERFACE", "PYCOMM_SOCKET_IFNAME"),
        ("PYCOMM_IFNAME", "PYCOMM_SOCKET_IFNAME"),
        ("PYCOMM_HEARTBEAT", "PYCOMM_HEARTBEAT_TIMEOUT"),
        ("PYCOMM_PORTS", "PYCOMM_PORT_RANGE"),
        ("PYCOMM_TIMEOUT_SECONDS", "PYCOMM_TIMEOUT"),
        ("PYCOMM_TLS", "PYCOMM_SECURITY"),
        ("PYCOMM_SECRETS", "PYCOMM_SECRET_FILE"),
        ("PYCOMM_METRICS", "PYCOMM_METRICS_DIR"),
    ],
)
def test_an_unknown_variable_is_an_error_with_the_nearest_name(
    misspelled: str, nearest: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Options().resolve({misspelled: "1", "PATH": "/bin"})
    assert f"{misspelled} is not a variable of pycomm; did you mean {nearest}?" in str(caught.value)
    assert all(variable in str(caught.value) for variable in variables())


@pytest.mark.parametrize(
    "foreign",
    [
        "PYCOMM_HOME",
        "PYCOMM_JOB_QUEUE",
        "PYCOMM_SEED",
        "PYCOMM_SERVER",
        "PYCOMM_STATE_FILE",
        "PYCOMM_DIR",
        "PYCOMM_B",
        "PYCOMM_STREAMS",
    ],
)
def test_a_variable_that_resembles_none_is_reported_and_ignored(foreign: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"{foreign} is not a variable of pycomm, and has no"):
        assert Options().resolve({foreign: "1"}) == Options().resolve({})


def test_unknown_variables_are_only_those_of_pycomm() -> None:
    environ = ["PYCOMM_B", "PYCOMM_A", "PYCOMM_ALGO", "PYCOMMX", "GLOO_WHATEVER"]
    assert unknown_variables(environ) == ["PYCOMM_A", "PYCOMM_B"]


def test_an_unknown_keyword_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"no 'interfaces'; did you mean interface\?"):
        Options(interfaces="eth0")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"did you mean segment_nbytes\?"):
        Options(segment_bytes=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no 'streams'"):
        Options(streams=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="keywords only"):
        Options("eth0")  # type: ignore[call-arg]


def test_options_are_values() -> None:
    options = Options(timeout=3)
    assert options == Options(timeout=3.0) != Options()
    assert dataclasses.replace(options, debug="info") == Options(timeout=3, debug="INFO")
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.timeout = 4.0  # type: ignore[misc]


@given(st.sampled_from(SETTINGS), st.text())
def test_any_text_is_either_taken_or_refused_with_a_sentence(setting: object, text: str) -> None:
    variable = setting.variable  # type: ignore[attr-defined]
    try:
        Options().resolve({variable: text})
    except ValueError as error:
        assert re.match(rf"{variable}=", str(error))


@given(st.integers(4096, 4 << 20))
def test_segment_sizes_survive(nbytes: int) -> None:
    assert Options(segment_nbytes=str(nbytes)).segment_nbytes == nbytes


def test_nothing_else_reads_the_variables() -> None:
    """One reader: elsewhere in the package a variable's name may only stand in prose.

    tools/check_layers.py finds uses of ``os.environ``; this also finds those of a parameter.
    """
    package = Path(str(__import__("pycomm").__file__)).parent
    readers = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"(environ|getenv)\W+(get\W+)?PYCOMM_", path.read_text())
    ]
    assert readers == []


def test_a_codec_goes_with_direct_alone() -> None:
    with pytest.raises(ValueError, match="PYCOMM_ALGO='ring' does not go with PYCOMM_WIRE_DTYPE"):
        Options().resolve({"PYCOMM_ALGO": "ring", "PYCOMM_WIRE_DTYPE": "int8"})
    assert Options(algorithm="direct", wire_dtype="int8").resolve({}).wire_dtype == "int8"
    assert Options(algorithm="ring", wire_dtype="fp32").resolve({}).wire_dtype == "fp32"
    with pytest.raises(ValueError, match=r"Options.wire_dtype='fp61' is not allowed: use 'fp32'"):
        Options(wire_dtype="fp61")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")],
)
def test_torchs_dtypes_are_wire_dtypes(dtype: torch.dtype, name: str) -> None:
    assert Options(wire_dtype=dtype) == Options(wire_dtype=name)


@pytest.mark.needs_native
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8"])
def test_a_wire_dtype_may_be_spelled_alike_everywhere(name: str) -> None:
    other = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    spelled = [name, name.upper(), f" {name} "]
    if name in other:
        dtype = getattr(torch, other[name])
        spelled += [other[name], other[name].upper(), f"torch.{other[name]}", dtype]
    for text in spelled:
        assert Options(wire_dtype=text).wire_dtype == name
        assert named_wire_dtype(text) == name
        assert named_wire_dtype({"*.bias": text, "*": None}) == {"*.bias": name, "*": "fp32"}
        if isinstance(text, str):
            assert Options().resolve({"PYCOMM_WIRE_DTYPE": text}).wire_dtype == name
        if name != "fp32":
            assert codecs.encode(text, torch.ones(256)).numel() > 0


@pytest.mark.needs_native
@pytest.mark.parametrize("wrong", ["fp64", "torch.int8", "None", "", "half", 16, True, torch.int8])
def test_no_wire_dtype_anywhere(wrong: object) -> None:
    for call in (
        lambda: Options(wire_dtype=wrong),
        lambda: named_wire_dtype(wrong),
        lambda: named_wire_dtype({"*": wrong}),
        lambda: codecs.encode(wrong, torch.ones(256)),
    ):
        with pytest.raises(ValueError, match=r"=.* is not allowed: use .*'fp32' or 'fp16' or"):
            call()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_dtypes_without_the_scales_of_a_wire_dtype_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"Options.wire_dtype=torch.* is not allowed: use 'fp32'"):
        Options(wire_dtype=dtype)


@pytest.mark.parametrize(
    ("name", "text", "value", "origin"),
    [
        ("TORCH_FR_BUFFER_SIZE", "2000000", 1_000_000, "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "-1", 0, "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("TORCH_FR_BUFFER_SIZE", "many", 2000, "default"),
    ],
)
def test_another_librarys_variable_ends_no_job(
    name: str,
    text: str,
    value: int,
    origin: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "_reported", set())
    for _ in range(2):
        resolved = Options().resolve({name: text})
        assert resolved.flight_recorder_size == value
        assert resolved.origins["flight_recorder_size"] == origin
    (line,) = caplog.messages  # once
    assert f"{name}={text!r} is not allowed: use a number of operations from 0" in line


def test_other_libraries_interfaces_end_no_job() -> None:
    assert Options().resolve({"NCCL_SOCKET_IFNAME": "eth0/1"}).interface == ""
    both = {"GLOO_SOCKET_IFNAME": "a b", "NCCL_SOCKET_IFNAME": "eth0"}
    assert Options().resolve(both).interface == "eth0"
    with pytest.raises(ValueError, match="PYCOMM_SOCKET_IFNAME='eth0/1' is not allowed"):
        Options().resolve({"PYCOMM_SOCKET_IFNAME": "eth0/1"})


def test_makes_own_variables_are_known(recwarn: pytest.WarningsRecorder) -> None:
    Options().resolve({"PYCOMM_TORCH": "2.14.1"})
    assert not recwarn.list


@pytest.mark.needs_native
def test_a_group_without_options_has_those_of_the_default_group_of_now() -> None:
    found = []
    for backend, given_options in (("pycomm", Options(wire_dtype="int8")), ("gloo", None)):
        dist.init_process_group(
            backend,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            pg_options=given_options,  # type: ignore[arg-type]
        )
        try:
            found.append(group_wire_dtype(dist.new_group([0], backend="pycomm")))
        finally:
            dist.destroy_process_group()
    assert found == ["int8", "fp32"]
