"""Random trainings of two wrappers, and what their averages are in float64.

A step has a kind: how the passes of the two go together. In which order a rank's graph reaches the
two is its own, so that the last gradients come in another order on another rank.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist
from ddp_rig import wrap
from elastic_training import TOLERANCES
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Tower(nn.Module):
    """Two layers of which each is a bucket, and a middle that may be a reentrant checkpoint."""

    def __init__(self, seed: int, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(WIDTH, 300), nn.Linear(300, WIDTH)
        self._reentrant = reentrant

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self._reentrant:
            if not batch.requires_grad:
                batch = batch.detach().requires_grad_()
            return checkpoint(self._middle, batch, use_reentrant=True)
        return self._middle(batch)

    def _middle(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.first(batch)))
        return out


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one of the two wrappers is made."""

    elastic: bool = False
    weight: bool = False
    wire: str | None = None
    static: bool = False
    reentrant: bool = False

    def make(self, seed: int, group: Any) -> Any:
        import pycomm

        return wrap(
            Tower(seed, reentrant=self.reentrant),
            elastic=pycomm.Elastic() if self.elastic else None,
            weight="samples" if self.weight else None,
            wire_dtype=self.wire,
            static_graph=self.static,
            process_group=group,
            bucket_cap_mb=0.004,
        )


STEPS = (
    "joined",
    "joined",
    "chained",
    "apart",
    "one in no_sync",
    "one in eval",
    "one without a graph",
    "one dropped",
    "one deleted",
    "raised before",
    "without a batch",
)


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    kinds: tuple[Kind, Kind]
    own_groups: bool
    """Else both have the default group, and all ranks reach the two in the same order."""
    steps: tuple[tuple[str, int], ...]
    """A kind of step, and which of the two wrappers it is about."""


def random_program(seed: int) -> Program:
    draw = random.Random(seed)

    def kind() -> Kind:
        return Kind(
            elastic=draw.random() < 0.5,
            weight=draw.random() < 0.5,
            wire=draw.choice([None, None, "fp16", "int8"]),
            static=draw.random() < 0.2,
            reentrant=draw.random() < 0.3,
        )

    steps = [(draw.choice(STEPS), draw.randrange(2)) for _ in range(draw.randint(4, 9))]
    return Program(seed, (kind(), kind()), draw.random() < 0.7, tuple(steps))


@dataclasses.dataclass
class Pass:
    """What each rank has put into a wrapper's next average."""

    samples: list[int]
    grads: list[dict[str, torch.Tensor]]


class Expected(Exception):
    """Raised by a tensor's hook."""


