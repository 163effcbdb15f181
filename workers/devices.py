"""`python -m workers.devices`: what torch sees on this host, as JSON. Takes no memory of a GPU."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch


def seen() -> dict[str, Any]:
    """torch's version, and name and memory of each GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    each = [torch.cuda.get_device_properties(i) for i in range(count)]
    gpus = [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in each]
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(seen()) + "\n")
