"""README and docs/ say what is so: their examples run, their tables and figures are the code's."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from documents import ROOT, blocks, code, read, run_by_torchrun, table

import pycomm
from pycomm import _torch_range, errors, service
from pycomm._settings import SETTINGS, WIRE_DTYPES
from pycomm.ddp.ddp_options import ONLY
from pycomm.doctor.splits import FP16_NBYTES, FP32_NBYTES, INT8_NBYTES, ddp_nbytes, wire_seconds
from pycomm.integrations import torchrec

DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


def tool(name: str, folder: str = "tools") -> ModuleType:
    path = str(ROOT / folder)
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(name)


def mutations(program: str) -> list[Any]:
    return list(tool(program, "tests/cpp/proof/programs").MUTATIONS)


# README


def readme_example() -> str:
    (example,) = blocks(read("README.md"), "python")
    return example


@pytest.mark.needs_native
def test_the_readmes_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(readme_example())
    lines = "".join(blocks(read("README.md"), "bash")).splitlines()
    (documented,) = (shlex.split(line)[1:] for line in lines if " torchrun " in line)
    done = run_by_torchrun(tmp_path, *documented[1:])
    losses = dict(re.findall(r"rank (\d) of 2: loss (\d+\.\d{6})", done.stdout))
    assert set(losses) == {"0", "1"}, done.stdout
    assert losses["0"] == losses["1"] and 0 < float(losses["0"]) < 0.1
    assert "pycomm INFO: 2 ranks over shared memory, and Unix sockets" in done.stderr


def test_the_readme_is_short_and_shows_its_commands() -> None:
    readme = read("README.md")
    assert len(readme.splitlines()) <= 90
    assert len(readme.split()) <= 1150
    assert all(len(line) <= (450 if line[:1] == "|" else 400) for line in readme.splitlines())
    assert len(readme_example().splitlines()) <= 20
    assert "Linux" in readme.partition(". ")[0]
    lines = [shlex.split(line) for line in "".join(blocks(readme, "bash")).splitlines()]
    words = [[word for word in line if "=" not in word.partition("-")[0]] for line in lines]
    assert [line[0] for line in words] == [
        *("make", "source", "torchrun", "ssh", "ssh", "python", "python")
    ]
    (diff,) = blocks(readme, "diff")
    removed, added, *wrapper = diff.splitlines()
    assert removed[0] == "-" and added == "+" + removed[1:].replace("gloo", "pycomm")
    assert re.sub("^\\+", "", added) in readme_example()
    assert "DistributedDataParallel" in readme_example() and "DistributedDataParallel" in wrapper[0]


def published(path: str, command: str) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Microseconds of each backend, and how many times as long as pycomm it took, by ranks and
    bytes, in what a command of benchmarks/published.py printed."""
    _, _, printed = read(path).partition(f"\n$ python {command}")
    assert printed, f"{path} has no output of {command}"
    rows = re.findall(
        r"^(\S+) +(\d+) +(\d+) +\d+ +\w+ +\w+ +([\d.]+) (.*)$",
        printed.partition("\n$ python ")[0],
        re.M,
    )
    ratios = (re.findall(r" (\d+\.\d+) \[.*\] x pycomm$", row[4]) for row in rows)
    return {
        (row[0], int(row[1]), int(row[2])): (float(row[3]), float(*ratio or [1.0]))
        for row, ratio in zip(rows, ratios, strict=True)
    }


LOOPBACK = "benchmarks/results/allreduce-loopback-2026-11-29.txt"
BETWEEN_HOSTS = "benchmarks/results/allreduce-hosts-2026-11-29.txt"
VALUE_NBYTES = (FP32_NBYTES, FP16_NBYTES, INT8_NBYTES)
STEPS = "benchmarks/results/ddp-hosts-2026-11-29.txt"


