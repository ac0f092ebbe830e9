"""Train a small byte-level transformer on Python's own standard library over two ranks.

    torchrun --nproc-per-node=2 examples/train_lm.py

The text is the source files in this interpreter's library folder, so nothing is downloaded. A token
is a byte.
`--accumulate 4` adds up four batches locally before the ranks synchronise once.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from pathlib import Path

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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CONTEXT = 64  # bytes the model looks back
WIDTH = 128
HEADS = 4
LAYERS = 3
TEXT_NBYTES = 4 << 20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level transformer.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1, help="batches a rank adds up a step")
    parser.add_argument("--batch-size", type=int, default=16, help="texts a rank and batch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--target-drop",
        type=float,
        default=1.0,
        help="fail if the loss (nats a byte) falls by less",
    )
    add_flags(parser)
    args = parser.parse_args()
    if args.steps < 1 or args.accumulate < 1 or args.batch_size < 1:
        parser.error("--steps, --accumulate and --batch-size must be at least 1")
    return args


def read_text() -> Tensor:
    """Read the first 4 MiB of the standard library's own modules, in the order of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        if len(text) >= TEXT_NBYTES:
            break
        text += path.read_bytes()
    if len(text) <= CONTEXT:
        raise SystemExit(f"no Python sources in {library}: this Python came without them")
    return torch.frombuffer(text[:TEXT_NBYTES], dtype=torch.uint8)


class Block(nn.Module):
    """One pre-norm transformer layer: look back, then think."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_mlp(x))


class ByteTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(args: argparse.Namespace) -> bool:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = who_is_where(args.local_rank)
    text = read_text()
    if rank == 0:
        print(f"{args.backend}, wire dtype {args.wire_dtype}: {places}")
        print(f"{len(text):,} bytes of text from {sysconfig.get_paths()['stdlib']}", flush=True)

    # The same weights everywhere; but each rank draws its own windows of the text.
    torch.manual_seed(args.seed)
    net = ByteTransformer()
    draw = torch.Generator().manual_seed(args.seed * world_size + rank + 1)
    window = torch.arange(CONTEXT + 1)

    def loss_of_new_batch() -> Tensor:
        starts = torch.randint(len(text) - CONTEXT, (args.batch_size, 1), generator=draw)
        tokens = text[starts + window].long()
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / args.accumulate

    model: DistributedDataParallel
    if args.backend == "pycomm":
        import pycomm

        wire_dtype = None if args.wire_dtype == "none" else args.wire_dtype
        model = pycomm.DistributedDataParallel(net, wire_dtype=wire_dtype)
    else:
        model = torch_ddp(net, args.wire_dtype)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    clock, progress = StepClock(), Progress(args.steps, enabled=rank == 0)
    losses: list[float] = []

    for _ in range(args.steps):
        if clock.probing():  # how long is the same work without the network?
            with clock.local_pass(), model.no_sync():
                loss_of_new_batch().backward()
            optimizer.zero_grad()

        with clock.step():
            loss_sum = 0.0
            for batch in range(args.accumulate):
                last = batch == args.accumulate - 1
                # Inside no_sync() gradients only add up here; the last batch sends the sum.
                with clock.synchronised_pass() if last else model.no_sync():
                    loss = loss_of_new_batch()
                    loss.backward()
                loss_sum += loss.item()
            optimizer.step()
            optimizer.zero_grad()

        losses.append(loss_sum)
        progress.advance(f"loss {loss_sum:.4f}")
    progress.close()

    tail = losses[-10:]
    first, last_loss = mean_over_ranks(losses[0]), mean_over_ranks(sum(tail) / len(tail))
    fell = first - last_loss >= args.target_drop and math.isfinite(last_loss)
    equal, comparison = compare_parameters(net)
    if rank == 0:
        print(f"{world_size} ranks, {args.steps} steps: {clock.summary()}")
        verdict = "fell" if fell else f"DID NOT FALL by {args.target_drop}"
        ends = f"first {first:.4f}, last {last_loss:.4f} (mean of {len(tail)} steps)"
        print(f"loss {verdict}: {ends}, nats a byte")
        print(comparison, flush=True)
    return fell and equal


def main() -> int:
    args = parse_args()
    # The one line that chooses the network. Rank, world size and address come from torchrun.
    dist.init_process_group(args.backend)
    succeeded = train(args)
    close_group()
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
