"""How a process becomes a member of an elastic training that runs.

A module of its own, because torch's decorator imports torch's compiler, which
takes about as long as torch itself.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from pycomm._group.creation import native_backend
from pycomm._group.model_check import first_difference
from pycomm._group.reconfiguring import reconfigure_handle
from pycomm._native import loader
from pycomm.ddp.elastic import Elastic
from pycomm.ddp.peers import peers_port
from pycomm.ddp.weights import weighed_of
from pycomm.errors import (
    ConfigMismatchError,
    InvalidArgumentError,
    JoinRefusedError,
    RendezvousTimeoutError,
    VersionMismatchError,
)

logger = logging.getLogger("pycomm")
_ASK_MS = 5000
_ASK_BEFORE_MS = 2000
_ASK_NEIGHBOR_MS = 500
_LOOK_UP_MS = 2000
_PAUSE_S = 0.1
_OTHER_PORT = (
    "Try: another port, outside of PYCOMM_PORT_RANGE; `ss -ltnp` on that host shows who has it"
)


def look_up(peers: str) -> tuple[str, ...]:
    """The addresses of all hosts of ``pycomm://``. Waits for name servers."""
    at = peers_port(peers)
    assert at is not None
    return tuple(loader.native.look_up(at.hosts, _LOOK_UP_MS))


def find_members(group: Any, elastic: Elastic, description: str, deadline_s: float) -> list[str]:
    """Handles of the members, as one of them has said.

    Raises:
        JoinRefusedError: Their model, options or secret differ, or the file is none of handles.
        RendezvousTimeoutError: No member has answered until then: ``join_wait`` is over.
    """
    peers = elastic.peers
    assert peers is not None
    while True:
        left_ms = round((deadline_s - time.monotonic()) * 1000)
        try:
            answer = _ask(group, peers, max(1, min(left_ms, _ASK_MS)))
        except InvalidArgumentError as error:
            raise JoinRefusedError(
                f"{peers} is not a file of handles, as members of an elastic training "
                f"write it: {error}. Try: the peers= of the members"
            ) from error
        except (ConfigMismatchError, VersionMismatchError) as error:
            raise JoinRefusedError(
                f"this process cannot join an elastic training: {error}"
            ) from error
        if not isinstance(answer, str):
            theirs, members = answer
            if theirs != description:
                raise JoinRefusedError(
                    "this process cannot join an elastic training: "
                    + first_difference(theirs, description, "the members", "this process")
                    + ". Try: the members' model and options"
                )
            return list(members)
        if time.monotonic() >= deadline_s:
            where = "run on these hosts" if peers_port(peers) else "write the same file"
            raise RendezvousTimeoutError(
                f"no member of an elastic training answered within join_wait={elastic.join_wait:g} "
                f"s (timed out): {answer}. Try: see whether the members run, {where}, and are "
                "reached from this host; a process that is to begin a training is made without "
                "join=True"
            )
        time.sleep(_PAUSE_S)


def _ask(group: Any, peers: str, timeout_ms: int) -> tuple[str, list[str]] | str:
    """What the first member says that answers, and the handles of all; or why none does."""
    backend = native_backend(group)
    answer: tuple[str, list[str]] | str
    if (at := peers_port(peers)) is not None:
        answer = loader.native.ask_port(backend, at.hosts, at.port, timeout_ms)
        return f"nobody at {peers} ({answer})" if isinstance(answer, str) else answer
    handles, why = _read(peers)
    if not handles:
        return why
    answer = loader.native.ask_members(backend, handles, timeout_ms)
    return f"{peers} names {answer}" if isinstance(answer, str) else answer


