"""Shares that follow machines of different speeds: `python benchmarks/unequal.py [PART ...]`.

Every rank trains a small model, and burns seconds in forward, `fixed + per_sample * samples`, by a
busy loop of its own; some ranks burn twice or four times as many. With more ranks than cores they
sleep instead. Loaders have no workers, so the lookahead is 4; by default it is 12. Parts:

    shares  The time of a step once shares have settled, beside the best whole shares for the true
            times, which are dealt by hand: from 30 steps behind the lookahead on. Then the slowed
            ranks and the others change places: the same from 20 steps behind the lookahead on.
    equal   Ranks of equal speed, beside equal shares dealt by hand, in turn: the median ratio of
            neighbouring blocks and its 95 % interval. A block's time is the mean of all its steps,
            since the sampler does most of its work in one step of three.
    stop    One of two ranks is stopped and continued by signals, a half or three quarters of the
            time, while it computes a fixed number of matrix products per sample. How long it is
            stopped varies from one time to the next: a fixed period would favour the shares whose
            steps are a multiple of it. Which shares are the best is not known here: all around the
            sampler's and the expected ones are dealt by hand, in turn with the sampler, which goes
            on to follow. A step may take half as long again as the next one, so the time of shares
            is the mean of theirs and of both neighbours', and the best ones are not the luckiest.
            Ratios are those of `equal`, over the turns.
    loss    Seconds to a loss, beside torch's wrapper over gloo and beside pycomm's, both with equal
            batches. All have the same samples in each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from launching import add_rank_options, ran_as_rank, run_ranks
from report import Versus, header, paired_ratio
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as TorchDDP

EACH = 32  # samples of an equal share
EACH_S = 0.010  # which a rank that is not slowed takes for them
LOOKAHEAD = 4
SETTLED, FOLLOWED, MEASURED = 30, 20, 30  # steps
LENGTH = 200_000
WIDTH = 24
PAIRS = 30  # of blocks, in which equal ranks take turns
STOP_EVERY_S = 0.020  # in the mean
TURNS = 12  # around all shares that are tried
BLOCK = 10  # steps of one turn
LIMIT_S = 170  # of a run
CORES = len(os.sched_getaffinity(0))


class Slowed(nn.Module):
    """A small model that burns time for its fixed part and for each sample."""

    def __init__(self, burn: Callable[[int], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 1))
        self.burn = burn

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.burn(len(inputs))
        found: torch.Tensor = self.layers(inputs)
        return found


def spend(seconds: float, asleep: bool) -> None:
    if asleep:
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def samples_of(indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets that follow from their indices."""
    at = torch.tensor(indices, dtype=torch.float32)[:, None]
    inputs = torch.sin(at * torch.arange(1, WIDTH + 1) * 0.7351 + torch.arange(WIDTH))
    return inputs, (inputs[:, :3].prod(1) + inputs[:, 3])[:, None]


