"""A training with a secret is joined by its holders only, and does not notice the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import rings
from elastic_joining import Plan, start
from elastic_training import SHARED, TCP
from test_joined_trainings import check, joining
from time_bound import assert_within

from pycomm._group import secrets

pytestmark = [
    pytest.mark.ci,
    pytest.mark.needs_native,
    pytest.mark.faults,
    pytest.mark.timeout(200),
]


@pytest.mark.time_bound
@pytest.mark.parametrize("options", rings.first_of([TCP, SHARED]), ids=["tcp", "shm"])
@pytest.mark.parametrize("with_secret", [True, rings.nightly(False)], ids=["closed", "open"])
def test_only_holders_join(with_secret: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """Each other one is refused at once, by an error that names both, and the members go on."""
    files = [tmp_path / "secret", tmp_path / "another"]
    for path in files:
        secrets.generate_file(str(path))
    ids = [secrets.read_file(str(path))[0].key_id for path in files]
    theirs = str(files[0]) if with_secret else "none"
    called = f"the secret of key id {ids[0]}" if with_secret else "no secret"
    strangers = {str(files[1]): f"the secret of key id {ids[1]}"}
    if with_secret:
        strangers["none"] = "no secret"
    plan = Plan(str(tmp_path / "peers"), 2)
    with start(2, plan, options, PYCOMM_SECRET_FILE=theirs) as running:
        running.wait_for_mark(0, "step 10")
        for file, name in strangers.items():
            with start(1, joining(plan), options, PYCOMM_SECRET_FILE=file) as stranger:
                refused = stranger.collect(60)[0].value
            assert refused["error"].is_a("JoinRefusedError"), refused["error"].text
            expected = f"the members have {called}, and this process has {name}"
            assert expected in refused["error"].text, refused["error"].text
            assert_within(refused["after_s"], 5.0)
        with start(1, joining(plan), options, PYCOMM_SECRET_FILE=theirs) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    values = check(results)
    assert values[2]["steps"][0]["members"] == (0, 1, 2)
    assert values[0]["stats"]["epochs"] == 2  # the first, and that with the newcomer
    assert values[0]["stats"]["lost_ranks"] == values[0]["stats"]["redone_steps"] == 0
    for result in results[:2]:
        assert "epoch 2" not in result.stderr, result.describe()  # no line of a failure


def test_a_stranger_that_claims_the_secret_gets_nothing(tmp_path: Path) -> None:
    """The file is changed so that it names the stranger's own secret: TLS refuses it."""
    files = [tmp_path / "secret", tmp_path / "another"]
    for path in files:
        secrets.generate_file(str(path))
    ids = [secrets.read_file(str(path))[0].key_id for path in files]
    plan = Plan(str(tmp_path / "peers"), 2)
    forged = tmp_path / "forged"
    with start(2, plan, TCP, PYCOMM_SECRET_FILE=str(files[0])) as running:
        running.wait_for_mark(0, "step 10")
        forged.write_text((tmp_path / "peers").read_text().replace(ids[0], ids[1]))
        claims = dataclasses.replace(
            joining(plan), peers=str(forged), settings=(("join_wait", 3.0),)
        )
        with start(1, claims, TCP, PYCOMM_SECRET_FILE=str(files[1])) as stranger:
            refused = stranger.collect(60)[0].value["error"]
        with start(1, joining(plan), TCP, PYCOMM_SECRET_FILE=str(files[0])) as newcomer:
            results = [*running.collect(90), *newcomer.collect(90)]
    assert refused.is_a("RendezvousTimeoutError"), refused.text
    assert check(results)[0]["stats"]["epochs"] == 2
