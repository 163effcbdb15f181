"""Downloads: signed, expiring URLs of a checkpoint's files, and what is behind those that we sign ourselves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from app.checkpoints import uploads
from app.checkpoints.catalogue import Address
from app.checkpoints.files import Content, archive_of, stored_files
from app.checkpoints.links import LinkSigner, Target
from app.checkpoints.schemas import ExternalWeightsUrls, SignedUrl
from app.checkpoints.service import EXTERNAL, KINDS, resolve
from app.db import Database
from app.errors import Forbidden, NotFound, Unavailable
from app.settings import Settings
from app.storage.blobs import BlobStore

ROUTE = "/api/v1/downloads"


@dataclass(frozen=True, slots=True)
class Download:
    """What a link leads to."""

    content: Content
    filename: str
    media_type: str


class Downloads:
    """The downloads of one API process. `blobs`: where their content is read from."""

    def __init__(self, database: Database, blobs: BlobStore, settings: Settings) -> None:
        self._database = database
        self.blobs = blobs
        self._settings = settings
        self._signer = LinkSigner(database, settings)

    def external_urls(self, owner_id: str, address: Address, base_url: str) -> ExternalWeightsUrls:
        """A URL for each file of exported weights, the owner's or published ones. `base_url`: how the client reaches
        us. Raises InvalidRequest for another kind of checkpoint, or NotFound.
        """
        with self._database.read() as session:
            found = resolve(session, owner_id, str(address), field="checkpoint_id", kinds={EXTERNAL})
        expires_at = self._expiry()
        urls = {}
        for name, file in stored_files(self.blobs, found.snapshot.id).items():
            target = Target(found.snapshot.id, name, name)
            signed = self.blobs.signed_url(file.key, filename=name, expires_in_s=self._settings.download_url_ttl_s)
            urls[name] = signed or self._own_url(base_url, target, expires_at)
        return ExternalWeightsUrls(urls=urls, expires=datetime.fromtimestamp(expires_at, UTC))

    def archive_url(self, owner_id: str, address: Address, base_url: str) -> SignedUrl:
        """The URL of a tar of all files of a checkpoint of any kind, the owner's or a published one; always one of our
        own, since no store has such a file. Raises InvalidRequest, NotFound, or Unavailable while the files are on
        their way to the store.
        """
        with self._database.read() as session:
            found = resolve(session, owner_id, str(address), field="checkpoint_id", kinds=KINDS)
            if uploads.is_waiting(session, found.snapshot.id):
                raise Unavailable("checkpoint_id: the checkpoint's files are not stored yet; try again")
        stored_files(self.blobs, found.snapshot.id)
        expires_at = self._expiry()
        target = Target(found.snapshot.id, None, f"{address.name}.tar")
        url = self._own_url(base_url, target, expires_at)
        return SignedUrl(url=url, expires=datetime.fromtimestamp(expires_at, UTC))

    def open(self, token: str, filename: str) -> Download:
        """What a link of ours leads to. Raises Forbidden for a link that is not valid, NotFound if its file is gone."""
        link = self._signer.read(token)
        target = link.target
        if filename != target.name:
            raise Forbidden("this download link was signed for a file of another name")
        files = stored_files(self.blobs, target.snapshot_id)
        if target.file is None:
            return Download(archive_of(files, modified_at=link.signed_at), target.name, "application/x-tar")
        if target.file not in files:
            raise NotFound(f"the checkpoint has no file {target.file!r}")
        return Download(Content([files[target.file]]), target.name, "application/octet-stream")

    def _expiry(self) -> int:
        return int(time.time()) + self._settings.download_url_ttl_s

    def _own_url(self, base_url: str, target: Target, expires_at: int) -> str:
        base = (self._settings.public_url or base_url).rstrip("/")
        return f"{base}{ROUTE}/{self._signer.sign(target, expires_at=expires_at)}/{quote(target.name)}"
