"""pycomm.monitored_barrier with a secret: nobody without it can let ranks pass, or blame one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

import pycomm
from pycomm import _extension, _secret
from pycomm._backend import native_backend

pytestmark = pytest.mark.needs_native

LONG = timedelta(seconds=60)


def meet_a_forger(rank: int, world_size: int, what: str, forged: str) -> str:
    """Rank 1 - rank comes; the other one writes what somebody without the secret could."""
    pycomm.monitored_barrier(timeout=LONG)
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    run = _extension.native.group_run(native_backend())
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
    _secret.generate_file(str(tmp_path / "secret"))
    env = {"PYCOMM_SECRET": None, "PYCOMM_SECRET_FILE": str(tmp_path / "secret")}
    texts = run_ranks(2, meet_a_forger, args=(what, forged), env=env).values()
    caught = texts[1] if what == "verdict" else texts[0]
    assert caught.startswith(code), caught
    assert "pycomm/monitored_barrier/" in caught and f"/2/{what}" in caught, caught
