"""Groups with a secret: which one is taken, who is refused and how, and that it never shows."""

from __future__ import annotations

import base64
import contextlib
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from command import run_pycomm
from ranks import run_python, run_ranks

import pycomm
from pycomm._group import secrets
from pycomm._group.creation import flight_record, native_backend
from pycomm._metrics import writer
from pycomm._native import loader

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

Environment = Callable[[int], dict[str, str | None]]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three secrets."""
    paths = [tmp_path / f"secret{i}" for i in range(3)]
    for path in paths:
        secrets.generate_file(str(path))
    return paths


def _key_id(path: Path) -> str:
    return secrets.read_file(str(path))[0].key_id


def sum_and_say(rank: int, world_size: int) -> str:
    tensor = torch.full((300_000,), float(rank))
    dist.all_reduce(tensor)
    assert float(tensor[-1]) == world_size * (world_size - 1) / 2
    return str(loader.native.describe_backend(native_backend()))


def train(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 200, generator=generator)).square().mean().backward()
        optimizer.step()
    return [float(parameter.sum()) for parameter in model.parameters()]


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_ranks_train_as_without_a_secret(files: list[Path], transport: str) -> None:
    plain = run_ranks(2, train, env={"PYCOMM_TRANSPORT": transport, "PYCOMM_SECRET": None})
    closed = run_ranks(
        2, train, env={"PYCOMM_TRANSPORT": transport, "PYCOMM_SECRET_FILE": str(files[0])}
    )
    assert closed.values() == plain.values()


def test_the_file_in_the_home_folder_is_used(tmp_path: Path) -> None:
    path = tmp_path / ".config" / "pycomm" / "secret"
    path.parent.mkdir(parents=True)
    secrets.generate_file(str(path))
    env = {"HOME": str(tmp_path), "PYCOMM_SECRET": None}
    for transport, ending in (("auto", "Unix sockets, with"), ("tcp", "TLS with")):
        env["PYCOMM_TRANSPORT"] = transport
        for said in run_ranks(2, sum_and_say, env=env).values():
            assert said.endswith(f"{ending} the secret of key id {_key_id(path)}")


def test_a_job_can_be_without_the_secret_in_the_home_folder(tmp_path: Path) -> None:
    path = tmp_path / ".config" / "pycomm" / "secret"
    path.parent.mkdir(parents=True)
    secrets.generate_file(str(path))
    env = {"HOME": str(tmp_path), "PYCOMM_SECRET": None, "PYCOMM_SECRET_FILE": "none"}
    for transport in ("auto", "tcp"):
        env["PYCOMM_TRANSPORT"] = transport
        for said in run_ranks(2, sum_and_say, env=env).values():
            assert "secret" not in said and "TLS" not in said
    with pytest.raises(ValueError, match="PYCOMM_SECRET_FILE=none: this job has no secret"):
        secrets.read({"PYCOMM_SECRET_FILE": "none"})


def join(rank: int, world_size: int) -> dict[str, Any]:
    """For ranks that must join by themselves to see how that ends."""
    try:
        dist.init_process_group(
            "pycomm",
            init_method=os.environ["MEETING"],
            rank=rank,
            world_size=world_size,
        )
    except (ValueError, pycomm.errors.PycommError) as error:
        return {"type": type(error).__name__, "text": str(error)}
    dist.destroy_process_group()
    return {"type": "", "text": ""}


def _met(tmp_path: Path, env: Environment, *, torchrun: bool = False) -> list[dict[str, Any]]:
    meeting: dict[str, str | None] = {"MEETING": f"file://{tmp_path}/store"}
    if torchrun:  # its agent keeps the store for the ranks of every restart
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        meeting = {
            "MEETING": f"tcp://127.0.0.1:{agent.port}",
            "MASTER_PORT": str(agent.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    return run_ranks(
        2, join, init="none", backend=None, env=lambda rank: meeting | env(rank)
    ).values()


by_launcher = pytest.mark.parametrize("torchrun", [False, True], ids=["by hand", "torchrun"])


@by_launcher
@pytest.mark.parametrize("without", [rings.nightly(0), 1])
def test_a_rank_without_the_secret_is_named(
    files: list[Path], tmp_path: Path, without: int, torchrun: bool
) -> None:
    met = _met(
        tmp_path,
        lambda rank: {
            "PYCOMM_SECRET": None,
            "PYCOMM_SECRET_FILE": None if rank == without else str(files[0]),
        },
        torchrun=torchrun,
    )
    for one in met:
        assert one["type"] == "ConfigMismatchError", one
        assert _key_id(files[0]) in one["text"]
        assert "give every rank the same secret file" in one["text"]
    assert f"rank {without} has no secret" in met[1 - without]["text"]


@by_launcher
def test_another_secret_is_named(files: list[Path], tmp_path: Path, torchrun: bool) -> None:
    met = _met(tmp_path, lambda rank: {"PYCOMM_SECRET_FILE": str(files[rank])}, torchrun=torchrun)
    for rank, one in enumerate(met):
        assert f"rank {1 - rank} has a different secret" in one["text"]
        assert one["type"] == "ConfigMismatchError", one
        assert _key_id(files[0]) in one["text"] and _key_id(files[1]) in one["text"]
        assert "copy one secret file to every host" in one["text"]


def test_another_policy_is_named(files: list[Path], tmp_path: Path) -> None:
    met = _met(
        tmp_path,
        lambda rank: {
            "PYCOMM_SECRET_FILE": str(files[0]),
            "PYCOMM_SECURITY": ["auto", "require"][rank],
        },
    )
    for one in met:
        assert one["type"] == "ConfigMismatchError", one
        assert "security=auto" in one["text"] and "security=require" in one["text"]


def test_a_secret_that_is_not_to_be_used_is_an_error(files: list[Path], tmp_path: Path) -> None:
    """And so is one that cannot be read: never a group in plain."""
    wrong = [
        ({"PYCOMM_SECURITY": "off"}, f"there is a secret ({files[0]}) and PYCOMM_SECURITY=off"),
        ({"PYCOMM_SECRET_FILE": str(tmp_path / "none")}, str(tmp_path / "none")),
        ({"PYCOMM_SECRET_FILE": None, "PYCOMM_SECRET": "swordfish"}, "pycomm-secret-1:"),
    ]
    for variables, text in wrong:
        env: dict[str, str | None] = {"PYCOMM_SECRET_FILE": str(files[0])} | variables
        for one in _met(tmp_path, lambda rank, env=env: env):
            assert one["type"] in ("ValueError", "InvalidArgumentError"), one
            assert text in one["text"]
            assert "swordfish" not in one["text"]


def test_a_dangling_link_in_the_home_folder_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / ".config" / "pycomm" / "secret"
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "gone")
    home = {"HOME": str(tmp_path), "PYCOMM_SECRET": None}
    for one in _met(tmp_path, lambda rank: home):
        assert one["type"] in ("ValueError", "InvalidArgumentError"), one
        assert str(path) in one["text"]


# The end of processes


def go_without_a_word(rank: int, world_size: int) -> None:
    """The interpreter ends with a group and an operation under way."""
    sum_and_say(rank, world_size)
    dist.barrier()
    dist.all_reduce(torch.ones(3_000_000), async_op=True)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("runs", [1, rings.nightly(3)])
def test_a_process_may_end_with_its_group_open(
    files: list[Path], transport: str, runs: int
) -> None:
    """OpenSSL cleans up at the end of a process; nothing may use it after that."""
    env = {"PYCOMM_SECRET_FILE": str(files[0]), "PYCOMM_TRANSPORT": transport}
    for _ in range(runs):
        results = run_ranks(2, go_without_a_word, env=env, destroy=False, fresh=True)
        assert [one.exit_code for one in results] == [0, 0]


def fork_in_between(rank: int, world_size: int) -> int:
    """As a data loader does, with a child that lets go of its copies of everything."""
    tensor = torch.ones(3_000_000)
    work = dist.all_reduce(tensor, async_op=True)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    work.wait()
    assert float(tensor[-1]) == world_size
    sum_and_say(rank, world_size)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_harms_nobody(files: list[Path]) -> None:
    env = {"PYCOMM_SECRET_FILE": str(files[0]), "PYCOMM_TRANSPORT": "tcp"}
    assert run_ranks(2, fork_in_between, env=env, fresh=True).values() == [0, 0]


# It never shows


class Listening(dist.Store):
    """A store that remembers all that is written to it."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.written: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.written += [key.encode(), raw]
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self.inner.wait(keys) if timeout is None else self.inner.wait(keys, timeout)

    def set_timeout(self, timeout: Any) -> None:
        self.inner.set_timeout(timeout)


