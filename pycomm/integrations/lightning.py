"""Lightning over pycomm.

torch's own wrapper needs no more than the name:

    Trainer(strategy=DDPStrategy(process_group_backend="pycomm"))

``make_strategy`` makes one with pycomm's wrapper:

    Trainer(strategy=pycomm.integrations.lightning.make_strategy(wire_dtype="fp16"))

Importing this module also gives Lightning the names "pycomm", which is ``make_strategy()``, and
"pycomm_fp16" and "pycomm_bf16", with that wire dtype:

    import pycomm.integrations.lightning

    Trainer(strategy="pycomm_fp16")
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
import sys
from types import ModuleType
from typing import Any

from torch import nn

from pycomm._group.creation import native_backend
from pycomm._native import loader
from pycomm._settings import AS_THE_GROUP
from pycomm._wire_patterns import WireDtype
from pycomm.integrations import _optional
from pycomm.integrations.accelerate import check_backend

# The second is the older package of the same code; its classes are not those of the first.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# Strategies by name, and their wire dtypes.
_NAMES: dict[str, WireDtype] = {
    "pycomm": AS_THE_GROUP,
    "pycomm_fp16": "fp16",
    "pycomm_bf16": "bf16",
}


def make_strategy(
    *, wire_dtype: WireDtype = AS_THE_GROUP, package: str = "lightning.pytorch", **options: Any
) -> Any:
    """A ``DDPStrategy`` whose group is pycomm's and whose wrapper is pycomm's.

    Unlike its base it registers ``ddp_comm_hook`` on CPU, too, where Lightning ignores it. For
    Lightning's barrier around ``prepare_data`` it sets ``GLOO_SOCKET_IFNAME``, if unset, to the
    group's interface.

    Args:
        wire_dtype: What gradients travel as, as for ``pycomm.DistributedDataParallel``.
        package: The package that the ``Trainer`` comes from: "lightning.pytorch" or
            "pytorch_lightning".
        options: For ``DDPStrategy``: its own and those of the wrapper, but for ``accumulate``,
            which is ``Trainer(accumulate_grad_batches=…)``.

    Raises:
        ImportError: Lightning is not installed.
        ValueError: ``accumulate`` is given, ``process_group_backend`` is another backend, or the
            package is another.
    """
    if package not in _PACKAGES:
        raise ValueError(f"package={package!r}: choose one of {', '.join(_PACKAGES)}")
    backend = options.setdefault("process_group_backend", "pycomm")
    if backend != "pycomm":
        raise ValueError(f"process_group_backend={backend!r}: leave it out, or use DDPStrategy")
    if (passes := options.get("accumulate", 1)) != 1:
        raise ValueError(
            f"accumulate={passes!r}: Lightning steps after every batch, and would step on "
            f"gradients that are not averaged yet. Try: Trainer(accumulate_grad_batches={passes!r})"
        )
    name = "lightning" if package == "lightning.pytorch" else "pytorch-lightning"
    library = _optional.load(
        f"{package}.strategies", package=name, needed_by="pycomm.integrations.lightning"
    )
    strategy = _strategy_class(library)(**options)
    strategy.pycomm_wire_dtype = wire_dtype
    return strategy


@functools.cache
def _strategy_class(library: ModuleType) -> type[Any]:
    """The subclass, made when it is asked for: its base is an optional package's."""
    from pycomm.ddp import DistributedDataParallel

    base: Any = library.DDPStrategy

    class PycommStrategy(base):  # type: ignore[misc]
        """Puts pycomm's wrapper where Lightning puts torch's."""

        pycomm_wire_dtype: WireDtype = AS_THE_GROUP
        _names_interface = False

        def setup_distributed(self) -> None:
            super().setup_distributed()  # takes the default group as it is, if there is one
            check_backend()
            self._names_interface = _name_interface_for_gloo()

        def barrier(self, *arguments: Any, **options: Any) -> None:
            self._forget_interface()  # the first one is right behind prepare_data
            super().barrier(*arguments, **options)

        def teardown(self) -> None:
            self._forget_interface()
            super().teardown()

        def _forget_interface(self) -> None:
            """Groups of pycomm would take it, too, and child processes have it."""
            if self._names_interface:
                os.environ.pop("GLOO_SOCKET_IFNAME", None)
            self._names_interface = False

        def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
            return DistributedDataParallel(
                model,
                device_ids=self.determine_ddp_device_ids(),
                wire_dtype=self.pycomm_wire_dtype,
                **self._ddp_kwargs,
            )

        def _register_ddp_hooks(self) -> None:
            hook = self._ddp_comm_hook
            if hook is None:
                return
            if self._ddp_comm_wrapper is not None:
                hook = self._ddp_comm_wrapper(hook)
            self.model.register_comm_hook(self._ddp_comm_state, hook)

    return PycommStrategy


def _name_interface_for_gloo() -> bool:
    """Lets gloo use the interface of the default group, unless ``GLOO_SOCKET_IFNAME`` is set;
    returns whether it has set it.

    For a ``prepare_data`` hook Lightning opens a group over gloo, which without the variable takes
    the address of the host's own name: 127.0.1.1 on Debian, where no other host connects.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    address = loader.native.group_address(native_backend())
    for interface in loader.native.list_interfaces():
        if interface["address"] == address:
            os.environ["GLOO_SOCKET_IFNAME"] = str(interface["name"])
            return True
    return False


def _register_names() -> None:
    """Puts the names of this module's strategies into each Lightning that is imported, or into the
    one that is installed."""
    packages = [name for name in _PACKAGES if name in sys.modules]
    if not packages:  # both are rarely installed, and only one of them is used
        installed = (name for name in _PACKAGES if importlib.util.find_spec(name.split(".")[0]))
        packages = list(itertools.islice(installed, 1))
    for package in packages:
        registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
        for name, wire_dtype in _NAMES.items():
            registry.register(
                name,
                make_strategy,
                description=f"pycomm.integrations.lightning.make_strategy({wire_dtype=})",
                override=True,
                package=package,
                wire_dtype=wire_dtype,
            )


_register_names()
