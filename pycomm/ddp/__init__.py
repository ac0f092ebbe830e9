"""The drop-in wrapper, ``pycomm.DistributedDataParallel``, and the types of what it returns."""

from pycomm.ddp.wrapper import DDPStats, DistributedDataParallel, ElasticGroup

__all__ = ["DDPStats", "DistributedDataParallel", "ElasticGroup"]
