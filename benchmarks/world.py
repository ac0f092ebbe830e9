"""The ranks of one run: the store that they agree through and a process group for each backend."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Sequence
from datetime import timedelta

import closed_group
import numpy as np
import torch.distributed as dist
from report import Floats
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

_ALGORITHMS = ("ring", "recursive_doubling", "direct", "hierarchical")


class World:
    """This rank, its store and a group for each backend."""

    def __init__(self, store: Store, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank, self.ranks = rank, ranks
        self.groups: dict[str, dist.ProcessGroup] = {}
        self._timeout = timedelta(seconds=timeout_s)
        self._group_store = store
        self._store = PrefixStore("harness", store)
        self._store.set_timeout(self._timeout)
        self._round = 0
        self.kept: dict[str, object] = {}  # what raw.py and deepspeed_shm.py make once

    @staticmethod
    def join(launched: bool, timeout_s: float) -> World:
        """Find the other ranks: in the store of run_ranks, or as torchrun says."""
        timeout = timedelta(seconds=timeout_s)
        if not launched:
            store, rank, ranks = next(rendezvous("env://", timeout=timeout))
            return World(store, rank, ranks, timeout_s)
        env = os.environ
        store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, False, timeout)
        return World(store, int(env["RANK"]), int(env["WORLD_SIZE"]), timeout_s)

    def open_groups(self, names: Sequence[str]) -> None:
        """Open a group for each backend. `gloo#2` is one more group of gloo, `pycomm:tcp` one of
        pycomm with that transport, `pycomm:tls` one over TCP with a secret, so that its bytes are
        encrypted, `pycomm:arena` one whose tensors come from pycomm.empty,
        `pycomm:int8` one whose sums travel in that codec, `pycomm:ring` one of that algorithm,
        and `pycomm:tcp+int8` one with both."""
        for name in names:
            backend, _, variant = name.partition("#")[0].partition(":")
            options = None
            secret = ""
            if backend == "pycomm":  # imported here: works also where autoload is switched off
                pycomm = importlib.import_module("pycomm")
                chosen = {"transport": "auto"}
                for part in variant.split("+") if variant else ():
                    if part in pycomm.codecs.CODECS:
                        chosen["wire_dtype"] = part
                    elif part in _ALGORITHMS:
                        chosen["algorithm"] = part
                    elif part == "tls":
                        chosen["transport"] = "tcp"
                        mine = closed_group.new_secret() if self.rank == 0 else ""
                        secret = self.exchange(mine)[0]
                    else:
                        chosen["transport"] = "shm" if part == "arena" else part
                options = pycomm.Options(**chosen)
            with closed_group.secret(secret) if secret else contextlib.nullcontext():
                self.groups[name] = self._open(backend, options)

    def _open(self, backend: str, options: object) -> dist.ProcessGroup:
        if self.groups:
            return dist.new_group(backend=backend, timeout=self._timeout, pg_options=options)
        dist.init_process_group(
            backend,
            store=self._group_store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=self._timeout,
            pg_options=options,
        )
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def close(self) -> None:
        """Leave all groups once every rank is done with them."""
        self.barrier()
        self.groups.clear()
        gc.collect()  # a group that lives into the interpreter's exit may abort there
        dist.destroy_process_group()

    def exchange(self, text: str) -> list[str]:
        """Return every rank's text on every rank."""
        self._round += 1
        key = f"exchange/{self._round}"
        self._store.set(f"{key}/{self.rank}", text)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.ranks)]

    def barrier(self) -> None:
        self._round += 1
        key = f"barrier/{self._round}"
        if self._store.add(key, 1) == self.ranks:
            self._store.set(f"{key}/open", "1")
        self._store.wait([f"{key}/open"])

    def agree(self, number: int) -> int:
        """Return rank 0's number on every rank."""
        self._round += 1
        key = f"agree/{self._round}"
        if self.rank == 0:
            self._store.set(key, str(number))
        return int(self._store.get(key))

    def gather(self, numbers: Floats) -> list[Floats]:
        """Return every rank's numbers on rank 0, an empty list elsewhere."""
        self._round += 1
        key = f"gather/{self._round}"
        self._store.set(f"{key}/{self.rank}", numbers.tobytes().hex())
        if self.rank != 0:
            return []
        keys = [f"{key}/{rank}" for rank in range(self.ranks)]
        parts = [np.frombuffer(bytes.fromhex(self._store.get(k).decode())) for k in keys]
        for k in keys:
            self._store.delete_key(k)
        return parts
