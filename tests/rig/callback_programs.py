"""Small programs of futures and callbacks that issue collectives, and what they give by hand.

A program is the same text on four ranks. ``row`` is {0, 1} or {2, 3}, ``col`` {0, 2} or {1, 3}::

    f1 = sum(row)
    f2 = then f1:
        f3 = sum(col)
        wait f3
    f4 = all f1 f2
    wait f4

An operation's input is a number of its rank and its own, plus the value of the future whose
callback issues it. A callback's value is that of its future plus all that it waited for. So an
operation that is summed with another one changes numbers. At the end every future is waited for.
A program that begins with ``chain:`` runs as a hook in ``comm_hooks.ordered`` does.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm._native import loader

RANKS = 4
LINES = 20
"""The most that a random program has."""
_MEMBERS = {
    "world": ((0, 1, 2, 3),),
    "row": ((0, 1), (2, 3)),
    "col": ((0, 2), (1, 3)),
    "lead": ((0, 2),),  # the first of each row
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One statement. ``what``: sum, leaders, ring, then, all, wait or chain."""

    what: str
    name: int = 0
    """Of the future that it makes."""
    group: str = ""
    of: tuple[int, ...] = ()
    body: tuple[Line, ...] = ()


Program = tuple[Line, ...]


def text(program: Sequence[Line], indent: str = "") -> str:
    return "\n".join(_text(line, indent) for line in program)


def _text(line: Line, indent: str) -> str:
    names = " ".join(f"f{each}" for each in line.of)
    if line.what == "wait":
        return f"{indent}wait {names}"
    if line.what == "chain":
        return f"{indent}chain:\n" + text(line.body, indent + "    ")
    if line.what == "then":
        body = "\n" + text(line.body, indent + "    ") if line.body else ""
        return f"{indent}f{line.name} = then {names}:{body}"
    arguments = f"({line.group})" if line.group else f" {names}" if names else "()"
    return f"{indent}f{line.name} = {line.what}{arguments}"


def parse(source: str) -> Program:
    """The other way round; lines of a callback are indented by four spaces more."""
    lines = [line for line in source.splitlines() if line.strip()]
    return _parse(lines, len(lines[0]) - len(lines[0].lstrip()))


def _parse(lines: list[str], indent: int) -> Program:
    program: list[Line] = []
    while lines and len(lines[0]) - len(lines[0].lstrip()) == indent:
        words = lines.pop(0).replace("(", " ").replace(")", " ").rstrip(":").split()
        if words[0] == "wait":
            program.append(Line("wait", of=_names(words[1:])))
            continue
        if words[0] == "chain":
            program.append(Line("chain", body=_parse(lines, indent + 4)))
            continue
        name, what, rest = int(words[0][1:]), words[2], words[3:]
        if what in ("then", "all"):
            body = _parse(lines, indent + 4) if what == "then" else ()
            program.append(Line(what, name, of=_names(rest), body=body))
        else:
            program.append(Line(what, name, group="".join(rest)))
    return tuple(program)


def _names(words: Sequence[str]) -> tuple[int, ...]:
    return tuple(int(word[1:]) for word in words)


def random_program(seed: int) -> Program:
    return _Writer(seed).program()


class _Writer:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._left = LINES
        self._names = 0

    def program(self) -> Program:
        self._left = self._random.randint(4, LINES - 1)
        in_chain = self._random.random() < 0.3
        program = self._block([], 0)
        return (Line("chain", body=program),) if in_chain else program

    def _block(self, outer: list[int], depth: int) -> Program:
        """``outer`` are futures that callbacks of other strands complete."""
        own: list[int] = []
        lines: list[Line] = []
        most = self._left if depth == 0 else self._random.randint(1, 4)
        while self._left > 0 and len(lines) < most:
            self._left -= 1
            line = self._line(outer, own, depth)
            lines.append(line)
            if line.name and not set(line.of) & set(outer):
                own.append(line.name)
            elif line.name:
                outer = [*outer, line.name]
        return tuple(lines)

    def _line(self, outer: list[int], own: list[int], depth: int) -> Line:
        choose = self._random
        kinds = ["sum"] * 4 + ["leaders", "ring"]
        if own or outer:
            kinds += ["then"] * (8 if depth < 3 else 0)
        if own:
            kinds += ["wait", "all", "all"]
        what = choose.choice(kinds)
        if what == "wait":  # never for another strand's: its callback may be behind this one
            return Line("wait", of=(choose.choice(own),))
        self._names += 1
        name = self._names
        if what == "all":
            return Line("all", name, of=tuple(choose.choices(own, k=choose.randint(1, 3))))
        if what == "then":
            local = bool(own) and (not outer or choose.random() < 0.8)
            of = choose.choice(own if local else outer)
            return Line("then", name, of=(of,), body=self._block(outer + own, depth + 1))
        group = choose.choice(["world", "row", "col"]) if what == "sum" else ""
        return Line(what, name, group=group)


def values_by_hand(program: Program) -> list[dict[int, float]]:
    """By rank and future, in the program's own order."""
    values: list[dict[int, float]] = [{} for _ in range(RANKS)]
    _by_hand(program, values, [0.0] * RANKS)
    return values


