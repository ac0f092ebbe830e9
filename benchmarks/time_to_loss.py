"""Seconds to a loss on slow links, computed from two measurements.

    python benchmarks/time_to_loss_curves.py FOLDER/curves    # again until it prints "done"
    python benchmarks/switch.py --hosts 0,1,2,3 -- time_to_loss_clocks.py FOLDER/clocks --turn 0
    python benchmarks/switch.py ... -- time_to_loss_check.py FOLDER ...  # see its docstring
    python benchmarks/time_to_loss.py FOLDER --svg docs/pictures/time-to-loss.svg

The first two scripts measure: the loss of a small model over steps, and how many seconds a step or
round takes if each method sends what it would for 62.5 and 250 million parameters, between four
hosts. This script multiplies the two. No model of that size was trained, so the product assumes
that a large model needs the same numbers of steps as the small one.

The check trains the small model end to end, on a link that is slow in proportion, and compares the
seconds with the product for the small model. If they differ by more than a tenth, no table is
printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from report import header
from time_to_loss_curves import load
from time_to_loss_picture import picture
from time_to_loss_product import BASE, EVERY, METHODS, SEEDS, curves, seconds_to, target_of
from time_to_loss_tables import (
    ALLOWED,
    check_lines,
    clock_lines,
    curve_lines,
    end_lines,
    exposed_of,
    load_clocks,
    product_lines,
    tuning_lines,
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args(argv)
    found = load(options.folder / "curves")
    clocks = load_clocks(options.folder / "clocks")
    target = target_of(curves(found, BASE))
    lines = [f"# {key}: {value}" for key, value in header("time_to_loss", argv).items()]
    lines += ["", "Tuning, the seed of its own", *tuning_lines(found)]
    lines += ["", f"Curves, mean of {len(SEEDS)} seeds", *curve_lines(found, target)]
    for numel, turns in clocks.items():
        lines += ["", *clock_lines(numel, turns)]
    checked, agree = check_lines(found, clocks, options.folder / "check", target)
    lines += ["", "Check, end to end, for the small model", *checked, ""]
    if agree:
        lines += [*product_lines(found, clocks, target), *end_lines(found, clocks)]
    else:
        lines.append(f"The runs end to end are off by more than {ALLOWED:.0%}: there is no table.")
    print("\n".join(lines))
    if agree and options.svg is not None:
        panels = {}
        for numel, turns in clocks.items():
            exposed = exposed_of(turns)
            panels[f"{numel / 1e6:g} million parameters"] = {
                method.shown: [
                    (seconds_to(EVERY * (number + 1), method, exposed) or 0.0, float(loss))
                    for number, loss in enumerate(curves(found, method.name).mean(0))
                ]
                for method in METHODS
            }
        most = float(curves(found, BASE).mean(0)[1])
        options.svg.write_text(picture(panels, target, most))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
