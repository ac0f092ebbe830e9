"""Train a small convolutional net on handwritten digits over two ranks.

    torchrun --nproc-per-node=2 examples/train_digits.py

The 1,797 digits (8 x 8 pixels) ship inside scikit-learn, so nothing is downloaded. To compare with
what torch has built in, add `--backend gloo`; to send half the bytes, add `--wire-dtype fp16`;
a quarter, `--wire-dtype int8`.
"""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import (
    Progress,
    StepClock,
    add_flags,
    close_group,
    compare_parameters,
    torch_ddp,
    who_is_where,
)
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="samples a rank and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--target", type=float, default=0.97, help="fail below this test accuracy")
    add_flags(parser)
    return parser.parse_args()


def load(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Split the digits into training and test sets, the same way on every rank."""
    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32) / 16.0).unsqueeze(1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def test_accuracy(net: nn.Module, test: TensorDataset) -> float:
    """Let every rank classify its share of the test set, then add the counts up."""
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in test.tensors)
    with torch.no_grad():
        correct = (net(images).argmax(1) == labels).sum()
    counts = torch.stack([correct, torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train_and_test(args: argparse.Namespace) -> bool:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = who_is_where(args.local_rank)
    if rank == 0:
        print(f"{args.backend}, wire dtype {args.wire_dtype}: {places}", flush=True)

    # Every rank starts from the same weights and sees its own part of each epoch.
    torch.manual_seed(args.seed)
    train, test = load(args.seed)
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    net = make_net()
    model: DistributedDataParallel

    if args.backend == "pycomm":
        import pycomm

        wire_dtype = None if args.wire_dtype == "none" else args.wire_dtype
        model = pycomm.DistributedDataParallel(net, wire_dtype=wire_dtype)
    else:
        model = torch_ddp(net, args.wire_dtype)

    steps = args.epochs * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    clock, progress = StepClock(), Progress(steps, enabled=rank == 0)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        seen, correct, loss_sum = 0, 0, 0.0
        for images, labels in loader:
            if clock.probing():  # how long is the same work without the network?
                with clock.local_pass(), model.no_sync():
                    F.cross_entropy(model(images), labels).backward()
                optimizer.zero_grad()

            with clock.step():
                with clock.synchronised_pass():
                    logits = model(images)
                    loss = F.cross_entropy(logits, labels)
                    loss.backward()  # gradients are averaged over the ranks while it runs
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

            seen += len(labels)
            correct += int((logits.argmax(1) == labels).sum())
            loss_sum += loss.item() * len(labels)
            mean_loss, train_accuracy = loss_sum / seen, correct / seen
            progress.advance(
                f"epoch {epoch + 1} loss {mean_loss:.4f} accuracy {train_accuracy:.1%}"
            )
    progress.close()

    accuracy = test_accuracy(net, test)
    equal, comparison = compare_parameters(net)
    if rank == 0:
        print(f"rank 0, last epoch: loss {mean_loss:.4f}, accuracy {train_accuracy:.1%}")
        print(f"{world_size} ranks, {steps} steps: {clock.summary()}")
        verdict = "reached" if accuracy >= args.target else "MISSED"
        print(f"test accuracy {accuracy:.1%} (target {args.target:.1%} {verdict})")
        print(comparison, flush=True)
    return equal and accuracy >= args.target


def main() -> int:
    if "RANK" not in os.environ:  # started by mpirun or srun: let torch find what it looks for
        from pycomm.integrations.launch import env_from_launcher

        env_from_launcher()
    args = parse_args()
    # The one line that chooses the network. Rank, world size and address come from torchrun.
    dist.init_process_group(args.backend)
    succeeded = train_and_test(args)
    close_group()
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
