"""Processes join a training that runs: they have the others' bits from their first step on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rings
import torch
import torch.distributed as dist
from elastic_joining import Plan, start, trains_with_faults
from elastic_training import SHARED, TCP
from processes import fork_and_wait
from ranks import TORCH_DDP, RankResult, Ranks, run_ranks, start_ranks
from time_bound import assert_within

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(200),
]


def joining(plan: Plan) -> Plan:
    return dataclasses.replace(plan, join=True)


def check(results: Sequence[RankResult]) -> list[dict[str, Any]]:
    """What they did; raises AssertionError unless they did it alike, and rightly."""
    text = "\n".join(result.describe() for result in results)
    by_step: dict[int, tuple[str, tuple[int, ...]]] = {}
    values = []
    for result in results:
        assert result.ok, text
        value = result.value
        assert value["error"] is None, (value["error"], text)
        assert value["wrong"] == "", (value["wrong"], text)
        numbers = [step["step"] for step in value["steps"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), text
        for step in value["steps"]:
            known = by_step.setdefault(step["step"], (step["bits"], step["members"]))
            assert known == (step["bits"], step["members"]), (step["step"], text)
            assert value["mine"] in step["members"], text
        values.append(value)
    return values


CASES = [
    Plan("", 2),
    Plan("", 2, wire="fp16", optimizer="SGD"),
    Plan("", 2, wire="int8"),
    Plan("", 2, wire="bf16", passes=2),
    Plan("", 2, options=(("find_unused_parameters", True),)),
    Plan("", 2, options=(("weight", "samples"),)),
]


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
@pytest.mark.parametrize(
    "case", rings.first_of(CASES), ids=["adam", "fp16", "int8", "bf16", "unused", "samples"]
)
def test_a_process_joins(case: Plan, options: dict[str, Any], tmp_path: Path) -> None:
    plan = dataclasses.replace(case, peers=str(tmp_path / "peers"))
    with start(2, plan, options) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), options) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    values = check(results)
    assert values[2]["steps"][0]["step"] >= 10
    assert values[2]["steps"][0]["members"] == (0, 1, 2)
    assert values[0]["stats"]["joined_ranks"] == 1
    assert values[2]["stats"]["joined_ranks"] == 0


@pytest.mark.parametrize("optimizer", ["NAdam", "Fp32Momentum"])
def test_state_of_another_dtype_than_the_parameters(optimizer: str, tmp_path: Path) -> None:
    """torch's ``load_state_dict()`` casts it."""
    dtype = torch.bfloat16
    plan = Plan(str(tmp_path / "peers"), 2, optimizer=optimizer, dtype=dtype, check=False)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    check(results)


def test_state_that_cannot_be_loaded_as_it_is_sent(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "peers"), 2, optimizer="HiddenMomentum", check=False)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            refused = newcomer.collect(60)[0].value["error"]
        for rank in (0, 1):
            running.kill(rank)
        running.collect(30)
    assert refused.is_a("JoinRefusedError"), refused.text
    assert "HiddenMomentum" in refused.text and "'scale'" in refused.text, refused.text


@pytest.mark.parametrize("stays", ["zeros", "values"])
def test_gradients_that_stay_move_the_newcomer_as_the_members(stays: str, tmp_path: Path) -> None:
    """No step of the newcomer writes them: their parameters are frozen, or unused on all ranks."""
    options = (("find_unused_parameters", True),)
    plan = Plan(
        str(tmp_path / "peers"), 2, optimizer="SGD", gone=stays, options=options, check=False
    )
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    check(results)


@pytest.mark.time_bound
def test_a_process_joins_a_loop_that_asks_for_means(tmp_path: Path) -> None:
    """Members stop for it before a forward pass: not in a mean, where rank 0 gives no state."""
    plan = Plan(str(tmp_path / "peers"), 2, asks=True, settings=(("join_pause", 20.0),))
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    values = check(results)
    assert values[2]["steps"][0]["members"] == (0, 1, 2)
    for value in values:
        assert_within(value["asked_s"], 10)


