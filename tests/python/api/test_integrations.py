"""What pycomm.integrations does without the libraries: variables, node lists, errors."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
import types
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import LOOPBACK, free_port, run_ranks

import pycomm
from pycomm.integrations import _optional, accelerate, launch, lightning, node_list, transformers

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1853751297",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,2,1",
    "SLURM_STEP_NODELIST": "rack[2-3]n[08-09]",
    "SLURM_JOB_NODELIST": "login,rack[2-3]n[08-09]",
}


def found(environ: dict[str, str]) -> launch.Launch:
    result = launch.find_launch(environ)
    assert result is not None
    return result


# Launchers


def test_torchruns_variables_stay() -> None:
    result = found(TORCHRUN | MASTER | OPEN_MPI | SLURM)
    assert result.launcher == "torchrun" and (result.rank, result.world_size) == (3, 4)
    assert result.variables() == TORCHRUN | MASTER


def test_open_mpi_on_one_host() -> None:
    result = found(OPEN_MPI)
    assert (result.launcher, result.rank, result.world_size) == ("Open MPI", 1, 2)
    assert (result.local_rank, result.local_world_size) == (1, 2)
    assert result.address == "127.0.0.1" and result.job == "Open MPI 1853751297"
    other = found(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert result.port == other.port and 10000 <= result.port < 29000
    assert found(OPEN_MPI | {"PMIX_NAMESPACE": "1853751298"}).port != result.port


def test_mpich_on_one_host() -> None:
    result = found(MPICH)
    assert (result.launcher, result.rank, result.local_world_size) == ("MPICH", 0, 2)
    assert result.address == "127.0.0.1" and result.port == found(MPICH | {"PMI_RANK": "1"}).port


@pytest.mark.parametrize(
    "variables",
    [OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, MPICH | {"PMI_SIZE": "4"}],
)
def test_mpirun_over_several_hosts_needs_an_address(variables: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="on which of several hosts rank 0 runs"):
        launch.find_launch(variables)
    result = found(variables | MASTER)
    assert (result.address, result.port) == ("10.0.0.1", 29500)


def test_mpich_over_several_hosts_needs_a_port_too() -> None:
    with pytest.raises(ValueError, match="does not say which port to use"):
        launch.find_launch(MPICH | {"PMI_SIZE": "4", "MASTER_ADDR": "a"})


def test_slurm() -> None:
    result = found(SLURM)
    assert (result.launcher, result.rank, result.world_size) == ("Slurm", 5, 7)
    assert (result.local_rank, result.local_world_size) == (1, 2)
    assert result.address == "rack2n08" and result.job == "Slurm 4711.2"
    assert found(SLURM | MASTER).address == "10.0.0.1"


def test_ports_of_neighbouring_jobs_and_steps_differ() -> None:
    ports = {
        found(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(1000, 1100)
        for step in range(5)
    }
    assert len(ports) == 500 and min(ports) >= 10000 and max(ports) < 29000


def test_mpirun_inside_a_slurm_job_is_mpiruns() -> None:
    # Its daemon is a task of a step of its own, without the first host: only the job's list helps.
    result = found(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"} | SLURM)
    assert result.launcher == "Open MPI" and result.address == "login"


def test_srun_with_pmi_is_slurms() -> None:
    # Slurm's plugin for PMI2, and Cray's PMI, set these for every task of srun.
    assert found(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}) == found(SLURM)


def test_mpich_inside_a_slurm_job_is_mpichs() -> None:
    # One daemon in a step of its own: its SLURM_PROCID is 0, and so may be a rank.
    daemon = SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    for rank in ("0", "1"):
        assert found(daemon | MPICH | {"PMI_RANK": rank}).launcher == "MPICH"
        one_host = {"PMI_RANK": rank, "PMI_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
        assert found(daemon | one_host).launcher == "MPICH"


def test_the_batch_script_itself_is_no_rank() -> None:
    batch = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_JOB_NODELIST")}
    assert launch.find_launch(batch | {"SLURM_NTASKS": "7"}) is None
    assert launch.find_launch({}) is None


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"},
            "ranks go from 0 to the number of ranks",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE='two' is not a whole"),
        (OPEN_MPI | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (SLURM | {"SLURM_STEP_NODELIST": "a[1-"}, "is not a list of hosts as Slurm writes it"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "is not like 2\\(x3\\),1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "on which of several hosts rank 0 runs"),
    ],
)
def test_bad_variables(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        launch.find_launch(variables)


def test_only_what_is_missing_is_set() -> None:
    environ = OPEN_MPI | {"MASTER_ADDR": "192.0.2.7", "RANK": ""}
    launch._set_missing(environ)
    assert environ["MASTER_ADDR"] == "192.0.2.7"
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("1", "2", "1")


def test_variables_that_were_set_here_are_not_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = dict(OPEN_MPI)
    monkeypatch.setattr(os, "environ", environ)
    first = launch.env_from_launcher()
    assert first is not None and (first.launcher, first.rank) == ("Open MPI", 1)
    assert launch.env_from_launcher() == first
    assert found(environ).launcher == "torchrun"  # what a process that this one starts would find
    environ["MASTER_PORT"] = "29500"
    other = launch.env_from_launcher()
    assert other is not None and (other.launcher, other.port) == ("torchrun", 29500)


def join_twice(rank: int, size: int) -> list[str]:
    jobs = []
    for _ in range(2):
        joined = launch.init_process_group(timeout=timedelta(seconds=30))
        assert joined is not None
        store = dist.distributed_c10d._get_default_store()
        while not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
            store = store.underlying_store
        jobs.append(store.get(launch._JOB_KEY).decode() if joined.launcher != "torchrun" else "")
        dist.destroy_process_group()
    return jobs


@pytest.mark.needs_native
def test_each_group_of_a_process_checks_its_store() -> None:
    env: dict[str, str | None] = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "1",
        "PMIX_NAMESPACE": "1853751297",
        "MASTER_PORT": str(free_port()),
    }
    jobs = run_ranks(1, join_twice, init="none", env=lambda rank: env).values()
    assert jobs == [["Open MPI 1853751297"] * 2]


# Node lists


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("one", ["one"]),
        ("a,b-2,c.example", ["a", "b-2", "c.example"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,3]x", ["n08x", "n09x", "n10x", "n3x"]),
        ("r[1-2]n[01-02],z", ["r1n01", "r1n02", "r2n01", "r2n02", "z"]),
    ],
)
def test_node_list(text: str, hosts: list[str]) -> None:
    assert node_list.expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", "a,,b", "n[", "n]", "n[]", "n[a]", "n[3-1]", "n[1-", "[[1]]", "n[1-9999999]"],
)
def test_malformed_node_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"list"):
        node_list.expand(text)


def test_a_list_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 1048576 hosts"):
        node_list.expand("n[1-2000][1-2000]")


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=20, unique=True), st.integers(0, 6))
def test_ranges_name_every_number(numbers: list[int], width: int) -> None:
    inside = ",".join(f"{number:0{width}d}" for number in numbers)
    assert node_list.expand(f"n[{inside}]") == [f"n{number:0{width}d}" for number in numbers]
    first, last = min(numbers), max(numbers)
    whole = node_list.expand(f"n[{first:0{width}d}-{last}]")
    assert (
        len(whole) == last - first + 1 and whole[-1] == f"n{last:0{max(width, len(str(first)))}d}"
    )


# Missing libraries


def test_a_missing_library_is_named_as_pip_calls_it() -> None:
    with pytest.raises(ImportError, match="pip install no-such-thing") as caught:
        _optional.load("no_such_thing.part", package="no-such-thing", needed_by="this test")
    assert "this test needs no-such-thing, which is not installed" in str(caught.value)


def test_a_librarys_own_missing_import_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken_library.py").write_text("import absent_dependency\n")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        _optional.load("broken_library", package="broken-library", needed_by="this test")


@pytest.mark.parametrize(
    ("library", "module", "call"),
    [
        ("lightning", "lightning.pytorch.strategies", lightning.make_strategy),
        ("accelerate", "accelerate", accelerate.make_accelerator),
        ("transformers", "transformers", transformers.make_parser),
    ],
)
def test_each_integration_names_its_package(
    library: str, module: str, call: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module.split(".")[0], None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {library}"):
        call()  # type: ignore[operator]


def test_bad_arguments_come_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match="choose one of pycomm, torch"):
        accelerate.make_accelerator(wrapper="horovod")
    for wire in ("fp16", None):
        with pytest.raises(ValueError, match="wire_dtype needs wrapper='pycomm'"):
            accelerate.make_accelerator(wrapper="torch", wire_dtype=wire)
    with pytest.raises(ValueError, match="is for CPU training"):
        accelerate.make_accelerator(cpu=False)
    with pytest.raises(ValueError, match="fsdp_plugin=…: on CPU Accelerate would train without it"):
        accelerate.make_accelerator(fsdp_plugin=object())
    with pytest.raises(ValueError, match="process_group_backend='gloo'"):
        lightning.make_strategy(process_group_backend="gloo")
    with pytest.raises(ValueError, match=r"choose one of lightning.pytorch, pytorch_lightning"):
        lightning.make_strategy(package="keras")
    with pytest.raises(ValueError, match=r"Try: Trainer\(accumulate_grad_batches=4\)"):
        lightning.make_strategy(accumulate=4)


class FakeInitProcessGroupKwargs:
    """Stands in for Accelerate's class of nearly this name."""


