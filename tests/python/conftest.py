"""What every test here has: options, marks, and the promise that no process outlives its test."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

if importlib.util.find_spec("pycomm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import costs
import fault_report
import must_run
import ranks
import rings
import turns
import zygote

from pycomm._native import loader
from pycomm._torch_range import torch_minor

# How long an example takes says nothing: any process may lose its core for half a second.
hypothesis.settings.register_profile(
    "ours", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ours")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-native",
        action="store_true",
        help="fail, not skip, where the extension is not built",
    )
    parser.addoption("--large", action="store_true", help="run tests that need 8 GB of memory")
    parser.addoption(
        "--programs", type=int, default=50, help="how many random programs of collectives run"
    )
    parser.addoption(
        "--trainings", default="40", help="how many random training programs run, or first:last"
    )
    parser.addoption(
        "--elastic-trainings", default="4", help="how many random elastic trainings, or first:last"
    )
    parser.addoption(
        "--callbacks", default="100", help="how many random callback programs run, or first:last"
    )
    parser.addoption("--support-json", help="write what test_support.py has seen to this file")
    parser.addoption("--repeats", type=int, default=2, help="how often repeated tests repeat")
    parser.addoption(
        "--ring",
        help="the rings of tests that run, as test,ci or all; without it test and ci, and "
        "every test that is named with ::",
    )
    parser.addoption(
        "--costs", type=Path, metavar="FILE", help="write the seconds of the cores of each test"
    )
    parser.addoption(
        "--exact-bounds",
        action="store_true",
        help="faults must be noticed as fast as documented: for a machine that does nothing else",
    )


def let_children_have_their_signals() -> None:
    """Children do not inherit that nohup, or a shell's "&", has this process ignore a signal.

    A program that ignores SIGTERM or SIGINT from its start cannot be ended by a test. Where there
    is a handler, even one that does nothing, a new program begins with the default.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    let_children_have_their_signals()
    config.addinivalue_line("markers", "needs_native: needs the built extension")
    config.pluginmanager.register(turns, "turns")
    if must_run.wanted():
        config.pluginmanager.register(must_run, "must-run")
    if path := config.getoption("--costs"):
        config.pluginmanager.register(costs.Plugin(path.absolute()), "costs-of-tests")
    if config.getoption("--exact-bounds"):
        os.environ["TEST_EXACT_BOUNDS"] = "1"  # ranks read it, too


def pytest_report_header(config: pytest.Config) -> str:
    return f"rings: {config.getoption('--ring') or rings.BY_DEFAULT}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    fault_report.write(terminalreporter)


def native_is_built() -> bool:
    """Whether the extension can be found, without loading it."""
    return torch_minor(torch.__version__) in loader.built_for()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:  # the build is none of a test's time: it has a limit of its own
        if "fault_build" in getattr(item, "fixturenames", ()):
            limit = item.get_closest_marker("timeout")
            seconds = limit.args[0] if limit else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)
    given = config.getoption("--ring")
    if given or not any("::" in argument for argument in config.args):
        chosen = rings.read(given or rings.BY_DEFAULT)
        others = [item for item in items if rings.ring_of(item) not in chosen]
        items[:] = [item for item in items if rings.ring_of(item) in chosen]
        config.hook.pytest_deselected(items=others)
    if config.getoption("--require-native"):
        if not native_is_built():
            raise pytest.UsageError(
                "--require-native, and the extension is not built for this torch"
            )
        return
    if not native_is_built():
        skip = pytest.mark.skip(reason="the extension is not built for this torch")
        for item in items:
            if item.get_closest_marker("needs_native") is not None:
                item.add_marker(skip)


def child_processes() -> dict[int, str]:
    """Children by pid, with their command lines, also those not waited for; and forked ranks."""
    zygotes = zygote.zygote_pids()
    parents = {os.getpid(), *zygotes}
    children = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in zygotes:
            continue
        try:
            # "pid (name) state ppid …": the name may hold anything, so look from its end.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in parents:
                command = (folder / "cmdline").read_text(errors="replace")
                children[int(folder.name)] = command.replace("\0", " ")
        except OSError:
            continue  # it has ended meanwhile
    return children