def test_the_readmes_measurements_are_published() -> None:
    readme = read("README.md")
    said = "[a sixth](docs/measured.md) (2 ranks) to a quarter (4 ranks, 2 cores) of gloo's time"
    assert said in readme
    found = published(LOOPBACK, "benchmarks/allreduce.py --backends pycomm,pycomm:arena,")
    two, four = (found["gloo", ranks, 25 << 20][1] for ranks in (2, 4))
    assert abs(two / 6 - 1) < 0.1 and abs(four / 4 - 1) < 0.1
    found = published(BETWEEN_HOSTS, "benchmarks/switch.py --hosts 0,0,1,1 ")
    times = f"With 2 hosts of 2 ranks gloo takes {found['gloo', 4, 25 << 20][1]} ["
    assert times in read("docs/measured.md")
    words = (
        r"takes \[(\S+) s\]\(\S+\), over gloo (\S+) \(its fp16 hook: (\S+)\): "
        r"(\d+) % more samples per second than one alone"
    )
    (step,) = re.findall(words, readme)
    seconds = tool("step_bars").steps(read(STEPS))
    ways = ("pycomm#int8", "gloo@4", "gloo@4#fp16")
    assert list(step[:3]) == [f"{seconds[way]:.3f}" for way in ways]
    more = f"{(2 * seconds['no_sync'] / seconds['pycomm#int8'] - 1) * 100:.0f}"
    assert step[3] == more
    (added,) = re.findall(r"a sync adds \(here (\S+) s\)", readme)
    assert added == f"{seconds['pycomm#int8'] - seconds['no_sync']:.2f}"
    page = read("docs/several-machines.md")
    assert f"in int8 added {added} s to a step of {seconds['no_sync']:.3f} s" in page
    assert f"did {more} % more samples" in page
    assert f"With fp16, a step of {seconds['pycomm#fp16']:.3f} s" in page
    alike, dealt = (
        re.findall(rf"{before} longer than (\S+) s", page)
        for before in ("step has to take", r"\[batches by speed\]\(\S+\),")
    )
    assert [*alike, *dealt] == [f"{2 * float(added):.2f}", f"{float(added) / 0.8:.2f}"]
    assert read("docs/pictures/step-bars.svg") == tool("step_bars").picture(seconds)


def test_the_readmes_table_of_syncs_is_computed_and_near_what_was_measured() -> None:
    readme = read("README.md")

    def predicted_s(parameters: float, gbit_s: float) -> list[float]:
        """Of two machines."""
        ways = [ddp_nbytes(parameters, 2, value_nbytes=each) for each in VALUE_NBYTES]
        return [wire_seconds(each, gbit_s) for each in (*ways, ddp_nbytes(parameters, 2, every=32))]

    *rows, last = table(
        readme, "parameters", "Gbit/s", "fp32", "fp16", "int8", "LocalSGD, per step of 32"
    )
    for parameters, gbit_s, *said in rows:
        count = float(parameters.split()[0]) * {"M": 1e6, "B": 1e9}[parameters.split()[1]]
        assert said == [f"{each:.2g}" for each in predicted_s(count, float(gbit_s))]
    assert len(rows) == 3
    found = published(BETWEEN_HOSTS, "benchmarks/switch.py --hosts 0,1 --iperf")
    ways = ("pycomm", "pycomm:fp16", "pycomm:int8")
    measured = [found[way, 2, 250_000_000][0] / 1e6 for way in ways]
    assert "within 3 % at 1 Gbit/s" in readme
    for each, computed in zip(measured, predicted_s(62.5e6, 1), strict=False):
        assert abs(each / computed - 1) < 0.03
    # The last row is measured: by bytes alone 10 Gbit/s would take less.
    seconds = tool("step_bars").steps(read(STEPS).partition("--mbit 10000")[2])
    added = [seconds[way] - seconds["no_sync"] for way in ("pycomm", "pycomm#fp16", "pycomm#int8")]
    assert last == ["25 M, measured", "10", *(f"{each:.2f}" for each in added), ""]
    assert all(each > by for each, by in zip(added, predicted_s(25e6, 10), strict=False))
    (gain,) = re.findall(r"at 10 Gbit/s fp16 \(\[(\S+) %\]", readme)
    assert gain == f"{(seconds['gloo@4'] / seconds['pycomm#fp16'] - 1) * 100:.0f}"
    four = published(BETWEEN_HOSTS, "benchmarks/switch.py --hosts 0,1,2,3 ")
    times = four["pycomm:int8", 4, 25 << 20][0] / found["pycomm:int8", 2, 25 << 20][0]
    assert f"In int8 four took {times:.1f} times as long" in read("docs/which-split.md")


