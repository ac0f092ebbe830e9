"""What benchmarks/time_to_loss.py computes: tuning, targets, crossings, products, the check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from ranks import RIG

sys.path.append(str(RIG.parents[1] / "benchmarks"))

import time_to_loss_pace
import time_to_loss_picture
import time_to_loss_tables
from time_to_loss_product import (
    BY_NAME,
    COMPUTE_S,
    EVERY,
    FRAGMENTS,
    METHODS,
    SEEDS,
    STEPS,
    TARGET_STEP,
    TUNE_SEED,
    TUNE_STEPS,
    Run,
    best_rates,
    crossing,
    curves,
    next_run,
    ring_ratio,
    seconds_to,
    step_seconds,
    target_of,
)

pytestmark = pytest.mark.nightly

POINTS = STEPS // EVERY


def run_of(run: Run, losses: list[float]) -> dict[str, Any]:
    return {**vars(run), "losses": losses}


def trials_of(name: str, best: int) -> list[dict[str, Any]]:
    """Every trial of a method; one of them is the best."""
    return [
        run_of(Run(name, *rates, TUNE_SEED, TUNE_STEPS), [2.0 if number == best else 3.0])
        for number, rates in enumerate(BY_NAME[name].trials())
    ]


def finals_of(name: str, slope: float) -> list[dict[str, Any]]:
    """Lines that fall from 3; seeds are 0.01 apart around the middle one."""
    return [
        run_of(
            Run(name, 1e-3, 0.0, seed, STEPS),
            [3 - slope * (point + 1) + 0.01 * (seed - 1) for point in range(POINTS)],
        )
        for seed in SEEDS
    ]


def test_every_method_has_as_many_trials_and_evaluations_fit() -> None:
    assert {len(set(method.trials())) for method in METHODS} == {9}
    assert STEPS % EVERY == TUNE_STEPS % EVERY == TARGET_STEP % EVERY == EVERY % FRAGMENTS == 0
    assert TARGET_STEP / STEPS == 0.8
    assert TUNE_SEED not in SEEDS


@pytest.mark.parametrize("best", [0, 4, 8])
def test_the_trial_with_the_lowest_loss_wins(best: int) -> None:
    method = BY_NAME["diloco"]
    found = trials_of("diloco", best)
    assert best_rates(found, method) == method.trials()[best]
    assert best_rates([*found, *trials_of("sparse", 1)], method) == method.trials()[best]
    assert best_rates(found[1:], method) is None, "a trial is missing"


def test_a_loss_that_is_no_number_is_the_worst() -> None:
    found = trials_of("fp32", 3)
    found[0]["losses"] = [float("nan")]
    assert best_rates(found, BY_NAME["fp32"]) == BY_NAME["fp32"].trials()[3]


def test_trials_come_first_then_every_seed_of_every_method() -> None:
    found: list[dict[str, Any]] = []
    order = []
    while (run := next_run(found)) is not None:
        order.append(run)
        found.append(run_of(run, [float(len(found))]))
    trials, finals = order[: 9 * len(METHODS)], order[9 * len(METHODS) :]
    assert {(run.seed, run.steps) for run in trials} == {(TUNE_SEED, TUNE_STEPS)}
    assert [(run.seed, run.method) for run in finals] == [
        (seed, method.name) for seed in SEEDS for method in METHODS
    ]
    # The first trial of each had the lowest loss, so its rates are those of the final runs.
    assert {run.inner for run in finals if run.method == "int8"} == {5e-4}
    assert len({run.file() for run in order}) == len(order)


def test_a_curve_crosses_at_its_first_evaluation_at_or_below_the_target() -> None:
    assert crossing([3.0, 2.5, 2.4, 2.6], 2.5) == 2 * EVERY
    assert crossing([3.0, 2.5, 2.4, 2.6], 2.45) == 3 * EVERY
    assert crossing([3.0, 2.5, float("nan")], 2.4) is None


def test_the_target_is_the_mean_curve_at_80_percent() -> None:
    found = [*finals_of("fp32", 0.01), *finals_of("sparse", 0.005)]
    target = target_of(curves(found, "fp32"))
    assert target == pytest.approx(3 - 0.01 * TARGET_STEP / EVERY)
    assert crossing(curves(found, "fp32").mean(0).tolist(), target + 1e-9) == TARGET_STEP
    assert crossing(curves(found, "sparse").mean(0).tolist(), target) is None


def test_the_product() -> None:
    exposed = {"fp16": 0.8, "diloco": 4.8, "streaming": 0.24, "local_sgd": 3.0}
    assert step_seconds(0.8, False) == pytest.approx(COMPUTE_S + 0.8)
    assert seconds_to(480, BY_NAME["fp16"], exposed) == pytest.approx(480 * 2.0)
    assert seconds_to(480, BY_NAME["diloco"], exposed) == pytest.approx(480 * 1.4)
    # Its workers differ, and one more average makes them equal.
    assert seconds_to(480, BY_NAME["streaming"], exposed) == pytest.approx(480 * 1.21 + 3.0)
    assert seconds_to(None, BY_NAME["fp16"], exposed) is None


def test_the_ratio_of_wire_and_computing() -> None:
    assert ring_ratio(62_500_000, 1.2) == pytest.approx(2.66, abs=0.01)
    # The check's link is as slow for its model.
    numel, mbit = 400_000, 38.4
    assert ring_ratio(numel, 0.2, 0.941e6 * mbit) == pytest.approx(2.66, abs=0.01)


def clocks_of(**exposed: float) -> dict[int, list[dict[str, Any]]]:
    return {
        62_500_000: [
            {"rows": {name: {"exposed": factor * value} for name, value in exposed.items()}}
            for factor in (1.0, 0.5, 30.0)
        ]
    }


def test_medians_of_the_turns_and_the_best_of_gloo() -> None:
    given = {method.name: 1.0 for method in METHODS}
    clocks = clocks_of(**given, **{"gloo@4": 3.0, "gloo@25": 2.5, "gloo@4#fp16": 2.0})
    exposed = time_to_loss_tables.exposed_of(clocks[62_500_000])
    assert exposed["fp32"] == 1.0
    rows = {
        shown: added[method.name]
        for shown, method, added in time_to_loss_tables.rows_of([], exposed)
    }
    assert rows["gloo fp32, 25 MiB"] == 2.5
    assert rows["gloo fp16, 4 MiB"] == 2.0
    assert rows["sync fp16"] == 1.0


def test_what_rounds_reach_beside_those_that_send_each_step() -> None:
    slopes = {"fp16": 0.02, "int8": 0.01, "local_sgd": 0.01, "diloco": 0.008, "sparse": 0.001}
    slopes["streaming"] = 0.03
    found = [run for name, slope in slopes.items() for run in finals_of(name, slope)]
    given = {method.name: 0.0 for method in METHODS} | {"int8": 0.3, "fp16": 0.8, "local_sgd": 2.4}
    lines = time_to_loss_tables.end_lines(found, clocks_of(**given))
    rows = {line[:22].strip(): line[22:].split() for line in lines[2:] if line}
    # 600 steps of 1.3 s; int8 has that loss after as many steps of 1.5 s, fp16 after half, of 2 s.
    assert rows["LocalSGD"] == ["2.7500", "780", "900", "624"]
    assert rows["DiLoCo"] == ["2.8000", "720", "720", "480"]
    assert rows["StreamingDiLoCo int8"] == ["2.2500", "722", "never", "never"]


def check(folder: Path, seconds: float, reached: bool = True) -> tuple[list[str], bool]:
    """The product for the run is 480 steps of 1 s; it took ``seconds`` for so many."""
    curve = finals_of("fp16", 0.01)
    losses = curve[0]["losses"]
    target = losses[TARGET_STEP // EVERY - 1]
    run = {"method": "fp16", "seed": 0, "compute_s": COMPUTE_S / 2}
    run["losses"] = losses if reached else [3.0] * POINTS
    run["seconds"] = [seconds / TARGET_STEP * EVERY * (point + 1) for point in range(POINTS)]
    (folder / "run.json").write_text(json.dumps(run))
    return time_to_loss_tables.check_lines(curve, clocks_of(fp16=2.0 - COMPUTE_S), folder, target)


def test_the_check_allows_a_tenth(tmp_path: Path) -> None:
    lines, agree = check(tmp_path, 500.0)
    assert agree and "480.0" in lines[1] and "+4.2%" in lines[1]
    for wrong in (420.0, 540.0):
        assert not check(tmp_path, wrong)[1]
    assert not check(tmp_path, 600.0, reached=False)[1], "the curve crosses and the run did not"
    assert check(tmp_path, 500.0)[1]


def test_without_a_run_end_to_end_nothing_agrees(tmp_path: Path) -> None:
    assert not time_to_loss_tables.check_lines([], clocks_of(fp16=1.0), tmp_path, 2.0)[1]


def test_ticks_enclose_what_is_shown() -> None:
    assert time_to_loss_picture.ticks(30, 800) == [20, 50, 100, 200, 500, 1000]
    assert time_to_loss_picture.ticks(50, 900)[::5] == [50]
    assert time_to_loss_picture.ticks(50, 1001)[-1] == 2000


def test_the_picture_has_a_line_for_each_method_in_each_panel() -> None:
    lines = {"a & b": [(10.0, 3.5), (20.0, 3.0), (40.0, 2.5)], "c": [(12.0, 3.0), (90.0, 2.6)]}
    svg = time_to_loss_picture.picture({"one": lines, "two": lines}, target=2.7, most=3.0)
    root = ElementTree.fromstring(svg)
    drawn = [each.get("points", "").split() for each in root.findall("{*}polyline")]
    assert [len(points) for points in drawn] == [2, 2, 2, 2], "what is above the axis is left out"
    x = np.array([float(point.split(",")[0]) for points in drawn for point in points])
    assert np.all(np.diff(x[:2]) > 0) and x[4:].min() > x[:4].max()


def test_a_filled_tensor_has_exact_sums_and_errors_are_seen() -> None:
    tile = (torch.arange(time_to_loss_pace.PERIOD) * 37 % time_to_loss_pace.PERIOD - 127).float()
    assert sorted(tile.tolist()) == list(range(-127, 128)), "int8's scales are whole numbers"
    flat = torch.zeros(2 * 4096 * time_to_loss_pace.PERIOD + 100)
    time_to_loss_pace.fill(flat, 3.0, tile)
    assert torch.equal(flat[:255], 3 * tile) and torch.equal(flat[-100:], 3 * tile[:100])
    assert time_to_loss_pace.error(flat, 3.0, tile) == 0.0
    flat[-1] += 2
    assert time_to_loss_pace.error(flat, 3.0, tile) == 2.0


def test_a_step_takes_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []
    monkeypatch.setattr(time_to_loss_pace.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time_to_loss_pace.time, "sleep", slept.append)
    pace = time_to_loss_pace.Pace(1.2)
    now[0] = 200.0
    pace.begin()
    now[0] = 200.1
    pace.until(0.5)
    now[0] = 201.0
    pace.until(0.75)  # it is over
    assert slept == [pytest.approx(0.5), 0.0]


def test_clocks_are_read_by_size_and_turn(tmp_path: Path) -> None:
    for name, numel in (("250-turn0", 250), ("62-turn1", 62), ("62-turn0", 62)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"numel": numel, "name": name}))
    (tmp_path / "62-turn2.json.part").write_text("{")
    found = time_to_loss_tables.load_clocks(tmp_path)
    read = [(numel, [turn["name"] for turn in turns]) for numel, turns in found.items()]
    assert read == [(62, ["62-turn0", "62-turn1"]), (250, ["250-turn0"])]