def pytest_unconfigure() -> None:
    zygote.end_zygotes()


_variables_before: dict[str, str] = {}


def own_variables() -> dict[str, str]:
    """The environment but for what pytest and torch's compiler change."""
    free = ("PYTEST_", "TORCHINDUCTOR_")
    return {name: value for name, value in os.environ.items() if not name.startswith(free)}


def pytest_runtest_setup() -> None:
    _variables_before.update(own_variables())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fails a test that leaves a variable: later tests find it, and no zygote serves them."""
    yield
    now, before = own_variables(), dict(_variables_before)
    _variables_before.clear()
    if not before:  # it was skipped before it was set up
        return
    if left := sorted(name for name in now.keys() | before if now.get(name) != before.get(name)):
        for name in left:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in left if name in before})
        pytest.fail(f"the test has left variables changed: {left}")


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    before = child_processes()
    yield
    left = {pid: command for pid, command in child_processes().items() if pid not in before}
    assert not left, f"processes left behind: {left}"


@pytest.fixture(autouse=True)
def no_pycomm_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own settings must not decide a test, except TEST_TRANSPORT and TEST_SECRET.

    That holds also for tests that make groups in this process, as those of the service do.
    """
    for name in list(os.environ):
        if name.startswith(("PYCOMM_", "GLOO_SOCKET", "NCCL_SOCKET")):
            monkeypatch.delenv(name)
    if transport := os.environ.get("TEST_TRANSPORT"):
        monkeypatch.setenv("PYCOMM_TRANSPORT", transport)
    if secret := os.environ.get("TEST_SECRET"):
        monkeypatch.setenv("PYCOMM_SECRET", secret)


@contextlib.contextmanager
def _one_at_a_time(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, name: str
) -> Iterator[Path]:
    """A folder that all processes of this session share; one of them at a time is in the block."""
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # one of several processes: each has its own folder
        shared = shared.parent
    folder = shared / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def fake_cuda(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of tests/rig/fake_cuda, compiled once, by the first process that needs it."""
    import fake_cuda_device

    # Ranks leave files there, too.
    with _one_at_a_time(request, tmp_path_factory, "fake_cuda") as folder:
        library = folder / "libpycomm_cuda.so"
        if not library.exists():
            made = fake_cuda_device.build_or_skip(tmp_path_factory.mktemp("fake_cuda_build"))
            made.rename(library)  # whole, or not there
    return library


@pytest.fixture(scope="session")
def _built_with_fault_points(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The package with fault points, linked once, compiled as far as it is not there yet."""
    if given := os.environ.get("TEST_FAULT_BUILD"):
        return Path(given)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, str(root / "tools" / "fault_build.py")]
    with _one_at_a_time(request, tmp_path_factory, "fault_build") as folder:
        if (folder / "made").exists():
            return root / "build" / "faults" / "pycomm"
        made = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if made.returncode == 0:
            (folder / "made").touch()
    if made.returncode != 0:
        why = f"the build with fault points could not be made\n{made.stdout}{made.stderr}"
        if request.config.getoption("--require-native"):
            pytest.fail(why)
        pytest.skip(why)
    return root / "build" / "faults" / "pycomm"


@pytest.fixture
def fault_build(_built_with_fault_points: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What fault_ranks.use_fault_build() loads in a rank, which fails where no test asked for it.

    The first test that asks may wait for minutes, which do not count for its timeout.
    """
    monkeypatch.setenv("TEST_FAULT_BUILD", str(_built_with_fault_points))
    return _built_with_fault_points


@pytest.fixture
def free_port() -> int:
    return ranks.free_port()


@pytest.fixture
def repeats(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--repeats"))