def test_the_text_of_the_picture_of_a_step_says_what_was_published() -> None:
    (text,) = re.findall(r"!\[(Seconds per training step.*?)\]", read("docs/ddp.md"))
    seconds = tool("step_bars").steps(read(STEPS))
    said = [float(each) for each in re.findall(r"\d\.\d{3}", text)]
    ways = ("no_sync", "gloo@4", "gloo", "gloo@4#fp16", "pycomm", "pycomm#fp16", "pycomm#int8")
    assert said == [seconds[way] for way in ways]


def test_the_page_installs_the_torch_that_is_tested() -> None:
    assert f"pip install torch=={tool('bootstrap').TORCH} --index-url" in read("docs/install.md")


# Every document


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_name_what_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z0-9_]+):", read("Makefile"), re.M))
    text = read(name)
    shown = "\n".join(blocks(text, "bash") + blocks(text, "sh") + blocks(text, ""))
    for target in re.findall(r"^make ([a-z0-9_]+)", shown, re.M):
        assert target in targets, f"{name}: make {target}"
    for script in re.findall(r"^(?:python3?|torchrun .*) ((?:\w+/)+\w+\.py)", shown, re.M):
        assert (ROOT / script).is_file(), f"{name}: {script}"
    for command in re.findall(r"python -m pycomm (\w+)", text):
        assert (ROOT / "pycomm" / "cli" / f"{command}.py").is_file(), f"{name}: {command}"


def test_every_result_is_quoted_by_a_page() -> None:
    linked = {
        target.rpartition("/")[2]
        for name in DOCUMENTS
        for target in re.findall(r"\]\(([^)\s]*results/[^)\s]+)\)", read(name))
    }
    results = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert results and results - linked == set(), "no page quotes these: link or delete them"