@pytest.mark.parametrize("options", [(), (("weight", "samples"),)], ids=["plain", "samples"])
def test_a_process_joins_a_loop_that_asks_between_passes(options: Any, tmp_path: Path) -> None:
    """It comes in at the begin of a step, also if a mean has made known that it is reached."""
    plan = Plan(str(tmp_path / "peers"), 2, passes=3, asks_between=True, options=options)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    assert check(results)[2]["steps"][0]["members"] == (0, 1, 2)


def test_the_first_one_is_alone(tmp_path: Path) -> None:
    """One process begins, others come: none needs a rank of its own."""
    plan = Plan(str(tmp_path / "peers"), 2)
    with start(1, plan, SHARED) as first:
        first.wait_for_mark(0, "trains")
        with start(1, joining(plan), SHARED) as second, start(1, joining(plan), SHARED) as third:
            results = [*first.collect(90), *second.collect(90), *third.collect(90)]
    assert check(results)[0]["steps"][-1]["members"] == (0, 1, 2)


def test_the_place_of_a_dead_rank_is_taken(tmp_path: Path) -> None:
    """Both founders die one after the other, and the training goes on: nobody has begun it anew."""
    plan = Plan(str(tmp_path / "peers"), 3)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        running.kill(0)
        with start(1, joining(plan), SHARED) as second:
            second.wait_for_mark(0, "trains")
            running.kill(1)
            with start(1, joining(plan), SHARED) as third:
                results = [*second.collect(90), *third.collect(90)]
            running.collect(30)
    values = check(results)
    assert values[0]["steps"][-1]["members"] == (2, 3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"wide": True}, "'left.weight'"),
        ({"wire": "bf16"}, "wire_dtype"),
        ({"settings": (("min_ranks", 2),)}, "elastic"),
    ],
)
def test_another_model_is_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "peers"), 2)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, dataclasses.replace(joining(plan), **changes), SHARED) as newcomer:
            refused = newcomer.collect(60)[0].value["error"]
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    assert refused.is_a("JoinRefusedError") and text in refused.text, refused.text
    assert "the members" in refused.text
    check(results)


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"transport": "tcp"}, "'transport of the group' is 'shm' on the members and 'tcp' on"),
        rings.nightly(({"heartbeat_timeout": 2.5}, "'heartbeat_timeout of the group' is 3.0 on")),
        rings.nightly(({"wire_dtype": "bf16"}, "'wire_dtype of the group' is 'fp32' on")),
    ],
)
def test_other_options_of_the_group_are_refused(
    theirs: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """Before anybody stops: the members have no further epoch, and no line in the log."""
    plan = Plan(str(tmp_path / "peers"), 2)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), {**SHARED, **theirs}) as newcomer:
            refused = newcomer.collect(60)[0].value
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    assert refused["error"].is_a("JoinRefusedError"), refused
    assert text in refused["error"].text, refused["error"].text
    values = check(results)
    assert values[0]["stats"]["epochs"] == 2, values[0]["stats"]
    assert values[0]["stats"]["lost_ranks"] == 0


def test_a_process_that_fails_as_a_member_leaves(tmp_path: Path) -> None:
    """Also if it lives on, with the exception and all that this refers to."""
    plan = Plan(str(tmp_path / "peers"), 2)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        failing = dataclasses.replace(joining(plan), fails=True)
        with start(1, failing, SHARED) as newcomer:
            newcomer.wait_for_mark(0, "failed")
            with start(1, joining(plan), SHARED) as second:
                results = [*running.collect(40), *second.collect(40)]
    assert check(results)[0]["steps"][-1]["members"] == (0, 1, 3)


# --- the file of the members ----------------------------------------------------------------------


@pytest.mark.time_bound
def test_the_file_of_a_training_that_runs_is_not_overwritten(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "peers"), 2)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        before = (tmp_path / "peers").read_text()
        with start(2, plan, SHARED) as others:
            refused = [result.value for result in others.collect(60)]
        assert (tmp_path / "peers").read_text() == before
        with start(1, joining(plan), SHARED) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    for value in refused:
        assert value["error"].is_a("InvalidArgumentError"), value["error"].text
        assert "training that runs: one of its 2 members has answered" in value["error"].text
    check(results)
    assert_within(max(value["after_s"] for value in refused), 4.0)


