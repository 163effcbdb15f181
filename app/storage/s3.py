"""Blobs in a bucket of S3, or of a service that speaks its protocol (the interface is in `blobs`).

Requests are signed with SigV4, with the credentials that boto3 finds: `AWS_ACCESS_KEY_ID` and the like, a profile, a
role. It repeats what fails in passing, with jitter. What is larger than 16 MiB goes in parallel parts, from the buffer
or the file where it is, and comes into one buffer.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import boto3
import structlog
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
from s3transfer.exceptions import RetriesExceededError

from app.errors import StorageUnavailable
from app.settings import Settings
from app.storage.blobs import PIECE_BYTES, Blob, BlobExists, BlobMissing, Source, check_key

log = structlog.get_logger(__name__)

PARTS_FROM_BYTES = 16 * 2**20
PART_BYTES = 8 * 2**20
PARALLEL_PARTS = 4
"""Parts in flight from buffers, each copied; 32 MiB of memory at most, however large the blob is. Files are sent from
the disk."""
_TRIES = 4
_CONNECT_S, _READ_S = 5, 30
_DELETED_AT_ONCE = 1000
_MISSING = {"NoSuchKey", "NotFound", "404"}
_TAKEN = {"PreconditionFailed", "412"}
_CONTENDED = {"ConditionalRequestConflict", "OperationAborted", "409"}
_BEHIND_THE_END = {"InvalidRange", "416"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "403", "401"}


def open_bucket(settings: Settings) -> S3BlobStore:
    """The bucket that the settings name. Asks nothing of it yet."""
    client = _client(settings, settings.s3_endpoint_url)
    public = _client(settings, settings.s3_public_url) if settings.s3_public_url else client
    return S3BlobStore(client, settings.s3_bucket, prefix=settings.s3_prefix, sse=settings.s3_sse, signer=public)


def _client(settings: Settings, endpoint: str) -> Any:
    paths = settings.s3_path_style
    if paths is None:  # a certificate for *.s3… does not cover a dot
        paths = bool(settings.s3_endpoint_url) or "." in settings.s3_bucket
    options: dict[str, Any] = {"s3": {"addressing_style": "path" if paths else "virtual"}}
    if endpoint:  # services beside Amazon's do not know its newer checksums; the manifest has one of ours
        options |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    config = Config(
        signature_version="s3v4",
        retries={"mode": "standard", "total_max_attempts": _TRIES},
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        max_pool_connections=32,
        **options,
    )
    region = settings.s3_region or ("us-east-1" if endpoint else None)
    return boto3.session.Session().client("s3", region_name=region, endpoint_url=endpoint or None, config=config)


class S3BlobStore:
    """The blobs below `prefix` in one bucket. Safe to use from any thread.

    `sse`: server-side encryption, `AES256`, `aws:kms` or `aws:kms:<key id>`; empty: what the bucket does by itself.
    `signer`: a client whose endpoint is the one in signed URLs.
    """

    def __init__(self, client: Any, bucket: str, *, prefix: str = "", sse: str = "", signer: Any = None) -> None:
        self._client = client
        self._signer = signer or client
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._encryption = _encryption(sse)
        config = TransferConfig(
            multipart_threshold=PARTS_FROM_BYTES,
            multipart_chunksize=PART_BYTES,
            max_concurrency=8,
            preferred_transfer_client="classic",
        )
        config.max_in_memory_upload_chunks = PARALLEL_PARTS
        self._transfers = create_transfer_manager(client, config)

    def put(self, key: str, data: Source) -> None:
        name = self._name(key)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        with _told(key):
            if size < PARTS_FROM_BYTES and not isinstance(data, Path):
                self._client.put_object(Bucket=self._bucket, Key=name, Body=bytes(data), **self._encryption)
                return
            source = str(data) if isinstance(data, Path) else _Buffer(data)
            self._transfers.upload(source, self._bucket, name, self._encryption).result()

    def put_new(self, key: str, data: bytes) -> None:
        name = self._name(key)
        for last in (False, False, True):
            with _told(key):
                try:
                    self._client.put_object(
                        Bucket=self._bucket, Key=name, Body=data, IfNoneMatch="*", **self._encryption
                    )
                    return
                except ClientError as error:
                    if _code(error) in _TAKEN:
                        raise BlobExists(key) from error
                    if last or _code(error) not in _CONTENDED:
                        raise

    def get(self, key: str) -> bytes:
        name = self._name(key)
        with _told(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
            size = answer["ContentLength"]
            if size < PARTS_FROM_BYTES:
                try:
                    with closing(answer["Body"]) as body:
                        return bytes(body.read())
                except (BotoCoreError, OSError):  # cut off; the parts below are tried again one by one
                    log.warning("download_cut_off", size=size)
            else:
                answer["Body"].close()
            buffer = io.BytesIO()
            if size:  # made as large as it will be, so that it need not grow by copies
                buffer.seek(size - 1)
                buffer.write(b"\0")
                buffer.seek(0)
            self._transfers.download(self._bucket, name, buffer).result()
            return buffer.getvalue()

    def stream(self, key: str, *, start: int, length: int) -> Iterator[bytes]:
        if not length:
            self.size(key)
        position, stop = start, start + length
        while position < stop:
            begun, upto = position, min(stop, position + PARTS_FROM_BYTES)
            try:
                for piece in self._range(key, begun, upto):
                    position += len(piece)
                    yield piece
            except StorageUnavailable:
                if position == begun:
                    raise
                continue  # cut off; what has come is good
            if position < upto:
                return

    def _range(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        name = self._name(key)
        with _told(key):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=name, Range=f"bytes={start}-{stop - 1}")
            except ClientError as error:
                if _code(error) in _BEHIND_THE_END:
                    return
                raise
            with closing(answer["Body"]) as body:
                yield from body.iter_chunks(PIECE_BYTES)

    def signed_url(self, key: str, *, filename: str, expires_in_s: int) -> str | None:
        disposition = f'attachment; filename="{filename}"'
        params = {"Bucket": self._bucket, "Key": self._name(key), "ResponseContentDisposition": disposition}
        with _told(key):
            return str(self._signer.generate_presigned_url("get_object", Params=params, ExpiresIn=expires_in_s))

    def size(self, key: str) -> int:
        name = self._name(key)
        with _told(key):
            try:
                return int(self._client.head_object(Bucket=self._bucket, Key=name)["ContentLength"])
            except ClientError as error:
                if _code(error) in _MISSING:  # of a bucket that is not there, HEAD says the same
                    self._client.list_objects_v2(Bucket=self._bucket, Prefix=name, MaxKeys=1)
                raise

    def list(self, prefix: str) -> list[str]:
        return sorted(blob.key for blob in self.blobs(prefix))

    def blobs(self, prefix: str, *, after: str = "") -> Iterator[Blob]:
        folder = f"{self._name(prefix)}/"
        options = {"StartAfter": f"{self._prefix}{after}"} if after else {}
        with _told():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=folder, **options
            )
            for row in chain.from_iterable(page.get("Contents", ()) for page in pages):
                if not row["Key"].endswith("/"):  # what some tools put for a folder
                    yield Blob(row["Key"].removeprefix(self._prefix), row["Size"], row["LastModified"])

    def delete(self, prefix: str) -> None:
        name = self._name(prefix)
        with _told():
            self._client.delete_object(Bucket=self._bucket, Key=name)
            self._delete_all(f"{self._prefix}{blob.key}" for blob in self.blobs(prefix))

    def _delete_all(self, names: Iterable[str]) -> None:
        left = iter(names)
        while some := [{"Key": name} for name in islice(left, _DELETED_AT_ONCE)]:
            wanted = {"Objects": some, "Quiet": True}
            answer = self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
            for failed in answer.get("Errors", ()):
                raise ClientError({"Error": failed}, "DeleteObjects")

    def remove_unfinished(self, before: datetime) -> int:
        count = 0
        with _told():
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            for upload in chain.from_iterable(page.get("Uploads", ()) for page in pages):
                if upload["Initiated"] < before:
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    count += 1
        return count

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)


class _Buffer(io.RawIOBase):
    """A buffer as a file, read without a copy of the whole."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B")
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = len(self._view) if size < 0 else self._at + size
        piece = bytes(self._view[self._at : stop])
        self._at += len(piece)
        return piece


def _encryption(sse: str) -> dict[str, str]:
    if not sse:
        return {}
    if sse.startswith("aws:kms:"):
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": sse.removeprefix("aws:kms:")}
    return {"ServerSideEncryption": sse}


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


@contextmanager
def _told(key: str = "") -> Iterator[None]:
    """Errors of S3 as what a store raises; the log has the rest."""
    try:
        yield
    except ClientError as error:
        code = _code(error)
        if key and code in _MISSING:
            raise BlobMissing(key) from error
        log.warning("bucket_refuses", operation=error.operation_name, code=code)
        raise StorageUnavailable(_reason(code)) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        log.warning("bucket_has_no_credentials", error=type(error).__name__)
        raise StorageUnavailable("it has no credentials") from error
    except (BotoCoreError, Boto3Error, RetriesExceededError, OSError) as error:
        log.warning("bucket_out_of_reach", error=type(error).__name__)
        raise StorageUnavailable("it cannot be reached") from error


def _reason(code: str) -> str:
    if code in _DENIED:
        return "it denies access"
    if code in ("NoSuchBucket", *_MISSING):
        return "its bucket does not exist"
    return "it answers with an error"
