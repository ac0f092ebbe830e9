"""The bytes per step that each way to split a training puts on the link of a machine.

Of ``parameters`` values of b bytes on M machines with one rank each, every machine sends, and
receives at the same time:

    DDP             2 (M - 1) / M   x parameters x b    a ring all-reduce of the gradients
    every Nth step  the same / N                        LocalSGD, DiLoCo: of the parameters
    FSDP            3 (M - 1) / M   x parameters x b    two all-gathers of the parameters and one
                                                        reduce-scatter, in each microbatch

A pipeline sends activations instead, and their gradients back: tokens x width x b for each
neighbour.

docs/which-split.md has these as tables; tools/doc_tables.py writes them.
"""

from __future__ import annotations

FP32_NBYTES = 4.0
FP16_NBYTES = 2.0
INT8_NBYTES = 1.008
"""A value of the codec, with its part of the scale of its block."""
_PAYLOAD = 1448 / 1538
"""Of the bits of Ethernet at an MTU of 1500, with TCP's time stamps and the gap between frames."""


def ddp_nbytes(
    parameters: float, machines: int, *, every: int = 1, value_nbytes: float = FP32_NBYTES
) -> float:
    """DDP, in every step; LocalSGD and DiLoCo, in one of ``every`` steps: the mean of a step."""
    return 2 * _others(machines) * parameters * value_nbytes / every


def fsdp_nbytes(
    parameters: float,
    machines: int,
    *,
    reshard: bool = True,
    microbatches: int = 1,
    value_nbytes: float = FP32_NBYTES,
) -> float:
    """FSDP2's ``fully_shard``.

    Args:
        parameters: Of the model.
        machines: With one rank each.
        reshard: ``reshard_after_forward``. False keeps the parameters whole between forward and
            backward, which saves the second all-gather.
        microbatches: Forward and backward passes per step of the optimizer.
        value_nbytes: Of a parameter and a gradient on the wire.
    """
    transfers = 3 if reshard else 2
    return transfers * _others(machines) * parameters * value_nbytes * microbatches


def pipeline_nbytes(
    tokens: float, width: float, machines: int, *, value_nbytes: float = FP32_NBYTES
) -> float:
    """A pipeline with one stage per machine, of its busiest machine.

    Args:
        tokens: Of all microbatches of a step.
        width: Values of a token at the boundary between two stages.
        machines: In the order of the stages. One in the middle sends activations to the next and
            gradients to the one before; the first and the last only one of these.
        value_nbytes: Of an activation.
    """
    return min(machines - 1, 2) * tokens * width * value_nbytes


def wire_seconds(nbytes: float, gbit_per_s: float) -> float:
    """How long a link of this nominal rate takes at least, one way."""
    return nbytes / (gbit_per_s * 1e9 / 8 * _PAYLOAD)


def _others(machines: int) -> float:
    """The part of a ring's bytes that is not a machine's own."""
    return (machines - 1) / machines
