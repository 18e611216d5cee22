"""`python -m fusekit`: see `fusekit.cli`."""

import os
import sys

# Read when Transformers and the hub's client are imported, so set before either is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from fusekit.cli import main

if __name__ == "__main__":
    sys.exit(main())
