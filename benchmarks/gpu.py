"""Does the fused model give the same on this device? `python benchmarks/gpu.py --smoke`.

SmolLM2-135M in float32, bfloat16 and float16: planned, fused, compared with unfused and with a
float64 run (outputs, state dict, top-1, greedy generation), reverted; and the peak memory of
applying on CUDA. Under two minutes on a GPU; it runs on a CPU too. Exit status 1 when a check fails.
"""

import argparse
import sys
import time

import torch
from transformers.utils import logging

import fusekit as fk
from fusekit.notebook.demo import load_smollm2

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEBIBYTE = 2**20


class PeakMemory:
    """Bytes that a block held at its peak over what was held before it (CUDA only, else None)."""

    def __init__(self, device: torch.device):
        self.device, self.peak = device, None

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device) - self.before


def largest_site(plan: fk.Plan) -> int:
    """Bytes of the merged parameters of the largest site."""
    return max(
        sum(
            parameter.numel() * parameter.element_size()
            for part in site.parts
            for parameter in site.module.get_submodule(part).parameters()
        )
        for site in plan.sites
    )


def smoke(dtype: torch.dtype, device: str | None, tokens: int, generate: int) -> bool:
    """Check one dtype and print what was found."""
    model, _ = load_smollm2(dtype=dtype, device=device)
    where = model.device
    classes = [type(module) for module in model.modules()]
    plan = fk.plan(model)
    start = time.perf_counter()
    report = plan.verify(tokens=tokens, generate=generate, skip=("gradients", "site"))
    spent = time.perf_counter() - start
    with PeakMemory(where) as memory:
        fused = plan.apply()
    ids = torch.randint(model.config.vocab_size, (2, tokens), device=where)
    with torch.no_grad():
        after = model(input_ids=ids, use_cache=False).logits
        fused.revert()
        before = model(input_ids=ids, use_cache=False).logits
    reverted = [type(module) for module in model.modules()] == classes
    difference = float((after.float() - before.float()).abs().max())
    name = str(dtype).removeprefix("torch.")
    print(f"{name} on {where}: {len(plan.sites)} sites, verify ok={report.ok} in {spent:.1f} s")
    for check in report.checks:
        print(f"  {check.what:10} ok={check.ok!s:5} same bits={check.same_bits!s:5} {check.detail}")
    print(f"  fused against unfused logits: largest difference {difference:.3g}; reverted={reverted}")
    if memory.peak is not None:
        peak, largest = memory.peak / MEBIBYTE, largest_site(plan) / MEBIBYTE
        print(f"  apply held {peak:.2f} MiB more at its peak; largest site {largest:.2f} MiB")
    return report.ok and reverted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", required=True, help="equality, revert and memory")
    parser.add_argument("--device", help="cuda, cpu, ...: cuda where there is one")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--generate", type=int, default=16)
    parser.add_argument("--dtypes", default=",".join(str(dtype).removeprefix("torch.") for dtype in DTYPES))
    args = parser.parse_args()
    logging.set_verbosity_error()
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() and args.device != "cpu" else "CPU"
    print(f"torch {torch.__version__}, {kind}")
    dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]
    results = [smoke(dtype, args.device, args.tokens, args.generate) for dtype in dtypes]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