@dataclasses.dataclass
class FakeTrainingArguments:
    """Stands in for those of transformers."""

    output_dir: str
    use_cpu: bool = False
    ddp_timeout: int = 1800
    device: Any = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    distributed_state: Any = dataclasses.field(
        default_factory=lambda: types.SimpleNamespace(num_processes=1, distributed_type="NO")
    )


@pytest.fixture
def fake_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate and transformers, as far as they are asked; and no launcher's variables."""
    library = types.SimpleNamespace(
        InitProcessGroupKwargs=FakeInitProcessGroupKwargs, TrainingArguments=FakeTrainingArguments
    )
    monkeypatch.setattr(_optional, "load", lambda *names, **more: library)
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("fake_libraries")
def test_a_handler_of_a_group_that_is_made_before_it_is_refused() -> None:
    handlers = [object(), FakeInitProcessGroupKwargs()]
    with pytest.raises(ValueError, match=r"Try: make_accelerator\(group_options=.'timeout'"):
        accelerate.make_accelerator(kwargs_handlers=handlers)


@pytest.mark.usefixtures("fake_libraries")
@pytest.mark.parametrize("option", ["fsdp", "deepspeed"])
def test_sharding_by_the_trainer_on_cpu_is_refused(option: str) -> None:
    with pytest.raises(
        ValueError, match=f"{option}=True: on CPU Accelerate would train without it"
    ):
        transformers.make_training_arguments(output_dir="out", use_cpu=True, **{option: True})


