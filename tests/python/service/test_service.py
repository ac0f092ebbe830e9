"""Parameter servers with workers: beside torch's DDP, and when either goes away."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
from ranks import free_port, run_ranks
from torch import nn, optim
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm._native import loader
from pycomm.service import ParameterClient, ParameterServer, RefusedError, ServerStats

pytestmark = [pytest.mark.ci, pytest.mark.needs_native, pytest.mark.timeout(300)]

OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "sgd": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda model: optim.AdamW(model.parameters(), lr=1e-3),
}


def make_model(seed: int = 0) -> nn.Module:
    """Its first weight is large enough to be cut into slices."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 10))


def backward(model: nn.Module, generator: torch.Generator) -> None:
    inputs = torch.randn(8, 200, generator=generator)
    target = torch.randint(0, 10, (8,), generator=generator)
    nn.functional.cross_entropy(model(inputs), target).backward()


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So that a product has the same bits in a rank of torch's DDP and here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def serving(*servers: ParameterServer) -> Iterator[str]:
    """Each on a thread; all have ended afterwards. Gives their addresses."""
    failures: list[Exception] = []

    def serve(server: ParameterServer) -> None:
        try:
            server.serve()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(each,)) for each in servers]
    for thread in threads:
        thread.start()
    try:
        yield ",".join(each.address for each in servers)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a server did not end after the last goodbye"
    finally:
        for server in servers:
            server.stop()
        for thread in threads:
            thread.join(30)
    if failures:
        raise failures[0]


def new_server(
    optimizer: str = "sgd", model: nn.Module | None = None, **options: Any
) -> ParameterServer:
    model = model or make_model()
    return ParameterServer(
        model, OPTIMIZERS[optimizer](model), listen="127.0.0.1:0", **{"workers": 1, **options}
    )


def in_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a worker hangs"
    if failures:
        raise failures[0]


def train(
    addresses: str, workers: int, steps: int, staleness: int | None = 0, *, sliced: bool = True
) -> list[list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}

    def work(worker: int) -> None:
        model = make_model(seed=5 + worker)  # pull() replaces it
        generator = torch.Generator().manual_seed(worker)
        with ParameterClient(
            model, servers=addresses, worker=worker, staleness=staleness, sliced=sliced
        ) as client:
            for _ in range(steps):
                model.zero_grad()
                backward(model, generator)
                client.push()
                client.pull()
        found[worker] = parameters_of(model)

    in_threads(workers, work)
    return [found[worker] for worker in range(workers)]


def torch_ddp(rank: int, world_size: int, optimizer_name: str, steps: int) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[optimizer_name](model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(wrapped, generator)
        optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize(
    ("servers", "sliced"),
    rings.first_of([(3, True), (1, True), (3, False)]),
)
def test_two_workers_have_the_bits_of_torchs_ddp(
    optimizer: str, servers: int, sliced: bool
) -> None:
    steps = 200
    expected = run_ranks(2, torch_ddp, args=(optimizer, steps), backend="gloo").values()[0]
    with serving(*(new_server(optimizer, workers=2) for _ in range(servers))) as addresses:
        found = train(addresses, 2, steps, sliced=sliced)
    for parameters in found:
        for mine, theirs in zip(parameters, expected, strict=True):
            assert torch.equal(mine, torch.as_tensor(theirs))


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize(("workers", "servers"), [(3, 1), (4, 3)])
def test_more_workers_have_the_bits_of_adding_in_their_order(
    optimizer: str, workers: int, servers: int
) -> None:
    steps = 20
    model = make_model()
    alone = OPTIMIZERS[optimizer](model)
    generators = [torch.Generator().manual_seed(worker) for worker in range(workers)]
    for _ in range(steps):
        total: list[torch.Tensor] = []
        for generator in generators:
            model.zero_grad()
            backward(model, generator)
            gradients = [each.grad for each in model.parameters()]
            total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient / workers
        alone.step()
    with serving(*(new_server(optimizer, workers=workers) for _ in range(servers))) as addresses:
        found = train(addresses, workers, steps)
    for parameters in found:
        for mine, theirs in zip(parameters, model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_session_uses_the_transport_of_the_run() -> None:
    """So that `make tcp` runs these tests over TCP, and `make test` does not."""
    over_tcp = os.environ.get("TEST_TRANSPORT") == "tcp"
    with (
        serving(new_server()) as address,
        ParameterClient(make_model(), servers=address, worker=0) as client,
    ):
        session = client._servers[0].session
        assert session is not None
        said = loader.native.describe_backend(session._backend)
        assert ("TCP on lo" if over_tcp else "Unix sockets") in said, said


def test_a_schedule_of_the_learning_rate_is_stepped() -> None:
    def made() -> tuple[nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler]:
        model = make_model()
        optimizer = OPTIMIZERS["sgd"](model)
        return model, optimizer, optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)

    model, optimizer, scheduler = made()
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        optimizer.zero_grad()
        backward(model, generator)
        optimizer.step()
        scheduler.step()
    kept, its, schedule = made()
    server = ParameterServer(kept, its, listen="127.0.0.1:0", workers=1, scheduler=schedule)
    with serving(server) as address:
        found = train(address, 1, 6)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, model.parameters(), strict=True))


