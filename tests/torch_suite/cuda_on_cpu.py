"""Lets tests written for several GPUs run on CPU tensors: a request for a GPU gives the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


class OnCpu(TorchFunctionMode):
    """While it is active, devices in arguments are the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if "device" in kwargs:
            device = kwargs["device"]
            kwargs["device"] = "cpu" if isinstance(device, int) else _on_cpu(device)
        if name == "to":
            # Tensor.to(3) is Tensor.to("cuda:3").
            args = tuple(
                "cpu" if isinstance(each, int) and not isinstance(each, bool) else _on_cpu(each)
                for each in args[:2]
            ) + tuple(args[2:])
        return func(*args, **kwargs)


def install(common: Any) -> None:
    """For the whole process; before the suite is imported."""
    plain = lambda *args, **kwargs: lambda test: test  # noqa: E731
    common.skip_if_no_gpu = lambda test: test
    common.skip_if_lt_x_gpu = plain
    common.nccl_skip_if_lt_x_gpu = plain
    common.require_n_gpus_for_nccl_backend = plain
    common.requires_nccl_version = plain
    common.with_nccl_blocking_wait = lambda test: test
    common.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(world_size)
    }
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    module_to = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args = tuple(
            "cpu" if isinstance(each, int) and not isinstance(each, bool) else _on_cpu(each)
            for each in args
        )
        kwargs = {name: _on_cpu(value) for name, value in kwargs.items()}
        return module_to(self, *args, **kwargs)

    torch.nn.Module.to = to  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    parallel = torch.nn.parallel.DistributedDataParallel
    ddp_init = parallel.__init__

    def init(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("output_device", None)
        ddp_init(self, module, None, *args, **kwargs)

    parallel.__init__ = init  # type: ignore[method-assign]
