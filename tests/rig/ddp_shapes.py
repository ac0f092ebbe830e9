"""The parity test's models: small, each of another shape. Those of ``ddp_models``, and more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ddp_models
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output = model(batch)
    tensor = output["out"] if isinstance(output, dict) else output
    return tensor.float().square().mean()


def gradient_penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Double backward: the loss holds a gradient itself."""
    batch = batch.clone().requires_grad_()
    output = model(batch)
    (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    return output.square().mean() + slope.square().mean()


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and how it is trained."""

    make: Callable[[], nn.Module]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loss: Loss = mean_square
    width: int = 9


class Reshaped(nn.Module):
    """Gives its layers the batch in another shape."""

    def __init__(self, shape: tuple[int, ...], *layers: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch.reshape(-1, *self.shape))


class Indices(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.head = nn.Linear(6, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = self.table((batch.abs() * 10).long() % 40)
        return self.head(found if found.dim() == 2 else found.mean(dim=1))


class Reused(nn.Module):
    """One layer in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(9, 7), nn.Linear(7, 7)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for _ in range(3):
            hidden = hidden + torch.tanh(self.again(hidden))
        return hidden


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(9, 7), nn.Linear(7, 7), nn.Linear(7, 2)
        self.use_reentrant, self.times = use_reentrant, times

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for _ in range(self.times):
            hidden = checkpoint(self.inner, hidden, use_reentrant=self.use_reentrant)
        return self.last(torch.tanh(hidden))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.kink = nn.Bilinear(9, 9, 4), nn.PReLU(4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.kink(self.pair(batch, batch.flip(1)))


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope, self.offset = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * self.slope + self.offset


class ThreeDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(9, 5)
        self.b = nn.Linear(5, 5, dtype=torch.float64)
        self.c = nn.Linear(5, 5, dtype=torch.bfloat16)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(batch).double()).bfloat16())


class Alternating(ddp_models.Branches):
    """Another branch in every pass, and one layer that no pass uses."""

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        self.takes = "left" if float(batch[0, 0]) > 0 else "right"
        return super().forward(batch)


class Skipping(nn.Module):
    """The same graph in every pass, without one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle, self.last = nn.Linear(9, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(batch)))


def _narrow(width: int, depth: int) -> nn.Module:
    layers = [nn.Linear(9, width)]
    for _ in range(depth):
        layers += [nn.Tanh(), nn.Linear(width, width)]  # type: ignore[list-item]
    return nn.Sequential(*layers)


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.Linear(8, 3))


def _weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(9, 8)), nn.Linear(8, 3))


def _tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 1))


_OWN = {
    name: Shape(make, width=108 if name == "conv" else 9) for name, make in ddp_models.ALL.items()
}

SHAPES: dict[str, Shape] = _OWN | {
    "no_bias": Shape(lambda: nn.Linear(9, 4, bias=False)),
    "one_element": Shape(lambda: nn.Linear(9, 1)),
    "narrow_and_deep": Shape(lambda: _narrow(5, 20)),
    "wide": Shape(lambda: nn.Sequential(nn.Linear(9, 3000), nn.Linear(3000, 2))),
    "scalars": Shape(Scalars),
    "conv1d": Shape(lambda: Reshaped((1, 9), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten())),
    "conv3d": Shape(lambda: Reshaped((1, 3, 6, 6), nn.Conv3d(1, 2, 2), nn.Flatten()), width=108),
    "transposed": Shape(lambda: Reshaped((1, 3, 3), nn.ConvTranspose2d(1, 3, 2))),
    "gru": Shape(lambda: Reshaped((9, 1), nn.GRU(1, 5, batch_first=True), First())),
    "bag": Shape(lambda: Indices(nn.EmbeddingBag(40, 6))),
    "sparse": Shape(lambda: Indices(nn.Embedding(40, 6, sparse=True))),
    "sparse_bag": Shape(lambda: Indices(nn.EmbeddingBag(40, 6, mode="sum", sparse=True))),
    "norms": Shape(_normed),
    "weight_norm": Shape(_weight_norm),
    "reused": Shape(Reused),
    "bilinear": Shape(Bilinear),
    "three_dtypes": Shape(ThreeDtypes),
    "all_bf16": Shape(lambda: Cast(nn.Linear(9, 40, dtype=torch.bfloat16))),
    "alternating": Shape(Alternating, {"find_unused_parameters": True}),
    "skipping": Shape(Skipping, {"find_unused_parameters": True}),
    "static_skipping": Shape(Skipping, {"static_graph": True}),
    "static": Shape(Reused, {"static_graph": True}),
    "checkpoint": Shape(lambda: Checkpointed(use_reentrant=False, times=2)),
    "reentrant": Shape(lambda: Checkpointed(use_reentrant=True)),
    "static_reentrant": Shape(
        lambda: Checkpointed(use_reentrant=True, times=3), {"static_graph": True}
    ),
    "gradient_penalty": Shape(_tanh_net, loss=gradient_penalty),
}


class First(nn.Module):
    def forward(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return outputs[0]


class Cast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.inner(batch.bfloat16())


def make(name: str) -> nn.Module:
    """The same parameters on every rank and at every call."""
    torch.manual_seed(0)
    return SHAPES[name].make()


def batch_of(name: str, rank: int, step: int) -> torch.Tensor:
    """Another batch on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, SHAPES[name].width, generator=generator)
