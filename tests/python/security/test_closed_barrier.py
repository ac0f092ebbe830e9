"""pycomm.monitored_barrier with a secret: nobody without it can let ranks pass, or blame one."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

import pycomm
from pycomm._group import secrets
from pycomm._group.creation import native_backend
from pycomm._native import loader

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]

LONG = timedelta(seconds=60)


def meet_a_forger(rank: int, world_size: int, what: str, forged: str) -> str:
    """Rank 1 - rank comes; the other one writes what somebody without the secret could."""
    pycomm.monitored_barrier(timeout=LONG)
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    run = loader.native.group_run(native_backend())
    forger = 0 if what == "verdict" else 1
    text = ""
    if rank == forger:
        before, key = (
            f"pycomm/monitored_barrier/{run}/{number}/{what}" + ("" if what == "verdict" else "/1")
            for number in (1, 2)
        )
        # What a rank wrote in the first round, for another key: its seal does not fit.
        store.set(key, store.get(before).decode() if forged == "of another round" else forged)
    else:
        with pytest.raises(pycomm.errors.PycommError) as caught:
            pycomm.monitored_barrier(timeout=LONG)
        text = f"{caught.value.code} {caught.value}"
    dist.barrier()  # the group has not failed
    return text


@pytest.mark.parametrize(
    ("what", "forged", "code"),
    [
        ("came", "came", "CONFIG_MISMATCH"),
        ("came", "of another round", "PROTOCOL_VIOLATION"),
        ("verdict", "passed", "CONFIG_MISMATCH"),
        ("verdict", "1", "CONFIG_MISMATCH"),
        ("verdict", "of another round", "PROTOCOL_VIOLATION"),
    ],
)
def test_what_has_no_seal_of_the_job_is_an_error(
    tmp_path: Path, what: str, forged: str, code: str
) -> None:
    secrets.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET": None, "PYCOMM_SECRET_FILE": str(tmp_path / "secret")}
    texts = run_ranks(2, meet_a_forger, args=(what, forged), env=env).values()
    caught = texts[1] if what == "verdict" else texts[0]
    assert caught.startswith(code), caught
    assert "pycomm/monitored_barrier/" in caught and f"/2/{what}" in caught, caught


def meet_a_forger_of_three(rank: int, world_size: int) -> tuple[float, str]:
    """Rank 2 comes; what rank 1 writes has no seal."""
    pycomm.monitored_barrier(timeout=LONG)
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    run = loader.native.group_run(native_backend())
    begin, text = time.monotonic(), ""
    if rank == 1:
        store.set(f"pycomm/monitored_barrier/{run}/2/came/1", "came")
    else:
        with pytest.raises(pycomm.errors.PycommError) as caught:
            pycomm.monitored_barrier(timeout=LONG)
        text = f"{caught.value.code} {caught.value}"
    took = time.monotonic() - begin
    dist.barrier()
    return took, text


def test_the_other_ranks_hear_of_it_at_once(tmp_path: Path) -> None:
    secrets.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET": None, "PYCOMM_SECRET_FILE": str(tmp_path / "secret")}
    took, text = run_ranks(3, meet_a_forger_of_three, env=env).values()[2]
    assert text.startswith("PROTOCOL_VIOLATION") and "from rank 1" in text
    assert took < LONG.total_seconds() / 2


def replay_between_groups(rank: int, world_size: int) -> str:
    """The seal of one group's barrier is not valid in another's."""
    world = dist.group.WORLD
    other = dist.new_group([0, 1])
    pycomm.monitored_barrier(world, timeout=LONG)
    native = loader.native
    texts = []
    for group, number in ((world, 1), (other, 1)):
        run = native.group_run(native_backend(group))
        texts.append(f"pycomm/monitored_barrier/{run}/{number}/came/1")
    text = ""
    if rank == 1:
        stored = dist.distributed_c10d._get_process_group_store(world).get(texts[0]).decode()
        dist.distributed_c10d._get_process_group_store(other).set(texts[1], stored)
    else:
        with pytest.raises(pycomm.errors.PycommError) as caught:
            pycomm.monitored_barrier(other, timeout=LONG)
        text = caught.value.code
    dist.barrier()
    return text


def test_a_seal_of_another_group_does_not_fit(tmp_path: Path) -> None:
    secrets.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET": None, "PYCOMM_SECRET_FILE": str(tmp_path / "secret")}
    assert run_ranks(2, replay_between_groups, env=env).values()[0] == "PROTOCOL_VIOLATION"


def change_the_secret(rank: int, world_size: int, path: str) -> None:
    pycomm.monitored_barrier(timeout=LONG)
    dist.barrier()
    if rank == 1:
        Path(path).unlink()
        secrets.generate_file(path)
    dist.barrier()
    pycomm.monitored_barrier(timeout=LONG)


def test_a_group_keeps_the_secret_that_it_was_made_with(tmp_path: Path) -> None:
    secrets.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET": None, "PYCOMM_SECRET_FILE": str(tmp_path / "secret")}
    run_ranks(2, change_the_secret, args=(str(tmp_path / "secret"),), env=env)