def check_peers(group: Any, peers: str) -> str:
    """Why a training must not begin with this file or port: it is another one's. "" if it may.

    Asks the members there for 2 s at most. Rank 0 of a training calls it.
    """
    at_port = peers_port(peers) is not None
    if not at_port and not _read(peers)[0]:
        return ""
    try:
        answer = _ask(group, peers, _ASK_BEFORE_MS)
    except InvalidArgumentError as error:
        return (
            f"Elastic.peers={peers!r} exists and is no file of handles, and it would be "
            f"overwritten ({error}). Try: another name"
        )
    except (ConfigMismatchError, VersionMismatchError) as error:  # nobody there can be asked
        what = "port" if at_port else "file, or remove this one if its training has ended"
        return (
            f"Elastic.peers={peers!r} leads to processes that cannot be asked ({error}). Try: "
            f"another {what}"
        )
    if not isinstance(answer, str):
        what = "port" if at_port else "file"
        return (
            f"Elastic.peers={peers!r} is the {what} of an elastic training that runs: one of its "
            f"{len(answer[1])} members has answered. Try: join=True to become a member, another "
            f"{what} for another training, or end that one first"
        )
    if not at_port:
        logger.warning(
            "elastic=: %s names members that do not answer (%s). A training begins with this file, "
            "and overwrites it.",
            peers,
            answer.removeprefix(f"{peers} names "),
        )
    return ""


Offer = tuple[str, Sequence[tuple[str, str]]]
"""A host's network, and of each of its addresses where members are found: why this process is not,
or ""."""


def offer_port(group: Any, peers: str, addresses: Sequence[str]) -> tuple[Offer, str]:
    """Lets others find this process at the port, if one of the addresses is its host's.

    Of a port that another process has, this one takes it when that ends. The second: why it may
    have none at all.
    """
    at = peers_port(peers)
    assert at is not None
    try:
        return loader.native.offer_port(native_backend(group), addresses, at.port), ""
    except InvalidArgumentError as error:
        return ("", ()), f"Elastic.peers={peers!r}: {error}"


def port_trouble(peers: str | None, offers: Sequence[Offer]) -> str:
    """Why others would not find this training there; "" if they do. ``offers``: of all ranks."""
    tried = [(rank, net, *one) for rank, (net, each) in enumerate(offers) for one in each]
    held = {(net, address) for _, net, address, why in tried if not why}
    if not tried:
        return (
            f"Elastic.peers={peers!r}: no rank runs on one of these hosts, so nobody would answer "
            "there. Try: hosts on which ranks run, by names that lead to their own addresses "
            "(getent hosts NAME)"
        )
    for rank, net, address, why in tried:
        if (net, address) not in held:
            return (
                f"Elastic.peers={peers!r}: rank {rank} cannot listen at {address}, nor can another "
                f"rank of its host: {why}. {_OTHER_PORT}"
            )
    return ""


def _be_found(group: Any, peers: str, offered: tuple[Offer, str]) -> None:
    """Of a process that has joined: it listens at the port, or another member of its host does.

    All members know by now that it is one.
    """
    (_, tried), why = offered
    at = peers_port(peers)
    assert at is not None
    for address, trouble in tried:
        if trouble and not why:
            host = address.rpartition(":")[0].strip("[]")
            try:
                found = loader.native.ask_port(
                    native_backend(group), [host], at.port, _ASK_NEIGHBOR_MS
                )
            except ConfigMismatchError as error:
                found = str(error)
            if not isinstance(found, str):
                mine = reconfigure_handle(group) in found[1]
                found = "" if mine else "another training has it"
            why = f"{trouble}; {found}" if found else ""
    if why:
        logger.warning(
            "elastic=: nobody can find this training at port %d of this host: %s. %s",
            at.port,
            why,
            _OTHER_PORT,
        )


