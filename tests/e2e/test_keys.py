"""Keys: made, used, revoked; and what one tenant sees of another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tinker

from tests.e2e.conftest import MODEL
from tests.e2e.service import Service, wait_until
from tests.e2e.wire_client import WireClient


def _keys(service: Service, *words: str) -> str:
    environment = {**os.environ, "DATABASE_URL": service.database_url}
    command = [sys.executable, "-m", "app.cli", "keys", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_key_works_until_it_is_revoked(tmp_path: Path) -> None:
    service = Service(tmp_path / "data", environment={"TINWORKS_AUTH": "keys"})
    service.start()
    try:
        made = _keys(service, "create", "ada")
        secret = re.search(r"tml-[\w-]{20,}", made).group()  # type: ignore[union-attr]
        assert secret not in _keys(service, "list") and "ada" in _keys(service, "list")
        with pytest.raises(tinker.AuthenticationError):
            tinker.ServiceClient(base_url=service.base_url, api_key="tml-wrong").get_server_capabilities()
        client = tinker.ServiceClient(base_url=service.base_url, api_key=secret)
        client.create_lora_training_client(base_model=MODEL, rank=4).result(30)
        number = re.search(r"\b(\d+)\b", _keys(service, "list")).group()  # type: ignore[union-attr]
        _keys(service, "revoke", number)

        def refused() -> bool:
            try:
                client.get_server_capabilities()
            except tinker.AuthenticationError:
                return True
            return False

        wait_until(refused, timeout_s=10, what="the revoked key is refused")
    finally:
        assert service.stop() == 0


def test_a_tenant_sees_nothing_of_another(service: Service, connect: Callable[..., tinker.ServiceClient]) -> None:
    mine, other = WireClient(service.base_url), WireClient(service.base_url)
    run = mine.create_run()
    future = mine.forward_backward(run, 1, [[5, 6, 7]]).json()["request_id"]
    body = {"session_id": mine.session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = mine.post("create_sampling_session", body).json()["sampling_session_id"]
    sample = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_session_id": sampler, "seq_id": 0}
    attempts = [
        other.post("get_info", {"model_id": run}),
        other.forward_backward(run, 2, [[5, 6, 7]]),
        other.optim_step(run, 2),
        other.post("retrieve_future", {"request_id": future}),
        other.post("asample", sample),
        other.http.get(f"samplers/{sampler}"),
        other.post("session_heartbeat", {"session_id": mine.session_id}),
        other.post(f"sessions/{mine.session_id}/finish", {"reason": {"type": "success"}}),
        other.post("create_sampling_session", body),
        other.post("create_model", {"session_id": mine.session_id, "model_seq_id": 9, "base_model": MODEL}),
    ]
    assert [answer.status_code for answer in attempts] == [404] * len(attempts)
    assert mine.wait(future).status_code == 200