def show_all(rank: int, world_size: int, folder: str) -> bytes:
    """Everything that this process writes about itself."""
    store = Listening(dist.FileStore(f"{folder}/listening", world_size))
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=world_size)
    said = sum_and_say(rank, world_size)
    pickles = [pickle.dumps(pycomm.Options())]
    shown = [repr(pycomm.Options()), said, repr(os.environ.get("PYCOMM_SECURITY"))]
    shown.append(repr(flight_record()))
    shown.append(pycomm.dump_flight_record(folder).read_text())
    writer.write_now()
    (metrics,) = Path(folder).glob(f"pycomm_rank_{rank}_*.prom")
    shown.append(metrics.read_text())
    if rank == 0:
        status = run_python(["-m", "pycomm", "status", "--json"], env={"PYCOMM_SECRET": None})
        assert str(os.getpid()) in status.stdout, status
        shown.append(status.stdout + status.stderr)
        dist.barrier()
        dist.destroy_process_group()
    else:
        dist.barrier()
        try:  # and an error
            dist.all_reduce(torch.ones(1))
        except pycomm.errors.PycommError as error:
            shown.append(f"{error} {error.record!r}")
            pickles.append(pickle.dumps(error))
        assert b"PEER_LEFT" in pickles[-1]
        dist.destroy_process_group()
    return b"\n".join([*store.written, *pickles, *(text.encode() for text in shown)])