def test_the_file_of_a_dead_training_is_overwritten(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "peers"), 1)
    with start(1, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        running.kill(0)
        running.collect(30)
    before = (tmp_path / "peers").read_text()
    with start(1, plan, SHARED) as first, start(1, joining(plan), SHARED) as second:
        results = [*first.collect(90), *second.collect(90)]
    check(results)
    assert (tmp_path / "peers").read_text() != before
    assert results[0].stderr.count("names members that do not answer (host ") == 1


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "peers").write_text("the only copy of a thesis\n")
    with start(1, Plan(str(tmp_path / "peers"), 0), SHARED) as running:
        refused = running.collect(60)[0].value["error"]
    assert refused.is_a("InvalidArgumentError"), refused.text
    assert "no file of handles" in refused.text
    assert (tmp_path / "peers").read_text() == "the only copy of a thesis\n"


def founded(peers: str, **settings: Any) -> Any:
    import pycomm

    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    elastic = pycomm.Elastic(peers=peers, state=[optimizer], **settings)
    return pycomm.DistributedDataParallel(net, elastic=elastic)


def make_step(model: Any) -> None:
    model(torch.ones(2, 3)).sum().backward()


def begins_again(rank: int, world_size: int, peers: str) -> list[Any]:
    """What the second of three wrappers raises: the first one trains then, and has left later."""
    import pycomm

    first = founded(peers)
    with pytest.raises(pycomm.errors.UnsupportedError) as refused:
        founded(peers)
    first.elastic.leave()
    make_step(first)
    assert first.elastic.left
    second = founded(peers)
    make_step(second)
    return [str(refused.value), second.elastic.step]


def test_a_process_that_has_left_begins_anew_with_its_file(tmp_path: Path) -> None:
    ((text, steps),) = run_ranks(1, begins_again, args=(str(tmp_path / "peers"),)).values()
    assert "a second elastic wrapper" in text
    assert steps == 1


def begins_after(rank: int, world_size: int, how: str, folder: str) -> int:
    """Steps of the second wrapper. The first one is there still, and trains no more."""
    import pycomm

    first = founded(f"{folder}/peers", min_ranks=world_size, quorum_wait=0.2)
    if how == "backward fails":
        first.module.weight.register_hook(lambda gradient: gradient[0, 0, 0])
        with pytest.raises(IndexError):
            make_step(first)
        with pytest.raises(RuntimeError):
            make_step(first)
    if how == "too few are left":
        if rank == 1:
            first.elastic.leave()
        make_step(first)
        if rank == 1:
            return 0
        with pytest.raises(pycomm.errors.QuorumLostError):
            make_step(first)
    if how != "backward fails":
        begin_alone(folder)
    second = founded(f"{folder}/peers")
    make_step(second)
    steps: int = second.elastic.step
    return steps


def begin_alone(folder: str) -> None:
    """Another default group in the place of the one that there is."""
    dist.destroy_process_group()
    dist.init_process_group("pycomm", init_method=f"file://{folder}/store", rank=0, world_size=1)


@pytest.mark.parametrize("how", ["destroyed", "backward fails", "too few are left"])
def test_a_wrapper_that_trains_no_more_does_not_block_the_next_one(
    how: str, tmp_path: Path
) -> None:
    size = 2 if how == "too few are left" else 1
    assert run_ranks(size, begins_after, args=(how, str(tmp_path))).values()[0] == 1


def begins_where_one_is_over(rank: int, world_size: int, folder: str) -> str:
    """What the second wrapper raises: the first one trains on rank 0 alone."""
    import pycomm

    first = founded(f"{folder}/peers")
    if rank == 1:
        first.module.weight.register_hook(lambda gradient: gradient[0, 0, 0])
        for kind in (IndexError, RuntimeError):
            with pytest.raises(kind):
                make_step(first)
    while rank == 0 and first.elastic.size == 2:
        make_step(first)
    with pytest.raises(pycomm.errors.UnsupportedError) as refused:
        founded(f"{folder}/others")
    return str(refused.value)


def test_all_ranks_refuse_a_second_wrapper_where_one_still_trains(tmp_path: Path) -> None:
    """Rank 1 trains no more, and would wait for rank 0 in the second wrapper."""
    texts = run_ranks(2, begins_where_one_is_over, args=(str(tmp_path),), timeout_s=60).values()
    assert texts[0] == texts[1]
    assert "a second elastic wrapper where the first still trains on ranks [0]" in texts[0]


