"""The fault matrix: which fault, where, to which rank of how many, and what all ranks must see.

python tests/rig/fault_cases.py        counts of kinds and cases
"""

from __future__ import annotations

import collections
import dataclasses
import signal
from collections.abc import Iterator, Sequence

from fault_ranks import Case, mismatches

WORLDS = (2, 3, 4, 5)
OTHER_OPERATIONS = (
    *("broadcast", "all_gather", "reduce_scatter", "all_to_all"),
    *("int8", "fp16", "bf16"),  # sums that travel so
)
KILLED = -int(signal.SIGKILL)
# What docs/errors.md promises, and the steps before the fault strikes.
SILENCE_S = 4.2
LATE_S = 2.5  # a limit of 2 s


def _ends(world_size: int) -> tuple[int, int]:
    return 0, world_size - 1


def _killed(phase: str, world_size: int, victim: int, action: str = "kill", **more: object) -> Case:
    site, _, nth = phase.partition(":")
    kind = {"kill": "killed", "exit": "exits at once"}[action]
    options: dict[str, object] = {
        "victim_exit": KILLED if action == "kill" else 77,
        "victim_codes": None,
    }
    spec = f"{site}:{nth or 1}:{action}"
    return Case(kind, phase, world_size, victim, spec=spec, **(options | more))  # type: ignore[arg-type]


def _killed_in_operations() -> Iterator[Case]:
    phases = ("operation.post:1", "frame.queued:2", "frame.written:3", "frame.header:2")
    phases += ("payload.partly:1", "operation.finish:2", "control.send:1", "reduce.step:1")
    for world_size in WORLDS:
        for phase in phases:
            for victim in _ends(world_size):
                yield _killed(phase, world_size, victim)
    for nth in (1, 4, 8, 12, 16, 24):  # at every chunk's place
        for victim in range(3):
            yield _killed(f"frame.written:{nth}", 3, victim)
    for phase in ("frame.written:2", "frame.header:2", "reduce.step:2"):
        yield _killed(phase, 3, 1, "exit")
        yield _killed(phase, 4, 0, "exit")


def _killed_in_rendezvous() -> Iterator[Case]:
    phases = [f"rendezvous.{what}:{nth}" for what in ("publish", "published") for nth in (1, 2)]
    phases += ["rendezvous.wait:1", "listener.bind:1"]
    for world_size in (2, 3):
        for phase in phases:
            for victim in _ends(world_size):
                yield _killed(
                    phase,
                    world_size,
                    victim,
                    at_init=True,
                    # Whose address is known may be connected to, and is found dead then.
                    codes=("RENDEZVOUS_TIMEOUT", "CONNECT_FAILED", "PEER_DEAD")
                    if phase == "rendezvous.published:2"
                    else ("RENDEZVOUS_TIMEOUT",),
                    timeout_s=3.0,
                    bound_s=4.5,
                )
    connecting = (("socket.connect:1", 0), ("hello.send:1", 0), ("hello.sent:1", 0))
    for world_size in (2, 3, 4):
        for phase, victim in (*connecting, ("hello.received:1", world_size - 1)):
            yield _killed(
                phase,
                world_size,
                victim,
                at_init=True,
                codes=("CONNECT_FAILED", "PEER_DEAD"),
                timeout_s=3.0,
                bound_s=5.0,
            )
    for world_size in (2, 3, 4):
        for phase in ("group.close", "group.said_goodbye"):
            for victim in _ends(world_size):
                yield _killed(
                    phase,
                    world_size,
                    victim,
                    program="few",
                    codes=("PEER_DEAD",),
                    may_end_well=True,
                )


def _stopped() -> Iterator[Case]:
    for world_size, victim in ((2, 0), (2, 1), (3, 1), (4, 3), (5, 0)):
        for phase in ("operation.post:1", "frame.written:3"):
            yield _stopped_at(phase, world_size, victim)
    yield Case(
        "stopped",
        "rendezvous.wait:1",
        3,
        1,
        spec="rendezvous.wait:1:stop",
        at_init=True,
        codes=("RENDEZVOUS_TIMEOUT",),
        timeout_s=3.0,
        bound_s=4.5,
    )


