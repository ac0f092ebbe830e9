"""Tests in several processes, by pytest-xdist: `pytest -n 4`. What `make test` does.

A file's tests run in one process, one after another, so that module fixtures are made once. Files
in BY_TEST are too long for that: their tests are dealt out singly. Long files start first.

A test with the mark `alone` runs while no other test of the session does: it bounds a time by a few
seconds, or it uses up what all processes of a machine share. Those tests come last, in one process.
A lock, not the order, keeps the others out.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

try:
    from xdist.scheduler import LoadScopeScheduling
except ImportError:  # an ordinary pytest: one process
    LoadScopeScheduling = object

LONG = (
    "test_fault_matrix.py",
    "test_wrapper_sequences.py",
    "test_process_ends.py",
    "test_refusals.py",
)
BY_TEST = (*LONG, "test_cuda.py")

_ALONE = "alone"
_FOLDER: pytest.StashKey[tempfile.TemporaryDirectory[str]] = pytest.StashKey()


def runs_alone(item: pytest.Item) -> bool:
    """Whether no other test of this session may run at the same time."""
    return item.get_closest_marker(_ALONE) is not None


class Turns:
    """Lets many tests run at once, or one that runs alone. Processes share the folder.

    A test that enters passes the gate first. A test that runs alone waits in the gate until the
    room is empty, so those that come after it wait, too.
    """

    def __init__(self, folder: Path) -> None:
        self._gate = (folder / "gate").open("w")
        self._room = (folder / "room").open("w")
        self._inside: bool | None = None

    def enter(self, alone: bool) -> None:
        """Waits until this test may run. Does nothing if it may already, after another one."""
        if self._inside is not alone:
            self.leave()
            fcntl.flock(self._gate, fcntl.LOCK_EX)
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(self._gate, fcntl.LOCK_UN)
            self._inside = alone

    def leave(self) -> None:
        """Lets others in."""
        fcntl.flock(self._room, fcntl.LOCK_UN)
        self._inside = None


class Plugin:
    """In each worker: takes turns, and sorts what there is to run as the scheduler deals it out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turns = Turns(folder)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        ranks = {name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: (runs_alone(item), ranks.get(item.path.name, len(ranks))))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = [item.nodeid for item in session.items if runs_alone(item)]
        mine = self._folder / f"{session.config.workerinput['workerid']}.alone"  # type: ignore[attr-defined]
        mine.write_text("\n".join(names))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        alone = runs_alone(item)
        self._turns.enter(alone)
        try:
            return (yield)
        finally:
            if not alone or nextitem is None or not runs_alone(nextitem):
                self._turns.leave()


class Scheduler(LoadScopeScheduling):  # type: ignore[misc,valid-type]
    """Deals out whole files, single tests of BY_TEST, and last those that run alone."""

    folder: Path
    _alone: frozenset[str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        if self._alone is None:  # every worker has written down what it has collected
            lists = [path.read_text() for path in self.folder.glob("*.alone")]
            self._alone = frozenset(name for text in lists for name in text.splitlines())
        if nodeid in self._alone:
            return _ALONE
        file = nodeid.partition("::")[0]
        return nodeid if Path(file).name in BY_TEST else file

    def _reschedule(self, node: Any) -> None:
        """A process that replaces a dead one gets work when it has collected the tests."""
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        # The files of a dead process may have no test left, and a process begins its last test only
        # when it knows the next, or that there is none.
        while (
            self.workqueue
            and not node.shutting_down
            and self._pending_of(self.assigned_work[node]) < 2
        ):
            self._assign_work_unit(node)
        if not self.workqueue:
            super()._reschedule(node)  # which tells it that no more will come

    def remove_node(self, node: Any) -> str | None:
        """A test whose process died has failed: it is not dealt out again with the rest."""
        work = self.assigned_work[node].values()
        crashed = next((name for unit in work for name, done in unit.items() if not done), None)
        for unit in work:
            if crashed in unit:
                unit[crashed] = True
        super().remove_node(node)
        return crashed


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the controller, for each worker before it starts."""
    node.workerinput["turns"] = node.config.stash[_FOLDER].name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    config.option.loadscopereorder = False  # the workers have sorted
    scheduler = Scheduler(config, log)
    scheduler.folder = Path(config.stash[_FOLDER].name)
    return scheduler


def pytest_configure(config: pytest.Config) -> None:
    if folder := getattr(config, "workerinput", {}).get("turns"):
        config.pluginmanager.register(Plugin(Path(folder)), "turns-of-tests")
    else:
        config.stash[_FOLDER] = tempfile.TemporaryDirectory(prefix="pycomm-turns-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_FOLDER, None):
        folder.cleanup()
