"""Data-parallel training: torch's wrapper with pycomm's reducer in it.

``DistributedDataParallel`` is a subclass of torch's and inherits its ``forward``, so code that
looks for torch's class finds it, and torch.compile treats it alike. Only the reducer, which packs,
sends and averages gradients, is pycomm's own: it can send fewer bytes than the parameters have.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket

from pycomm._group.averaging import ring_nbytes
from pycomm._group.creation import compared_options, group_wire_dtype
from pycomm._group.model_check import check_same_on_all_ranks
from pycomm._group.queries import (
    by_nccl,
    check_group,
    host_group,
    need_pycomm,
    pycomm_backend,
    wrapper_number,
    wrapper_store,
)
from pycomm._metrics.ddp_stats import AS_COUNTED, DDPStats, add_wrapper
from pycomm._native import loader
from pycomm._settings import AS_THE_GROUP
from pycomm._wire_patterns import ENCODED, WireDtype, named_wire_dtype, wire_dtypes
from pycomm.codecs import codec_stats
from pycomm.ddp import elastic as _elastic
from pycomm.ddp.between_steps import BetweenSteps
from pycomm.ddp.ddp_options import (
    EndsByItself,
    all_names,
    bucket_caps,
    check_counts,
    check_options,
    check_parameters,
    check_python_reducer,
    check_switch,
    expect_sparse,
    for_torch,
    names_of,
    reducible,
    some,
    torch_options,
)
from pycomm.ddp.elastic import Elastic, ElasticGroup
from pycomm.ddp.weights import check_weight
from pycomm.errors import UnsupportedError

__all__ = ["DDPStats", "DistributedDataParallel", "ElasticGroup"]

_TorchDDP = nn.parallel.DistributedDataParallel
_MIB = 1024 * 1024
_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


class DistributedDataParallel(EndsByItself, BetweenSteps, _TorchDDP):
    """Averages gradients over the ranks of a group while backward runs.

    Takes the options of ``torch.nn.parallel.DistributedDataParallel``, and some more. Gradients may
    be on the CPU or on CUDA devices. An option that is not supported raises an error at
    construction; none is ignored.

    Example::

        model = pycomm.DistributedDataParallel(model, wire_dtype="fp16")
        for inputs, targets in loader:  # each rank has its own batches
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()  # averages the gradients while it runs
            optimizer.step()

    Args:
        module: The model. Names, shapes, dtypes and strides of parameters must be the same on all
            ranks, and are compared. Freeze and unfreeze parameters between passes, on all ranks.
        wire_dtype: The dtype that gradients travel in: "fp16", "bf16" or "int8"; None or "fp32"
            for their own; "group", the default: as the group's ``wire_dtype`` for float32
            gradients, their own for others. ``torch.float16`` and the like, too, or a mapping from
            patterns over parameter names to one of these; the first that matches wins, and what
            none matches travels in its own dtype: ``{"*.norm.*": None, "*": "int8"}``. The
            backend rounds fp16 and bf16 sums (pycomm adds in fp32 and rounds once). The division
            comes after, in fp32. fp16 is scaled by a power of two that follows the
            gradients' size, so neither 1e-6 nor 1e5 is lost; if the scale of a bucket was wrong, it
            is reduced again and counted in ``stats()``. int8 needs a group of pycomm, and
            sends a scale for each 256 elements.
        error_feedback: Whether a rank adds what int8 loses to its next gradients, for one
            more float32 per such element. Part of ``communication_state_dict()``.
        drops_nonfinite_steps: Whether you drop a step with an average that is Inf or NaN, as a
            ``GradScaler`` does: then error feedback keeps nothing of it. False if you repair such
            gradients and take the step; then the averages are not looked at.
        accumulate: Backward passes per reduction: gradients add up in ``.grad``, and the last
            pass reduces the sum, as with ``no_sync()`` around the others.
        sync_every: Above 1, gradients are averaged inside each host only, and every so many steps
            the next forward averages the parameters over all ranks. Optimizer state is not sent.
        weight: "samples": a rank counts by the samples of its batch, which need not be as many on
            all ranks: averages are those of one process with all batches. Losses are means over
            samples. A batch is counted by the first dimension of what ``forward()`` gets; else set
            ``samples``. A rank without a batch calls ``no_batch()``. None: all ranks count alike.
        elastic: A ``pycomm.Elastic``: the training goes on when ranks die. The wrapper then has a
            group of its own, see the attribute ``elastic``; docs/elastic.md says what does not go
            with it. None: the first failure ends the training.
        gradient_as_bucket_view: True by default here; with ``elastic`` it is False.
        bucket_cap_mb: Buckets hold 4 MiB by default here, 25 MiB if NCCL moves them; the first and
            the last one 1 MiB.

    Raises:
        ConfigMismatchError: The model or an option differs between ranks. Names the first
            difference and the ranks. Not compared with init_sync=False.
        UnsupportedError: An option, device or parameter that the reducer cannot serve.
        TypeError, ValueError: As torch's class, for its own arguments; a pattern without a match.

    Threads and streams: use a wrapper from one thread at a time. The end of backward blocks,
    without the interpreter's lock, until averages are written (CPU) or streams wait for them. A
    backward pass may go through several wrappers, which all ranks made in the same order.

    Cost: one all-reduce per bucket, launched from backward. At construction an all-gather of 24
    bytes per rank, with ``elastic`` another of 8, and the collectives of torch's class; before the
    second forward a broadcast of 8 bytes per parameter, rank 0's order of buckets.
    """

    _by_nccl = False
    _own_group: Any = None  # of a wrapper pickled before the attribute had this name
    _drops_nonfinite_steps = True  # of a wrapper pickled before the option existed

    reducer: Any
    logger: Any
    process_group: Any

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        *args: Any,
        wire_dtype: WireDtype = AS_THE_GROUP,
        error_feedback: bool = True,
        drops_nonfinite_steps: bool = True,
        accumulate: int = 1,
        sync_every: int = 1,
        weight: str | None = None,
        elastic: Elastic | None = None,
        **kwargs: Any,
    ) -> None:
        _elastic.check_elastic(
            elastic,
            module,
            sync_every=sync_every,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )
        if gradient_as_bucket_view is None:
            gradient_as_bucket_view = elastic is None
        spelled = {
            "device_ids": device_ids,
            "output_device": output_device,
            "dim": dim,
            "broadcast_buffers": broadcast_buffers,
            "init_sync": init_sync,
            "process_group": process_group,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "check_reduction": check_reduction,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        passed_on = for_torch(spelled, args, kwargs)
        options = torch_options(module, passed_on)
        check_options(module, options)
        wires = named_wire_dtype(wire_dtype)
        check_switch(error_feedback=error_feedback, drops_nonfinite_steps=drops_nonfinite_steps)
        check_counts(accumulate=accumulate, sync_every=sync_every)
        check_weight(weight)
        # Before Module.__init__, which keeps plain attributes: torch's constructor calls back.
        self._wire_dtype = wires
        self._error_feedback = error_feedback
        self._drops_nonfinite_steps = drops_nonfinite_steps
        self._accumulate = accumulate
        self._sync_every = sync_every
        self._weight = weight
        self._elastic = elastic
        self._may_be_joined = elastic is not None and elastic.peers is not None
        self._uses_default_cap = options["bucket_cap_mb"] is None
        self._inits_sync = bool(options["init_sync"])
        self._with_all_ranks = True  # not when unpickled or copied, which one rank may do alone
        self._own_group: Any = None  # of sync_every and elastic
        self._elastic_group: ElasticGroup | None = None
        self._agreement: Any = None
        self._description = ""  # of model and options
        self._steps_at_sync = self._syncs = 0
        self._unsynced: set[str] = set()  # parameters trained since the last sync
        self._wires: dict[torch.Tensor, str | None] = {}
        self._overflows_before = 0
        self._sync_wire_nbytes = 0
        self._sync_seconds = 0.0
        try:
            super().__init__(module, **passed_on)
        except BaseException:
            if self._agreement is not None:  # the other members would wait for this one's steps
                self._agreement.close()
            if elastic is not None and self._own_group is not None:
                dist.destroy_process_group(self._own_group)  # torch would keep it
            raise
        self._with_all_ranks = False
        if sync_every > 1:
            # Buffers follow the host's first rank in forward, and all ranks' first rank at a sync.
            self.global_group = self.process_group
            self.process_group = self._own_group
            from pycomm.ddp.due_syncs import sync_when_due

            self._before_forward = sync_when_due
            self.register_forward_pre_hook(sync_when_due)
        if self._may_be_joined and elastic is not None and elastic.join_pause is not None:
            from pycomm.ddp.joining import stop_for_newcomers

            self._before_forward = stop_for_newcomers
            self.register_forward_pre_hook(stop_for_newcomers)
        self._overflows_before = self._overflows()  # of the group that reduces
        add_wrapper(self)

    @property
    def elastic(self) -> ElasticGroup | None:
        """With ``elastic=``: the ranks that train together now. None without it."""
        return self._elastic_group

    def stats(self) -> DDPStats:
        """Counters since construction. Never blocks: any thread, signal handler or hook may ask.

        During a backward pass they are those of its last gradient, or of its last bucket's launch.
        """
        check_python_reducer(self, "stats()")
        raw = self.reducer.stats()
        everyone = self.global_group if self._sync_every > 1 else self._reducing_group()
        world_size = dist.get_world_size(everyone)
        # Between hosts, if that is not the same as inside them.
        handed = self._sync_wire_nbytes if self._sync_every > 1 else raw.wire_nbytes
        sent = ring_nbytes(handed - sum(each[1] for each in raw.past), world_size)
        plain = ring_nbytes(raw.gradient_nbytes - sum(each[2] for each in raw.past), world_size)
        for ranks, wire_nbytes, gradient_nbytes, _ in raw.past:
            sent += ring_nbytes(wire_nbytes, ranks)
            plain += ring_nbytes(gradient_nbytes, ranks)
        exposed = raw.exposed_ns / 1e9 + self._sync_seconds
        return DDPStats(
            **{name: getattr(raw, name) for name in AS_COUNTED},
            syncs=self._syncs,
            wire_nbytes=raw.wire_nbytes + self._sync_wire_nbytes,
            sent_nbytes=sent,
            saved_nbytes=plain - sent,
            exposed_seconds=exposed,
            exposed_seconds_per_step=exposed / max(1, raw.steps),
            agreeing_seconds=raw.agreeing_ns / 1e9,
            meeting_seconds=raw.meeting_ns / 1e9,
            redoing_seconds=raw.redoing_ns / 1e9,
            codec_overflows=self._overflows()
            - self._overflows_before
            + sum(each[3] for each in raw.past),
        )

    def _overflows(self) -> int:
        if not any(wire in ENCODED for wire in self._wires.values()):
            return 0
        return codec_stats(self._reducing_group()).overflows

    def sync(self) -> None:
        """With ``sync_every``: averages parameters over all ranks now. Collective, blocks.

        Call it after the last step, before you save or evaluate. Buffers become those of rank 0.
        """
        if self._sync_every == 1:
            return
        begin = time.perf_counter()
        self._sync_wire_nbytes += self._average_models()
        self._sync_seconds += time.perf_counter() - begin
        self._syncs += 1
        self._steps_at_sync = self.reducer.stats().steps

    def communication_state_dict(self) -> dict[str, Any]:
        """The wrapper's position between reductions and syncs: part of a full checkpoint.

        ``state_dict()`` is torch's and does not have it. Accumulated gradients are in neither: save
        between steps, or a copy of each ``.grad``, too. With error feedback "residuals" has what
        int8 has lost and this rank not sent yet: a float32 tensor per parameter name. Save and load
        it on every rank, since each has its own.
        During a backward pass it comes without residuals, as if the step had been dropped, and so
        it does after a backward pass that has failed, until the wrapper begins again. Any
        thread, signal handler or hook may ask for it. One that is not in a backward pass waits for
        another thread that works on the wrapper between two passes.

        A wrapper of the same options that loads it continues bit by bit as this one would.
        """
        raw = self.reducer.stats()
        order, agreed = self.reducer.order()
        state = {"accumulated": raw.accumulated, "unsynced": raw.steps - self._steps_at_sync}
        more = {
            # With a hook error feedback keeps nothing, and a state with zeros would be refused.
            "residuals": {} if self._comm_hooks else self.reducer.residuals(),
            "unsynced_parameters": sorted(self._unsynced),
            "trains_in_eval": not self._trains_in_train(raw.steps),
            "fp16_exponents": self.reducer.exponents(),
            "bucket_order": order,
            "order_agreed": agreed,
            "used": self.reducer.used_here(),
            **self._state_of_weights(),
        }
        return {**state, **{name: value for name, value in more.items() if value}}

    def load_communication_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of ``communication_state_dict()``, on every rank.

        After an error the wrapper is as before the call.

        Raises:
            KeyError: It lacks "accumulated" or "unsynced".
            ValueError: Error feedback of a parameter that has none here, or of another shape; a
                scale or an order of buckets of other parameters; passes that accumulate with
                ``weight`` where there is none, or the other way round.
        """
        weighed, weight_unsynced = self._weights_in(state)
        unsynced, unsynced_names = int(state["unsynced"]), set(state.get("unsynced_parameters", ()))
        # Nothing is changed before this, and nothing refused after it.
        self.reducer.load(
            dict(state.get("fp16_exponents", {})),
            list(state.get("bucket_order", ())),
            bool(state.get("order_agreed", False)),
            int(state["accumulated"]),
            list(state.get("used", ())),
            dict(state.get("residuals", {})),
            weighed,
            weight_unsynced,
        )
        steps = self.reducer.stats().steps
        self._steps_at_sync = steps - unsynced
        self._trains_in_mode = not state.get("trains_in_eval", False)
        self._last_forward = (steps, self._trains_in_mode)
        self._unsynced = unsynced_names

    def scale_residuals(self, factor: float) -> None:
        """Multiplies what error feedback keeps on this rank. Call it on every rank.

        Residuals have the unit of the averages: pass the factor of clipping, or the new loss scale
        over the old one after ``scaler.update()``; 0 forgets them, for a step that you drop. With
        ``drops_nonfinite_steps`` they are zeros after a step with an average that is not finite,
        of this wrapper or of another one in the same call of ``backward()``. If a ``GradScaler``
        skips a step for the sake of other gradients, so that ``get_scale()`` falls, pass 0.
        ValueError: not a finite factor.
        """
        self.reducer.scale_residuals(float(factor))

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]
    ) -> None:
        """Lets ``hook(state, bucket)`` reduce the buckets, as torch's method of this name does.

        The hook runs through ``pycomm.comm_hooks.ordered``, on a thread of its own, so buckets come
        one at a time. Over NCCL and over other libraries' groups it runs on the thread of backward,
        so all ranks issue collectives in one order. ``bucket.buffer()`` is (numel,), contiguous, in
        the parameters' dtype and on their device; the future that the hook returns has a tensor of
        that shape and dtype, the averages.
        Over a group of pycomm, sums of float32 that it issues are encoded as ``wire_dtype`` says,
        without error feedback.

        Raises:
            RuntimeError: There is a hook already, or training has begun.
            UnsupportedError: ``wire_dtype`` names an encoding, and the hook's group is not
                pycomm's; or ``elastic`` is set.
        """
        self._not_elastic("a comm hook", "wire_dtype=")
        self._check_comm_hook(hook)
        self.reducer.check_hook_may_be_set()  # before the hook gets a number, which ranks share
        self._order_hook(hook, state)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))

    def _order_hook(self, hook: Callable[..., Any], state: object) -> None:
        """Gives the reducer the hook, with a number of its own in its group of now."""
        from pycomm.comm_hooks import group_of_hook, ordered

        group = group_of_hook(hook, state, self._reducing_group())
        if self._wire_dtype not in (AS_THE_GROUP, "fp32"):
            need_pycomm(group, f"wire_dtype={self._wire_dtype!r} together with a comm hook")
        wrapped = ordered(
            hook, group=group, describe=self._describe_bucket, codec_of=self._codec_of
        )
        self.reducer._register_comm_hook(state, wrapped, hook.__qualname__, group)

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        # torch knows its bf16 hooks by their names and wants NCCL for them; pycomm adds bf16 up.
        if getattr(hook, "__name__", "") not in _BF16_HOOKS:
            super()._check_comm_hook(hook)  # type: ignore[no-untyped-call]

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """ALLREDUCE is the default; FP16_COMPRESS is ``wire_dtype="fp16"``."""
        self._not_elastic("a comm hook", "wire_dtype=")
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS:  # type: ignore[attr-defined]
            check_python_reducer(self, "FP16_COMPRESS")
            trained = reducible(self.module, self.parameters_to_ignore)
            dtypes = [parameter.dtype for parameter in trained.values()]
            wire_dtypes("fp16", list(trained), dtypes, option="FP16_COMPRESS")
            if self._wire_dtype == AS_THE_GROUP and any(self._wires.values()):
                raise UnsupportedError(
                    'FP16_COMPRESS is wire_dtype="fp16", and the group\'s wire_dtype is '
                    f"{group_wire_dtype(self.process_group)!r}, which the wrapper follows. "
                    "Try: wire_dtype=None in the wrapper, or no hook"
                )
        self.reducer._register_builtin_comm_hook(comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _update_process_group(self, new_process_group: Any) -> None:
        """Hooks go on over the group that is in their state by now, else over the new one."""
        super()._update_process_group(new_process_group)
        if self.process_group is new_process_group and not self._use_python_reducer:
            store = wrapper_store(new_process_group)
            if store is not None:
                self.reducer.share_store(store)
            # The ranks of the new group may have called the hook another number of times.
            for hook, state in self._comm_hooks:
                self._order_hook(hook, state)

    def _reducing_group(self) -> Any:
        return self.process_group if self._own_group is None else self._own_group

    def _codec_of(self, bucket: GradBucket) -> str | None:
        if self._wire_dtype == AS_THE_GROUP:
            return None
        return self._wires[bucket.parameters()[0]] or "fp32"  # a bucket has one wire dtype

    def _describe_bucket(self, bucket: GradBucket) -> str:
        names = some(names_of(self.module, bucket.parameters()))
        rank = dist.get_rank()  # in the job
        return f"in the comm hook of rank {rank}, bucket {bucket.index()} with {names}"

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """For uneven data: ranks that have run out of it follow the others with zeros.

        As torch's method of this name. With ``accumulate`` the first average after a rank's last
        batch has what that rank had gathered, unless it divides by those that still have data.

        Raises:
            UnsupportedError: ``sync_every`` is above 1, ``elastic`` is set, or torch's Python
                reducer averages.
        """
        if enable:
            check_python_reducer(self, "join()")
            self._not_elastic("join()", 'weight="samples", and model.no_batch() without a batch')
        if enable and self._weight is not None:
            raise UnsupportedError(
                f'join() cannot follow weight="{self._weight}": a rank that has run out of data '
                "calls model.no_batch() until the others have, too"
            )
        if enable and self._sync_every > 1:
            raise UnsupportedError(
                "join() cannot follow the averaging of sync_every yet: give every rank the same "
                "number of batches, as torch.utils.data.DistributedSampler does"
            )
        return super().join(divide_by_initial_world_size, enable, throw_on_early_termination)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        # torch calls this before its own check of shapes, which names parameters by index only, and
        # before it sends anything.
        self.parameters_to_ignore = set(all_names(self.module, self.parameters_to_ignore))
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        check_python_reducer(self)
        if self._elastic is not None:
            need_pycomm(self.process_group, "elastic=")
        names = names_of(self.module, parameters)
        if (self._with_all_ranks and self._inits_sync) or self._may_be_joined:
            of_group = compared_options(self.process_group) if self._may_be_joined else {}
            self._description = check_same_on_all_ranks(
                self.process_group,
                self.device,
                options={
                    "wire_dtype": self._wire_dtype,
                    "error_feedback": self._error_feedback,
                    "drops_nonfinite_steps": self._drops_nonfinite_steps,
                    "accumulate": self._accumulate,
                    "sync_every": self._sync_every,
                    "weight": self._weight,
                    "elastic": self._elastic,
                    "state": [type(each).__name__ for each in getattr(self._elastic, "state", ())],
                    "join_pause": getattr(self._elastic, "join_pause", None),
                    "peers": getattr(self._elastic, "peers_port", None),
                    "bucket_cap_mb": self.bucket_bytes_cap / _MIB,
                    "find_unused_parameters": self.find_unused_parameters,
                    "broadcast_buffers": self.broadcast_buffers,
                    **{f"{name} of the group": value for name, value in of_group.items()},
                },
                parameters=zip(names, parameters, strict=True),
                buffers=self.named_module_buffers.items() if self.broadcast_buffers else (),
            )
        if self._elastic is not None:
            _elastic.check_alone(self._elastic, self.process_group, self.device)
        over_pycomm = pycomm_backend(self.process_group) is not None
        check_parameters(names, parameters, sparse if over_pycomm else [False] * len(names))
        return parameters, sparse

    def _join_point(self) -> Callable[[], None] | None:
        elastic = self._elastic
        if elastic is None or elastic.peers is None or elastic.join_pause is not None:
            return None
        from pycomm.ddp.joining import admit_at_join_point

        return functools.partial(admit_at_join_point, weakref.proxy(self))

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        native = loader.native
        if self._sync_every > 1:
            self._own_group = host_group(self.process_group)
        agreement = None
        received: Mapping[str, Any] = {}
        if self._elastic is not None:
            self._own_group = _elastic.make_group(self.process_group, self._elastic)
            addresses: Sequence[str] = ()
            if self._elastic.join and self._elastic.peers_port is not None:
                from pycomm.ddp.joining import look_up

                # Later, members wait for this process.
                addresses = look_up(self._elastic.peers_port)
            agreement = _elastic.make_agreement(self._own_group, self._elastic, self._description)
            self._agreement = agreement
            if self._elastic.join:
                from pycomm.ddp.joining import pull

                received = pull(agreement, self, addresses)
        everything = (
            {} if self._use_python_reducer else reducible(self.module, self.parameters_to_ignore)
        )
        self._find_places()
        names, tensors = list(everything), list(everything.values())
        wires = wire_dtypes(
            self._wire_dtype,
            names,
            [tensor.dtype for tensor in tensors],
            of_group=group_wire_dtype(self.process_group),
        )
        self._wires = dict(zip(tensors, wires, strict=True))
        group = self._reducing_group()
        listed = getattr(self, "bucket_bytes_cap_list", [])
        if self._with_all_ranks and tensors and self._uses_default_cap and not listed:
            self._by_nccl = by_nccl(group, tensors[0].device)
        check_group(group, wires)
        self.reducer = native.Reducer(
            tensors,
            names,
            wires,
            expect_sparse(self.module, tensors),
            group,
            pycomm_backend(group),
            wrapper_store(group) if self._with_all_ranks else None,
            **bucket_caps(
                listed,
                None if self._uses_default_cap else self.bucket_bytes_cap,
                self._by_nccl,
            ),
            accumulate=self._accumulate,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            error_feedback=self._error_feedback,
            drops_nonfinite_steps=self._drops_nonfinite_steps,
            weighs=self._weight is not None,
            may_be_weightless=self._sync_every > 1,  # other hosts may have samples
            has_sync_batch_norm=self._has_sync_batch_norm(),
            wrapper_number=wrapper_number(group)
            if self._with_all_ranks and self._inits_sync
            else 0,
            cuda_library=str(loader.CUDA_LIBRARY),
            agreement=agreement,
        )
        if received:
            from pycomm.ddp.joining import follow

            follow(self, received)
        if agreement is not None:
            self._elastic_group = ElasticGroup(
                self.reducer,
                weighs=self._weight is not None,
                steps_before=received.get("steps", 0),
                join_point=self._join_point(),
            )
        self.logger = native.DdpLogger(self.reducer)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(layer, nn.SyncBatchNorm) for layer in self.module.modules()),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]
