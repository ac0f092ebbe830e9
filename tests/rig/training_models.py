"""Models of random training programs: a sum of independent parts, each with something special."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, MOST_ROWS = 6, 6


class Linear(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 5, dtype=dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch.to(self.layer.weight.dtype)).tanh().double().square().mean()


class Table(nn.Module):
    """Large enough to travel encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(900, WIDTH) / 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ self.rows.t()).tanh().double().square().mean() * 10


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.phase * batch[:, :3] + 1).abs().double().square().mean()


class Laid(nn.Module):
    """A parameter whose elements lie in another order, or with holes between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        memory = torch.randn(WIDTH, 8) / 2
        self.laid = nn.Parameter(memory.t() if kind == "transposed" else memory[:, ::2].t())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ self.laid.t()).tanh().double().square().mean()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        image = batch.view(-1, 1, 2, 3).expand(-1, 2, -1, -1)
        return self.layer(image).tanh().double().square().mean()


class Scalars(nn.Module):
    """One element, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (batch * self.slope).tanh().double().mean() + self.none.sum()


class Tied(nn.Module):
    """One weight under two names, and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch).tanh()).double().square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(batch)).tanh().double().square().mean()


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for _ in range(2):
            hidden = checkpoint(self.inner, hidden, use_reentrant=self.reentrant).tanh()
        return hidden.double().square().mean()


class Looked(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 4, sparse=sparse)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.rows((batch.abs() * 10).long() % 20).tanh().double().square().mean()


class Ignored(nn.Module):
    """A shard of this rank's, of another shape on each rank, which no wrapper may touch."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.full((3 + Ignored.rank,), 1.0 + Ignored.rank))
        self.register_buffer("own", torch.full((2,), float(Ignored.rank)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.shard.mean() * batch.mean()).tanh().double()


class Beside(nn.Module):
    """A scale of the loss that the program applies itself: its gradient comes before others."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.25))

    def forward(self, loss: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
        return loss * torch.exp(-log_scale.double()) + log_scale.double()


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": Linear,
    "table": Table,
    "double": lambda: Linear(torch.float64),
    "bf16": lambda: Linear(torch.bfloat16),
    "fp16": lambda: Linear(torch.float16),
    "complex": Complex,
    "transposed": lambda: Laid("transposed"),
    "holes": lambda: Laid("holes"),
    "channels_last": Convolution,
    "scalars": Scalars,
    "tied": Tied,
    "normed": Normed,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "reentrant": lambda: Checkpointed(reentrant=True),
    "embedding": lambda: Looked(sparse=False),
    "sparse": lambda: Looked(sparse=True),
    "base": Linear,  # frozen when it is wrapped
    "ignored": Ignored,
    "beside": Beside,
    "returned": Beside,  # as a bare leaf, by forward
}
ASIDE = ("ignored", "beside", "returned")
"""No pass can do with these alone."""
SMOOTH = ("linear", "table", "double", "bf16", "transposed", "holes", "channels_last", "tied")
SMOOTH += ("checkpointed", "base", *ASIDE)
"""Of these every parameter is behind the derivative of the loss by the batch."""


class Broken(torch.autograd.Function):
    """Its backward raises. It comes last, since it stands before the first layer."""

    @staticmethod
    def forward(context: object, batch: torch.Tensor) -> torch.Tensor:
        return batch.clone()

    @staticmethod
    def backward(context: object, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("of the program's own")


class Sum(nn.Module):
    """Adds up the losses of the parts that a pass uses."""

    def __init__(self, kinds: Sequence[str], seed: int) -> None:
        super().__init__()
        self.kinds = tuple(kinds)
        torch.manual_seed(seed)
        self.parts = nn.ModuleList(PARTS[kind]() for kind in kinds)
        for index in self.which("base"):
            self.parts[index].requires_grad_(False)

    def which(self, *kinds: str) -> list[int]:
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]

    def forward(
        self,
        batch: torch.Tensor,
        without: Collection[int] = (),
        scales: Sequence[float] = (),
        breaks: bool = False,
        hidden: bool = False,
    ) -> Any:
        """The sum in float64, and the parameters of parts "returned"; ``scales`` are factors of the
        losses by part. ``hidden``: in an object, where no wrapper finds them."""
        if breaks:
            batch = Broken.apply(batch.requires_grad_())  # type: ignore[no-untyped-call]
        losses = [
            part(batch) * (scales[index] if scales else 1.0)
            for index, part in enumerate(self.parts)
            if index not in without and not isinstance(part, Beside)
        ]
        returned = [self.parts[each].log_scale for each in self.which("returned")]
        outputs = torch.stack(losses).sum(), *returned
        return SimpleNamespace(outputs=outputs) if hidden else outputs


def loss_of(
    model: nn.Module,
    net: Sum,
    batch: torch.Tensor,
    without: Collection[int],
    derived: bool = False,
    **more: Any,
) -> torch.Tensor:
    """The loss of a pass of ``model``, which is ``net`` or wraps it.

    ``derived``: of the derivative by the batch alone, as a loss of forces is.
    """
    loss: torch.Tensor
    batch = batch.clone().requires_grad_() if derived else batch
    outputs = model(batch, without, **more)
    loss, *leaves = outputs.outputs if more.get("hidden") else outputs
    if derived:
        (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
        loss = slope.double().square().sum()
    returned = dict(zip(net.which("returned"), leaves, strict=True))
    for index in net.which("beside", "returned"):
        if index not in without:
            part = net.parts[index]
            loss = part(loss, returned.get(index, part.log_scale))
    return loss


def batch_of(rank: int, number: int) -> torch.Tensor:
    """Of as many rows as a rank happens to have; BatchNorm needs two."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    rows = int(torch.randint(2, MOST_ROWS + 1, (), generator=generator))
    return torch.randn(rows, WIDTH, generator=generator)
