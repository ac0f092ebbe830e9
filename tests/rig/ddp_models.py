"""Small models for the wrapper's tests, each with something that a reducer can get wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Batch = torch.Tensor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3))
        self.scale = nn.Parameter(torch.tensor(0.5))  # no dimensions
        self.nothing = nn.Parameter(torch.zeros(0, 4))  # no elements

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layers(batch) * self.scale + self.nothing.sum()


class ConvNet(nn.Module):
    """Batch norm has buffers, channels_last has strides of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, batch: Batch) -> torch.Tensor:
        images = batch.reshape(-1, 3, 6, 6).to(memory_format=torch.channels_last)
        return self.second(torch.relu(self.norm(self.first(images)))).mean(dim=(2, 3))


class TiedEmbedding(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.out(self.embed((batch.abs() * 10).long() % 12).mean(dim=1))


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 2))
        self.layers[0].weight.requires_grad_(False)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layers(batch)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layer(self.embed(batch.unsqueeze(-1))).mean(dim=1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 6, 2, batch_first=True)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.lstm(batch.unsqueeze(-1))[0][:, -1]


class ManySmall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.linspace(0.9, 1.1, 1 + number % 7)) for number in range(120)
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        out = batch.mean(dim=1, keepdim=True)
        for weight in self.weights:
            out = out * weight.mean() + 0.01 * weight.sum()
        return out


class SeveralBuckets(nn.Module):
    """5.8 MB of parameters: the first bucket is full after one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(9, 600), nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 600)
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layers(batch)


class Strided(nn.Module):
    """A parameter in transposed memory order, and one that is a view with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.linspace(-1, 1, 9 * 5).reshape(5, 9).t())
        self.holes = nn.Parameter(torch.linspace(-1, 1, 20).reshape(5, 4)[:, ::2])

    def forward(self, batch: Batch) -> torch.Tensor:
        return batch @ self.transposed @ self.holes


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 6)
        self.low = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.last = nn.Linear(5, 4)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.last(self.low(self.first(batch).bfloat16()).float())


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 6), nn.Linear(6, 5)).double()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layers(batch.double())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.linspace(-1, 1, 9).to(torch.complex64) * (1 + 2j))

    def forward(self, batch: Batch) -> torch.Tensor:
        return (batch * self.turn).sum(dim=1).abs()


class Branches(nn.Module):
    """`takes` decides which of the layers a forward pass uses; `never` is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(9, 6)
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 4)
        self.never = nn.Linear(6, 4)
        self.takes = "left"

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        hidden = self.common(batch)
        return {"out": self.left(hidden) if self.takes == "left" else self.right(hidden)}


CASTABLE: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "conv": ConvNet,
    "tied": TiedEmbedding,
    "frozen": PartlyFrozen,
    "attention": Attention,
    "recurrent": Recurrent,
    "many": ManySmall,
    "buckets": SeveralBuckets,
    "strided": Strided,
    "mixed": MixedDtypes,
}
"""Models that every wire dtype can serve."""

ALL = CASTABLE | {"double": Double, "complex": Complex}


def make(name: str, seed: int = 0) -> nn.Module:
    """The same parameters on every rank and at every call."""
    torch.manual_seed(seed)
    return ALL[name]()


def batch_of(name: str, rank: int, step: int) -> torch.Tensor:
    """Another batch on every rank and in every step."""
    width = 3 * 6 * 6 if name == "conv" else 9
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))
