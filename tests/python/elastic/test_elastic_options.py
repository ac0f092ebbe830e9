"""What does not go with ``elastic=`` is refused by name; the rest of its interface."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from ddp_rig import wrap
from elastic_rig import Net, Scripted, agreeing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

pytestmark = [pytest.mark.needs_native, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"min_ranks": 0}, ValueError, "min_ranks=0"),
        ({"min_ranks": 1.5}, TypeError, "min_ranks=1.5"),
        ({"min_ranks": True}, TypeError, "min_ranks=True"),
        ({"split_brain": "yes"}, ValueError, "split_brain='yes'"),
        ({"split_brain": True}, ValueError, "split_brain=True"),
        ({"quorum_wait": -1}, ValueError, "quorum_wait"),
        ({"join": 1}, TypeError, "join=1"),
        ({"join": True}, ValueError, "join=True needs peers="),
        ({"state": [nn.Linear(1, 1)]}, ValueError, "state= needs peers="),
        ({"peers": "file"}, ValueError, "peers= needs state="),
        ({"peers": 3, "state": [nn.Linear(1, 1)]}, TypeError, "peers=3"),
        (
            {"peers": "pycomm://a,b"},
            ValueError,
            "peers='pycomm://a,b' is not allowed: use pycomm://",
        ),
        ({"peers": "pycomm://a:1,b:2"}, ValueError, "one port for all"),
        ({"peers": "pycomm://a:0"}, ValueError, "is not allowed"),
        ({"peers": "pycomm://a:65536"}, ValueError, "is not allowed"),
        ({"peers": "pycomm://a,,b:29600"}, ValueError, "is not allowed"),
        ({"peers": "pycomm://fd77::10:29600"}, ValueError, "is not allowed"),
        ({"peers": "pycomm://a:29600/job"}, ValueError, "is not allowed"),
        ({"peers": "pycomm://:29600"}, ValueError, "is not allowed"),
        ({"peers": "file", "state": [3]}, TypeError, "an object of int, which has no state_dict"),
        ({"peers": "file", "state": nn.Linear(1, 1)}, TypeError, "not a list"),
        ({"join_pause": -1}, ValueError, "join_pause"),
        ({"join_pause": None}, ValueError, "join_pause=None needs peers="),
        ({"join_wait": "1"}, ValueError, "join_wait"),
        ({"global_batch": 4}, TypeError, "global_batch"),
    ],
)
def test_wrong_settings_are_refused(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    import pycomm

    with pytest.raises(error, match=text):
        pycomm.Elastic(**settings)


def test_settings() -> None:
    import pycomm

    settings = pycomm.Elastic(min_ranks=2, split_brain="accept", quorum_wait=3)
    assert (settings.min_ranks, settings.split_brain, settings.quorum_wait) == (2, "accept", 3.0)
    assert settings == pycomm.Elastic(min_ranks=2, split_brain="accept", quorum_wait=3.0)


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("pycomm://alpha,beta:29600", (("alpha", "beta"), 29600)),
        ("pycomm://alpha , beta.example:1", (("alpha", "beta.example"), 1)),
        ("pycomm://10.0.0.1,[fd77::10]:65535", (("10.0.0.1", "fd77::10"), 65535)),
        ("run/peers", None),
        ("pycomm:/file", None),
    ],
)
def test_addresses_and_files_of_peers(text: str, port: Any) -> None:
    from pycomm.ddp.peers import peers_port

    assert peers_port(text) == port


def test_the_variable_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for an argument that is not there, and is checked as that is."""
    import pycomm

    state = [nn.Linear(1, 1)]
    monkeypatch.setenv("PYCOMM_PEERS", "pycomm://alpha,beta:29600")
    assert pycomm.Elastic(state=state).peers == "pycomm://alpha,beta:29600"
    assert pycomm.Elastic(state=state).peers_port == "pycomm://alpha,beta:29600"
    assert pycomm.Elastic(state=state, peers="file").peers == os.path.abspath("file")
    assert pycomm.Elastic(state=state, peers="file").peers_port is None
    with pytest.raises(ValueError, match="peers= needs state="):
        pycomm.Elastic()
    monkeypatch.setenv("PYCOMM_PEERS", "pycomm://alpha")
    with pytest.raises(ValueError, match="peers='pycomm://alpha' is not allowed"):
        pycomm.Elastic(state=state)
    monkeypatch.setenv("PYCOMM_PEERS", "")
    assert pycomm.Elastic().peers is None


