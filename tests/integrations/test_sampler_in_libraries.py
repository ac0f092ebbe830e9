"""Lightning and Accelerate leave the batches of BalancedSampler as they are, by one line each.

By default both cut batch samplers among the ranks. The recipes of docs/integrations.md run as they
are written; in the other tests the model's part is a stand-in that exchanges its records over the
default group.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import documents
import pytest
import torch
import torch.distributed as dist
from cases import case
from step_logs import Job
from torch.utils.data import DataLoader, Dataset
from training import WIDTH, make_model
from versions import require

from pycomm.balance.balanced_sampler import BalancedSampler
from pycomm.balance.deal import epoch_order
from pycomm.balance.step_log import StepReader, StepRecord

pytestmark = pytest.mark.needs_native

EPOCHS = 3
LENGTH, GLOBAL_BATCH = 250, 12
STEPS = LENGTH // GLOBAL_BATCH
WORKERS, PREFETCH = 1, 2
LOOKAHEAD = WORKERS * PREFETCH + 2 + 1  # 1: both libraries look whether there is one more batch
SPEEDS = (3.0, 1.0)
PRELOAD = ("torch._dynamo", "lightning.pytorch", "accelerate")


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    for library in ("Lightning", "Accelerate"):
        require(library)


class Samples(Dataset[tuple[int, torch.Tensor]]):
    def __init__(self, length: int = LENGTH) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((WIDTH,), index / self._length)


class GroupLog:
    """A ``StepLog`` and its model, over the default group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.pending_passes = 0
        self._records: list[StepRecord] = []
        self._seconds = math.nan

    @property
    def step_log(self) -> GroupLog:
        return self

    @property
    def steps(self) -> int:
        return len(self._records)

    def follow(self, reader: StepReader) -> None:
        """It keeps all."""

    def allow(self, largest: int) -> None:
        """Nobody joins, who would have to say it."""

    def received(self) -> None:
        """The same."""

    def records(self, since: int) -> Sequence[StepRecord]:
        return self._records[since:]

    def gather(self, numbers: Sequence[Any]) -> list[list[Any]]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, list(numbers))
        return gathered

    def train(self, samples: int) -> None:
        exchanged = self.gather([samples, self._seconds])
        self._records.append(
            StepRecord(
                1,
                [each for each, _ in exchanged],
                [each for _, each in exchanged],
                range(len(exchanged)),
                [0] * len(exchanged),
            )
        )
        self._seconds = 1.0 + SPEEDS[self.rank] * samples


def loader_of(log: GroupLog) -> DataLoader[tuple[int, torch.Tensor]]:
    sampler = BalancedSampler(
        Samples(), global_batch=GLOBAL_BATCH, model=log, lookahead=LOOKAHEAD, seed=5
    )
    return DataLoader(
        Samples(), batch_sampler=sampler, num_workers=WORKERS, prefetch_factor=PREFETCH
    )


def assert_unharmed(values: Sequence[Sequence[Sequence[Sequence[int]]]]) -> None:
    """What the ranks saw by epoch and step is what the sampler dealt."""
    orders = set()
    for of_ranks in zip(*values, strict=True):
        assert [len(batches) for batches in of_ranks] == [STEPS] * 2
        steps = list(zip(*of_ranks, strict=True))
        assert all(sum(len(batch) for batch in step) == GLOBAL_BATCH for step in steps)
        dealt = [index for step in steps for batch in step for index in batch]
        assert len(set(dealt)) == len(dealt) == STEPS * GLOBAL_BATCH
        orders.add(tuple(dealt))
    assert len(orders) == EPOCHS  # set_epoch arrives
    last = [len(batches[-1][-1]) for batches in values]
    assert last[0] < last[1] and sum(last) == GLOBAL_BATCH


# Lightning


