"""What each rule of the analysis is good for: `python benchmarks/rules_off.py --rules views,out`.

Switches the rules of `fusekit.forward.effects.RULES` off, one after another. For each it plans every module
of `tests/adversarial`, fuses where the plan is another one than with all rules, and compares values with
the unfused module. It prints what the rule says, how many of the modules are then fused otherwise, how
many of those compute something else, the one of them with the shortest text, and whether the module that
`tests/forward/effects/test_rules.py` has for the rule does: the trace of most others takes the harmful way,
and tells. Where `--seconds` are over, the figures are of the modules that were reached, in an order drawn
from `--seed`.
"""

import argparse
import contextlib
import importlib
import inspect
import os
import platform
import random
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import fusekit as fk
from fusekit.forward.effects import RULES, switched_off
from tests.adversarial.cases import Case, check_values
from tests.forward.effects.test_rules import needed

ADVERSARIAL = Path(__file__).parents[1] / "tests" / "adversarial"


def modules() -> list[tuple[str, Case]]:
    """(file::module, case) of all of `tests/adversarial`."""
    found = []
    sys.path.insert(0, str(ADVERSARIAL))
    for path in sorted(ADVERSARIAL.glob("test_*.py")):
        cases = getattr(importlib.import_module(f"tests.adversarial.{path.stem}"), "cases", [])
        found += [(f"{path.stem}::{case}", case) for case in cases]
    return found


def planned(case: Case) -> list[tuple]:
    """What fusing would write: the edits of each site."""
    with contextlib.redirect_stdout(None):  # some print
        sites = fk.plan(case.module()).sites
    return [(site.name, site.fusion, site.parts, site.match.edits) for site in sites]


def differs(case: Case) -> bool:
    """Whether the module, fused, computes something else."""
    try:
        with contextlib.redirect_stdout(None):
            check_values(case)
    except AssertionError:
        return True
    return False


def length(case: Case) -> int:
    try:
        return len(inspect.getsource(case.build))
    except (OSError, TypeError):
        return sys.maxsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rules", default=",".join(RULES), help="separated by commas")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each rule")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = modules()
    random.Random(options.seed).shuffle(cases)
    whole = {name: planned(case) for name, case in cases}
    wrong = [name for name, case in cases if differs(case)]
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {len(cases)} modules")
    print(f"with all rules {len(wrong)} compute something else {' '.join(wrong)}\n")
    print(
        "| rule | what it says | fused otherwise | compute something else | the shortest | its own module |"
    )
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for rule in options.rules.split(","):
        began, tried, others = time.monotonic(), 0, []
        found: list[tuple[int, str]] = []
        with switched_off(rule), contextlib.suppress(TimeoutError):
            own = f"{needed[rule]} {'too' if differs(needed[rule]) else 'does not'}"
            for name, case in cases:
                if time.monotonic() - began > options.seconds:
                    raise TimeoutError
                tried += 1
                if planned(case) != whole[name]:
                    others.append(name)
                    if differs(case):
                        found.append((length(case), name))
        some = "" if tried == len(cases) else f" of {tried}"
        shortest = min(found)[1] if found else "none"
        counts = f"{len(others)}{some} | {len(found)}{some}"
        print(f"| {rule} | {RULES[rule]} | {counts} | {shortest} | {own} |", flush=True)


if __name__ == "__main__":
    main()
