"""Cuts a model into fragments, which are synced at different times.

By default blocks are dealt out in turn: block b belongs to fragment b mod P. With P = 2 and six
layers, fragment 0 has layers 0, 2, 4 and fragment 1 has 1, 3, 5. This is the strided pattern of
Streaming DiLoCo (arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

Parameters = Mapping[str, nn.Parameter]


def cut(
    model: nn.Module, parameters: Parameters, fragments: int | Sequence[nn.Module]
) -> list[list[str]]:
    """The names of each fragment's parameters, in the model's order.

    Args:
        model: Its blocks are the children of the ``ModuleList`` or ``Sequential`` that has the most
            children with parameters, and of all others with as many that are not inside it.
        parameters: The trainable parameters of ``model``, by name.
        fragments: Their number, or the modules of each: then every parameter belongs to exactly
            one.

    Parameters outside all blocks go to the fragment that is the lightest so far, the largest first.
    If no list has as many blocks as there are fragments, all parameters do.

    Raises:
        ValueError: ``fragments`` cannot cut this model.
    """
    if isinstance(fragments, int) and not isinstance(fragments, bool):
        return _deal(model, parameters, fragments)
    if not isinstance(fragments, Sequence) or isinstance(fragments, str):
        raise ValueError(f"fragments={fragments!r} is neither a whole number nor a list of modules")
    return _chosen(parameters, fragments)


def _deal(model: nn.Module, parameters: Parameters, count: int) -> list[list[str]]:
    if not 1 <= count <= len(parameters):
        raise ValueError(
            f"fragments={count} is not allowed: use 1 to {len(parameters)}, the number of trainable"
            " parameters"
        )
    found: list[set[str]] = [set() for _ in range(count)]
    weights = [0] * count
    names = {id(parameter): name for name, parameter in parameters.items()}
    left = dict(parameters)

    def give(name: str, fragment: int) -> None:
        found[fragment].add(name)
        weights[fragment] += left.pop(name).nbytes

    for number, block in enumerate(_blocks(model, set(names), count)):
        for parameter in block.parameters():
            name = names.get(id(parameter))
            if name in left:  # one that two blocks share belongs to the first
                give(name, number % count)
    # sorted() is stable, so equal sizes stay in the model's order: alike on all ranks.
    for name in sorted(left, key=lambda name: -parameters[name].nbytes):
        give(name, weights.index(min(weights)))
    if not all(found):
        raise ValueError(
            f"fragments={count}: a fragment would be empty, because blocks share their parameters; "
            "use fewer, or pass the modules of each fragment"
        )
    return [[name for name in parameters if name in fragment] for fragment in found]


def _blocks(model: nn.Module, trained: set[int], count: int) -> list[nn.Module]:
    def blocks_of(module: nn.Module) -> list[nn.Module]:
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            return []
        has = [any(id(each) in trained for each in child.parameters()) for child in module]
        return [child for child, any_trained in zip(module, has, strict=True) if any_trained]

    most = max(len(blocks_of(module)) for module in model.modules())
    if most < count:
        return []
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # a module comes before those inside it
        blocks = blocks_of(module)
        if len(blocks) == most and module not in inside:
            found += blocks
            inside.update(module.modules())
    return found


def _chosen(parameters: Parameters, fragments: Sequence[nn.Module]) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    owner: dict[str, int] = {}
    for number, module in enumerate(fragments):
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            article = "an" if kind[0] in "aeiou" else "a"
            raise ValueError(f"fragments[{number}] is {article} {kind} and not a module")
        trainable = [each for each in module.parameters() if each.requires_grad]
        if not trainable:
            raise ValueError(f"fragments[{number}] has no trainable parameter")
        for parameter in trainable:
            name = names.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"a parameter of fragments[{number}] is not part of the model, or is frozen "
                    "there"
                )
            if name in owner:
                raise ValueError(
                    f"parameter {name!r} is in fragments[{owner[name]}] and in fragments[{number}]"
                )
            owner[name] = number
    if missing := [name for name in parameters if name not in owner]:
        raise ValueError(
            f"no fragment has parameter {missing[0]!r}, and {len(missing) - 1} others: fragments "
            "must hold every trainable parameter"
            if len(missing) > 1
            else f"no fragment has parameter {missing[0]!r}: fragments must hold every trainable "
            "parameter"
        )
    return [
        [name for name in parameters if owner[name] == number] for number in range(len(fragments))
    ]
