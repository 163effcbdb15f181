"""`tinworks doctor` finds what is broken and says what mends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from app.cli import app
from app.db import get_database
from app.doctor import service
from app.doctor.host import check_gpus
from app.settings import get_settings
from tests import factories
from tests.s3_server import S3Server
from tests.services import RedisServer
from tests.tls_front import self_signed, tls_front

Set = Callable[..., None]


@pytest.fixture
def whole(
    configure: Set, sqlite_url: str, shared_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Set]:
    """An installation that lacks nothing but append-only persistence; returns how to change its settings. Starting
    torch takes seconds, so only the tests about it look for GPUs."""
    monkeypatch.setattr(service, "CHECKS", tuple(check for check in service.CHECKS if check is not check_gpus))
    configure(DATABASE_URL=sqlite_url, REDIS_URL=shared_redis.url, TINWORKS_DATA_DIR=tmp_path / "data")
    with get_database().write() as session:
        factories.add_model(session)
        factories.add_worker(session)
    yield configure


def examined(*arguments: str) -> tuple[Result, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    found: list[dict[str, str]] = json.loads(result.stdout)
    return result, {finding["name"]: finding for finding in found}


def failures(found: dict[str, dict[str, str]]) -> dict[str, str]:
    return {name: finding["todo"] for name, finding in found.items() if finding["grade"] == "failed"}


def test_a_whole_installation_has_nothing_to_mend(whole: Set) -> None:
    result, found = examined()
    assert result.exit_code == 0 and failures(found) == {}
    names = {"database", "migrations", "clock", "broker", "broker of celery", "blobs", "conditional put"}
    assert {name for name in names if found[name]["grade"] == "ok"} == names


def test_the_table_is_for_people(whole: Set) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0 and "conditional put" in result.stdout and "what to do" in result.stdout


def test_missing_migrations_are_named(whole: Set, tmp_path: Path) -> None:
    whole(DATABASE_URL=f"sqlite:///{tmp_path / 'new.db'}")
    result, found = examined()
    assert result.exit_code == 1 and failures(found) == {"migrations": "Run `tinworks migrate`."}


def test_a_database_that_does_not_answer(whole: Set) -> None:
    whole(DATABASE_URL="postgresql://ada:secret@127.0.0.1:1/x")
    result, found = examined()
    assert result.exit_code == 1 and set(failures(found)) == {"database"}
    assert "secret" not in result.stdout


def test_a_broker_that_does_not_answer(whole: Set) -> None:
    whole(REDIS_URL="redis://:secret@127.0.0.1:1/0")
    result, found = examined()
    assert result.exit_code == 1 and set(failures(found)) == {"broker"} and "secret" not in result.stdout


def test_a_broker_whose_certificate_nobody_vouches_for(whole: Set, shared_redis: RedisServer, tmp_path: Path) -> None:
    with tls_front(shared_redis.port, self_signed(tmp_path)) as port:
        whole(REDIS_URL=f"rediss://127.0.0.1:{port}/0")
        assert "TINWORKS_REDIS_CERT_REQS=none" in failures(examined()[1])["broker"]
        whole(TINWORKS_REDIS_CERT_REQS="none")
        assert failures(examined()[1]) == {}


def test_a_redis_that_may_forget(whole: Set, own_redis: RedisServer) -> None:
    import redis

    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    whole(REDIS_URL=own_redis.url)
    assert "noeviction" in failures(examined()[1])["redis memory"]


def test_a_blob_folder_that_is_a_file(whole: Set, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    whole(TINWORKS_DATA_DIR=tmp_path / "file")
    result, found = examined()
    assert result.exit_code == 1 and set(failures(found)) == {"blobs"}


def test_a_bucket_is_written_read_and_presigned(whole: Set, shared_s3: S3Server) -> None:
    whole(**shared_s3.environment(shared_s3.new_bucket()))
    _, found = examined()
    names = {"blobs", "conditional put", "download links"}
    assert {name for name in names if found[name]["grade"] == "ok"} == names, found
    assert found["download links"]["seen"] == "signed by the bucket"


@pytest.mark.parametrize(
    "change", [{"TINWORKS_S3_ENDPOINT_URL": "http://127.0.0.1:1"}, {"AWS_SECRET_ACCESS_KEY": "wrong"}]
)
def test_a_bucket_that_does_not_answer_or_is_not_ours(whole: Set, shared_s3: S3Server, change: dict[str, str]) -> None:
    whole(**shared_s3.environment(shared_s3.new_bucket()) | change)
    result, found = examined()
    assert result.exit_code == 1 and "TINWORKS_S3_BUCKET" in failures(found)["blobs"]


def test_a_bucket_that_clients_cannot_reach_by_its_public_address(whole: Set, shared_s3: S3Server) -> None:
    whole(**shared_s3.environment(shared_s3.new_bucket()), TINWORKS_S3_PUBLIC_URL="http://127.0.0.1:1")
    _, found = examined()
    assert found["download links"]["grade"] == "warning"
    assert "TINWORKS_S3_PUBLIC_URL" in found["download links"]["todo"]


def test_workers_that_are_missing_are_a_warning(whole: Set) -> None:
    with get_database().write() as session:
        factories.add_worker(session, pool="large", roles=["train"])
    result, found = examined()
    assert result.exit_code == 0
    assert (found["fleet"]["grade"], found["fleet"]["seen"]) == ("warning", "no sample worker for large")


def model(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    shards = {f"model-0000{n}-of-00002.safetensors": {f"t{n}": torch.zeros(100)} for n in (1, 2)}
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_whole_model_is_fine(whole: Set, tmp_path: Path) -> None:
    whole(TINWORKS_BASE_MODEL=f"small={model(tmp_path / 'model')}")
    assert examined()[1]["model"]["grade"] == "ok"


@pytest.mark.parametrize(
    ("break_it", "seen"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(), "00002.safetensors is missing"),
        (lambda folder: _cut(folder / "model-00001-of-00002.safetensors", 40), "lacks 40 bytes"),
        (lambda folder: _cut(folder / "model-00001-of-00002.safetensors", 460), "is cut off"),
    ],
)
def test_a_broken_model_is_named(whole: Set, tmp_path: Path, break_it: Callable[[Path], None], seen: str) -> None:
    folder = model(tmp_path / "model")
    break_it(folder)
    whole(TINWORKS_BASE_MODEL=str(folder))
    result, found = examined()
    assert result.exit_code == 1 and found["model"]["grade"] == "failed" and seen in found["model"]["seen"]


def _cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def test_a_device_that_is_not_there(whole: Set) -> None:
    whole(TINWORKS_GPUS="0,97")
    found = {finding.name: finding for finding in check_gpus(get_settings())}
    assert found["torch"].grade == "ok" and torch.__version__ in found["torch"].seen
    assert found["gpus"].grade == "failed" and "97" in found["gpus"].seen


def test_a_host_without_torch_cannot_run_a_worker(whole: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = check_gpus(get_settings())
    assert found.grade == "ok"
    whole(TINWORKS_BASE_MODEL="org/model")
    (found,) = check_gpus(get_settings())
    assert found.grade == "failed" and "tinworks[worker]" in found.todo


def test_a_setting_that_is_wrong_ends_it_in_a_sentence(whole: Set) -> None:
    whole(TINWORKS_AUTH="everybody")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "auth: Input should be" in result.stderr
