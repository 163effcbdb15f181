"""The tokenizers that this process has read: a few, the least recently used leave."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from starlette.concurrency import run_in_threadpool

from app.compat.tokenizer import ModelTokenizer
from app.errors import InvalidRequest, Unavailable
from app.fleet.service import ServedModel
from app.shared_lookups import SharedLookups
from app.storage.blobs import BlobMissing, BlobStore

CAPACITY = 8


class TokenizerShelf:
    """Tokenizers by their blob, read when first asked for. One event loop's."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._tokenizers: OrderedDict[str, ModelTokenizer] = OrderedDict()
        self._reading: SharedLookups[ModelTokenizer] = SharedLookups()

    async def get(self, model: ServedModel) -> ModelTokenizer:
        """The model's tokenizer. Raises InvalidRequest if it has none, Unavailable if it cannot be read."""
        key = model.tokenizer_blob
        if key is None:
            raise InvalidRequest(f"model: {model.name!r} has no tokenizer on this server, so it takes no texts")
        found = self._tokenizers.get(key)
        if found is None:
            found = await self._reading.get(key, partial(run_in_threadpool, self._read, key))
            self._tokenizers[key] = found
            if len(self._tokenizers) > CAPACITY:
                self._tokenizers.popitem(last=False)
        self._tokenizers.move_to_end(key)
        return found

    def _read(self, key: str) -> ModelTokenizer:
        try:
            return ModelTokenizer.read(self._blobs.get(key))
        except (BlobMissing, ValueError) as error:
            raise Unavailable("the model's tokenizer cannot be read; its worker stores it when it starts") from error
