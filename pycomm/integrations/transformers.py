"""Hugging Face's Trainer over pycomm.

With one GPU per rank, ``TrainingArguments(ddp_backend="pycomm")`` is enough in Python; its command
line refuses the name, and ``make_parser`` is one that does not. On CPU the arguments refuse it too,
and without it the ranks use gloo, or, worse, train apart:

    args = pycomm.integrations.transformers.make_training_arguments(output_dir="out")
    Trainer(model=model, args=args, train_dataset=dataset).train()
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from pycomm._settings import AS_THE_GROUP
from pycomm.integrations import _optional
from pycomm.integrations import accelerate as _accelerate


def make_training_arguments(
    *,
    wire_dtype: str | torch.dtype | None = AS_THE_GROUP,
    group_options: Mapping[str, Any] | None = None,
    arguments_class: Any = None,
    **options: Any,
) -> Any:
    """``transformers.TrainingArguments`` for training over pycomm, on GPUs or on CPU.

    On CPU (``use_cpu=True``, or torch sees no GPU) it makes the default group first, from the
    variables of torchrun, mpirun or srun. Without any of them it logs a warning.

    Args:
        wire_dtype: What gradients, and other sums of 16 KiB or more, travel as. The Trainer wraps
            the model in torch's wrapper, so this is the ``pycomm.Options.wire_dtype`` of the group,
            "fp32" if None; "group", the default, leaves it to ``group_options`` and variables.
            For CPU; on GPUs set ``PYCOMM_WIRE_DTYPE``.
        group_options: Further arguments of ``init_process_group``, for CPU.
        arguments_class: A subclass of ``TrainingArguments`` to make instead.
        options: For ``TrainingArguments``. ``ddp_backend`` may be left out or be "pycomm".
            ``ddp_timeout`` is the group's timeout, also on CPU.

    Raises:
        ImportError: transformers or accelerate is not installed.
        RuntimeError: Accelerate's state was set before in this process, without the other ranks.
        TypeError: ``group_options`` is no mapping.
        ValueError: ``ddp_backend`` or the default group is another backend's, or ``wire_dtype``
            or another option does not fit.
    """
    arguments_of_group = _accelerate.group_arguments(group_options)
    library = _load()
    _optional.load("accelerate", package="accelerate", needed_by="pycomm.integrations.transformers")
    kind = library.TrainingArguments if arguments_class is None else arguments_class
    backend = options.pop("ddp_backend", None) or "pycomm"
    if backend != "pycomm":
        raise ValueError(f"ddp_backend={backend!r}: leave it out, or use TrainingArguments itself")
    # A parser says False if the flag is missing. Without a GPU every rank would train alone.
    options["use_cpu"] = bool(options.get("use_cpu")) or not torch.cuda.is_available()
    if not options["use_cpu"]:
        if wire_dtype != AS_THE_GROUP or arguments_of_group:
            name = "group_options" if wire_dtype == AS_THE_GROUP else "wire_dtype"
            raise ValueError(
                f"{name} is for use_cpu=True: on GPUs Accelerate makes the group. Try: "
                "PYCOMM_WIRE_DTYPE and the like, and ddp_timeout"
            )
        return kind(ddp_backend=backend, **options)
    for name in ("fsdp", "deepspeed"):
        if options.get(name):
            raise _accelerate.without_effect(f"{name}={options[name]!r}")
    # Accelerate would make the group with it; a parser always gives the default.
    seconds = options.get("ddp_timeout")
    if seconds not in (None, kind.__dataclass_fields__["ddp_timeout"].default):
        timeout = arguments_of_group.setdefault("timeout", timedelta(seconds=seconds))
        if timeout != timedelta(seconds=seconds):
            raise ValueError(f"ddp_timeout={seconds!r}, and group_options has {timeout!r}")
    _accelerate.make_group(arguments_of_group, wire_dtype)
    arguments = kind(**options)  # which finds the group, and would refuse its name
    if arguments.device.type != "cpu":  # which sets Accelerate's state
        raise RuntimeError(f"transformers chose the device {arguments.device}, not the CPU")
    _accelerate.check_distributed(arguments.distributed_state)
    return arguments


def make_parser(*dataclass_types: Any) -> Any:
    """An ``HfArgumentParser`` whose ``--ddp_backend`` takes "pycomm", too.

    Give its values to ``make_training_arguments``, as ``parse_args_into_dataclasses`` of the parser
    itself would make the arguments on CPU, where they refuse the name::

        options = vars(make_parser(TrainingArguments).parse_args())
        args = make_training_arguments(**options)

    Args:
        dataclass_types: As for ``HfArgumentParser``; default ``TrainingArguments``.

    Raises:
        ImportError: transformers is not installed.
    """
    library = _load()
    parser = library.HfArgumentParser(list(dataclass_types or (library.TrainingArguments,)))
    for action in parser._actions:
        if action.dest == "ddp_backend" and isinstance(action, argparse.Action):
            action.choices = [*(action.choices or ()), "pycomm"]
    return parser


def _load() -> Any:
    return _optional.load(
        "transformers", package="transformers", needed_by="pycomm.integrations.transformers"
    )
