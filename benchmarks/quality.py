"""Does training reach the same loss with fewer bytes? `python benchmarks/quality.py --help`

    python benchmarks/quality.py --svg docs/pictures/quality.svg --json quality.json

Two models, on two ranks, from several seeds, once for each of the wires: a transformer that
predicts the next byte of the English in Python's own manual, and a small convolutional net. Its
pictures are scikit-learn's handwritten digits where that is installed (`pip install scikit-learn`;
for this script only), else digits drawn from a few strokes with noise.

A seed decides the model, the data's order and the held-out part; wires differ in nothing else. What
counts is the loss on the held-out part after the last step: by how much its mean over seeds is off
that of fp32, beside how far seeds are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from launching import LOOPBACK, add_rank_options, run_ranks
from report import header
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional

WIRES = ["fp32", "fp16", "bf16", "int8"]
COLORS = {"fp32": "#57606a", "fp16": "#3b6ea5", "bf16": "#4c7d35", "int8": "#b3363b"}
POINTS = 20


class ByteModel(nn.Module):
    """Next byte from the 64 before it."""

    context = 64

    def __init__(self) -> None:
        super().__init__()
        width = 96
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.zeros(self.context, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128)
        mask = nn.Transformer.generate_square_subsequent_mask(self.context)
        self.register_buffer("mask", mask)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(text) + self.position
        found: torch.Tensor = self.head(self.norm(self.layers(hidden, mask=self.mask)))
        return found


class Text:
    name, steps, batch, rate = "bytes", 240, 16, 2e-3

    def __init__(self) -> None:
        import pydoc_data.topics as manual

        text = "\n".join(manual.topics[key] for key in sorted(manual.topics))
        self.text = torch.tensor(list(text.encode("ascii", "replace")), dtype=torch.long)
        self.cut = len(self.text) * 9 // 10

    def model(self) -> nn.Module:
        return ByteModel()

    def _loss(self, model: nn.Module, starts: torch.Tensor) -> torch.Tensor:
        windows = torch.stack([self.text[at : at + ByteModel.context + 1] for at in starts])
        found = model(windows[:, :-1])
        return functional.cross_entropy(found.flatten(0, 1), windows[:, 1:].flatten())

    def train_loss(self, model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        return self._loss(model, torch.randint(self.cut - 100, (self.batch,), generator=generator))

    def held_out_loss(self, model: nn.Module) -> torch.Tensor:
        starts = torch.arange(self.cut, len(self.text) - 100, 331)[:128]
        return self._loss(model, starts)


class Digits:
    name, steps, batch, rate = "digits", 200, 32, 2e-3

    def __init__(self) -> None:
        self.images, self.labels, self.source = _digits()
        self.cut = len(self.labels) * 4 // 5

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.GroupNorm(4, 64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 16, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def train_loss(self, model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        picks = torch.randint(self.cut, (self.batch,), generator=generator)
        return functional.cross_entropy(model(self.images[picks]), self.labels[picks])

    def held_out_loss(self, model: nn.Module) -> torch.Tensor:
        return functional.cross_entropy(model(self.images[self.cut :]), self.labels[self.cut :])


def _digits() -> tuple[torch.Tensor, torch.Tensor, str]:
    """8 x 8 pictures of digits, their labels, and where they are from."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        strokes = torch.rand(10, 1, 8, 8, generator=generator).round()
        labels = torch.randint(10, (1800,), generator=generator)
        noise = torch.randn(1800, 1, 8, 8, generator=generator)
        return strokes[labels] + 1.2 * noise, labels, "drawn"
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.tensor(found.images[order] / 16.0, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(found.target[order]), "scikit-learn's digits"


def train(task: Text | Digits, wire: str, seed: int) -> dict[str, Any]:
    import pycomm

    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = pycomm.DistributedDataParallel(task.model(), wire_dtype=wire)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.rate)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    curve, since = [], []
    for step in range(task.steps):
        loss = task.train_loss(model, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        since.append(loss.item())
        if (step + 1) % (task.steps // POINTS) == 0:
            mean = torch.tensor(since).mean()
            dist.all_reduce(mean)
            curve.append(mean.item() / dist.get_world_size())
            since = []
    model.eval()
    with torch.no_grad():
        final = float(task.held_out_loss(model.module))
    every = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor([final]))
    assert all(each == every[0] for each in every), "ranks hold different models"
    stats = model.stats()
    return {
        "task": task.name,
        "wire": wire,
        "seed": seed,
        "curve": curve,
        "final": final,
        "sent_mb": stats.sent_nbytes / 1e6,
        "steps": task.steps,
        "overflowed": stats.overflowed_buckets + stats.codec_overflows,
    }


def summary(runs: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"{'model':<8}{'wire':<7}{'loss':>8}{'seeds':>8}{'off fp32, paired':>18}{'MB':>8}"]
    for task in dict.fromkeys(run["task"] for run in runs):
        final = {
            wire: np.array([r["final"] for r in runs if (r["task"], r["wire"]) == (task, wire)])
            for wire in dict.fromkeys(run["wire"] for run in runs)
        }
        base = next(iter(final.values()))
        for wire, losses in final.items():
            sent = next(r["sent_mb"] for r in runs if (r["task"], r["wire"]) == (task, wire))
            pairs = losses - base
            spread = losses.std(ddof=1) if len(losses) > 1 else 0.0
            error = pairs.std(ddof=1) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0
            lines.append(
                f"{task:<8}{wire:<7}{losses.mean():8.4f}{spread:8.4f}"
                f"{pairs.mean():+10.4f} ±{error:6.4f}{sent:8.1f}"
            )
    return lines


def picture(runs: Sequence[dict[str, Any]]) -> str:
    """Curves of the training loss, mean over seeds, with the seeds' range as a band."""
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    width, height, left = 460, 280, 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(tasks)} {height + 60}"'
        ' role="img" font-family="system-ui, sans-serif" font-size="12">',
        "<title>Training loss with fewer bytes on the wire</title>",
        "<desc>For each model the training loss against steps, a line for each wire, with the "
        "range of the seeds around it.</desc>",
        "<style>.paper{fill:#fff}.ink{fill:#1f2328}.axis{stroke:#8c959f}"
        "@media (prefers-color-scheme: dark){.paper{fill:#0d1117}.ink{fill:#e6edf3}}</style>",
        f'<rect class="paper" width="{width * len(tasks)}" height="{height + 60}"/>',
    ]
    for column, task in enumerate(tasks):
        mine = [run for run in runs if run["task"] == task]
        top = max(max(run["curve"]) for run in mine)
        low = min(min(run["curve"]) for run in mine)
        x0 = column * width + left

        def at(point: int, loss: float, x0: int = x0, low: float = low, top: float = top) -> str:
            x = x0 + (width - left - 20) * (point + 1) / POINTS
            return f"{x:.1f},{40 + (height - 50) * (top - loss) / (top - low):.1f}"

        parts.append(
            f'<text class="ink" x="{x0}" y="24" font-weight="600">{task}: training loss, '
            f"{mine[0]['steps']} steps, {len({run['seed'] for run in mine})} seeds</text>"
        )
        for line, value in ((40, top), (height - 10, low)):
            parts.append(f'<text class="ink" x="{x0 - 44}" y="{line + 4}">{value:.2f}</text>')
        floor = height - 10
        parts.append(
            f'<path class="axis" fill="none" d="M{x0},40 V{floor} H{x0 + width - left - 20}"/>'
        )
        for number, wire in enumerate(dict.fromkeys(run["wire"] for run in mine)):
            curves = np.array([run["curve"] for run in mine if run["wire"] == wire])
            color = COLORS.get(wire, "#8250df")
            upper = [at(point, loss) for point, loss in enumerate(curves.max(0))]
            lower = [at(point, loss) for point, loss in enumerate(curves.min(0))]
            band = " ".join(upper + lower[::-1])
            parts.append(f'<polygon fill="{color}" fill-opacity="0.12" points="{band}"/>')
            mean = " ".join(at(point, loss) for point, loss in enumerate(curves.mean(0)))
            parts.append(
                f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{mean}"/>'
            )
            x = x0 + 90 * number
            parts.append(f'<rect fill="{color}" x="{x}" y="{height + 20}" width="14" height="4"/>')
            shown = "int8 + feedback" if wire == "int8" else wire
            parts.append(f'<text class="ink" x="{x + 18}" y="{height + 27}">{shown}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Train with each wire, from several seeds.")
    add = parser.add_argument
    add("--seeds", type=int, default=5)
    add("--wires", type=lambda text: text.split(","), default=WIRES, help=f"default: {WIRES}")
    add("--tasks", type=lambda text: text.split(","), default=["bytes", "digits"])
    add("--scale", type=float, default=1.0, help="of the number of steps")
    add("--limit", type=float, default=1800.0, help="end after so many seconds")
    add("--svg", type=Path)
    add("--json", type=Path)
    add_rank_options(parser)
    options = parser.parse_args(argv)
    if options.parent_pid is None:
        runs: list[dict[str, Any]] = []
        # Inside a host nothing needs to be encoded: TCP is what is asked about.
        os.environ.setdefault("PYCOMM_TRANSPORT", "tcp")
        run_ranks(2, argv, options.limit, lambda line: runs.append(json.loads(line)))
        lines = [f"# {key}: {value}" for key, value in header("quality", argv).items()]
        lines += [f"# pictures: {_digits()[2]}", *summary(runs)]
        print("\n".join(lines))
        if options.svg is not None:
            options.svg.write_text(picture(runs))
        if options.json is not None:
            options.json.write_text(json.dumps(runs))
        return 0
    port, size = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(LOOPBACK, port, size, False)
    rank = int(os.environ["RANK"])
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
    for make in (Text, Digits):
        if make.name not in options.tasks:
            continue
        task: Any = make()
        task.steps = max(POINTS, int(task.steps * options.scale) // POINTS * POINTS)
        for seed in range(options.seeds):
            for wire in options.wires:
                run = train(task, wire, seed)
                if dist.get_rank() == 0:
                    os.write(options.results_fd, json.dumps(run).encode() + b"\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
