"""What a server prints and logs when something is wrong, and what it does then."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from test_service import Counter, count, counter_server, new_server, serve_command, serving
from torch import nn, optim

from pycomm.errors import PeerDeadError
from pycomm.service import ParameterClient, ParameterServer, RefusedError
from pycomm.service.frames import Frame, Kind
from pycomm.service.notices import Attendance, RareWarnings, WaitNotices, gone

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(120)]


def attendance(expected: int, came: str = "", live: str = "", ended: str = "") -> Attendance:
    return Attendance(expected, *(frozenset(map(int, each)) for each in (came, live, ended)))


def logged(caplog: pytest.LogCaptureFixture, found: Attendance, seconds: int) -> list[str]:
    """The texts that a server logs in so many seconds of nothing new."""
    caplog.clear()
    notices = WaitNotices()
    for now in range(seconds):
        notices.log(found, float(now))
    return [record.getMessage() for record in caplog.records]


def test_a_worker_that_has_never_connected_is_named_every_10_s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = logged(caplog, attendance(2, came="1", live="1"), 35)
    assert len(texts) == 3
    assert "waits for worker 0, never connected so far (1 of 2 have)" in texts[0]
    assert logged(caplog, attendance(2), 100) == []  # nobody has come: nobody waits
    assert logged(caplog, attendance(2, "01", "01"), 100) == []


def test_a_worker_that_is_gone_is_named_once_the_others_have_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = logged(caplog, attendance(3, came="012", ended="0"), 100)
    assert len(texts) == 2
    assert "all live workers have ended; the server waits for workers 1, 2" in texts[0]
    assert "SIGTERM" in texts[0]
    assert logged(caplog, attendance(2, "01", live="0"), 100) == []
    assert logged(caplog, attendance(2, "01", ended="01"), 100) == []


def test_a_server_logs_whom_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pycomm.service.notices._NEVER_CONNECTED_S", 0.1)
    server = counter_server(workers=2, rejoin=0.3)
    with serving(server) as address:
        with ParameterClient(Counter(), servers=address, worker=1):
            wait_for_log(caplog, "waits for worker 0, never connected so far (1 of 2 have)")
            dead = ParameterClient(Counter(), servers=address, worker=0)
            for each in dead._servers:
                each.drop()
        wait_for_log(caplog, "all live workers have ended; the server waits for worker 0")
        server.stop()
    (text,) = [each for each in caplog.messages if "gone without a goodbye: " in each]
    assert text.startswith("worker 0 ")
    assert "rank" not in text.lower()


def wait_for_log(caplog: pytest.LogCaptureFixture, text: str) -> None:
    until = time.monotonic() + 30
    while text not in caplog.text:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.05)


def test_a_lost_connection_is_told_in_the_services_words() -> None:
    error = PeerDeadError(
        "Rank 1 on vm is gone", {"peer_host": "vm", "cause": "it closed its connections"}
    )
    assert gone(3, error) == (
        "worker 3 on vm of the parameter service is gone without a goodbye: "
        "PeerDeadError: it closed its connections"
    )
    assert gone(3, PeerDeadError("…", {"cause": "reported by rank 1"})).endswith(": PeerDeadError")


def test_an_exception_inside_with_is_no_goodbye() -> None:
    server = counter_server()
    with serving(server) as address:
        model = Counter()
        with (
            pytest.raises(ArithmeticError),
            ParameterClient(model, servers=address, worker=0) as client,
        ):
            assert count(client, model, 3) == 3
            raise ArithmeticError
        with pytest.raises(ValueError, match="closed"):
            client.push()
        assert not server._core.all_ended()
        with ParameterClient(model, servers=address, worker=0) as again:
            assert count(again, model, 1) == 4


def test_servers_in_another_order_are_refused() -> None:
    with (
        serving(counter_server(workers=2), counter_server(workers=2)) as addresses,
        ParameterClient(Counter(), servers=addresses, worker=0),
    ):
        turned = ",".join(reversed(addresses.split(",")))
        text = "this is server 1 in the other workers' list, and server 0 in that of worker 1"
        with pytest.raises(RefusedError, match=text):
            ParameterClient(Counter(), servers=turned, worker=1)
        ParameterClient(Counter(), servers=addresses, worker=1).close()


def step_once(path: Path) -> None:
    """A checkpoint of new_server() with one step."""
    from test_service import train

    with serving(new_server(checkpoint=path)) as address:
        train(address, 1, 1)


def test_a_checkpoint_of_another_model_names_the_first_difference(tmp_path: Path) -> None:
    step_once(tmp_path / "c.pt")
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 12))
    text = r"c\.pt does not fit: .*another model .*: first difference 2\.weight \(12, 100\) "
    with pytest.raises(ValueError, match=text + r"float32 here, 2\.weight \(10, 100\)"):
        new_server(model=other, checkpoint=tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"c\.pt does not fit: it has optimizer_class 'SGD'"):
        new_server("adamw", checkpoint=tmp_path / "c.pt")


TABLES = [(4096, 20), (20, 4096), (8192, 10), (81920, 1), (81920,), (4096, 10, 2), (4096, 21), ()]


class Table(nn.Module):
    """Its rows are cut into slices, which are flat: a slice does not know their width."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Parameter(torch.randn(shape))

    def step(self, client: ParameterClient, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.rows.grad = torch.randn(self.rows.shape, generator=generator)
        client.push()
        client.pull()


def table_servers(shape: tuple[int, ...], paths: list[Path]) -> list[ParameterServer]:
    return [new_server("adamw", Table(shape), checkpoint=path) for path in paths]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_checkpoint_of_a_table_is_for_tables_of_its_shape(servers: int, tmp_path: Path) -> None:
    paths = [tmp_path / f"{server}.pt" for server in range(servers)]
    whole: list[torch.Tensor] = []
    cut: list[torch.Tensor] = []
    for found, saved_at in ((whole, ()), (cut, (3,))):
        path_of = paths if saved_at else [tmp_path / f"w{server}.pt" for server in range(servers)]
        model = Table(TABLES[0])
        for steps in (range(3), range(3, 6)) if saved_at else (range(6),):
            with (
                serving(*table_servers(TABLES[0], path_of)) as addresses,
                ParameterClient(model, servers=addresses, worker=0) as client,
            ):
                for number in steps:
                    model.step(client, number)
                    found.append(model.rows.detach().clone())
    for step, (mine, other) in enumerate(zip(cut, whole, strict=True)):
        assert torch.equal(mine, other), f"step {step} after a restart in step 3"
    for shape in TABLES[1:]:
        there = re.escape(f"rows {shape} float32 here, rows {TABLES[0]} float32 there")
        for path in paths:
            with pytest.raises(ValueError, match=rf"{path.name} does not fit.*{there}"):
                table_servers(shape, [path])


def test_a_checkpoint_that_names_no_shapes_is_not_guessed_at(tmp_path: Path) -> None:
    """Each has them since the first release of the service; slices have none of their own."""
    path = tmp_path / "c.pt"
    with (
        serving(*table_servers(TABLES[0], [path])) as address,
        ParameterClient(model := Table(TABLES[0]), servers=address, worker=0) as client,
    ):
        model.step(client, 0)
    state = torch.load(path, weights_only=True)
    del state["parameters"]
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"c\.pt does not fit: it does not have the shapes"):
        table_servers(TABLES[0], [path])