def begins_in_a_child(rank: int, world_size: int, folder: str) -> int:
    first = founded(f"{folder}/peers")

    def child() -> None:
        begin_alone(folder)
        second = founded(f"{folder}/of the child")
        make_step(second)
        assert second.elastic.step == 1

    code = fork_and_wait(child)
    make_step(first)
    return code


def test_a_child_of_fork_begins_a_training_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(1, begins_in_a_child, args=(str(tmp_path),)).values() == [0]


def members_in(path: Path) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    return len([line for line in lines if line and not line.startswith("#")])


def goes_to_another_folder(rank: int, world_size: int, folder: str) -> tuple[int, list[str]]:
    """How many members the file has when one has left, and what the second folder holds."""
    first, second = Path(folder, "first"), Path(folder, "second")
    os.chdir(first)
    model = founded("peers")
    while members_in(first / "peers") < 2:
        time.sleep(0.01)
    os.chdir(second)
    if rank == 1:
        model.elastic.leave()
    make_step(model)
    while rank == 0 and members_in(first / "peers") == 2 and not os.listdir(second):
        time.sleep(0.01)
    return members_in(first / "peers"), os.listdir(second)


def test_the_file_stays_where_the_program_was(tmp_path: Path) -> None:
    """Its name is relative, and the program goes to another folder between two changes."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    found = run_ranks(2, goes_to_another_folder, args=(str(tmp_path),)).values()
    assert found[0] == (1, [])


@pytest.mark.time_bound
def test_nobody_answers(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "peers"), 2, settings=(("join_wait", 1.0),))
    with start(1, joining(plan), SHARED) as newcomer:
        none = newcomer.collect(60)[0].value
    assert none["error"].is_a("RendezvousTimeoutError"), none["error"].text
    assert "cannot be read" in none["error"].text
    assert none["after_s"] > 0.9
    with start(1, plan, SHARED) as running:
        running.wait_for_mark(0, "trains")
        running.kill(0)
        running.collect(30)
    with start(1, joining(plan), SHARED) as newcomer:
        dead = newcomer.collect(60)[0].value
    assert dead["error"].is_a("RendezvousTimeoutError"), dead["error"].text
    assert "pid" in dead["error"].text
    (tmp_path / "peers").write_text("no handle\n")
    with start(1, joining(plan), SHARED) as newcomer:
        wrong = newcomer.collect(60)[0].value
    assert wrong["error"].is_a("JoinRefusedError"), wrong["error"].text
    assert_within(none["after_s"], 10.0)


@pytest.mark.nightly
@pytest.mark.time_bound
def test_the_wait_for_an_answer_is_part_of_join_wait(tmp_path: Path) -> None:
    """Members answer late, and admit nobody then: they come to no ``join_point()``."""
    plan = Plan(str(tmp_path / "peers"), 2, points=10**6, settings=(("join_pause", None),))
    late = dataclasses.replace(
        joining(plan),
        peers=str(tmp_path / "late"),
        settings=(("join_pause", None), ("join_wait", 8.0)),
    )
    with start(1, plan, SHARED) as running:
        running.wait_for_mark(0, "trains")
        with start(1, late, SHARED) as newcomer:
            newcomer.wait_for_mark(0, "asks")
            time.sleep(6.0)
            (tmp_path / "peers").rename(tmp_path / "late")
            refused = newcomer.collect(60)[0].value
        running.kill(0)
        running.collect(30)
    text = refused["error"].text
    assert refused["error"].is_a("RendezvousTimeoutError"), text
    assert "was not admitted to an elastic training within join_wait=8 s" in text, text
    assert refused["after_s"] > 7.9
    assert_within(refused["after_s"], 12.0)


def test_a_state_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "peers"), 2, payload=200 << 20, settings=(("join_pause", 0.1),))
    with start(2, plan, TCP) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), TCP) as newcomer:
            refused = newcomer.collect(90)[0].value["error"]
        assert refused.is_a("JoinRefusedError") and "join_pause" in refused.text, refused.text
        for rank in (0, 1):  # they go on
            running.kill(rank)
        running.collect(30)


def test_a_state_that_is_read_for_too_long_is_refused(tmp_path: Path) -> None:
    """The members go on before rank 0 has anything to send, and the newcomer learns why."""
    plan = Plan(str(tmp_path / "peers"), 2, reads_for=1.0, settings=(("join_pause", 0.2),))
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            refused = newcomer.collect(50)[0].value["error"]
        for rank in (0, 1):
            running.kill(rank)
        running.collect(30)
    assert refused.is_a("JoinRefusedError") and "join_pause" in refused.text, refused.text


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
def test_a_newcomer_dies_while_it_loads(options: dict[str, Any], tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "peers"), 2)
    with start(2, plan, options) as running:
        running.wait_for_mark(0, "step 10")
        dying = dataclasses.replace(joining(plan), dies=(-1, "loads"))
        with start(1, dying, options) as newcomer:
            newcomer.collect(60)
        with start(1, joining(plan), options) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    check(results)


@pytest.mark.parametrize("turn", rings.first_of(range(3)))
@pytest.mark.parametrize("least", [1, 3])
def test_rank_0_dies_while_it_gives(least: int, turn: int, tmp_path: Path) -> None:
    """Or just after it, if the kill is late: a process that is started then ends the training."""
    settings = (("min_ranks", least),)
    plan = Plan(str(tmp_path / "peers"), 4, payload=64 << 20, check=False, settings=settings)
    with start(3, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with start(1, joining(plan), SHARED) as newcomer:
            running.wait_for_mark(0, "gives")
            time.sleep(0.03 * turn)
            running.kill(0)
            newcomer.wait_for_mark(0, "trains")
            with start(1, joining(plan), SHARED) as last:
                results = [*running.collect(90), *newcomer.collect(90), *last.collect(90)]
    assert results[0].exit_code == -signal.SIGKILL
    values = check(results[1:])
    assert values[-1]["steps"][-1]["members"] == (1, 2, 3, 4)


def test_two_join_at_once(tmp_path: Path) -> None:
    plan = Plan(str(tmp_path / "peers"), 3)
    with start(2, plan, SHARED) as running:
        running.wait_for_mark(0, "step 10")
        with contextlib.ExitStack() as stack:
            newcomers: list[Ranks] = [
                stack.enter_context(start(1, joining(plan), SHARED)) for _ in range(2)
            ]
            results = [*running.collect(90), *(each.collect(90)[0] for each in newcomers)]
    values = check(results)
    assert values[0]["steps"][-1]["members"] == (0, 1, 2, 3)


def changes_of(seed: int, count: int) -> list[bool]:
    """True: a process joins. False: one is killed. 1 to 4 are left; the last change is a join."""
    dice = random.Random(seed)
    alive = 2
    changes = []
    for _ in range(count - 1):
        joins = alive <= 1 or (alive < 4 and dice.random() < 0.5)
        alive += 1 if joins else -1
        changes.append(joins)
    return [*changes, True]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
def test_processes_die_and_join_again_and_again(options: dict[str, Any], tmp_path: Path) -> None:
    seed = random.randrange(1000)
    print(f"seed {seed}")
    dice = random.Random(seed)
    changes = changes_of(seed, 30)
    plan = Plan(str(tmp_path / "peers"), 1 + changes.count(True), wire="int8", check=False)
    with contextlib.ExitStack() as stack:
        founders = stack.enter_context(start(2, plan, options))
        alive = [(founders, 0), (founders, 1)]
        founders.wait_for_mark(0, "step 10")
        for joins in changes:
            if joins:
                newcomer = stack.enter_context(start(1, joining(plan), options))
                newcomer.wait_for_mark(0, "trains")
                alive.append((newcomer, 0))
            else:
                running, rank = alive.pop(dice.randrange(len(alive)))
                running.kill(rank)
            time.sleep(dice.random() * 0.1)
        ended = {id(running): running.collect(60) for running, _ in alive}
        results = [ended[id(running)][rank] for running, rank in alive]
    values = check(results)
    assert len(values) >= 2


# --- deaths at one place --------------------------------------------------------------------------


def start_with_faults(world_size: int, store: Path, plan: Plan, **env: str) -> Any:
    return start_ranks(
        world_size,
        trains_with_faults,
        args=(str(store), plan),
        destroy=False,
        init="none",
        only_pycomm=True,
        preload=TORCH_DDP,
        env={"OMP_NUM_THREADS": "1", **env},
    )


LONG = 30.0
"""Of ``join_pause``, seconds: nothing below may take as long."""
PATIENT: dict[str, Any] = {**SHARED, "heartbeat_timeout": 60.0}


def longest_gap(value: dict[str, Any]) -> float:
    """Between the ends of two steps, in seconds."""
    ends = [step["ended_s"] for step in value["steps"]]
    return max(later - earlier for earlier, later in itertools.pairwise(ends))


@pytest.mark.time_bound
def test_one_that_stops_does_not_keep_another_one_from_joining(tmp_path: Path) -> None:
    """All are reached before the members stop, and rank 0 serves one after the other."""
    gate = tmp_path / "gate"
    plan = Plan(
        str(tmp_path / "peers"),
        2,
        payload=64 << 20,
        check=False,
        settings=(("join_pause", LONG),),
        waits_for=str(gate),
    )
    one = dataclasses.replace(joining(plan), waits_for="")
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(start(2, plan, SHARED))
        running.wait_for_mark(0, "step 0")
        newcomers = [stack.enter_context(start(1, one, SHARED)) for _ in range(3)]
        for newcomer in newcomers:
            newcomer.wait_for_mark(0, "asks")
        time.sleep(2.0)
        gate.touch()
        running.wait_for_mark(0, "gives")
        for newcomer in newcomers[:2]:
            newcomer.kill(0, signal.SIGSTOP)
        results = [*running.collect(90), *newcomers[2].collect(90)]
    values = check(results)
    assert_within(max(longest_gap(value) for value in values[:2]), 15.0)


@pytest.mark.parametrize("options", rings.first_of([SHARED, TCP]), ids=["shm", "tcp"])
def test_one_that_was_stopped_joins_when_it_goes_on(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The members have forgotten it, and its connections to them are still open."""
    plan = Plan(str(tmp_path / "peers"), 2, payload=64 << 20, check=False, reads_for=2.0)
    one = dataclasses.replace(joining(plan), settings=(("join_wait", 60.0),))
    with start(2, plan, options) as running, start(1, one, options) as newcomer:
        running.wait_for_mark(0, "gives")
        newcomer.kill(0, signal.SIGSTOP)
        marks = len(running.marks(0))
        running.wait_until(0, lambda: len(running.marks(0)) > marks + 1, "does not go on")
        newcomer.kill(0, signal.SIGCONT)
        results = [*running.collect(60), *newcomer.collect(60)]
    check(results)