def cut(shares: Sequence[int], rank: int, begin: int = 0) -> Iterator[list[int]]:
    """Batches of these shares, in the order of the sampler's first epoch."""
    from pycomm.balance.deal import epoch_order

    order = epoch_order(LENGTH, seed=0, epoch=0, shuffle=True).tolist()
    for step in range(begin, LENGTH // sum(shares)):
        first = step * sum(shares) + sum(shares[:rank])
        yield order[first : first + shares[rank]]


def train(
    model: nn.Module, batches: Iterable[list[int]], steps: int, until: float | None = None
) -> tuple[list[float], list[float]]:
    """Seconds and the loss after each step; it ends early at the loss `until`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = samples_of(range(LENGTH, LENGTH + 512))
    seconds: list[float] = []
    losses: list[float] = []
    last = time.perf_counter()
    for batch in batches:
        x, y = samples_of(batch)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - last)
        with torch.no_grad():
            layers = model.module.layers  # type: ignore[union-attr]
            losses.append(float(nn.functional.mse_loss(layers(inputs), targets)))  # type: ignore[operator]
        if len(seconds) == steps or (until is not None and losses[-1] <= until):
            break
        last = time.perf_counter()  # the loss is no part of a step
    return seconds, losses


def per_step(seconds: Sequence[float]) -> float:
    """Milliseconds, without the slowest and fastest tenth."""
    ordered = sorted(seconds)
    tenth = len(ordered) // 10
    return 1e3 * statistics.fmean(ordered[tenth : len(ordered) - tenth])


class World:
    """The true seconds of all ranks, which change at a step of this rank's."""

    def __init__(self, ranks: int, slowed: int, by: int, fixed: int, change_at: int = -1) -> None:
        from pycomm.balance.step_times import Fit

        each = EACH_S / EACH
        speeds = [by if rank < slowed else 1 for rank in range(ranks)]
        self.fits = [Fit(fixed * EACH_S, each * speed) for speed in speeds]
        # As many are slowed after it as before; of equal numbers, the others.
        self.after = [Fit(fixed * EACH_S, each * speed) for speed in reversed(speeds)]
        self.change_at = change_at
        self.step = 0

    def burn(self, rank: int, asleep: bool) -> Callable[[int], None]:
        def burn(samples: int) -> None:
            changed = 0 <= self.change_at <= self.step
            spend((self.after if changed else self.fits)[rank].seconds(samples), asleep)
            self.step += 1

        return burn

    def best(self, after: bool) -> tuple[int, ...]:
        from pycomm.balance.whole_shares import Limits, best_shares

        ranks = len(self.fits)
        limits = Limits.of(EACH * ranks, unit=1, fewest=1, most=[None] * ranks)
        return best_shares(self.after if after else self.fits, limits)


def balanced(model: nn.Module, ranks: int) -> Any:
    import pycomm

    return pycomm.BalancedSampler(
        range(LENGTH), global_batch=EACH * ranks, model=model, lookahead=LOOKAHEAD
    )


def wrapped(burn: Callable[[int], None]) -> Any:
    import pycomm

    return pycomm.DistributedDataParallel(Slowed(burn), weight="samples")


def shares(rank: int, ranks: int, slowed: int, by: int, fixed: int) -> dict[str, Any]:
    settled = LOOKAHEAD + SETTLED
    change = settled + MEASURED
    world = World(ranks, slowed, by, fixed, change)
    asleep = ranks > CORES
    model = wrapped(world.burn(rank, asleep))
    sampler = balanced(model, ranks)
    followed = change + LOOKAHEAD + FOLLOWED
    seconds, _ = train(model, sampler, followed + MEASURED)
    found: dict[str, Any] = {"shares": sampler.stats().shares, "changes": sampler.stats().changes}
    for name, after, begin in (("settled", False, settled), ("followed", True, followed)):
        other = World(ranks, slowed, by, fixed, 0 if after else -1)
        reference = wrapped(other.burn(rank, asleep))
        best, _ = train(reference, cut(other.best(after), rank), MEASURED + 3)
        even, _ = train(reference, cut([EACH] * ranks, rank), 10 + 3)
        found[name] = {
            "best": per_step(best[3:]),
            "even": per_step(even[3:]),
            "mine": per_step(seconds[begin : begin + MEASURED]),
            "best_shares": other.best(after),
        }
    return found


def equal(rank: int, ranks: int) -> dict[str, Any]:
    world = World(ranks, 0, 1, 1)
    model, plain = (wrapped(world.burn(rank, ranks > CORES)) for _ in range(2))
    sampler = balanced(model, ranks)
    mine, theirs = iter(sampler), cut([EACH] * ranks, rank)
    blocks: list[list[float]] = [[], []]
    for pair in range(PAIRS):
        for which in (0, 1) if pair % 2 else (1, 0):
            one, batches = ((model, mine), (plain, theirs))[which]
            blocks[which].append(statistics.fmean(train(one, batches, 2 * BLOCK)[0]))
    return {"mine": blocks[0], "even": blocks[1], "changes": sampler.stats().changes}


@contextlib.contextmanager
def stopped(part: float) -> Iterator[None]:
    """This process is stopped for that part of the time; a process of its own does it."""
    if part == 0:
        yield
        return
    program = (
        "import os, random, signal, sys, time\n"
        "pid, (stop_s, go_s, limit_s) = int(sys.argv[1]), map(float, sys.argv[2:])\n"
        "end = time.monotonic() + limit_s\n"
        "while os.getppid() == pid and time.monotonic() < end:\n"
        "    times = random.uniform(0.5, 1.5)\n"
        "    os.kill(pid, signal.SIGSTOP); time.sleep(times * stop_s)\n"
        "    os.kill(pid, signal.SIGCONT); time.sleep(times * go_s)\n"
    )
    seconds = map(str, (STOP_EVERY_S * part, STOP_EVERY_S * (1 - part), LIMIT_S))
    with subprocess.Popen([sys.executable, "-c", program, str(os.getpid()), *seconds]) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            os.kill(os.getpid(), signal.SIGCONT)


def products(seconds: float) -> int:
    """So many products of a small matrix take so long here, undisturbed."""
    matrix, count = torch.randn(64, 64), 0
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        matrix @ matrix
        count += 1
    return max(1, round(count * seconds / 0.5))


def stop(rank: int, ranks: int, part: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    matrix, each = torch.randn(64, 64), products(2 * EACH_S / EACH)

    def burn(samples: int) -> None:
        for _ in range(each * samples):
            matrix @ matrix

    dist.barrier()
    with stopped(part if rank == 0 else 0):
        model, kept = wrapped(burn), wrapped(burn)
        sampler = balanced(model, ranks)
        batches = iter(sampler)
        train(model, batches, LOOKAHEAD + SETTLED)
        found, speed = sampler.stats().shares, 1 - part
        span = {round(EACH * ranks * speed / (1 + speed)), found[0]}
        shares = range(max(1, min(span) - 2), min(EACH * ranks, max(span) + 3))
        tried: dict[int, list[list[float]]] = {share: [] for share in (*shares, EACH)}
        followed: list[list[float]] = []
        for turn in range(TURNS):
            followed.append(train(model, batches, 3 * BLOCK + 1)[0][1:])
            for share in tried if turn % 2 else reversed(tried):
                both = cut([share, EACH * ranks - share], rank)
                tried[share].append(train(kept, both, BLOCK + 1)[0][1:])
    return {"followed": followed, "shares": found, "tried": list(tried.items())}


def loss(rank: int, ranks: int, by: int) -> dict[str, Any]:
    asleep = ranks > CORES
    gloo = dist.new_group(backend="gloo")
    target = 0.0185
    theirs = TorchDDP(Slowed(World(ranks, 1, by, 1).burn(rank, asleep)), process_group=gloo)
    torch_s, torch_losses = train(theirs, cut([EACH] * ranks, rank), 400, target)
    plain = wrapped(World(ranks, 1, by, 1).burn(rank, asleep))
    plain_s, plain_losses = train(plain, cut([EACH] * ranks, rank), 400, target)
    model = wrapped(World(ranks, 1, by, 1).burn(rank, asleep))
    mine_s, mine_losses = train(model, balanced(model, ranks), 400, target)
    return {
        "torch": [sum(torch_s), len(torch_s), torch_losses[-1]],
        "plain": [sum(plain_s), len(plain_s), plain_losses[-1]],
        "mine": [sum(mine_s), len(mine_s), mine_losses[-1]],
    }


RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "shares": shares,
    "equal": equal,
    "stop": stop,
    "loss": loss,
}


def measure(part: str, ranks: int, numbers: Sequence[float]) -> dict[str, Any]:
    import pycomm  # noqa: F401 (registers the backend)

    timeout = timedelta(seconds=60)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout
    )
    rank = int(os.environ["RANK"])
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=ranks, timeout=timeout)
    whole = [int(number) if number == int(number) else number for number in numbers]
    found = RUNS[part](rank, ranks, *whole)
    dist.destroy_process_group()
    return found


