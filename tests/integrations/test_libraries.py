"""Lightning, Accelerate and the Hugging Face Trainer on two ranks, against one process.

The ranks are started as torchrun starts them, but for its agent.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import case
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from training import BATCH, WIDTH, assert_close, digest, make_model, parameters_of
from versions import require

from pycomm._group.creation import group_timeout

pytestmark = pytest.mark.needs_native


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """They run in the same ranks, so all of them must be there."""
    for library in ("Lightning", "Accelerate", "HF Trainer"):
        require(library)


EPOCHS = 2
SAMPLES = 32
LR = 0.05
EXACT = 4e-6  # fp32 in another order of adding
PRELOAD = ("torch._dynamo", "lightning.pytorch", "accelerate", "transformers.trainer")


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Always the same inputs and targets."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.targets = torch.randn(SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.targets[index]}


def train_alone() -> nn.Module:
    """What two ranks with half a batch each, cut as DistributedSampler cuts, come to."""
    model, samples = make_model(), Samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(EPOCHS):
        for first in range(0, SAMPLES, BATCH):
            part = slice(first, first + BATCH)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(samples.inputs[part]), samples.targets[part])
            loss.backward()
            optimizer.step()
    return model


def assert_as_alone(values: list[dict[str, torch.Tensor]], tolerance: float = EXACT) -> None:
    assert len({digest(value.values()) for value in values}) == 1, "ranks differ"
    wanted = parameters_of(train_alone())
    assert_close(values[0], wanted, tolerance)


# Lightning


def lightning_module(*, sharded: bool) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.seen_type = ""

        def configure_model(self) -> None:
            if sharded and not isinstance(next(self.model.parameters()), DTensor):
                mesh = self.device_mesh["data_parallel"]
                for layer in self.model:
                    if isinstance(layer, nn.Linear):
                        fully_shard(layer, mesh=mesh)
                fully_shard(self.model, mesh=mesh)

        def on_train_end(self) -> None:
            # Whole, while there is a group: where they are sharded, every rank must ask.
            self.trained = {
                name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
                for name, p in self.model.named_parameters()
            }

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            if not index:
                self.backend = dist.get_backend()
                self.seen_type = f"{type(self.trainer.model).__module__.partition('.')[0]}."
                self.seen_type += type(self.trainer.model).__name__
            out = self.model(batch["inputs"])
            self.out_dtype = str(out.dtype)
            loss = nn.functional.mse_loss(out, batch["labels"])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=LR)

    return Module()


def fit(rank: int, world_size: int, kind: str, precision: str) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    import pycomm.integrations.lightning

    make: dict[str, Callable[[], Any]] = {
        "DDPStrategy": lambda: DDPStrategy(process_group_backend="pycomm"),
        "make_strategy": pycomm.integrations.lightning.make_strategy,
        "make_strategy, fp16 wire": lambda: pycomm.integrations.lightning.make_strategy(
            wire_dtype="fp16"
        ),
        "pycomm": lambda: "pycomm",
        "pycomm_fp16": lambda: "pycomm_fp16",
        "FSDPStrategy": lambda: FSDPStrategy(process_group_backend="pycomm"),
        "ModelParallelStrategy": lambda: ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="pycomm"
        ),
    }
    module = lightning_module(sharded=kind == "ModelParallelStrategy")
    quiet = io.StringIO()
    try:
        with warnings.catch_warnings(record=True) as said, contextlib.redirect_stderr(quiet):
            warnings.simplefilter("always")
            trainer = Trainer(
                accelerator="cpu",
                devices=2,
                strategy=make[kind](),
                precision=precision,
                max_epochs=EPOCHS,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            sampler = DistributedSampler(Samples(), world_size, rank, shuffle=False)
            trainer.fit(module, DataLoader(Samples(), BATCH // 2, sampler=sampler))
    except (ValueError, RuntimeError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "type": module.seen_type,
        "dtype": module.out_dtype,
        "backend": module.backend,
        "loss": float(trainer.callback_metrics["loss"]),
        "warnings": [str(warning.message) for warning in said],
        "parameters": module.trained,
    }


LIGHTNING = [
    # strategy, precision, class of the wrapped model, how far from one process in fp32
    ("DDPStrategy", "32-true", "torch.DistributedDataParallel", EXACT),
    ("make_strategy", "32-true", "pycomm.DistributedDataParallel", EXACT),
    ("make_strategy, fp16 wire", "32-true", "pycomm.DistributedDataParallel", 2e-4),
    ("pycomm", "32-true", "pycomm.DistributedDataParallel", EXACT),
    ("pycomm_fp16", "32-true", "pycomm.DistributedDataParallel", 2e-4),
    ("DDPStrategy", "bf16-mixed", "torch.DistributedDataParallel", 0.02),
    ("make_strategy", "bf16-mixed", "pycomm.DistributedDataParallel", 0.02),
    ("DDPStrategy", "16-mixed", "torch.DistributedDataParallel", 0.02),
]


@pytest.mark.parametrize(
    ("kind", "precision", "wrapped", "tolerance"),
    [
        pytest.param(
            *row,
            marks=case(fit, row[0], row[1], launcher="torchrun"),
            id=f"{row[0]}, {row[1]}",
        )
        for row in LIGHTNING
    ],
)
@pytest.mark.integration("Lightning", "Trainer on CPU, as one process")
def test_lightning(
    kind: str, precision: str, wrapped: str, tolerance: float, values: list[Any], note: Any
) -> None:
    for value in values:
        assert "error" not in value, value
        assert value["backend"] == "pycomm" and value["type"] == wrapped
        assert value["dtype"] == ("torch.float32" if precision == "32-true" else "torch.bfloat16")
    assert values[0]["loss"] == values[1]["loss"]  # logged with sync_dist
    if precision == "16-mixed":
        assert any("bf16-mixed" in text for text in values[0]["warnings"])
        note("Lightning runs bf16-mixed instead: it has no fp16 AMP on CPU")
    assert_as_alone([value["parameters"] for value in values], tolerance)


@case(fit, "ModelParallelStrategy", "32-true", launcher="torchrun")
@pytest.mark.integration("Lightning", "ModelParallelStrategy with FSDP2 on CPU, as one process")
def test_lightning_model_parallel(values: list[Any]) -> None:
    for value in values:
        assert "error" not in value, value
        assert value["backend"] == "pycomm"
    assert_as_alone([value["parameters"] for value in values])


@case(fit, "FSDPStrategy", "32-true", launcher="torchrun")
@pytest.mark.integration("Lightning", "FSDPStrategy on CPU")
def test_lightning_fsdp_on_cpu(values: list[Any]) -> None:
    """Lightning wants a GPU for it; should that change, the numbers must be right."""
    if all("error" in value for value in values):
        text = values[0]["error"]
        assert "requires a GPU accelerator" in text, text
        pytest.xfail("Lightning says: " + text.partition(": ")[2].partition(". ")[0])
    assert_as_alone([value["parameters"] for value in values])


def fit_in_another_group(rank: int, world_size: int) -> str:
    from lightning.pytorch import Trainer

    from pycomm.integrations.lightning import make_strategy

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(ValueError) as refused:
        trainer = Trainer(accelerator="cpu", devices=2, strategy=make_strategy(), **quiet)
        trainer.fit(lightning_module(sharded=False), DataLoader(Samples(), BATCH // 2))
    return str(refused.value)


@case(fit_in_another_group, launcher="torchrun")
@pytest.mark.integration("Lightning", "make_strategy in a group of another backend")
def test_lightning_in_a_group_of_another_backend(values: list[str], note: Any) -> None:
    for text in values:
        assert "not pycomm's. Try: make no group beforehand, or one over 'pycomm'" in text
    note("an error that says so")


def interfaces_for_gloo(rank: int, world_size: int) -> list[str | None]:
    """What the variable is as prepare_data fails, and behind the fit."""
    from lightning.pytorch import LightningDataModule, Trainer

    from pycomm._native.loader import native
    from pycomm.integrations.lightning import make_strategy

    seen = []

    class Data(LightningDataModule):
        def prepare_data(self) -> None:
            """For it Lightning opens a group over gloo, once it has read the next."""

        @property
        def prepare_data_per_node(self) -> bool:
            seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
            raise ArithmeticError

        @prepare_data_per_node.setter
        def prepare_data_per_node(self, value: bool) -> None:
            """Lightning's __init__ does."""

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    interfaces = [{"address": "10.0.0.7", "name": "eth7"}]
    with (
        mock.patch.object(native, "group_address", lambda backend: "10.0.0.7"),
        mock.patch.object(native, "list_interfaces", lambda: interfaces),
        contextlib.redirect_stderr(io.StringIO()),
        pytest.raises(ArithmeticError),
    ):
        trainer = Trainer(accelerator="cpu", devices=2, strategy=make_strategy(), **quiet)
        trainer.fit(lightning_module(sharded=False), datamodule=Data())
    return [*seen, os.environ.get("GLOO_SOCKET_IFNAME")]