def fit(rank: int, world_size: int, use_distributed_sampler: bool) -> Any:
    from lightning.pytorch import LightningModule, Trainer

    import pycomm
    from pycomm.integrations.lightning import make_strategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.seen: list[list[list[int]]] = []

        def train_dataloader(self) -> Any:
            # So model=self.trainer.model is the wrapped model here.
            assert isinstance(self.trainer.model, pycomm.DistributedDataParallel)
            self.log_of_steps = GroupLog()
            return loader_of(self.log_of_steps)

        def on_train_epoch_start(self) -> None:
            self.seen.append([])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen[-1].append(batch[0].tolist())
            out: torch.Tensor = self.model(batch[1]).mean()
            return out

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.log_of_steps.train(len(batch[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Module()
    with contextlib.redirect_stderr(io.StringIO()):
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=make_strategy(),
            max_epochs=EPOCHS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=use_distributed_sampler,
        )
        try:
            trainer.fit(module)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return module.seen


@case(fit, False, launcher="torchrun")
def test_lightning_without_a_sampler_of_its_own(values: list[Any]) -> None:
    assert_unharmed(values)


@case(fit, True, launcher="torchrun")
def test_lightning_refuses_to_cut_it(values: list[Any]) -> None:
    """The default of Trainer: an error that names the option, and no wrong batches."""
    for text in values:
        assert isinstance(text, str) and "use_distributed_sampler=False" in text, text


@pytest.mark.parametrize("says", [False, True])
def test_lightning_in_a_process_that_has_joined(says: bool) -> None:
    """Lightning counts epochs from 0, and the members are in epoch 2: docs/elastic.md has the line.

    The members are a stand-in, too.
    """
    from lightning.pytorch import LightningModule, Trainer

    job = Job(1)
    options = {"global_batch": GLOBAL_BATCH, "lookahead": LOOKAHEAD}
    theirs = BalancedSampler(Samples(), model=job.logs[0], **options)
    theirs.set_epoch(2)
    next(iter(theirs))
    log = job.join(json.loads(json.dumps(theirs.state_for_others())))

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.epochs: list[int] = []

        def train_dataloader(self) -> Any:
            self.sampler = BalancedSampler(Samples(), model=log, **options)
            if says:
                now = self.trainer.fit_loop.epoch_progress.current
                now.processed = now.completed = self.sampler.stats().epoch
            return DataLoader(Samples(), batch_sampler=self.sampler)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.epochs.append(self.current_epoch)
            out: torch.Tensor = self.model(batch[1]).mean()
            return out

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        limit_train_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    if says:
        trainer.fit(module)
        assert module.epochs == [2] and module.sampler.stats().epoch == 2
    else:
        with pytest.raises(RuntimeError, match=r"set_epoch\(0\) .* are in epoch 2"):
            trainer.fit(module)


def recipe(library: str) -> str:
    """The code block of docs/integrations.md."""
    text = documents.read("docs/integrations.md").partition("\n## Machines that are not alike\n")[2]
    (found,) = (
        block
        for block in documents.blocks(text.partition("\n## ")[0], "python")
        if library in block and "BalancedSampler(" in block
    )
    return found


WHOLE = 256  # of a batch, in the recipes
NOT_RESUMED = "in mid epoch, not resumed"


def with_workers(workers: int) -> Any:
    """What a recipe makes its loader with."""
    if not workers:
        return DataLoader
    return functools.partial(DataLoader, num_workers=workers, multiprocessing_context="fork")


def assert_dealt_alike(values: Sequence[Sequence[Sequence[Sequence[int]]]]) -> None:
    """Of two ranks, by epoch: all batches of the recipe, however fast this machine is."""
    for of_ranks in zip(*values, strict=True):
        steps = list(zip(*of_ranks, strict=True))
        dealt = [index for step in steps for batch in step for index in batch]
        assert len(set(dealt)) == len(dealt) == WHOLE * len(steps) and len(steps) == 3


def assert_epoch(
    steps: Sequence[Sequence[Sequence[int]]], epoch: int, length: int, begin: int = 0
) -> None:
    """The batches of two ranks are those of this epoch from ``begin`` on, each once."""
    order = epoch_order(length, seed=0, epoch=epoch, shuffle=True).tolist()
    whole = sum(map(len, steps[0]))
    assert len(steps) == length // whole - begin
    for at, batches in zip(range(begin * whole, length, whole), steps, strict=False):
        assert [index for batch in batches for index in batch] == order[at : at + whole]


def fit_by_recipe(rank: int, world_size: int, saved: str = "", workers: int = 0) -> Any:
    """It is resumed after its first two epochs, if ``saved`` then; returns what the last fit saw.

    Args:
        saved: "": never. "behind fit": by the caller. "in a batch": in each epoch's last one, by
            ModelCheckpoint; "in a batch, thrice": also after two more and one more, and max_steps
            ends it. "in validation": by ModelCheckpoint, as it does by default. "in mid epoch":
            behind the first batch of the second epoch. "in mid epoch, not resumed": then that
            checkpoint is validated only, with the Trainer and module of the last fit.
        workers: They pull batches as soon as Lightning calls ``iter()``.
    """
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from pycomm.integrations.lightning import make_strategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.dataset = Samples(3 * WHOLE + 5)
            self.seen: dict[int, list[list[int]]] = {}

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen.setdefault(self.current_epoch, []).append(batch[0].tolist())
            out: torch.Tensor = self.model(batch[1]).mean()
            return out

        def val_dataloader(self) -> Any:
            return DataLoader(Samples(2)) if saved in ("in validation", NOT_RESUMED) else []

        def validation_step(self, batch: Any, index: int) -> None:
            """Only its end counts."""

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    folder = os.environ["CASE_FOLDER"]

    def fit_to(epochs: int, path: str | None, to: str) -> Module:
        callbacks = {
            "in a batch": [ModelCheckpoint(to, "last", every_n_train_steps=3)],
            "in mid epoch": [ModelCheckpoint(to, "last", every_n_train_steps=4)],
            "in validation": [ModelCheckpoint(to, "last")],
        }.get(saved.partition(",")[0], [])

        def trainer(**options: Any) -> Trainer:
            assert (options["devices"], options["num_nodes"]) == (1, 2)
            return Trainer(
                **options | {"devices": 2, "num_nodes": 1},
                **({"max_steps": 3 * epochs} if "thrice" in saved else {"max_epochs": epochs}),
                logger=False,
                callbacks=list(callbacks),
                enable_checkpointing=bool(callbacks),
                enable_progress_bar=False,
                enable_model_summary=False,
            )

        names: dict[str, Any] = {
            "DataLoader": with_workers(workers),
            "LightningModule": Module,
            "Trainer": trainer,
            "make_strategy": make_strategy,
        }
        exec(recipe("LightningModule"), names)
        module: Module = names["Module"]()
        if path is not None and saved == NOT_RESUMED:
            names["trainer"].validate(module, ckpt_path=path, verbose=False, weights_only=False)
            names["trainer"].save_checkpoint(f"{to}/no-loader.ckpt")
            names["Module"].load_from_checkpoint(f"{to}/no-loader.ckpt", weights_only=False)
            path = None
        names["trainer"].fit(module, ckpt_path=path, weights_only=False)
        if saved == "behind fit":
            names["trainer"].save_checkpoint(f"{to}/last.ckpt")
        return module

    path = None
    with contextlib.redirect_stderr(io.StringIO()):
        for epochs in {"": [EPOCHS], "in a batch, thrice": [2, 4, 5, 6]}.get(saved, [2, EPOCHS]):
            module = fit_to(epochs, path, f"{folder}/{epochs}")
            path = f"{folder}/{epochs}/last.ckpt"
    return list(module.seen.values())


@case(fit_by_recipe, launcher="torchrun")
def test_lightning_by_the_recipe(values: list[Any]) -> None:
    assert len(values[0]) == EPOCHS
    assert_dealt_alike(values)


@pytest.mark.parametrize(
    ("saved", "workers"),
    [
        pytest.param(*how, marks=case(fit_by_recipe, *how, launcher="torchrun"))
        for how in (
            ("behind fit", 1),
            ("in a batch", 0),
            ("in a batch", 1),
            ("in a batch, thrice", 0),
            ("in a batch, thrice", 1),
            ("in validation", 0),
            ("in validation", 1),
        )
    ],
)
def test_lightning_resumed_by_the_recipe(saved: str, workers: int, values: list[Any]) -> None:
    ((mine,), (theirs,)) = values
    epoch = 5 if "thrice" in saved else 2
    assert_epoch(list(zip(mine, theirs, strict=True)), epoch, 3 * WHOLE + 5)


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(
            workers, marks=case(fit_by_recipe, "in mid epoch", workers, launcher="torchrun")
        )
        for workers in (0, 1)
    ],
)
def test_lightning_resumed_in_mid_epoch(workers: int, values: list[Any]) -> None:
    """The rest of the epoch, each batch once, and the next one."""
    rest, whole = ([*zip(*of_ranks, strict=True)] for of_ranks in zip(*values, strict=True))
    assert_epoch(rest, 1, 3 * WHOLE + 5, begin=1)
    assert_epoch(whole, 2, 3 * WHOLE + 5)


