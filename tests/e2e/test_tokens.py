"""Tokens in the hands of the official SDK and its command line: exchanged, expired, rejected, revoked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import tinker

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, train
from tests.e2e.service import Service

_FAR = 4_000_000_000


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that wants keys, and whose tokens live for a second: a poll outlives its token."""
    environment = {"TINWORKS_AUTH": "keys", "TINWORKS_TOKEN_TTL_S": "1", "TINWORKS_POLL_HOLD_S": "3"}
    running = Service(tmp_path_factory.mktemp("strict") / "data", environment=environment)
    running.start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def make_key(strict: Service) -> Callable[[str], str]:
    """Makes keys by owner."""

    def make(owner: str) -> str:
        environment = {**os.environ, "DATABASE_URL": strict.database_url}
        command = [sys.executable, "-m", "app.cli", "keys", "create", owner, "--name", f"key of {owner}"]
        made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        return re.search(r"tml-[\w-]{20,}", made).group()  # type: ignore[union-attr]

    return make


def cli(
    service: Service, home: Path, *words: str, key: str | None = None, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `tinker` without a terminal. What it prints is what counts: while it renews a token, as it does all the time
    here, its process may abort at its very end."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TINKER_")}
    environment |= {"TINKER_BASE_URL": service.base_url, "HOME": str(home), "TINKER_TELEMETRY": "0"}
    if key is not None:
        environment["TINKER_API_KEY"] = key
    command = [sys.executable, "-m", "tinker.cli", *words]
    return subprocess.run(
        command, env=environment, input=typed, capture_output=True, text=True, timeout=60, start_new_session=True
    )


def whoami(service: Service, home: Path, *, key: str | None = None) -> dict[str, Any]:
    ran = cli(service, home, "--format", "json", "auth", "whoami", key=key)
    assert ran.stdout, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def identity(service: Service, key: str) -> tinker.types.WhoamiResponse:
    """What `whoami` tells, without a process of its own."""
    return tinker.RestClient(base_url=service.base_url, api_key=key).whoami().result(30)


def auth_of(client: tinker.ServiceClient) -> Any:
    return client.holder._default_auth


def test_whoami_names_the_owner_of_the_key(strict: Service, make_key: Callable[[str], str], tmp_path: Path) -> None:
    first = whoami(strict, tmp_path, key=make_key("ada"))
    assert first["email"] == "ada"
    assert identity(strict, make_key("ada")).model_dump() == first
    assert identity(strict, make_key("eve")).org_urn != first["org_urn"]


def test_whoami_works_on_an_open_server(service: Service) -> None:
    names = [identity(service, key).user_urn for key in ("tml-a", "tml-a", "tml-b")]
    assert names[0] == names[1] != names[2]


def test_a_login_is_stored_and_used(strict: Service, make_key: Callable[[str], str], tmp_path: Path) -> None:
    key = make_key("ada")
    login = cli(strict, tmp_path, "auth", "login", typed=f"{key}\n")
    assert "Logged in as ada (ada). Stored API key 'key of ada'" in login.stdout, login.stderr
    assert whoami(strict, tmp_path)["email"] == "ada"
    status = cli(strict, tmp_path, "auth", "status")
    assert "Tinker accessible: yes" in status.stdout, status.stderr
    assert "Removed credential 'key of ada'" in cli(strict, tmp_path, "auth", "logout").stdout
    assert identity(strict, key).email == "ada"  # a key that was typed in stays valid


def test_a_login_with_a_wrong_key_says_why(strict: Service, tmp_path: Path) -> None:
    login = cli(strict, tmp_path, "auth", "login", typed="tml-wrong\n")
    assert login.returncode != 0
    assert "unknown or was revoked" in login.stdout + login.stderr


def test_a_run_goes_on_through_many_tokens(strict: Service, make_key: Callable[[str], str]) -> None:
    client = tinker.ServiceClient(base_url=strict.base_url, api_key=make_key("ada"))
    training = client.create_lora_training_client(base_model=MODEL, rank=4)
    tokens = set()
    for step in range(6):
        train(training, batch(step, [20]), steps=1)
        tokens.add(auth_of(client)._token)
    assert len(tokens) > 1
    sampler = training.save_weights_and_get_sampling_client()
    prompt = tinker.ModelInput.from_ints([5, 6])
    sampled = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=3)).result(60)
    assert len(sampled.sequences[0].tokens) == 3


def test_a_token_that_the_server_rejects_is_exchanged_anew(strict: Service, make_key: Callable[[str], str]) -> None:
    client = tinker.ServiceClient(base_url=strict.base_url, api_key=make_key("ada"))
    training = client.create_lora_training_client(base_model=MODEL, rank=4)
    stale = jwt.encode({"iat": 1, "exp": _FAR}, "of a server that was set up anew, with another secret")
    for step in range(3):
        auth_of(client)._token = stale
        train(training, batch(step, [20]), steps=1)
        assert auth_of(client)._token != stale


def test_a_revoked_keys_token_is_refused(strict: Service, make_key: Callable[[str], str]) -> None:
    key = make_key("ada")
    client = tinker.ServiceClient(base_url=strict.base_url, api_key=key)
    client.get_server_capabilities()
    url = f"{strict.base_url}/api/v1"
    token = httpx.post(f"{url}/auth/token", headers={"X-API-Key": key}).json()["jwt"]
    assert httpx.delete(f"{url}/auth/apikey/me", headers={"X-API-Key": key}).status_code == 200
    refused = httpx.get(f"{url}/get_server_capabilities", headers={"X-API-Key": token})
    assert refused.status_code == 401
    with pytest.raises(tinker.AuthenticationError, match="revoked"):
        client.get_server_capabilities()
