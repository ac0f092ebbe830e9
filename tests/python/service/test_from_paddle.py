"""docs/parameter-service.md, from Paddle's DistributeTranspiler: two servers, with and without
``sync_mode``."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import read

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]
PAGE = "docs/parameter-service.md"
STEPS = 120


def section() -> str:
    return read(PAGE).partition("## From Paddle's DistributeTranspiler")[2]


def batches_of(worker: int) -> list[Any]:
    generator = torch.Generator().manual_seed(worker)
    inputs = torch.randn(STEPS, 4, 8, generator=generator)
    return [(each, each.sum(1, keepdim=True)) for each in inputs]


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """As many processes of the page's command as its "before" has, each in its own folder."""
    (before,) = re.findall(r"^```python before\n(.*?)^```$", section(), re.M | re.S)
    (pservers,) = re.findall(r'pservers="(.*?)", trainers=2', before)
    (made,) = re.findall(r"^```python file=train.py\n(.*?)^```$", read(PAGE), re.M | re.S)
    (command,) = re.findall(r"^python -m pycomm serve .*$", read(PAGE), re.M)
    words = command.replace("10.0.0.1:6170", "127.0.0.1:0").split()
    running = []
    try:
        for number, _ in enumerate(pservers.split(",")):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "train.py").write_text(made)
            process = subprocess.Popen(
                [sys.executable, *words[1:]], cwd=folder, stdout=subprocess.PIPE, text=True
            )
            running.append(process)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "train", raising=False)
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def train(addresses: str, staleness: int | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The page's worker twice, in threads; the model of each."""
    (source,) = re.findall(r"^```python worker\n(.*?)^```$", section(), re.M | re.S)
    arguments = f"model, worker=worker, staleness={staleness}"  # threads have one environment
    changed = source.replace("ParameterClient(model)", f"ParameterClient({arguments})")
    assert changed != source
    monkeypatch.setenv("PADDLE_PSERVERS_IP_PORT_LIST", addresses)
    code = compile(changed, PAGE, "exec")
    models: dict[int, Any] = {}

    def work(worker: int) -> None:
        names: dict[str, Any] = {"worker": worker, "batches": batches_of(worker)}
        exec(code, names)
        models[worker] = names["model"]

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert sorted(models) == [0, 1]
    return [models[0], models[1]]


def squares(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("staleness", [0, None], ids=["sync_mode", "no sync_mode"])
def test_two_servers_and_two_trainers(
    servers: list[Any], staleness: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(servers) == 2
    addresses = ",".join(each.stdout.readline().split()[-1] for each in servers)
    models = train(addresses, staleness, monkeypatch)
    alone, optimizer = importlib.import_module("train").make()  # the page's
    held_out = batches_of(7)[0]
    before = float(squares(alone, held_out).detach())
    for parts in zip(batches_of(0), batches_of(1), strict=True):
        optimizer.zero_grad()
        torch.stack([squares(alone, part) for part in parts]).mean().backward()
        optimizer.step()
    for model in models:
        if staleness == 0:
            for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
        assert float(squares(model, held_out).detach()) < before / 2
    version = STEPS if staleness == 0 else 2 * STEPS
    for server in servers:
        output, _ = server.communicate(timeout=30)
        assert server.returncode == 0
        assert re.search(rf"ended at version {version}\b.*; 0 pushes lost", output), output
