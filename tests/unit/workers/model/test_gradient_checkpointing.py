"""Layers that are computed once more in the backward give the same gradients and hold less memory."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.families import DENSE, plain
from workers.model.base import BaseModel
from workers.model.batch import Row, assemble
from workers.model.checkpointing import checkpoint_layers, checkpointed_above, kept_per_token
from workers.model.forward import Work, batch_logprobs, run_pass
from workers.model.preparation import Preparation, prepare


def deep() -> PreTrainedModel:
    """More layers than the other models here have, so that they are what counts."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**DENSE, "num_hidden_layers": 12}))


def base_of(make: Callable[[], PreTrainedModel], setting: str, attention: str = "padded") -> BaseModel:
    base = BaseModel(make().eval(), "test")
    prepare(base, Preparation(attention, setting))  # type: ignore[arg-type]
    return base


def works_of(base: BaseModel) -> list[Work]:
    """Three runs of different ranks, more than one micro-batch holds."""
    lengths = ([9, 30, 4], [25, 11], [40])
    works = []
    for i, (rank, mine) in enumerate(zip((2, 16, 5), lengths, strict=True)):
        adapter = reference.random_adapter(base, i, rank=rank)
        works.append(Work(adapter, reference.random_data(i, mine), "cross_entropy"))
    return works


@pytest.mark.parametrize("attention", ["padded", "dense"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss", "deepseek-v3", "qwen3-next"])
def test_gradients_are_the_same_bit_for_bit(name: str, attention: str) -> None:
    found = []
    for setting in ("off", "on"):
        base = base_of(lambda: plain(name), setting, attention)
        works = works_of(base)
        outputs = run_pass(base, works, micro_batch_tokens=64)
        assert not any(isinstance(output, Exception) for output in outputs), outputs
        found.append([work.adapter.grad_flat.clone() for work in works])
    for without, checkpointed in zip(*found, strict=True):
        assert torch.equal(without, checkpointed)
        assert without.any()


def test_a_backward_in_another_thread_and_after_another_forward_routes_as_its_own_forward_did() -> None:
    """CUDA's backward runs in a thread of its own, which knows no context."""
    found = []
    for setting in ("off", "on"):
        base = base_of(lambda: plain("qwen3"), setting)
        adapters = [reference.random_adapter(base, i, rank=4) for i in range(2)]
        passes = []
        for i, adapter in enumerate(adapters):
            rows = [Row(0, n, adapter, datum) for n, datum in enumerate(reference.random_data(i, [12, 12]))]
            passes.append(batch_logprobs(base, assemble(rows, base.device)))
        thread = Thread(target=lambda logprobs=passes: [each.sum().backward() for each in logprobs])
        thread.start()
        thread.join()
        found.append([adapter.grad_flat.clone() for adapter in adapters])
    for without, checkpointed in zip(*found, strict=True):
        assert without.any()
        assert torch.equal(without, checkpointed)


class Bytes(TorchDispatchMode):
    """The most bytes of tensors made inside the block that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return made


def test_memory_falls() -> None:
    peaks = {}
    for setting in ("off", "on"):
        base = base_of(deep, setting)
        adapter = reference.random_adapter(base, 0)
        work = Work(adapter, reference.random_data(0, [60] * 4), "cross_entropy")
        adapter.zero_grad()
        with Bytes() as counted:
            (output,) = run_pass(base, [work], micro_batch_tokens=4096)
        assert not isinstance(output, Exception), output
        peaks[setting] = counted.peak
    assert peaks["on"] < peaks["off"] / 3


def test_sampling_and_forwards_alone_keep_nothing_and_run_once() -> None:
    base = base_of(lambda: plain("qwen3"), "on")
    calls = []
    base.backbone.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        base.hidden(torch.zeros((1, 5), dtype=torch.int64))
    assert len(calls) == 1


def empty(**config: int) -> PreTrainedModel:
    """A model without weights."""
    with torch.device("meta"):
        return Qwen3ForCausalLM(Qwen3Config(**config))


def test_auto_is_on_from_a_billion_parameters_on() -> None:
    small, large = (empty(hidden_size=2048, num_hidden_layers=n, vocab_size=32_000) for n in (2, 14))
    assert checkpointed_above("auto", large) == 0
    assert checkpointed_above("auto", small) != 0
    assert checkpointed_above("on", small) == 0 and checkpointed_above("off", large) is None


def test_auto_lets_smaller_models_keep_two_gibibytes() -> None:
    model = empty(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9)
    above = checkpointed_above("auto", model)
    assert above is not None and 1024 <= above < 2048
    assert checkpointed_above("auto", model.to(torch.bfloat16)) == pytest.approx(2 * above, abs=1)


def test_what_layers_keep_is_estimated_within_a_third() -> None:
    base = base_of(deep, "off")
    peaks = []
    for length in (20, 60):
        adapter = reference.random_adapter(base, 0)
        work = Work(adapter, reference.random_data(0, [length] * 4), "cross_entropy")
        adapter.zero_grad()
        with Bytes() as counted:
            run_pass(base, [work], micro_batch_tokens=4096)
        peaks.append(counted.peak)
    measured = (peaks[1] - peaks[0]) / (4 * 40) / 4
    assert kept_per_token(base.model.config) == pytest.approx(measured, rel=1 / 3)


@pytest.mark.parametrize(("above", "times"), [(24, 1), (23, 2)])
def test_only_larger_micro_batches_are_computed_once_more(above: int, times: int) -> None:
    base = BaseModel(plain("qwen3").eval(), "test")
    checkpoint_layers(base.backbone, above=above)
    calls = []
    base.backbone.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    work = Work(reference.random_adapter(base, 0), reference.random_data(0, [12, 12]), "cross_entropy")
    (output,) = run_pass(base, [work], micro_batch_tokens=4096)
    assert not isinstance(output, Exception), output
    assert len(calls) == times