def test_a_checkpoint_of_another_number_of_workers_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step_once(tmp_path / "c.pt")
    server = new_server(workers=3, checkpoint=tmp_path / "c.pt")
    assert "is of a parameter service with 1 workers, this one has 3" in caplog.text
    assert server.stats().steps == 1
    server.stop()
    server.serve()


def test_the_folder_of_a_checkpoint_has_to_exist(tmp_path: Path) -> None:
    text = f"the folder of the checkpoint does not exist: {tmp_path / 'no'}"
    with pytest.raises(FileNotFoundError, match=text):
        new_server(checkpoint=tmp_path / "no" / "c.pt")


def test_the_command_names_its_own_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import test_service

    from pycomm.cli import main

    monkeypatch.delenv("PADDLE_TRAINERS_NUM", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    make = f"{test_service.__file__}:make_counter"
    before = signal.getsignal(signal.SIGTERM)
    assert main(["serve", make, "--listen", "127.0.0.1:0"]) == 1
    assert "--workers is missing: pass it, or set PADDLE_TRAINERS_NUM" in capsys.readouterr().err
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "0")
    assert main(["serve", make, "--listen", "127.0.0.1:0"]) == 1
    assert "--workers is 0" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


def test_help_has_defaults_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    from pycomm.cli import main

    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("(default: 60)", "Example: pycomm serve train.py:make"):
        assert part in text