@pytest.mark.usefixtures("fake_libraries")
def test_the_trainers_timeout_is_that_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(accelerate, "make_group", lambda options, wire: made.append(options))
    make = transformers.make_training_arguments
    for more in ({}, {"ddp_timeout": 1800}, {"ddp_timeout": 60}):
        assert make(output_dir="out", use_cpu=True, **more).ddp_timeout in (60, 1800)
    assert made == [{}, {}, {"timeout": timedelta(seconds=60)}]
    with pytest.raises(ValueError, match="ddp_timeout=60, and group_options has"):
        options = {"timeout": timedelta(seconds=61)}
        make(output_dir="out", use_cpu=True, ddp_timeout=60, group_options=options)


@pytest.mark.usefixtures("fake_libraries")
def test_a_process_without_a_launcher_says_that_it_trains_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "pycomm"):
        transformers.make_training_arguments(output_dir="out", use_cpu=True)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "this process trains alone" in record.message
    assert "torchrun or python -m pycomm run" in record.message
    assert not dist.is_initialized()


# The default group


def test_options_of_the_group_are_a_mapping() -> None:
    arguments = accelerate.group_arguments
    assert arguments(None) == {}
    assert arguments({"timeout": 3}) == {"timeout": 3}
    with pytest.raises(TypeError, match="group_options is of type object, and not a dict"):
        arguments(object())