def forms_of(path: Path) -> list[bytes]:
    """As which bytes a secret could show: as it is, in base64, in hexadecimal; and halves."""
    characters = path.read_text().strip()[16:59]
    raw = base64.urlsafe_b64decode(characters + "=")
    whole = [raw, characters.encode(), raw.hex().encode(), base64.b64encode(raw)[:-1]]
    return [part for form in whole for part in (form, form[: len(form) // 2])]


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("auto", b"Unix sockets, with the secret"),
        ("tcp", b"TLS with the secret"),
    ],
)
def test_it_shows_nowhere(files: list[Path], tmp_path: Path, transport: str, said: bytes) -> None:
    env = {
        "PYCOMM_SECRET": files[0].read_text().strip(),
        "PYCOMM_DEBUG": "TRACE",
        "PYCOMM_TRANSPORT": transport,
    }
    env["PYCOMM_METRICS_DIR"] = str(tmp_path)
    results = run_ranks(2, show_all, args=(str(tmp_path),), init="none", backend=None, env=env)
    shown = b"\n".join(results.values())
    shown += "".join(one.stdout + one.stderr for one in results).encode()
    for command in (["env", "--json"], ["doctor", "--json"], ["doctor"]):
        cli = run_pycomm(command, env=env)
        assert cli.returncode == 0 and cli.stdout, cli
        shown += (cli.stdout + cli.stderr).encode()
    for there in (said, b"pycomm/", b"PEER_LEFT", b"pycomm_operations_issued_total"):
        assert there in shown
    assert shown.count(_key_id(files[0]).encode()) >= 4
    for form in forms_of(files[0]):
        assert form not in shown