def _acts() -> Iterator[Case]:
    both = ("PEER_LEFT", "PEER_DEAD")
    for world_size in (2, 3, 4):
        victim = world_size - 2
        place = ("between operations", world_size, victim)
        yield Case("killed between", *place, act="kill", victim_exit=KILLED)
        yield Case("SIGTERM", *place, act="terminate", victim_exit=-signal.SIGTERM)
        yield Case("crashes", *place, act="segfault", victim_exit=-signal.SIGSEGV)
        yield Case("raises", *place, act="raise", codes=both, victim_exit=1)
        yield Case("sys.exit", *place, act="sys_exit", codes=both)
        yield Case("os._exit", *place, act="os_exit", victim_exit=3)
        yield Case("destroys in the middle", *place, act="destroy", codes=("PEER_LEFT",))
        yield Case("Ctrl-C", *place, act="interrupt", codes=both)
        yield Case("aborts", *place, act="abort", codes=("ABORTED",), victim_codes=("ABORTED",))
        yield Case(
            "late",
            *place,
            act="late",
            codes=("TIMEOUT",),
            victim_codes=("TIMEOUT",),
            timeout_s=2.0,
            bound_s=LATE_S,
        )
        yield Case(
            "forked child lives on",
            *place,
            act="fork",
            victim_exit=KILLED,
            codes=("PEER_DEAD", "PEER_UNRESPONSIVE"),
            bound_s=SILENCE_S,
        )
        nothing = {"codes": (), "victim_codes": (), "bound_s": 15.0}
        yield Case("holds the GIL", *place, act="hold_gil", **nothing)  # type: ignore[arg-type]
        yield Case("stopped for a second", *place, act="stop_and_go", **nothing)  # type: ignore[arg-type]


def _in_shared_memory() -> Iterator[Case]:
    shared = {"transport": "shm"}
    for world_size in WORLDS:
        for victim in _ends(world_size):
            for phase, program in (
                ("host.enter:2", "small"),
                ("host.stage:3", "large"),
                ("host.collect:3", "large"),
                ("reduce.step:4", "in place"),
                ("host.write:4", "in place"),
                ("operation.finish:2", "large"),
            ):
                case = _killed(phase, world_size, victim, **shared, program=program)
                yield dataclasses.replace(case, kind=f"{case.kind} in shared memory")
    for world_size, victim in ((2, 1), (3, 0), (4, 2)):
        for phase, program in (
            ("host.enter:2", "small"),
            ("host.collect:3", "large"),
            ("reduce.step:2", "in place"),
            ("host.write:2", "in place"),
        ):
            yield Case(
                "stopped in shared memory",
                phase,
                world_size,
                victim,
                spec=f"{phase}:stop",
                program=program,
                codes=("PEER_UNRESPONSIVE",),
                bound_s=SILENCE_S,
                transport="shm",
            )
    for world_size, victim in ((2, 1), (3, 0), (4, 3)):
        for site, program in (
            ("operation.post", "small"),
            ("host.enter", "small"),
            ("host.stage", "large"),
            ("reduce.step", "in place"),
            ("operation.finish", "large"),
        ):
            case = _no_memory(site, world_size, victim)
            yield dataclasses.replace(
                case,
                kind="no memory in shared memory",
                program=program,
                transport="shm",
                # What ends a rank's part may fail when the others have theirs.
                may_end_well=site == "operation.finish",
            )
    for world_size in (2, 3):
        victim = world_size - 1
        yield Case(
            "no shared memory, auto",
            "making the group",
            world_size,
            world_size - 2,
            spec="arena.create:1+:errno=EACCES",
            at_init=True,
            transport="auto",
            codes=(),
            victim_codes=(),
            bound_s=20.0,
        )
        yield Case(
            "no room for stages, auto",
            "making the group",
            world_size,
            victim,
            spec="arena.room:1+:errno=ENOMEM",
            at_init=True,
            transport="auto",
            codes=(),
            victim_codes=(),
            bound_s=20.0,
        )
        yield Case(
            "no room for shared memory",
            "arena.commit",
            world_size,
            victim,
            spec="arena.commit:1+:errno=ENOSPC",
            transport="shm",
            codes=("SHM_NO_SPACE",),
            victim_codes=("SHM_NO_SPACE",),
            program="later large",
        )
        for phase in ("arena.open:1", "heap.open:1"):
            yield _killed(
                phase,
                world_size,
                victim,
                at_init=True,
                transport="shm",
                codes=("RENDEZVOUS_TIMEOUT", "PEER_DEAD"),
                timeout_s=3.0,
                bound_s=5.0,
            )


