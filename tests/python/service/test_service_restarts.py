"""Servers that are killed while several workers, or other servers, go on."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
import torch
from ranks import free_port
from test_service import (
    Counter,
    count,
    in_threads,
    saved_version,
    serve_command,
    wait_for_checkpoint,
)
from torch import nn, optim

from pycomm.service import ParameterClient

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]


class Pair(nn.Module):
    """Two parameters: with two servers each keeps one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.second = nn.Parameter(torch.zeros(1))


def make_pair() -> tuple[nn.Module, optim.Optimizer]:
    """For ``python -m pycomm serve``."""
    model = Pair()
    return model, optim.SGD(model.parameters(), lr=1.0)


def test_a_worker_that_died_while_the_server_was_down_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "state"
    options = ("--workers", "2", "--checkpoint", str(path), "--rejoin", "1")
    models = [Counter(), Counter()]
    every = ("--checkpoint-every", "0.05")
    with serve_command(*options, *every, listen=f"127.0.0.1:{free_port()}") as (first, address):
        clients = [
            ParameterClient(model, servers=address, worker=worker, reconnect=30.0, timeout=30.0)
            for worker, model in enumerate(models)
        ]
        in_threads(2, lambda worker: count(clients[worker], models[worker], 3) and None)
        wait_for_checkpoint(path, 3)
        first.send_signal(signal.SIGKILL)
        first.wait()
    for each in clients[1]._servers:
        each.drop()  # as if its process had died
    with serve_command(*options, listen=address) as (second, _):
        assert count(clients[0], models[0], 2) == 5
        clients[0].close()
        second.send_signal(signal.SIGTERM)  # worker 1 has not said goodbye
        output, _ = second.communicate(timeout=120)
        assert second.returncode == 0
        assert "worker 1 of the parameter service has not come back" in output
    assert saved_version(path) == 5


def test_one_of_two_servers_is_killed_and_the_other_goes_on(tmp_path: Path) -> None:
    paths = [tmp_path / "0", tmp_path / "1"]
    options = [("--workers", "1", "--checkpoint", str(each)) for each in paths]
    make = f"{__file__}:make_pair"
    model = Pair()

    def pushes(client: ParameterClient, number: int) -> tuple[float, float]:
        for _ in range(number):
            model.first.grad, model.second.grad = torch.ones(1), torch.ones(1)
            client.push()
        client.pull()
        return -float(model.first.detach()), -float(model.second.detach())

    with contextlib.ExitStack() as stack:
        stays, one = stack.enter_context(serve_command(*options[0], make=make))
        address = f"127.0.0.1:{free_port()}"
        every = ("--checkpoint-every", "0.05")
        with serve_command(*options[1], *every, make=make, listen=address) as (_, two):
            client = ParameterClient(model, servers=[one, two], worker=0, reconnect=30.0)
            assert pushes(client, 4) == (4, 4)
            wait_for_checkpoint(paths[1], 4)
        with serve_command(*options[1], make=make, listen=two) as (second, _):
            assert pushes(client, 3) == (7, 7)
            second.send_signal(signal.SIGKILL)
            second.wait()
        third, _ = stack.enter_context(serve_command(*options[1], make=make, listen=two))
        assert pushes(client, 1) == (8, 5)  # 3 of the second's are lost, and none of the first's
        client.close()
        for process, lost in ((stays, 0), (third, 3)):
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            assert f"; {lost} pushes lost" in output
