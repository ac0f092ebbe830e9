"""Time training steps of data-parallel wrappers: `python benchmarks/ddp.py --help`.

A backend is one way to train: `pycomm` our wrapper over pycomm, `gloo` torch's wrapper over gloo,
and either with one of these behind it:

    #no_sync   nothing is reduced: what computing alone costs
    #torch     torch's wrapper, whatever the backend
    #fp16      gradients travel as fp16: wire_dtype of our wrapper, the hook of torch's
    #feedback  one small parameter has error feedback, so our wrapper looks at all averages (step)

`pycomm:fp16` is torch's wrapper over a group whose sums travel in the codec of that name (ours does
not use it), and `pycomm:tcp+fp16` the same over TCP.

`step` trains 25 M parameters. `small` has 1,000 parameters of 16 elements and next to no
arithmetic: with `--ranks 1` its time, less that of `#no_sync`, is what a reducer itself costs.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP


class Small(nn.Module):
    """Each gradient is the input: backward is as cheap as torch makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(1000))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        flat = batch.flatten()[:16]
        return torch.stack([(weight * flat).sum() for weight in self.weights])


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)


def wrapped(module: nn.Module, way: str, group: Any) -> Any:
    """The module, in the wrapper that a way to train says."""
    backend, _, how = way.partition("#")
    name, _, variant = backend.partition(":")
    encoded = not {"bf16", "fp16", "int8"}.isdisjoint(variant.split("+"))
    if name == "pycomm" and how != "torch" and not encoded:
        import pycomm

        wires: dict[str, Any] = {name: name for name in ("bf16", "fp16", "int8")}
        wires["feedback"] = {"layers.0.norm1.weight": "int8"}
        wire = wires.get(how)
        return pycomm.DistributedDataParallel(module, process_group=group, wire_dtype=wire)
    model = TorchDDP(module, process_group=group, gradient_as_bucket_view=True)
    if how == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return model


class TrainingStep:
    """One model, wrapped in one way."""

    def __init__(self, place: harness.Place, plain: nn.Module, shape: tuple[int, ...]) -> None:
        how = place.backend.partition("#")[2]
        self._alone = plain  # never wrapped, never trained
        self._shape, self._rank, self._ranks = shape, place.rank, place.ranks
        self._syncs, self._lossy = how != "no_sync", "fp16" in place.backend
        self._model = wrapped(copy.deepcopy(plain), place.backend, place.group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)
        self.numel = sum(parameter.numel() for parameter in plain.parameters())
        self.nbytes = 4 * self.numel
        self._batch = self._batch_of(0, self._rank)

    def _batch_of(self, seed: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randn(self._shape, generator=generator)

    def run(self) -> None:
        self._optimizer.zero_grad()
        with contextlib.nullcontext() if self._syncs else self._model.no_sync():
            self._model(self._batch).square().mean().backward()
        self._optimizer.step()

    def arm(self, seed: int) -> None:
        self._seed = seed
        self._batch = self._batch_of(seed, self._rank)

    def burst(self) -> None:
        self.run()

    def wrong(self) -> tuple[int, int]:
        """Compare gradients with those that this rank computes from every rank's batch."""
        ranks = range(self._ranks) if self._syncs else [self._rank]
        self._alone.zero_grad()
        for rank in ranks:
            loss = self._alone(self._batch_of(self._seed, rank)).square().mean() / len(ranks)
            loss.backward()
        count = 0
        for mine, other in zip(self._model.parameters(), self._alone.parameters(), strict=True):
            assert mine.grad is not None and other.grad is not None
            largest = float(other.grad.abs().max())
            far = (mine.grad - other.grad).abs() > largest * (4e-3 if self._lossy else 1e-4)
            count += int(far.sum())
        return count, self.numel


class Step:
    name = "step"
    sized = False

    def bus_factor(self, ranks: int) -> float | None:
        return None

    def prepare(self, place: harness.Place) -> TrainingStep:
        torch.manual_seed(0)
        return TrainingStep(place, transformer(), (2, 64, 512))


class SmallStep(Step):
    name = "small"

    def prepare(self, place: harness.Place) -> TrainingStep:
        return TrainingStep(place, Small(), (16,))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not any(argument.startswith("--backends") for argument in arguments):
        arguments += ["--backends", "pycomm,gloo,pycomm#no_sync"]
    sys.exit(harness.main([Step(), SmallStep()], arguments, table="ddp"))
