"""One rank of a random training program, beside a plain model and averages by hand in float64.

Each pass runs through a plain copy of the model, too, with the same parameters and this rank's
batch. Its gradients, in float64, are this rank's share. Shares, and digests of what the wrapper
made, travel between the ranks through a store of torch's, so that pycomm carries no part of the
answer that it is compared with.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import pickle
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import rank_pool
import torch
import torch.distributed as dist
from codec_bounds import BLOCK
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training_callbacks import Callbacks, make_half
from training_models import ASIDE, SMOOTH, Ignored, Sum, batch_of, loss_of
from training_outer import Outer
from training_programs import LOCAL, WRAPPER, Program, Step
from training_weights import Window, factors

Array = npt.NDArray[Any]

TIMEOUT_S = 10.0
_LR = 0.05
_ROUNDING = {
    torch.float64: 1e-12,
    torch.complex64: 2e-6,
    torch.float32: 2e-6,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-9,
}
_LEAST = {torch.float16: 2.0**-22}
"""Half of the smallest number above zero, a few times."""
_WIRE_ROUNDING = {"bf16": 2.0**-6, "fp16": 2.0**-8}
_OF_LARGEST = {"fp16": 2.0**-19}
"""Of an average: how far it may be from the mean, as a part of the largest gradient so far, since a
bucket's scale follows the earlier ones."""
_OF_BLOCK = {"int8": 1 / 250}
"""One encoding, as a part of the largest of its block."""
ENCODED = ("int8",)
_MIN_ENCODED_NBYTES = 16 << 10
_SPIKE = 1e25
_ERROR_DECAY = 0.95  # of SparseLoCo, whose outer_lr is 1
WRONG = ("zeros", "of rank 0", "divided twice")
"""What a hook may make of the buckets that are large enough to be encoded."""


class Over(Exception):
    """The program has ended with the error that it had to end with."""