# A model whose parameter counts the pushes: each gradient is 1 and the learning rate 1.


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1))


def counter_server(
    workers: int = 1, listen: str = "127.0.0.1:0", **options: Any
) -> ParameterServer:
    model = Counter()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    return ParameterServer(model, optimizer, listen=listen, workers=workers, **options)


def make_counter() -> tuple[nn.Module, optim.Optimizer]:
    """For ``python -m pycomm serve``."""
    model = Counter()
    return model, optim.SGD(model.parameters(), lr=1.0)


def make_and_fail() -> None:
    raise RuntimeError("no data")


def make_two_models() -> tuple[nn.Module, nn.Module]:
    return Counter(), Counter()


def count(client: ParameterClient, model: Counter, pushes: int) -> float:
    """Pushes ones, and returns how many have been applied."""
    for _ in range(pushes):
        model.count.grad = torch.ones(1)
        client.push()
    client.pull()
    return -float(model.count.detach())


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_each_push_counts_once(staleness: int | None) -> None:
    server = counter_server(workers=3)
    with serving(server) as address:

        def work(worker: int) -> None:
            model = Counter()
            with ParameterClient(
                model, servers=address, worker=worker, staleness=staleness
            ) as client:
                for _ in range(30):
                    count(client, model, 1)

        in_threads(3, work)
        stats = server.stats()
    version = 30 if staleness == 0 else 90
    assert stats == ServerStats(version=version, lost_pushes=0, live_workers=0, steps=version)
    assert float(server._core._model.count.detach()) == -version


def test_a_fast_worker_waits_within_its_bound() -> None:
    server = counter_server(workers=2)
    with serving(server) as address:
        fast, slow = Counter(), Counter()
        first = ParameterClient(fast, servers=address, worker=0, staleness=2)
        second = ParameterClient(slow, servers=address, worker=1, staleness=2)
        count(first, fast, 2)  # two ahead: may go on
        fast.count.grad = torch.ones(1)
        first.push()
        answered = threading.Event()
        waiting = threading.Thread(target=lambda: (first.pull(), answered.set()))
        waiting.start()
        assert not answered.wait(0.5), "three ahead, and it did not wait"
        assert count(second, slow, 1) == 4
        assert answered.wait(30)
        waiting.join()
        assert float(fast.count.detach()) == -4
        first.close()
        second.close()


