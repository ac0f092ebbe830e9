"""`metrics_dir`: what ranks write, when they write it, and when the file goes away."""

from __future__ import annotations

import glob
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from ranks import mark, run_ranks, start_ranks
from time_bound import assert_within

import pycomm
from pycomm._metrics import writer as _metrics
from pycomm._metrics.metrics_text import METRICS
from pycomm._native.flight_record import BadRecordError, load_record, read_some

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

Key = tuple[str, str, str]


def parsed(text: str) -> list[Sample]:
    """By a parser that is not ours. Each metric has HELP and TYPE, and no series is there twice."""
    samples: list[Sample] = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert METRICS[sample.name] == (family.type, family.documentation)
            assert sample.timestamp is None  # node_exporter refuses a file that has some
            samples.append(sample)
    series = [(sample.name, *sorted(sample.labels.items())) for sample in samples]
    assert len(set(series)) == len(series)
    return samples


def by_key(text: str) -> dict[Key, float]:
    """Values by name, group and kind."""
    return {
        (one.name, one.labels.get("group", ""), one.labels.get("op", "")): one.value
        for one in parsed(text)
    }


def files(folder: Path) -> dict[int, Path]:
    """By rank."""
    return {int(path.name.split("_")[2]): path for path in sorted(folder.glob("*.prom"))}


