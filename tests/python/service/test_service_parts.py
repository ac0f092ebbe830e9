"""The parameter service's parts without a network: placement, frames, checkpoints, slices."""

from __future__ import annotations

import itertools
import random
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from pycomm.service.checkpoint import CheckpointFile
from pycomm.service.endpoint import number_from, parse_endpoint, parse_endpoints
from pycomm.service.frames import FRAME_NBYTES, Frame, Hello, Kind, decode_frame, decode_hello
from pycomm.service.placement import ALIGNMENT, Shape, place
from pycomm.service.shard import Layout, Shard

HELLO = Hello(
    worker=1,
    incarnation=2,
    clock=3,
    begun=None,
    server=0,
    servers=2,
    staleness=None,
    digest="d",
    sliced=True,
    host="h",
    connection=4,
)


def test_placement_covers_each_element_once_and_is_balanced() -> None:
    chosen = random.Random(0)
    for _ in range(300):
        shapes = [
            Shape(f"p{index}", chosen.choice([0, 1, 10, 8192, 16384, 20000, 500_000]), 4)
            for index in range(chosen.randint(1, 12))
        ]
        servers = chosen.randint(1, 5)
        for sliced in (True, False):
            slices = place(shapes, servers, sliced=sliced)
            for shape in shapes:
                own = [each for each in slices if each.name == shape.name]
                assert [own[0].start, own[-1].stop] == [0, shape.numel]
                assert all(a.stop == b.start for a, b in itertools.pairwise(own))
                assert all(each.start % ALIGNMENT == 0 for each in own)
                assert len(own) <= (servers if sliced else 1)
            loads = [
                sum(each.numel for each in slices if each.server == server)
                for server in range(servers)
            ]
            assert max(loads) - min(loads) <= max(each.numel for each in slices)


def test_frames_and_hellos_come_back_as_they_went() -> None:
    frame = Frame(Kind.DONE, 5, 6, 7, "text")
    assert len(frame.encode()) == FRAME_NBYTES
    assert decode_frame(frame.encode()) == frame
    assert decode_hello(HELLO.encode()) == HELLO


@pytest.mark.parametrize("decode", [decode_frame, decode_hello])
def test_changed_bytes_are_a_frame_or_a_value_error(decode: object) -> None:
    chosen = random.Random(1)
    valid = Frame(Kind.PUSH, 5).encode() if decode is decode_frame else HELLO.encode()
    refused = 0
    for _ in range(30_000):
        data = bytearray(valid if chosen.random() < 0.8 else chosen.randbytes(FRAME_NBYTES))
        for _ in range(chosen.randint(1, 4)):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        if chosen.random() < 0.1:
            data = data[: chosen.randrange(len(data))]
        try:
            decode(bytes(data))  # type: ignore[operator]
        except ValueError:
            refused += 1
    assert refused > 3000


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"magic": b"pcs2"}, "no frame"),
        ({"kind": 0}, "no frame"),
        ({"kind": 9}, "no frame"),
        ({"zero": 1}, "no frame"),
        ({"clock": -1}, "negative or too large"),
        ({"clock": 2**62 + 1}, "negative or too large"),
        ({"version": -1}, "negative or too large"),
        ({"lost": 2**63 - 1}, "negative or too large"),
    ],
)
def test_a_frame_with_a_wrong_value_is_refused(changed: dict[str, Any], text: str) -> None:
    fixed = struct.Struct("<4sHHqqq")
    values = {"magic": b"pcs1", "kind": 1, "zero": 0, "clock": 5, "version": 6, "lost": 7}
    good = fixed.pack(*values.values()).ljust(FRAME_NBYTES, b"\0")
    assert decode_frame(good) == Frame(Kind.PUSH, 5, 6, 7)
    with pytest.raises(ValueError, match=text):
        decode_frame(fixed.pack(*(values | changed).values()).ljust(FRAME_NBYTES, b"\0"))
    with pytest.raises(ValueError, match="a frame of 511 bytes"):
        decode_frame(good[:-1])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"worker": -1}, "worker is not a number"),
        ({"worker": True}, "worker is not a number"),
        ({"incarnation": 2**63}, "incarnation is not a number"),
        ({"clock": 1.5}, "clock is not a number"),
        ({"staleness": "0"}, "staleness is neither"),
        ({"begun": -1}, "begun is neither"),
        ({"server": 2}, "server 2 of 2"),
        ({"sliced": 1}, "sliced is neither"),
        ({"digest": None}, "digest or host"),
    ],
)
def test_a_hello_with_a_wrong_value_names_it(changed: dict[str, object], text: str) -> None:
    values = {field: getattr(HELLO, field) for field in HELLO.__dataclass_fields__} | changed
    with pytest.raises(ValueError, match=text):
        decode_hello(Hello(**values).encode())


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:x", "host:65536", "host:-1"])
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT"):
        parse_endpoint(text)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_endpoint("[::1]:80") == ("::1", 80)
    assert parse_endpoints("a:1,b:2") == [("a", 1), ("b", 2)]
    with pytest.raises(ValueError, match="stands twice"):
        parse_endpoints(["a:1", "a:1"])
    monkeypatch.delenv("PADDLE_PSERVERS_IP_PORT_LIST", raising=False)
    with pytest.raises(ValueError, match="PADDLE_PSERVERS_IP_PORT_LIST"):
        parse_endpoints(None)
    monkeypatch.setenv("PADDLE_PSERVERS_IP_PORT_LIST", "c:3")
    assert parse_endpoints(None) == [("c", 3)]
    assert number_from(None, "V", "4", "worker") == 4
    for value, text in ((None, "set V"), ("x", "V='x'"), ("-1", "negative")):
        with pytest.raises(ValueError, match=text):
            number_from(None, "V", value, "worker")


