"""Starts the processes of a training in which ranks die and join, strikes them, and waits for them.

Bounded everywhere. Ranks are forked from a process that has imported torch, one per host, which
kills them when this process has ended, however that happened.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from death_accounts import Accounts, Rank
from death_training import Gate, Plan, notes_of
from processes import child_environment
from rank_child import Spec
from sklearn.datasets import load_digits
from zygote import ForkedProcess, Zygote

TRAINED = 1536
"""Samples; the rest is held out."""
_START_S = 90.0
_END_S = 30.0
_POLL_S = 0.01
_LOOK_S = 1.0
_TAIL = 3000


class BrokenError(RuntimeError):
    """The training does not do what it has to: what, and what its processes have written."""


def write_data(folder: Path) -> None:
    """scikit-learn's digits, and noise that changes with the epoch, so that a loss stays."""
    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1))
    here, held = order[:TRAINED], order[TRAINED:]
    noise = 0.5 * torch.randn(4099, 64, generator=torch.Generator().manual_seed(2))
    torch.save(
        {
            "inputs": inputs[here],
            "labels": labels[here],
            "held_inputs": inputs[held],
            "held_labels": labels[held],
            "noise": noise,
        },
        folder / "data.pt",
    )


@dataclasses.dataclass
class Process:
    """A rank's process."""

    rank: Rank
    host: int
    process: ForkedProcess
    err: Path
    code: int | None = None

    def said(self) -> str:
        text = self.err.read_text(errors="replace")
        return text[-_TAIL:]


