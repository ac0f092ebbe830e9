"""LocalSGD, DiLoCo, accumulate and sync_every beside one process that does the same equations."""

from __future__ import annotations

import copy
from typing import Any

import ddp_models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

STEPS, EVERY = 9, 3


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(ddp_models.batch_of("mlp", rank, step)).square().mean()
    return loss


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def simulate(world_size: int, lr: float, momentum: float) -> list[list[torch.Tensor]]:
    """The parameters after each sync: the equations of docs/fewer-syncs.md, in float64 by hand."""
    workers = [ddp_models.make("mlp") for _ in range(world_size)]
    optimizers = [inner(worker) for worker in workers]
    anchor = [parameter.detach().double() for parameter in workers[0].parameters()]
    velocity = [torch.zeros_like(each) for each in anchor]
    seen = []
    for step in range(STEPS):
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            train_step(worker, optimizer, rank, step)
        if step % EVERY != EVERY - 1:
            continue
        for index, start in enumerate(anchor):
            ends = [list(worker.parameters())[index].detach().double() for worker in workers]
            moved = torch.stack([start - end for end in ends]).mean(dim=0)
            velocity[index] = momentum * velocity[index] + moved
            ahead = moved + momentum * velocity[index] if momentum else moved
            anchor[index] = start - lr * ahead
            for worker in workers:
                list(worker.parameters())[index].data.copy_(anchor[index])
        seen.append([each.clone() for each in anchor])
    return seen


def assert_follows(seen: list[list[torch.Tensor]], model: nn.Module, sync: int) -> None:
    for mine, expected in zip(model.parameters(), seen[sync], strict=True):
        torch.testing.assert_close(mine.detach().double(), expected, rtol=1e-4, atol=1e-6)


def averaging(rank: int, world_size: int) -> list[Any]:
    import pycomm

    found = []
    for which, (lr, momentum) in (("local", (1.0, 0.0)), ("diloco", (0.7, 0.9))):
        expected = simulate(world_size, lr, momentum)
        torch.manual_seed(rank)  # rank 0's parameters are what counts
        model = ddp_models.make("mlp") if rank == 0 else ddp_models.make("mlp", seed=7)
        optimizer = inner(model)
        make = pycomm.LocalSGD if which == "local" else pycomm.DiLoCo
        local = make(model, sync_every=EVERY)
        for step in range(STEPS):
            train_step(model, optimizer, rank, step)
            synced = local.step()
            assert synced == (step % EVERY == EVERY - 1)
            if synced:
                assert_follows(expected, model, step // EVERY)
            if step == 4:  # in between: all of it goes through a checkpoint
                states = [copy.deepcopy(x.state_dict()) for x in (model, optimizer, local)]
                model = ddp_models.make("mlp", seed=9)
                optimizer = inner(model)
                local = make(model, sync_every=EVERY)
                for each, state in zip((model, optimizer, local), states, strict=True):
                    each.load_state_dict(state)
        stats = local.stats()
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        ring = 2 * (world_size - 1) * nbytes // world_size
        assert (stats.steps, stats.syncs) == (STEPS - 5, 2)
        assert (stats.sent_nbytes, stats.saved_nbytes) == (2 * ring, 2 * ring)
        found.append(round(sum(float(p.detach().sum()) for p in model.parameters()), 4))
    return found


def accumulated(rank: int, world_size: int) -> None:
    import pycomm

    ours = pycomm.DistributedDataParallel(ddp_models.make("mlp"), accumulate=3)
    theirs = TorchDDP(ddp_models.make("mlp"))
    for step in range(2):
        for model in (ours, theirs):
            model.zero_grad()
        for part in range(3):
            loss_of(ours, rank, 3 * step + part).backward()
            assert ours.communication_state_dict()["accumulated"] == (part + 1) % 3
            theirs.require_backward_grad_sync = part == 2
            loss_of(theirs, rank, 3 * step + part).backward()
        for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine.grad, reference.grad)
    stats = ours.stats()
    assert (stats.passes, stats.steps) == (6, 2)
    assert stats.saved_nbytes == 2 * stats.sent_nbytes
    ours.load_communication_state_dict({"accumulated": 2, "unsynced": 0})
    loss_of(ours, rank, 0).backward()
    assert ours.stats().steps == 3
    with pytest.raises(ValueError, match="accumulated is less than accumulate"):
        ours.load_communication_state_dict({"accumulated": 3, "unsynced": 0})


def failed_pass(rank: int, world_size: int) -> None:
    import pycomm

    def broken() -> Any:
        raise RuntimeError("broken on purpose")

    ours = pycomm.DistributedDataParallel(ddp_models.make("mlp"))
    ours.register_comm_hook(None, lambda state, bucket: broken())
    with pytest.raises(RuntimeError, match="broken on purpose"):
        loss_of(ours, rank, 0).backward()
    ours.load_communication_state_dict(ours.communication_state_dict())  # what a handler saves