def test_a_checkpoint_is_whole_and_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = CheckpointFile(path)
    assert first.read() is None
    first.write({"x": torch.ones(3)})
    with pytest.raises(BlockingIOError, match="another server uses"):
        CheckpointFile(path)
    with pytest.raises(AttributeError):
        first.write({"x": lambda: None})  # fails in the middle of writing
    read = first.read()
    assert read is not None
    assert torch.equal(read["x"], torch.ones(3))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["state", "state.lock"]
    first.close()
    CheckpointFile(path).close()


def test_a_disk_that_fills_up_while_a_checkpoint_is_written_is_an_os_error(tmp_path: Path) -> None:
    """So that the server goes on and tries again. torch raises RuntimeError."""
    file = CheckpointFile(tmp_path / "state")
    file.write({"x": torch.ones(3)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            file.write({"x": torch.ones(100_000), "y": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    read = file.read()
    assert read is not None
    assert torch.equal(read["x"], torch.ones(3))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["state", "state.lock"]
    file.close()


@pytest.mark.parametrize("content", [b"", b"x" * 100, None])
def test_a_file_that_is_no_checkpoint_is_left_alone(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "state"
    if content is None:
        torch.save({"other": 1}, path)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    file = CheckpointFile(path)
    with pytest.raises(ValueError, match="checkpoint"):
        file.read()
    assert path.read_bytes() == before
    file.close()


def test_a_pickled_program_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Program:
        def __reduce__(self) -> object:
            return (Path.touch, (touched,))

    torch.save({"pycomm_service": 1, "x": Program()}, tmp_path / "state")
    file = CheckpointFile(tmp_path / "state")
    with pytest.raises(ValueError, match="cannot be read"):
        file.read()
    assert not touched.exists()
    file.close()


class Whole(optim.SGD):
    """A subclass may look at more than one element."""


def big() -> nn.Linear:
    return nn.Linear(200, 100)


def test_an_optimizer_that_may_need_whole_tensors_is_refused_on_slices() -> None:
    model = big()
    with pytest.raises(ValueError, match=r"Whole may need whole tensors.*sliced=False"):
        Shard(Layout(model, 2, sliced=True), 0, Whole(model.parameters(), lr=0.1))
    Shard(Layout(model, 2, sliced=False), 0, Whole(model.parameters(), lr=0.1))


def test_an_optimizer_with_a_closure_is_refused() -> None:
    model = big()
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        Shard(Layout(model, 1, sliced=True), 0, optim.LBFGS(model.parameters()))


def test_a_parameter_that_the_optimizer_lacks_is_named() -> None:
    model = big()
    with pytest.raises(ValueError, match="does not have parameter 'bias'"):
        Shard(Layout(model, 1, sliced=True), 0, optim.SGD([model.weight], lr=0.1))


def test_models_that_the_service_does_not_take() -> None:
    with pytest.raises(ValueError, match="no parameter"):
        Layout(nn.ReLU(), 1, sliced=True)
    model = big()
    model.weight.data = model.weight.data.t()
    with pytest.raises(ValueError, match=r"'weight'.*not contiguous"):
        Layout(model, 1, sliced=True)
    model = nn.Linear(2, 2).to(torch.complex64)
    with pytest.raises(ValueError, match=r"'weight' is torch.complex64"):
        Layout(model, 1, sliced=True)


def test_two_models_of_equal_sizes_and_other_shapes_are_told_apart() -> None:
    wide, long = (Layout(nn.Embedding(*shape), 1, sliced=True) for shape in ((100, 20), (200, 10)))
    assert wide.digest != long.digest
    assert wide.digest == Layout(nn.Embedding(100, 20), 1, sliced=True).digest


@pytest.mark.parametrize("servers", [1, 3])
def test_a_shard_saved_and_loaded_goes_on_bit_by_bit(servers: int) -> None:
    def made(seed: int) -> tuple[Layout, list[Shard]]:
        torch.manual_seed(seed)
        model = big()
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        layout = Layout(model, servers, sliced=True)
        return layout, [Shard(layout, server, optimizer) for server in range(servers)]

    def steps(layout: Layout, shards: list[Shard]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        for server, shard in enumerate(shards):
            for _ in range(3):
                gradients = layout.buffers(server)
                for each in gradients.values():
                    each.normal_(generator=generator)
                shard.step([gradients])
        return [each.detach().clone() for each in layout.parameters.values()]

    layout, shards = made(0)
    steps(layout, shards)
    saved = [shard.state_dict() for shard in shards]
    other, loaded = made(1)
    for shard, state in zip(loaded, saved, strict=True):
        shard.load_state_dict(state)
    first, second = steps(layout, shards), steps(other, loaded)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(ValueError, match="of another model"):
        loaded[0].load_state_dict({**saved[0], "digest": "x"})


@pytest.mark.parametrize("servers", [1, 3])
def test_a_saved_tensor_of_another_shape_is_named_and_nothing_is_changed(servers: int) -> None:
    """Also one that would broadcast, and one with as many elements."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6), big())
    layout = Layout(model, servers, sliced=True)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    shard = Shard(layout, 0, optimizer)
    gradients = layout.buffers(0)
    gradients[torch.float32].fill_(1.0)
    shard.step([gradients])
    right = shard.state_dict()
    for index, each in enumerate(layout.of(0)):
        for shape in ((1,), (), (each.numel, 1), (1, each.numel), (each.numel + 1,)):
            state = shard.state_dict()
            state["parameters"][0] += 1.0
            state["parameters"][index] = torch.zeros(shape)
            with pytest.raises(ValueError, match=rf"'{each.name}'.*shape"):
                shard.load_state_dict(state)
            for mine, was in zip(
                shard.state_dict()["parameters"], right["parameters"], strict=True
            ):
                assert torch.equal(mine, was)
    fewer = shard.state_dict()
    del fewer["parameters"][-1]
    with pytest.raises(ValueError, match=r"tensors"):
        shard.load_state_dict(fewer)


def test_short_floats_are_summed_as_fp32_and_each_group_keeps_its_rate() -> None:
    """1 + 3 x 2⁻⁸ is no bf16: a sum in bf16 would round each 2⁻⁸ away."""
    model = nn.ParameterDict(
        {
            "short": nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)),
            "long": nn.Parameter(torch.zeros(1)),
        }
    )
    groups = [{"params": [model["short"]]}, {"params": [model["long"]], "lr": 0.5}]
    layout = Layout(model, 1, sliced=True)
    shard = Shard(layout, 0, optim.SGD(groups, lr=1.0))
    pushed = [
        {torch.bfloat16: torch.tensor([each], dtype=torch.bfloat16), torch.float32: torch.ones(1)}
        for each in (1.0, 2**-8, 2**-8, 2**-8)
    ]
    shard.step(pushed)
    mean = torch.tensor([(1 + 3 * 2**-8) / 4]).to(torch.bfloat16)
    assert torch.equal(model["short"].detach(), -mean)
    assert mean.item() > 0.25
    assert model["long"].item() == -0.5
