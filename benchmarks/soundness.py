"""Whether fusing changes what a forward does: `python benchmarks/soundness.py --programs 20000 --seed 0`.

Runs forwards drawn by hypothesis (`tests/adversarial/programs.py`), as they are and fused, on every way
of calling them, and prints how many were run, how many differ, the share that fuses (at least one site),
the share that a build without alias analysis gets wrong, the share in which running shows that two
projections may be merged, and the seconds. Each of the forwards is another. A forward that differs is
printed, with the smallest that hypothesis finds near it; the exit status is then 1.
"""

import argparse
import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "adversarial"))

import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from programs import outcome, programs

CHUNK = 500
COUNTED = ("runs", "fuses", "unsound", "mergeable")


def run(number: int, start: int, stop: bool = False) -> tuple[Counter[str], list[str]]:
    """Counts over `number` programs drawn from the seed `start`, and the text of each that differs.

    With `stop`, the first that differs ends the run, as the smallest that hypothesis finds.
    """
    torch.set_num_threads(1)
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    differing: list[str] = []

    @seed(start)
    @settings(
        max_examples=number,
        phases=[Phase.generate, *([Phase.shrink] if stop else [])],
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(programs())
    def check(text: str) -> None:
        assume(text not in seen)
        found = outcome(text)
        if found.difference:
            differing.append(f"{found.difference}\n{text}")
        assert not (stop and found.difference)
        seen.add(text)
        counts.update(name for name in COUNTED if getattr(found, name))

    try:
        check()
    except AssertionError:
        return counts, differing[-1:]  # the smallest is run last
    counts["programs"] = len(seen)
    return counts, differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {options.processes} processes")
    sizes = [CHUNK] * (options.programs // CHUNK) + [options.programs % CHUNK]
    sizes = [size for size in sizes if size]
    starts = [options.seed * 1_000_000 + index for index in range(len(sizes))]
    total: Counter[str] = Counter()
    differing = 0
    began = time.monotonic()
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for size, start, (counts, found) in zip(sizes, starts, pool.map(run, sizes, starts), strict=True):
            total += counts
            differing += len(found)
            for text in found:
                print(f"differs: {text}")
            if found:
                for text in pool.submit(run, size, start, True).result()[1]:
                    print(f"the smallest of them: {text}", flush=True)
    programs_run = total["programs"]
    print(f"{programs_run} programs, {differing} differ")
    for name, said in zip(
        COUNTED,
        ("run without an error", "fuse", "a build without alias analysis gets wrong", "hold a right merge"),
        strict=True,
    ):
        print(f"{total[name] / max(programs_run, 1):7.1%} {said}")
    print(f"{time.monotonic() - began:.0f} seconds")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
