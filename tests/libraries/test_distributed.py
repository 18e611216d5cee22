"""DDP, FSDP and distributed checkpoints over two gloo processes: each case of `ranks.py` is a test."""

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fusekit

SCRIPT = Path(__file__).with_name("ranks.py")
PATIENCE = 240  # seconds for all cases together; they take ten


def case_names():
    """The names in the list CASES of the script, which is not imported here: it imports its neighbours."""
    for statement in ast.parse(SCRIPT.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "CASES":
            return [name.id for name in statement.value.elts]
    raise AssertionError("ranks.py has no list CASES")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each rank said of each case ("" for nothing wrong), and what it printed."""
    folder = tmp_path_factory.mktemp("ranks")
    root = str(Path(fusekit.__file__).parents[1])
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")][:1]
    environment = {**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "".join(loopback)}
    outputs = [open(folder / f"output-{rank}", "w+") for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(folder)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        for process in processes:
            process.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pass  # the cases that are not there say so
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for output in outputs:
            output.close()
    found = []
    for rank in range(2):
        file, printed = folder / f"rank-{rank}", (folder / f"output-{rank}").read_text()[-3000:]
        lines = file.read_text().splitlines() if file.exists() else []
        found.append((dict(json.loads(line) for line in lines), printed))
    return found


@pytest.mark.parametrize("case", case_names())
def test_over_two_processes(case, outcomes):
    for rank, (said, printed) in enumerate(outcomes):
        assert case in said, f"rank {rank} did not come to an end; it printed:\n{printed}"
        assert not said[case], f"rank {rank}:\n{said[case]}"