def test_the_file_behind_a_link_is_where_the_kernel_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of a link to a folder is the folder's, not the link's."""
    import pycomm

    (tmp_path / "shared" / "run").mkdir(parents=True)
    (tmp_path / "shared" / "peers").touch()
    (tmp_path / "link").symlink_to(tmp_path / "shared" / "run")
    monkeypatch.chdir(tmp_path)
    for named in ("link/../peers", tmp_path / "link" / ".." / "peers"):
        found = pycomm.Elastic(state=[nn.Linear(1, 1)], peers=named).peers
        assert os.path.isabs(found)
        assert os.path.samefile(found, tmp_path / "shared" / "peers")


def test_a_port_that_would_not_be_found_is_refused() -> None:
    from pycomm.ddp.joining import port_trouble

    peers, busy = "pycomm://a,b:1", "EADDRINUSE"
    assert "no rank runs on one of these hosts" in port_trouble(peers, [("a", ()), ("b", ())])
    assert port_trouble(peers, [("a", [("10.0.0.1:1", "")]), ("c", ())]) == ""
    others = [("a", [("10.0.0.1:1", busy)]), ("a", [("10.0.0.1:1", "")])]
    assert port_trouble(peers, others) == ""
    taken = [*others, ("b", [("10.0.0.2:1", ""), ("127.0.0.1:1", busy)])]
    assert "rank 2 cannot listen at 127.0.0.1:1" in port_trouble(peers, taken)
    # The address of one host says nothing of another one's.
    alike = [("a", [("127.0.0.1:1", "")]), ("b", [("127.0.0.1:1", busy)])]
    assert "rank 1 cannot listen at 127.0.0.1:1" in port_trouble(peers, alike)


def refusals(rank: int, world_size: int) -> None:
    import pycomm
    from pycomm.errors import UnsupportedError

    elastic = pycomm.Elastic()

    def refused(text: str, make: Any, error: type[Exception] = UnsupportedError) -> None:
        with pytest.raises(error, match=text):
            make()

    refused("not a pycomm.Elastic", lambda: wrap(Net(), elastic=True), TypeError)
    joined = pycomm.Elastic(peers="file", state=[nn.Linear(1, 1)])
    refused("static_graph=True", lambda: wrap(Net(), elastic=joined, static_graph=True))
    joins = pycomm.Elastic(peers="file", state=[nn.Linear(1, 1)], join=True)
    refused("the process group has 2 ranks", lambda: wrap(Net(), elastic=joins), ValueError)
    refused(
        "gradient_as_bucket_view=True",
        lambda: wrap(Net(), elastic=elastic, gradient_as_bucket_view=True),
    )
    refused("sync_every=2", lambda: wrap(Net(), elastic=elastic, sync_every=2))

    class OfTorch(nn.SyncBatchNorm):
        pass

    class Ours(pycomm.SyncBatchNorm):
        pass

    for layer in (nn.SyncBatchNorm(3), pycomm.SyncBatchNorm(3), OfTorch(3), Ours(3)):
        net = nn.Sequential(nn.Linear(3, 3), layer)
        refused(r"SyncBatchNorm \('1'\)", lambda net=net: wrap(net, elastic=elastic))
    refused("'weight' on meta", lambda: wrap(nn.Linear(3, 3, device="meta"), elastic=elastic))
    refused("min_ranks=3", lambda: wrap(Net(), elastic=pycomm.Elastic(min_ranks=3)), ValueError)
    refused(
        "option 'elastic' is Elastic",
        lambda: wrap(Net(), elastic=pycomm.Elastic(min_ranks=1 + rank)),
        pycomm.errors.ConfigMismatchError,
    )
    torch._dynamo.config.optimize_ddp = "python_reducer"
    refused("elastic=", lambda: wrap(Net(), elastic=elastic))
    torch._dynamo.config.optimize_ddp = True

    with agreeing(lambda group: Scripted(group, lambda step: 0)):
        model = wrap(Net(), elastic=elastic)
        weighed = wrap(Net(), elastic=elastic, weight="samples")
    refused("a second elastic wrapper", lambda: wrap(Net(), elastic=joined))
    refused("a comm hook", lambda: model.register_comm_hook(None, default_hooks.allreduce_hook))
    builtin = torch.distributed.BuiltinCommHookType.FP16_COMPRESS
    refused("a comm hook", lambda: model._register_builtin_comm_hook(builtin))
    refused("buffer comm hook", lambda: model._register_buffer_comm_hook(None, print))
    refused("join", model.join)
    refused("copy or a pickle", lambda: copy.deepcopy(model))
    group = torch.distributed.group.WORLD
    refused("another process group", lambda: model._update_process_group(group))
    assert weighed.step_log is not None
    with model.join(enable=False):
        pass
    assert wrap(Net()).elastic is None
    assert (model.elastic.rank, model.elastic.size) == (rank, world_size)
    assert model.elastic.members == tuple(range(world_size))
    assert model.elastic.leader == (rank == 0)
    assert model.elastic.step == 0
    assert repr(model.elastic) == f"ElasticGroup(rank={rank}, members=(0, 1), step=0)"
    assert not model.gradient_as_bucket_view
    assert wrap(Net()).gradient_as_bucket_view


def refuses_call_sites(rank: int, world_size: int, where: str) -> None:
    import pycomm
    from pycomm.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match=rf"{where}=True does not go with elastic="):
        wrap(Net(), elastic=pycomm.Elastic())


def refuses_changing_ranks(rank: int, world_size: int, store: str) -> None:
    import torch.distributed as dist

    import pycomm

    dist.init_process_group(
        "pycomm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        pg_options=pycomm.Reconfigurable(),
    )
    pycomm.reconfigure(1, [pycomm.reconfigure_handle()])
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    with pytest.raises(
        pycomm.errors.UnsupportedError,
        match="a default group that can be reconfigured does not go with elastic=",
    ):
        wrap(Net(), elastic=pycomm.Elastic())
    assert len(groups) == before


def test_a_default_group_that_can_be_reconfigured_is_refused(tmp_path: Path) -> None:
    ranks.run_ranks(
        1,
        refuses_changing_ranks,
        args=(str(tmp_path / "store"),),
        init="none",
        timeout_s=60,
        preload=ranks.TORCH_DDP,
    ).check()


def test_call_sites_are_refused() -> None:
    options = {"check_call_sites": True}
    ranks.run_ranks(
        2,
        refuses_call_sites,
        args=("Options.check_call_sites",),
        pg_options=options,
        timeout_s=60,
        preload=ranks.TORCH_DDP,
    )
    ranks.run_ranks(
        2,
        refuses_call_sites,
        args=("PYCOMM_CHECK_CALL_SITES",),
        env={"PYCOMM_CHECK_CALL_SITES": "1"},
        timeout_s=60,
        preload=ranks.TORCH_DDP,
    )


def test_what_does_not_go_with_it_is_refused() -> None:
    results = ranks.run_ranks(2, refusals, timeout_s=100, preload=ranks.TORCH_DDP)
    warnings = [result.stderr.count("The process group does not") for result in results]
    assert warnings == [1, 0]
