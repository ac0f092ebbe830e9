"""CUDA tensors between hosts with a secret: in TLS, in plain by NCCL with a warning, or an error.

Two network namespaces are two hosts, and the device and the NCCL of tests/rig/fake_cuda are theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rings
from hosts import Host, Outcome, alpha_and_beta, run_on_both, wire
from processes import child_environment
from sniffer import not_tls, recorded

from pycomm._group import secrets

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.namespaces,
    pytest.mark.timeout(600),  # the first test compiles the library
]

_STORE_PORT = 29500
_NUMEL = 10_000
_NBYTES = 4 * _NUMEL

PROGRAM = f"""
import sys
from pathlib import Path
import numpy as np
from fake_cuda_device import Device
device = Device(Path(sys.argv[1]), nccl=True)
import torch.distributed as dist, pycomm
try:
    dist.init_process_group("pycomm", pg_options=pycomm.Options(cuda_mode=sys.argv[2]))
except (ValueError, pycomm.errors.PycommError) as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
array = np.full({_NUMEL}, float(dist.get_rank() + 1), "float32")
dist.all_reduce(device.tensor(array))
device.synchronize()
assert (array == 3).all(), array
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Host, Host]]:
    with wire(*alpha_and_beta()) as hosts:
        yield hosts


def _run(
    both: tuple[Host, Host], library: Path, folder: Path, cuda_mode: str, policy: str
) -> list[Outcome]:
    secrets.generate_file(str(folder / "secret"))
    env = child_environment(
        {
            "PYCOMM_SECRET": None,
            "PYCOMM_SECRET_FILE": str(folder / "secret"),
            "PYCOMM_SECURITY": policy,
            "PYCOMM_DEBUG": "INFO",
            "MASTER_ADDR": both[0].address,
            "MASTER_PORT": str(_STORE_PORT),
            "WORLD_SIZE": "2",
        }
    )
    command = [sys.executable, "-c", PROGRAM, str(library), cuda_mode]
    commands = [(host, command, env | {"RANK": str(rank)}) for rank, host in enumerate(both)]
    return run_on_both(commands, folder)


def test_require_refuses_nccl(both: tuple[Host, Host], fake_cuda: Path, tmp_path: Path) -> None:
    for outcome in _run(both, fake_cuda, tmp_path, "nccl", "require"):
        assert outcome.returncode == 1, outcome
        assert (
            "PYCOMM_SECURITY=require, but cuda_mode=nccl sends CUDA tensors in plain from host to "
            "host" in outcome.err
        ), outcome
        assert "cuda_mode='auto', which sends them through the host's memory and TLS" in outcome.err


def test_auto_lets_nccl_send_in_plain_and_rank_0_warns(
    both: tuple[Host, Host], fake_cuda: Path, tmp_path: Path
) -> None:
    outcomes = _run(both, fake_cuda, tmp_path, "nccl", "auto")
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    warned = "CUDA tensors travel in plain from host to host although there is a secret"
    assert [outcome.err.count(warned) for outcome in outcomes] == [1, 0], outcomes


@pytest.mark.parametrize("policy", rings.first_of(["auto", "require"]))
def test_without_a_mode_cuda_tensors_are_in_tls(
    both: tuple[Host, Host], fake_cuda: Path, tmp_path: Path, policy: str
) -> None:
    with recorded(both[0], tmp_path) as streams:
        outcomes = _run(both, fake_cuda, tmp_path, "auto", policy)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    of_ranks = [stream for stream in streams if _STORE_PORT not in stream.ports]
    assert sum(len(stream.data) for stream in of_ranks) > _NBYTES  # the tensors, both ways
    assert [not_tls(stream.data) for stream in of_ranks] == [""] * len(of_ranks)
    for outcome in outcomes:
        assert "CUDA tensors do not use NCCL, which would send them in plain" in outcome.err
        assert "WARNING" not in outcome.err
