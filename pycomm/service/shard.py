"""The slices that one server keeps, and the optimizer that steps them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn, optim

from pycomm.service.placement import Shape, Slice, digest, place

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
"""What these do to an element depends on that element alone, so that slices can be stepped apart.
Subclasses are not taken for such: they may do more."""


class Layout:
    """How the parameters of a model lie in the buffers that travel: one buffer for each dtype.

    Worker and server make it from the model, the number of servers and ``sliced``; nothing of it
    comes from the network.
    """

    def __init__(self, model: nn.Module, servers: int, *, sliced: bool) -> None:
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        for name, parameter in named:
            if parameter.device.type != "cpu" or not parameter.is_contiguous():
                raise ValueError(
                    f"parameter {name!r} is on {parameter.device} and "
                    f"{'' if parameter.is_contiguous() else 'not '}contiguous; the parameter "
                    "service takes contiguous parameters on the CPU"
                )
            if not parameter.dtype.is_floating_point:
                raise ValueError(f"parameter {name!r} is {parameter.dtype}, not floating point")
        if not named:
            raise ValueError("the model has no parameter that requires a gradient")
        self.parameters: dict[str, nn.Parameter] = dict(named)
        shapes = [Shape(name, each.numel(), each.element_size()) for name, each in named]
        self.described: list[Any] = [
            [name, list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in named
        ]
        """Name, shape and dtype of each parameter: names the difference between two models."""
        self.slices: list[Slice] = place(shapes, servers, sliced=sliced)
        self.digest: str = digest(self.slices, self.described)

    def of(self, server: int) -> list[Slice]:
        return [each for each in self.slices if each.server == server]

    def buffers(self, server: int) -> dict[torch.dtype, torch.Tensor]:
        """Uninitialized buffers for the slices of a server, dtypes in order of first use."""
        numels: dict[torch.dtype, int] = {}
        for each in self.of(server):
            dtype = self.parameters[each.name].dtype
            numels[dtype] = numels.get(dtype, 0) + each.numel
        return {dtype: torch.empty(numel, dtype=dtype) for dtype, numel in numels.items()}

    def views(
        self, server: int, buffers: Mapping[torch.dtype, torch.Tensor]
    ) -> list[tuple[Slice, torch.Tensor]]:
        """Each slice of a server with its place in the buffers."""
        used = dict.fromkeys(buffers, 0)
        found = []
        for each in self.of(server):
            dtype = self.parameters[each.name].dtype
            found.append((each, buffers[dtype][used[dtype] : used[dtype] + each.numel]))
            used[dtype] += each.numel
        return found

    def flat(self, each: Slice, tensor: torch.Tensor) -> torch.Tensor:
        """The slice's elements of a tensor that has its parameter's shape; a view."""
        return tensor.detach().view(-1)[each.start : each.stop]


class Shard:
    """One server's slices as parameters of an optimizer like the user's. Not thread-safe."""

    def __init__(self, layout: Layout, server: int, optimizer: optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in layout.parameters.items()}
        self._layout = layout
        self._server = server
        self._user = optimizer
        self._slices = layout.of(server)
        whole = all(each.numel == layout.parameters[each.name].numel() for each in layout.slices)
        if not whole and type(optimizer) not in ELEMENTWISE:
            raise ValueError(
                f"{type(optimizer).__name__} may need whole tensors, and parameters are cut into "
                "slices. Try: sliced=False on the server and on all workers"
            )
        self._parameters = {each: self._parameter(each) for each in self._slices}
        groups = []
        taken: set[str] = set()
        for group in optimizer.param_groups:
            of_group = {names.get(id(parameter), "") for parameter in group["params"]}
            taken |= of_group
            groups.append(
                {
                    **_options(group),
                    "params": [
                        self._parameters[each] for each in self._slices if each.name in of_group
                    ],
                }
            )
        if missing := sorted(set(layout.parameters) - taken):
            raise ValueError(f"the optimizer does not have parameter {missing[0]!r} of the model")
        # A group without a slice here would be refused as empty by some optimizers.
        self._groups = [index for index, group in enumerate(groups) if group["params"]]
        self._optimizer: optim.Optimizer | None = None
        if self._groups:
            self._optimizer = _like(optimizer, [groups[index] for index in self._groups])

    def _parameter(self, each: Slice) -> nn.Parameter:
        original = self._layout.parameters[each.name]
        whole = each.numel == original.numel()
        return nn.Parameter(original.detach() if whole else self._layout.flat(each, original))

    def step(self, gradients: Sequence[Mapping[torch.dtype, torch.Tensor]]) -> None:
        """One step with the mean of some workers' gradients, added in their order."""
        if self._optimizer is None or not gradients:
            return
        total: dict[torch.dtype, torch.Tensor] = {}
        for dtype, first in gradients[0].items():
            # Short floats are summed as fp32: their own dtype would round after each worker.
            wide = torch.promote_types(dtype, torch.float32)
            total[dtype] = first.to(wide, copy=True)
            for other in gradients[1:]:
                total[dtype] += other[dtype]
            total[dtype] = (total[dtype] / len(gradients)).to(dtype)
        for each, view in self._layout.views(self._server, total):
            parameter = self._parameters[each]
            parameter.grad = view.view_as(parameter)
        for index, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            # What a schedule has changed in the user's optimizer: lr, momentum.
            group.update(_options(self._user.param_groups[index]))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def copy_to(self, buffers: Mapping[torch.dtype, torch.Tensor]) -> None:
        """The parameters as they are now."""
        with torch.no_grad():
            for each, view in self._layout.views(self._server, buffers):
                view.copy_(self._parameters[each].view(-1))

    def state_dict(self) -> dict[str, Any]:
        """Copies, so that it can be written while steps go on."""
        state = {} if self._optimizer is None else self._optimizer.state_dict()
        return {
            "digest": self._layout.digest,
            "server": self._server,
            "optimizer_class": type(self._user).__name__,
            "parameters": [each.detach().clone() for each in self._parameters.values()],
            "optimizer": _cloned(state),
            # A schedule changes the user's optimizer after the shard's has stepped.
            "groups": [_cloned(_options(group)) for group in self._user.param_groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if it is of another layout, server or optimizer; nothing is changed.

        Also for a tensor of another shape than its slice.
        """
        mine = {
            "digest": self._layout.digest,
            "server": self._server,
            "optimizer_class": type(self._user).__name__,
        }
        for key, value in mine.items():
            if state.get(key) != value:
                raise ValueError(
                    f"it has {key} {state.get(key)!r}, and this server {value!r}: it is of "
                    "another model, number of servers, server or optimizer"
                )
        self._check_shapes(state)
        with torch.no_grad():
            for parameter, saved in zip(
                self._parameters.values(), state["parameters"], strict=True
            ):
                parameter.copy_(saved)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(_cloned(state["optimizer"]))
        for group, saved in zip(self._user.param_groups, state.get("groups", ())):  # noqa: B905
            group.update(_cloned(saved))

    def _check_shapes(self, state: Mapping[str, Any]) -> None:
        """``copy_()`` would broadcast."""
        parameters = state["parameters"]
        if len(parameters) != len(self._parameters):
            raise ValueError(
                f"it has {len(parameters)} tensors, and this server {len(self._parameters)}"
            )
        for (each, mine), saved in zip(self._parameters.items(), parameters, strict=True):
            if saved.shape != mine.shape:
                raise ValueError(
                    f"elements {each.start} to {each.stop} of {each.name!r} have shape "
                    f"{tuple(saved.shape)} in it, and {tuple(mine.shape)} on this server"
                )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _like(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> optim.Optimizer:
    """Another optimizer of the same class, with the same settings, for other parameters."""
    make: Any = type(optimizer)
    name = make.__name__
    if inspect.signature(make.step).parameters["closure"].default is inspect.Parameter.empty:
        raise ValueError(f"{name} needs a closure, and a server has no data to compute a loss from")
    # The rest of the settings stands in the groups.
    taken = inspect.signature(make).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    try:
        return cast(optim.Optimizer, make(groups, **defaults))
    except TypeError as error:
        raise ValueError(
            f"a second {name} cannot be made with the settings of the first: {error}. A server "
            "needs a class that takes (params, **defaults), as those of torch.optim do"
        ) from error


def _cloned(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: _cloned(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_cloned(each) for each in state]
    return state
