"""Loading an adapter, however long it takes, holds up nobody."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from app.wire.types import SampleResult
from tests.unit.workers.sample.native_lab import Inbox, Lab, ask, drain, prompt, tokens_of
from workers.model.export import WEIGHTS_FILE, peft_files
from workers.model.lora import Adapter


def write(lab: Lab, adapter: Adapter, folder: Path) -> None:
    folder.mkdir()
    for name, data in peft_files(adapter, "tiny", lab.base).items():
        (folder / name).write_bytes(data)


def test_running_requests_go_on_while_a_slow_disk_holds_a_load(lab: Lab, tmp_path: Path) -> None:
    """The load waits for its file, a pipe, until the requests are done."""
    adapter = lab.adapter(3, 1)
    write(lab, adapter, tmp_path / "whole")
    slow = shutil.copytree(tmp_path / "whole", tmp_path / "slow")
    (slow / WEIGHTS_FILE).unlink()
    os.mkfifo(slow / WEIGHTS_FILE)
    engine, inbox, begun = lab.engine(), Inbox(), threading.Event()

    def load() -> object:
        begun.set()
        return engine.load_adapter("slow", slow)

    engine.submit(inbox.job(ask("first", prompt(6), max_tokens=12, temperature=0.0)))
    engine.step()
    with ThreadPoolExecutor(1) as loaders:
        loading = loaders.submit(load)
        assert begun.wait(10)
        engine.submit(inbox.job(ask("second", prompt(9), max_tokens=12, temperature=0.0), adapter))
        try:
            drain(engine)
            assert not loading.done()
        finally:
            (slow / WEIGHTS_FILE).write_bytes((tmp_path / "whole" / WEIGHTS_FILE).read_bytes())
        handle = loading.result(10)
    engine.submit(inbox.job(ask("third", prompt(9), max_tokens=12, temperature=0.0), handle))
    drain(engine)
    for name, length, who in (("first", 6, None), ("second", 9, adapter), ("third", 9, adapter)):
        outcome = inbox[name]
        assert isinstance(outcome, SampleResult), outcome
        assert tokens_of(outcome) == [lab.greedy(prompt(length), 12, who)]


def test_adapters_that_load_while_others_run_change_no_bit(lab: Lab, tmp_path: Path) -> None:
    adapters = [lab.adapter(1 + seed, seed) for seed in range(4)]
    for seed, adapter in enumerate(adapters):
        write(lab, adapter, tmp_path / str(seed))
    requests = [ask(str(i), prompt(5 + i), max_tokens=40, seed=i, num_samples=2) for i in range(4)]

    def serve(*, loads: int) -> dict[str, list[list[float]]]:
        engine, inbox = lab.engine(), Inbox()
        for request, adapter in zip(requests, adapters, strict=True):
            engine.submit(inbox.job(request, adapter))
        with ThreadPoolExecutor(2) as loaders:
            loading = [loaders.submit(engine.load_adapter, f"{i}", tmp_path / str(i % 4)) for i in range(loads)]
            drain(engine)
            for each in loading:
                engine.unload_adapter(each.result(30))
        return {name: [s.logprobs.tolist() for s in inbox.result(name).sequences] for name in inbox}

    assert serve(loads=40) == serve(loads=0)
