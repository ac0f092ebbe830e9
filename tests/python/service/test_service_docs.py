"""docs/parameter-service.md: its server serves, and its workers train."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import read
from ranks import free_port

pytestmark = [pytest.mark.ci, pytest.mark.needs_native]
PAGE = "docs/parameter-service.md"


def blocks(tag: str) -> list[str]:
    return re.findall(rf"^```python {tag}\n(.*?)^```$", read(PAGE), re.M | re.S)


def batches_of(worker: int) -> list[Any]:
    generator = torch.Generator().manual_seed(worker)
    inputs = torch.randn(30, 4, 8, generator=generator)
    return [(each, each.sum(1, keepdim=True)) for each in inputs]


@pytest.mark.parametrize("number", [0, 1], ids=["the first", "after Paddle"])
def test_the_pages_server_and_workers_train(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = blocks("file=train.py")
    (tmp_path / "train.py").write_text(made)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    (command,) = re.findall(r"^python -m pycomm serve .*$", read(PAGE), re.M)
    words = command.replace("10.0.0.1:6170", "127.0.0.1:0").split()
    server = subprocess.Popen(
        [sys.executable, *words[1:]], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        arguments = "servers, worker = sys.argv[1], int(sys.argv[2])\n"  # threads share them
        assert arguments in blocks("worker")[0]
        code = compile(blocks("worker")[number].replace(arguments, ""), PAGE, "exec")
        monkeypatch.setenv("PADDLE_PSERVERS_IP_PORT_LIST", address)
        losses: dict[int, float] = {}
        inputs, target = batches_of(7)[0]

        def work(worker: int) -> None:
            names: dict[str, Any] = {
                "servers": address,
                "worker": worker,
                "batches": batches_of(worker),
            }
            if number == 1:  # the variable is the process's, and these are threads
                names["__builtins__"] = __builtins__
                source = blocks("worker")[number].replace(
                    "ParameterClient(model)", "ParameterClient(model, worker=worker)"
                )
                exec(compile(source, PAGE, "exec"), names)
            else:
                exec(code, names)
            trained = names["model"](inputs)
            losses[worker] = float(torch.nn.functional.mse_loss(trained, target).detach())

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
        assert sorted(losses) == [0, 1]
        assert losses[0] == losses[1]
        fresh = importlib.import_module("train").make()[0](inputs)
        assert losses[0] < float(torch.nn.functional.mse_loss(fresh, target).detach()) / 2
        output, _ = server.communicate(timeout=120)
        assert server.returncode == 0
        assert "ended at version 30 after 30 steps; 0 pushes lost" in output
        assert (tmp_path / "server.pt").exists()
    finally:
        server.kill()
        server.communicate()


def test_the_pages_first_three_commands_print_what_it_shows() -> None:
    """Each console block is a command and its output; all three run at once, from the root."""
    if importlib.util.find_spec("sklearn") is None:  # imported, it would leave variables here
        pytest.skip("scikit-learn is not installed")
    root = Path(__file__).resolve().parents[3]
    shown = re.findall(r"^```console\n\$ python (.*)\n([^`]*)^```$", read(PAGE), re.M)
    assert len(shown) == 3
    address = f"127.0.0.1:{free_port()}"
    # The checkout before an installed package: with -m Python puts it there itself.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, *command.replace("127.0.0.1:6170", address).split()],
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for command, _ in shown
    ]
    try:
        for process, (_, expected) in zip(processes, shown, strict=True):
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0
            said = expected.replace("127.0.0.1:6170", address)
            pattern = re.sub(
                r"accuracy \d\d\\\.\d",
                r"accuracy [89]\\d\\.\\d",
                re.escape(said).replace("\\ ", " "),
            )
            assert re.fullmatch(pattern, output), (said, output)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
