"""Random programs of jobs and groups: process i is not rank i, and no two have the same past.

A program is a list of steps. A job makes the default group of some processes, of which some were in
the job before and some are new; its steps make groups of some of its ranks, use them and destroy
them. Every result is compared with numpy, or with a sum by hand: losses are linear in the
parameters, so gradients are the coefficients.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from idle import check_idle
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

POOL = 5
TIMEOUT_S = 30.0
"""Also of a process that joins later, and waits until the others have done what comes before."""
_NUMEL, _LR = 700, 0.5
HOOKS = ("ours", "ordered", "ordered without a group", "top_k")
USES = ("all_reduce", "barrier", "objects", "messages", "hook", "sync_every", "local_sgd")


@dataclasses.dataclass(frozen=True)
class Step:
    """``group`` is a job's own number of a group: 0 is the default group."""

    what: str
    group: int = 0
    members: tuple[int, ...] = ()
    """Of "job": processes, in the order of their ranks. Of "new_group": ranks of the job."""
    hook: str = ""
    wrapper: int = -1
    seed: int = 0

    def __str__(self) -> str:
        if self.what == "job":
            return f"job of processes {list(self.members)}"
        if self.what == "new_group":
            return f"  group {self.group} = new_group({list(self.members)})"
        more = f" {self.hook!r}, wrapper {self.wrapper}" if self.wrapper >= 0 else ""
        return f"  {self.what}{more} in group {self.group}"


Program = tuple[Step, ...]


def random_program(seed: int) -> Program:
    """One or two jobs of 3 or 4 processes with up to nine steps each."""
    draw = random.Random(seed)
    steps: list[Step] = []
    wrappers = 0
    for _ in range(draw.choice([1, 2, 2])):
        size = draw.choice([3, 4])
        steps.append(Step("job", members=tuple(draw.sample(range(POOL), size))))
        groups = [0]  # that exist
        made: list[Step] = []  # wrappers with a hook, of these groups
        for number in range(1, draw.randint(4, 10)):
            what = draw.choice(["new_group", "new_group", "destroy", "again", "hook", *USES])
            group = draw.choice(groups)
            seed = draw.randrange(2**20)
            if what == "new_group":
                ranks = sorted(draw.sample(range(size), draw.randint(1, size)))
                steps.append(Step(what, number, tuple(ranks)))
                groups.append(number)
            elif what == "destroy":
                if group != 0:
                    steps.append(Step(what, group))
                    groups.remove(group)
                    made = [each for each in made if each.group != group]
            elif what == "again":
                if made:
                    steps.append(dataclasses.replace(draw.choice(made), what=what, seed=seed))
            elif what == "hook":
                hook = draw.choice(HOOKS)
                group = 0 if hook == "ordered without a group" else group
                steps.append(Step(what, group, hook=hook, wrapper=wrappers, seed=seed))
                made.append(steps[-1])
                wrappers += 1
            else:
                steps.append(Step(what, group, seed=seed))
    return tuple(steps)


def smaller(program: Program) -> Iterator[Program]:
    """The programs without one job, or without one step and those that need it."""
    for index, step in enumerate(program):
        end = index + 1
        while step.what == "job" and end < len(program) and program[end].what != "job":
            end += 1
        if left := _possible([*program[:index], *program[end:]]):
            yield left


def _possible(steps: list[Step]) -> Program:
    """Without the steps of groups and wrappers that are not there."""
    kept: list[Step] = []
    groups: set[int] = set()
    wrappers: set[int] = set()
    for step in steps:
        if step.what == "job":
            groups, wrappers = {0}, set()
        elif step.what == "new_group":
            groups.add(step.group)
        elif step.group not in groups or (step.what == "again" and step.wrapper not in wrappers):
            continue
        elif step.what == "hook":
            wrappers.add(step.wrapper)
        elif step.what == "destroy":
            groups.remove(step.group)
        kept.append(step)
    return tuple(kept)


