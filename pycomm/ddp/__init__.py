"""The drop-in wrapper, ``pycomm.DistributedDataParallel``."""

from pycomm.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
