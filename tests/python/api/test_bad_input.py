"""Wrong use is a clear error on every rank that can see it, in seconds: no hang, no abort."""

from __future__ import annotations

import importlib.machinery
import math
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankResults, free_port, mark, run_python, run_ranks, start_ranks
from time_bound import assert_within
from torch._C._distributed_c10d import FileStore

import pycomm
from pycomm import _torch_range, errors
from pycomm._native import loader

SECONDS = 10.0  # "in seconds", from when the last rank joins


def join(rank: int, world_size: int, timeout_s: float = 30.0, **options: Any) -> None:
    dist.init_process_group(
        "pycomm",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        **options,
    )


def join_by_file(rank: int, world_size: int, place: str, timeout_s: float = 30.0) -> None:
    join(rank, world_size, timeout_s, store=FileStore(place, world_size))
    dist.destroy_process_group()


def join_together(count: int, *args: Any) -> None:
    """``join_by_file`` once so many processes are here, however slowly each of them started."""
    place = args[2]
    store = FileStore(f"{place}.meet", count)
    store.add("here", 1)
    while store.add("here", 0) < count:
        time.sleep(0.01)
    mark("joining")
    join_by_file(*args)


def fail_together(
    target: Callable[..., None], place: Path, ranks: Sequence[int], world_size: int
) -> tuple[RankResults, float]:
    """What ranks did that met and joined, and how long after that the last error came."""
    with start_ranks(
        world_size, target, args=(str(place / "store"),), init="none", ranks=ranks
    ) as running:
        for rank in ranks:
            running.wait_for_mark(rank, "joining")
        joined_s = time.monotonic()
        results = running.collect(60)
    times_s = [error.monotonic_s for error in results.errors()]
    return results, max(times_s, default=math.inf) - joined_s


def assert_all_fail(results: RankResults, code: str, *texts: str) -> None:
    for result in results:
        assert result.error is not None, results.describe()
        assert result.error.code == code, results.describe()
        assert not result.timed_out and result.exit_code == 1, results.describe()
        for text in texts:
            assert text in result.error.text, f"{text!r} is not in {result.error.text!r}"


# The process group's own arguments, found before anything is sent


def test_a_rank_outside_the_world(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rank 5 is not in a group of 2.*RANK and WORLD_SIZE"):
        join(5, 2, store=FileStore(str(tmp_path / "store"), 2))


def test_options_of_another_library(tmp_path: Path) -> None:
    class Strange:
        pass

    store = FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(TypeError, match=r"must be a pycomm\.Options, not .*Strange"):
        join(0, 1, store=store, pg_options=Strange())


def test_an_unknown_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_SOCKET_IFNAM", "eth0")
    with pytest.raises(ValueError, match=r"did you mean PYCOMM_SOCKET_IFNAME\?"):
        join(0, 1, store=FileStore(str(tmp_path / "store"), 1))


def test_a_bad_value_of_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="PYCOMM_TIMEOUT='soon' is not allowed"):
        join(0, 1, store=FileStore(str(tmp_path / "store"), 1))


# A build for another torch

OTHER_TORCH = """
import torch, torch.distributed as dist, sys
torch.__version__ = {version!r}
import pycomm
try:
    dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(type(error).__name__, error)
print(any(name.endswith("._C") for name in sys.modules if name.startswith("pycomm.")))
"""


@pytest.mark.needs_native
@pytest.mark.parametrize(
    ("version", "way"),
    [
        (
            "2.16.0",
            "a newer pycomm, from its sources (it is not on PyPI); or: pip install 'torch==2.",
        ),
        ("2.10.1", "pip install 'torch==2."),
    ],
)
def test_a_build_for_another_torch_is_told_before_it_is_loaded(version: str, way: str) -> None:
    result = run_python(["-c", OTHER_TORCH.format(version=version)])
    assert result.returncode == 0, result.stderr
    text, loaded = result.stdout.strip().split("\n")
    folder = Path(pycomm.__file__).resolve().parent
    assert text.startswith(
        f"TorchVersionError the pycomm in {folder}, {pycomm.__version__}, was built for "
    )
    source = "leave this source folder, if pycomm is installed elsewhere; or: "
    leave = source if (folder.parent / "setup.py").is_file() else ""
    assert f" and torch {version} is installed. Try: {leave}{way}" in text
    assert loaded == "False"