class Training:
    """Processes that train together. ``close()`` kills what still runs."""

    def __init__(
        self,
        folder: Path,
        zygotes: Sequence[Zygote],
        plan: Plan,
        size: int,
        options: Mapping[str, Any],
    ) -> None:
        self.folder, self.size = folder, size
        folder.mkdir()
        write_data(folder)
        self.plan = dataclasses.replace(plan, folder=str(folder))
        self.gate = Gate(folder, make=True)
        self.accounts = Accounts(TRAINED)
        self.processes: dict[str, Process] = {}
        self.expected: dict[str, Sequence[str]] = {}
        self._zygotes, self._options = zygotes, dict(options)
        self._newcomers = 0
        self._looked_s = 0.0

    # --- processes -------------------------------------------------------------------------------

    def found(self) -> None:
        """Starts the first members and waits until all of them are."""
        hosts = [rank * len(self._zygotes) // self.size for rank in range(self.size)]
        founders = self._start("founder", hosts, join=False)
        self.wait(lambda: all(each.rank.member >= 0 for each in founders), _START_S, "to begin")

    def add(self, host: int) -> Process:
        """Starts a process that joins."""
        self._newcomers += 1
        return self._start(f"newcomer{self._newcomers}", [host], join=True)[0]

    def _start(self, name: str, hosts: Sequence[int], *, join: bool) -> list[Process]:
        folder = self.folder / name
        folder.mkdir()
        spec = Spec(
            module="death_training",
            function="trains",
            args=(dataclasses.replace(self.plan, name=name, join=join),),
            world_size=len(hosts),
            backend="pycomm",
            init_method=f"file://{folder}/store",
            init_timeout_s=_START_S,
            pg_options=self._options,
            import_pycomm=True,
            destroy=True,
            only_pycomm=False,
            preload=(),
        )
        (folder / "spec").write_bytes(pickle.dumps(spec))
        made = []
        for rank, host in enumerate(hosts):
            err = folder / f"{rank}.err"
            null_fd = os.open(os.devnull, os.O_RDWR)
            with err.open("wb") as file:
                fds = [null_fd, file.fileno(), file.fileno()]
                forked = self._zygotes[host].fork(folder, rank, child_environment(), fds)
            os.close(null_fd)
            notes = self.accounts.add(f"{name}-{rank}", notes_of(self.folder, name, rank))
            made.append(Process(notes, host, forked, err))
            self.processes[notes.name] = made[-1]
        return made

    def strike(self, one: Process, number: int, ends: Sequence[str]) -> float:
        """Sends a signal to a rank that is to end in one of these ways; the time of that."""
        self.expect(one, ends)
        os.kill(one.process.pid, number)
        return one.rank.struck_s

    def expect(self, one: Process, ends: Sequence[str]) -> None:
        """From now on this rank may end in these ways."""
        self.expected[one.rank.name] = ends
        one.rank.struck_s = min(one.rank.struck_s, time.monotonic())

    def wait_for_end(self, one: Process) -> None:
        """Waits until a process that was struck has ended."""
        self.wait(lambda: self._ended(one), _END_S, f"for the end of {one.rank.name}")

    def _ended(self, one: Process) -> bool:
        if one.code is None:
            one.code = one.process.poll()
        return one.code is not None

    # --- what it does now ------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The newest step that any rank has noted."""
        return self.accounts.newest

    @property
    def members(self) -> tuple[int, ...]:
        """Those of the newest step; of the founders, before the first one."""
        step = self.accounts.steps.get(self.step)
        return tuple(range(self.size)) if step is None else step.members

    def process_of(self, member: int) -> Process:
        self.accounts.read()  # it noted its number before it took part in a step
        return next(each for each in self.processes.values() if each.rank.member == member)

    def wait(self, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
        """Reads notes until ``is_so()``. BrokenError: it took too long, or a rank ended before."""
        deadline_s = time.monotonic() + limit_s
        while True:
            self.accounts.read()
            self._look()
            if is_so():
                return
            if time.monotonic() > deadline_s:
                raise BrokenError(f"waited {limit_s:g} s {what}\n{self.describe()}")
            time.sleep(_POLL_S)

    def wait_for_steps(self, count: int, limit_s: float = 60.0) -> None:
        target = self.step + count
        self.wait(lambda: self.step >= target, limit_s, f"for step {target}")

    def _look(self) -> None:
        """Whether a rank has ended to which nothing was done."""
        if time.monotonic() < self._looked_s:
            return
        self._looked_s = time.monotonic() + _LOOK_S
        for each in self.processes.values():
            unhurt = each.rank.struck_s == float("inf")
            if each.code is None and unhurt and self._ended(each):
                self.accounts.read()
                if each.rank.ended != "end":
                    raise BrokenError(
                        f"{each.rank.name} (member {each.rank.member}) ended with {each.code}, "
                        f"{each.rank.ended}: {each.rank.text}\n{self.describe()}"
                    )

    def describe(self) -> str:
        """What running processes are at, with the stacks of their Python threads."""
        running = [each for each in self.processes.values() if not self._ended(each)]
        for each in running:
            each.process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        lines = [f"step {self.step}, members {self.members}, files in {self.folder}"]
        for each in running:
            lines.append(f"--- {each.rank.name}, member {each.rank.member}: {each.said()}")
        return "\n".join(lines)

    def end(self) -> None:
        """Ends all ranks behind one step, and checks how all of them ended.

        A rank passes the gate to a step once it has noted the one before it. So behind a closed
        gate none is further than a step beyond the newest note.
        """
        self.gate.set(goes=False)
        self.accounts.read()
        self.gate.set(goes=True, end=self.step + 3)
        running = [each for each in self.processes.values() if each.rank.struck_s == float("inf")]
        self.wait(lambda: all(map(self._ended, running)), 2 * _END_S, "for the end")
        self.accounts.read()
        self.accounts.check_ends(self.expected)
        for each in self.processes.values():
            killed = "" in self.expected.get(each.rank.name, ())
            if self._ended(each) and each.code != (-signal.SIGKILL if killed else 0):
                text = f"{each.rank.name}: its process ended with {each.code}: {each.said()}"
                self.accounts.faults.append(text)

    def close(self) -> None:
        for each in self.processes.values():
            if not self._ended(each):
                each.process.kill()
                each.process.wait(_END_S)
