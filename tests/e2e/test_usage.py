"""Usage of a known script, as the official SDK tells it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, logprobs
from tests.e2e.service import Service, wait_until

HOUR = timedelta(hours=1)


def window() -> tuple[datetime, datetime]:
    """The present hour and the ones beside it."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return hour - HOUR, hour + 2 * HOUR


def totals(usage: types.BillingUsageResponse) -> dict[str, int]:
    """Amounts by kind, over all hours."""
    found: dict[str, int] = {}
    for event in usage.data:
        info = event.event_info.model_dump()
        kind = info["type"] + ("_cached" if info.get("cached") else "")
        found[kind] = found.get(kind, 0) + info.get("token_count", info.get("count"))
    return found


def test_usage_of_a_script_is_exact(service: Service, connect: Callable[..., tinker.ServiceClient]) -> None:
    key = f"tml-{uuid.uuid4().hex}"
    client = connect(key)
    admin = tinker.AdminClient(base_url=service.base_url, api_key=key)
    assert admin.get_billing_usage(*window()).result(30).data == []

    training = client.create_lora_training_client(base_model=MODEL, rank=4)
    for step in range(3):
        training.forward_backward(batch(step, [10, 20]), "cross_entropy").result(60)
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result(60)
    logprobs(training, batch(9, [7]))
    training.save_state("kept").result(60)
    path = training.save_weights_for_sampler("sampled").result(60).path
    sampler = client.create_sampling_client(model_path=path)
    prompt = types.ModelInput.from_ints(list(range(5, 18)))
    sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4, stop=[])).result(60)
    sampler.compute_logprobs(prompt).result(60)
    base = client.create_sampling_client(base_model=MODEL)
    base.sample(prompt, 1, types.SamplingParams(max_tokens=5, stop=[])).result(60)

    expected = {"training": 3 * 30 + 7, "checkpoint": 2, "sampling_sample": 8 + 1 + 5}

    def told() -> dict[str, int]:
        found = totals(admin.get_billing_usage(*window()).result(30))
        prefill = found.pop("sampling_prefill", 0) + found.pop("sampling_prefill_cached", 0)
        return found | {"prompts": prefill}

    wait_until(lambda: told() == expected | {"prompts": 3 * 13}, timeout_s=10, what=f"usage is told: {told()}")

    usage = admin.get_billing_usage(*window()).result(30)
    assert {event.base_model for event in usage.data} == {MODEL}
    assert {event.session_id for event in usage.data} == set(usage.sessions)
    assert len(usage.sessions) == 1
    assert all(event.estimated_cost_usd is None for event in usage.data)

    stored = admin.get_current_checkpoint_storage_usage().result(30).data
    assert [item.checkpoint_count for item in stored] == [2]
    assert stored[0].size_bytes > 0

    audited = admin.get_audit_log("checkpoints").result(30).entries
    assert [entry.event for entry in audited] == ["checkpoint_save", "checkpoint_save"]
    assert [entry.tinker_path for entry in audited] == [f"tinker://{training.model_id}/weights/kept", path]

    other = tinker.AdminClient(base_url=service.base_url, api_key=f"tml-{uuid.uuid4().hex}")
    assert other.get_billing_usage(*window()).result(30).data == []
    assert other.get_current_checkpoint_storage_usage().result(30).data == []
    assert other.get_audit_log().result(30).entries == []

    start, end = (moment.isoformat() for moment in window())
    environment = {**os.environ, "TINKER_BASE_URL": service.base_url, "TINKER_API_KEY": key}
    command = [sys.executable, "-m", "tinker.cli", "--format", "json", "billing", "usage", start, end]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(shown)["data"] == json.loads(usage.model_dump_json())["data"]
