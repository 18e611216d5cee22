"""What planning costs, against what building costs: `python benchmarks/planning.py`.

CPU seconds of this process, medians over interleaved rounds: an 80-layer Llama of 70B size is built
on the meta device and planned, once one layer has been planned in the process; then 8, 40 and 160
layers (each class is analysed once; a layer more costs a look-up and the checks of its instances);
then `import fusekit` against `import torch`, each in a fresh process.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import fusekit as fk

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def build(layers: int) -> LlamaForCausalLM:
    """A Llama of 70B width on the meta device."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **LLAMA_70B))


def seconds(run):
    """(CPU seconds, result) of one call, garbage collection left out."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    result = run()
    spent = time.process_time() - start
    gc.enable()
    return spent, result


def planning(layers: int, rounds: int) -> tuple[list[float], list[float], int]:
    """(seconds to build, seconds to plan, sites) of one depth, round by round."""
    building, plans = [], []
    for _ in range(rounds):
        spent, model = seconds(lambda: build(layers))
        building.append(spent)
        spent, plan = seconds(lambda model=model: fk.plan(model))
        plans.append(spent)
    return building, plans, len(plan.sites)


def importing(rounds: int) -> tuple[float, float]:
    """(seconds to import torch, seconds that fusekit adds), medians."""
    code = (
        "import time; a = time.process_time(); import torch; b = time.process_time(); import fusekit; "
        "print(b - a, time.process_time() - b)"
    )
    pairs = []
    for _ in range(rounds):
        printed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        pairs.append([float(number) for number in printed.split()])
    return tuple(statistics.median(column) for column in zip(*pairs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    first, _ = seconds(lambda: fk.plan(build(1)))
    print(f"torch {torch.__version__}, one thread, CPU seconds, medians of {rounds} rounds")
    print(f"first plan of one layer in the process, building it included: {first:.3f} s")
    for layers in (80, 8, 40, 160):
        building, plans, sites = planning(layers, rounds)
        ratios = sorted(planned / built for built, planned in zip(building, plans, strict=True))
        ratio = f"{statistics.median(ratios):.2f} of building ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        built, planned = statistics.median(building), statistics.median(plans)
        print(f"{layers:3} layers, {sites:3} sites: build {built:.3f} s, plan {planned:.3f} s = {ratio}")
    plain, added = importing(rounds)
    print(f"import torch {plain:.2f} s, import fusekit after it {added:.3f} s")


if __name__ == "__main__":
    main()
