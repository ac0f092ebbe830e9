"""Batch normalization over the batches of all ranks, on the CPU, too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from pycomm._group.averaging import exact_all_reduce


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.SyncBatchNorm`` that also takes CPU tensors.

    No subclass of it, though: torch's DDP refuses those in a model on the CPU.

    Normalizes with the mean and variance of the batches of all ranks together, so that training
    on N ranks equals training one process on the whole batch, also if the ranks' batches have
    different sizes or are empty. Constructor, state dict and evaluation are torch's; torch
    itself handles tensors that are not on the CPU.

    Each training step costs one all_gather of 2 C + 1 numbers in forward and one all_reduce of
    2 C in backward, for C channels. Statistics are computed in fp32, for fp64 inputs in fp64. They
    are combined in rank order, so all ranks get the same bits. As torch's layer, it has no second
    derivative: a gradient penalty or a Hessian through it raises a RuntimeError.

    Example::

        model = pycomm.SyncBatchNorm.convert_sync_batchnorm(model)
        model = pycomm.DistributedDataParallel(model)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        TorchSyncBatchNorm._check_input_dim(self, input)  # type: ignore[arg-type]

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        TorchSyncBatchNorm._check_non_zero_input_channels(self, input)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes; collective over the group while training.

        Args:
            input: ``(N, C, ...)``, at least 2-D; N may differ between ranks and may be 0.

        Raises:
            ValueError: The shape does not fit, or all ranks together have only one value per
                channel.
        """
        if not self.training or input.device.type != "cpu" or not dist.is_initialized():
            # It uses nothing of itself but what is here, too. Not so for a group of one rank: torch
            # refuses CPU tensors there as well.
            return TorchSyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        group = self.process_group or dist.group.WORLD
        if dist.get_world_size(group) < 1:
            raise ValueError("SyncBatchNorm: this rank is not in the layer's process_group")
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got {input.size(1)}")
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # cumulative average
                factor = 1.0 / float(self.num_batches_tracked.item())
        output, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, group
        )
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            total = float(count)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                unbiased = variance * (total / (total - 1.0))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        result: Tensor = output
        return result

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: Any | None = None
    ) -> torch.nn.Module:
        """Replaces every BatchNorm layer in a model, itself included, by one of this class.

        Args:
            module: The model. Parameters and buffers are kept, not copied.
            process_group: The ranks whose batches are normalized together; default: all.

        Returns:
            The model, or the new layer if ``module`` is a BatchNorm layer itself.
        """
        return cls._converted(module, process_group, {})

    @classmethod
    def _converted(
        cls,
        module: torch.nn.Module,
        process_group: Any | None,
        made: dict[torch.nn.Module, torch.nn.Module],
    ) -> torch.nn.Module:
        """``made``: what each module so far has become; a model may use one twice."""
        if module in made:
            return made[module]
        made[module] = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            layer = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            # The very objects, so that an optimizer made before still holds them.
            layer.weight, layer.bias = module.weight, module.bias
            layer.running_mean, layer.running_var = module.running_mean, module.running_var
            layer.num_batches_tracked = module.num_batches_tracked
            layer.training = module.training
            if hasattr(module, "qconfig"):
                layer.qconfig = module.qconfig
            made[module] = layer
        for name, child in list(module._modules.items()):
            if child is not None:
                made[module].add_module(name, cls._converted(child, process_group, made))
        return made[module]


SYNC_BATCH_NORMS = (TorchSyncBatchNorm, SyncBatchNorm)
"""For ``isinstance``: layers that communicate in forward and backward."""


class _Normalize(torch.autograd.Function):
    """The arithmetic of both passes. Statistics of ranks are merged as Chan et al. (1979) do."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        channels = input.size(1)
        values = input.to(wide)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        count = input.numel() // channels
        mean = values.mean(dims) if count else torch.zeros(channels, dtype=wide)
        shape = [1, channels] + [1] * (input.dim() - 2)
        squares = (values - mean.view(shape)).square().sum(dims)
        # A count in fp32 is exact up to 2^24; two numbers carry any count.
        mine = torch.cat([mean, squares, mean.new_tensor([count // 2**20, count % 2**20])])
        ranks = dist.get_world_size(group)
        gathered = mine.new_empty(ranks * mine.numel())  # flat: gloo takes no stacked output
        dist.all_gather_into_tensor(gathered, mine, group=group)
        every = gathered.view(ranks, -1)
        means, spreads = every[:, :channels], every[:, channels : 2 * channels]
        counts = (every[:, -2].double() * 2**20 + every[:, -1].double()).to(wide).view(-1, 1)
        total = counts.sum()
        if total <= 1:
            raise ValueError(
                "SyncBatchNorm needs more than one value a channel on all ranks together to train"
            )
        mean = (means * counts).sum(0) / total
        variance = (spreads.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        inverse = torch.rsqrt(variance + eps)
        normalized = (values - mean.view(shape)) * inverse.view(shape)
        output = normalized
        if weight is not None:
            output = output * weight.to(wide).view(shape)
        if bias is not None:
            output = output + bias.to(wide).view(shape)
        ctx.save_for_backward(normalized, weight, inverse, total)
        ctx.group, ctx.dims, ctx.shape = group, dims, shape
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, variance, total)
        # Never what is kept for backward: the next layer may change it in place.
        output = output.to(input.dtype, copy=output is normalized)
        return output, mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normalized, weight, inverse, total = ctx.saved_tensors
        dims, shape = ctx.dims, ctx.shape
        grad = grad_output.to(normalized.dtype)
        of_bias = grad.sum(dims)
        of_weight = (grad * normalized).sum(dims)
        # Gradients of weight and bias stay local, as all others do until DDP averages them; the
        # input's needs the sums over all ranks.
        sums = torch.cat([of_bias, of_weight])
        exact_all_reduce(sums, ctx.group)
        everywhere_bias, everywhere_weight = (sums / total).chunk(2)
        of_input: Tensor | None = None
        if ctx.needs_input_grad[0]:
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            centred = (
                grad - everywhere_bias.view(shape) - normalized * everywhere_weight.view(shape)
            )
            of_input = (centred * scale.view(shape)).to(grad_output.dtype)
        return (
            of_input,
            of_weight.to(weight.dtype) if weight is not None else None,
            of_bias.to(weight.dtype if weight is not None else grad.dtype)
            if ctx.has_bias
            else None,
            None,
            None,
        )
