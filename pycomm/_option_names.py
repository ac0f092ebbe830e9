"""The names of options and variables, and what an unknown one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pycomm._settings import SETTINGS

_PREFIX = "PYCOMM_"
# setup.py and tools/ read them; left in a shell they do no harm.
_BUILD_VARIABLES = {
    "PYCOMM_BUILD_CUDA",
    "PYCOMM_TORCH",
    "PYCOMM_TORCHES",
    "PYCOMM_UNITY",
    "PYCOMM_UNTESTED_TORCH",
}
FAULT_VARIABLE = "PYCOMM_FAULT"  # of test builds only, so no setting and in no list
# No settings: those are printed, and published to the other ranks. Two to choose from at most.
SECRET_FILE_VARIABLE = "PYCOMM_SECRET_FILE"
SECRET_VARIABLE = "PYCOMM_SECRET"
# Of the part after PYCOMM_: difflib's ratio of names that are one name misspelled.
_NEAR = 0.75
# Names of a secret with two letters exchanged, or another word behind: a job whose secret is not
# found is open to everybody.
_LIKE_SECRET = ("secret", "secert", "sercet", "serect", "scret", "secrt")
# What a setting is called elsewhere.
_OTHER_WORDS = {"tls": "security", "encryption": "security", "nic": "interface"}
# A name of these words alone may be anybody's.
_COMMON_WORDS = {"dir", "file", "size", "mode", "call", "site", "check", "range", "flight"}


def is_misspelled(name: str) -> bool:
    """Whether an unknown variable's name resembles one of pycomm's, or says the same."""
    return _meant_by(name) is not None


def _meant_by(name: str) -> str | None:
    """The variable that is probably meant; None if the name resembles none."""
    stem = _stem(name)
    names = {setting.field: setting.variable for setting in SETTINGS}
    names |= {_stem(variable): variable for variable in variables()}
    if stem in _OTHER_WORDS:
        return names[_OTHER_WORDS[stem]]
    if any(word in stem for word in _LIKE_SECRET):
        return SECRET_FILE_VARIABLE
    said = _words(stem)
    if len(said) == 1 and said <= _COMMON_WORDS:
        return None
    if near := difflib.get_close_matches(stem, names, 1, _NEAR):
        return names[near[0]]
    for known, variable in names.items():
        words = _words(known)
        if said >= words or (said <= words and not said <= _COMMON_WORDS):
            return variable
    return None


def _words(stem: str) -> set[str]:
    return {word.removesuffix("s") for word in stem.split("_") if word}


def variable_error(name: str) -> str:
    """The text about an unknown name. It offers the known one that the name resembles."""
    if meant := _meant_by(name):
        known = [*variables(), SECRET_FILE_VARIABLE, SECRET_VARIABLE]
        return f"{name} is not a variable of pycomm{_offer(meant, known)}"
    return f"{name} is not a variable of pycomm, and has no effect"


def _stem(name: str) -> str:
    return name.removeprefix(_PREFIX).lower()


def unknown_variables(environ: Iterable[str]) -> list[str]:
    """The ``PYCOMM_*`` names in ``environ`` that pycomm does not know, sorted."""
    known = {*variables(), *_BUILD_VARIABLES, FAULT_VARIABLE}
    known |= {SECRET_FILE_VARIABLE, SECRET_VARIABLE}
    return sorted(name for name in environ if name.startswith(_PREFIX) and name not in known)


def variables() -> list[str]:
    """Names of all variables of pycomm's own."""
    return [setting.variable for setting in SETTINGS]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Of an unknown name: the nearest of the known ones, and all of them."""
    known = list(known)
    # Compared in lower case: options and variables are misspelled in case, too.
    lowered = {candidate.lower(): candidate for candidate in known}
    nearest = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.0)
    return _offer(lowered[nearest[0]] if nearest else "", known)


def _offer(meant: str, known: Iterable[str]) -> str:
    hint = f"; did you mean {meant}?" if meant else ""
    return f"{hint} Known: {', '.join(known)}"
