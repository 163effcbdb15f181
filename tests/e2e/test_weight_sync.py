"""Through the SDK, with a folder that trainer and sampler share: each save is what its own client samples from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, logprobs, train
from tests.e2e.service import Service, wait_until


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Service]:
    """A service of its own."""
    running = Service(tmp_path / "data", environment={"TINWORKS_SHARED_DIR": str(tmp_path / "shared")})
    running.start()
    yield running
    assert running.stop() == 0


def test_every_save_is_read_at_once_and_stored_a_moment_later(sharing: Service, tmp_path: Path) -> None:
    client = tinker.ServiceClient(base_url=sharing.base_url, api_key="tml-sync")
    training = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    data = batch(3, [12])
    prompt = data[0].model_input.to_ints()
    seen = []
    for kind in ("snapshot", "inflight", "inflight"):
        train(training, data, 2, lr=1e-2)
        sampler = training.save_weights_and_get_sampling_client(kind=kind).result()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result(60)
        assert scored[1:] == pytest.approx(logprobs(training, data)[0][:-1], abs=1e-3)
        seen.append(tuple(scored[1:]))
    assert len(set(seen)) == 3
    shared = {path.name for path in (tmp_path / "shared" / "snapshots").iterdir()}
    assert len(shared) == 3
    store = sharing.blobs()
    manifests = {f"snapshots/{name}/manifest.json" for name in shared}
    wait_until(lambda: manifests <= set(store.list("snapshots")), timeout_s=20, what="all is uploaded")