class Training:
    """One rank's side of a program; every rank computes the oracle of all."""

    def __init__(self, rank: int, world_size: int, program: Program) -> None:
        self._rank, self._size, self._program = rank, world_size, program
        own = program.own_groups
        self._groups = [dist.new_group() if own else dist.group.WORLD for _ in range(2)]
        self._models = [self._make(which) for which in range(2)]
        self._left: list[list[Pass]] = [[], []]
        self._forwards = [0, 0]  # since they were made

    def _make(self, which: int) -> Any:
        kind = self._program.kinds[which]
        return kind.make(7 * self._program.seed + which, self._groups[which])

    def _batch(self, rank: int, step: int, which: int) -> torch.Tensor:
        weighs = any(kind.weight for kind in self._program.kinds)
        samples = 2 + (rank + step) % 3 if weighs else 3
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + which)
        return torch.randn(samples, WIDTH, generator=generator)

    def run(self) -> str:
        """Returns a complaint, or ""."""
        for number, (what, which) in enumerate(self._program.steps):
            if wrong := self._step(number, what, which):
                return f"{self._program}, step {number} ({what}, {which}): {wrong}"
        return ""

    def _losses(self, models: list[Any], rank: int, step: int, what: str, which: int) -> Any:
        """Of both models; in an order of this rank's own, unless they share a group.

        Without ``elastic`` the second forward pass is collective.
        """
        free = all(
            kind.elastic or count >= 3
            for kind, count in zip(self._program.kinds, self._forwards, strict=True)
        )
        own = self._program.own_groups and free
        order = [1, 0] if (step + (rank if own else 0)) % 2 else [0, 1]
        if what == "chained":
            out = models[which](self._batch(rank, step, which))
            out = models[1 - which](out)
            return [out.square().mean()]
        losses: list[Any] = [None, None]
        for each in order:
            batch = self._batch(rank, step, each)
            context: Any = contextlib.nullcontext()
            if each == which and what == "one in no_sync" and hasattr(models[each], "no_sync"):
                context = models[each].no_sync()
            if each == which and what == "one without a graph":
                context = torch.no_grad()
            with context:
                losses[each] = models[each](batch).square().mean()
        if what == "one without a graph":
            losses[which] = losses[which].detach()
        return losses

    def _has_batch(self, rank: int, number: int, what: str) -> bool:
        weigh = all(kind.weight for kind in self._program.kinds)
        return not (weigh and what == "without a batch" and rank == number % self._size)

    def _step(self, number: int, what: str, which: int) -> str:
        if what == "one deleted" and (self._left[which] or self._program.kinds[which].static):
            what = "joined"  # torch's wrapper of a static graph has to live until backward
        before = [copy.deepcopy(model.module) for model in self._models]
        for each in range(2):  # no variable holds a wrapper that is to be deleted
            if not self._left[each]:
                self._models[each].zero_grad(set_to_none=bool(number % 2))
        if what == "one in eval":
            self._models[which].eval()
        self._forwards = [count + 1 for count in self._forwards]
        has_batch = self._has_batch(self._rank, number, what)
        losses: Any = None
        if has_batch:
            losses = self._losses(self._models, self._rank, number, what, which)
        trained = [0, 1]
        if what in ("one without a graph", "one dropped"):
            trained = [1 - which]
        kept = None
        if what == "one deleted":
            kept = self._models[which].module
            self._models[which] = None
        if has_batch:
            self._backward(losses, number, what, which)
        else:
            self._no_batch(number)
        self._models[1 - which].train()
        self._note(before, number, what, which, trained)
        wrong = ""
        for each in trained:
            local = each == which and what in ("one in no_sync", "one deleted")
            module = kept if self._models[each] is None else self._models[each].module
            wrong = wrong or self._check(each, module, local=local)
            if not local:
                self._left[each] = []
        if kept is not None:
            self._left[which] = []
            dist.barrier()
            self._models[which] = self._make(which)
            self._forwards[which] = 0
        self._models[which].train()
        return wrong

    def _no_batch(self, number: int) -> None:
        import pycomm

        first, second = self._models if number % 2 == 0 else self._models[::-1]
        pycomm.no_batch(first, second)

    def _backward(self, losses: Any, number: int, what: str, which: int) -> None:
        if what == "apart":
            for each in (which, 1 - which):
                losses[each].backward()
            return
        if what == "one dropped":
            losses[1 - which].backward()
            return
        if what == "one without a graph":
            losses = [losses[1 - which]]
        total = sum(losses[1:], losses[0])
        if what == "raised before" and (self._rank + number) % 2:

            def fail(_: torch.Tensor) -> None:
                raise Expected

            handle = total.register_hook(fail)
            with contextlib.suppress(Expected):
                total.backward(retain_graph=True)
            handle.remove()
        total.backward()

    def _note(
        self, before: list[nn.Module], number: int, what: str, which: int, trained: list[int]
    ) -> None:
        """The gradients of all ranks in float64, of the models as they were."""
        passes = [Pass([], []), Pass([], [])]
        for rank in range(self._size):
            alone = [copy.deepcopy(module).double() for module in before]
            doubled = [lambda batch, net=net: net(batch.double()) for net in alone]
            for net in alone:
                net.zero_grad()
            losses = self._losses(doubled, rank, number, what, which)
            if what == "one without a graph":
                losses = [losses[1 - which]]
            sum(losses[1:], losses[0]).backward()
            for each in trained:
                weighs = self._program.kinds[each].weight
                count = self._batch(rank, number, each).shape[0] if weighs else 1
                count *= self._has_batch(rank, number, what)
                passes[each].samples.append(count)
                passes[each].grads.append(
                    {name: p.grad for name, p in alone[each].named_parameters()}
                )
        for each in trained:
            self._left[each].append(passes[each])

    def _check(self, which: int, module: Any, *, local: bool) -> str:
        kind, passes = self._program.kinds[which], self._left[which]
        expected: dict[str, Any] = {}
        unit = passes[-1].samples[self._rank] if passes else 1
        total = sum(sum(each.samples) for each in passes)
        for each in passes:
            for rank in range(self._size):
                if local and rank != self._rank:
                    continue
                part = len(passes) * each.samples[rank] / total
                if local:
                    part = each.samples[rank] / unit
                for name, grad in each.grads[rank].items():
                    expected[name] = expected.get(name, 0) + grad * part
        largest = max(float(each.abs().max()) for each in expected.values())
        tolerance = (2e-5 if local else 2e-5 + TOLERANCES[kind.wire]) * len(passes)
        for name, each in module.named_parameters():
            if each.grad is None:
                return f"wrapper {which}: {name} has no gradient"
            off = float((each.grad.double() - expected[name]).abs().max()) / largest
            if not off <= tolerance:
                return f"wrapper {which}: {name} is off by {off} of the largest gradient"
        return ""
