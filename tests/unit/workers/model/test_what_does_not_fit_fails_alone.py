"""Passes that run out of memory: they are tried in smaller pieces, and what does not fit at all fails alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.wire.types import Datum, ForwardBackwardOutput, LoraConfig
from tests.unit.workers.train.train_lab import random_data, tiny_base
from workers.model import forward, memory
from workers.model.batch import MicroBatch
from workers.model.forward import Work, run_pass
from workers.model.memory import OutOfMemory

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: Error code 12"),
    MemoryError(),
]


@pytest.fixture
def works() -> list[Work]:
    """Two requests: one of many short sequences, one with a long one."""
    adapters = [tiny_base().new_adapter(LoraConfig(rank=2, seed=seed)) for seed in (1, 2)]
    return [_work(adapters[0], random_data(1, [8] * 6)), _work(adapters[1], random_data(2, [30, 4]))]


def _work(adapter: object, data: list[Datum]) -> Work:
    return Work(adapter, data, "cross_entropy")  # type: ignore[arg-type]


def room_for(tokens: int, patch: pytest.MonkeyPatch, error: Exception) -> list[int]:
    """Let every micro-batch of more tokens fail. Returns a list that grows with the size of each that is tried."""
    real, tried = forward.batch_logprobs, []

    def tight(base: object, batch: MicroBatch) -> torch.Tensor:
        tried.append(batch.input_ids.numel())
        if tried[-1] > tokens:
            raise error
        return real(base, batch)  # type: ignore[arg-type]

    patch.setattr(forward, "batch_logprobs", tight)
    return tried


def gradients(works: list[Work]) -> list[torch.Tensor]:
    return [work.adapter.grad_flat.clone() for work in works]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_a_pass_that_does_not_fit_is_computed_in_smaller_micro_batches(
    works: list[Work], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = run_pass(tiny_base(), works, micro_batch_tokens=4096)
    wanted = gradients(works)
    for work in works:
        work.adapter.zero_grad()
    tried = room_for(40, monkeypatch, error)
    found = run_pass(tiny_base(), works, micro_batch_tokens=4096)
    for mine, theirs, grad, work in zip(found, expected, wanted, works, strict=True):
        assert isinstance(mine, ForwardBackwardOutput) and isinstance(theirs, ForwardBackwardOutput)
        assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-5)
        assert torch.allclose(work.adapter.grad_flat, grad, rtol=1e-4, atol=1e-6)
    assert tried[0] > 40 and tried[-1] <= 40


def test_a_request_whose_longest_datum_does_not_fit_fails_and_adds_nothing(
    works: list[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    works[1].adapter.add_grad(torch.ones_like(works[1].adapter.grad_flat))
    tried = room_for(16, monkeypatch, NO_MEMORY[0])
    fits, too_long = run_pass(tiny_base(), works, micro_batch_tokens=64)
    assert isinstance(fits, ForwardBackwardOutput)
    assert isinstance(too_long, OutOfMemory)
    assert too_long.detail.startswith("the worker's memory does not hold its longest datum (30 tokens) even by itself")
    assert torch.equal(works[1].adapter.grad_flat, torch.ones_like(works[1].adapter.grad_flat))
    assert len(tried) < 20


def test_another_error_is_no_reason_to_try_again_in_pieces(works: list[Work], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = room_for(0, monkeypatch, RuntimeError("the kernel is broken"))
    outcomes = run_pass(tiny_base(), works, micro_batch_tokens=4096)
    assert [str(outcome) for outcome in outcomes] == ["the kernel is broken"] * 2
    assert len(tried) == 3


def test_what_plainly_cannot_fit_is_refused_before_it_is_tried(
    works: list[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "ALWAYS_TRIED_BYTES", 0)
    per_token = memory._least_per_token(tiny_base(), True) * 4
    monkeypatch.setattr(memory, "free_bytes", lambda: 20 * per_token)
    tried = room_for(1000, monkeypatch, NO_MEMORY[0])
    fits, too_long = run_pass(tiny_base(), works, micro_batch_tokens=4096)
    assert isinstance(fits, ForwardBackwardOutput)
    assert isinstance(too_long, OutOfMemory) and "30 tokens at once need 0.0 GiB" in too_long.detail
    assert max(tried) <= 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files by which Linux says how much memory there is."""
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    yield tmp_path


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 5_120_000), ("max", 5_120_000), ("4000000", 1_500_000), ("900000000", 5_120_000)]
)
def test_what_is_free_is_what_machine_and_container_both_have(machine: Path, limit: str | None, expected: int) -> None:
    if limit is not None:
        (machine / "memory.max").write_text(limit + "\n")
        (machine / "memory.current").write_text("3000000\n")
        (machine / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert memory.free_bytes() == expected


def test_a_machine_that_does_not_say_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_bytes() > 2**60