def expect_interrupted(running: Ranks) -> None:
    """Rank 0 waits now, and Ctrl-C ends that soon."""
    running.wait_until_asleep(0)
    sent_s = running.kill(0, signal.SIGINT)
    result = running.collect(60)[0]
    took_s = time.monotonic() - sent_s
    assert "KeyboardInterrupt" in result.stderr, result.describe()
    assert_within(took_s, 10.0)


@pytest.mark.time_bound
def test_rank_0_is_interrupted_while_it_gives(tmp_path: Path) -> None:
    plan = Plan(
        str(tmp_path / "peers"), 9, payload=64 << 20, settings=(("join_pause", LONG),), check=False
    )
    with start(1, plan, PATIENT) as running, start(1, joining(plan), PATIENT) as newcomer:
        running.wait_for_mark(0, "gives")
        newcomer.kill(0, signal.SIGSTOP)
        expect_interrupted(running)


def tries_in_vain(rank: int, world_size: int, peers: str) -> int:
    """How many groups it leaves behind."""
    import pycomm

    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        elastic = pycomm.Elastic(peers=peers, state=[optimizer], join=True, join_wait=0.2)
        with pytest.raises(pycomm.errors.RendezvousTimeoutError):
            pycomm.DistributedDataParallel(net, elastic=elastic)
    return len(groups) - before