def _in_shared_links() -> Iterator[Case]:
    """Kills in links between ranks of one host, which carry messages and uneven parts."""
    shared = {"transport": "shm"}
    for world_size in (2, 3, 5):
        for victim in _ends(world_size):
            for phase, program in (
                ("shared.write:5", "messages"),
                ("shared.read:9", "uneven parts"),
                ("ring.written:9", "messages"),
                ("ring.taken:9", "messages"),
                ("payload.partly:3", "uneven parts"),
            ):
                case = _killed(phase, world_size, victim, **shared, program=program)
                yield dataclasses.replace(case, kind="killed in a shared link")
    first = {"at_init": True, "bound_s": 3.5, **shared}
    for phase in ("ring.commit:1", "shared.write:1", "ring.written:1", "shared.read:1"):
        case = _killed(phase, 3, 1, program="messages", **first)
        yield dataclasses.replace(case, kind="killed in a shared link")
    for world_size, victim in ((2, 1), (3, 0), (4, 2)):
        for phase in ("shared.write:5", "shared.read:9", "ring.written:9"):
            yield Case(
                "stopped in a shared link",
                phase,
                world_size,
                victim,
                spec=f"{phase}:stop",
                program="messages",
                codes=("PEER_UNRESPONSIVE",),
                bound_s=SILENCE_S,
                transport="shm",
            )
    for world_size in (2, 3, 4):
        victim = world_size - 1
        for phase, name in (("shared.write:5", "EPIPE"), ("shared.read:5", "ECONNRESET")):
            yield Case(
                "a shared link breaks",
                f"{phase}={name}",
                world_size,
                victim,
                spec=f"{phase}:errno={name}",
                program="uneven parts",
                codes=("PEER_DEAD", "CONN_RESET"),
                culprit="an end",
                victim_codes=("PEER_DEAD", "CONN_RESET"),
                transport="shm",
            )
        for site in ("ring.written", "ring.taken", "frame.arriving"):
            yield Case(
                "one bit flips in a shared link",
                site,
                world_size,
                victim,
                spec=f"{site}:{'5' if site == 'frame.arriving' else '5+'}:flip",
                program="messages",
                codes=("PROTOCOL_VIOLATION",),
                culprit="an end" if site == "frame.arriving" else "victim",  # the one, received
                victim_codes=("PROTOCOL_VIOLATION",),
                transport="shm",
            )
        case = _no_memory("frame.header", world_size, victim)
        yield dataclasses.replace(
            case, kind="no memory in a shared link", program="messages", transport="shm"
        )
    yield from _harmless_in_shared_links()
    for world_size in (2, 3):
        place = (world_size, world_size - 1)
        nothing = {"codes": (), "victim_codes": (), "bound_s": 15.0}
        late = {"victim_codes": ("TIMEOUT",), "timeout_s": 2.0, "bound_s": LATE_S}
        for act, more in {
            "kill": {"victim_exit": KILLED},
            "raise": {"codes": ("PEER_LEFT", "PEER_DEAD"), "victim_exit": 1},
            "abort": {"codes": ("ABORTED",), "victim_codes": ("ABORTED",)},
            "late": {"codes": ("TIMEOUT",), **late},
            "stop_and_go": nothing,
        }.items():
            yield Case("amid messages", act, *place, act=act, program="messages", **more)  # type: ignore[arg-type]


def _harmless_in_shared_links() -> Iterator[Case]:
    for world_size in (2, 3):
        for phase, spec, program in (
            ("short writes", "shared.write:1+:short", "small messages"),
            ("short reads", "shared.read:1+:short", "small messages"),
            ("short writes, every kind", "shared.write:1+:short", "small kinds"),
            ("short reads, every kind", "shared.read:1+:short", "small kinds"),
            ("a short write", "shared.write:5:short", "messages"),
            ("a slow writer", "ring.written:1+:delay=5", "messages"),
            ("a slow reader", "ring.taken:1+:delay=5", "messages"),
            ("no room", "ring.commit:1+:errno=ENOSPC", "messages"),
        ):
            yield Case(
                "no harm in a shared link",
                phase,
                world_size,
                world_size - 1,
                spec=spec,
                at_init=phase == "no room",
                program=program,
                codes=(),
                victim_codes=(),
                bound_s=20.0,
                transport="shm",
            )


