"""`programs` is imported by its name; the benchmark of the same programs does as much."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