def test_a_process_that_tries_in_vain_leaves_no_groups(tmp_path: Path) -> None:
    peers = str(tmp_path / "peers")
    assert run_ranks(1, tries_in_vain, args=(peers,), preload=TORCH_DDP).values() == [0]


@pytest.mark.usefixtures("fault_build")
def test_newcomers_that_die_before_they_know_that_they_are_members_do_not_count(
    tmp_path: Path,
) -> None:
    """Rank 0 dies with one: of three voters one is left, which is no quorum unless both count."""
    plan = Plan(str(tmp_path / "peers"), 3, payload=1 << 20, check=False)
    founders = dataclasses.replace(plan, struck=(0, "survive.meet:1:kill"))
    newcomer = dataclasses.replace(joining(plan), struck=(0, "survive.keep:2:kill"))
    with (
        start_with_faults(2, tmp_path / "store", founders) as running,
        start_with_faults(1, tmp_path / "first", newcomer) as first,
    ):
        assert first.collect(60)[0].exit_code == -signal.SIGKILL
        with start_with_faults(1, tmp_path / "second", joining(plan)) as second:
            results = [running.collect(60)[1], *second.collect(60)]
    assert check(results)[0]["steps"][-1]["members"] == (1, 3)


@pytest.mark.usefixtures("fault_build")
@pytest.mark.time_bound
def test_a_rank_that_waits_for_others_to_join_is_interrupted(tmp_path: Path) -> None:
    settings = (("min_ranks", 2), ("quorum_wait", 60.0))
    plan = Plan(str(tmp_path / "peers"), 9, payload=4 << 20, check=False, settings=settings)
    founders = dataclasses.replace(plan, struck_in_stop=(1, "survive.committed:1:kill"))
    dying = dataclasses.replace(joining(plan), struck=(0, "survive.take:2:kill"))
    with start_with_faults(2, tmp_path / "store", founders) as running:
        running.wait_for_mark(0, "step 10")
        with start_with_faults(1, tmp_path / "first", dying) as newcomer:
            assert newcomer.collect(60)[0].exit_code == -signal.SIGKILL
        expect_interrupted(running)