def two_hosts(rank: int, world_size: int) -> None:
    """Ranks 0, 1 and 2, 3 as two hosts: gradients are shared in each, parameters every 3 steps."""
    import pycomm
    from pycomm._group import averaging as _averaging

    _averaging.host_identity = lambda: f"host {rank // 2}"
    ours = pycomm.DistributedDataParallel(ddp_models.make("mlp"), sync_every=EVERY)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9)
    hosts = [ddp_models.make("mlp") for _ in range(2)]
    theirs = [torch.optim.SGD(host.parameters(), lr=0.05, momentum=0.9) for host in hosts]
    for step in range(STEPS):
        train_step(ours, optimizer, rank, step)
        if step > 0 and step % EVERY == 0:
            with torch.no_grad():
                for pair in zip(*(host.parameters() for host in hosts), strict=True):
                    mean = torch.stack(list(pair)).mean(dim=0)
                    for parameter in pair:
                        parameter.copy_(mean)
        for number, (host, host_optimizer) in enumerate(zip(hosts, theirs, strict=True)):
            host_optimizer.zero_grad()
            losses = [loss_of(host, member, step) for member in (2 * number, 2 * number + 1)]
            torch.stack(losses).mean().backward()
            host_optimizer.step()
        for mine, reference in zip(ours.parameters(), hosts[rank // 2].parameters(), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)
    assert (ours.stats().syncs, ours.communication_state_dict()["unsynced"]) == (2, 3)
    ours.sync()
    for parameter in ours.parameters():
        gathered = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(gathered, parameter.detach())
        assert all(torch.equal(gathered[0], other) for other in gathered)
    stats = ours.stats()
    assert (stats.syncs, stats.saved_nbytes) == (3, 2 * stats.sent_nbytes)  # 9 steps, 3 syncs
    with pytest.raises(NotImplementedError, match=r"join\(\) cannot follow"):
        ours.join()


def hooked(rank: int, world_size: int) -> None:
    """Two hosts whose buckets a hook averages; a layer is frozen after it was trained."""
    import pycomm
    from pycomm._group import averaging as _averaging

    _averaging.host_identity = lambda: f"host {rank // 2}"
    ours = pycomm.DistributedDataParallel(ddp_models.make("mlp"), sync_every=100)

    def average(state: Any, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer().div_(2), group=state, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    average.__annotations__.clear()  # torch compares them, and here they are strings
    ours.register_comm_hook(ours.process_group, average)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    for step in range(2):
        train_step(ours, optimizer, rank, step)
    next(ours.parameters()).requires_grad_(False)
    before = [each.detach().double() for each in ours.parameters()]
    for each in before:
        dist.all_reduce(each)
    ours.sync()
    for parameter, total in zip(ours.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach().double(), total / 4, rtol=1e-6, atol=1e-8)


def due_in_backward(rank: int, world_size: int) -> list[str]:
    """With a reentrant checkpoint, whose first forward is none for torch; or of two forwards."""
    import pycomm
    from pycomm._group import averaging as _averaging

    _averaging.host_identity = lambda: f"host {rank}"
    ours = pycomm.DistributedDataParallel(ddp_models.make("mlp"), sync_every=2)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)

    def step(number: int) -> None:
        optimizer.zero_grad()
        batch = ddp_models.batch_of("mlp", rank, number).requires_grad_()
        checkpoint(ours, batch, use_reentrant=True).square().mean().backward()
        optimizer.step()

    for number in range(2):
        step(number)
    with pytest.raises(pycomm.errors.UnsupportedError) as raised:
        step(2)
    ours.sync()
    step(3)
    assert (ours.stats().steps, ours.stats().syncs) == (3, 1)
    batch = ddp_models.batch_of("mlp", rank, 4)
    losses = [checkpoint(ours, batch, use_reentrant=False).square().mean() for _ in range(2)]
    losses[0].backward()
    with pytest.raises(pycomm.errors.UnsupportedError) as again:
        losses[1].backward()
    return [str(each.value) for each in (raised, again)]


def other_rounds(rank: int, world_size: int) -> list[str]:
    import pycomm

    texts = []
    for kind in (pycomm.LocalSGD, pycomm.DiLoCo):
        with pytest.raises(pycomm.errors.ConfigMismatchError) as caught:
            kind(nn.Linear(2, 2), sync_every=4 + rank)
        texts.append(str(caught.value))
    return texts


def in_turn(rank: int, world_size: int, names: list[str]) -> list[Any]:
    return [globals()[name](rank, world_size) for name in names]


def run(world_size: int, names: list[str]) -> Any:
    return ranks.run_ranks(
        world_size, in_turn, args=(names,), timeout_s=200, preload=ranks.TORCH_DDP
    ).values()


def test_fewer_reductions_are_those_of_one_process() -> None:
    first, second = run(2, ["averaging", "accumulated"])
    assert first == second


def test_a_pass_that_fails_leaves_a_state_that_can_be_loaded() -> None:
    run(2, ["failed_pass"])


def test_a_round_of_another_length_is_an_error_on_all_ranks() -> None:
    first, second = run(2, ["other_rounds"])
    assert first == second
    assert all("option 'sync_every' is 4 on rank 0 and 5 on rank 1" in text for text in first[0])


def test_hosts_share_gradients_and_meet_every_few_steps() -> None:
    run(4, ["two_hosts"])


def test_a_sync_averages_what_buckets_with_a_hook_have_trained() -> None:
    run(4, ["hooked"])


def test_a_sync_that_is_due_within_backward_is_an_error() -> None:
    for (texts,) in run(2, ["due_in_backward"]):
        for text in texts:
            assert "model.sync()" in text and "several forward passes" in text


def test_importing_pycomm_imports_no_compiler() -> None:
    """It takes about as long as torch, in every rank of every program."""
    script = "import sys, pycomm.ddp, pycomm.comm_hooks; print('torch._dynamo' in sys.modules)"
    done = ranks.run_python(["-c", script])
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
