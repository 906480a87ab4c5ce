"""Settings of the whole test run."""

import os
from pathlib import Path

# Triton reads this when it is imported, which some libraries do: without a device, kernels are interpreted.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"