def test_every_wrapper_does_as_its_group_by_default() -> None:
    for made in (
        pycomm.DistributedDataParallel,
        pycomm.StreamingDiLoCo,
        lightning.make_strategy,
        accelerate.make_accelerator,
        accelerate.make_group,
        transformers.make_training_arguments,
    ):
        assert inspect.signature(made).parameters["wire_dtype"].default == "group", made
    assert lightning._NAMES["pycomm"] == "group"


def make_with_wire_dtype(rank: int, world_size: int) -> str:
    """What ``make_training_arguments(wire_dtype=...)`` does before it asks for transformers."""
    options = {"pg_options": pycomm.Options(transport="tcp")}
    with pytest.raises(ValueError, match="wire_dtype='fp61' is not allowed: use 'group' or 'fp32'"):
        accelerate.make_group(options, "fp61")
    with pytest.raises(ValueError, match="wire_dtype='int8', and pg_options has 'fp16'"):
        accelerate.make_group({"pg_options": pycomm.Options(wire_dtype="fp16")}, "int8")
    accelerate.make_group(options, torch.float16)
    accelerate.make_group({}, "FP16")
    accelerate.make_group({})
    accelerate.make_group(options, "fp16")
    for other in ({"timeout": timedelta(seconds=7)}, {"pg_options": pycomm.Options(timeout=7)}):
        with pytest.raises(ValueError, match="is for a group that is made here, and there is a"):
            accelerate.make_group(other)
    for other, name in (("int8", "int8"), (None, "fp32")):  # None is none, not "as the group"
        with pytest.raises(ValueError, match=f"wire_dtype='{name}', and the default group was"):
            accelerate.make_group({}, other)
    before = pycomm.codec_stats().bytes_saved
    dist.all_reduce(torch.ones(8192))
    assert pycomm.codec_stats().bytes_saved > before
    return str(dist.get_backend())


@pytest.mark.needs_native
@pytest.mark.ci
def test_the_group_of_the_trainer_has_a_wire_dtype() -> None:
    port = str(free_port())

    def launched(rank: int) -> dict[str, str | None]:
        address: dict[str, str | None] = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
        return {**address, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}

    runs = run_ranks(2, make_with_wire_dtype, init="none", env=launched).values()
    assert runs == ["pycomm", "pycomm"]


def make_twice(rank: int, world_size: int) -> str:
    """As a script with two stages does."""
    options = {"timeout": timedelta(minutes=30), "pg_options": pycomm.Options(transport="tcp")}
    for _ in range(2):
        accelerate.make_group(options, "fp16")
    with pytest.raises(ValueError, match="is for a group that is made here, and there is a"):
        accelerate.make_group({"timeout": timedelta(seconds=7)})
    return str(dist.get_backend())


@pytest.mark.needs_native
@pytest.mark.ci
def test_the_same_arguments_fit_a_group_that_variables_have_changed() -> None:
    env: dict[str, str | None] = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYCOMM_TIMEOUT": "600"}
    runs = run_ranks(1, make_twice, init="none", env=lambda rank: env).values()
    assert runs == ["pycomm"]


@pytest.mark.usefixtures("fake_libraries")
@pytest.mark.parametrize(
    "options", [{"wire_dtype": "fp16"}, {"group_options": {"timeout": timedelta(seconds=7)}}]
)
def test_options_of_a_group_on_gpus_are_refused(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=f"{next(iter(options))} is for use_cpu=True: .* Try: PYC"):
        transformers.make_training_arguments(output_dir="out", use_cpu=False, **options)


def test_the_wait_for_the_store_has_the_groups_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(**options: object) -> float:
        return launch._timeout("pycomm", options).total_seconds()

    assert seconds() == 1800
    monkeypatch.setenv("PYCOMM_TIMEOUT", "30")
    assert seconds() == 30
    assert seconds(timeout=timedelta(seconds=7)) == 7
    assert seconds(pg_options=pycomm.Options(timeout=5)) == 5
    assert launch._timeout("gloo", {}).total_seconds() == 1800
