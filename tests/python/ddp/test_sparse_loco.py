"""SparseLoCo beside numpy: what is chosen, what 14 bits carry, and the equations of a sync."""

from __future__ import annotations

import io
import json
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import ddp_models
import hosts
import numpy as np
import numpy.typing as npt
import pytest
import ranks
import rings
import torch
import torch.distributed as dist
from processes import child_environment
from ranks import describe_exception, mark, run_ranks, start_ranks
from time_bound import assert_within
from torch import nn

from pycomm.fewer_syncs import sparse_rows as sparse_rows

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(400)]

Floats = npt.NDArray[np.float32]
ROW = 4096


def as_bfloat16(values: Floats) -> Floats:
    """Rounded to the upper 16 bits of float32, ties to even: in integers, by the format's rule."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def largest(row: Floats, top_k: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """The positions by size, and what is sent for each."""
    order = np.argsort(-np.abs(row), kind="stable")[:top_k]
    sizes = np.abs(row[order]).astype(np.float64).reshape(-1, 16).mean(axis=1)
    sent = as_bfloat16(np.repeat(sizes, 16).astype(np.float32))
    return order, np.where(row[order] < 0, -sent, sent).astype(np.float32)


def rows_of(seed: int, count: int) -> torch.Tensor:
    """Distinct sizes, so that there is one order; over ten powers of ten from row to row."""
    generator = np.random.default_rng(seed)
    found = generator.permuted(np.arange(1, ROW + 1) * np.ones((count, 1)), axis=1)
    found *= generator.choice([-1.0, 1.0], found.shape)
    found *= np.geomspace(1e-12, 1e-2, count)[:, None]
    return torch.tensor(found, dtype=torch.float32)


# What travels


@pytest.mark.parametrize("top_k", [16, 64, 1024])
def test_the_largest_entries_are_chosen_and_come_back(top_k: int) -> None:
    rows = rows_of(1, 7)
    positions, values = sparse_rows.select(rows, top_k)
    for row, where, what in zip(rows.numpy(), positions, values, strict=True):
        order, sent = largest(row, top_k)
        assert where.tolist() == order.tolist()
        # A mean that lies between two bfloat16 may be rounded either way.
        np.testing.assert_allclose(what.numpy(), sent, rtol=2.0**-7)
        assert np.mean(what.numpy() == sent) > 0.9
    payload = sparse_rows.pack(positions, values)
    assert payload.dtype == torch.uint8
    assert payload.numel() * 8 == 14 * positions.numel()
    assert payload.numel() == sparse_rows.payload_nbytes(7, top_k)
    where, what = sparse_rows.unpack(payload, top_k)
    assert torch.equal(where, positions.long()) and torch.equal(what, values)
    for begin, end in ((0, 2), (2, 3), (3, 7), (7, 7)):
        part = sparse_rows.unpack(sparse_rows.rows_of(payload, top_k, begin, end), top_k)
        assert torch.equal(part[0], where[begin:end]) and torch.equal(part[1], what[begin:end])


def test_the_bytes_are_those_of_the_description() -> None:
    """One row of 16 entries, written by hand."""
    row = torch.zeros(1, ROW)
    chosen = [0xABC, 0x123, *range(0x200, 0x20E)]
    for place, position in enumerate(chosen):
        row[0, position] = (2.0 + (16 - place) / 64) * (-1) ** place
    payload = bytes(sparse_rows.pack(*sparse_rows.select(row, 16)).tolist())
    pairs = b"".join(
        (first | second << 12).to_bytes(3, "little")
        for first, second in zip(chosen[::2], chosen[1::2], strict=True)
    )
    mean = as_bfloat16(np.array([2.0 + 8.5 / 64], dtype=np.float32))
    assert payload == pairs + b"\xaa\xaa" + (mean.view(np.uint32) >> 16).astype("<u2").tobytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_sent_first(bad: float) -> None:
    rows = rows_of(2, 1)
    rows[0, 77] = bad
    positions, values = sparse_rows.select(rows, 32)
    where, what = sparse_rows.unpack(sparse_rows.pack(positions, values), 32)
    assert where[0, 0] == 77
    assert not torch.isfinite(what[0, :16]).any() and torch.isfinite(what[0, 16:]).all()


# The equations


def flat_of(tensor: torch.Tensor) -> Floats:
    found: Floats = tensor.detach().numpy().astype(np.float32).ravel()
    return found


def expected_sync(
    anchor: Floats, errors: list[Floats], ends: list[Floats], top_k: int, decay: float, lr: float
) -> tuple[npt.NDArray[np.float64], list[npt.NDArray[np.float64]]]:
    """The equations of docs/fewer-syncs.md for one parameter: the new anchor, and each error."""
    count = -(-anchor.size // ROW)
    sums = np.zeros(count * ROW)
    new_errors = []
    for error, end in zip(errors, ends, strict=True):
        summed = np.zeros(count * ROW, dtype=np.float32)
        summed[: anchor.size] = np.float32(decay) * error + (anchor - end)
        sent = np.zeros(count * ROW)
        for index in range(count):
            part = slice(index * ROW, (index + 1) * ROW)
            order, values = largest(summed[part], top_k)
            sent[part][order] = values
        sums += sent
        new_errors.append((summed.astype(np.float64) - sent)[: anchor.size])
    return anchor - lr * (sums / len(errors))[: anchor.size], new_errors


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, name: str
) -> None:
    optimizer.zero_grad()
    model(ddp_models.batch_of(name, rank, step)).float().square().mean().backward()
    optimizer.step()


def gathered(value: Any, world_size: int) -> list[Any]:
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def beside_numpy(rank: int, world_size: int, name: str) -> None:
    import pycomm

    model = ddp_models.make(name, seed=rank)  # rank 0's parameters count
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"top_k": 32, "error_decay": 0.9, "outer_lr": 0.8}
    local = pycomm.SparseLoCo(model, sync_every=2, **options)
    before = local.state_dict()
    for step in range(6):
        train_step(model, optimizer, rank, step, name)
        ends = {key: flat_of(each) for key, each in model.named_parameters()}
        assert local.step() == (step % 2 == 1)
        if step % 2 == 0:
            continue
        after = local.state_dict()
        of_all = gathered((before["error"], ends), world_size)
        for key, parameter in model.named_parameters():
            anchor, errors = expected_sync(
                flat_of(before["anchor"][key]),
                [flat_of(error[key]) for error, _ in of_all],
                [end[key] for _, end in of_all],
                options["top_k"],
                options["error_decay"],
                options["outer_lr"],
            )
            sizes = np.abs(anchor).max(initial=1e-3)
            # Means next to the middle of two bfloat16 are rounded either way, and few are.
            off = np.abs(flat_of(after["anchor"][key]) - anchor)
            assert np.all(off < 1e-2 * sizes), (key, off.max())
            assert not off.size or np.mean(off < 1e-5 * sizes) > 0.95, key
            kept = np.abs(flat_of(after["error"][key]) - errors[rank])
            assert (
                np.all(kept < 1e-2 * sizes) and np.mean(kept < 1e-5 * sizes) > 0.95
            ) or not kept.size
            assert torch.equal(parameter.detach(), after["anchor"][key])
        before = after
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(copies, parameter.detach().contiguous())
        assert all(torch.equal(copies[0], other) for other in copies)
    rows = sum(-(-each.numel() // ROW) for each in model.parameters())
    stats = local.stats()
    once = rows * options["top_k"] * 14 // 8 + 56
    assert (stats.steps, stats.syncs) == (6, 3)
    assert stats.sent_nbytes == 3 * (world_size - 1) * once


@pytest.mark.parametrize(
    ("name", "world_size"), rings.first_of([("buckets", 2), ("mlp", 3), ("strided", 2)])
)
@pytest.mark.ci
def test_a_sync_is_that_of_numpy(name: str, world_size: int) -> None:
    run_ranks(world_size, beside_numpy, args=(name,), preload=ranks.TORCH_DDP)


def everything_arrives(rank: int, world_size: int) -> float:
    """Parameters stand still: with a decay of 1 the error sends all that is left, in the end."""
    import pycomm

    model = nn.Linear(64, 128, bias=False)
    local = pycomm.SparseLoCo(model, sync_every=1, top_k=1024, error_decay=1.0)
    goal = local.state_dict()["anchor"]["weight"] + torch.randn(
        128, 64, generator=torch.Generator().manual_seed(rank)
    )
    moved = goal - model.weight.detach()
    mean = sum(gathered(goal, world_size)) / world_size
    with torch.no_grad():
        model.weight.copy_(goal)
    for _ in range(12):
        local.step()
    assert local.state_dict()["error"]["weight"].norm() < 1e-6 * moved.norm()
    return float((model.weight.detach() - mean).norm() / moved.norm())


def test_nothing_is_lost_for_good() -> None:
    left = run_ranks(2, everything_arrives, preload=ranks.TORCH_DDP).values()
    assert max(left) < 1e-6  # of what each worker had moved


def diverge(rank: int, world_size: int) -> None:
    """A round in which rank 0 has an Inf in one of two parameters."""
    import pycomm

    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    local = pycomm.SparseLoCo(model, sync_every=1, top_k=16)
    for size in (1.0, 1e25):
        with torch.no_grad():
            for each in model.parameters():
                each.add_(size * torch.randn(each.shape))
            if size > 1 and rank == 0:
                model[1].weight[3, 3] = float("inf")
        local.step()
        kept = any(each.any() for each in local.state_dict()["error"].values())
        assert kept == (size == 1.0)


def test_a_round_that_has_diverged_leaves_no_error() -> None:
    run_ranks(2, diverge, preload=ranks.TORCH_DDP)


# Checkpoints


def resume(rank: int, world_size: int) -> None:
    import pycomm

    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = ddp_models.make("buckets", seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, pycomm.SparseLoCo(model, sync_every=3)

    whole, cut = start(0), start(0)
    for step in range(8):
        for model, optimizer, local in (whole, cut):
            train_step(model, optimizer, rank, step, "buckets")
            local.step()
        if step == 4:
            file = io.BytesIO()
            torch.save([each.state_dict() for each in cut], file)
            file.seek(0)
            cut = start(5)
            for each, state in zip(cut, torch.load(file, weights_only=True), strict=True):
                each.load_state_dict(state)
        for mine, other in zip(cut[0].parameters(), whole[0].parameters(), strict=True):
            assert torch.equal(mine, other)
    first, second = whole[2].state_dict(), cut[2].state_dict()
    assert first["version"] == second["version"] == 2
    for name, error in first["error"].items():
        assert torch.equal(error, second["error"][name]) and error.abs().sum() > 0
    name = "layers.1.weight"
    anchor, error = first["anchor"], first["error"]
    for loader, state, text in (
        ("mlp", first, r"parameter 'layers\.1\.bias' is only in the state"),
        ("buckets", {**first, "anchor": {**anchor, name: anchor[name][0]}}, r"shape \(600,\) and"),
        (
            "buckets",
            {**first, "error": {**error, name: error[name][:5]}},
            r"its error of .* \(5,\)",
        ),
        ("buckets", {**first, "options": {**first["options"], "top_k": 32}}, "with top_k=32, and"),
        ("buckets", {"since_sync": 0}, "the state has no 'anchor'"),
    ):
        local = pycomm.SparseLoCo(ddp_models.make(loader), sync_every=3)
        before = local.state_dict()
        with pytest.raises(ValueError, match=text):
            local.load_state_dict(state)
        after = local.state_dict()
        assert before["version"] == after["version"] == 0
        for kind in ("anchor", "error"):
            for key, kept in before[kind].items():
                assert torch.equal(kept, after[kind][key])


def test_a_run_cut_between_two_syncs_continues_bit_by_bit() -> None:
    run_ranks(2, resume, preload=ranks.TORCH_DDP)


# Failures


def lose_rank_1(rank: int, world_size: int) -> Any:
    import pycomm

    model = ddp_models.make("buckets")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = pycomm.SparseLoCo(model, sync_every=2)
    for step in range(3):
        train_step(model, optimizer, rank, step, "buckets")
        local.step()
    before = local.state_dict()
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    mark("before the sync")
    if rank == 1:
        signal.pause()
    try:
        local.step()
    except pycomm.errors.PycommError as error:
        seen = describe_exception(error)
    after = local.state_dict()
    assert after["version"] == before["version"] == 1
    for kind in ("anchor", "error"):
        for name, tensor in before[kind].items():
            assert torch.equal(tensor, after[kind][name])
    for parameter, kept in zip(model.parameters(), trained, strict=True):
        assert torch.equal(parameter, kept)
    return seen


@pytest.mark.faults
@pytest.mark.ci
@pytest.mark.time_bound
def test_a_sync_that_fails_has_changed_nothing() -> None:
    with start_ranks(3, lose_rank_1, preload=ranks.TORCH_DDP) as running:
        for rank in range(3):
            running.wait_for_mark(rank, "before the sync")
        killed_s = running.kill(1)
        results = running.collect(100)
    for rank in (0, 2):
        assert results[rank].ok, results.describe()
        error = results[rank].value
        assert error.code == "PEER_DEAD" and error.record["peer"] == 1
        assert f"ank 1 on {socket.gethostname()}" in error.text
    for rank in (0, 2):
        assert_within(results[rank].value.monotonic_s - killed_s, 20, "from SIGKILL")


def interrupted(rank: int, world_size: int) -> str:
    """Ctrl-C while the entries are applied, in another parameter on each rank."""
    import pycomm
    from pycomm.fewer_syncs import sparse_loco

    model = ddp_models.make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = pycomm.SparseLoCo(model, sync_every=1)
    state = local.state_dict()
    train_step(model, optimizer, rank, 0, "mlp")
    unpack, calls = sparse_loco.unpack, []

    def interrupts(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 4 + 3 * rank:
            raise KeyboardInterrupt
        return unpack(*args)

    sparse_loco.unpack = interrupts
    with pytest.raises(KeyboardInterrupt):
        local.step()
    with pytest.raises(pycomm.errors.CollectiveMismatchError) as caught:
        local.sync()
    local.load_state_dict(state)
    local.sync()
    found = gathered(dict(model.named_parameters()), world_size)
    assert all(torch.equal(each, found[0][name]) for name, each in model.named_parameters())
    return str(caught.value)


def test_a_sync_interrupted_while_it_applies_is_an_error_until_a_state_is_loaded() -> None:
    first, second = run_ranks(2, interrupted, preload=ranks.TORCH_DDP).values()
    assert first == second and "The outer step of rank 0 ended with an error" in first


def at_different_places(rank: int, world_size: int) -> str:
    import pycomm

    model = ddp_models.make("mlp")
    local = pycomm.SparseLoCo(model, sync_every=2)
    if rank == 1:
        local.load_state_dict({**local.state_dict(), "version": 4})
    local.step()
    with pytest.raises(pycomm.errors.CollectiveMismatchError) as caught:
        local.step()
    assert local.state_dict()["error"]["scale"].abs().sum() == 0
    return str(caught.value)


def test_ranks_that_missed_a_sync_are_named_by_all() -> None:
    first, second = run_ranks(2, at_different_places, preload=ranks.TORCH_DDP).values()
    assert first == second
    expected = "rank 0 at step 2 after 0 syncs, rank 1 at step 2 after 4 syncs. Nothing was changed"
    assert expected in first


def options_that_differ(rank: int, world_size: int) -> list[str]:
    import pycomm

    texts = []
    for options in ({"top_k": 16 if rank else 32}, {"error_decay": 0.5 if rank else 1}):
        with pytest.raises(pycomm.errors.ConfigMismatchError) as caught:
            pycomm.SparseLoCo(ddp_models.make("mlp"), sync_every=2, **options)
        texts.append(str(caught.value))
    return texts


def test_options_that_differ_between_ranks_are_an_error_on_all() -> None:
    first, second = run_ranks(2, options_that_differ, preload=ranks.TORCH_DDP).values()
    assert first == second
    assert "option 'top_k' is 32 on rank 0 and 16 on rank 1" in first[0]
    assert "option 'error_decay' is 1.0 on rank 0 and 0.5 on rank 1" in first[1]


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"sync_every": 0}, "sync_every=0 is not a whole number from 1"),
    ({"top_k": 40}, "top_k=40 is not a multiple of 16 from 16 to 1024"),
    ({"top_k": 0}, "top_k=0 is not a multiple of 16"),
    ({"top_k": 2048}, "top_k=2048 is not a multiple of 16 from 16 to 1024"),
    ({"top_k": 0.01}, "top_k=0.01 is not a multiple of 16"),
    ({"error_decay": 1.5}, "error_decay=1.5 is not a number from 0 to 1"),
    ({"error_decay": "0.9"}, "error_decay='0.9' is not a number from 0 to 1"),
    ({"outer_lr": 0}, "outer_lr=0 is not a number more than 0"),
    ({"outer_lr": float("inf")}, "outer_lr=inf is not a number more than 0"),
    ({"outer_lr": float("nan")}, "outer_lr=nan is not a number more than 0"),
    ({"outer_optimizer": torch.optim.SGD}, "SparseLoCo takes no outer_optimizer: its error, which"),
]


def bad_options(rank: int, world_size: int) -> list[str]:
    import pycomm

    texts = []
    for given, _ in BAD_OPTIONS:
        with pytest.raises(ValueError) as caught:
            pycomm.SparseLoCo(ddp_models.make("mlp"), **{"sync_every": 12, **given})
        texts.append(str(caught.value))
    with pytest.raises(ValueError, match=r"parameter 'turn' is torch\.complex64: SparseLoCo sends"):
        pycomm.SparseLoCo(ddp_models.make("complex"), sync_every=2)
    return texts


def test_every_bad_option_is_refused_with_a_sentence() -> None:
    (texts,) = run_ranks(1, bad_options, preload=ranks.TORCH_DDP).values()
    for text, (_, part) in zip(texts, BAD_OPTIONS, strict=True):
        assert part in text


# The bits that leave the card

ROWS, SYNCS = 2000, 3
PROGRAM = f"""
import json, os, subprocess
from pathlib import Path
import torch, torch.distributed as dist
import pycomm

