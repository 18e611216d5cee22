"""The classes of Transformers that take longest to plan: `python benchmarks/slowest_class.py [--every 10]`.

Every model type is built from its default config on the meta device (two layers deep where its config
knows `num_hidden_layers`); the first instance of each class is analysed once. CPU seconds of this process,
one thread; a class whose forward was analysed before in the process costs a look-up and is not counted.
"""

import argparse
import ast
import gc
import json
import tempfile
import time
import traceback
from pathlib import Path

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

import fusekit as fk
from fusekit.fusions import analyse
from fusekit.model.build import from_config

DEPTHS = ({"num_hidden_layers": 2}, {})


def build(model_type: str, folder: Path) -> torch.nn.Module | None:
    """A model of `model_type` on the meta device, None where its default config makes none."""
    for more in DEPTHS:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, **more}))
        try:
            return from_config(folder).model
        except fk.FusekitError:
            continue
    return None


def measured(module: torch.nn.Module) -> dict:
    """Seconds of one analysis, and how much there was to look at."""
    start = time.process_time()
    found = analyse(module)
    return {
        "seconds": time.process_time() - start,
        "class": type(module).__name__,
        "module": type(module).__module__.rpartition(".")[2],
        "statements": sum(isinstance(node, ast.stmt) for node in ast.walk(found.source.tree))
        if found.source
        else 0,
        "nodes": len(found.trace.graph.nodes) if found.trace else 0,
        "syntax": sum(1 for _ in ast.walk(found.source.tree)) if found.source else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--types", help="comma-separated model types (default: all)")
    parser.add_argument("--every", type=int, default=1, help="take every Nth model type")
    parser.add_argument("--most", type=int, default=10, help="how many classes to print")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    types = args.types.split(",") if args.types else list(CONFIG_MAPPING)[:: args.every]
    rows, seen, built, failed = [], set(), 0, []
    with tempfile.TemporaryDirectory() as folder:
        for number, model_type in enumerate(types):
            model = build(model_type, Path(folder))
            built += model is not None
            for module in model.modules() if model is not None else ():
                if type(module) in seen:
                    continue
                seen.add(type(module))
                try:
                    rows.append(measured(module))
                except Exception:
                    failed.append((type(module).__name__, traceback.format_exc(limit=-1).splitlines()[-1]))
            if number % 20 == 19:
                gc.collect()
    print(f"{built} of {len(types)} model types, {len(seen)} classes, {len(failed)} exceptions")
    for name, said in failed:
        print(f"EXCEPTION {name}: {said}")
    print(f"all classes together {sum(row['seconds'] for row in rows):.1f} s")
    for row in sorted(rows, key=lambda row: -row["seconds"])[: args.most]:
        print(
            f"{row['seconds']:7.3f} s  {row['class']} ({row['module']}): {row['statements']} statements, "
            f"{row['nodes']} nodes in the trace"
        )
    for what in ("statements", "syntax", "nodes"):
        most = max(rows, key=lambda row: row[what])
        print(f"most {what}: {most[what]} in {most['class']}")


if __name__ == "__main__":
    main()