def _read(path: str) -> tuple[list[str], str]:
    """The handles in a file, or none and why."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file]
    except OSError as error:
        return [], f"{path} cannot be read ({error.strerror})"
    return [line for line in lines if line and not line.startswith("#")], f"{path} has no handles"


def pull(agreement: Any, model: Any, addresses: Sequence[str]) -> Mapping[str, Any]:
    """Blocks until this process is a member. Returns what the reducer takes over.

    ``addresses``: of ``look_up()``, where it listens then. Before, it could answer nobody there,
    and would keep the port from a member.

    Raises:
        JoinRefusedError: The state does not fit, or did not come within ``join_pause``.
        RendezvousTimeoutError: The members have not admitted this process within ``join_wait``.
        LeftBehindError: They had admitted it, and went on without it before it heard of that.
    """
    shared: Mapping[str, Any] = {}
    while (state := agreement.pull()) is not None:
        shared = _load(state, model)
        agreement.loaded()
    if (peers := model._elastic.peers_port) is not None:
        _be_found(model._own_group, peers, offer_port(model._own_group, peers, addresses))
    return shared


def _load(state: bytes, model: Any) -> Mapping[str, Any]:
    try:
        loaded = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    except Exception as error:
        raise JoinRefusedError(
            f"the members' state cannot be read here: {error}. Try: objects in state= whose "
            "state_dict() has tensors, numbers, texts, lists and dicts only"
        ) from error
    mine_by_name, theirs_by_name = _tensors(model), loaded["tensors"]
    for name in sorted({*mine_by_name, *theirs_by_name}):
        shapes = [
            f"{each[name].dtype} {tuple(each[name].shape)}" if name in each else "nothing"
            for each in (theirs_by_name, mine_by_name)
        ]
        if shapes[0] != shapes[1]:
            raise JoinRefusedError(
                f"the members have {shapes[0]} as {name!r}, and this process has {shapes[1]}. Try: "
                "the members' model"
            )
    with torch.no_grad():
        for name, tensor in mine_by_name.items():
            tensor.copy_(theirs_by_name[name])
    trained = set(loaded["trained"])
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(name in trained)
        if name not in model.parameters_to_ignore:
            gradient = loaded["gradients"].get(name)
            zeros = name in loaded["gradients"] and gradient is None
            parameter.grad = torch.zeros_like(parameter) if zeros else gradient
    for mine, theirs in zip(model._elastic.state, loaded["state"], strict=True):
        lost = None
        try:
            if isinstance(mine, torch.optim.Optimizer):
                lost = _load_exactly(mine, theirs)
            else:
                mine.load_state_dict(theirs)
        except Exception as error:
            raise JoinRefusedError(
                f"the members' state of a {type(mine).__name__} in state= cannot be loaded here: "
                f"{error}. Try: make it with the same arguments on all ranks"
            ) from error
        if lost is not None:
            raise JoinRefusedError(
                f"the members' state of a {type(mine).__name__} in state= cannot be loaded here as "
                f"it is: {lost} has another dtype or value then. Try: an optimizer whose "
                "load_state_dict() keeps what its state_dict() gives"
            )
    shared: Mapping[str, Any] = loaded["shared"]
    return shared


def _load_exactly(optimizer: torch.optim.Optimizer, sent: Any) -> str | None:
    """Makes an optimizer's state what was sent. Returns the first place where that does not help.

    torch casts state to the dtype of its parameter as it loads it, and the members' may have
    another one: NAdam's ``mu_product`` is float32 beside parameters of any dtype.
    """
    optimizer.load_state_dict(_pytree.tree_map(lambda each: each, sent))  # which it may change
    if _first_lost(sent, optimizer.state_dict()) is None:
        return None
    parameters: dict[Any, Any] = {}  # by their numbers
    for theirs, mine in zip(sent["param_groups"], optimizer.param_groups, strict=True):
        parameters |= zip(theirs["params"], mine["params"], strict=True)
    for number, state in sent["state"].items():
        optimizer.state[parameters.get(number, number)].update(state)
    return _first_lost(sent, optimizer.state_dict())


def _first_lost(sent: Any, here: Any) -> str | None:
    """The first place of what was sent where something else is here; None: all of it is here."""
    found = dict(_pytree.tree_flatten_with_path(here)[0])
    for path, each in _pytree.tree_flatten_with_path(sent)[0]:
        if not _same(each, found.get(path)):
            return _pytree.keystr(path)
    return None


def _same(sent: Any, here: Any) -> bool:
    if sent is here or type(sent) is not type(here):  # nearly always: loading has handed it on
        return sent is here
    if not isinstance(sent, torch.Tensor):
        return bool(sent == here)
    alike = sent.dtype == here.dtype and sent.shape == here.shape
    return alike and torch.allclose(sent, here.cpu(), rtol=0, atol=0, equal_nan=True)


def follow(model: Any, shared: Mapping[str, Any]) -> None:
    """What ``pull()`` returned, to a reducer that was made since."""
    weighed = None if model._weight is None else weighed_of({})
    reducer = model.reducer
    reducer.load(
        exponents=shared["exponents"],
        order=shared["order"],
        agreed=shared["agreed"],
        accumulated=0,
        used=[],
        residuals={},
        weighed=weighed,
        weight_unsynced=0.0,
    )
    reducer.follow_members(shared["passes"])
    model._received_sampler = shared["sampler"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def stop_for_newcomers(model: Any, args: object) -> None:
    """Before a forward with gradients: members that stop for newcomers, or are too few, wait."""
    if not torch.is_grad_enabled():
        return
    if model.elastic is None or model.elastic.left:  # no longer of the members
        return
    if model._can_be_joined():
        _admit(model)


def admit_at_join_point(model: Any) -> None:
    """The same where the program calls ``join_point()``."""
    if not model.elastic.left and model._can_be_joined():
        model.reducer.join_point()
        _admit(model)


def _admit(model: Any) -> None:
    while (waiting := model.reducer.await_newcomers()) > 0:  # on rank 0, of whatever members
        _give(model, waiting)


def _give(model: Any, waiting: int) -> None:
    """Gives so many newcomers the state of all members."""
    agreement = model._agreement
    most = model._most_ranks()
    keep = waiting if most is None else most - agreement.ranks_with_newcomers() + waiting
    if keep < waiting:
        why = f"The members' BalancedSampler has samples for {most} ranks only."
        agreement.refuse(why, max(0, keep))
    if keep <= 0:
        return
    try:
        state = _packed(model)
    except Exception as error:  # of a state_dict(): the training goes on
        logger.exception("the state for a process that wants to join could not be read")
        agreement.refuse(f"The members' state could not be read there: {error!r}.")
    else:
        agreement.give(state)


def _packed(model: Any) -> memoryview:
    order, agreed = model.reducer.order()
    parameters = model.module.named_parameters()
    packed = io.BytesIO()
    torch.save(
        {
            "tensors": _tensors(model),
            "trained": [name for name, parameter in parameters if parameter.requires_grad],
            "gradients": _gradients(model),
            "state": [each.state_dict() for each in model._elastic.state],
            "shared": {
                "exponents": model.reducer.exponents(),
                "order": order,
                "agreed": agreed,
                "passes": model.reducer.passes(),
                "steps": model.elastic.step,
                "sampler": model._state_of_sampler(),
            },
        },
        packed,
    )
    return packed.getbuffer()


def _gradients(model: Any) -> dict[str, torch.Tensor | None]:
    """Each ``.grad`` that there is; None for zeros, which are not sent.

    An optimizer moves a parameter whose gradient is zeros, by momentum or weight decay, and skips
    one without. If no later step writes it, as of a frozen or unused parameter, that goes on.
    """
    named = model.module.named_parameters()
    return {
        name: gradient.detach() if gradient.is_sparse or gradient.any() else None
        for name, parameter in named
        if (gradient := parameter.grad) is not None and name not in model.parameters_to_ignore
    }


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers, but for those that the wrapper ignores."""
    module = model.module
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: each.detach() for name, each in named if name not in model.parameters_to_ignore}