def wait_for(what: Callable[[], Any], within_s: float = 90.0) -> Any:
    """The first true value of ``what()``, or its last."""
    deadline = time.monotonic() + within_s
    while not (value := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


# Counts


def some_operations(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    for numel in (1, 2, 3, 4, 5, 6, 7):
        dist.all_reduce(torch.ones(numel))
    for _ in range(3):
        dist.broadcast(torch.ones(4), src=0)
    side = dist.new_group([1, 0])
    for _ in range(4):
        dist.all_gather([torch.empty(8) for _ in range(world_size)], torch.ones(8), group=side)
    if rank == 0:
        dist.send(torch.ones(25), dst=1)
    else:
        dist.recv(torch.ones(25), src=0)
    _metrics.write_now()
    _metrics.write_now()  # which counts nothing twice
    (mine,) = glob.glob(f"{folder}/pycomm_rank_{rank}_*.prom")
    return Path(mine).read_text(), side.group_name


def test_operations_are_those_that_were_called(tmp_path: Path) -> None:
    options = {"metrics_dir": str(tmp_path)}
    values = run_ranks(2, some_operations, args=(str(tmp_path),), pg_options=options).values()
    for rank, (text, side) in enumerate(values):
        got = by_key(text)
        world = "0"
        message = ("send", "recv")[rank]
        counted = {(world, "all_reduce"): 7, (world, "broadcast"): 3, (side, "all_gather"): 4}
        counted[world, message] = 1
        for what, wanted in (("issued", counted), ("completed", counted), ("failed", {})):
            name = f"pycomm_operations_{what}_total"
            found = {key[1:]: value for key, value in got.items() if key[0] == name and value}
            assert found == wanted
        # By hand: 4 times the other rank's 8 floats; 25 floats, if this rank receives them.
        assert got["pycomm_received_bytes_total", side, "all_gather"] == 4 * 8 * 4
        assert got["pycomm_received_bytes_total", world, message] == (0, 100)[rank]
        for group in (world, side):
            assert got["pycomm_group_failed", group, ""] == 0
            assert got["pycomm_group_size", group, ""] == 2
            assert got["pycomm_operations_pending", group, ""] == 0
            assert got["pycomm_oldest_operation_age_seconds", group, ""] == 0
        assert got["pycomm_groups", "", ""] == got["pycomm_world_size", "", ""] == 2
        assert got["pycomm_running", "", ""] == 1
        assert abs(got["pycomm_written_timestamp_seconds", "", ""] - time.time()) < 120
        (info,) = (one for one in parsed(text) if one.name == "pycomm_info")
        assert info.labels["version"] == pycomm.__version__
        assert info.labels["torch"] == str(torch.__version__)
        assert (info.labels["host"], info.labels["rank"]) == (os.uname().nodename, str(rank))
    runs = {one.labels["run"] for text, _ in values for one in parsed(text)}
    assert len(runs) == 1, "the ranks of one job say so"
    # They ended well: nothing is left that would go on saying that they run.
    assert list(tmp_path.iterdir()) == []


def without_a_record(rank: int, world_size: int, folder: str) -> str:
    dist.all_reduce(torch.ones(3))
    _metrics.write_now()
    (mine,) = glob.glob(f"{folder}/pycomm_rank_{rank}_*.prom")
    return Path(mine).read_text()


def test_without_a_record_a_hang_does_not_look_healthy(tmp_path: Path) -> None:
    options = {"metrics_dir": str(tmp_path), "flight_recorder_size": 0}
    ranks = run_ranks(2, without_a_record, args=(str(tmp_path),), pg_options=options)
    for text in ranks.values():
        found = {sample.name for sample in parsed(text)}
        assert "pycomm_group_size" in found
        assert not found & {"pycomm_operations_pending", "pycomm_oldest_operation_age_seconds"}


def a_whole_record(rank: int, world_size: int, folder: str) -> str:
    side = dist.new_group([1, 0])
    dist.new_group([0, 1], pg_options=pycomm.Options(flight_recorder_size=0))
    for group in (None, side):
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_to_all_single(torch.empty(4), torch.ones(4), group=group)
    dist.destroy_process_group(side)
    return pycomm.dump_flight_record(folder).read_text()


def test_a_record_that_is_read_by_lines_is_the_record(tmp_path: Path) -> None:
    for text in run_ranks(2, a_whole_record, args=(str(tmp_path),)).values():
        lines = text.encode().splitlines(keepends=True)
        whole = load_record(text, "test")
        assert len(whole["groups"]) == 3
        for group in whole["groups"]:
            group["tickets"] = [one["ticket"] for one in group["operations"]]
        assert read_some(lines, "test", lambda group, ticket: True) == whole
        for group in whole["groups"]:
            group["operations"] = [one for one in group["operations"] if one["ticket"] == 2]
        assert read_some(lines, "test", lambda group, ticket: ticket == 2) == whole
        for bad in ([b"{}"], lines[1:], [lines[0], lines[2]], [lines[0].replace(b":3,", b":2,")]):
            with pytest.raises(BadRecordError):
                read_some(bad, "test", lambda group, ticket: True)


def train(rank: int, world_size: int, folder: str) -> str:
    model = pycomm.DistributedDataParallel(torch.nn.Linear(10, 5))
    for _ in range(3):
        model(torch.ones(2, 10)).sum().backward()
    if rank == 0:
        _metrics.write_now()
        mark("waits")
        model(torch.ones(2, 10)).sum().backward()  # until rank 1 comes
    else:
        assert wait_for(lambda: os.path.exists(f"{folder}.go"))
        model(torch.ones(2, 10)).sum().backward()
    _metrics.write_now()
    (mine,) = glob.glob(f"{folder}/pycomm_rank_{rank}_*.prom")
    return Path(mine).read_text()


def test_the_wrappers_steps_and_a_backward_that_hangs(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    options = {"metrics_dir": str(folder)}
    with start_ranks(2, train, args=(str(folder),), pg_options=options) as running:
        running.wait_for_mark(0, "waits")

        def hanging() -> dict[Key, float]:
            got = by_key(files(folder)[0].read_text())
            return got if got["pycomm_oldest_operation_age_seconds", "0", ""] > 0.5 else {}

        got = wait_for(hanging)
        assert got["pycomm_operations_pending", "0", ""] >= 1
        assert got["pycomm_ddp_steps_total", "", ""] == 3  # as before it hung
        Path(f"{folder}.go").touch()
        values = running.collect(60).check().values()
    for text in values:
        got = by_key(text)
        assert got["pycomm_ddp_passes_total", "", ""] == got["pycomm_ddp_steps_total", "", ""] == 4
        # 55 floats, four times; two ranks in a ring send as much as there is.
        assert got["pycomm_ddp_wire_bytes_total", "", ""] == 4 * 55 * 4
        assert got["pycomm_ddp_sent_bytes_total", "", ""] == 4 * 55 * 4
        assert got["pycomm_ddp_exposed_seconds_total", "", ""] > 0
        (steps,) = (one for one in parsed(text) if one.name == "pycomm_ddp_steps_total")
        assert (steps.labels["wrapper"], steps.labels["model"]) == ("0", "Linear")


# When it is written


def join_by_hand(store: str, rank: int, world_size: int, **options: Any) -> None:
    dist.init_process_group(
        "pycomm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        pg_options=pycomm.Options(**options),
    )


def stay(rank: int, world_size: int, folder: str) -> None:
    _metrics.PERIOD_S = 0.3
    join_by_hand(f"{folder}.store", rank, world_size, metrics_dir=folder)
    dist.all_reduce(torch.ones(3))
    assert wait_for(lambda: os.path.exists(f"{folder}.go"))
    dist.destroy_process_group()


def test_it_is_written_again_and_again(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    arguments = {"args": (str(folder),), "init": "none", "destroy": False}
    with start_ranks(2, stay, **arguments) as running:  # type: ignore[arg-type]

        def written(rank: int) -> float:
            try:
                got = by_key(files(folder)[rank].read_text())
            except KeyError:
                return 0.0
            return got["pycomm_written_timestamp_seconds", "", ""]

        for rank in range(2):
            first = wait_for(lambda: written(rank))  # noqa: B023
            assert first and wait_for(lambda: written(rank) > first)  # noqa: B023
        assert {path.suffix for path in folder.iterdir()} <= {".prom", ".tmp"}
        Path(f"{folder}.go").touch()
        running.collect(60).check()
    assert list(folder.iterdir()) == []


def fails(rank: int, world_size: int, folder: str, destroys: bool) -> float:
    side = dist.new_group([1, 0])
    dist.all_reduce(torch.ones(3))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has summed"])
        assert wait_for(lambda: len(glob.glob(f"{folder}/*.prom")) == world_size)
        os._exit(3)
    store.set("rank 0 has summed", "")
    with pytest.raises(dist.DistError):
        for _ in range(2):
            dist.all_reduce(torch.ones(3), group=side)
    if destroys:
        dist.destroy_process_group()
        return 0.0
    (mine,) = glob.glob(f"{folder}/pycomm_rank_0_*.prom")

    def said() -> bool:
        got = by_key(Path(mine).read_text())
        return got.get(("pycomm_group_failed", side.group_name, "")) == 1

    began = time.monotonic()
    assert wait_for(said)
    return time.monotonic() - began


@pytest.mark.time_bound
@pytest.mark.parametrize("destroys", [False, True])
def test_a_failure_is_written_at_once_and_stays(tmp_path: Path, destroys: bool) -> None:
    options = {"metrics_dir": str(tmp_path)}
    with start_ranks(
        2, fails, args=(str(tmp_path), destroys), pg_options=options, destroy=False
    ) as running:
        results = running.collect(60)
    assert results[0].ok, results.describe()
    assert results[1].exit_code == 3
    text = files(tmp_path)[0].read_text()
    got = by_key(text)
    assert got["pycomm_running", "", ""] == 0
    assert got["pycomm_groups", "", ""] == (0 if destroys else 2)
    failed = [one for one in parsed(text) if one.name == "pycomm_group_failure_info"]
    assert failed and {one.labels["peer"] for one in failed} == {"1"}
    assert {one.labels["code"] for one in failed} <= {"PEER_DEAD", "PEER_CLOSED"}
    counted = [value for key, value in got.items() if key[0] == "pycomm_operations_failed_total"]
    assert sum(counted) >= 1
    # The rank that was killed could not say so. Its file has the time of its last word.
    other = by_key(files(tmp_path)[1].read_text())
    assert other["pycomm_running", "", ""] == 1
    written = "pycomm_written_timestamp_seconds", "", ""
    assert other[written] < got[written]
    if not destroys:
        assert_within(results[0].value, 2.0)  # and the period is 5 s


def come_back(rank: int, world_size: int, folder: str) -> list[str]:
    names = []
    for turn in range(2):
        join_by_hand(f"{folder}.{turn}", 1 - rank if turn else rank, world_size, metrics_dir=folder)
        dist.barrier()
        _metrics.write_now()
        assert _metrics._writer is not None
        mine = _metrics._writer.identity.path
        ranks = {one.labels["rank"] for one in parsed(mine.read_text())}
        assert ranks == {str(dist.get_rank())}
        names.append(mine.name)
        dist.barrier()
        dist.destroy_process_group()
    return names


def test_a_process_that_joins_again_has_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    done = run_ranks(2, come_back, args=(str(folder),), init="none", destroy=False)
    for rank, (first, second) in enumerate(done.values()):
        assert first.startswith(f"pycomm_rank_{rank}_") and first[14:] != second[14:]
        assert second.startswith(f"pycomm_rank_{1 - rank}_")
    assert list(folder.iterdir()) == []


# What must not break the job


def make_and_destroy(rank: int, world_size: int, folder: str) -> str:
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            _metrics.write_now()

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for _ in range(30):
        side = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3), group=side)
        dist.destroy_process_group(side)
    over.set()
    for writer in writers:
        writer.join()
    dist.all_reduce(torch.ones(3))
    _metrics.write_now()
    (mine,) = glob.glob(f"{folder}/pycomm_rank_{rank}_*.prom")
    return Path(mine).read_text()


def test_groups_are_destroyed_while_threads_write(tmp_path: Path) -> None:
    options = {"metrics_dir": str(tmp_path)}
    done = run_ranks(2, make_and_destroy, args=(str(tmp_path),), pg_options=options)
    for result in done:
        got = by_key(result.value)
        assert got["pycomm_groups", "", ""] == 1
        assert {group for _, group, _ in got} == {"", "0"}
        assert "could not be written" not in result.stderr
        assert not glob.glob(f"/dev/shm/pycomm-metrics-{result.pid}-*")


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {"PYCOMM_METRICS_DIR": str(tmp_path / "file" / "metrics")}
    done = run_ranks(1, some_operations, args=("",), env=env, check=False)
    (error,) = done.errors()
    assert error.is_a("ValueError")
    assert error.text.startswith(f"PYCOMM_METRICS_DIR='{tmp_path}/file/metrics' cannot be used: ")
    assert "Try: a folder that this user may write" in error.text


def lose_the_folder(rank: int, world_size: int, folder: str) -> None:
    dist.all_reduce(torch.ones(3))
    assert wait_for(lambda: len(glob.glob(f"{folder}/*.prom")) == world_size or None)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
        Path(folder).touch()  # no folder: nobody can write there, not even root
    dist.barrier()
    for _ in range(3):
        _metrics.write_now()
        dist.all_reduce(torch.ones(3))


def test_a_folder_that_is_lost_later_is_one_warning(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    options = {"metrics_dir": str(folder)}
    done = run_ranks(2, lose_the_folder, args=(str(folder),), pg_options=options)
    for result in done:
        assert result.stderr.count("the metrics could not be written to") == 1, result.describe()
        assert "WARNING" in result.stderr and "Not a directory" in result.stderr


def two_jobs(rank: int, world_size: int, folder: str) -> str:
    mark("there")
    assert wait_for(lambda: os.path.exists(f"{folder}.go"))
    dist.all_reduce(torch.ones(3))
    return ""


def test_two_jobs_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    arguments: dict[str, Any] = {
        "args": (str(folder),),
        "pg_options": {"metrics_dir": str(folder)},
    }
    with start_ranks(2, two_jobs, **arguments) as one, start_ranks(2, two_jobs, **arguments) as two:
        for job in (one, two):
            for rank in range(2):
                job.wait_for_mark(rank, "there")
        paths = wait_for(lambda: found if len(found := list(folder.glob("*.prom"))) == 4 else [])
        assert len(paths) == 4
        # As node_exporter has them, all in one: no series twice, one HELP for a metric.
        everything = [sample for path in paths for sample in parsed(path.read_text())]
        series = [(sample.name, *sorted(sample.labels.items())) for sample in everything]
        assert len(set(series)) == len(series)
        runs = {sample.labels["run"] for sample in everything}
        assert len(runs) == 2
        Path(f"{folder}.go").touch()
        one.collect(60).check()
        two.collect(60).check()
    assert list(folder.iterdir()) == []


def fork(rank: int, world_size: int, folder: str) -> None:
    _metrics.PERIOD_S = 1000.0  # so the thread writes once
    join_by_hand(f"{folder}.store", rank, world_size, metrics_dir=folder)
    dist.all_reduce(torch.ones(3))
    (mine,) = wait_for(lambda: glob.glob(f"{folder}/pycomm_rank_{rank}_*.prom"))
    _metrics.write_now()  # behind the thread's, if it is still at it
    before = Path(mine).stat()
    child = os.fork()
    if child == 0:
        try:
            _metrics.write_now()
            threading._shutdown()  # type: ignore[attr-defined] # as the interpreter at its end
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    after = Path(mine).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_child_of_fork_leaves_the_file_alone(tmp_path: Path) -> None:
    run_ranks(2, fork, args=(str(tmp_path / "metrics"),), init="none")


def without(rank: int, world_size: int) -> list[str]:
    dist.all_reduce(torch.ones(3))
    _metrics.write_now()
    return [thread.name for thread in threading.enumerate()]


def test_without_the_setting_there_is_no_thread() -> None:
    for names in run_ranks(2, without).values():
        assert "pycomm-metrics" not in names
