"""Overrides of private methods of torch's wrapper: marks, syncs, restarts, steps of others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

from pycomm._group.averaging import average_
from pycomm.ddp.ddp_options import reducible
from pycomm.ddp.elastic import Elastic, refuse
from pycomm.ddp.weights import Weighed
from pycomm.errors import CollectiveMismatchError, UnsupportedError


class BetweenSteps(Weighed):
    """Overrides of private methods of torch's wrapper."""

    reducer: Any
    _sync_every: int
    _elastic: Elastic | None = None
    _unsynced: set[str]
    global_group: Any
    _places: list[tuple[nn.Module, str, nn.Parameter, str]]
    """Where the module has each parameter that the reducer serves, and its name."""
    _last_forward: tuple[int, bool] = (0, True)
    """The steps before the last forward with gradients, and whether that was in train() mode."""
    _trains_in_mode: bool = True
    """Whether the forward of the last step was in train() mode."""

    def __getstate__(self) -> dict[str, Any]:
        if getattr(self, "_sync_every", 1) > 1:  # torch would say that process_group was passed
            raise UnsupportedError(
                "a DistributedDataParallel with sync_every above 1 has a group of its own, and "
                "cannot be copied or pickled. Try: its .module, which can"
            )
        self._not_elastic("a copy or a pickle of the wrapper", "its .module")
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state

    @property
    def _static_graph_delay_allreduce_enqueued(self) -> bool:
        """Torch's wrapper tells the reducer the end of a static graph's pass while this is False.

        Torch sets it for good in the first backward call, which may fail before its end.
        """
        return not self.reducer.is_counting()

    @_static_graph_delay_allreduce_enqueued.setter
    def _static_graph_delay_allreduce_enqueued(self, value: bool) -> None:
        """The reducer knows."""

    def _update_process_group(self, new_process_group: Any) -> None:
        if self._sync_every > 1:
            raise UnsupportedError(
                "a wrapper with sync_every keeps its process group, since its host's group belongs "
                "to it: wrap the module anew with the new group"
            )
        self._not_elastic("another process group", "the module wrapped anew")
        super()._update_process_group(new_process_group)  # type: ignore[no-untyped-call]

    def _trains_in_train(self, steps: int) -> bool:
        """Whether the forward of the last of so many steps was in train() mode."""
        steps_then, mode_then = self._last_forward
        return mode_then if steps != steps_then else self._trains_in_mode

    def _note_trained(self) -> None:
        """The next sync averages the parameters that are trained now, even if frozen then."""
        if self._sync_every == 1:
            return
        mine = reducible(self.module, self.parameters_to_ignore)
        self._unsynced.update(name for name, each in mine.items() if each.requires_grad)

    @torch.no_grad()
    def _average_models(self) -> int:
        """Over all hosts, what the wrapper owns. Returns the bytes given to all_reduce."""
        self._note_trained()
        mine = reducible(self.module, self.parameters_to_ignore)
        trained = {name: each for name, each in mine.items() if name in self._unsynced}
        nbytes = average_(trained, self.global_group, self._ratio_of_sync(self.global_group))
        self._unsynced.clear()
        if self._weight is not None:
            self.reducer.set_weight_unsynced(0.0)
        # A forward may have put others in their places.
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        buffers = list(self.named_module_buffers.values()) if self.broadcast_buffers else []
        if buffers:
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                self.global_group, buffers, self.broadcast_bucket_size, 0
            )
        return nbytes

    def _find_places(self) -> None:
        """Of the parameters that the reducer serves."""
        mine = {id(each) for each in reducible(self.module, self.parameters_to_ignore).values()}
        self._places = [
            (owner, name, each, f"{prefix}.{name}" if prefix else name)
            for prefix, owner in self.module.named_modules()
            for name, each in owner.named_parameters(recurse=False)
            if id(each) in mine
        ]

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for owner, name, each, full_name in self._places:
                now = owner._parameters.get(name)
                # Else a value that follows from the parameter stands in for it, or nothing does.
                if now is not each and isinstance(now, nn.Parameter) and now.requires_grad:
                    raise RuntimeError(
                        f"parameter {full_name!r} is another one than when the module was wrapped, "
                        "so its gradients would stay on this rank: load_state_dict(assign=True) or "
                        "an assignment has replaced it. Try: wrap the module after that, or load "
                        "without assign=True"
                    )
        return super()._pre_forward(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._hand_over_buffers()
        if not self._use_python_reducer and not torch.compiler.is_compiling():
            self.reducer.ran_forward()
        # Before torch's part, which may put a node of its own behind these outputs.
        if torch.is_grad_enabled() and not self._use_python_reducer:
            tensors = _find_tensors(output)  # type: ignore[no-untyped-call]
            outputs = [each for each in tensors if each.requires_grad]
            self.reducer.mark_forward(
                outputs, self.require_backward_grad_sync, self._forward_weight
            )
        return super()._post_forward(output)  # type: ignore[no-untyped-call]

    def _hand_over_buffers(self) -> None:
        if self._elastic is not None and self.broadcast_buffers and self.modules_buffers:
            self._assign_modules_buffers()  # type: ignore[no-untyped-call]
            self.reducer.set_buffers(self.modules_buffers)

    def _register_buffer_comm_hook(self, state: Any, hook: Any, *args: Any, **options: Any) -> None:
        self._not_elastic("a buffer comm hook", "broadcast_buffers")
        super()._register_buffer_comm_hook(state, hook, *args, **options)

    def _not_elastic(self, what: str, instead: str) -> None:
        if self._elastic is not None:
            refuse(what, "its ranks may die, and it is no part of a step", instead)

    def _sync_buffers(self) -> None:
        if self._elastic is not None:
            return  # they are part of the step
        try:
            super()._sync_buffers()  # type: ignore[no-untyped-call]
        except CollectiveMismatchError as error:
            if not self._use_python_reducer:
                why = self.reducer.explain_forward(str(error))
                if why is not None:  # as add_note() of Python 3.11
                    error.__dict__["__notes__"] = [*getattr(error, "__notes__", []), why]
            raise

    def _match_all_reduce_for_bwd_pass(self) -> None:
        # Torch's way runs hooks on zeros, bucket by bucket; buckets may need to be reduced twice.
        # Only the first of several in one Join counts the ranks that still have data.
        by_all = self._divide_by_initial_world_size or not self._join_config.is_first_joinable
        self.reducer.shadow_backward(by_all)

    def _match_unused_params_allreduce(self) -> None:
        """Part of ``shadow_backward()``."""
