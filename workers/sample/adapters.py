"""The adapters that a sampler holds: fetched by snapshot id when first asked for, least recently used leave."""

from __future__ import annotations

from collections import OrderedDict

from app.storage.blobs import BlobStore
from workers.model.base import BaseModel
from workers.model.lora import Adapter
from workers.train.snapshots import read_adapter


class AdapterCache:
    """At most `capacity` adapters; one that left is fetched again. A running request keeps its own alive."""

    def __init__(self, base: BaseModel, blobs: BlobStore, *, capacity: int) -> None:
        self._base = base
        self._blobs = blobs
        self._capacity = capacity
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()

    def get(self, snapshot_id: str | None) -> Adapter | None:
        """The adapter of a snapshot; None for the base model. Raises BadSnapshot."""
        if snapshot_id is None:
            return None
        adapter = self._adapters.get(snapshot_id)
        if adapter is None:
            adapter = read_adapter(self._blobs, snapshot_id, self._base)
            self._adapters[snapshot_id] = adapter
            if len(self._adapters) > self._capacity:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(snapshot_id)
        return adapter