@case(fit_by_recipe, NOT_RESUMED, launcher="torchrun")
def test_lightning_that_loads_only_weights_begins_anew(values: list[Any]) -> None:
    epochs = [[*zip(*of_ranks, strict=True)] for of_ranks in zip(*values, strict=True)]
    assert len(epochs) == EPOCHS
    for epoch, steps in enumerate(epochs):
        assert_epoch(steps, epoch, 3 * WHOLE + 5)


# Accelerate


def accelerate_by_recipe(rank: int, world_size: int, saved_behind: int | None) -> Any:
    """It is saved after so many batches of the second epoch, and resumed with new objects; returns
    what it saw after that."""

    def named() -> dict[str, Any]:
        model = make_model()
        names: dict[str, Any] = {
            "DataLoader": with_workers(1),
            "dataset": Samples(3 * WHOLE + 5),
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        }
        exec(recipe("accelerate"), names)
        return names

    def trained(names: dict[str, Any], most: int | None = None) -> list[list[int]]:
        seen = []
        for indices, inputs in itertools.islice(names["loader"], most):
            seen.append(indices.tolist())
            names["optimizer"].zero_grad()
            names["accelerator"].backward(names["model"](inputs).mean())
            names["optimizer"].step()
        return seen

    names = named()
    if saved_behind is None:
        return [trained(names) for _ in range(EPOCHS)]
    trained(names)
    trained(names, saved_behind)
    folder = os.environ["CASE_FOLDER"]
    names["accelerator"].save_state(folder)
    names["accelerator"].wait_for_everyone()
    names["accelerator"].free_memory()
    names = named()
    names["accelerator"].load_state(folder)
    begin = names["sampler"].stats().next_epoch
    names["loader"].set_epoch(begin)
    return [trained(names) for _ in range(begin, EPOCHS)]


