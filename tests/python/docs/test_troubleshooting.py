"""docs/troubleshooting.md shows what users see: each failure is made to happen again."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType

import pytest
from documents import ROOT, read

pytestmark = [pytest.mark.needs_native, pytest.mark.faults, pytest.mark.ci]


def transcripts() -> ModuleType:
    folder = str(ROOT / "tools")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("transcripts")


SCENARIOS = ["killed", "late", "mismatch", "interface", "world_size", "second_job"]


def shape(line: str) -> tuple[object, ...]:
    """Class, code, keys and hint of an error; which rank saw it first, and numbers, are chance."""
    line = " ".join(line.split())
    found = re.search(r"pycomm\.errors\.(\w+): (.*) \[(code=.*?)\] Try: (.*)", line)
    assert found, line
    pairs = re.sub(r'"[^"]*"', "TEXT", found[3])
    keys = [pair.split("=")[0] for pair in pairs.split()]
    code = pairs.split()[0]
    words = re.sub(r"\d+", "N", found[4])
    words = re.sub(r"\[rank\d+\]:?$", "", words).strip()
    # How far it had come is chance where a process dies, and so whether there is `bytes`.
    return found[1], code, [key for key in keys if key not in ("cause", "bytes")], words


def errors_in(block: str) -> list[str]:
    text = " ".join(block.strip().removeprefix("```text").removesuffix("```").split())
    return [
        part
        for part in re.split(r"(?=(?:\[rank\d+\]: )?\bpycomm\.errors\.)", text)
        if "[code=" in part
    ]


def test_every_scenario_is_tested() -> None:
    assert list(transcripts().SCENARIOS) == SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.ci
def test_the_transcript_is_what_happens(name: str) -> None:
    tool = transcripts()
    document = read("docs/troubleshooting.md")
    made = tool.blocks(name, tool.play(name))
    documented = errors_in(tool.marked(document, name)[2])
    happened = errors_in(made[name])
    assert sorted(map(shape, happened), key=str) == sorted(map(shape, documented), key=str)
    for marker, body in made.items():
        if marker.endswith("_trace"):
            kinds = [re.findall(r"^  (\w[\w ]*): ", text, re.M) for text in (body, document)]
            # Which rank was late by a millisecond in the operations before is chance.
            assert kinds[0] and set(kinds[0]) - {"late"} <= set(kinds[1])
