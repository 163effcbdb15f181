"""Downloads over HTTP: signed URLs of exported weights and of archives, for whom, how long, and what they lead to."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import orjson
import pytest
from tinker.types import ExternalWeightsUrlsResponse

from app.checkpoints import uploads
from app.checkpoints.links import LinkSigner, Target
from app.checkpoints.service import snapshot_folder
from app.db import utc_now
from app.runs.models import Run
from app.settings import get_settings
from app.storage.blobs import get_blob_store
from tests.factories import add_checkpoint
from tests.integration.conftest import Api, running

FILES = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": bytes(range(256)) * 40}


def make(api: Api, kind: str = "external_weights", who: str = "alice", **columns: object) -> tuple[str, str]:
    """A checkpoint with files; returns its address and its snapshot."""
    model_id = api.run(who)
    with api.database.write() as session:
        row = add_checkpoint(session, session.get_one(Run, model_id), kind=kind, **columns)  # type: ignore[arg-type]
    folder = snapshot_folder(row.snapshot_id)
    manifest = {name: {"size": len(data), "sha256": ""} for name, data in FILES.items()}
    for name, data in {**FILES, "manifest.json": orjson.dumps(manifest), "not-listed": b"x"}.items():
        get_blob_store().put(f"{folder}/{name}", data)
    return f"training_runs/{model_id}/checkpoints/{kind}/first", row.snapshot_id


def urls(api: Api, address: str, who: str = "alice") -> dict[str, str]:
    """The URLs, as the SDK reads them."""
    return ExternalWeightsUrlsResponse.model_validate(api.seen(f"{address}/external_weights_urls", who=who)).urls


def fetch(api: Api, url: str, **headers: str) -> httpx.Response:
    """What anybody gets who has the URL: no key is sent."""
    return api.client.get(url, headers=headers)


def archive(api: Api, address: str, who: str = "alice") -> httpx.Response:
    sent = {"x-api-key": api.keys[who]}
    return api.client.get(f"/api/v1/{address}/archive", headers=sent, follow_redirects=False)


def test_every_file_has_a_url_that_needs_no_key(each_api: Api) -> None:
    address, _ = make(each_api)
    found = urls(each_api, address)
    assert found.keys() == FILES.keys()
    for name, url in found.items():
        assert url.startswith("http://testserver/api/v1/downloads/") and url.endswith(f"/{name}")
        answer = fetch(each_api, url)
        assert answer.status_code == 200, answer.text
        assert answer.content == FILES[name]
        assert answer.headers["content-length"] == str(len(FILES[name]))
        assert answer.headers["content-type"] == "application/octet-stream"


def test_the_urls_say_when_they_expire(api: Api) -> None:
    address, _ = make(api)
    expires = datetime.fromisoformat(api.seen(f"{address}/external_weights_urls")["expires"])
    assert expires - utc_now() == pytest.approx(timedelta(hours=1), abs=timedelta(seconds=5))


def test_only_who_may_read_a_checkpoint_gets_its_urls(each_api: Api) -> None:
    address, _ = make(each_api)
    for route in ("external_weights_urls", "archive"):
        path = f"{address}/{route}"
        assert each_api.send("GET", path, who="bob").status_code == 404
        assert each_api.client.get(f"/api/v1/{path}").status_code == 401
    each_api.send("POST", f"{address}/publish")
    url = urls(each_api, address, "bob")["adapter_config.json"]
    assert fetch(each_api, url).content == FILES["adapter_config.json"]
    assert archive(each_api, address, "bob").status_code == 302
    each_api.send("DELETE", f"{address}/publish")
    assert each_api.send("GET", f"{address}/external_weights_urls", who="bob").status_code == 404


def test_an_expired_or_deleted_checkpoint_has_no_urls(api: Api) -> None:
    old, _ = make(api, expires_at=utc_now() - timedelta(seconds=1))
    gone, _ = make(api)
    assert api.send("DELETE", gone).status_code == 204
    for address in (old, gone):
        for route in ("external_weights_urls", "archive"):
            assert api.send("GET", f"{address}/{route}").status_code == 404


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_only_exported_weights_have_a_url_for_each_file(api: Api, kind: str) -> None:
    address, _ = make(api, kind)
    answer = api.send("GET", f"{address}/external_weights_urls")
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("checkpoint_id: ") and "external_weights" in answer.json()["detail"]


def test_an_archive_whose_files_are_on_their_way_to_the_store_is_asked_for_again(each_api: Api) -> None:
    address, snapshot_id = make(each_api, "sampler_weights")
    with each_api.database.write() as session:
        uploads.expect(session, snapshot_id)
    answer = archive(each_api, address)
    assert answer.status_code == 503 and "retry-after" in answer.headers
    with each_api.database.write() as session:
        uploads.uploaded(session, snapshot_id)
    assert archive(each_api, address).status_code == 302


def test_files_that_are_gone_are_a_404(api: Api) -> None:
    address, snapshot_id = make(api)
    url = urls(api, address)["adapter_config.json"]
    get_blob_store().delete(snapshot_folder(snapshot_id))
    for answer in (fetch(api, url), api.send("GET", f"{address}/external_weights_urls"), archive(api, address)):
        assert answer.status_code == 404
        assert "files are not there" in answer.json()["detail"]


def test_a_forged_or_expired_link_is_a_403(api: Api) -> None:
    address, snapshot_id = make(api)
    path = urlsplit(urls(api, address)["adapter_config.json"]).path
    *start, token, name = path.split("/")
    altered = token[:-5] + ("A" if token[-5] != "A" else "B") + token[-4:]
    signer = LinkSigner(api.database, get_settings())
    expired = signer.sign(Target(snapshot_id, name, name), expires_at=int(time.time()) - 1)
    wrong = [(altered, name), (expired, name), (api.keys["alice"], name), ("x", name), (token, "not-listed")]
    for bad_token, bad_name in wrong:
        answer = fetch(api, "/".join([*start, bad_token, bad_name]))
        assert answer.status_code == 403, answer.text
        assert "link" in answer.json()["detail"]
    assert fetch(api, path).status_code == 200


def test_a_link_leads_to_no_file_that_the_manifest_does_not_list(api: Api) -> None:
    _, snapshot_id = make(api)
    signer = LinkSigner(api.database, get_settings())
    for name in ("manifest.json", "not-listed"):
        token = signer.sign(Target(snapshot_id, name, name), expires_at=int(time.time()) + 60)
        assert fetch(api, f"/api/v1/downloads/{token}/{name}").status_code == 404


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-9", slice(0, 10)),
        ("bytes=100-", slice(100, None)),
        ("bytes=-7", slice(-7, None)),
        ("bytes=10000-99999", slice(10000, None)),
        ("bytes=-99999", slice(0, None)),
    ],
)
def test_a_part_of_a_file_can_be_fetched(api: Api, asked: str, part: slice) -> None:
    data = FILES["adapter_model.safetensors"]
    address, _ = make(api)
    answer = fetch(api, urls(api, address)["adapter_model.safetensors"], range=asked)
    first, stop, _ = part.indices(len(data))
    assert (answer.status_code, answer.content) == (206, data[part])
    assert answer.headers["content-range"] == f"bytes {first}-{stop - 1}/{len(data)}"
    assert answer.headers["content-length"] == str(stop - first)


@pytest.mark.parametrize("asked", ["bytes=5-4", "bytes=-", "lines=0-1", "bytes=0-1,3-4", "bytes=" + "9" * 5000 + "-"])
def test_a_range_of_another_form_is_ignored(api: Api, asked: str) -> None:
    address, _ = make(api)
    answer = fetch(api, urls(api, address)["adapter_config.json"], range=asked)
    assert (answer.status_code, answer.content) == (200, FILES["adapter_config.json"])


@pytest.mark.parametrize("asked", ["bytes=8-", "bytes=8-9", "bytes=-0"])
def test_a_range_behind_the_end_is_a_416(api: Api, asked: str) -> None:
    address, _ = make(api)
    answer = fetch(api, urls(api, address)["adapter_config.json"], range=asked)
    assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */8")


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_an_archive_of_any_kind_is_whole(each_api: Api, kind: str) -> None:
    address, _ = make(each_api, kind)
    answer = archive(each_api, address)
    assert answer.status_code == 302
    expires = parsedate_to_datetime(answer.headers["expires"])
    assert expires - datetime.now(UTC) == pytest.approx(timedelta(hours=1), abs=timedelta(seconds=5))
    assert answer.json()["url"] == answer.headers["location"]
    sent = fetch(each_api, answer.headers["location"])
    assert sent.headers["content-length"] == str(len(sent.content))
    with tarfile.open(fileobj=io.BytesIO(sent.content), mode="r:") as tar:
        read = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    assert read == {**FILES, "checkpoint_complete": b""}


def test_an_archive_can_be_fetched_in_parts(api: Api) -> None:
    url = archive(api, make(api)[0]).headers["location"]
    data = fetch(api, url).content
    half = len(data) // 2
    parts = [fetch(api, url, range=f"bytes=0-{half - 1}"), fetch(api, url, range=f"bytes={half}-")]
    assert b"".join(part.content for part in parts) == data


def test_links_name_the_server_as_the_client_does_unless_it_is_configured(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path) as api:
        address, _ = make(api)
        sent = {"x-api-key": api.keys["alice"], "host": "gpu-box:9000"}
        answer = api.client.get(f"/api/v1/{address}/external_weights_urls", headers=sent)
        assert all(url.startswith("http://gpu-box:9000/api/v1/") for url in answer.json()["urls"].values())
        sent["host"] = "not a host"
        assert api.client.get(f"/api/v1/{address}/external_weights_urls", headers=sent).status_code < 500
    public_url = "https://example.org/tinker/"
    with running(configure, sqlite_url, redis_url, tmp_path, public_url=public_url, download_url_ttl_s=60) as api:
        address, _ = make(api)
        found = api.seen(f"{address}/external_weights_urls")
        assert all(url.startswith("https://example.org/tinker/api/v1/downloads/") for url in found["urls"].values())
        expires = datetime.fromisoformat(found["expires"])
        assert expires - utc_now() == pytest.approx(timedelta(minutes=1), abs=timedelta(seconds=5))


def test_exported_weights_are_described_and_copied_like_others_but_not_loaded(each_api: Api) -> None:
    address, _ = make(each_api)
    model_id = address.split("/")[1]
    path = f"tinker://{model_id}/external_weights/first"
    (row,) = each_api.seen(f"training_runs/{model_id}/checkpoints")["checkpoints"]
    assert (row["checkpoint_type"], row["tinker_path"]) == ("external", path)
    assert each_api.ok("weights_info", {"tinker_path": path})["lora_rank"] == 4
    assert each_api.send("PUT", f"{address}/ttl", {"ttl_seconds": 3600}).status_code == 204
    copied = each_api.ok("copy_weights", {"source_path": path, "destination_project_id": "p"})["tinker_path"]
    copy_of = copied.removeprefix("tinker://").replace("/external_weights/", "/checkpoints/external_weights/")
    assert each_api.send("DELETE", address).status_code == 204
    assert urls(each_api, f"training_runs/{copy_of}").keys() == FILES.keys()
    other = each_api.run()
    each_api.ok("load_weights", {"model_id": other, "seq_id": 1, "path": copied, "optimizer": False})
    error = each_api.operation(other, 1).error
    assert error is not None and error.startswith("path: ") and "external_weights" in error
    body = {"session_id": each_api.session(), "sampling_session_seq_id": 0, "model_path": copied}
    assert each_api.post("create_sampling_session", body).status_code == 400
