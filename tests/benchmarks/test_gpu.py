"""The GPU smoke check runs on a CPU too; what it measures there is only that it works."""

import subprocess
import sys
from pathlib import Path

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, GPU, *arguments], capture_output=True, text=True)


def test_smoke_passes_on_the_cpu_in_every_dtype(smollm2):
    done = run("--smoke", "--device", "cpu", "--tokens", "4", "--generate", "4")
    assert done.returncode == 0, done.stderr
    for dtype in ("float32", "bfloat16", "float16"):
        assert f"{dtype} on cpu: 121 sites, verify ok=True" in done.stdout
    assert done.stdout.count("reverted=True") == 3


def test_without_smoke_it_says_what_to_pass():
    done = run()
    assert done.returncode == 2
    assert "--smoke" in done.stderr