def run(part: str, ranks: int, *numbers: float) -> Any:
    lines: list[bytes] = []
    chosen = ["--part", part, "--ranks", str(ranks), "--numbers", *map(str, numbers)]
    run_ranks(ranks, chosen, LIMIT_S, lines.append)
    return json.loads(lines[0])


LEAST = 0.95
"""Of the best shares' speed."""
_page: list[str] = []
"""The rows and sentences of docs/unequal-machines.md."""


def page_row(machines: str, even: float, best: float, mine: float) -> str:
    return f"| {machines} | {even:.1f} | {best:.1f} | {mine:.1f} | {100 * best / mine:.1f} % |"


def show_shares() -> bool:
    print("ranks slowed by fixed |  ms equal   best   mine  best/mine | the same after the change")
    ratios: list[float] = []
    worst: dict[int, tuple[float, str]] = {}
    for ranks, slowed in ((2, 1), (4, 2)):
        for by in (2, 4):
            for fixed in (0, 4):
                found = run("shares", ranks, slowed, by, fixed)
                line = f"{ranks:5}{slowed:7}{by:3}{fixed:6} |"
                for name in ("settled", "followed"):
                    row = found[name]
                    ratio = row["best"] / row["mine"]
                    ratios.append(ratio)
                    line += f"{row['even']:10.1f}{row['best']:7.1f}{row['mine']:7.1f}"
                    line += f"{ratio:11.3f} |"
                    machines = f"{slowed} of {ranks} ranks takes {by} times as long per sample, "
                    machines += f"fixed cost {fixed} times an equal share's, {name}"
                    text = page_row(machines, row["even"], row["best"], row["mine"])
                    worst[ranks] = min(worst.get(ranks, (ratio, text)), (ratio, text))
                print(line, found["shares"], "changes:", found["changes"], flush=True)
    _page.extend(f"{text} (the worst of 8)" for _, text in worst.values())
    return min(ratios) >= LEAST


