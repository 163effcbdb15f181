"""What a bucket answers, as what the service is told; and what it is asked, with what settings."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from botocore.stub import ANY, Stubber

from app.errors import StorageUnavailable
from app.settings import Settings
from app.storage.blobs import BlobExists, BlobMissing
from app.storage.s3 import S3BlobStore, open_bucket


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def opened(**settings: Any) -> tuple[S3BlobStore, Stubber]:
    store = open_bucket(Settings(**{"s3_bucket": "bucket", "s3_region": "eu-north-1", **settings}))
    stub = Stubber(store._client)
    stub.activate()
    return store, stub


@pytest.mark.parametrize(
    ("code", "status", "raised", "text"),
    [
        ("NoSuchKey", 404, BlobMissing, "a/b"),
        ("NoSuchBucket", 404, StorageUnavailable, "bucket does not exist"),
        ("AccessDenied", 403, StorageUnavailable, "denies access"),
        ("InvalidAccessKeyId", 403, StorageUnavailable, "denies access"),
        ("ExpiredToken", 400, StorageUnavailable, "denies access"),
        ("SlowDown", 503, StorageUnavailable, "answers with an error"),
    ],
)
def test_reading(code: str, status: int, raised: type[Exception], text: str) -> None:
    store, stub = opened()
    stub.add_client_error("get_object", code, "key someone", status)
    with pytest.raises(raised, match=text) as caught:
        store.get("a/b")
    if isinstance(caught.value, StorageUnavailable):
        assert "someone" not in caught.value.detail


def test_a_size_in_a_bucket_that_is_not_there_is_an_outage() -> None:
    store, stub = opened()
    stub.add_client_error("head_object", "404", "Not Found", 404)
    stub.add_client_error("list_objects_v2", "NoSuchBucket", "", 404)
    with pytest.raises(StorageUnavailable):
        store.size("a/b")


def test_a_size_of_a_blob_that_is_not_there_is_missing() -> None:
    store, stub = opened()
    stub.add_client_error("head_object", "404", "Not Found", 404)
    stub.add_response("list_objects_v2", {"KeyCount": 0})
    with pytest.raises(BlobMissing):
        store.size("a/b")


def test_a_put_of_something_new_is_conditional_and_tried_again_in_a_race() -> None:
    store, stub = opened()
    wanted = {"Bucket": "bucket", "Key": "a/b", "Body": b"x", "IfNoneMatch": "*"}
    stub.add_client_error("put_object", "ConditionalRequestConflict", "", 409, expected_params=wanted)
    stub.add_client_error("put_object", "PreconditionFailed", "", 412, expected_params=wanted)
    with pytest.raises(BlobExists):
        store.put_new("a/b", b"x")
    stub.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("sse", "sent"),
    [
        ("", {}),
        ("AES256", {"ServerSideEncryption": "AES256"}),
        ("aws:kms", {"ServerSideEncryption": "aws:kms"}),
        ("aws:kms:arn:k/1", {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn:k/1"}),
    ],
)
def test_encryption_is_asked_for(sse: str, sent: dict[str, str]) -> None:
    store, stub = opened(s3_sse=sse)
    stub.add_response("put_object", {}, {"Bucket": "bucket", "Key": "a/b", "Body": ANY} | sent)
    stub.add_response("put_object", {}, {"Bucket": "bucket", "Key": "a/c", "Body": ANY, "IfNoneMatch": "*"} | sent)
    store.put("a/b", b"x")
    store.put_new("a/c", b"x")
    stub.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "https://bucket.s3.eu-north-1.amazonaws.com/a/b?"),
        ({"s3_path_style": True}, "https://s3.eu-north-1.amazonaws.com/bucket/a/b?"),
        ({"s3_endpoint_url": "http://minio:9000/"}, "http://minio:9000/bucket/a/b?"),
        ({"s3_endpoint_url": "http://minio:9000", "s3_path_style": False}, "http://bucket.minio:9000/a/b?"),
        ({"s3_endpoint_url": "http://minio:9000", "s3_prefix": "/x/y/"}, "http://minio:9000/bucket/x/y/a/b?"),
    ],
)
def test_urls_are_signed_for_the_bucket_as_it_is_addressed(settings: dict[str, Any], url: str) -> None:
    store, _ = opened(**settings)
    signed = store.signed_url("a/b", filename="f", expires_in_s=60)
    assert signed is not None
    assert signed.startswith(url)
    assert "X-Amz-Algorithm=AWS4-HMAC-SHA256" in signed
    assert "secret" not in signed


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("TINWORKS_S3_BUCKET", "b", "s3_bucket"),
        ("TINWORKS_S3_PREFIX", "p", "s3_prefix"),
        ("TINWORKS_S3_ENDPOINT_URL", "http://x", "s3_endpoint_url"),
        ("AWS_ENDPOINT_URL", "http://x", "s3_endpoint_url"),
        ("AWS_ENDPOINT_URL_S3", "http://x", "s3_endpoint_url"),
        ("AWS_REGION", "eu-west-1", "s3_region"),
        ("AWS_DEFAULT_REGION", "eu-west-1", "s3_region"),
        ("TINWORKS_S3_SSE", "AES256", "s3_sse"),
    ],
)
def test_settings_have_the_names_that_platforms_give_them(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, setting: str
) -> None:
    monkeypatch.setenv(name, value)
    assert getattr(Settings(), setting) == value


@pytest.mark.parametrize(
    "wrong", [{"s3_endpoint_url": "minio:9000"}, {"s3_sse": "yes"}, {"s3_prefix": "a b"}, {"s3_prefix": "../x"}]
)
def test_wrong_settings_are_refused_at_start(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="TINWORKS_S3_"):
        Settings(**wrong)


def test_a_service_with_a_local_folder_does_not_load_boto3() -> None:
    program = "import sys, app.main, app.storage.blobs; sys.exit('boto3' in sys.modules or 'botocore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
