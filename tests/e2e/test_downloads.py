"""Downloads with the official SDK and the `tinker` command: what arrives is what was trained."""

from __future__ import annotations

import io
import tarfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import httpx
import pyrage
import pytest
import tinker
import torch
from click.testing import CliRunner
from peft import PeftModel
from tinker.cli.__main__ import main_cli
from tinker.lib.internal_client_holder import _SessionlessHolderCache
from tinker.lib.public_interfaces import rest_client_common
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, largest_gap, logprobs, train
from tests.e2e.service import Service

DATA = batch(71, [24, 9])
FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def key() -> str:
    return f"tml-{uuid.uuid4().hex}"


@pytest.fixture
def run(connect: Callable[..., tinker.ServiceClient], key: str) -> tinker.TrainingClient:
    """A run after a few steps."""
    run = connect(key).create_lora_training_client(base_model=MODEL, rank=8, seed=4).result(60)
    train(run, DATA, 3)
    return run


@pytest.fixture
def rest(service: Service, key: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=service.base_url, api_key=key)


def command(service: Service, key: str, *words: str) -> str:
    """What the `tinker` command prints; it must succeed."""
    environment = {"TINKER_BASE_URL": service.base_url, "TINKER_API_KEY": key}
    with patch.object(rest_client_common, "sessionless_holder_cache", _SessionlessHolderCache()):
        result = CliRunner().invoke(main_cli, words, env=environment)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return str(result.stdout)


def in_peft(service: Service, folder: Path) -> list[list[float]]:
    """What the downloaded adapter gives the targets, in plain transformers and PEFT."""
    base = AutoModelForCausalLM.from_pretrained(service.data_dir / "models" / "tiny", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder)
    rows = []
    for datum in DATA:
        targets = torch.tensor(list(datum.loss_fn_inputs["target_tokens"].data))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0].float()
        rows.append(torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].tolist())
    return rows


@pytest.mark.parametrize("save", ["save_state", "save_weights_external"])
def test_the_command_downloads_an_adapter_that_gives_the_trainers_logprobs(
    service: Service,
    key: str,
    run: tinker.TrainingClient,
    rest: tinker.RestClient,
    save: str,
    tmp_path: Path,
) -> None:
    path = getattr(run, save)("final").result(60).path
    expected = logprobs(run, DATA)
    train(run, DATA, 1)
    command(service, key, "checkpoint", "download", path, "--output", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert {file.name for file in folder.iterdir()} == FILES
    assert largest_gap(in_peft(service, folder), expected) < 1e-4
    left = [row.tinker_path for row in rest.list_user_checkpoints().result(10).checkpoints]
    assert left == [path]  # the export that a download makes on its way is gone


def test_an_encrypted_export_is_for_its_recipients(
    run: tinker.TrainingClient, rest: tinker.RestClient, tmp_path: Path
) -> None:
    identity = pyrage.x25519.Identity.generate()
    plain = run.save_weights_external("plain").result(60).path
    sealed = run.save_weights_external("sealed", age_encryption_recipients=[str(identity.to_public())]).result(60).path
    files = {}
    for path in (plain, sealed):
        answer = rest.get_external_weights_urls(path).result(10)
        files[path] = {name: urllib.request.urlopen(url, timeout=30).read() for name, url in answer.urls.items()}
    assert files[plain].keys() == FILES
    opened = {name.removesuffix(".age"): pyrage.decrypt(data, [identity]) for name, data in files[sealed].items()}
    assert opened == files[plain]
    with pytest.raises(tinker.TinkerError, match=r"age_encryption_recipients\.0"):
        run.save_weights_external("nobody", age_encryption_recipients=["age1nobody"]).result(60)
    with pytest.raises(tinker.TinkerError, match="external_weights/plain already"):
        run.save_weights_external("plain").result(60)
    train(run, DATA, 1)


def test_an_export_is_managed_like_any_checkpoint(run: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = run.save_weights_external("managed", ttl_seconds=3600).result(60).path
    (row,) = rest.list_checkpoints(run.model_id).result(10).checkpoints
    assert (row.tinker_path, row.checkpoint_type, row.expires_at is not None) == (path, "external", True)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(10)
    rest.publish_checkpoint_from_tinker_path(path).result(10)
    url = rest.get_external_weights_urls(path).result(10).urls["adapter_config.json"]
    rest.delete_checkpoint_from_tinker_path(path).result(10)
    with pytest.raises(tinker.NotFoundError):
        rest.get_external_weights_urls(path).result(10)
    head, token, name = url.rsplit("/", 2)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{head}/{token[:-2]}/{name}", timeout=10)
    assert refused.value.code == 403


def test_an_archive_of_a_sampler_checkpoint_is_an_adapter_too(
    service: Service, key: str, run: tinker.TrainingClient, tmp_path: Path
) -> None:
    path = run.save_weights_for_sampler("old").result(60).path
    where = path.removeprefix("tinker://").replace("/sampler_weights/", "/checkpoints/sampler_weights/")
    url = f"{service.base_url}/api/v1/training_runs/{where}/archive"
    answer = httpx.get(url, headers={"x-api-key": key}, follow_redirects=False)
    assert answer.status_code == 302
    with tarfile.open(fileobj=io.BytesIO(httpx.get(answer.headers["location"]).content), mode="r:") as tar:
        tar.extractall(tmp_path, filter="data")
    assert largest_gap(in_peft(service, tmp_path), logprobs(run, DATA)) < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_a_key_of_the_owner_opens_its_private_checkpoint(
    service: Service, connect: Callable[..., tinker.ServiceClient], key: str, run: tinker.TrainingClient
) -> None:
    path = run.save_state("lent").result(60).path
    other = f"tml-{uuid.uuid4().hex}"
    theirs = connect(other).create_training_client_from_state(path, weights_access_token=key).result(60)
    expected = logprobs(run, DATA)
    assert largest_gap(logprobs(theirs, DATA), expected) < 1e-5
    train(theirs, DATA, 1)
    theirs.load_state_with_optimizer(path, weights_access_token=key).result(60)
    assert largest_gap(logprobs(theirs, DATA), expected) < 1e-5
    rest = tinker.RestClient(base_url=service.base_url, api_key=other)
    assert rest.copy_weights(path, "mine", weights_access_token=key).result(10).startswith("tinker://")
    with pytest.raises(tinker.TinkerError, match="weights_access_token"):
        theirs.load_state(path, weights_access_token="tml-wrong").result(60)
    with pytest.raises(tinker.TinkerError, match="weights_access_token"):
        connect(other).create_training_client_from_state(path, weights_access_token=other).result(60)