@pytest.mark.usefixtures("fault_build")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("at", "point"),
    [
        ("newcomer", "survive.take:1:kill"),
        ("newcomer", "survive.take:3:kill"),
        ("newcomer", "survive.take:2:stop"),
        ("newcomer", "survive.meet:1:kill"),
        ("newcomer", "reconfigure.call:2:kill"),
        ("newcomer", "reconfigure.ready:2:kill"),
        ("newcomer", "group.joined:2:kill"),
        ("rank 0", "survive.link:1:kill"),
        ("rank 0", "survive.give:1:kill"),
        ("rank 0", "survive.give:3:kill"),
        ("rank 0", "survive.seal:1:kill"),
        ("rank 0", "survive.meet:1:kill"),
        ("rank 1", "survive.link:1:kill"),
        ("rank 1", "survive.seal:1:kill"),
        ("rank 1", "survive.meet:1:kill"),
    ],
)
def test_a_process_dies_at_any_place_of_a_join(at: str, point: str, tmp_path: Path) -> None:
    """The others go on, and the next process that joins becomes a member."""
    stays = Plan(
        str(tmp_path / "peers"),
        4 if at.startswith("rank") else 3,
        payload=8 << 20,
        check=False,
        settings=(("join_pause", 2.0),),
    )
    dead = -1
    with contextlib.ExitStack() as stack:
        founders = stays
        if at.startswith("rank"):
            dead = int(at[-1])
            founders = dataclasses.replace(stays, struck=(dead, point))
        running = stack.enter_context(start_with_faults(3, tmp_path / "store", founders))
        running.wait_for_mark(0, "step 10")
        first = joining(stays)
        if at == "newcomer":
            first = dataclasses.replace(first, struck=(0, point))
        newcomer = stack.enter_context(start_with_faults(1, tmp_path / "first", first))
        results = []
        if at == "newcomer" and point.endswith("kill"):
            assert newcomer.collect(60)[0].exit_code == -signal.SIGKILL
        elif at == "newcomer":
            newcomer.wait_until(0, lambda: newcomer.state(0) == "T", "has not stopped")
            marks = len(running.marks(0))
            running.wait_until(0, lambda: len(running.marks(0)) > marks + 1, "does not go on")
            newcomer.kill(0)
        else:
            newcomer.wait_for_mark(0, "trains")
        second = stack.enter_context(start_with_faults(1, tmp_path / "second", joining(stays)))
        results = [*running.collect(90), *second.collect(90)]
        if at != "newcomer":
            results += newcomer.collect(90)
    check([result for index, result in enumerate(results) if index != dead])
    if dead >= 0:
        assert results[dead].exit_code == -signal.SIGKILL