def test_which_builds_fit() -> None:
    loader.check_torch(["2.13"], "2.13.0+cpu")
    loader.check_torch(["2.11", "2.13", "2.14"], "2.13.1")
    for built, installed in (("2.12", "2.13.0+cpu"), ("2.1", "2.13.0"), ("2.13", "2.1.3")):
        with pytest.raises(errors.TorchVersionError, match=f"built for torch {built},"):
            loader.check_torch([built], installed)
    with pytest.raises(errors.TorchVersionError, match=r"built for torch 2\.11, 2\.13, 2\.14,"):
        loader.check_torch(["2.11", "2.13", "2.14"], "2.12.0")
    with pytest.raises(errors.TorchVersionError, match="not built"):
        loader.check_torch([], "2.13.0")


@pytest.mark.parametrize(
    ("installed", "way"),
    [
        (
            "2.14.1+cu130",
            "build pycomm in this environment, from its sources: pip install "
            "--no-build-isolation .",
        ),
        # Building is refused for a torch that this pycomm does not know.
        ("2.16.0", "a newer pycomm, from its sources (it is not on PyPI)"),
    ],
)
def test_the_way_out_of_a_wrong_torch_is_one_that_works(
    installed: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not in a source folder.
    monkeypatch.setattr(loader, "_PACKAGE", tmp_path / "pycomm")
    with pytest.raises(errors.TorchVersionError) as caught:
        loader.check_torch(["2.13"], installed)
    assert str(caught.value) == (
        f"the pycomm in {tmp_path / 'pycomm'}, {pycomm.__version__}, was built for torch 2.13, and "
        f"torch {installed} is installed. Try: {way}; or: pip install 'torch==2.13.*', "
        "best in an environment of its own"
    )
    loader.check_torch(["2.16"], "2.16.0")  # built with PYCOMM_UNTESTED_TORCH=1


def test_modules_are_found_by_the_torch_that_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    for folder, name in (
        ("torch_2_9", f"_C{suffix}"),
        ("torch_2_11", f"_C{suffix}"),
        ("torch_2_12", "_C.cpython-27-of-another-python.so"),
        ("torch_2_13", "__pycache__"),
        ("torch_2_14_saved", f"_C{suffix}"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    monkeypatch.setattr(pycomm, "__path__", [str(tmp_path)])
    assert loader.built_for() == ["2.9", "2.11"]
    assert _torch_range.module_name("2.11.0+cpu") == "pycomm.torch_2_11._C"


# Ranks that do not fit together


def join_with_other_world_size(rank: int, world_size: int, place: str) -> None:
    join_together(2, rank, world_size + rank, place)


@pytest.mark.time_bound
@pytest.mark.needs_native
def test_ranks_with_different_world_sizes(tmp_path: Path) -> None:
    results, took_s = fail_together(join_with_other_world_size, tmp_path, [0, 1], 2)
    assert_all_fail(results, "CONFIG_MISMATCH", "2", "3")
    assert_within(took_s, SECONDS)


def join_as_rank_0(rank: int, world_size: int, place: str) -> None:
    join_together(2, 0, world_size, place, 4.0)


@pytest.mark.needs_native
def test_one_rank_twice(tmp_path: Path) -> None:
    results, _ = fail_together(join_as_rank_0, tmp_path, [0, 1], 2)
    codes = sorted(error.code or "" for error in results.errors())
    # The second is refused at once, naming the first; the first waits for rank 1, who never comes.
    assert codes == ["DUPLICATE_RANK", "RENDEZVOUS_TIMEOUT"], results.describe()
    (refused,) = [each for each in results if each.error and each.error.code == "DUPLICATE_RANK"]
    (first,) = [each for each in results if each is not refused]
    assert refused.error and str(first.pid) in refused.error.text


def join_without_rank_1(rank: int, world_size: int, place: str) -> None:
    join_together(2, rank, world_size, place, 3.0)


@pytest.mark.time_bound
@pytest.mark.needs_native
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    results, took_s = fail_together(join_without_rank_1, tmp_path, [0, 2], 3)
    assert_all_fail(results, "RENDEZVOUS_TIMEOUT", "missing: 1", "rank 0", "rank 2")
    assert_within(took_s, SECONDS)


def join_by_env(rank: int, world_size: int, rounds: int) -> float:
    tensor = torch.ones(1000)
    for _ in range(rounds):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        dist.barrier()
    return float(tensor.sum())


def second_job(rank: int, world_size: int, port: int) -> None:
    join(rank, world_size, 8.0, init_method=f"tcp://127.0.0.1:{port}")


@pytest.mark.needs_native
def test_two_jobs_on_one_port() -> None:
    port = free_port()
    method = f"tcp://127.0.0.1:{port}"
    with start_ranks(2, serve_until_told, init=method) as first:
        for rank in range(2):
            first.wait_for_mark(rank, "joined")
        results = run_ranks(2, second_job, args=(port,), init="none", check=False)
        for rank in range(2):
            first.kill(rank, 10)  # SIGUSR1: go on
        first.collect(30).check()  # the first job has not noticed
    refused, stranger = results
    assert refused.error and "EADDRINUSE" in refused.error.text, results.describe()
    assert stranger.error and not stranger.timed_out, results.describe()
    assert stranger.error.code in ("DUPLICATE_RANK", "RENDEZVOUS_TIMEOUT"), results.describe()


def serve_until_told(rank: int, world_size: int) -> float:
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    mark("joined")
    signal.sigtimedwait([signal.SIGUSR1], 60)
    return join_by_env(rank, world_size, 5)


def differing_algorithms(rank: int, world_size: int, place: str) -> None:
    options = pycomm.Options(algorithm="ring" if rank == 0 else "direct")
    join(rank, world_size, store=FileStore(place, world_size), pg_options=options)


@pytest.mark.needs_native
def test_settings_that_must_be_the_same(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    results = run_ranks(2, differing_algorithms, args=(place,), init="none", check=False)
    assert_all_fail(results, "CONFIG_MISMATCH", "algorithm=ring", "algorithm=direct")


# The network of this host


@pytest.mark.needs_native
def test_an_interface_that_does_not_exist() -> None:
    env = {"PYCOMM_SOCKET_IFNAME": "nosuch0"}
    results = run_ranks(2, join_by_env, args=(1,), env=env, check=False)
    existing = [name for _, name in socket.if_nameindex()]
    assert_all_fail(results, "NO_INTERFACE", "nosuch0", "PYCOMM_SOCKET_IFNAME", "lo")
    assert any(name in results.errors()[0].text for name in existing)


@pytest.mark.needs_native
def test_an_exhausted_port_range() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = {"PYCOMM_PORT_RANGE": f"{port}-{port}", "PYCOMM_SOCKET_FAMILY": "ipv4"}
        # Ranks of one host need no port, nor does one alone.
        assert run_ranks(1, join_by_env, args=(1,), env=env).values() == [1000.0]
        assert run_ranks(2, join_by_env, args=(2,), env=env).values() == [1000.0, 1000.0]
        env["PYCOMM_TRANSPORT"] = "tcp"
        results = run_ranks(2, join_by_env, args=(1,), env=env, check=False)
    assert_all_fail(results, "PORTS_EXHAUSTED", str(port))


@pytest.mark.needs_native
@pytest.mark.alone  # another test's port may be in the range
def test_a_port_range_that_is_large_enough() -> None:
    from ranks import free_port_range

    first, last = free_port_range(2)
    env = {
        "PYCOMM_PORT_RANGE": f"{first}-{last}",
        "PYCOMM_SOCKET_IFNAME": "lo",
        "PYCOMM_TRANSPORT": "tcp",
    }
    assert run_ranks(2, join_by_env, args=(2,), env=env).values() == [1000.0, 1000.0]


# Tensors


def raised(call: Callable[[], Any]) -> tuple[str, tuple[str, ...], str]:
    try:
        call()
    except Exception as error:
        return (
            str(getattr(error, "code", None)),
            tuple(cls.__name__ for cls in type(error).__mro__),
            str(error),
        )
    return ("nothing", (), "")


def bad_tensors(rank: int, world_size: int) -> dict[str, tuple[str, tuple[str, ...], str]]:
    several = torch.ones(3).expand(4, 3)  # each element is written four times
    sparse = torch.eye(3).to_sparse()
    backend = pycomm._group.creation.native_backend()
    found = {
        "all_reduce, overlapping": raised(lambda: dist.all_reduce(several)),
        "broadcast, overlapping": raised(lambda: dist.broadcast(several, 0)),
        "broadcast, sparse": raised(lambda: dist.broadcast(sparse, 0)),
        # Not through dist: torch answers for this device by itself and asks no backend.
        "all_reduce, meta": raised(lambda: backend.allreduce([torch.ones(3, device="meta")])),
        "all_reduce, quantized": raised(
            lambda: dist.all_reduce(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
        ),
        "all_reduce, average of integers": raised(
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), op=dist.ReduceOp.AVG)
        ),
        "all_reduce, bits of floats": raised(
            lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)
        ),
        "all_gather_into_tensor, too small": raised(
            lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(3))
        ),
        "broadcast, no such root": raised(lambda: dist.broadcast(torch.ones(3), world_size)),
    }
    # A call that was refused before it left has done the group no harm.
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(world_size)] * 3
    return found