class _Model(nn.Module):
    """``forward(c)`` is the sum of parameters times coefficients, so ``c`` is the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(_NUMEL)) for _ in range(3)])

    def forward(self, coefficients: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [(row * each).sum() for row, each in zip(self.rows, coefficients, strict=True)]
        ).sum()


def _values(step: Step, rank: int, turn: int = 0) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng([step.seed, rank, turn])
    return generator.integers(-60, 60, (3, _NUMEL)).astype(np.float64)


def _tensor(values: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(values).float()


def _check(found: torch.Tensor, expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=1e-5, atol=1e-5)


class _Job:
    """One process's part of a job."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.groups: dict[int, Any] = {0: None}
        self.members = {0: tuple(range(dist.get_world_size()))}
        self.wrappers: dict[int, Any] = {}

    def run(self, step: Step) -> None:
        if step.what == "new_group":
            self.groups[step.group] = dist.new_group(list(step.members))
            self.members[step.group] = step.members
        elif self.rank in self.members[step.group]:
            getattr(self, step.what)(step, self.members[step.group], self.groups[step.group])

    def destroy(self, step: Step, members: tuple[int, ...], group: Any) -> None:
        gone = [number for number, (of, _) in self.wrappers.items() if of == step.group]
        for number in gone:
            del self.wrappers[number]
        check_idle(group)
        dist.destroy_process_group(group)

    def all_reduce(self, step: Step, members: tuple[int, ...], group: Any) -> None:
        mine = torch.from_numpy(_values(step, self.rank))
        dist.all_reduce(mine, group=group)
        assert np.array_equal(mine.numpy(), sum(_values(step, rank) for rank in members))

    def barrier(self, step: Step, members: tuple[int, ...], group: Any) -> None:
        import pycomm

        pycomm.monitored_barrier(group)

    def objects(self, step: Step, members: tuple[int, ...], group: Any) -> None:
        every: list[Any] = [None] * len(members)
        dist.all_gather_object(every, {"rank": self.rank, "seed": step.seed}, group=group)
        assert every == [{"rank": rank, "seed": step.seed} for rank in members]
        last = [f"of {self.rank}"]
        dist.broadcast_object_list(last, src=members[-1], group=group)
        assert last == [f"of {members[-1]}"]

    def messages(self, step: Step, members: tuple[int, ...], group: Any) -> None:
        at = members.index(self.rank)
        after, before = members[(at + 1) % len(members)], members[at - 1]
        found = torch.empty(3, _NUMEL, dtype=torch.float64)
        sent = torch.from_numpy(_values(step, self.rank))
        calls = [dist.P2POp(dist.isend, sent, after, group, step.seed % 7)]
        calls.append(dist.P2POp(dist.irecv, found, before, group, step.seed % 7))
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        assert np.array_equal(found.numpy(), _values(step, before))

    def hook(self, step: Step, members: tuple[int, ...], group: Any) -> None:
        import pycomm

        group = group or dist.group.WORLD
        reduce = default_hooks.allreduce_hook
        cap = {"process_group": group, "bucket_cap_mb": 0.001}
        model: Any = (pycomm.DistributedDataParallel if step.hook == "ours" else TorchDDP)(
            _Model(), **cap
        )
        if step.hook == "ours":
            model.register_comm_hook(group, reduce)
        elif step.hook == "top_k":
            model.register_comm_hook(group, pycomm.comm_hooks.top_k(fraction=1.0))
        else:
            known = step.hook == "ordered"
            model.register_comm_hook(group if known else None, pycomm.comm_hooks.ordered(reduce))
        self.wrappers[step.wrapper] = (step.group, model)
        self.again(step, members, group)

    def again(self, step: Step, members: tuple[int, ...], group: Any) -> None:
        model = self.wrappers[step.wrapper][1]
        model.zero_grad()
        model(_tensor(_values(step, self.rank))).backward()
        mean = np.mean([_values(step, rank) for rank in members], axis=0)
        _check(torch.stack([row.grad for row in model.module.rows]), mean)

    def sync_every(self, step: Step, members: tuple[int, ...], group: Any) -> None:
        import pycomm
        from pycomm._group import averaging

        averaging.host_identity = lambda: f"host {self.rank % 2}"
        model = pycomm.DistributedDataParallel(_Model(), process_group=group, sync_every=2)
        for turn in range(2):
            model.zero_grad()
            model(_tensor(_values(step, self.rank, turn))).backward()
            mates = [rank for rank in members if rank % 2 == self.rank % 2]
            mean = np.mean([_values(step, rank, turn) for rank in mates], axis=0)
            _check(torch.stack([row.grad for row in model.module.rows]), mean)
            _descend(model)
        model.sync()
        _check(torch.stack(list(model.module.rows)), _trained(step, members, 2))

    def local_sgd(self, step: Step, members: tuple[int, ...], group: Any) -> None:
        import pycomm

        model = _Model()
        local = pycomm.LocalSGD(model, sync_every=2, process_group=group)
        for turn in range(2):
            model.zero_grad()
            model(_tensor(_values(step, self.rank, turn))).backward()
            _descend(model)
            assert local.step() == (turn == 1)
        _check(torch.stack(list(model.rows)), _trained(step, members, 2))


def _descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= _LR * parameter.grad


def _trained(step: Step, members: tuple[int, ...], turns: int) -> np.ndarray[Any, Any]:
    """Linear losses: steps and averages may change places."""
    every = [_values(step, rank, turn) for rank in members for turn in range(turns)]
    return -_LR * np.sum(every, axis=0) / len(members)


def run_process(process: int, count: int, port: int, name: str, program: Program) -> None:
    """The part of one process; jobs meet in the store that the parent holds."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    server = dist.TCPStore("127.0.0.1", port, timeout=timeout)  # type: ignore[attr-defined]
    job: _Job | None = None

    def end_job() -> None:
        check_idle()
        dist.destroy_process_group()

    for index, step in enumerate(program):
        if step.what == "job":
            if job is not None:
                end_job()
            job = None
            if process in step.members:
                store = dist.PrefixStore(f"{name}/{index}", server)  # type: ignore[attr-defined]
                rank = step.members.index(process)
                dist.init_process_group(
                    "pycomm", store=store, rank=rank, world_size=len(step.members), timeout=timeout
                )
                job = _Job(rank)
        elif job is not None:
            try:
                job.run(step)
            except Exception as error:
                raise AssertionError(f"rank {job.rank} in step {index}:{step}") from error
    if job is not None:
        end_job()
