"""The adapters in vLLM: one name, number and folder for each that is loaded, none of them ever used for another.

vLLM may drop an adapter from memory and read it again whenever it likes, and dies if it cannot. So it reads from a
folder of our own, which stays until no request has the adapter any more, whatever becomes of the files that it was
loaded from.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import InvalidRequest
from workers.model.base import BaseModel
from workers.model.export import CONFIG_FILE, WEIGHTS_FILE
from workers.sample.engines.vllm_loop import EngineDead, VllmLoop
from workers.snapshot_files import BadSnapshot
from workers.train.snapshots import read_adapter_folder

DYING_S = 30.0
"""The process ends within so long of vLLM's death. Who waits for an adapter must not hear of it: other samplers get the
requests."""


@dataclass(slots=True, eq=False)
class VllmAdapter:
    """A loaded adapter. `request`: vLLM's `LoRARequest`. `jobs`: how many have it and are not done."""

    request: Any
    folder: Path
    jobs: int = 0
    retired: bool = False


class VllmAdapters:
    """Loads and unloads. Methods may be called from any thread but vLLM's."""

    def __init__(self, loop: VllmLoop, outline: BaseModel, *, max_rank: int) -> None:
        """`outline`: the model without its weights, which adapters have to fit."""
        self._loop = loop
        self._outline = outline
        self._max_rank = max_rank
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._root = Path(tempfile.mkdtemp(prefix="tinworks-vllm-"))

    def load(self, snapshot_id: str, folder: Path) -> VllmAdapter:
        """Check an adapter and load it. Raises BadSnapshot, or InvalidRequest if its rank is above the bound.

        vLLM alone would take an adapter of a smaller model, and fill up what is missing with zeros.
        """
        rank = read_adapter_folder(folder, self._outline).config.rank
        if rank > self._max_rank:
            text = f"this sampler serves ranks up to {self._max_rank} (TINWORKS_VLLM_MAX_LORA_RANK)"
            raise InvalidRequest(f"the checkpoint's adapter has rank {rank}; {text}")
        adapter = self._named(snapshot_id, folder)
        try:
            self._loop.call(self._loop.add_adapter(adapter.request))
        except EngineDead:
            threading.Event().wait(DYING_S)
            raise
        except Exception as error:
            self.retire(adapter)
            raise BadSnapshot(f"the checkpoint's adapter cannot be served: {error}") from error
        return adapter

    def _named(self, snapshot_id: str, folder: Path) -> VllmAdapter:
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        own = self._root / f"{number}-{snapshot_id}"
        own.mkdir()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            try:
                os.link(folder / name, own / name)
            except OSError:
                shutil.copyfile(folder / name, own / name)
        return VllmAdapter(LoRARequest(own.name, number, str(own), is_3d_lora_weight=True), own)

    def hold(self, adapter: VllmAdapter) -> None:
        """A job has it."""
        with self._lock:
            adapter.jobs += 1

    def release(self, adapter: VllmAdapter) -> None:
        """A job that had it is done."""
        with self._lock:
            adapter.jobs -= 1
            gone = adapter.retired and adapter.jobs == 0
        if gone:
            self._remove(adapter)

    def retire(self, adapter: VllmAdapter) -> None:
        """No new job will have it."""
        with self._lock:
            gone = not adapter.retired and adapter.jobs == 0
            adapter.retired = True
        if gone:
            self._remove(adapter)

    def _remove(self, adapter: VllmAdapter) -> None:
        with suppress(RuntimeError):  # the loop has ended
            removal = self._loop.later(self._loop.remove_adapter(adapter.request))
            removal.add_done_callback(lambda _: shutil.rmtree(adapter.folder, ignore_errors=True))

    def close(self) -> None:
        """Delete all folders. vLLM has ended."""
        shutil.rmtree(self._root, ignore_errors=True)
