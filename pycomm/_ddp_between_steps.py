"""What a wrapper does between steps: it averages parameters over all hosts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm._averaging import average_
from pycomm._ddp_options import reducible


class BetweenSteps(nn.parallel.DistributedDataParallel):
    """A base of pycomm's wrapper."""

    _sync_every: int
    _unsynced: set[str]
    global_group: Any

    def _note_trained(self) -> None:
        """The next sync averages the parameters that are trained now, even if frozen then."""
        if self._sync_every == 1:
            return
        mine = reducible(self.module, self.parameters_to_ignore)
        self._unsynced.update(name for name, each in mine.items() if each.requires_grad)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _average_models(self) -> int:
        """Over all hosts, what the wrapper owns. Returns the bytes given to all_reduce."""
        self._note_trained()
        mine = reducible(self.module, self.parameters_to_ignore)
        trained = [each for name, each in mine.items() if name in self._unsynced]
        nbytes = average_(trained, self.global_group)
        self._unsynced.clear()
        buffers = list(self.named_module_buffers.values()) if self.broadcast_buffers else []
        if buffers:
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                self.global_group, buffers, self.broadcast_bucket_size, 0
            )
        return nbytes