def _by_hand(
    lines: Sequence[Line], values: list[dict[int, float]], given: list[float]
) -> list[float]:
    """The sum of what each rank waits for."""
    waited = [0.0] * RANKS
    for line in lines:
        inputs = [_number(line.name, rank) + given[rank] for rank in range(RANKS)]
        if line.what == "chain":
            _by_hand(line.body, values, given)
        elif line.what == "wait":
            waited = [waited[rank] + values[rank][line.of[0]] for rank in range(RANKS)]
        elif line.what == "then":
            parents = [values[rank][line.of[0]] for rank in range(RANKS)]
            inner = _by_hand(line.body, values, parents)
            for rank in range(RANKS):
                values[rank][line.name] = parents[rank] + inner[rank]
        elif line.what == "all":
            for of_rank in values:
                of_rank[line.name] = sum(of_rank[each] for each in line.of)
        else:
            for rank in range(RANKS):
                values[rank][line.name] = _operation_by_hand(line, inputs, rank)
    return waited


def _operation_by_hand(line: Line, inputs: list[float], rank: int) -> float:
    if line.what == "ring":
        return inputs[(rank - 1) % RANKS]
    members = (0, 2) if line.what == "leaders" else _group_of(line.group, rank)
    return sum(inputs[member] for member in members)


def _group_of(group: str, rank: int) -> tuple[int, ...]:
    return next(members for members in _MEMBERS[group] if rank in members)


def _number(name: int, rank: int) -> float:
    return float(1 + zlib.crc32(f"{name} {rank}".encode()) % 97)


def make_groups(rank: int) -> dict[str, Any]:
    groups: dict[str, Any] = {"world": dist.group.WORLD}
    for name, all_members in _MEMBERS.items():
        for members in all_members if name != "world" else ():
            group = dist.new_group(members)
            if rank in members:
                groups[name] = group
    return groups


class Running:
    """Runs a program on one rank, with delays at random that differ on each rank."""

    def __init__(self, program: Program, groups: dict[str, Any], seed: int, delay_s: float) -> None:
        self._program = program
        self._groups = groups
        self._rank = dist.get_rank()
        self._seed = seed
        self._delay_s = delay_s
        self._lock = threading.Lock()  # guards the next two
        self._futures: dict[int, Any] = {}
        self._works: list[Any] = []

    def values(self) -> dict[int, float]:
        self._run(self._program, 0.0)
        done: dict[int, float] = {}
        while left := [each for each in self._named() if each[0] not in done]:
            for name, future in left:  # what waits here may make more
                future.wait()
                done[name] = _value(future)
        for work in self._works:
            work.wait()
        return done

    def _named(self) -> list[tuple[int, Any]]:
        with self._lock:
            return list(self._futures.items())

    def _run(self, lines: Sequence[Line], given: float) -> float:
        waited = 0.0
        for index, line in enumerate(lines):
            self._pause(line, index)
            if line.what == "wait":
                future = self._futures[line.of[0]]
                future.wait()
                waited += _value(future)
                continue
            if line.what == "chain":
                with loader.native.IssueChain(7, self._seed):
                    self._run(line.body, given)
                continue
            made = self._make(line, given)
            with self._lock:
                self._futures[line.name] = made
        return waited

    def _make(self, line: Line, given: float) -> Any:
        parts = [self._futures[each] for each in line.of]
        if line.what == "all":
            return torch.futures.collect_all(parts)
        if line.what == "then":
            return parts[0].then(lambda future: self._call(line, future))
        tensor = torch.full((4,), _number(line.name, self._rank) + given, dtype=torch.float64)
        if line.what == "ring":
            return self._ring(line, tensor)
        if line.what == "leaders":
            if "lead" in self._groups:
                dist.all_reduce(tensor, group=self._groups["lead"])
            row = self._groups["row"]
            work = dist.broadcast(tensor, self._rank // 2 * 2, group=row, async_op=True)
        else:
            work = dist.all_reduce(tensor, group=self._groups[line.group], async_op=True)
        return work.get_future()

    def _ring(self, line: Line, tensor: torch.Tensor) -> Any:
        came = torch.empty_like(tensor)
        received = dist.irecv(came, (self._rank - 1) % RANKS, tag=line.name)
        future = received.get_future()
        sent = dist.isend(tensor, (self._rank + 1) % RANKS, tag=line.name)
        with self._lock:
            self._works += [received, sent]
        return future

    def _call(self, line: Line, future: Any) -> torch.Tensor:
        given = _value(future)
        self._pause(line, -1)
        return torch.tensor([given + self._run(line.body, given)], dtype=torch.float64)

    def _pause(self, line: Line, index: int) -> None:
        choose = random.Random(zlib.crc32(repr((self._seed, self._rank, line, index)).encode()))
        if choose.random() < 0.25:
            time.sleep(choose.random() * self._delay_s)


def _value(future: Any) -> float:
    value = future.value()
    if isinstance(value, list) and not isinstance(value[0], torch.Tensor):
        return sum(_value(each) for each in value)
    return float((value[0] if isinstance(value, list) else value)[0])


def run_programs(rank: int, world_size: int, sources: Sequence[str | int], delay_s: float) -> None:
    """Runs texts of programs, or seeds of random ones; raises for the first that fails."""
    groups = make_groups(rank)
    for seed, source in enumerate(sources):
        program = random_program(source) if isinstance(source, int) else parse(source)
        expected = values_by_hand(program)[rank]
        try:
            found = Running(program, groups, seed, delay_s).values()
        except Exception as error:
            raise AssertionError(f"program {source}:\n{text(program)}\n{error}") from error
        wrong = {f"f{k}": (v, expected[k]) for k, v in found.items() if v != expected[k]}
        assert not wrong, f"program {source}:\n{text(program)}\n(is, by hand): {wrong}"
        assert set(found) == set(expected)