@pytest.mark.needs_native
def test_tensors_that_cannot_be_sent() -> None:
    wanted = {
        "all_reduce, overlapping": "share memory",
        "broadcast, overlapping": "share memory",
        "broadcast, sparse": "sparse",
        "all_reduce, meta": "meta",
        "all_reduce, quantized": "quantized",
        "all_reduce, average of integers": "AVG of int32",
        "all_reduce, bits of floats": "BAND of float32",
        "all_gather_into_tensor, too small": "3",
        "broadcast, no such root": "",
    }
    for found in run_ranks(2, bad_tensors).values():
        assert set(found) == set(wanted)
        for case, text in wanted.items():
            code, _, said = found[case]
            assert code != "nothing", f"{case}: nothing was raised"
            assert text.lower() in said.lower(), f"{case}: {said}"


def mismatched(rank: int, world_size: int, kind: str) -> None:
    if kind == "numel":
        dist.all_reduce(torch.ones(10 + rank))
    elif kind == "dtype":
        dist.all_reduce(torch.ones(10, dtype=torch.int32 if rank else torch.float32))
    elif kind == "op":
        dist.all_reduce(torch.ones(10), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    elif kind == "root":
        dist.broadcast(torch.ones(10), rank)
    else:
        tensor = torch.ones(10)
        dist.broadcast(tensor, 0) if rank else dist.all_reduce(tensor)
    # A root may end a broadcast before it can know; the error sticks and comes here.
    dist.barrier()


@pytest.mark.needs_native
@pytest.mark.parametrize("kind", ["numel", "dtype", "op", "root", "collective"])
def test_ranks_that_call_different_things(kind: str) -> None:
    results = run_ranks(2, mismatched, args=(kind,), check=False)
    assert_all_fail(results, "COLLECTIVE_MISMATCH")
