"""The backend's name: known to torch by itself, harmless to others, usable on every way in."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from ranks import (
    IMPORTED_FROM,
    LOOPBACK,
    RankResult,
    free_port,
    mark,
    run_python,
    run_ranks,
    start_ranks,
)
from time_bound import assert_within
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

import _pycomm_autoload
import pycomm
from pycomm._group.creation import store_host
from pycomm._group.native_options import launcher_life

ROOT = Path(_pycomm_autoload.__file__).resolve().parent

STATE_OF_TORCH = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import Backend
print({
    "defaults": Backend.default_device_backend_map,
    "backends": Backend.backend_list,
    "capability": Backend.backend_capability.get("pycomm"),
    "package": sorted(name for name in sys.modules if name.split(".")[0] == "pycomm"),
    "modules": len(sys.modules),
    "autoload": "_pycomm_autoload" in sys.modules,
})
"""


@pytest.fixture
def entry_points(tmp_path: Path) -> str:
    """A folder for PYTHONPATH in which pycomm counts as installed, as by pyproject."""
    project = (ROOT / "pyproject.toml").read_text()
    lines = []
    for group in ("torch.backends", "torch.distributed.backends"):
        found = re.search(
            rf'^\[project\.entry-points\."{re.escape(group)}"\]\npycomm = "(.+)"$', project, re.M
        )
        assert found, f"pyproject.toml has no entry point {group}"
        lines += [f"[{group}]", f"pycomm = {found[1]}"]
    folder = tmp_path / "torch_pycomm-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-pycomm\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return str(tmp_path)


def path(*folders: str) -> dict[str, str | None]:
    return {"PYTHONPATH": ":".join([*folders, *IMPORTED_FROM, str(ROOT)])}


def state_of_torch(env: dict[str, str | None]) -> dict[str, Any]:
    result = run_python(["-c", STATE_OF_TORCH], env=env)
    assert result.returncode == 0, result.stderr
    state: dict[str, Any] = ast.literal_eval(result.stdout)
    return state


