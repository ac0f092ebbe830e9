"""The tables of time_to_loss.py, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from time_to_loss_product import (
    BASE,
    BY_NAME,
    COMPUTE_S,
    EVERY,
    METHODS,
    SEEDS,
    STEPS,
    Method,
    best_rates,
    crossing,
    curves,
    ring_ratio,
    seconds_to,
    spread,
    step_seconds,
)

Clocks = Mapping[int, Sequence[Mapping[str, Any]]]
ALLOWED = 0.1  # between the product and a run end to end
_ROUNDS = {method.name for method in METHODS if method.rounds}


def load_clocks(folder: Path) -> Clocks:
    """By the number of parameters, each turn's measurements."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for path in sorted(folder.glob("*-turn*.json")):
        turn = json.loads(path.read_text())
        found.setdefault(turn["numel"], []).append(turn)
    return dict(sorted(found.items()))


def exposed_of(turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians of the seconds that communication adds to a step or round, by pattern."""
    return {
        name: float(np.median([turn["rows"][name]["exposed"] for turn in turns]))
        for name in turns[0]["rows"]
    }


def tuning_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"{'method':<22}{'inner':>9}{'outer':>7}   all trials: inner[/outer] loss"]
    for method in METHODS:
        rates = best_rates(found, method)
        assert rates is not None, f"{method.name}: trials are missing"
        losses = {
            (run["inner"], run["outer"]): run["losses"][-1]
            for run in found
            if run["method"] == method.name and run["seed"] not in SEEDS
        }
        shown = [
            f"{1e3 * inner:.2g}e-3{f'/{outer:g}' if outer else ''} {losses[inner, outer]:.3f}"
            for inner, outer in method.trials()
        ]
        outer = f"{rates[1]:7.1f}" if rates[1] else f"{'':7}"
        lines.append(f"{method.shown:<22}{rates[0]:9.5f}{outer}   {', '.join(shown)}")
    return lines


def curve_lines(found: Sequence[Mapping[str, Any]], target: float) -> list[str]:
    columns = f"{'loss at 240':>12}{'480':>8}{'600':>8}{'steps':>8}   each seed"
    lines = [f"{'method':<22}{columns}    (steps to {target:.4f})"]
    for method in METHODS:
        mine = curves(found, method.name)
        mean = mine.mean(0)
        every = [crossing(seed.tolist(), target) for seed in mine]
        lines.append(
            f"{method.shown:<22}{mean[9]:12.4f}{mean[19]:8.4f}{mean[24]:8.4f}"
            f"{crossing(mean.tolist(), target) or 'never':>8}   "
            + " ".join(str(each or "never") for each in every)
        )
    return lines


def clock_lines(numel: int, turns: Sequence[Mapping[str, Any]]) -> list[str]:
    ratio = ring_ratio(numel, COMPUTE_S)
    lines = [
        f"{numel / 1e6:g} million parameters, computing {COMPUTE_S} s per step, r = {ratio:.1f}, "
        f"{len(turns)} turns",
        f"{'pattern':<14}{'adds s':<24}{'to each':<9}{'step s':>8}{'MB':>9}{'cpu s':>8}"
        "   median [quartiles]; the slowest rank counts",
    ]
    exposed = exposed_of(turns)
    for name in sorted(exposed, key=lambda name: step_seconds(exposed[name], name in _ROUNDS)):
        rows = [turn["rows"][name] for turn in turns]
        lines.append(
            f"{name:<14}{spread([row['exposed'] for row in rows]):<24}"
            f"{'round' if name in _ROUNDS else 'step':<9}"
            f"{step_seconds(exposed[name], name in _ROUNDS):8.2f}"
            f"{np.median([row['sent'] for row in rows]) / 1e6:9.1f}"
            f"{np.median([row['cpu_s'] for row in rows]):8.2f}"
        )
    memory = max(turn["rss_mib"] for turn in turns)
    return [*lines, f"# largest resident memory of a rank: {memory:.0f} MiB"]


def rows_of(found: Sequence[Mapping[str, Any]], exposed: Mapping[str, float]) -> list[Any]:
    """(name, method, seconds that a step or round adds), with gloo's best buckets beside ours."""
    rows: list[Any] = [(method.shown, method, exposed) for method in METHODS]
    for suffix, name in (("", BASE), ("#fp16", "fp16")):
        rivals = {
            each: exposed[each]
            for each in exposed
            if each.startswith("gloo") and each.partition("#")[2] == suffix[1:]
        }
        if rivals:
            best = min(rivals, key=lambda each: rivals[each])
            shown = f"gloo {name}, {best.partition('#')[0].partition('@')[2]} MiB"
            rows.append((shown, BY_NAME[name], {**exposed, name: rivals[best]}))
    return rows


def product_lines(found: Sequence[Mapping[str, Any]], clocks: Clocks, target: float) -> list[str]:
    lines = []
    for numel, turns in clocks.items():
        exposed = exposed_of(turns)
        lines += [
            f"{numel / 1e6:g} million parameters, r = {ring_ratio(numel, COMPUTE_S):.1f}:"
            " computed from two measurements",
            f"{'method':<22}{'steps':>7}{'step s':>8}{'seconds':>9}{'/ fp16':>8}   each seed",
        ]
        base = _seconds(found, BY_NAME["fp16"], exposed, target)[0]
        rows = []
        for shown, method, added in rows_of(found, exposed):
            mean, seeds = _seconds(found, method, added, target)
            steps = crossing(curves(found, method.name).mean(0).tolist(), target)
            step_s = step_seconds(added[method.name], method.rounds)
            text = f"{shown:<22}{steps or 'never':>7}{step_s:8.2f}"
            text += f"{mean:9.0f}" if mean else f"{'never':>9}"
            text += f"{mean / base:8.2f}" if mean and base else f"{'':8}"
            text += "   " + " ".join(f"{each:.0f}" if each else "never" for each in seeds)
            rows.append((mean or float("inf"), text))
        lines += [text for _, text in sorted(rows)] + [""]
    return lines


def _seconds(
    found: Sequence[Mapping[str, Any]], method: Method, exposed: Mapping[str, float], target: float
) -> tuple[float | None, list[float | None]]:
    """To the target: of the mean curve, and of each seed."""
    mine = curves(found, method.name)
    each = [crossing(losses.tolist(), target) for losses in [mine.mean(0), *mine]]
    mean, *seeds = [seconds_to(steps, method, exposed) for steps in each]
    return mean, seeds


def end_lines(found: Sequence[Mapping[str, Any]], clocks: Clocks) -> list[str]:
    """What methods that send in rounds reach, and how long those that send in each step take."""
    rivals = [BY_NAME["int8"], BY_NAME["fp16"]]
    titles = "".join(f"{rival.shown + ' s':>13}" for rival in rivals)
    lines = []
    for numel, turns in clocks.items():
        exposed = exposed_of(turns)
        lines += [
            f"{numel / 1e6:g} million parameters: the loss after all {STEPS} steps, after how many "
            "seconds, and when others have it",
            f"{'method':<22}{'loss':>8}{'seconds':>9}{titles}",
        ]
        for method in METHODS:
            if not method.rounds:
                continue
            loss = float(curves(found, method.name).mean(0)[-1])
            text = f"{method.shown:<22}{loss:8.4f}{seconds_to(STEPS, method, exposed):9.0f}"
            for rival in rivals:
                steps = crossing(curves(found, rival.name).mean(0).tolist(), loss)
                seconds = seconds_to(steps, rival, exposed)
                text += f"{seconds:13.0f}" if seconds else f"{'never':>13}"
            lines.append(text)
        lines.append("")
    return lines


def check_lines(
    found: Sequence[Mapping[str, Any]], clocks: Clocks, folder: Path, target: float
) -> tuple[list[str], bool]:
    """Runs end to end beside the product for them, and whether all agree."""
    exposed = exposed_of(clocks[min(clocks)])
    lines = [
        f"{'method':<22}{'steps':>7}{'product: steps':>15}{'s':>8}{'end to end s':>14}{'off':>8}"
    ]
    agree = True
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        method, scale = BY_NAME[run["method"]], run["compute_s"] / COMPUTE_S
        curve = curves(found, run["method"])[SEEDS.index(run["seed"])].tolist()
        reached = crossing(run["losses"], target)
        expected = crossing(curve, target)
        if reached is None or expected is None:  # then the seconds of all steps are compared
            agree &= reached == expected
            steps = expected = EVERY * len(run["losses"])
        else:
            steps = reached
        product = expected * scale * step_seconds(exposed[run["method"]], method.rounds)
        seconds = run["seconds"][steps // EVERY - 1]
        agree &= abs(seconds / product - 1) <= ALLOWED
        text = f"{method.shown:<22}{reached or f'{steps}, never':>7}{expected:15d}{product:8.1f}"
        lines.append(f"{text}{seconds:14.1f}{100 * (seconds / product - 1):+7.1f}%")
    return lines, agree and len(lines) > 1