def test_sigterm_before_the_server_is_made_ends_with_0(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\n\ndef make():\n    print('making', flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "pycomm", "serve", f"{tmp_path / 'slow.py'}:make"]
    options = ["--listen", "127.0.0.1:0", "--workers", "1"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "making\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.ci
def test_a_server_that_nobody_has_joined_writes_no_checkpoint(tmp_path: Path) -> None:
    options = ("--workers", "1", "--checkpoint", str(tmp_path / "c.pt"))
    with serve_command(*options) as (process, _):
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "goes on" not in output
    assert not (tmp_path / "c.pt").exists()


def test_a_schedule_of_the_learning_rate_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The gradient is 1, so each step moves the parameter by the learning rate."""

    def served() -> ParameterServer:
        model = Counter()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        return ParameterServer(
            model,
            optimizer,
            listen="127.0.0.1:0",
            workers=1,
            checkpoint=tmp_path / "c.pt",
            scheduler=optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        )

    found = []
    for steps in (5, 3):  # a restart in between
        with serving(served()) as address:
            model = Counter()
            with ParameterClient(model, servers=address, worker=0) as client:
                for _ in range(steps):
                    found.append(count(client, model, 1))
    assert found == [1, 2, 2.5, 3, 3.25, 3.5, 3.625, 3.75]


def make_halving() -> tuple[nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler]:
    """For ``python -m pycomm serve``: with a scheduler."""
    model = Counter()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.ci
def test_the_command_steps_the_scheduler_and_reads_paddles_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "1")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    with serve_command(make=f"{__file__}:make_halving") as (process, address):
        monkeypatch.setenv("PADDLE_PSERVERS_IP_PORT_LIST", address)
        model = Counter()
        with ParameterClient(model) as client:
            assert count(client, model, 3) == 1.75
        assert process.wait(30) == 0


@pytest.mark.parametrize(("listen", "warns"), [("0.0.0.0:0", True), ("127.0.0.1:0", False)])
def test_an_address_that_others_can_reach_is_warned_of(
    listen: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = counter_server(listen=listen)
    server.stop()
    server.serve()
    assert ("without encryption" in caplog.text) is warns


@pytest.mark.ci
def test_every_line_of_a_server_names_its_host_and_no_rank() -> None:
    with serve_command("--workers", "1", listen="0.0.0.0:0") as (process, address):
        address = address.replace("0.0.0.0", "127.0.0.1")
        dead = ParameterClient(Counter(), servers=address, worker=0)
        for each in dead._servers:
            each.drop()
        lines = [process.stdout.readline(), process.stdout.readline()]
    mark = f"[{socket.gethostname()}] pycomm WARNING: "
    before, after = lines  # its first connection
    assert before.startswith(f"{mark}the parameter service listens on 0.0.0.0:"), lines
    assert after.startswith(f"{mark}worker 0 "), lines


def test_a_server_that_gets_a_wrong_frame_goes_on() -> None:
    server = counter_server()
    with serving(server) as address:
        model = Counter()
        client = ParameterClient(model, servers=address, worker=0)
        assert count(client, model, 1) == 1
        session = client._servers[0].session
        assert session is not None
        session.send(Frame(Kind.PUSH, clock=2**62 + 1))
        assert count(client, model, 1) == 2  # over a new connection
        client.close()
    assert server.stats().lost_pushes == 0


def test_rare_warnings_are_counted_by_kind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("pycomm.service.notices.time", clock)
    warnings = RareWarnings()
    for number in range(5):
        warnings.add("no hello: %d", number)
    warnings.add("no counter: %s", "abc")
    assert caplog.messages == ["no hello: 0", "no counter: abc"]
    now = 109.9
    warnings.flush()
    assert len(caplog.messages) == 2
    now = 110.0
    warnings.flush()
    assert caplog.messages[2:] == ["no hello: 4 (the last of 4 in 10 s)"]
    warnings.add("no hello: %d", 5)
    assert len(caplog.messages) == 3
    now = 200.0
    warnings.add("no counter: %s", "abc")
    assert caplog.messages[3:] == ["no hello: 5", "no counter: abc"]