def _in_other_collectives() -> Iterator[Case]:
    """Not all_reduce: over TCP, and in shared memory where ranks meet there."""
    places = ((2, 1), (3, 0), (4, 2))
    for program in OTHER_OPERATIONS[:4]:
        phases = ["operation.post:1", "frame.queued:2", "frame.written:2", "frame.header:2"]
        phases += ["payload.partly:1", "operation.finish:2"]
        phases += ["reduce.step:1"] if program == "reduce_scatter" else []
        for index, phase in enumerate(phases):
            for world_size, victim in (places[index % 3], places[(index + 1) % 3]):
                yield _in(program, _killed(phase, world_size, victim))
        yield _in(program, _stopped_at("frame.written:2", 3, 1))
        for phase, name in (("socket.write:5", "ECONNRESET"), ("socket.read:5", "ECONNRESET")):
            yield _in(program, _reset(phase, name, 3, 2))
        for spec in ("socket.write:3:short", "socket.read:3:short"):
            yield _in(program, _unnoticed("no harm", spec, 3, 1))
        for site in ("operation.post", "frame.header"):
            yield _in(program, _no_memory(site, 3, 1))
    shared = {"transport": "shm"}
    for program in ("broadcast", "all_gather", "reduce_scatter"):
        phases = ["host.enter:2", "host.stage:2", "host.collect:2", "operation.finish:2"]
        phases += ["reduce.step:2"] if program == "reduce_scatter" else []
        for index, phase in enumerate(phases):
            for world_size, victim in (places[index % 3], places[(index + 1) % 3]):
                yield _in(program, _killed(phase, world_size, victim, **shared))
        yield _in(program, _stopped_at("host.collect:2", 3, 1, **shared))
    for phase in ("shared.write:5", "shared.read:9", "ring.written:9", "payload.partly:3"):
        for world_size, victim in places[:2]:
            yield _in("all_to_all", _killed(phase, world_size, victim, **shared))
    yield _in("all_to_all", _stopped_at("shared.write:5", 3, 1, **shared))


def _in_codecs() -> Iterator[Case]:
    """Sums that travel encoded."""
    for codec in ("int8", "fp16"):
        for phase in ("frame.written:2", "payload.partly:1", "reduce.step:1", "operation.finish:2"):
            for world_size, victim in ((2, 1), (3, 0)):
                yield _in(codec, _killed(phase, world_size, victim))
        yield _in(codec, _stopped_at("reduce.step:1", 3, 1))
        yield _in(codec, _reset("socket.read:5", "ECONNRESET", 3, 2))
        yield _in(codec, _no_memory("reduce.step", 3, 1))
        for spec in ("socket.write:3:short", "socket.read:3:short"):
            yield _in(codec, _unnoticed("no harm", spec, 3, 1))
    yield _in("bf16", _killed("reduce.step:1", 3, 2))
    for codec in ("int8", "fp16"):
        for phase in ("reduce.step:1", "operation.finish:2"):
            yield _in(codec, _killed(phase, 3, 1, transport="shm"))


def _in(program: str, case: Case) -> Case:
    """The case in another operation."""
    where = " in shared memory" if case.transport == "shm" else ""
    return dataclasses.replace(case, kind=f"{case.kind} in {program}{where}", program=program)


def _stopped_at(phase: str, world_size: int, victim: int, **more: object) -> Case:
    return Case(
        "stopped",
        phase,
        world_size,
        victim,
        spec=f"{phase}:stop",
        codes=("PEER_UNRESPONSIVE",),
        bound_s=SILENCE_S,
        **more,  # type: ignore[arg-type]
    )


def _reset(phase: str, name: str, world_size: int, victim: int) -> Case:
    return Case(
        "connection breaks",
        f"{phase}={name}",
        world_size,
        victim,
        spec=f"{phase}:errno={name}",
        codes=("PEER_DEAD", "CONN_RESET"),
        culprit="an end",
        victim_codes=("PEER_DEAD", "CONN_RESET"),
        bound_s=SILENCE_S,
    )