def test_import_torch_learns_the_name_and_changes_nothing_else(entry_points: str) -> None:
    without = state_of_torch({**path(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    state = state_of_torch(path(entry_points))
    assert state["autoload"] and not without["autoload"]
    assert set(state["backends"]) - set(without["backends"]) == {"pycomm"}
    assert state["capability"] == ["cpu", "cuda"]
    assert state["defaults"] == without["defaults"]
    assert state["defaults"]["cpu"] == "gloo" and state["defaults"]["cuda"] == "nccl"
    assert state["package"] == []  # neither the package nor its extension
    # Reading entry points costs torch some modules of the standard library in any case.
    assert state["modules"] - without["modules"] < 40


def test_import_pycomm_first_is_not_circular(entry_points: str) -> None:
    script = "import pycomm, torch; print(torch.distributed.Backend.PYCOMM)"
    result = run_python(["-c", script], env=path(entry_points))
    assert (result.stdout, result.returncode) == ("pycomm\n", 0), result.stderr


def test_a_broken_package_does_not_break_import_torch(entry_points: str, tmp_path: Path) -> None:
    package = tmp_path / "pycomm"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    (tmp_path / "_pycomm_autoload.py").write_text(Path(_pycomm_autoload.__file__).read_text())
    script = "import torch; print(torch.ones(2).sum().item())"
    result = run_python(["-c", script], env=path(entry_points))
    assert (result.stdout, result.returncode) == ("2.0\n", 0), result.stderr


def test_autoload_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("not today")

    monkeypatch.setattr(_pycomm_autoload, "register", refuse)
    monkeypatch.setattr(_pycomm_autoload, "failure", None)
    _pycomm_autoload.autoload()
    assert repr(_pycomm_autoload.failure) == "AssertionError('not today')"


def test_registering_again_does_no_harm() -> None:
    before = dict(dist.Backend._plugins)
    pycomm.register()
    _pycomm_autoload.autoload()
    assert dist.Backend._plugins == before
    assert dist.Backend.backend_list.count("pycomm") == 1


NAME_OF_DEFAULT_BACKEND = """
import sys, torch.distributed as dist
if sys.argv[2] == "registered":
    import _pycomm_autoload
    _pycomm_autoload.register()
dist.init_process_group("cpu:gloo", init_method=sys.argv[1], rank=0, world_size=1)
import torch
dist.all_reduce(torch.ones(2))
print(dist.group.WORLD.name())
dist.destroy_process_group()
"""


@pytest.mark.ci
def test_any_plugin_makes_the_default_backend_of_cpu_gloo_undefined(tmp_path: Path) -> None:
    """torch's doing, for whatever plugin. If this fails, torch has mended it: tell users."""
    names = []
    for how in ("alone", "registered"):
        method = f"file://{tmp_path}/{how}"
        env: dict[str, str | None] = {**path(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        result = run_python(["-c", NAME_OF_DEFAULT_BACKEND, method, how], env=env)
        assert result.returncode == 0, result.stderr
        names.append(result.stdout.strip())
    assert names == ["gloo", "undefined"]


def test_the_stores_host_is_found_under_prefixes(tmp_path: Path) -> None:
    store = TCPStore(LOOPBACK, 0, 1, is_master=True)
    prefixed = PrefixStore("a", PrefixStore("b", store))
    assert store_host(store) == store_host(prefixed) == LOOPBACK
    assert store_host(PrefixStore("a", HashStore())) == ""
    assert store_host(FileStore(str(tmp_path / "store"), 1)) == ""


def sum_of_ranks(rank: int, world_size: int) -> float:
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    assert dist.get_backend() == "pycomm"
    return float(tensor.item())


@pytest.mark.needs_native
@pytest.mark.parametrize("init", rings.first_of(["env", "file", "tcp"]))
@pytest.mark.parametrize("imported", [True, False], ids=["imported", "autoload"])
@pytest.mark.ci
def test_init_methods(init: str, imported: bool, entry_points: str) -> None:
    results = run_ranks(
        2,
        sum_of_ranks,
        init=init,
        import_pycomm=imported,
        env={} if imported else path(entry_points),
    )
    assert results.values() == [3.0, 3.0]


def join_with_store(rank: int, world_size: int, kind: str, place: str) -> float:
    store: Store
    if kind == "tcp":
        store = TCPStore(LOOPBACK, int(place), world_size, is_master=rank == 0)
    elif kind == "file":
        store = FileStore(place, world_size)
    else:
        store = HashStore()
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=world_size)
    try:
        return sum_of_ranks(rank, world_size)
    finally:
        dist.destroy_process_group()


@pytest.mark.needs_native
@pytest.mark.parametrize(("kind", "world_size"), [("tcp", 2), ("file", 2), ("hash", 1)])
def test_a_given_store(kind: str, world_size: int, tmp_path: Path) -> None:
    place = str(free_port()) if kind == "tcp" else str(tmp_path / "store")
    results = run_ranks(world_size, join_with_store, args=(kind, place), init="none")
    assert results.values() == [world_size * (world_size + 1) / 2.0] * world_size


class Deleting(Store):  # type: ignore[misc]
    """A store in which a claim's end is deleted once it has been found, before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=60))  # of a get() for a key that is missing
        self.brought_back: list[str] = []

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> Any:
        return self.store.get(key)

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        found = bool(self.store.check(keys))
        if found and "/end/" in keys[0]:
            self.store.delete_key(keys[0])
        return found

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self.store.wait(keys, timeout)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        """As in MyPythonStore of torch's test_store.py: writes a missing key in any case."""
        if not self.store.check([key]):
            self.brought_back.append(key)
            self.store.set(key, desired)
        return self.store.compare_set(key, expected, desired)


def join_twice(rank: int, world_size: int) -> tuple[float, list[str]]:
    store = Deleting()
    for _ in range(2):
        begin = time.monotonic()
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=world_size)
        dist.destroy_process_group()
    return time.monotonic() - begin, store.brought_back


@pytest.mark.needs_native
@pytest.mark.time_bound
def test_a_key_that_is_deleted_meanwhile_is_not_waited_for_and_stays_deleted() -> None:
    ((took_s, brought_back),) = run_ranks(1, join_twice, init="none").values()
    assert_within(took_s, 20.0)
    assert brought_back == []


TORCHRUN_SCRIPT = """
import json, sys, pathlib, torch, torch.distributed as dist
dist.init_process_group("pycomm")
tensor = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(tensor)
folder = pathlib.Path(sys.argv[1])
found = [tensor.item(), "pycomm" in sys.modules]
(folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.needs_native
def test_torchrun(entry_points: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = run_python([*launcher, str(script), str(tmp_path)], env=path(entry_points))
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [3.0, True]


def make_subgroups(rank: int, world_size: int) -> list[float]:
    found = []
    for members in ([0, 1], [1, 2], [2, 0]):
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.tensor([float(rank + 1)])
            dist.all_reduce(tensor, group=group)
            found.append(tensor.item())
    return found


@pytest.mark.needs_native
def test_subgroups_and_their_options() -> None:
    results = run_ranks(3, make_subgroups, pg_options={"algorithm": "ring"})
    assert results.values() == [[3.0, 4.0], [3.0, 5.0], [5.0, 4.0]]


def make_groups_of_one(rank: int, world_size: int) -> float:
    # Both subgroups make a group called "3", each of other ranks.
    mine, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    alone, _ = dist.new_subgroups(1, group=mine)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=alone)
    return float(tensor)


@pytest.mark.needs_native
def test_groups_of_one_in_different_subgroups() -> None:
    assert list(run_ranks(2, make_groups_of_one).values()) == [0.0, 1.0]


def init_twice(rank: int, world_size: int, folder: str) -> list[float]:
    sums = []
    for attempt in range(2):
        dist.init_process_group(
            "pycomm",
            init_method=f"file://{folder}/{attempt}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
        )
        sums.append(sum_of_ranks(rank, world_size))
        dist.destroy_process_group()
    return sums


@pytest.mark.needs_native
def test_a_group_after_a_group(tmp_path: Path) -> None:
    results = run_ranks(2, init_twice, args=(str(tmp_path),), init="none")
    assert results.values() == [[3.0, 3.0]] * 2


def exit_with_the_group_open(rank: int, world_size: int) -> None:
    sum_of_ranks(rank, world_size)
    mark("done")


@pytest.mark.needs_native
def test_exit_without_destroy_is_clean() -> None:
    with start_ranks(2, exit_with_the_group_open, destroy=False, fresh=True) as running:
        results = running.collect(60).check()
    assert all("terminate" not in result.stderr for result in results)


def said(result: RankResult) -> str:
    """What a rank wrote, without what triton's bindings write when Python ends.

    CUDA builds of torch bring triton.
    """
    leaks = r"^nanobind: leaked .*?^See https://nanobind\S*\n?"
    return re.sub(leaks, "", result.stderr, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.needs_native
def test_rank_0_says_one_line_and_nobody_else_anything() -> None:
    first, second = map(said, run_ranks(2, make_two_groups))
    assert len(first.splitlines()) == 1, first
    assert re.match(r"\[rank0@[^]]+\] pycomm INFO: .*2 ranks", first)
    assert second == ""
    for level in ("WARN", "TRACE"):
        first, _ = map(said, run_ranks(2, make_two_groups, env={"PYCOMM_DEBUG": level}))
        assert bool(first) == (level == "TRACE"), first


@pytest.mark.needs_native
def test_a_group_of_one_says_that_it_has_no_connections() -> None:
    (alone,) = run_ranks(1, sum_of_ranks)
    assert said(alone).endswith("] pycomm INFO: 1 rank, without connections\n"), alone.stderr


def make_two_groups(rank: int, world_size: int) -> None:
    sum_of_ranks(rank, world_size)
    dist.barrier(group=dist.new_group([0, 1]))


def test_sys_path_is_not_needed() -> None:
    """The entry point's module stands beside the package, not in it."""
    assert "_pycomm_autoload" in sys.modules
    assert Path(_pycomm_autoload.__file__).parent == Path(str(pycomm.__file__)).parent.parent


def test_a_function_hides_no_module() -> None:
    assert callable(pycomm.flight_record)
    assert importlib.util.find_spec("pycomm.flight_record") is None
    assert pycomm.GroupRecord.__name__ == "GroupRecord"


def groups_with_inherited_options(rank: int, size: int) -> list[tuple[float, object]]:
    from pycomm._group import creation

    members = list(range(size))
    groups = [
        dist.group.WORLD,
        dist.new_group(members),
        dist.new_group(members, timeout=timedelta(seconds=5)),
        dist.new_group(members, timeout=timedelta(seconds=5), pg_options=pycomm.Options(timeout=7)),
    ]
    made = [(creation.group_timeout(each), creation.group_options(each)) for each in groups]
    return [(timeout.total_seconds(), options.timeout) for timeout, options in made]


@pytest.mark.parametrize("given", [600.0, None])
def test_a_groups_own_timeout_wins_over_inherited_options(given: float | None) -> None:
    options = {} if given is None else {"timeout": given}
    own = 20.0 if given is None else given
    later = 1800.0 if given is None else given
    found = run_ranks(
        2, groups_with_inherited_options, init_timeout_s=20.0, pg_options=options
    ).values()
    expected = [(own, given), (later, given), (5.0, given and 5.0), (7.0, 7.0)]
    assert found == [expected] * 2


def groups_come_and_go(rank: int, size: int) -> int:
    from pycomm._group import creation

    for _ in range(10):
        group = dist.new_group(list(range(size)))
        assert creation.group_timeout(group) > timedelta(0)
        dist.destroy_process_group(group)
    kept = len(creation._made_with)
    other = dist.new_group(list(range(size)), backend="gloo")
    for ask in (creation.group_timeout, creation.group_options):
        with pytest.raises(ValueError, match="is not a group of pycomm"):
            ask(other)
    return kept


def test_of_groups_that_are_gone_no_more_than_the_last_is_remembered() -> None:
    assert all(kept <= 2 for kept in run_ranks(2, groups_come_and_go, only_pycomm=False).values())


def test_each_start_of_a_job_by_torchrun_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    assert launcher_life(store) == ""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job/7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert launcher_life(PrefixStore("a", store)) == "job_7.2"
    assert launcher_life(HashStore()) == "", "that one does not outlive a start"