@case(interfaces_for_gloo, launcher="torchrun")
def test_lightning_leaves_no_interface_for_gloo_behind_an_error(
    values: list[list[str | None]],
) -> None:
    """pycomm takes the variable, too, for groups that come later."""
    assert values == [["eth7", None]] * 2


# Accelerate


def accelerate_loop(accelerator: Any) -> Any:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(Samples(), BATCH // 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch["inputs"])
            accelerator.backward(nn.functional.mse_loss(out, batch["labels"]))
            optimizer.step()
    inner = accelerator.unwrap_model(model)
    kind = f"{type(model).__module__.partition('.')[0]}.{type(model).__name__}"
    return kind, dist.get_backend(), parameters_of(inner)


def train_with_accelerate(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    from pycomm.integrations.accelerate import make_accelerator

    return accelerate_loop(make_accelerator(**options))


ACCELERATE = [
    ("torchrun", {}, "pycomm.DistributedDataParallel", EXACT),
    ("torchrun", {"wrapper": "torch"}, "torch.DistributedDataParallel", EXACT),
    ("torchrun", {"wire_dtype": "fp16"}, "pycomm.DistributedDataParallel", 2e-4),
    ("torchrun", {"mixed_precision": "bf16"}, "pycomm.DistributedDataParallel", 0.02),
    ("mpirun", {}, "pycomm.DistributedDataParallel", EXACT),
]


@pytest.mark.parametrize(
    ("launcher", "options", "wrapped", "tolerance"),
    [
        pytest.param(
            *row,
            marks=case(train_with_accelerate, row[1], launcher=row[0]),
            id=", ".join([row[0], *map(str, row[1].values())]),
        )
        for row in ACCELERATE
    ],
)
@pytest.mark.integration("Accelerate", "make_accelerator on CPU, as one process")
def test_accelerate(
    launcher: str, options: Any, wrapped: str, tolerance: float, values: list[Any]
) -> None:
    for kind, backend, _ in values:
        assert kind == wrapped and backend == "pycomm"
    assert_as_alone([parameters for _, _, parameters in values], tolerance)


def accelerate_by_itself(rank: int, world_size: int, how: str) -> Any:
    from accelerate import Accelerator, InitProcessGroupKwargs

    handlers = [InitProcessGroupKwargs(backend="pycomm")]
    try:
        accelerator = Accelerator(cpu=how == "cpu=True", kwargs_handlers=handlers)
    except ValueError as error:
        return str(error)
    kind, _, parameters = accelerate_loop(accelerator)
    refused = ""
    try:
        from pycomm.integrations.accelerate import make_accelerator

        make_accelerator()
    except (RuntimeError, ValueError) as error:
        refused = str(error)
    return kind, digest(parameters.values()), refused


@case(accelerate_by_itself, "cpu=True", launcher="torchrun")
@pytest.mark.integration("Accelerate", "Accelerator(cpu=True, backend='pycomm') without the helper")
def test_accelerate_by_itself_refuses(values: list[str], note: Any) -> None:
    for text in values:
        assert "Your assigned backend pycomm is not available" in text
    note("refused by Accelerate, as documented: use the helper")


@case(accelerate_by_itself, "no cpu", launcher="torchrun")
@pytest.mark.integration("Accelerate", "Accelerator(backend='pycomm') on CPU without the helper")
def test_accelerate_by_itself_trains_apart(values: list[Any], note: Any) -> None:
    """Why there is a helper; and it says so where such an Accelerator was made before."""
    assert [kind for kind, _, _ in values] == ["torch.Sequential"] * 2  # nothing wraps
    assert values[0][1] != values[1][1]
    for _, _, refused in values:
        assert "models would not be wrapped" in refused
    note("trains apart, silently, as documented: use the helper, which then raises")


def timeouts_of_accelerate(rank: int, world_size: int) -> Any:
    from accelerate import InitProcessGroupKwargs

    from pycomm.integrations.accelerate import make_accelerator

    timeout = timedelta(seconds=77)
    with pytest.raises(ValueError, match="Try: make_accelerator") as refused:
        make_accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])
    make_accelerator(group_options={"timeout": timeout})
    return str(refused.value), group_timeout(dist.group.WORLD)


