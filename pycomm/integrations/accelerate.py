"""Hugging Face Accelerate over pycomm, on CPU, too, and sure to train on all ranks together.

With one GPU per rank, Accelerate takes the backend's name itself:

    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="pycomm")])

Without, there are traps: ``cpu=True`` refuses the name, and leaving it out forms the group but
leaves the model unwrapped, so that every rank trains for itself. Here the group is made first:

    accelerator = pycomm.integrations.accelerate.make_accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pycomm._group.creation import group_options as options_of
from pycomm._group.creation import group_timeout, group_wire_dtype
from pycomm._settings import AS_THE_GROUP, wrapper_wire_dtype
from pycomm._wire_patterns import WireDtype
from pycomm.integrations import _optional, launch
from pycomm.options import Options

logger = logging.getLogger("pycomm")
_WRAPPERS = ("pycomm", "torch")
# Arguments that Accelerator accepts with cpu=True, and ignores.
_WITHOUT_EFFECT = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")


def make_accelerator(
    *,
    wrapper: str = "pycomm",
    wire_dtype: WireDtype = AS_THE_GROUP,
    weight: str | None = None,
    group_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An ``accelerate.Accelerator`` for CPU training whose ``prepare`` wraps models for sure.

    Under torchrun, mpirun or srun it makes the default group over pycomm, unless there is one.
    Without any of them it logs a warning, and is an ordinary Accelerator of one process.

    Args:
        wrapper: "pycomm" for ``pycomm.DistributedDataParallel``, "torch" for torch's own.
        wire_dtype: For pycomm's wrapper: what gradients travel as.
        weight: The same: "samples" for ranks that count by their samples.
        group_options: Further arguments of ``init_process_group``, such as ``timeout``.
        options: For ``Accelerator``; ``cpu=True`` is set, and a ``kwargs_handlers`` may hold
            ``DistributedDataParallelKwargs``, but not ``InitProcessGroupKwargs``. Of the former,
            what equals Accelerate's defaults does not arrive.

    Raises:
        ImportError: Accelerate is not installed.
        RuntimeError: An Accelerator was made before in this process, without the other ranks.
        TypeError: ``group_options`` is no mapping.
        ValueError: The default group is not pycomm's, or was made with other ``group_options``, or
            an argument does not fit.
    """
    if wrapper not in _WRAPPERS:
        raise ValueError(f"wrapper={wrapper!r}: choose one of {', '.join(_WRAPPERS)}")
    own = {"wire_dtype": wire_dtype, "weight": weight}
    if wrapper != "pycomm" and own != {"wire_dtype": AS_THE_GROUP, "weight": None}:
        given = "weight" if wire_dtype == AS_THE_GROUP else "wire_dtype"
        raise ValueError(f"{given} needs wrapper='pycomm': torch's has no such option")
    if options.setdefault("cpu", True) is not True:
        raise ValueError(
            "make_accelerator is for CPU training. Try, on GPUs: Accelerator("
            "kwargs_handlers=[InitProcessGroupKwargs(backend='pycomm')])"
        )
    if ignored := [name for name in _WITHOUT_EFFECT if options.get(name) is not None]:
        raise without_effect(f"{ignored[0]}=…")
    arguments = group_arguments(group_options)
    accelerate = _optional.load(
        "accelerate", package="accelerate", needed_by="pycomm.integrations.accelerate"
    )
    for handler in options.get("kwargs_handlers") or ():
        if isinstance(handler, accelerate.InitProcessGroupKwargs):
            raise ValueError(
                "kwargs_handlers has an InitProcessGroupKwargs, and make_accelerator makes the "
                "group without it. Try: make_accelerator(group_options={'timeout': timedelta(…)})"
            )
    make_group(arguments)
    kind = _wrapping_accelerator() if wrapper == "pycomm" else accelerate.Accelerator
    accelerator = kind(**options)
    if wrapper == "pycomm":
        accelerator.pycomm_options = own
    check_distributed(accelerator.state)
    return accelerator


# Groups that make_group() has made, and its arguments: variables may overrule what was asked.
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = weakref.WeakKeyDictionary()


def without_effect(argument: str) -> ValueError:
    """The error for an argument that Accelerate accepts on CPU, and ignores."""
    return ValueError(
        f"{argument}: on CPU Accelerate would train without it, and each rank has the whole "
        "model. Try: leave it out, or torch's FSDP2 in your own loop"
    )


def group_arguments(group_options: object) -> dict[str, Any]:
    """The arguments of ``init_process_group`` that a caller gave."""
    if group_options is None:
        return {}
    if not isinstance(group_options, Mapping):
        raise TypeError(
            f"group_options is of type {type(group_options).__name__}, and not a dict of arguments "
            "of init_process_group, such as {'timeout': …}. Instead of passing a group, make the "
            "default group before this call"
        )
    return dict(group_options)


