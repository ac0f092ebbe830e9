"""What the wrapper does before a forward pass with ``sync_every``.

A module of its own, because torch's decorator imports torch's compiler, which
takes about as long as torch itself.
"""

from __future__ import annotations

from typing import Any

import torch

from pycomm.errors import UnsupportedError


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sync_when_due(model: Any, args: object) -> None:
    """Averages parameters before a forward with gradients if ``sync_every`` steps are over.

    UnsupportedError: within backward.
    """
    if not torch.is_grad_enabled():
        return
    steps = model.reducer.stats().steps
    model._trains_in_mode = model._trains_in_train(steps)
    model._last_forward = (steps, model.module.training)
    # A forward in eval() mode of a model that is trained in train() mode is a look by one rank.
    if steps - model._steps_at_sync >= model._sync_every and (
        model.module.training or not model._trains_in_mode
    ):
        if torch._C._current_graph_task_id() != -1:
            raise UnsupportedError(
                "parameters would be averaged within backward(), where a checkpoint repeats "
                "forward: one with use_reentrant=True, or one of several forward passes before "
                "the first backward(). Try: model.sync() between two steps, before sync_every are "
                "over; or use_reentrant=False, and one forward pass before each backward()"
            )
        model.sync()
    model._note_trained()