@case(timeouts_of_accelerate, launcher="torchrun")
@pytest.mark.integration("Accelerate", "a timeout: group_options, not InitProcessGroupKwargs")
def test_accelerate_with_a_timeout(values: list[Any]) -> None:
    for text, timeout in values:
        assert "an InitProcessGroupKwargs" in text and timeout == timedelta(seconds=77)


# Hugging Face Trainer


class WithLoss(nn.Module):
    """The Trainer wants the loss from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.model(inputs)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


TRAINER_OPTIONS: dict[str, Any] = {
    "num_train_epochs": EPOCHS,
    "per_device_train_batch_size": BATCH // 2,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "optim": "sgd",
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


def train_with_trainer(rank: int, world_size: int, how: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return trained_in(folder, how)


def trained_in(folder: str, how: str) -> Any:
    from transformers import Trainer, TrainingArguments

    from pycomm.integrations.transformers import make_parser, make_training_arguments

    options: dict[str, Any] = {"output_dir": folder, **TRAINER_OPTIONS}
    if how == "command line":
        words = ["--ddp_backend", "pycomm", "--ddp_timeout", "77", "--output_dir", folder]
        parsed = vars(make_parser(TrainingArguments).parse_args(words))
        options = parsed | options
    if how == "bf16":
        options["bf16"] = True
    arguments = make_training_arguments(**options)

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(Samples())

    with contextlib.redirect_stdout(io.StringIO()):
        trainer = InOrder(model=WithLoss(), args=arguments, train_dataset=Samples())
        trainer.train()
    kind = type(trainer.model_wrapped)
    named = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    timeout = group_timeout(dist.group.WORLD)
    return named, dist.get_backend(), timeout, parameters_of(trainer.model.model)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(name, marks=case(train_with_trainer, name, launcher="torchrun"))
        for name in ("Python", "command line", "bf16")
    ],
)
@pytest.mark.integration("HF Trainer", "make_training_arguments on CPU, as one process")
def test_trainer(how: str, values: list[Any]) -> None:
    for kind, backend, timeout, _ in values:
        assert kind == "torch.DistributedDataParallel" and backend == "pycomm"
        assert timeout == timedelta(seconds=77 if how == "command line" else 1800)
    assert_as_alone([p for _, _, _, p in values], 0.02 if how == "bf16" else EXACT)


def ask_the_parser(rank: int, world_size: int) -> Any:
    from transformers import HfArgumentParser, TrainingArguments

    words = ["--output_dir", "out", "--ddp_backend", "pycomm"]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            HfArgumentParser(TrainingArguments).parse_args(words)
    except SystemExit:
        return errors.getvalue()
    return argparse.Namespace()


@case(ask_the_parser, launcher="torchrun")
@pytest.mark.integration("HF Trainer", "its own command line")
def test_the_trainers_own_parser(values: list[str], note: Any) -> None:
    for text in values:
        assert "invalid choice: 'pycomm'" in text
    note("refuses the name, as documented: `make_parser` takes it")
