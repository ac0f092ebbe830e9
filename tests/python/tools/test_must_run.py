"""TEST_MUST_RUN=1: skips of three folders are failures, and those of others are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import RIG

pytestmark = pytest.mark.ci

CONFTEST = f"""
import sys
sys.path.insert(0, {str(RIG)!r})
import must_run
def pytest_configure(config):
    if must_run.wanted():
        config.pluginmanager.register(must_run)
"""

SUITE = """
import pytest

@pytest.fixture
def missing():
    pytest.skip("openssl is not installed")

def test_fixture(missing): pass
@pytest.mark.skipif(True, reason="needs root")
def test_mark(): pass
def test_body(): pytest.skip("no unshare")
def test_device(): pytest.skip("this torch has real CUDA devices")
def test_limit(): pytest.skip("no control group with a memory limit can be made here")
@pytest.mark.xfail
def test_known(): assert False
def test_passes(): pass
"""


@pytest.mark.parametrize(
    ("folder", "value", "says"),
    [
        ("security", "1", "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors"),
        ("elastic", "1", "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors"),
        ("security", "", "1 passed, 5 skipped, 1 xfailed"),
        ("faults", "1", "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors"),
        ("collectives", "1", "1 passed, 5 skipped, 1 xfailed"),
    ],
)
def test_a_skip_is_a_failure(tmp_path: Path, folder: str, value: str, says: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "test_suite.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TEST_MUST_RUN": value, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )
    assert says in done.stdout.splitlines()[-1], done.stdout
    for reason in ("openssl is not installed", "needs root", "no unshare"):
        line = f"TEST_MUST_RUN is set, and the test was skipped. Skipped: {reason}"
        assert (line in done.stdout) == (folder != "collectives" and value == "1"), done.stdout


def test_the_suite_has_the_plugin() -> None:
    """A skip of a real test of that folder: without `openssl` on the path."""
    root = RIG.parents[1]
    named = "tests/python/security/test_second_implementation.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--ring=all", named, "-k", "place"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TEST_MUST_RUN": "1", "PATH": "/nowhere"},
        check=False,
    )
    assert done.stdout.splitlines()[-1].startswith("2 failed"), done.stdout
    assert "was skipped. Skipped: openssl is not installed" in done.stdout
