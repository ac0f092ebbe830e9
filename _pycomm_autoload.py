"""The entry point through which ``import torch`` learns that there is a backend "pycomm".

Stands outside the package on purpose: importing ``pycomm`` from here would be circular whenever a
program's first import is ``pycomm``, and an exception here would break ``import torch`` for
programs that never use pycomm. The package and its extension are imported when a group is made.
"""

from __future__ import annotations

from typing import Any

failure: Exception | None = None
"""Why ``autoload`` could not register; shown by ``python -m pycomm env``."""


def autoload() -> None:
    """Registers the backend. Never raises."""
    global failure
    try:
        register()
    except Exception as error:
        failure = error


def register() -> None:
    """Registers the backend "pycomm" for CPU and CUDA tensors, unless that has been done."""
    from torch.distributed import Backend

    if not hasattr(Backend, "PYCOMM"):
        # A list: torch would walk through the letters of a string.
        devices = ["cpu", "cuda"]
        Backend.register_backend("pycomm", _create_group, extended_api=True, devices=devices)


def _create_group(group: Any, pg_options: Any) -> Any:
    from pycomm._group.creation import create_group

    return create_group(group, pg_options, _preflight)


def _preflight(options: Any) -> Any:
    """Only for jobs that want it: it stands above what makes groups, and takes time to import."""
    from pycomm.doctor.preflight import Preflight

    return Preflight(options)