def show_equal() -> bool:
    good = True
    print("ranks  mine/equal shares [95 %]  changes")
    for ranks in (2, 4):
        found = run("equal", ranks)
        pair, changes = paired_ratio("mine", found["even"], found["mine"]), found["changes"]
        good = good and pair.ratio <= 1.01 and changes <= 1
        print(f"{ranks:5}  {shown(pair)}{changes:9}", flush=True)
        lost, low, high = (100 * (each - 1) for each in (pair.ratio, pair.low, pair.high))
        _page.append(
            f"{ranks} equal ranks: {lost:.1f} % [{low:.1f}, {high:.1f}] longer than by hand, "
            f"{changes} changes"
        )
    return good


def shown(pair: Versus) -> str:
    return f"{pair.ratio:.3f} [{pair.low:.3f}, {pair.high:.3f}]"


def smoothed(tried: Mapping[int, Sequence[float]], share: int) -> list[float]:
    """Of each turn, the milliseconds of this share, and of its neighbours if they were tried."""
    near = [tried[each] for each in (share - 1, share, share + 1) if each in tried]
    return [statistics.fmean(turn) for turn in zip(*near, strict=True)]


def show_stop() -> bool:
    good = True
    print("stopped  ms equal   best   kept  best/kept [95 %]  followed  best/followed [95 %]")
    for part in (0.5, 0.75):
        found = run("stop", 2, part)
        tried = {share: [*map(per_step, blocks)] for share, blocks in found["tried"]}
        inner = [each for each in tried if {each - 1, each + 1} <= tried.keys()]
        ways = {
            "even": tried[EACH],
            "best": min((smoothed(tried, each) for each in inner), key=statistics.fmean),
            "kept": smoothed(tried, found["shares"][0]),
            "followed": [*map(per_step, found["followed"])],
        }
        ms = {name: statistics.fmean(blocks) for name, blocks in ways.items()}
        kept, followed = (paired_ratio("best", ways[n], ways["best"]) for n in ("kept", "followed"))
        good = good and min(kept.ratio, followed.ratio) >= LEAST
        print(
            f"{part:7}{ms['even']:10.1f}{ms['best']:7.1f}{ms['kept']:7.1f}  {shown(kept)}"
            f"{ms['followed']:10.1f}  {shown(followed)}",
            found["shares"],
            {share: round(statistics.fmean(blocks), 1) for share, blocks in tried.items()},
            flush=True,
        )
        machines = f"1 of 2 ranks is stopped {part} of the time"
        _page.append(page_row(machines, ms["even"], ms["best"], ms["followed"]))
    return good


def show_loss() -> bool:
    good = True
    print(
        "slowed by  torch, equal batches pycomm, equal batches  shares that follow  "
        "(seconds, steps, loss)"
    )
    for by in (2, 4):
        found = run("loss", 2, by)
        names = ("torch", "plain", "mine")
        texts = ["{:8.2f} s {:4} {:.4f}".format(*found[name]) for name in names]
        good = good and found["mine"][0] < min(found["torch"][0], found["plain"][0])
        print(f"{by:9}  {texts[0]:>20}  {texts[1]:>20}  {texts[2]:>20}", flush=True)
        torch_s, plain_s, mine_s = (found[name][0] for name in names)
        _page.append(
            f"to the same loss, 1 of 2 ranks {by} times as slow: {mine_s:.1f} s; equal batches "
            f"{torch_s:.1f} s (torch over gloo), {plain_s:.1f} s (pycomm)"
        )
    return good


SHOWS = {"shares": show_shares, "equal": show_equal, "stop": show_stop, "loss": show_loss}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(SHOWS)}; all by default")
    parser.add_argument("--part", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=float, nargs="*", default=[], help=argparse.SUPPRESS)
    add_rank_options(parser)
    options = parser.parse_args()
    if ran_as_rank(options, lambda: measure(options.part, options.ranks, options.numbers)):
        return 0
    for key, value in header("unequal", sys.argv[1:]).items():
        print(f"{key}: {value}")
    outcomes = [SHOWS[part]() for part in options.parts or SHOWS]
    print("for docs/unequal-machines.md:", *_page, sep="\n")
    print("all within their bounds" if all(outcomes) else "SOME OUTSIDE THEIR BOUNDS")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