class Exchange:
    """Objects from each rank to each, in one order. It ends when one of them has failed."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._turns = store, rank, 0

    def all(self, mine: Any, members: Sequence[int]) -> list[Any]:
        """What these ranks gave in this turn. A turn that a rank has no part in is ``skip``."""
        self._turns += 1
        self._store.set(f"{self._turns}/{self._rank}", pickle.dumps(mine))
        return [pickle.loads(self._wait_for(f"{self._turns}/{rank}")) for rank in members]

    def skip(self, turns: int) -> None:
        self._turns += turns

    def fail(self) -> None:
        self._store.set("failed", str(self._rank))

    def _wait_for(self, key: str) -> bytes:
        deadline = time.monotonic() + 2 * TIMEOUT_S
        while True:
            try:
                self._store.wait([key], timedelta(seconds=0.5))
                found: bytes = self._store.get(key)
                return found
            except RuntimeError:
                if self._store.check(["failed"]):
                    raise AssertionError("another rank has failed") from None
                if time.monotonic() > deadline:
                    raise


def numbers(tensor: torch.Tensor) -> Array:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    wide = torch.complex128 if dense.is_complex() else torch.float64
    return dense.to(wide).numpy().copy()


def bits(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        digest.update(plain.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Trainer:
    """The program's state on this rank, as it is and as it must be."""

    def __init__(self, program: Program, rank: int, exchange: Exchange) -> None:
        import pycomm
        from pycomm._group import averaging

        self.program, self.rank, self.exchange = program, rank, exchange
        self.everyone = list(range(program.ranks))
        self.wrapped = program.trainer == WRAPPER
        options = dict(program.options)
        self.accumulate = options.get("accumulate", 1)
        self.sync_every = options.get("sync_every", 1)
        self.static = options.get("static_graph", False)
        self.tracks_use = self.static or options.get("find_unused_parameters", False)
        self.hosts = self.wrapped and self.sync_every > 1
        self.weighed = options.get("weight") is not None
        self.mates = [each for each in self.everyone if not self.hosts or each % 2 == rank % 2]
        averaging.host_identity = lambda: f"host {rank % 2}"
        Ignored.rank = rank
        self.plain = Sum(program.parts, program.seed)
        net = copy.deepcopy(self.plain)
        ignored = [
            f"parts.{index}.{name}" for index in net.which("ignored") for name in ("shard", "own")
        ]
        self.ignored = set(ignored)
        # A callback's name has the sizes of the groups in it: halves of three ranks have two.
        needs_half = program.ranks % 2 == 0 and any("half" in step.how for step in program.steps)
        half = make_half(rank, program.ranks) if needs_half else None
        self.callbacks, self.in_hooks = (
            Callbacks(rank, program.ranks, program.seed + each, half) for each in (0, 1)
        )
        self.local: Any = None
        if self.wrapped:
            TorchDDP._set_params_and_buffers_to_ignore_for_model(net, ignored)
            self.model: Any = pycomm.DistributedDataParallel(net, **options)
            if program.hook:
                self.model.register_comm_hook(None, self._hook(program.hook))
        else:
            self.model = net
            self.local = getattr(pycomm, program.trainer)(net, **options)
        self.local_steps = self.local_syncs = 0
        """Of the object of now."""
        self.given_syncs = 0
        """Of ``stats().syncs``: until the state was made or loaded, and the fragment in it."""
        self.outer: Outer | None = None
        if program.trainer in ("DiLoCo", "StreamingDiLoCo"):
            anchor = {name: numbers(each) for name, each in self._trained().items()}
            self.outer = Outer(anchor, options.get("fragment_sync_delay", 0))
        self.optimizer = torch.optim.SGD(self._trained().values(), lr=_LR)
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)  # type: ignore[attr-defined]
        self.grads: dict[str, Array] = {}
        """What ``.grad`` must hold here, by name."""
        self.used: set[str] = set()
        """With a gradient on this rank since the last reduction."""
        self.always_used: set[str] | None = None
        """Of a static graph: by any rank."""
        self.kept: dict[str, list[Array]] = {}
        """What error feedback keeps on each rank of this host; and, of a reduction that not all of
        them have compared, by how much it then grew on all together."""
        self.largest = self.largest_now = 0.0
        self.dirty = False
        """Whether some ``.grad`` is this rank's own, which no optimizer may apply."""
        self.armed = False
        """Whether a forward outside no_sync() has had no backward."""
        self.count = self.steps = self.passes = self.batches = 0
        self.steps_at_sync = self.since_sync = 0
        self.last_forward, self.trains_in_mode = (0, True), True
        self.saved: Any = None
        narrow = any(each.dtype == torch.float16 for each in self._owned().values())
        self.window = Window(narrow=narrow)
        self.other: Any = None
        """Another wrapper of the model."""
        self.followed: set[str] = set()
        """Parameters that the last pass trained."""
        self.weightless = False
        """The last pass had the error that no rank has samples."""
        self.mixed = False
        """Something was frozen or unfrozen between passes: what is left of it is this rank's."""

    # The model

    @property
    def net(self) -> Sum:
        found: Sum = self.model.module if self.wrapped else self.model
        return found

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def _owned(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self._parameters().items() if n not in self.ignored}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self._parameters().items() if each.requires_grad}

    def _frozen_parts(self) -> set[int]:
        trained = self._trained()
        return {
            index
            for index in range(len(self.program.parts))
            if not any(name.startswith(f"parts.{index}.") for name in trained)
        }

    def _wire(self, name: str) -> str | None:
        return self.program.wire_of(int(name.split(".")[1]))

    def _feeds_back(self, part: int) -> bool:
        feeds: bool = self.program.option("error_feedback", True)
        return self.program.wire_of(part) in ENCODED and feeds and not self.program.hook

    def _hook(self, kind: str) -> Callable[..., Any]:
        ranks = dist.get_world_size()

        def again(state, bucket):  # type: ignore[no-untyped-def]
            def second(future):  # type: ignore[no-untyped-def]
                total = future.value()[0]
                dist.all_reduce(total)
                return total.div_(ranks**2)

            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(second)

        def two_futures(state, bucket):  # type: ignore[no-untyped-def]
            if bucket.buffer().is_sparse:
                return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

            def second(future):  # type: ignore[no-untyped-def]
                time.sleep(torch.rand(()).item() / 1000)
                total = future.value()[0]
                dist.all_reduce(total)
                return total.div_(ranks**2)

            halves = bucket.buffer().tensor_split(2)
            futures = [
                dist.all_reduce(half, async_op=True).get_future().then(second) for half in halves
            ]
            whole = torch.futures.collect_all(futures)
            return whole.then(lambda both: torch.cat([each.value() for each in both.value()]))

        def asks(state, bucket):  # type: ignore[no-untyped-def]
            self.model.stats()
            return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

        def metric(state, bucket):  # type: ignore[no-untyped-def]
            self.in_hooks.issue("of a sum")
            return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

        def wrong(kind):  # type: ignore[no-untyped-def]
            def hook(state, bucket):  # type: ignore[no-untyped-def]
                buffer = bucket.buffer()
                if buffer.nbytes < _MIN_ENCODED_NBYTES:
                    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]
                if kind == "zeros":
                    return _done(torch.zeros_like(buffer))
                if kind == "of rank 0":
                    dist.broadcast(buffer, 0)
                    return _done(buffer)
                dist.all_reduce(buffer)
                return _done(buffer / ranks**2)

            return hook

        return {
            **{f"wrong: {each}": wrong(each) for each in WRONG},
            "allreduce": default_hooks.allreduce_hook,
            "again": again,
            "two futures": two_futures,
            "asks": asks,
            "metric": metric,
        }[kind]

    # Steps

    def run(self, step: Step) -> None:
        getattr(self, step.what.replace(" ", "_"))(step)

    def _left_out(self, step: Step) -> tuple[int, ...]:
        """What this rank leaves out: something trained must be left on each rank."""
        if not step.without:
            return ()
        parts = set(range(len(self.program.parts)))
        trained = parts - self._frozen_parts()
        # `owned`: a wrapper with nothing to reduce on one rank is a mismatch of the program's.
        owned = trained - set(self.plain.which(*ASIDE))
        mine = set(step.without[self.rank])
        return tuple(sorted(mine)) if owned - mine else ()

    def pass_(self, step: Step) -> None:
        self._pass(self._left_out(step), weights=step.weights)

    def full_step(self, step: Step) -> None:
        self.zero(Step("zero", "to none"))
        while True:
            self._pass(self._left_out(step), weights=step.weights)
            if not self.wrapped or not self.dirty:
                break
        self.step(step)

    def local_pass(self, step: Step) -> None:
        with self.model.no_sync():
            self._pass(self._left_out(step), reduces=False, weights=step.weights)

    def unused_forward(self, step: Step) -> None:
        self._forward(self._left_out(step))
        self.armed = True

    def look(self, step: Step) -> None:
        with torch.no_grad():
            self.model(self._batch())

    def two_backwards(self, step: Step) -> None:
        if self.static:
            return
        if step.how == "in no_sync":
            with self.model.no_sync():
                self._pass((), reduces=False, backwards=2)
            return
        if self.accumulate > 1:
            return
        forwards = 1 if step.how == "of one forward" else 2
        losses, shares = [], []
        for _ in range(forwards):
            losses.append(self._forward(()))
            share = self._share(self.batch_used, ())
            shares.append((share, float(len(self.batch_used))))
        for loss, one in zip(losses * (3 - forwards), shares * (3 - forwards), strict=True):
            loss.backward(retain_graph=forwards == 1)
            self._add(*one, reduces=True)
            self.passes += 1
            self._reduced(self.mates, len(self.mates))

    def derived(self, step: Step) -> None:
        """A loss of derivatives of the output alone."""
        rough = {*range(len(self.program.parts))} - set(self.plain.which(*SMOOTH))
        trained = {*range(len(self.program.parts))} - self._frozen_parts()
        without = tuple(sorted(rough & trained))
        left = trained - rough - set(self.plain.which(*ASIDE))
        if self.static or not left or (without and not self.tracks_use):
            return
        if step.how == "in no_sync":
            with self.model.no_sync():
                self._pass(without, reduces=False, derived=True)
        elif step.how == "of two forwards" and self.accumulate == 1:
            losses, shares = [], []
            for _ in range(2):
                losses.append(self._forward(without, derived=True))
                share = self._share(self.batch_used, without, derived=True)
                shares.append((share, float(len(self.batch_used))))
            for loss, one in zip(losses, shares, strict=True):
                loss.backward()
                self._add(*one, reduces=True)
                self.passes += 1
                self._reduced(self.mates, len(self.mates))
            self.armed = False
        else:
            self._pass(without, derived=True)

    def joined(self, step: Step) -> None:
        """A loss of a forward in no_sync() and of one outside: one pass, of the last weight."""
        if self.static:
            return
        self.followed = set(self._trained())
        self.weightless = False
        losses: list[torch.Tensor] = []
        shares: list[dict[str, Array]] = []
        for place in ("first", "last"):
            local = step.how.endswith(place)
            with self.model.no_sync() if local else contextlib.nullcontext():
                losses.append(self._forward(()))
            shares.append(self._share(self.batch_used, ()))
        share = {
            name: sum(each[name] for each in shares if name in each)
            for name in {**shares[0], **shares[1]}
        }
        torch.stack(losses).sum().backward()
        last = self.count + 1 == self.accumulate
        self._add(share, float(len(self.batch_used)), reduces=last)
        self._passed(True, self.mates)

    def hidden(self, step: Step) -> None:
        """Forward returns an object, and another wrapper of the model has a forward, in no_sync(),
        between that and the backward."""
        import pycomm

        if self.tracks_use or self.hosts or self.weighed:
            return
        if self.other is None or self.other.module is not self.net:
            self.other = pycomm.DistributedDataParallel(self.net, broadcast_buffers=False)
        self._pass((), hidden=True)

    def past(self, step: Step) -> None:
        """A backward call past the wrapper, whose gradients the program throws away."""
        if self.dirty or self.armed or self.count:
            return
        if step.how == "on all ranks" or self.rank == 0:
            loss_of(self.net, self.net, self._batch(), ()).backward()
        self.zero(Step("zero", "to none"))

    def unfreeze_locally(self, step: Step) -> None:
        """The first pass of a part is one in no_sync(), and the next ones do without it."""
        self.unfreeze(step)
        if self.program.parts[step.part] in ASIDE or not self.program.option(
            "find_unused_parameters"
        ):
            return
        self.local_pass(Step("local pass"))
        self.pass_(Step("pass", without=((step.part,),) * self.program.ranks))

    def step(self, step: Step) -> None:
        if self.wrapped and self.dirty:
            return
        self.optimizer.step()
        if self.local is not None:
            self.since_sync += 1
            due = self.since_sync == self.sync_every
            acts = due if self.outer is None else self.outer.acts(due=due)
            before = self._everyones_parameters() if acts else []
            frozen = self._everyones_frozen() if acts else []
            idle = self._idle(before, frozen) if acts else set()
            sparse = self._of_sparse() if acts else None
            self.local.step()
            self.local_steps += 1
            self.since_sync %= self.sync_every
            if self.outer is not None:
                self._check_outer(self.outer.step(before, frozen, due=due), frozen)
            elif acts:
                self._check_local_sync(before, idle, sparse, due=True)

    def zero(self, step: Step) -> None:
        to_none = step.how == "to none"
        self.model.zero_grad(set_to_none=to_none)
        self.grads = {} if to_none else {n: np.zeros_like(g) for n, g in self.grads.items()}
        if to_none:
            self.used = set()
        self.window.zero(to_none=to_none)
        self.dirty = False

    def freeze(self, step: Step) -> None:
        frozen = self._frozen_parts() | set(self.plain.which(*ASIDE))
        left = {*range(len(self.program.parts))} - frozen - {step.part}
        if not left or (self.dirty and not self._may_mix()):
            return
        if self.program.parts[step.part] == "ignored" or (step.how and self.rank != 0):
            return
        self._set_trained(step.part, trained=False)

    def _may_mix(self) -> bool:
        """Whether parts may be frozen and unfrozen between passes."""
        return self.weighed and not self.static

    def unfreeze(self, step: Step) -> None:
        if (self.dirty and not self._may_mix()) or self.program.parts[step.part] == "ignored":
            return
        new = step.part in self._frozen_parts() and self.program.parts[step.part] == "base"
        self._set_trained(step.part, trained=True)
        if new and self.program.trainer in LOCAL[1:]:
            self._ends_with(rf"'parts\.{step.part}\.", self.local.step)

    def _set_trained(self, part: int, *, trained: bool) -> None:
        if (part in self._frozen_parts()) != trained:
            return
        # A rank that had no data yet has counted no static graph, and would go on alone.
        counted = self.exchange.all(self.passes > 0, self.everyone) if self.static else []
        if any(counted) and not all(counted):
            return
        self.mixed = self.mixed or self.dirty
        self.net.parts[part].requires_grad_(trained)
        self.plain.parts[part].requires_grad_(trained)
        if any(counted):
            self._ends_with(rf"'parts\.{part}\..*static_graph", lambda: self._forward(()))

    def mode(self, step: Step) -> None:
        self.model.train(step.how == "train")

    def stats(self, step: Step) -> None:
        found = self.model.stats() if self.wrapped else self.local.stats()
        if not self.wrapped:
            assert (found.steps, found.syncs) == (self.local_steps, self.local_syncs), found
        else:
            assert (found.steps, found.passes) == (self.steps, self.passes), found
            position = self.model.communication_state_dict()
            assert position["accumulated"] == self.count, position

    def save(self, step: Step) -> None:
        if self.dirty or self.count:
            return
        self.saved = copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "wrapper": self.model.communication_state_dict() if self.wrapped else None,
                "local": self.local.state_dict() if self.local is not None else None,
                "kept": self.kept,
                "window": self.window,
                "outer": self.outer,
                "position": (self.steps - self.steps_at_sync, self.since_sync),
                "trains": self._trains_in_train(),
            }
        )

    def load(self, step: Step) -> None:
        if self.saved is None or self.dirty or self.count:
            return
        saved = copy.deepcopy(self.saved)
        self.model.load_state_dict(saved["model"])
        unsynced, self.since_sync = saved["position"]
        if self.wrapped:
            self.model.load_communication_state_dict(saved["wrapper"])
            self.kept, self.window = saved["kept"], saved["window"]
            self.window.restart(self.grads)
            self.steps_at_sync = self.steps - unsynced
            self.trains_in_mode = saved["trains"]
            self.last_forward = (self.steps, self.trains_in_mode)
        else:
            self.local.load_state_dict(saved["local"])
            self.outer = saved["outer"]
            self._note_given(saved["local"])

    def _note_given(self, state: dict[str, Any]) -> None:
        """A fragment that a state has in flight lands without an outer step."""
        self.given_syncs = self.local.stats().syncs + (state.get("flight") is not None)

    def load_alone(self, step: Step) -> None:
        """Rank 1 loads, and all do after the error: they had outer steps since they all had one."""
        if self.saved is None or self.dirty or self.program.ranks == 1:
            return
        if self.program.trainer == "LocalSGD" or self.local.stats().syncs <= self.given_syncs:
            return
        if self.rank == 1:
            self.load(step)
        self._refuses("only some have loaded|at different places", self.local.sync)
        self.load(step)

    def resume(self, step: Step) -> None:
        """Another wrapper goes on, also between passes, from the state of this one."""
        if self.local is not None:
            self._resume_local()
            return
        if not self._may_mix() or self.hosts or self.program.hook:
            return
        import pycomm

        state = copy.deepcopy(self.model.communication_state_dict())
        net = copy.deepcopy(self.net)
        for new, old in zip(net.parameters(), self.net.parameters(), strict=True):
            new.grad = None if old.grad is None else old.grad.clone()
        TorchDDP._set_params_and_buffers_to_ignore_for_model(net, list(self.ignored))
        self.model = pycomm.DistributedDataParallel(net, **dict(self.program.options))
        self.model.load_communication_state_dict(state)
        self.optimizer = torch.optim.SGD(self._trained().values(), lr=_LR)
        self.steps = self.passes = 0
        self.armed = False

    def _resume_local(self) -> None:
        import pycomm

        state = copy.deepcopy(self.local.state_dict())
        trained = {name: each.requires_grad for name, each in self._parameters().items()}
        for part, kind in zip(self.net.parts, self.program.parts, strict=True):
            part.requires_grad_(kind != "base")  # as when the first one was made
        self.local = getattr(pycomm, self.program.trainer)(
            self.net, init_sync=False, **dict(self.program.options)
        )
        self.local.load_state_dict(state)
        self.local_steps = self.local_syncs = 0
        self._note_given(state)
        for name, each in self._parameters().items():
            each.requires_grad_(trained[name])

    def penalty(self, step: Step) -> None:
        """A backward pass beside the wrapper, alike on all ranks."""
        able = {
            name: each
            for name, each in self._owned().items()
            if each.requires_grad and self.program.parts[int(name.split(".")[1])] != "sparse"
        }
        if not self._may_mix() or self.armed or not able or self.followed != set(self._trained()):
            return
        torch.stack([each.abs().double().square().sum() for each in able.values()]).sum().backward()
        self.window.penalize({name: 2 * numbers(each) for name, each in able.items()})
        self.grads = self.window.grads()
        self.used |= able.keys()
        self.dirty = True
        self._check_own(able)

    def adopt(self, step: Step) -> None:
        known = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
        new = [each for each in self._trained().values() if id(each) not in known]
        if new:
            self.optimizer.add_param_group({"params": new})

    def callback(self, step: Step) -> None:
        how, _, awaited = step.how.partition(", ")
        if how == "average":
            self._average_in_callback()
        elif how == "in backward":
            self._pass((), in_backward=lambda: self.callbacks.issue("of a sum"))
        else:
            self.callbacks.issue(how)
        if awaited:
            self.callbacks.settle()

    def _average_in_callback(self) -> None:
        """Of the parameters as they are now, as a moving average of a model is made."""
        owned = [each.detach() for each in self._owned().values() if not each.is_complex()]
        mine = torch.cat([each.double().flatten() for each in owned])
        of_ranks = self.exchange.all(numbers(mine), self.everyone)
        wanted = torch.from_numpy(sum(of_ranks) * self.program.ranks)
        self.callbacks.add("the average", self.callbacks.summed(mine), wanted)

    def await_(self, step: Step) -> None:
        self.callbacks.settle()
        self.in_hooks.settle()

    def sync(self, step: Step) -> None:
        before = self._everyones_parameters()
        if self.local is not None:
            frozen = self._everyones_frozen()
            idle = self._idle(before, frozen)
            sparse = self._of_sparse()
            self.local.sync()
            self.since_sync = 0
            if self.outer is not None:
                self._check_outer(self.outer.sync(before, frozen), frozen)
            self._check_local_sync(before, idle, sparse, due=False)
        else:
            self.model.sync()
            if self.hosts:
                self._check_sync(before)
                if self.program.option("broadcast_buffers", True):
                    buffers = [b for n, b in self.net.named_buffers() if n not in self.ignored]
                    assert len(set(self.exchange.all(bits(buffers), self.everyone))) == 1

    def clip(self, step: Step) -> None:
        if self.dirty:
            return
        owned = [each for each in self._owned().values() if each.grad is not None]
        owned = [each for each in owned if not each.grad.is_sparse]
        if not owned or any(each.is_complex() for each in owned):
            return
        norm = float(torch.nn.utils.clip_grad_norm_(owned, 0.1))
        self._scale_kept(min(1.0, 0.1 / (norm + 1e-6)))
        self._take_real()

    def _scale_kept(self, factor: float) -> None:
        self.model.scale_residuals(factor)
        self.kept = {n: [each * factor for each in rows] for n, rows in self.kept.items()}

    def scaled(self, step: Step) -> None:
        """A step of a GradScaler, with a batch that diverges on rank 0, or without."""
        without_scale = {"fp16", "complex", "sparse", "ignored"}
        if self.accumulate > 1 or without_scale & set(self.program.parts):
            return
        self.zero(Step("zero", "to none"))
        self.scaler.scale(torch.ones(()))  # makes the scale a tensor, as for any loss
        before = self.scaler.get_scale()
        largest, self.largest = self.largest, self.largest * before
        self._scale_kept(before)
        if step.how:
            self._spoiled(scale=before, infinite=True)
        else:
            self._pass(self._left_out(step), scale=before)
        groups = self.optimizer.param_groups
        if any(each.grad is not None for group in groups for each in group["params"]):
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self._scale_kept(1.0 / before)  # the next pass may have no scale, or another
        self.largest = max(largest, self.largest / before)
        self._take_real()
        self.zero(Step("zero", "to none"))

    def dropped(self, step: Step) -> None:
        """A step that the program throws away, by a rule of its own."""
        if self.accumulate > 1:
            return
        self.zero(Step("zero", "to none"))
        infinite = step.how == "one Inf"
        self._spoiled(scale=1.0, infinite=infinite)
        if not infinite:
            self._scale_kept(0.0)
        self.zero(Step("zero", "to none"))

    def _spoiled(self, *, scale: float, infinite: bool) -> None:
        scales: list[float] = []
        if self.rank == 0:
            scales = [_SPIKE] * len(self.program.parts)
            trained = set(range(len(self.program.parts))) - self._frozen_parts()
            if infinite:
                scales[min(trained - set(self.plain.which(*ASIDE)))] = float("inf")
        self._pass((), scale=scale, scales=scales, spoiled=0 in self.mates)
        if infinite and 0 in self.mates:
            self.kept = {}

    def copy(self, step: Step) -> None:
        if self.dirty or self.count or self.program.hook:
            return
        if self.hosts:
            self._refuses("sync_every", lambda: copy.deepcopy(self.model))
            return
        self.model = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self._trained().values(), lr=_LR)
        self.grads, self.kept, self.used, self.always_used = {}, {}, set(), None
        self.steps = self.passes = 0
        self.armed = False
        self._take_real()

    def join(self, step: Step) -> None:
        if self.dirty or self.count:
            return
        if self.hosts or self.weighed:
            self._refuses("no_batch" if self.weighed else "sync_every", self.model.join)
            return
        self.zero(Step("zero", "to none"))
        counts = [each * self.accumulate for each in step.counts]
        by_all = not step.how or bool(self.program.hook)  # hooks divide by themselves
        mine, most = counts[self.rank], max(counts)
        with self.model.join(divide_by_initial_world_size=by_all):
            for batch in range(mine):
                left = [rank for rank in self.everyone if counts[rank] > batch]
                if batch % self.accumulate == 0:
                    self.zero(Step("zero", "to none"))
                self._pass((), members=left, divisor=self.program.ranks if by_all else len(left))
                self.step(step)
        self.exchange.skip((most - mine) // self.accumulate)
        self.batches += most - mine
        if self.static and most:
            self.always_used = self.always_used or set(self._trained())
        self.zero(Step("zero", "to none"))
        self.used = set()
        self.armed = self.armed and min(counts) == 0
        found = self.exchange.all((self._residuals(), self.kept), self.mates)
        wanted = found[counts.index(most)][1]  # its rank has seen all reductions
        self.kept = {name: [each[name] for each, _ in found] for name in found[0][0]}
        for name, rows in self.kept.items():
            bound = (1 + most) * self._kept_bound(name)
            close(f"{name}: kept in a join", sum(rows), sum(wanted.get(name, ())), bound)
        assert len(set(self.exchange.all(bits(self._owned().values()), self.mates))) == 1

    # Programs that cannot go on

    def careless(self, step: Step) -> None:
        """A pass without a part, and without find_unused_parameters."""
        owned = set(range(len(self.program.parts))) - self._frozen_parts()
        owned -= set(self.plain.which(*ASIDE))
        if self.tracks_use or self.accumulate > 1 or step.part not in owned or len(owned) < 2:
            return
        self._forward((step.part,)).backward()
        self._all_end_with(rf"'parts\.{step.part}\.", lambda: self._forward(()))

    def broken(self, step: Step) -> None:
        """A backward that raises after the last gradient."""
        if self.static or self.accumulate > 1:
            return
        loss = self._forward((), breaks=True)
        try:
            loss.backward()
        except ArithmeticError:
            wanted = r"ended with an error|gave no gradient to 'parts"
            self._all_end_with(wanted, lambda: self._forward(()))
        raise AssertionError("backward did not raise")

    def _all_end_with(self, wanted: str, what: Callable[[], Any]) -> None:
        """No rank leaves the group before each has met its own error."""
        self.exchange.all(None, self.everyone)
        try:
            self._ends_with(wanted, what)
        finally:
            self.exchange.all(None, self.everyone)

    def _ends_with(self, wanted: str, what: Callable[[], Any]) -> None:
        try:
            what()
        except Exception as error:
            assert re.search(wanted, str(error), re.DOTALL), f"{wanted!r} is not in: {error}"
            raise Over from error
        raise AssertionError(f"there was no error with {wanted!r}")

    def _refuses(self, wanted: str, what: Callable[[], Any]) -> None:
        with contextlib.suppress(Over):
            self._ends_with(wanted, what)

    # Passes

    def _batch(self) -> torch.Tensor:
        self.batches += 1
        return batch_of(self.rank, self.batches)

    def _forward(self, without: Sequence[int], **more: Any) -> torch.Tensor:
        """The loss of the next batch, after the sync that may be due."""
        self.batch_used = self._batch()
        due = False
        if self.hosts:
            training = self.model.module.training
            self.trains_in_mode = self._trains_in_train()
            self.last_forward = (self.steps, training)
            due = self.steps - self.steps_at_sync >= self.sync_every
            due = due and (training or not self.trains_in_mode)
        before = self._everyones_parameters() if due else []
        loss = loss_of(self.model, self.net, self.batch_used, without, **more)
        if due:
            self._check_sync(before)
        return loss

    def _trains_in_train(self) -> bool:
        steps_then, mode_then = self.last_forward
        return mode_then if self.steps != steps_then else self.trains_in_mode

    def _share(
        self, batch: torch.Tensor, without: Sequence[int], scale: float = 1.0, **more: Any
    ) -> dict[str, Array]:
        """This rank's own gradients, by the plain model with the parameters of now."""
        with torch.no_grad():
            for mine, real in zip(self.plain.parameters(), self.net.parameters(), strict=True):
                mine.copy_(real)
            for mine, real in zip(self.plain.buffers(), self.net.buffers(), strict=True):
                mine.copy_(real)
        self.plain.train(self.net.training)
        self.plain.zero_grad()
        (loss_of(self.plain, self.plain, batch, without, **more) * scale).backward()
        return {n: numbers(p.grad) for n, p in self.plain.named_parameters() if p.grad is not None}

    def _pass(
        self,
        without: Sequence[int],
        *,
        reduces: bool = True,
        backwards: int = 1,
        scale: float = 1.0,
        scales: Sequence[float] = (),
        spoiled: bool = False,
        members: Sequence[int] = (),
        divisor: int = 0,
        in_backward: Callable[[], None] | None = None,
        weights: Sequence[float] = (),
        derived: bool = False,
        hidden: bool = False,
    ) -> None:
        members = members or self.mates
        weight = weights[self.rank] if weights else 0.0
        last = self.wrapped and reduces and self.count + 1 == self.accumulate
        self.followed = set(self._trained())
        self.weightless = False
        if weight < 0 and not self.hosts:  # with a sync in it, it would wait for this oracle
            self._batch()
            with self._may_be_weightless():
                self.model.no_batch()
            self._add({}, 0.0, reduces=last)
            weight, backwards = 0.0, 0
        else:
            weight = max(weight, 0.0)
            if weights and self.weighed:
                self.model.samples = weight
            loss = self._forward(without, scales=scales, derived=derived, hidden=hidden)
            if hidden:
                with self.other.no_sync():
                    self.other(self.batch_used)
            if in_backward is not None:
                loss.register_hook(lambda _: in_backward())
            if not weights:
                weight = float(len(self.batch_used))
            share = self._share(self.batch_used, without, scale, scales=scales, derived=derived)
        for turn in range(backwards):
            with self._may_be_weightless():
                (loss * scale).backward(retain_graph=turn + 1 < backwards)
            self._add(share, weight, reduces=last)
        self._passed(reduces, members, divisor, spoiled=spoiled)

    def _passed(
        self, reduces: bool, members: Sequence[int], divisor: int = 0, *, spoiled: bool = False
    ) -> None:
        self.dirty = self.wrapped
        if self.wrapped and reduces:
            self.armed = False
            self.passes += 1
            self.count += 1
            if self.count == self.accumulate:
                self.count = 0
                self._reduced(members, divisor or len(members), spoiled=spoiled)
                return
        self._check_own(self._parameters())

    @contextlib.contextmanager
    def _may_be_weightless(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            assert self.weighed and "no rank has any samples" in str(error), error
            self.weightless = True

    def _add(self, share: dict[str, Array], weight: float, *, reduces: bool) -> None:
        if self.weighed:
            trained = self._trained().keys() - self.ignored
            self.window.add(share, weight, trained=trained, reduces=reduces)
            self.grads = self.window.grads()
        else:
            for name, each in share.items():
                self.grads[name] = self.grads[name] + each if name in self.grads else each
        self.used |= share.keys()

    def _take_real(self) -> None:
        parameters = self._parameters().items()
        self.grads = {n: numbers(p.grad) for n, p in parameters if p.grad is not None}
        self.window.restart(self.grads)

    def _check_own(self, those: Iterable[str]) -> None:
        parameters = self._parameters()
        for name in those:
            grad, wanted = parameters[name].grad, self.grads.get(name)
            if wanted is None:
                zeros = name in self.window.zeros and grad is not None
                assert not numbers(grad).any() if zeros else grad is None, f"{name} has a gradient"
                continue
            assert grad is not None, f"{name} has no gradient"
            roundings = 12 if self.weighed else 3  # each change of the unit is one
            bound = roundings * _ROUNDING[grad.dtype] * np.abs(wanted).max(initial=0) + 1e-7
            close(name, numbers(grad), wanted, bound)

    def _residuals(self) -> dict[str, Array]:
        if not any(self._feeds_back(part) for part in range(len(self.program.parts))):
            return {}
        found = self.model.communication_state_dict().get("residuals", {})
        return {name: numbers(each) for name, each in found.items()}

    def _reduced(self, members: Sequence[int], divisor: int, *, spoiled: bool = False) -> None:
        """Compares what a reduction has left in ``.grad`` with the mean of all shares."""
        self.steps += 1
        trained = {n: p for n, p in self._owned().items() if p.requires_grad}
        self._check_own(self._parameters().keys() - trained.keys())
        shares = {name: each for name, each in self.grads.items() if name in trained}
        mine = {
            "sizes": [np.abs(each).max(initial=0) for each in shares.values()],
            "shares": {n: self.window.total(n) for n in shares} if self.weighed else shares,
            "used": self.used,
            "kept": self._residuals(),
            "trained": sorted(trained),
            "bits": {n: bits([p.grad]) for n, p in trained.items() if p.grad is not None},
            "parameters": bits(self._owned().values()),
            "window": (self.window.weight, self.window.unit, self.window.passes),
        }
        found = self.exchange.all(mine, members)
        for what in ("trained", "bits", "parameters"):
            first = found[0][what]
            for rank, each in zip(members, found, strict=True):
                assert each[what] == first, f"{what} of ranks {members[0]} and {rank} differ"
        counts = [1.0 / divisor] * len(found)
        units = [each["window"][1] if self.weighed else 1.0 for each in found]
        if self.weighed:
            counts = factors([each["window"] for each in found])
            self.window.reduced()
            assert self.weightless == (not counts and not self.hosts)
        if not counts:
            self.steps -= not self.hosts
            self._check_own(self._parameters())
            self._end_window()
            return
        used = set.union(*(each["used"] for each in found))
        if self.static:
            used = self.always_used = self.always_used or used
        if not spoiled:
            largest = [
                size * max(1.0, unit * count * divisor)
                for count, unit, each in zip(counts, units, found, strict=True)
                for size in each["sizes"]
            ]
            self.largest_now = max(largest, default=0.0)
            self.largest = max(self.largest, self.largest_now)
        whole = len(members) == len(self.mates)
        for name, parameter in trained.items():
            nothing = np.zeros(parameter.shape)
            if self.tracks_use and name not in used and parameter.grad is None:
                assert name not in self.grads, f"{name} has lost its gradient"
                if whole and not spoiled:
                    self._check_kept(name, found, nothing)
                continue
            rows = [
                count * each["shares"].get(name, nothing)
                for count, each in zip(counts, found, strict=True)
            ]
            mean = sum(rows)
            if self.tracks_use and name not in used:
                mean = self.grads.get(name, nothing)  # it stays
            assert parameter.grad is not None, f"{name} has no average"
            assert parameter.grad.dtype == parameter.dtype
            if spoiled:
                continue
            arrived = numbers(parameter.grad)
            close(name, arrived, mean, self._bound(name, parameter.dtype, rows))
            if whole:
                self._check_kept(name, found, arrived - mean)
            elif self._feeds_back(int(name.split(".")[1])):
                self.kept[name] = [*self.kept.get(name, ()), mean - arrived]
        self._take_real()
        self._end_window()

    def _end_window(self) -> None:
        self.used = set()
        self.dirty = self.weightless = False
        if self.mixed:
            self.mixed = False
            self.zero(Step("zero", "to none"))

    def _bound(self, name: str, dtype: torch.dtype, rows: list[Array]) -> Array:
        wire = self._wire(name) or ""
        sizes = sum(np.abs(row) for row in rows)
        rounding = _ROUNDING[dtype] * (4 if self.weighed else 1) + _WIRE_ROUNDING.get(wire, 0.0)
        # Passes that cancelled each other have left roundings of their own sizes.
        bound: Array = rounding * sizes + _LEAST.get(dtype, 1e-12)
        bound = bound + _ROUNDING[dtype] * np.abs(sizes).max(initial=0)
        if wire in ENCODED:
            # Residuals of earlier steps arrive now, and widen the blocks' range.
            late = self.kept.get(name, [])
            every = [each for those in self.kept.values() for each in those]
            of_others = max((np.abs(each).max(initial=0) for each in every), default=0.0)
            blocks = sum(largest_of_blocks(row, self.largest_now / len(rows)) for row in rows)
            blocks = blocks + sum(largest_of_blocks(each, of_others) for each in late)
            # Of ranks that the last reductions did not compare: two encodings more.
            blocks = blocks + 2 * _OF_BLOCK[wire] * self.largest
            sums = 2 if self.program.hook in ("again", "two futures") else 1
            return bound + np.abs(sum(late)) + 2 * sums * _OF_BLOCK[wire] * blocks
        return bound + _OF_LARGEST.get(wire, 0.0) * self.largest

    def _kept_bound(self, name: str) -> float:
        dtype = self._parameters()[name].dtype
        return (1e-5 + (2.0**-7 if dtype != torch.float32 else 0.0)) * self.largest + 1e-9

    def _check_kept(self, name: str, found: list[Any], more: Array) -> None:
        """Arrived and kept values add up to the given ones and those kept before."""
        if not self._feeds_back(int(name.split(".")[1])):
            return
        kept = [each["kept"].get(name, 0.0) + np.zeros_like(more) for each in found]
        wanted = sum(self.kept.get(name, ()))
        close(f"{name}: arrived and kept", sum(kept) + more, wanted, self._kept_bound(name))
        self.kept[name] = kept

    # Syncs

    def _everyones_parameters(self) -> list[dict[str, Array]]:
        mine = {name: numbers(each) for name, each in self._owned().items()}
        self.shards = self._bits_of_shards()
        return self.exchange.all(mine, self.everyone)

    def _bits_of_shards(self) -> str:
        return bits(each for name, each in self._parameters().items() if name in self.ignored)

    def _check_sync(self, before: list[dict[str, Array]]) -> None:
        self.steps_at_sync = self.steps
        weights = [1.0] * len(before)
        if self.weighed and any(found := self.exchange.all(self.window.unsynced, self.everyone)):
            weights = found
        self.window.unsynced = 0.0
        for name, parameter in self._owned().items():
            rows = [w * each[name] for w, each in zip(weights, before, strict=True)]
            mean = sum(rows) / sum(weights)
            bound = 3 * _ROUNDING[parameter.dtype] * (np.abs(mean) + 1e-3)
            close(f"{name} after a sync", numbers(parameter), mean, bound)
        self._check_same()

    def _everyones_frozen(self) -> list[set[str]]:
        mine = {name for name, each in self._owned().items() if not each.requires_grad}
        return self.exchange.all(mine, self.everyone)

    def _idle(self, before: list[dict[str, Array]], frozen: list[set[str]]) -> set[str]:
        """What an outer step must leave alone: frozen, and at the anchor, on all ranks."""
        if self.program.trainer != "SparseLoCo":
            return set()
        anchor = self.local.state_dict()["anchor"]
        still = set.intersection(*frozen) & anchor.keys()
        return {
            name
            for name in still
            if all(np.array_equal(each[name], numbers(anchor[name])) for each in before)
        }

    def _check_local_sync(
        self, before: list[dict[str, Array]], idle: set[str], sparse: Any, *, due: bool
    ) -> None:
        if self.program.trainer == "LocalSGD":
            self.local_syncs += 1
            self._check_sync(before)
        else:
            self._check_same()
        if self.program.trainer == "SparseLoCo":
            self._check_sparse(before, idle, sparse, due=due)
        parameters = self._parameters()
        for name in idle:
            close(f"{name}, frozen", numbers(parameters[name]), before[self.rank][name], 0.0)

    def _of_sparse(self) -> Any:
        """The anchor of a SparseLoCo, and the errors of all ranks."""
        if self.program.trainer != "SparseLoCo":
            return None
        state = self.local.state_dict()
        anchor, mine = (
            {name: numbers(each) for name, each in state[part].items()}
            for part in ("anchor", "error")
        )
        return anchor, self.exchange.all(mine, self.everyone)

    def _check_sparse(
        self, before: list[dict[str, Array]], idle: set[str], sparse: Any, *, due: bool
    ) -> None:
        """What the ranks' errors and movements have lost has moved the anchor, as a mean. Which
        entries that are is not looked at here."""
        (anchor, errors), (now, left) = sparse, self._of_sparse()
        moved = any(
            not np.array_equal(each[name], old) for name, old in anchor.items() for each in before
        )
        self.local_syncs += due or moved
        for name, old in anchor.items():
            parameter = self._parameters()[name]
            assert np.array_equal(numbers(parameter), now[name]), f"{name} is not at the anchor"
            if name in idle or not (due or moved):
                assert np.array_equal(now[name], old), f"{name}'s anchor has moved"
                assert all(
                    np.array_equal(a[name], b[name]) for a, b in zip(errors, left, strict=True)
                )
                continue
            summed = [
                _ERROR_DECAY * error[name] + (old - each[name]).ravel()
                for error, each in zip(errors, before, strict=True)
            ]
            sent = [a - b[name] for a, b in zip(summed, left, strict=True)]
            mean = (sum(sent) / len(sent)).reshape(old.shape)
            rounding = _ROUNDING[parameter.dtype]
            largest = sum(np.abs(each) for each in summed).max(initial=0)
            bound = rounding * np.abs(old) + 2 * max(rounding, 2e-6) * largest
            bound = bound + _LEAST.get(parameter.dtype, 1e-12)
            close(f"{name}'s anchor", now[name], old - mean, bound)

    def _check_outer(self, wanted: list[dict[str, Array]] | None, frozen: list[set[str]]) -> None:
        """Compares what has landed, and takes the anchor's bits from there on."""
        outer, parameters = self.outer, self._parameters()
        assert outer is not None
        self.local_syncs += outer.landed
        outer.landed = 0
        if wanted is None:
            return
        anchor = self.local.state_dict()["anchor"]
        assert len(set(self.exchange.all(bits(anchor.values()), self.everyone))) == 1
        for name, mine in wanted[self.rank].items():
            rounding = 20 * _ROUNDING[anchor[name].dtype] * outer.largest[name]
            stands = name not in outer.moved
            wrong = 0.0 if stands else rounding
            close(f"{name}'s anchor", numbers(anchor[name]), outer.anchor[name], wrong)
            wrong = 0.0 if stands and name in frozen[self.rank] else rounding
            close(f"{name} after landing", numbers(parameters[name]), mine, wrong)
            outer.anchor[name] = numbers(anchor[name])
        outer.moved.clear()
        if outer.delay == 0:
            self._check_same()

    def _check_same(self) -> None:
        for name, parameter in self._owned().items():
            assert len(set(self.exchange.all(bits([parameter]), self.everyone))) == 1, (
                f"{name} differs between ranks after a sync"
            )
        assert self._bits_of_shards() == self.shards, "a sync has changed an ignored parameter"
        own = [each for name, each in self.net.named_buffers() if name in self.ignored]
        assert all((each == self.rank).all() for each in own), "an ignored buffer has changed"


def largest_of_blocks(values: Array, of_others: float) -> Array:
    """Of each element: the largest of the block that it may travel in, wherever blocks begin. A
    block at an end may have other parameters in it, whose largest is given."""
    flat = np.abs(values).ravel()
    padded = np.pad(flat, (0, -flat.size % BLOCK), constant_values=of_others)
    blocks = np.pad(padded.reshape(-1, BLOCK).max(1), 1, constant_values=of_others)
    each = np.maximum.reduce([blocks[:-2], blocks[1:-1], blocks[2:]])
    return np.repeat(each, BLOCK)[: flat.size].reshape(values.shape)


def _done(tensor: torch.Tensor) -> Any:
    future: Any = torch.futures.Future()  # type: ignore[no-untyped-call]
    future.set_result(tensor)
    return future


def close(name: str, found: Any, wanted: Any, bound: Any) -> None:
    wrong = np.abs(np.asarray(found) - wanted)
    if not (wrong <= bound).all():
        worst = int(np.argmax(wrong - bound)) if np.isfinite(wrong).all() else 0
        at = np.broadcast_to(np.asarray(found), wrong.shape).flatten()[worst]
        must = np.broadcast_to(np.asarray(wanted), wrong.shape).flatten()[worst]
        raise AssertionError(f"{name}: element {worst} is {at} and must be {must}")


setattr(Trainer, "pass", Trainer.pass_)
setattr(Trainer, "await", Trainer.await_)


def run_program(rank: int, server: Any, request: tuple[int, Program]) -> str:
    """Returns how the program has ended, "" if by its last step."""
    number, program = request
    os.environ["PYCOMM_TRANSPORT"] = program.transport
    timeout = timedelta(seconds=TIMEOUT_S)
    of_program = dist.PrefixStore(f"{number}/oracle", server)  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"{number}/job", server)  # type: ignore[attr-defined]
    exchange = Exchange(of_program, rank)
    dist.init_process_group(
        "pycomm", store=store, rank=rank, world_size=program.ranks, timeout=timeout
    )
    where = "construction"
    try:
        trainer = Trainer(program, rank, exchange)
        for index, step in enumerate(program.steps, 1):
            where = f"step {index}: {step}"
            trainer.run(step)
        where = "the callbacks that were left"
        trainer.run(Step("await"))
        return ""
    except Over as over:
        return str(over.__cause__)
    except Exception as error:
        exchange.fail()
        raise AssertionError(f"rank {rank} in {where}") from error
    finally:
        dist.destroy_process_group()


def serve_training(rank: int, world_size: int, address: str, port: int) -> None:
    """A rank of the pool."""
    torch.set_num_threads(1)
    import pycomm  # noqa: F401

    # One connection for all programs: now and then torch takes 5 s for one.
    timeout = timedelta(seconds=TIMEOUT_S)
    server = dist.TCPStore("127.0.0.1", port, timeout=timeout)  # type: ignore[attr-defined]
    rank_pool.serve(address, rank, lambda request: run_program(rank, server, request))
