"""Whether a disturbed script ended where the same script ends when nothing happens (SEMANTICS §2)."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import torch
from safetensors.torch import load
from torch import Tensor

from tests.chaos.audit import Told

ADAPTER_GAP = 1e-3
"""Relative L2 distance of two adapters whose passes had different shapes."""
LOGPROB_GAP = 1e-3
"""And of each logprob."""
SHORT_OF_A_STEP = 10
"""A step that is lost or applied twice misses the bound by so many times at least."""


@dataclass
class Gaps:
    """The largest distances found. `one_step`: of an adapter and itself one step before, the least."""

    adapter: float = 0.0
    logprob: float = 0.0
    loss: float = 0.0
    one_step: float = math.inf
    wrong: list[str] = field(default_factory=list)


def download(base_url: str, key: str, model_id: str, name: str) -> dict[str, Tensor]:
    """The tensors of an adapter that was saved under that name, as its owner can download them."""
    route = f"{base_url}/api/v1/training_runs/{model_id}/checkpoints/sampler_weights/{name}/archive"
    with httpx.Client(timeout=60, headers={"X-API-Key": key}) as client:
        link = client.get(route)
        assert link.status_code == 302, link.text
        archive = client.get(link.headers["Location"]).raise_for_status().content
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            if member.name.endswith("adapter_model.safetensors"):
                file = tar.extractfile(member)
                assert file is not None
                return load(file.read())
    raise AssertionError(f"no adapter in the archive of {model_id}/{name}")


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Relative L2 distance of two adapters."""
    assert left.keys() == right.keys()
    gaps = [(left[name].double() - right[name].double()).square().sum() for name in left]
    sizes = [right[name].double().square().sum() for name in left]
    return float(torch.stack(gaps).sum().sqrt() / torch.stack(sizes).sum().sqrt())


def compare(told: Sequence[Told], quiet: Sequence[Told]) -> Gaps:
    """Of the losses (per token) and logprobs that two scripts were told."""
    gaps = Gaps()
    for mine, theirs in zip(told, quiet, strict=True):
        if len(mine["losses"]) != len(theirs["losses"]):
            gaps.wrong.append(f"{mine['model_id']} has {len(mine['losses'])} losses, not {len(theirs['losses'])}")
            continue
        pairs = zip(mine["losses"], theirs["losses"], strict=True)
        gaps.loss = max(gaps.loss, *(abs(one - other) for one, other in pairs))
        for row, expected in zip(mine["logprobs"], theirs["logprobs"], strict=True):
            gaps.logprob = max(gaps.logprob, *(abs(a - b) for a, b in zip(row, expected, strict=True)))
    if not gaps.loss <= LOGPROB_GAP:
        gaps.wrong.append(f"losses per token differ by {gaps.loss:.1e}, more than {LOGPROB_GAP}")
    if not gaps.logprob <= LOGPROB_GAP:
        gaps.wrong.append(f"logprobs differ by {gaps.logprob:.1e}, more than {LOGPROB_GAP}")
    return gaps