def _unnoticed(kind: str, spec: str, world_size: int, victim: int, **more: object) -> Case:
    """What no user may notice."""
    return Case(
        kind,
        spec,
        world_size,
        victim,
        spec=spec,
        codes=(),
        victim_codes=(),
        bound_s=20.0,
        **more,  # type: ignore[arg-type]
    )


def _system_calls() -> Iterator[Case]:
    for world_size in (2, 3, 4):
        victim = world_size - 1
        for phase, name in (
            ("socket.write:5", "EPIPE"),
            ("socket.write:9", "ECONNRESET"),
            ("socket.read:5", "ECONNRESET"),
            ("socket.read:9", "ETIMEDOUT"),
        ):
            yield _reset(phase, name, world_size, victim)
        for phase, name in (("socket.write:5", "ENOBUFS"), ("socket.read:5", "ENOMEM")):
            yield Case(
                "kernel without memory",
                f"{phase}={name}",
                world_size,
                victim,
                spec=f"{phase}:errno={name}",
                codes=("OUT_OF_MEMORY",),
                victim_codes=("OUT_OF_MEMORY",),
            )
        for site in ("staging.allocate", "operation.post", "frame.header", "frame.queued"):
            yield _no_memory(site, world_size, victim)
    for site in ("control.send", "control.received", "reduce.step", "operation.finish"):
        yield _no_memory(site, 3, 0)
    yield from _harmless()
    yield from _refused_at_init()
    for world_size in (2, 3):
        yield Case(
            "one bit flips in a header",
            "frame.arriving:5",
            world_size,
            1,
            spec="frame.arriving:5:flip",
            codes=("PROTOCOL_VIOLATION",),
            culprit="an end",  # the victim is who received it
            victim_codes=("PROTOCOL_VIOLATION",),
        )


def _no_memory(site: str, world_size: int, victim: int) -> Case:
    return Case(
        "no memory",
        site,
        world_size,
        victim,
        spec=f"{site}:1:nomem",
        codes=("OUT_OF_MEMORY",),
        victim_codes=("OUT_OF_MEMORY",),
        # What smaller operations have left in the pool is not allocated again.
        program="later large" if site == "staging.allocate" else "large",
    )


def _harmless() -> Iterator[Case]:
    """What no user may notice."""
    faults = {
        "short writes": ("socket.write:1+:short", "small kinds"),
        "short reads": ("socket.read:1+:short", "small kinds"),
        "a short write": ("socket.write:3:short", "large"),
        "a short read": ("socket.read:3:short", "large"),
        "EINTR": ("socket.write:2:errno=EINTR,socket.read:2:errno=EINTR", "large"),
        "EAGAIN": ("socket.write:2:errno=EAGAIN,socket.read:2:errno=EAGAIN", "large"),
        "slow rank, sending": ("frame.written:3:delay=400", "large"),
        "slow rank, receiving": ("frame.header:3:delay=400", "large"),
        "slow rank, reducing": ("reduce.step:1+:delay=10", "large"),
        "slow control loop": ("control.send:1:delay=1500", "unhurried"),
    }
    for kind, (spec, program) in faults.items():
        for world_size in (2, 3):
            yield Case(
                kind,
                spec.split(":")[0],
                world_size,
                world_size - 1,
                spec=spec,
                program=program,
                codes=(),
                victim_codes=(),
                bound_s=20.0,
                steps=80 if program == "unhurried" else 12,
            )
    for kind, spec in {
        "refused once": "socket.connect:1:errno=ECONNREFUSED",
        "accept aborted": "listener.accept:1:errno=ECONNABORTED",
        "too many files to accept": "listener.accept:1:errno=EMFILE",
        "slow to meet": "rendezvous.publish:1:delay=700",
    }.items():
        for world_size in (2, 3):
            yield Case(
                kind,
                "making the group",
                world_size,
                world_size - 1 if "accept" in spec else 0,
                spec=spec,
                at_init=True,
                codes=(),
                victim_codes=(),
                bound_s=20.0,
            )