def make_group(
    options: Mapping[str, Any], wire_dtype: str | torch.dtype | None = AS_THE_GROUP
) -> None:
    """Makes the default group over pycomm where a launcher's variables are, unless there is one.

    Logs a warning where they are not.

    Args:
        options: For ``init_process_group``.
        wire_dtype: What sums of the whole group travel as; "group": as ``options`` or variables
            say.

    Raises:
        ValueError: There is a default group of another backend, or of other ``options`` or another
            ``wire_dtype``.
    """
    name = wrapper_wire_dtype("wire_dtype", wire_dtype)
    wire = None if name == AS_THE_GROUP else name
    arguments = dict(options)
    chosen = arguments.get("pg_options") or Options()
    if wire is not None and isinstance(chosen, Options):  # torch's caller refuses all others
        if chosen.wire_dtype not in (None, wire):
            raise ValueError(f"wire_dtype={wire!r}, and pg_options has {chosen.wire_dtype!r}")
        arguments["pg_options"] = dataclasses.replace(chosen, wire_dtype=wire)
    if not dist.is_initialized():
        if launch.init_process_group("pycomm", **arguments) is None:
            logger.warning(
                "no launcher has set RANK and WORLD_SIZE, so this process trains alone. Start the "
                "script with torchrun or python -m pycomm run to train on several; accelerate "
                "launch --cpu starts one process"
            )
        else:
            _MADE[dist.distributed_c10d._get_default_group()] = arguments
        return
    check_backend()
    world = dist.distributed_c10d._get_default_group()
    if _MADE.get(world) == arguments:
        return
    if wire is not None and (other := group_wire_dtype(world)) != wire:
        raise ValueError(
            f"wire_dtype={wire!r}, and the default group was made with {other!r}. "
            f"Try: make it with pg_options=pycomm.Options(wire_dtype={wire!r})"
        )
    made_with = {"timeout": group_timeout(world), "pg_options": options_of(world)}
    for option in options:
        if option not in made_with or arguments[option] != made_with[option]:
            raise ValueError(
                f"{option}={options[option]!r} is for a group that is made here, and there is a "
                "default group, made without it. Try: give it to the init_process_group() that "
                "made the group"
            )


def check_backend() -> None:
    """Raises ValueError unless the default group is pycomm's."""
    if "pycomm" not in (backend := str(dist.get_backend_config())):
        raise ValueError(
            f"the default group is {backend!r}, not pycomm's. "
            "Try: make no group beforehand, or one over 'pycomm'"
        )


def check_distributed(state: Any) -> None:
    """Raises RuntimeError unless Accelerate's state spans the ranks of the default group."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if int(state.num_processes) == world_size and (
        world_size == 1 or str(state.distributed_type).endswith("MULTI_CPU")
    ):
        return
    raise RuntimeError(
        f"Accelerate sees {state.num_processes} process(es), type {state.distributed_type}, in a "
        f"group of {world_size} ranks: models would not be wrapped and every rank would train for "
        "itself. Its state is set once a process, by the first Accelerator, PartialState or "
        "TrainingArguments. Try: make none of them before this"
    )


@functools.cache
def _wrapping_accelerator() -> type[Any]:
    """The subclass, made when it is asked for: its base is an optional package's."""
    from accelerate import Accelerator

    from pycomm.ddp import DistributedDataParallel

    class PycommAccelerator(Accelerator):  # type: ignore[misc]
        """Puts pycomm's wrapper where Accelerate puts torch's."""

        pycomm_options: Mapping[str, Any] = {}

        def prepare_model(
            self,
            model: torch.nn.Module,
            device_placement: bool | None = None,
            evaluation_mode: bool = False,
        ) -> Any:
            # Accelerate does everything but wrap a model that is only evaluated.
            prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
            trainable = any(parameter.requires_grad for parameter in prepared.parameters())
            if evaluation_mode or not dist.is_initialized() or not trainable:
                return prepared
            if isinstance(prepared, torch.nn.parallel.DistributedDataParallel):
                return prepared
            handler = self.ddp_handler
            options = handler.to_kwargs() if handler is not None else {}
            wrapped = DistributedDataParallel(prepared, **self.pycomm_options, **options)
            if handler is not None:
                handler.register_comm_hook(wrapped)
            # Else prepare() would do it all again. Module's annotations know no plain attributes.
            vars(wrapped)["_is_accelerate_prepared"] = True
            self._models[-1] = wrapped
            return wrapped

    return PycommAccelerator
