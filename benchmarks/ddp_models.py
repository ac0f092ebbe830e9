"""The models of the training tables, and when each of their gradients exists."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class _Waits(torch.autograd.Function):
    """A layer whose backward takes time and no core, as when a device computes."""

    @staticmethod
    def forward(
        context: Any, batch: torch.Tensor, weight: torch.Tensor, layer: DeviceLike
    ) -> torch.Tensor:
        context.layer = layer
        return batch + 0.0

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> Any:
        layer = context.layer
        time.sleep(layer.seconds)
        return grads[0], layer.gradient * float(grads[0].sum()), None


class DeviceLike(nn.Module):
    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        generator = torch.Generator().manual_seed(numel)
        self.gradient = torch.randn(numel, generator=generator)
        self.seconds = seconds

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return _Waits.apply(batch, self.weight, self)  # type: ignore[no-untyped-call]


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)


def _device(numel: int) -> nn.Module:
    return nn.Sequential(*(DeviceLike(numel, 0.04) for _ in range(25)))


MODELS = {
    "layers": (_transformer, (2, 64, 512)),
    "device": (lambda: _device(1_050_000), (4,)),
    "large": (lambda: _device(2_500_000), (4,)),
}
"""Name: what makes it, and the shape of a batch. 25 M parameters, 26 M, 62 M (250 MB)."""


def batch_of(name: str, seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    batch: torch.Tensor = torch.randn(MODELS[name][1], generator=generator)
    return batch


def arrivals(model: nn.Module, step: Any) -> tuple[list[tuple[float, int]], float, float]:
    """Runs `step()` and says when each gradient of `model` existed, in seconds, and its bytes.

    Returns:
        That list in the order of arrival, when the forward pass had ended, and when all had.
    """
    seen: list[tuple[float, int]] = []
    begin = time.perf_counter()

    def arrived(parameter: torch.Tensor) -> None:
        seen.append((time.perf_counter() - begin, 4 * parameter.numel()))

    hooks = [
        parameter.register_post_accumulate_grad_hook(arrived) for parameter in model.parameters()
    ]
    step()
    end = time.perf_counter() - begin
    for hook in hooks:
        hook.remove()
    return seen, seen[0][0], end


def bound(
    gradients: list[tuple[float, int]], end: float, bytes_a_second: float, factor: float
) -> float:
    """How long a step takes that puts every gradient on the wire as soon as it exists.

    Args:
        gradients: When each came, and its bytes.
        end: How long a step takes that sends nothing.
        bytes_a_second: Of the wire.
        factor: Bytes that a rank sends for each byte of gradient.
    """
    free = 0.0
    for at, nbytes in gradients:
        free = max(free, at) + nbytes * factor / bytes_a_second
    return max(end, free + (end - gradients[-1][0]))