@case(accelerate_by_recipe, None, launcher="torchrun")
def test_accelerate_by_the_recipe(values: list[Any]) -> None:
    assert len(values[0]) == EPOCHS
    assert_dealt_alike(values)


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(behind, marks=case(accelerate_by_recipe, behind, launcher="torchrun"))
        for behind in (1, 3)
    ],
)
def test_accelerate_resumed_by_the_recipe(behind: int, values: list[Any]) -> None:
    """In the middle of an epoch, and at its end."""
    epochs = [[*zip(*of_ranks, strict=True)] for of_ranks in zip(*values, strict=True)]
    if behind == 1:
        assert_epoch(epochs.pop(0), 1, 3 * WHOLE + 5, begin=1)
    (last,) = epochs
    assert_epoch(last, 2, 3 * WHOLE + 5)


def accelerate_loop(rank: int, world_size: int, how: str) -> Any:
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import DataLoaderConfiguration

    from pycomm.integrations.accelerate import make_accelerator

    even = DataLoaderConfiguration(even_batches=how != "prepare, even_batches=False")
    accelerator = make_accelerator(dataloader_config=even)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    log = GroupLog()
    loader = loader_of(log)
    try:
        if how == "prepare_data_loader":
            loader = prepare_data_loader(
                loader, accelerator.device, num_processes=1, process_index=0, put_on_device=True
            )
        else:
            loader = accelerator.prepare(loader)
        epochs = []
        for _ in range(EPOCHS):
            seen = []
            for indices, inputs in loader:
                seen.append(indices.tolist())
                optimizer.zero_grad()
                accelerator.backward(model(inputs).mean())
                optimizer.step()
                log.train(len(indices))
            epochs.append(seen)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return epochs


@case(accelerate_loop, "prepare_data_loader", launcher="torchrun")
def test_accelerate_with_a_loader_of_one_process(values: list[Any]) -> None:
    assert_unharmed(values)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=case(accelerate_loop, how, launcher="torchrun"))
        for how in ("prepare", "prepare, even_batches=False")
    ],
)
def test_accelerate_that_cuts_it_gets_an_error(how: str, values: list[Any]) -> None:
    """Every second batch for each rank would be wrong shares of wrong steps."""
    for text in values:
        assert isinstance(text, str) and "batches ahead of training, too far for" in text, text
        assert "Accelerate's prepare() cuts them among the ranks" in text