@pytest.mark.parametrize("heard", [True, False])
def test_a_push_sent_again_after_a_lost_connection_counts_once(
    heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``heard``: the server had the push, and only its acknowledgement was lost."""
    from pycomm.service import client as module
    from pycomm.service.session import Session

    server = counter_server()
    with serving(server) as address:
        model = Counter()
        client = ParameterClient(model, servers=address, worker=0, staleness=None)
        assert count(client, model, 3) == 3
        lost = []
        if heard:
            original = module._done

            def drop(session: Session, clock: int) -> Any:
                answer = original(session, clock)
                if not lost:
                    lost.append(1)
                    raise ConnectionResetError("the test lost the acknowledgement")
                return answer

            monkeypatch.setattr(module, "_done", drop)
        else:
            send = Session.send

            def cut(self: Session, *arguments: Any) -> None:
                if not lost:
                    lost.append(1)
                    self.abort()
                    raise ConnectionResetError("the test cut the connection")
                send(self, *arguments)

            monkeypatch.setattr(Session, "send", cut)
        assert count(client, model, 1) == 4
        assert lost
        client.close()
    assert server.stats().lost_pushes == 0


def test_the_others_go_on_without_a_worker_that_died(caplog: pytest.LogCaptureFixture) -> None:
    server = counter_server(workers=2, rejoin=0.5)
    with serving(server) as address:
        model, other = Counter(), Counter()
        with contextlib.ExitStack() as left:
            dead = ParameterClient(other, servers=address, worker=1)
            client = left.enter_context(ParameterClient(model, servers=address, worker=0))
            for each in dead._servers:
                each.drop()  # as if its process had died
            assert count(client, model, 5) == 5
            assert "worker 1 of the parameter service has not come back within 0.5 s" in caplog.text
            # It comes back as a new process, and is waited for again.
            with ParameterClient(other, servers=address, worker=1) as back:
                assert back.clock == 5
                both = threading.Thread(target=count, args=(back, other, 1))
                both.start()
                assert count(client, model, 1) == 6
                both.join(30)


def test_an_older_process_of_the_same_worker_is_refused() -> None:
    with serving(counter_server()) as address:
        model = Counter()
        old = ParameterClient(model, servers=address, worker=0, staleness=None)
        new = ParameterClient(model, servers=address, worker=0, staleness=None)
        with pytest.raises(RefusedError, match="another process has become worker 0"):
            count(old, model, 1)
        assert count(new, model, 1) == 1
        new.close()


def test_what_does_not_fit_is_refused_with_a_sentence() -> None:
    with serving(new_server(workers=2)) as address:
        model = make_model()
        first = ParameterClient(model, servers=address, worker=0)
        with pytest.raises(
            RefusedError, match=r"worker=2 is too large: .*2 workers, numbered from 0 to 1"
        ):
            ParameterClient(make_model(), servers=address, worker=2)
        with pytest.raises(RefusedError, match=r"worker 1 has staleness=3, and the service .*=0"):
            ParameterClient(make_model(), servers=address, worker=1, staleness=3)
        two = [address, "127.0.0.1:1"]
        with pytest.raises(RefusedError, match="worker 1 lists 2 servers, and the service has 1"):
            ParameterClient(make_model(), servers=two, worker=1)
        with pytest.raises(
            RefusedError,
            match=r": weight \(2, 2\) float32 here, 0.weight \(100, 200\) float32 there",
        ):
            ParameterClient(nn.Linear(2, 2), servers=address, worker=1)
        with ParameterClient(make_model(), servers=address, worker=1):
            first.close()
        with pytest.raises(ValueError, match="closed"):
            first.push()


def test_another_model_than_the_servers() -> None:
    server = new_server()
    with serving(server) as address:
        with pytest.raises(RefusedError, match="the server has another model"):
            ParameterClient(nn.Linear(2, 2), servers=address, worker=0)
        server.stop()


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(10, 2, sparse=True)
    server = new_server(model=nn.Embedding(10, 2))
    with (
        serving(server) as address,
        ParameterClient(model, servers=address, worker=0) as client,
    ):
        model.weight.grad = torch.ones(10, 2)
        client.push()
        model.zero_grad()
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match="gradient of 'weight' is sparse"):
            client.push()
        model.weight.grad = torch.ones(10, 2)
        client.push()
        stats = server.stats()
    assert (stats.version, stats.steps, stats.lost_pushes) == (2, 2, 0)  # the refused one: none


def test_wrong_arguments_are_refused() -> None:
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model)
    for options, text in (
        ({"workers": 0}, "workers is 0"),
        ({"listen": "x"}, "HOST:PORT"),
        ({"rejoin": 0.0}, "more than 0 seconds"),
        ({"workers": None}, "PADDLE_TRAINERS_NUM"),
    ):
        with pytest.raises(ValueError, match=text):
            ParameterServer(model, optimizer, **{"listen": "127.0.0.1:0", "workers": 1, **options})
    with pytest.raises(ValueError, match="staleness is -1"):
        ParameterClient(model, servers="127.0.0.1:1", worker=0, staleness=-1)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        ParameterClient(model, servers="127.0.0.1:1", worker=0, timeout=0)
    server = new_server()
    with pytest.raises(OSError, match=f"cannot listen on {server.address}"):
        new_server_at(server.address)
    server.stop()
    server.serve()
    for nowhere in ("192.0.2.1:0", "host.invalid:6171"):
        with pytest.raises(OSError, match=f"cannot listen on {nowhere}"):
            new_server_at(nowhere)


def new_server_at(listen: str) -> ParameterServer:
    model = make_model()
    return ParameterServer(model, OPTIMIZERS["sgd"](model), listen=listen, workers=1)


def test_no_server_is_a_connection_error_that_names_it(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    text = r"worker 0 cannot reach server 0 at 127.0.0.1:1 .* 1 s: .*refused\. Try: .*pycomm serve"
    with pytest.raises(ConnectionError, match=text):
        ParameterClient(make_model(), servers="127.0.0.1:1", worker=0, reconnect=1.0)
    assert time.monotonic() - began < 20
    assert "cannot reach server 0 at 127.0.0.1:1, and retries for 1 s" in caplog.text
    assert "C++" not in capfd.readouterr().err  # TCPStore's own trace


def test_a_strangers_nonsense_is_refused_and_the_service_goes_on() -> None:
    with serving(counter_server()) as address:
        host, port = address.split(":")
        stranger = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        for nonsense in ("", "x" * 10_000, "[1]", '{"pycomm_service": 1}', "\x00\xff"):
            number = stranger.add("pycomm_service/sessions", 1)
            stranger.set(f"pycomm_service/{number}/hello", nonsense)
            answer = stranger.get(f"pycomm_service/{number}/answer").decode()
            assert "a hello" in answer
        stranger.add("pycomm_service/sessions", 3)  # and says nothing
        model = Counter()
        with ParameterClient(model, servers=address, worker=0) as client:
            assert count(client, model, 2) == 2


def test_an_optimizer_that_fails_ends_the_server_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    class Fails(optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            if next(iter(self.param_groups[0]["params"])).item() <= -3:
                raise ArithmeticError("three is too many")

    model = Counter()
    server = ParameterServer(
        model,
        Fails(model.parameters(), lr=1.0),
        listen="127.0.0.1:0",
        workers=1,
        checkpoint=tmp_path / "state",
        checkpoint_every=0.01,
    )
    own = Counter()
    raised = pytest.raises(RuntimeError, match=r"a step of the optimizer .*three is too many")
    with contextlib.ExitStack() as stack:
        stack.enter_context(raised)
        address = stack.enter_context(serving(server))
        client = ParameterClient(own, servers=address, worker=0, reconnect=1.0)
        for version in (1, 2):
            count(client, own, 1)
            wait_for_checkpoint(tmp_path / "state", version)
        with pytest.raises(ConnectionError, match="has lost server 0"):
            count(client, own, 1)
    model = Counter()
    again = ParameterServer(
        model,
        Fails(model.parameters(), lr=1.0),
        listen="127.0.0.1:0",
        workers=1,
        checkpoint=tmp_path / "state",
    )
    assert again.stats().version == 2
    again.stop()
    again.serve()


def test_nothing_is_left_of_a_service() -> None:
    def once() -> None:
        with serving(counter_server(workers=2)) as address:

            def work(worker: int) -> None:
                model = Counter()
                with ParameterClient(model, servers=address, worker=worker) as client:
                    count(client, model, 3)

            in_threads(2, work)

    def held() -> tuple[int, int, int]:
        return (
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
        )

    once()  # what the first use loads stays
    before = held()
    for _ in range(3):
        once()
    until = time.monotonic() + 10
    while any(now > then for now, then in zip(held(), before, strict=True)) and (
        time.monotonic() < until
    ):
        time.sleep(0.05)  # destructors of sessions' threads
    assert all(after <= first for after, first in zip(held(), before, strict=True)), held()


# ---- servers as processes


@contextlib.contextmanager
def serve_command(
    *options: str, listen: str = "127.0.0.1:0", make: str = f"{__file__}:make_counter"
) -> Iterator[tuple[Any, str]]:
    """``python -m pycomm serve``: the process and its address."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pycomm",
            "serve",
            make,
            "--listen",
            listen,
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving on (\S+)\n", line)
        assert found, line + process.stdout.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("staleness", rings.first_of([0, None]))
def test_a_server_that_is_killed_and_started_again_counts_what_it_lost(
    staleness: int | None, tmp_path: Path
) -> None:
    options = ("--workers", "1", "--checkpoint", str(tmp_path / "state"))
    model = Counter()
    # A port that no connection takes while there is no server.
    listen = f"127.0.0.1:{free_port()}"
    with serve_command(*options, "--checkpoint-every", "0.05", listen=listen) as (_first, address):
        client = ParameterClient(model, servers=address, worker=0, staleness=staleness)
        assert count(client, model, 10) == 10
        wait_for_checkpoint(tmp_path / "state", 10)
    # Now one that writes none for a while.
    with serve_command(*options, listen=address) as (second, _):
        assert count(client, model, 5) == 15
        second.send_signal(signal.SIGKILL)
        second.wait()
        with serve_command(*options, listen=address) as (third, _):
            assert count(client, model, 1) == 11  # 10 of the checkpoint and this one
            client.close()
            # Not communicate(): it loses what came together with the first line that was read.
            assert third.wait(120) == 0
            output = third.stdout.read()
            # The worker's clock went on from 15; 11 steps are in the parameters.
            version = 16 if staleness == 0 else 11
            assert f"goes on from {tmp_path / 'state'}: version 10, 10 steps." in output
            assert f"ended at version {version} after 11 steps; 5 pushes lost" in output
            assert "5 pushes of worker 0 are lost" in output


def wait_for_checkpoint(path: Path, version: int) -> None:
    until = time.monotonic() + 30
    while saved_version(path) < version:
        assert time.monotonic() < until, "no checkpoint was written"
        time.sleep(0.02)


def saved_version(path: Path) -> int:
    if not path.exists():
        return 0
    return int(torch.load(path, weights_only=True)["schedule"]["version"])


@pytest.mark.parametrize("number", rings.first_of([signal.SIGTERM, signal.SIGINT]))
def test_a_signal_writes_the_checkpoint_and_ends_the_server(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    model = Counter()
    with serve_command("--workers", "1", "--checkpoint", str(path)) as (process, address):
        client = ParameterClient(model, servers=address, worker=0, reconnect=1.0)
        assert count(client, model, 7) == 7
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert "ended at version 7 after 7 steps; 0 pushes lost" in output
    assert saved_version(path) == 7
    with pytest.raises(ConnectionError, match=f"server 0 at {address}"):
        count(client, model, 1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        ("nothing", "is not FILE:FUNCTION"),
        ("/no/such.py:make", "there is no file"),
        (f"{__file__}:absent", "has no function absent"),
        (f"{__file__}:make_model", "returned Sequential; it has to return"),
        (f"{__file__}:make_and_fail", "in make_and_fail"),  # the line of the user's code
        (f"{__file__}:make_and_fail", "make_and_fail raised RuntimeError, see above"),
        (f"{__file__}:make_two_models", "returned (Counter, Counter); it has to return"),
    ],
)
def test_the_command_refuses_what_it_cannot_serve(
    make: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from pycomm.cli import main

    path = list(sys.path)
    try:
        assert main(["serve", make, "--listen", "127.0.0.1:0", "--workers", "1"]) == 1
    finally:
        sys.path[:] = path
    assert text in capsys.readouterr().err


def test_the_names_are_public() -> None:
    assert pycomm.ParameterServer is ParameterServer
    assert pycomm.ParameterClient is ParameterClient
