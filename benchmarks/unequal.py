"""Shares that follow machines of different speeds: `python benchmarks/unequal.py [PART ...]`.

Every rank trains a small model, and burns seconds in forward, `fixed + per_sample * samples`, by a
busy loop of its own; some ranks burn twice or four times as many. With more ranks than cores they
sleep instead. Loaders have no workers, so the lookahead is 4; by default it is 12. Parts:

    shares  The time of a step once shares have settled, beside the best whole shares for the true
            times, which are dealt by hand: from 30 steps behind the lookahead on. Then the slowed
            ranks and the others change places: the same from 20 steps behind the lookahead on.
    equal   Ranks of equal speed, beside equal shares dealt by hand. A block's time is the mean of
            all its steps, since the sampler does most of its work in one step of three. The fixed
            cost is that of an equal share's samples, and the wrapper by hand has weights, too.
    stop    One of two ranks is stopped and continued by signals, a half or three quarters of the
            time, while it computes a fixed number of matrix products per sample. How long it is
            stopped varies from one time to the next: a fixed period would favour the shares whose
            steps are a multiple of it. Which shares are the best is not known here, so they are
            searched first, from those around the sampler's and the expected ones outwards, until
            the shortest time has longer ones on both sides. In the search a time is the mean over
            three neighbouring shares, since a step may take half as long again as the next one, and
            the best ones are not to be the luckiest. Then they are measured anew.
    loss    Seconds to a loss, beside torch's wrapper over gloo and beside pycomm's, both with equal
            batches. All have the same samples in each step, and all steps count. The three take
            turns as to who is first; the median of three runs, and their range.

In all parts but `loss` the ways to deal take turns in blocks of steps on the same ranks. A ratio is
the median over neighbouring blocks, with its 95 % interval. In `shares` and `stop` a block's time
is without its slowest and fastest tenth.
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
SETTLED, FOLLOWED = 30, 20  # steps
LENGTH = 200_000
WIDTH = 24
PAIRS = 30  # of blocks, in which equal ranks take turns
STOP_EVERY_S = 0.020  # in the mean
SEARCHES = 6  # turns around all shares that are tried
TURNS = 12
ROUNDS = 3  # of `loss`
BLOCK = 10  # steps of one turn
LOSS = 0.0185
LIMIT_S = 300  # of a run
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
    """The true seconds of all ranks, before a change and after it."""

    def __init__(self, ranks: int, slowed: int, by: int, fixed: int) -> None:
        from pycomm.balance.step_times import Fit

        each = EACH_S / EACH
        speeds = [by if rank < slowed else 1 for rank in range(ranks)]
        self.fits = [Fit(fixed * EACH_S, each * speed) for speed in speeds]
        # As many are slowed after it as before; of equal numbers, the others.
        self.after = [Fit(fixed * EACH_S, each * speed) for speed in reversed(speeds)]
        self.changed = False

    def burn(self, rank: int, asleep: bool) -> Callable[[int], None]:
        def burn(samples: int) -> None:
            spend((self.after if self.changed else self.fits)[rank].seconds(samples), asleep)

        return burn

    def best(self) -> tuple[int, ...]:
        """The best whole shares at present."""
        from pycomm.balance.whole_shares import Limits, best_shares

        ranks = len(self.fits)
        limits = Limits.of(EACH * ranks, unit=1, fewest=1, most=[None] * ranks)
        return best_shares(self.after if self.changed else self.fits, limits)


def balanced(model: nn.Module, ranks: int) -> Any:
    import pycomm

    return pycomm.BalancedSampler(
        range(LENGTH), global_batch=EACH * ranks, model=model, lookahead=LOOKAHEAD
    )


def wrapped(burn: Callable[[int], None]) -> Any:
    import pycomm

    return pycomm.DistributedDataParallel(Slowed(burn), weight="samples")


def in_turn(
    ways: Mapping[str, tuple[nn.Module, Iterable[list[int]]]],
    turns: int,
    steps: int,
    mean: Callable[[Sequence[float]], float],
) -> dict[str, list[float]]:
    """Of each way to deal, the milliseconds of its blocks. The first step of a block is left out:
    before it another way was dealt."""
    blocks: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            model, batches = ways[name]
            blocks[name].append(mean(train(model, batches, steps + 1)[0][1:]))
    return blocks


def shares(rank: int, ranks: int, slowed: int, by: int, fixed: int) -> dict[str, Any]:
    world, asleep = World(ranks, slowed, by, fixed), ranks > CORES
    model, reference = (wrapped(world.burn(rank, asleep)) for _ in range(2))
    sampler = balanced(model, ranks)
    batches = iter(sampler)
    found: dict[str, Any] = {}
    for name, settles in (("settled", SETTLED), ("followed", FOLLOWED)):
        world.changed = name == "followed"
        train(model, batches, LOOKAHEAD + settles)
        by_hand = {"best": world.best(), "even": [EACH] * ranks}
        ways = {each: (reference, cut(chosen, rank)) for each, chosen in by_hand.items()}
        found[name] = in_turn({"mine": (model, batches), **ways}, TURNS // 2, BLOCK, per_step)
    return found | {"shares": sampler.stats().shares, "changes": sampler.stats().changes}


def equal(rank: int, ranks: int) -> dict[str, Any]:
    world = World(ranks, 0, 1, 1)
    model, plain = (wrapped(world.burn(rank, ranks > CORES)) for _ in range(2))
    sampler = balanced(model, ranks)
    ways = {"mine": (model, iter(sampler)), "even": (plain, cut([EACH] * ranks, rank))}
    blocks = in_turn(ways, PAIRS, 2 * BLOCK, lambda seconds: 1e3 * statistics.fmean(seconds))
    return {**blocks, "changes": sampler.stats().changes}


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
        total = EACH * ranks
        begin = sorted({round(total * speed / (1 + speed)), found[0]})

        def by_hand(share: int) -> tuple[nn.Module, Iterable[list[int]]]:
            return kept, cut([share, total - share], rank)

        tried = search(range(begin[0] - 2, begin[-1] + 3), total, by_hand)
        best = min(tried, key=lambda share: smoothed(tried, share))
        ways = {"best": by_hand(best), "kept": by_hand(found[0]), "even": by_hand(EACH)}
        blocks = in_turn({"followed": (model, batches), **ways}, TURNS, 2 * BLOCK, per_step)
    return {**blocks, "shares": found, "best_share": best, "tried": list(tried.items())}


def search(
    shares: Iterable[int],
    total: int,
    by_hand: Callable[[int], tuple[nn.Module, Iterable[list[int]]]],
) -> dict[int, float]:
    """Milliseconds of all first shares around the best one. All ranks find the same."""
    tried: dict[int, float] = {}
    while more := [share for share in shares if 0 < share < total and share not in tried]:
        ways = {str(share): by_hand(share) for share in more}
        blocks = in_turn(ways, SEARCHES, BLOCK, per_step)
        means = torch.tensor([statistics.fmean(blocks[str(share)]) for share in more])
        dist.all_reduce(means)
        tried |= dict(zip(more, (means / dist.get_world_size()).tolist(), strict=True))
        best = min(tried, key=lambda share: smoothed(tried, share))
        shares = range(best - 2, best + 3)  # until there is nothing new around it
    return tried


def smoothed(tried: Mapping[int, float], share: int) -> float:
    """Milliseconds of this share, and of its neighbours if they were tried."""
    return statistics.fmean(tried[each] for each in (share - 1, share, share + 1) if each in tried)


def loss(rank: int, ranks: int, by: int, number: int) -> dict[str, Any]:
    burn = World(ranks, 1, by, 1).burn(rank, ranks > CORES)
    gloo = dist.new_group(backend="gloo")

    def torch_s() -> Sequence[Sequence[float]]:
        theirs = TorchDDP(Slowed(burn), process_group=gloo)
        return train(theirs, cut([EACH] * ranks, rank), 400, LOSS)

    def plain() -> Sequence[Sequence[float]]:
        return train(wrapped(burn), cut([EACH] * ranks, rank), 400, LOSS)

    def mine() -> Sequence[Sequence[float]]:
        model = wrapped(burn)
        return train(model, balanced(model, ranks), 400, LOSS)

    ways = [("torch", torch_s), ("plain", plain), ("mine", mine)]
    found: dict[str, Any] = {}
    for name, way in (*ways[number % 3 :], *ways[: number % 3]):
        seconds, losses = way()
        found[name] = [sum(seconds), len(seconds), losses[-1]]
    return found


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


def page_row(machines: str, ms: Mapping[str, float], mine: str, pair: Versus) -> str:
    part = f"{100 * pair.ratio:.1f} % [{100 * pair.low:.1f}, {100 * pair.high:.1f}]"
    return f"| {machines} | {ms['even']:.1f} | {ms['best']:.1f} | {ms[mine]:.1f} | {part} |"


def medians(blocks: Mapping[str, Sequence[float]], *names: str) -> dict[str, float]:
    return {name: statistics.median(blocks[name]) for name in names}


def show_shares() -> bool:
    print(
        "ranks slowed by fixed |  ms equal   best   mine  best/mine [95 %]     | after the change"
    )
    ratios: list[float] = []
    worst: dict[int, tuple[float, str]] = {}
    for ranks, slowed in ((2, 1), (4, 2)):
        for by in (2, 4):
            for fixed in (0, 4):
                found = run("shares", ranks, slowed, by, fixed)
                line = f"{ranks:5}{slowed:7}{by:3}{fixed:6} |"
                for name in ("settled", "followed"):
                    ms = medians(found[name], "even", "best", "mine")
                    pair = paired_ratio("best", found[name]["mine"], found[name]["best"])
                    ratios.append(pair.ratio)
                    line += f"{ms['even']:10.1f}{ms['best']:7.1f}{ms['mine']:7.1f}  {shown(pair)} |"
                    machines = f"{slowed} of {ranks} ranks takes {by} times as long per sample, "
                    machines += f"fixed cost {fixed} times an equal share's, {name}"
                    text = page_row(machines, ms, "mine", pair)
                    worst[ranks] = min(worst.get(ranks, (pair.ratio, text)), (pair.ratio, text))
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


def show_stop() -> bool:
    good = True
    print("stopped  ms equal   best   kept  best/kept [95 %]  followed  best/followed [95 %]")
    for part in (0.5, 0.75):
        found = run("stop", 2, part)
        ms = medians(found, "even", "best", "kept", "followed")
        kept, followed = (
            paired_ratio("best", found[n], found["best"]) for n in ("kept", "followed")
        )
        good = good and min(kept.ratio, followed.ratio) >= LEAST
        tried = {share: round(each, 1) for share, each in sorted(found["tried"])}
        least = min(tried.values())
        print(
            f"{part:7}{ms['even']:10.1f}{ms['best']:7.1f}{ms['kept']:7.1f}  {shown(kept)}"
            f"{ms['followed']:10.1f}  {shown(followed)}",
            f"kept {found['shares'][0]}, best {found['best_share']}; in the search the shortest of "
            f"one share is {least} ms, of {tried}",
            flush=True,
        )
        machines = f"1 of 2 ranks is stopped {part} of the time"
        _page.append(page_row(machines, ms, "followed", followed))
    return good


def show_loss() -> bool:
    good = True
    print(
        "slowed by  seconds of torch, of pycomm with equal batches, of shares that follow [range]"
    )
    for by in (2, 4):
        rounds = [run("loss", 2, by, number) for number in range(ROUNDS)]
        seconds = {name: sorted(each[name][0] for each in rounds) for name in rounds[0]}
        steps = {each[name][1] for each in rounds for name in each}
        texts = {
            name: f"{statistics.median(each):.1f} [{each[0]:.1f}, {each[-1]:.1f}]"
            for name, each in seconds.items()
        }
        good = good and seconds["mine"][-1] < min(seconds["torch"][0], seconds["plain"][0])
        line = f"{texts['torch']}  {texts['plain']}  {texts['mine']}"
        print(f"{by:9}  {line}  steps: {sorted(steps)}", flush=True)
        _page.append(
            f"to the same loss, 1 of 2 ranks {by} times as slow: {texts['mine']} s; equal batches "
            f"{texts['torch']} s (torch over gloo), {texts['plain']} s (pycomm)"
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