def _refused_at_init() -> Iterator[Case]:
    place = "making the group"
    gone = ("RENDEZVOUS_TIMEOUT", "CONNECT_FAILED", "PEER_LEFT", "PEER_DEAD")
    for world_size in (2, 3):
        victim = world_size - 1
        for kind, spec, code, others in (
            (
                "no port",
                "listener.bind:1:errno=EADDRINUSE",
                "PORTS_EXHAUSTED",
                ("PORTS_EXHAUSTED",),
            ),
            ("no thread", "thread.start:1:errno=EAGAIN", "SYSTEM_ERROR", gone),
        ):
            yield Case(
                kind,
                place,
                world_size,
                victim,
                spec=spec,
                at_init=True,
                codes=others,
                victim_codes=(code,),
                timeout_s=3.0,
                bound_s=5.0,
            )
        yield Case(
            "too many files to connect",
            place,
            world_size,
            0,
            spec="socket.connect:1:errno=EMFILE",
            at_init=True,
            codes=(*gone, "TOO_MANY_FILES"),
            victim_codes=("TOO_MANY_FILES",),
            timeout_s=3.0,
            bound_s=5.0,
        )
        # Not 4: torch's FileStore then has no file to close with, and its destructor throws.
        for files in (1, 2, 3, 5, 6, 7, 8):
            yield Case(
                "few files, for real",
                f"+{files}",
                world_size,
                victim,
                how="few files",
                at_init=True,
                codes=(*gone, "TOO_MANY_FILES"),
                victim_codes=("TOO_MANY_FILES",),
                timeout_s=3.0,
                bound_s=5.0,
            )
        yield Case(
            "never comes",
            place,
            world_size,
            victim,
            how="absent",
            codes=("RENDEZVOUS_TIMEOUT",),
            victim_codes=(),
            timeout_s=3.0,
            bound_s=5.0,
        )
        for how in ("world size", "algorithm", "segment", "heartbeat"):
            yield Case(
                f"another {how}",
                place,
                world_size,
                victim,
                how=how,
                at_init=True,
                codes=("CONFIG_MISMATCH",),
                victim_codes=("CONFIG_MISMATCH",),
                timeout_s=10.0,
            )
    yield Case(
        "duplicate rank",
        place,
        3,
        2,
        how="duplicate",
        at_init=True,
        culprit="",
        codes=("RENDEZVOUS_TIMEOUT", "DUPLICATE_RANK"),
        victim_codes=("DUPLICATE_RANK", "RENDEZVOUS_TIMEOUT"),
        timeout_s=3.0,
        bound_s=4.5,
    )


def _over_unix_sockets() -> Iterator[Case]:
    """Ranks of one host connect by Unix sockets, unless the transport is "tcp"."""
    unix = {"transport": "auto"}
    init = {"at_init": True, "timeout_s": 3.0, "bound_s": 5.0, **unix}
    phases = (("socket.connect:1", 0), ("hello.send:1", 0), ("hello.sent:1", 0))
    gone = ("RENDEZVOUS_TIMEOUT", "CONNECT_FAILED", "PEER_LEFT", "PEER_DEAD")
    for world_size in (2, 3, 4):
        for phase, victim in (*phases, ("hello.received:1", world_size - 1)):
            case = _killed(phase, world_size, victim, codes=("CONNECT_FAILED", "PEER_DEAD"), **init)
            yield dataclasses.replace(case, kind="killed at a Unix socket")
    for world_size in (2, 3):
        for phase in ("listener.bind_unix:1", "unix.reach:1"):
            for victim in _ends(world_size):
                case = _killed(phase, world_size, victim, codes=("RENDEZVOUS_TIMEOUT",), **init)
                yield dataclasses.replace(case, kind="killed at a Unix socket")
        yield Case(
            "too many files to connect to a Unix socket",
            "making the group",
            world_size,
            0,
            spec="socket.connect:1:errno=EMFILE",
            codes=(*gone, "TOO_MANY_FILES"),
            victim_codes=("TOO_MANY_FILES",),
            **init,  # type: ignore[arg-type]
        )
        yield from _harmless_at_unix_sockets(world_size)
    # Control links: with memory nothing else uses sockets. The two of 2 ranks could not agree.
    for world_size, victim in ((3, 2), (4, 0)):
        for phase, name in (("socket.write:3", "EPIPE"), ("socket.read:3", "ECONNRESET")):
            case = _reset(phase, name, world_size, victim)
            yield dataclasses.replace(
                case, kind="a Unix socket breaks", program="unhurried", **unix
            )