subprocess.run("ip link set dev eth0 gso_max_segs 1".split(), check=True, timeout=10)
dist.init_process_group("pycomm")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4096, {ROWS}, bias=False)
local = pycomm.SparseLoCo(model, sync_every=1)
counters = Path("/sys/class/net/eth0/statistics")
def read():
    seen = {{name: int((counters / name).read_text()) for name in ("tx_bytes", "tx_packets")}}
    tcp = [line for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line]
    names, numbers = (line.split() for line in tcp)
    return seen | {{"sent_again": int(dict(zip(names, numbers))["RetransSegs"])}}
generator = torch.Generator().manual_seed(rank)
dist.barrier()
before = read()
for _ in range({SYNCS}):
    with torch.no_grad():
        model.weight += 1e-3 * torch.randn({ROWS}, 4096, generator=generator)
    local.step()
dist.barrier()
after = read()
seen = {{name: after[name] - before[name] for name in before}}
print(json.dumps(seen | {{"counted": local.stats().sent_nbytes}}))
dist.destroy_process_group()
"""


@pytest.mark.alone
@pytest.mark.namespaces
@pytest.mark.ci
def test_an_entry_takes_at_most_16_bits_on_the_wire(tmp_path: Path) -> None:
    """All that the card sends: headers of Ethernet, IP and TCP, acknowledgements, heartbeats.

    Not the segments that TCP sends again, up to 46 in a run. They count as full ones: the codes
    fill theirs, and nothing else is long.
    """
    alpha = hosts.Host("alpha", "192.168.1.10", "fd00::10")
    beta = hosts.Host("beta", "192.168.1.11", "fd00::11")
    with hosts.wire(alpha, beta) as (first, second):
        commands = []
        for rank, host in enumerate((first, second)):
            env = child_environment() | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": first.address,
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
            }
            commands.append((host, [sys.executable, "-c", PROGRAM], env))
        outcomes = hosts.run_on_both(commands, tmp_path)
    entries = SYNCS * ROWS * 64
    for outcome in outcomes:
        assert outcome.returncode == 0, outcome
        seen = json.loads(outcome.out)
        # Real packets.
        assert seen["tx_bytes"] / seen["tx_packets"] < 1514
        bits = 8 * (seen["tx_bytes"] - 1514 * seen["sent_again"]) / entries
        assert 14.0 < 8 * seen["counted"] / entries < 14.01
        # A segment that was sent again counts as a full one: only raw bytes have a lower bound.
        assert bits <= 16.0 and 8 * seen["tx_bytes"] / entries > 14.0, seen
