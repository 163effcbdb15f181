"""A training script in a process of its own: `python -m tests.e2e.plain_script BASE_URL KEY`.

It writes the id of its run, then the loss of each step as it is told it, a line each.
"""

from __future__ import annotations

import os
import sys

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tinker import types

from tests.e2e.data import batch

STEPS = 30
_ADAM = types.AdamParams(learning_rate=2e-3, eps=1e-8)


def main(base_url: str, key: str) -> None:
    """Train."""
    client = tinker.ServiceClient(base_url=base_url, api_key=key)
    run = client.create_lora_training_client(base_model="tiny", rank=8, seed=4).result(60)
    _tell(run.model_id)
    for step in range(STEPS):
        passed = run.forward_backward(batch(700 + step, [24, 9]), "cross_entropy")
        taken = run.optim_step(_ADAM)
        _tell(passed.result(60).metrics["loss:sum"])
        taken.result(60)


def _tell(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