def without_code(text: str) -> str:
    return re.sub(r"^(```+).*?^\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The fragments by which GitHub links to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_what_exists(name: str) -> None:
    """`make site` checks those of its pages. SECURITY.md is not among them."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(read(name))):
        path, _, fragment = link.partition("#")
        if not re.match("[a-z]+:", link):
            target = (ROOT / name).parent / path if path else ROOT / name
            assert target.exists(), f"{name}: {link}"
            assert not fragment or fragment in anchors(target.read_text()), f"{name}: {link}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_blocks_name_what_exists(name: str) -> None:
    for block in blocks(read(name), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pycomm."):
                found: object = pycomm
                for part in ast.unparse(node).split(".")[1:]:
                    assert hasattr(found, part), f"{name}: {ast.unparse(node)}"
                    found = getattr(found, part)


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=str)
def test_pictures_are_shown_and_legible_everywhere(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert root.find("{*}title") is not None and root.find("{*}desc") is not None
    # A ground of their own, in both colour schemes: on a dark page dark text would vanish.
    first_shape = next(iter(root.findall("{*}rect")))
    assert first_shape.get("class") == "paper"
    style = root.find("{*}style")
    assert style is not None and style.text is not None
    assert "prefers-color-scheme: dark" in style.text
    assert any(f"pictures/{picture.name})" in read(name) for name in DOCUMENTS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_pages_that_start_several_ranks_explain_torchruns_banner(name: str) -> None:
    shown = "\n".join(blocks(read(name), "bash") + blocks(read(name), "sh"))
    if re.search(r"^torchrun .*--nproc-per-node[= ](?!1\b)", shown, re.M):
        assert "OMP_NUM_THREADS" in read(name)


def test_the_reference_has_all_public_names_of_torchrecs_integration() -> None:
    page = read("docs/api/integrations.md")
    for name in torchrec.__all__:
        entry = rf"(auto|py:)\w+:: pycomm\.integrations\.torchrec\.{name}(\(|$)"
        assert re.search(entry, page, re.M), name
    # Its base class is TorchRec's, which is not installed where the site is built.
    tree = ast.parse(read("pycomm/integrations/_torchrec_id_map.py"))
    (made,) = (
        node.args
        for each in tree.body
        if isinstance(each, ast.ClassDef) and each.name == "LRUManagedCollisionModule"
        for node in each.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    for one in ast.walk(made):
        if isinstance(one, ast.arg):
            one.annotation = None
    signature = ast.unparse(made).removeprefix("self, ")
    assert f"LRUManagedCollisionModule({signature})" in page


def test_the_wrappers_page_names_the_range_of_torch() -> None:
    oldest, *_, newest = _torch_range.SUPPORTED
    assert f"of torch {oldest} to {newest}" in read("docs/ddp.md")


# Tables


def is_defined(function: str, file: str) -> bool:
    """Whether the function's body, or a class of this name, is in the file: a call is not enough.

    A C++ body begins in the first column, or within its class in a line that has a type before it.
    """
    text = read(file)
    owner, _, name = function.replace("::", ".").rpartition(".")
    if file.endswith(".py"):
        scope = rf"^class {owner}\b" if owner else ""
        bodies = [rf"^ *(def|class) {name}\b"]
    else:
        in_class = rf"^ +(?!return |else )([\w:<>,*&\[\]]+ )+{name}\("
        if re.search(rf"^namespace pycomm::{owner}\b", text, re.M):
            owner = ""
        scope = rf"\b(class|struct) {owner}\b" if owner else ""
        bodies = [in_class] if owner else [in_class, rf"^(class|struct) {name}\b"]
        qualified = f"{owner}::{name}" if owner else name
        if re.search(rf"^(?![\s/#]).*\b{qualified}\(", text, re.M):
            return True
    return bool(re.search(scope, text, re.M)) and any(re.search(b, text, re.M) for b in bodies)


def assert_defined(files: list[str], functions: list[str]) -> None:
    """Each function is defined in one of the files, and each file defines one of them."""
    pairs = {(each, file) for each in functions for file in files if is_defined(each, file)}
    assert {each for each, _ in pairs} == set(functions), files
    assert {file for _, file in pairs} == set(files), functions


def test_contributing_names_functions_that_exist() -> None:
    for _, files, functions in table(
        read("docs/development.md"), "looking for", "file", "function"
    ):
        assert_defined(code(files), code(functions))


def test_the_ways_through_the_code_name_functions_where_they_are() -> None:
    chapter = read("docs/architecture.md").split("## Ways through the code")[1]
    ways = chapter.split("\n## ")[0].split("\n**")[1:]
    assert len(ways) == 10
    for way in ways:
        for where, functions, _ in table(way, "where", "function", "what happens"):
            files = [file if file.startswith("pycomm/") else f"csrc/{file}" for file in code(where)]
            assert_defined(files, code(functions))


SOURCE = r"[\w/]+\.(?:h|cc|cu|py)"


def test_the_design_names_files_where_they_are_and_members_that_exist() -> None:
    page = read("docs/architecture.md")
    rows = [(code(row[0])[0], row[1]) for row in table(page, "folder", "what to read first")]
    for row in table(page, "subfolder", "what is decided there", "what to read first"):
        name = code(row[0])[0]
        rows.append((name if "itself" in row[0] else f"engine/{name}", row[2]))
    for folder, files in rows:
        for file in re.findall(f"`({SOURCE})`", files):
            here = (ROOT / "csrc" / folder / file, ROOT / "csrc" / file)
            assert any(each.is_file() for each in here), f"{folder}: {file}"
    folders = ("csrc", "pycomm", "tests", "tools", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    sources = [path.read_text() for path in paths if path.suffix in (".h", ".cc")]
    for file in re.findall(f"`({SOURCE})`", page):
        assert any(str(path).endswith(f"/{file}") for path in paths), file
    for owner, member in re.findall(r"`(\w+)::(\w+)", page):
        if owner != "ProcessGroup":  # torch's
            scope = rf"\b(class|struct|namespace) (\w+::)*{owner}\b"
            holding = [text for text in sources if re.search(scope, text)]
            assert any(re.search(rf"\b{member}\b", text) for text in holding), (owner, member)


def test_the_page_of_errors_is_the_docstrings() -> None:
    for path, text in tool("doc_tables").errors(ROOT).items():
        assert path.read_text() == text, f"run tools/doc_tables.py: {path} is another text"


def test_the_page_of_errors_is_the_codes() -> None:
    page = read("docs/errors.md")
    sections = re.findall(
        r"^### `(\w+)`\n\n(Class .+)\n\n(\S.+)\n\n\*\*To try:\*\* (\S.+)$", page, re.M
    )
    assert [name for name, *_ in sections] == list(errors.BY_CODE)
    assert len(sections) == len(re.findall(r"^### `", page, re.M)), "one lacks a part"
    for name, classes, _, _ in sections:
        error = errors.BY_CODE[name]
        bases = [dist.DistNetworkError, dist.DistBackendError]
        base = next(base for base in bases if issubclass(error, base))
        pythons = (ConnectionError, MemoryError, NotImplementedError, TimeoutError, ValueError)
        also = {each.__name__ for each in pythons if issubclass(error, each)}
        first, second, *others = code(classes)
        assert (first, second, set(others)) == (error.__name__, base.__name__, also)
    header = ("class", "codes", "also Python's", "what a program can do")
    builtin = {each.__name__: each for each in (ConnectionError, MemoryError, TimeoutError)}
    for family, codes, python, *_ in table(read("docs/errors.md"), *header):
        base = getattr(errors, code(family)[0])
        members = {n: each for n, each in errors.BY_CODE.items() if issubclass(each, base)}
        assert set(code(codes)) == set(members)
        assert re.findall(r"\(#(\w+)\)", codes) == [each.lower() for each in members]
        named = set(code(python))
        assert named & set(builtin) == {
            name
            for name, each in builtin.items()
            if any(issubclass(member, each) for member in members.values())
        }, family
        only = named - set(builtin)  # the codes of a row that says "for"
        assert only <= set(members), family
    header = ("class", "also Python's", "meaning", "what to try")
    without = {code(row[0])[0]: code(row[1]) for row in table(read("docs/errors.md"), *header)}
    assert without == {
        "pycomm.errors.TorchVersionError": [errors.TorchVersionError.__base__.__name__],
        "pycomm.service.RefusedError": [service.RefusedError.__base__.__name__],
    }
    public = {name for name in errors.__all__ if name.endswith("Error")}
    everywhere = set(re.findall(r"\w+Error\b", read("docs/errors.md")))
    assert public - everywhere == {"PycommError", "PycommBackendError", "PycommNetworkError"}


def test_fields_of_a_record_are_those_of_the_native_part() -> None:
    rows = table(read("docs/errors.md"), "key in the text", "in `record`", "meaning")
    native = read("csrc/c10d/record_dict.h")
    in_record = set(re.findall(r'(?:text|number)\("(\w+)"|dict\["(\w+)"\]', native))
    documented = {field for row in rows for field in code(row[1])}
    assert documented == {a or b for a, b in in_record} | {"missing"}  # that is monitored_barrier's
    assert documented == {field.name for field in dataclasses.fields(errors.ErrorRecord)}
    in_text = set(re.findall(r'addPair\(out, "(\w+)"', read("csrc/base/error.cc")))
    assert {key for row in rows for key in code(row[0])} == in_text


def test_the_phases_of_an_error_are_those_of_the_native_part() -> None:
    rows = table(read("docs/errors.md"), "key in the text", "in `record`", "meaning")
    (documented,) = (code(row[2]) for row in rows if row[0] == "`phase`")
    (texts,) = re.findall(r"kTexts = \{(.*?)\}", read("csrc/base/error.h"), re.S)
    assert {*documented, "", "reset"} == set(re.findall(r'"(.*?)"', texts)), "reset: in no error"
    (here,) = re.findall(r'phase: str.*?\n    """(.*?)\."""', read("pycomm/errors.py"), re.S)
    assert set(re.findall(r'"(.*?)"', here)) == set(documented)


def test_the_errors_of_two_machines_exist() -> None:
    rows = table(read("docs/two-machines.md"), "code", "what has happened", "what to do")
    assert {code(row[0])[0] for row in rows} - set(errors.BY_CODE) == {
        "DistNetworkError",
        "DistStoreError",
    }


def test_the_table_of_options_is_the_settings() -> None:
    for path, text in tool("doc_tables").options(ROOT).items():
        assert path.read_text() == text, f"run tools/doc_tables.py: {path} is another text"
    header = ("field", "values", "default", "variable", "also read")
    rows = table(read("docs/options.md"), *header)
    assert [code(row[0])[0] for row in rows] == [setting.field for setting in SETTINGS]
    for row, setting in zip(rows, SETTINGS, strict=True):
        assert code(row[3]) == [setting.variable]
        assert tuple(code(row[4])) == setting.fallbacks
        default = "automatic" if setting.default in ("", (0, 0)) else f"`{setting.default}`"
        assert row[2] == default, setting.field
    # Which must be equal on all ranks is decided where the ranks' digest is made.
    (digested,) = re.findall(r"config_text = (.*?);", read("csrc/bindings/backend.cc"), re.S)
    compared = re.findall(r"(\w+)=", digested)
    said = re.search(r"\*\*The same on all ranks:\*\* (.*?)\. Ranks", read("docs/options.md"), re.S)
    assert said is not None
    assert code(said[1]) == compared
    assert {one.field for one in SETTINGS if one.same_on_all_ranks} == set(compared)


def test_the_table_of_integrations_is_what_was_recorded() -> None:
    for path, text in tool("doc_tables").integrations(ROOT).items():
        assert path.read_text() == text, f"run tools/doc_tables.py: {path} is another text"
    record = json.loads(read("docs/integrations.json"))
    # And the record is of the tests that there are.
    recorded: dict[str, set[object]] = {}
    for node, row in record["rows"].items():
        name, _, case = node.partition("[")
        is_case = bool(case)
        what = row["what"].partition(" [")[0]
        recorded.setdefault(name, set()).add((row["library"], what, is_case))
        assert not is_case or row["what"].endswith(f"[{case}"), node
    assert recorded == {name: {marked} for name, marked in integration_tests().items()}
    outcomes = {node: row["outcome"] for node, row in record["rows"].items()}
    assert [node for node, outcome in outcomes.items() if outcome == "failed"] == []


def integration_tests() -> dict[str, tuple[str, str, bool]]:
    """Those that a record has: library, what is shown, and whether the test comes in cases."""
    found = {}
    for path in sorted((ROOT / "tests" / "integrations").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = {
                    ast.unparse(mark.func): mark.args
                    for mark in node.decorator_list
                    if isinstance(mark, ast.Call)
                }
                if shown := marks.get("pytest.mark.integration"):
                    library, what = map(ast.literal_eval, shown)
                    in_cases = "pytest.mark.parametrize" in marks
                    name = f"{path.relative_to(ROOT)}::{node.name}"
                    found[name] = (library, what.partition(" [")[0], in_cases)
    return found


def test_the_wrappers_limits_are_those_of_the_code() -> None:
    rows = {row[0]: row[1] for row in table(read("docs/ddp.md"), "option", "here")}
    (refused,) = (option for option, text in rows.items() if "UnsupportedError" in text)
    assert set(code(refused)) == set(ONLY)
    names = {word.strip('"') for word in code(rows["`wire_dtype`"])}
    assert names == {"group", "None", *WIRE_DTYPES, "float16", "bfloat16"}


def cpp_tests() -> set[str]:
    """As file::Suite.Name."""
    return {
        f"{path.name}::{suite}.{name}"
        for path in (ROOT / "tests" / "cpp").rglob("*.cc")
        for suite, name in re.findall(
            r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", path.read_text(), re.MULTILINE
        )
    }


def python_tests() -> set[str]:
    """As file::name."""
    return {
        f"{path.name}::{name}"
        for path in (ROOT / "tests" / "python").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }


def test_attacks_name_tests_that_exist() -> None:
    native, python = {test.partition("::")[2] for test in cpp_tests()}, python_tests()
    header = ("what was tried", "what happens", "test")
    _, *sections = re.split(r"^## ", read("docs/evidence/attacks.md"), flags=re.MULTILINE)
    rows = [row for text in sections if "\n|" in text for row in table(text, *header)]
    assert len(rows) >= 40
    for tried, happens, tests in rows:
        assert tried and happens and code(tests), tried
        assert set(code(tests)) <= native | python, set(code(tests)) - native - python


def test_promises_of_deleted_tests_name_the_tests_that_prove_them() -> None:
    noticed_by = {each.name: set(each.tests.split(":")) for each in mutations("core_mutations")}
    seeds_notice = {each.name for each in mutations("mutations")}
    there = cpp_tests() | python_tests()
    page = read("docs/evidence/deleted-tests.md")
    _, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    count = 0
    for section in sections:
        gone = re.findall(r"tests/[\w/]+\.\w+", section.partition("\n")[0])
        assert gone and not any((ROOT / path).exists() for path in gone), gone
        for promise, proof, broken in table(section, "promise", "proved by", "mutation"):
            count += 1
            tests = set(code(proof))
            assert tests or proof.startswith(("nowhere", "gone")), promise
            assert tests <= there, tests - there
            for name in code(broken):
                noticing = noticed_by.get(name, set()) & {test.partition("::")[2] for test in tests}
                assert noticing or name in seeds_notice, f"{promise}: {name}"
    assert count >= 60


# Figures


def lines_of(folder: str) -> int:
    """Of the sources there, but for a library's."""
    paths = [path for path in (ROOT / folder).rglob("*.*") if "third_party" not in path.parts]
    sources = [path for path in paths if path.suffix in (".cc", ".h", ".cu", ".py", ".pyi")]
    return sum(len(path.read_text().splitlines()) for path in sources)


def test_the_map_has_as_many_lines_as_the_folders() -> None:
    page = read("CONTRIBUTING.md")
    words = r"(\S+) lines of C\+\+ in (\S+), (\S+) of Python in (\S+) and (\S+) of both in (\S+),"
    (said,) = re.findall(words, page)
    rows = [*zip(said[1::2], said[::2], strict=True)]
    rows += [(row[1], row[2]) for row in table(page, "step", "folder", "lines", "read first")]
    assert len(rows) == 14
    for folders, figure in rows:
        counted = sum(map(lines_of, code(folders)))
        assert abs(int(figure.replace(",", "")) / counted - 1) < 0.15, f"{folders}: {counted}"


def test_the_hours_of_the_last_rings_are_their_steps_guesses() -> None:
    nightly = tool("nightly")
    rings = (nightly.NIGHTLY, nightly.RELEASE)
    hours = [sum(step.minutes for step in steps) / 60 for steps in rings]
    guesses = r"(\S+) hours (?:more )?by its steps' guesses"
    briefly = r"`make nightly` \((\d+) hours\) and `make release` \((\d+) more"
    said = [re.findall(guesses, read("docs/development.md"))]
    said += map(list, re.findall(briefly, read("CONTRIBUTING.md")))
    assert len(said) == 2
    for each in said:
        for one, guess in zip(each, hours, strict=True):
            assert abs(float(one) - guess) <= 0.5, (each, hours)


def test_status_is_short_and_counts_what_there_is() -> None:
    page = read("docs/status.md")
    assert len(page.split()) <= 1000
    targets = len(tool("fuzz").TARGETS)
    assert f"11 of {targets} targets" in page
    assert f"11 of {targets} ran to their end" in read("docs/evidence/attacks.md")
    words = r"Of (\d+) mutations of the driver .*?, of (\d+) of joining .*?, of (\d+) of the core"
    lists = ("driver_mutations", "joining_mutations", "core_mutations")
    counts = tuple(str(len(mutations(each))) for each in lists)
    assert re.findall(words, " ".join(page.split())) == [counts]


FIGURES = [
    # document, what it says, the folder that decides, what stands there
    ("architecture", "cache of 64", "engine", "kKept = 64"),
    ("architecture", "polls for 50 µs", "base", "kRoundTrip{50}"),
    ("architecture", "parked for 1 ms", "engine", "kGrace{1}"),
    ("architecture", "Ctrl-C every 100 ms", "c10d", "kEveryMs = 100"),
    ("architecture", "waited 2 ms", "engine", "waiting_after_ms = 2"),
    ("architecture", "after 200 ms", "engine", "kFirstRound(200)"),
    ("architecture", "(up to 256)", "engine", "kAskEveryoneMaxSize = 256"),
    ("architecture", "first 64 KiB of an edge", "engine", "eager_nbytes = 64 << 10"),
    ("architecture", "pool of 1 MiB", "engine", "eager_pool_nbytes = 16 * ((64 << 10)"),
    ("architecture", "4 MiB ahead", "engine", "window_nbytes = 4 << 20"),
    ("architecture", "For 5 ms it", "engine", "merge_ms = 5"),
    ("architecture", "has 40 ms to arrive", "engine", "kGoodbyeWithin = 2 * kGoodbye"),
    ("architecture", "every 500 ms", "engine", "kHeartbeatsWithin = 6"),
    ("architecture", "3 s of silence", "base", "kOneTryMs = 3000"),
    ("architecture", "at most 1 MiB", "schedule", "kEdgeRoomNbytes / 2"),
    ("architecture", "counts on 2 MiB", "schedule", "kEdgeRoomNbytes = 2 << 20"),
    ("architecture", "up to 4 frames", "schedule", "pipeline_frames = 4"),
    ("architecture", "64-byte header", "transport", "sizeof(FrameHeader) == 64"),
    ("architecture", "of 3 to 64 ranks", "schedule", "kMaxDirectSize = 64"),
    ("options", "up to 32 KiB", "schedule", "kSmallAllReduceNbytes = 32 << 10"),
    ("options", "3 to 64", "schedule", "key.size > 2 && key.size <= kMaxDirectSize"),
    ("errors", "silent for 3 s", "engine", "kDeadAfterMs = kOneTryMs"),
    ("errors", "stays for up to 2 s", "base", "kOneStepMs = 2000"),
    ("errors", "for 0.3 s the store", "base", "kNearlyDoneMs = 300"),
    ("elastic", "up to 2 s later", "base", "kOneStepMs = 2000"),
    ("elastic", "tries every 0.5 s", "base", "kLookAgainMs = 500"),
    ("elastic", "closed when they are idle for 10 s", "engine", "kUnusedFor{10}"),
    ("elastic", "more than 8 members", "engine", "kShortestAskMs = kOneStepMs / 8"),
    (
        "troubleshooting",
        "has a different secret (",
        "transport",
        '" has a different secret (key id "',
    ),
    (
        "troubleshooting",
        "every host; on a host that has the file, run for each HOST that needs it: ssh HOST mkdir",
        "transport",
        '"on a host that has the file, run for each HOST that needs it: ssh HOST mkdir',
    ),
    (
        "troubleshooting",
        "Try: copy one secret file to every host; on",
        "transport",
        '"copy one secret file to every host; "',
    ),
    (
        "troubleshooting",
        "Try: give every rank the same secret file; on",
        "transport",
        '"give every rank the same secret file; "',
    ),
    (
        "troubleshooting",
        'do what follows "Try there", and start it again',
        "transport",
        '"follows \\"Try there\\", and start it again"',
    ),
    (
        "security",
        'do what follows "Try there", and start it again',
        "transport",
        '"follows \\"Try there\\", and start it again"',
    ),
    ("troubleshooting", "has no secret, and", "transport", '" has no secret, and this process'),
    ("troubleshooting", "this process has none", "transport", '"), and this process has none"'),
    ("ddp", "beyond 64 ranks", "schedule", "kMaxDirectSize = 64"),
    ("ddp", "| 9 | what s aims at", "ddp", "kTopAim = 9"),
    ("ddp", "| 0 to 15 |", "ddp", "kTopHighest = 15"),
    ("ddp", "| 0 to 15 |", "ddp", "kTopLowest = 0"),
]


@pytest.mark.parametrize(("name", "said", "folder", "stands"), FIGURES)
def test_figures_are_the_codes(name: str, said: str, folder: str, stands: str) -> None:
    assert said in " ".join(read(f"docs/{name}.md").split())
    files = (ROOT / "csrc" / folder).rglob("*.*")
    assert any(stands in file.read_text() for file in files)
