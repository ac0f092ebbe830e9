"""A thread reads a wrapper, as for a checkpoint or for metrics, while another one trains."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_rig import wrap
from ranks import TORCH_DDP, run_ranks
from torch import nn

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(300)]

WIDTH = 1500
ROUNDS = 30


def made(**options: Any) -> Any:
    torch.manual_seed(1)
    return wrap(nn.Linear(WIDTH, WIDTH, bias=False), wire_dtype="int8", **options)


@contextlib.contextmanager
def a_thread_that_reads(model: Any) -> Iterator[None]:
    """It takes the state again and again: most of the time is a copy of the residuals."""
    ends, begun = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def read() -> None:
        while not ends.is_set():
            try:
                model.communication_state_dict()
            except Exception as error:
                errors.append(error)
                break
            finally:
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait(60)
    try:
        yield
    finally:
        ends.set()
        reader.join()
    assert not errors, errors


def a_pass_that_accumulates_is_weighed(rank: int, world_size: int) -> None:
    """Its forward pass is noted, also if a reader has the turn then: its samples count."""
    model = made(weight="samples")
    batch = torch.ones(2, WIDTH)
    with a_thread_that_reads(model):
        for samples in range(1, ROUNDS):
            model.zero_grad()
            with model.no_sync():
                loss = model(batch).sum()
                model.samples = samples
                loss.backward()
            weight, _, passes, *_ = model.reducer.weighed()
            assert (weight, passes) == (samples, 1)


def callbacks_train_and_save(rank: int, world_size: int) -> None:
    """A callback of a future waits for a reader; it is refused only while a pass is under way."""
    model = made()
    batch = torch.ones(2, WIDTH)
    model(batch).sum().backward()
    states = []

    def train(_: Any) -> int:
        model.zero_grad()
        model(batch).sum().backward()
        states.append(model.communication_state_dict())
        return 1

    with a_thread_that_reads(model):
        for _ in range(ROUNDS):
            work = dist.all_reduce(torch.ones(1), async_op=True)
            assert work is not None
            work.get_future().then(train).wait()
    assert len(states) == ROUNDS
    assert all("residuals" in state for state in states)


def a_table_is_read_while_it_is_written(rank: int, world_size: int) -> None:
    """The wrapper writes an error into its logger's table while another thread copies the table."""
    logger = wrap(nn.Linear(4, 4)).logger
    texts = [letter * 5000 for letter in "ab"]
    end = time.monotonic() + 2.0

    def write() -> None:
        while time.monotonic() < end:
            for text in texts:
                logger.set_error_and_log(text)
                logger._set_comm_hook_name(text * 2)

    writer = threading.Thread(target=write)
    writer.start()
    while time.monotonic() < end:
        table = logger._get_ddp_logging_data().strs_map
        for key, times in (("error", 1), ("comm_hook", 2)):
            assert table.get(key, texts[0] * times) in [text * times for text in texts]
    writer.join()


@pytest.mark.parametrize(
    "program",
    [
        a_pass_that_accumulates_is_weighed,
        callbacks_train_and_save,
        a_table_is_read_while_it_is_written,
    ],
)
def test_a_thread_reads_while_another_one_trains(program: Any) -> None:
    run_ranks(1, program, timeout_s=100, preload=TORCH_DDP)
