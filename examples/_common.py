"""What both examples share: flags, the progress line, the step clock, the final comparison."""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

EXPOSED_FORMULA = (
    "Exposed communication is the part of a step that the network adds and computing does not "
    "hide. Every tenth step runs forward and backward of a batch twice, each time from a barrier: "
    "once inside no_sync(), gradients thrown away, and once for real. exposed share = "
    "median(synchronised - local) / median(whole step), on rank 0. Waiting for a slower rank "
    "counts; a value below zero is noise."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how to run, as opposed to what to train."""
    parser.epilog = EXPOSED_FORMULA
    parser.add_argument("--backend", default="pycomm", choices=["pycomm", "gloo"])
    parser.add_argument(
        "--wire-dtype",
        default="none",
        type=str.lower,
        choices=["none", "fp32", "fp16", "bf16", "int8"],
        help="dtype of gradients on the network; with gloo, none, or fp16 by torch's own hook",
    )
    parser.add_argument("--seed", type=int, default=0)
    # torchrun sets LOCAL_RANK; torch.distributed.launch passes a flag, in either spelling.
    parser.add_argument(
        "--local-rank",
        "--local_rank",
        type=int,
        default=int(os.environ.get("LOCAL_RANK", "0")),
        help="rank within this host; set by the launcher",
    )


def torch_ddp(net: torch.nn.Module, wire_dtype: str) -> DistributedDataParallel:
    """Wrap in torch's own DDP, with torch's own fp16 hook: what pycomm is compared with."""
    if wire_dtype not in ("none", "fp16"):
        sys.exit(f"--wire-dtype {wire_dtype} needs --backend pycomm")
    model = DistributedDataParallel(net)
    if wire_dtype == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def who_is_where(local_rank: int) -> str:
    """Say on which host each rank runs. Every rank must call it."""
    places: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(places, f"{socket.gethostname()} (local rank {local_rank})")
    return ", ".join(f"rank {rank} on {place}" for rank, place in enumerate(places))


class StepClock:
    """Times steps and, on every tenth, what synchronising adds (see EXPOSED_FORMULA)."""

    def __init__(self, every: int = 10, warmup: int = 5) -> None:
        self.every = every
        self.warmup = warmup
        self.steps: list[float] = []
        self.local: list[float] = []
        self.synchronised: list[float] = []

    def probing(self) -> bool:
        """Tell whether this step is to be compared. The same answer on every rank."""
        number = len(self.steps) - self.warmup
        return number >= 0 and number % self.every == 0

    @contextmanager
    def local_pass(self) -> Iterator[None]:
        dist.barrier()
        begin = time.perf_counter()
        yield
        self.local.append(time.perf_counter() - begin)
        dist.barrier()

    @contextmanager
    def synchronised_pass(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.probing():
            self.synchronised.append(time.perf_counter() - begin)

    @contextmanager
    def step(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.steps.append(time.perf_counter() - begin)

    def summary(self) -> str:
        seconds = statistics.median(self.steps)
        if not self.local:
            return f"{seconds:.4f} s a step"
        added = [both - alone for both, alone in zip(self.synchronised, self.local, strict=True)]
        share = statistics.median(added) / seconds
        exposed = f"exposed communication {share:.1%} of it ({len(added)} comparisons)"
        return f"{seconds:.4f} s a step, {exposed}"


class Progress:
    """A tqdm bar on rank 0's terminal; one rewritten line without tqdm; plain lines elsewhere."""

    def __init__(self, total: int, enabled: bool) -> None:
        self.total = total
        self.enabled = enabled
        self.done = 0
        self.terminal = sys.stderr.isatty()
        self.bar = None
        if enabled and self.terminal:
            try:
                from tqdm import tqdm
            except ImportError:
                pass  # the plain line below is enough
            else:
                self.bar = tqdm(total=total, unit="step", dynamic_ncols=True)

    def advance(self, text: str) -> None:
        self.done += 1
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        elif self.terminal:
            end = "\n" if self.done == self.total else ""
            print(f"\r[{self.done:>4}/{self.total}] {text}", end=end, file=sys.stderr, flush=True)
        elif self.done % max(1, self.total // 10) == 0 or self.done == self.total:
            print(f"[{self.done:>4}/{self.total}] {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def compare_parameters(net: torch.nn.Module) -> tuple[bool, str]:
    """Compare the parameters' bytes on all ranks. Every rank must call it; all learn the same."""
    digest = hashlib.sha256()
    for _, parameter in sorted(net.named_parameters()):
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    sums: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(sums, digest.hexdigest()[:16])
    equal = len(set(sums)) == 1
    listing = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(sums))
    verdict = "equal" if equal else "DIFFER"
    return equal, f"parameters {verdict} on {len(sums)} ranks: sha256 {listing}"


def close_group() -> None:
    """Leave the group, with nothing left that still holds it.

    torch's DDP object is part of a reference cycle and keeps the group alive. gloo's threads would
    then live on into the interpreter's exit, where one now and then ends the process with SIGABRT.
    """
    gc.collect()
    dist.destroy_process_group()