def _harmless_at_unix_sockets(world_size: int) -> Iterator[Case]:
    """The last three make ranks connect over TCP: those of one host that have no Unix socket."""
    for kind, spec, victim in (
        ("refused once", "socket.connect:1:errno=ECONNREFUSED", 0),
        ("its queue is full", "socket.connect:1:errno=EAGAIN", 0),
        ("accept aborted", "listener.accept:1:errno=ECONNABORTED", world_size - 1),
        ("too many files to accept", "listener.accept:1:errno=EMFILE", world_size - 1),
        ("short writes", "socket.write:1+:short", 0),
        ("short reads", "socket.read:1+:short", world_size - 1),
        ("EINTR", "socket.write:1:errno=EINTR,socket.read:1:errno=EINTR", 0),
        ("none may be had", "listener.bind_unix:1:errno=EACCES", world_size - 1),
        ("another is not reached", "unix.reach:1:errno=EACCES", 0),
        ("another's queue is full", "unix.reach:1:errno=EAGAIN", world_size - 1),
    ):
        case = _unnoticed("no harm at a Unix socket", spec, world_size, victim, at_init=True)
        yield dataclasses.replace(case, phase=kind, program="messages", transport="auto")


def cases() -> list[Case]:
    """All cases of a fault and a victim; mismatches and networks are counted apart."""
    made = [
        *_killed_in_operations(),
        *_killed_in_rendezvous(),
        *_stopped(),
        *_in_shared_memory(),
        *_in_shared_links(),
        *_over_unix_sockets(),
        *_in_other_collectives(),
        *_in_codecs(),
        *_acts(),
        *_system_calls(),
    ]
    names = collections.Counter(case.name for case in made)
    assert max(names.values()) == 1, [name for name, count in names.items() if count > 1]
    return made


HAVE_FAILED = (
    # A rank that was still there was reported as PEER_LEFT. A broken link is no departure now.
    "connection breaks in all_to_all-socket.write:5=ECONNRESET-3ranks-rank2",
)
"""Cases that found a defect once: CI runs them beside its sample."""


def sample(every: Sequence[Case]) -> set[str]:
    """The names of the cases that CI runs: the first of each kind of fault.

    Of those in other operations than all_reduce, so many that each operation meets a fault and each
    fault is met in one of them.
    """
    kinds = {case.kind: case for case in reversed(every)}
    others = {kind: kind.split(" in ", 1) for kind in kinds if _is_of_another_operation(kind)}
    chosen = [case.name for kind, case in kinds.items() if kind not in others]
    seen: set[str] = set()
    for wanted in (2, 1):  # first the kinds in which both are new
        for kind in reversed(others):
            fault, operation = others[kind]
            new = {fault, operation} - seen
            if len(new) >= wanted and (wanted == 2 or operation in new):
                seen |= new
                chosen.append(kinds[kind].name)
    return {*chosen, *HAVE_FAILED}


def _is_of_another_operation(kind: str) -> bool:
    _, _, operation = kind.partition(" in ")
    return operation.removesuffix(" in shared memory") in OTHER_OPERATIONS


def mismatch_cases(world_size: int, *, everything: bool) -> list[tuple[str, int]]:
    """(mismatch, victim) of one world size; without ``everything`` one victim each, in turn."""
    names = list(mismatches(world_size))
    if everything:
        return [(name, victim) for name in names for victim in range(world_size)]
    return [(name, index % world_size) for index, name in enumerate(names)]


if __name__ == "__main__":
    made = cases()
    wrong = sum(len(mismatch_cases(world, everything=True)) for world in WORLDS)
    in_ci = sum(len(mismatch_cases(world, everything=False)) for world in WORLDS)
    kinds = {case.kind for case in made} | set(mismatches(2))
    print(
        f"{len(kinds)} kinds, {len(made) + wrong} cases: {len(made)} faults and {wrong} mismatches"
    )
    print(f"in CI: {len(sample(made))} faults and {in_ci} mismatches")
