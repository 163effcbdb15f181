"""Sequences packed into one row give what padded ones give, and are packed only where that holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import structlog
import torch
import torch.nn.functional as F
from structlog.testing import LogCapture
from torch import Tensor
from transformers import DynamicCache

from app.wire.types import ForwardBackwardOutput
from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.families import FAMILIES, plain
from workers.model import attention, preparation
from workers.model.attention import Kind, Packing
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass
from workers.model.preparation import CannotPrepare, Preparation, prepare

HYBRID = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
RANKS = (1, 64, 8, 3)
Logs = list[structlog.typing.EventDict]
Machine = Callable[[attention.Varlen], None]
AUTO, FLASH = Preparation(), Preparation("flash", "off")


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> Logs:
    """What the preparation logs, however logging was configured before."""
    capture = LogCapture()
    monkeypatch.setattr(
        preparation, "logger", structlog.wrap_logger(None, processors=[capture], wrapper_class=structlog.BoundLogger)
    )
    return capture.entries


def works_of(base: BaseModel) -> list[Work]:
    """Runs of several ranks, whose B is small enough for float32 to keep five digits."""
    works = []
    for i, rank in enumerate(RANKS):
        adapter = reference.random_adapter(base, i, rank=rank)
        for _, b in adapter.modules.values():
            b.data.mul_(0.2 / rank**0.5)
        lengths = np.random.default_rng(i).integers(1, 40, 3).tolist()
        works.append(Work(adapter, reference.random_data(i, lengths, k=3 if i == 2 else None), "cross_entropy"))
    return works


def run(base: BaseModel, budget: int = 128) -> tuple[list[ForwardBackwardOutput], list[dict[str, Tensor]]]:
    """Outputs and gradients of `works_of`, in several micro-batches."""
    works = works_of(base)
    outputs = run_pass(base, works, micro_batch_tokens=budget)
    assert all(isinstance(output, ForwardBackwardOutput) for output in outputs), outputs
    return outputs, [reference.grads_of(work.adapter) for work in works]  # type: ignore[return-value]


def assert_packed_equals_padded(packed: BaseModel, kind: Kind, tolerance: float = 1e-5) -> None:
    expected, expected_grads = run(packed)
    packed.attend(kind)
    found, grads = run(packed)
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=tolerance, rtol=0)
    for a, b in zip(grads, expected_grads, strict=True):
        reference.assert_close(a, b, tolerance)


def reference_kernel(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, before: int) -> Tensor:
    """What a kernel for varying lengths computes, sequence by sequence."""
    outputs = []
    for start, stop in zip(packing.bounds[:-1].tolist(), packing.bounds[1:].tolist(), strict=True):
        q_HNC, k_HNC, v_HNC = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        row, column = torch.arange(stop - start)[:, None], torch.arange(stop - start)
        sight = (column <= row) & (column >= row - before if before >= 0 else True)
        out = F.scaled_dot_product_attention(q_HNC, k_HNC, v_HNC, sight, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def kernel_that_forgets_bounds(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, before: int
) -> Tensor:
    return reference_kernel(q, k, v, Packing.of([len(q)], q.device), scale, before)


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine that has this kernel, whatever the device."""

    def have(kernel: attention.Varlen) -> None:
        monkeypatch.setattr(attention, "varlen_kernel", lambda: kernel)
        monkeypatch.setattr(attention, "lacking", lambda kind, device, dtype: None)

    return have


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in HYBRID])
def test_packed_equals_padded(name: str) -> None:
    assert_packed_equals_padded(BaseModel(plain(name), name), "dense")


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "qwen3-moe"])
def test_the_kernel_is_told_bounds_scale_and_window(name: str, machine_with: Machine) -> None:
    machine_with(reference_kernel)
    assert_packed_equals_padded(BaseModel(plain(name), name), "flash")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_flex_attention_keeps_sequences_apart(name: str) -> None:
    base = BaseModel(plain(name), name)
    tokens, lengths = torch.arange(60).view(1, 60), [7, 20, 33]
    with torch.no_grad():
        expected = torch.cat([base.hidden(piece) for piece in tokens.split(lengths, 1)], 1)
        base.attend("flex")
        found = base.hidden(tokens, Packing.of(lengths, torch.device("cpu")))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss"])
def test_calls_without_a_packing_are_what_they_were_bit_for_bit(name: str) -> None:
    base = BaseModel(plain(name), name)
    tokens = torch.arange(60).view(3, 20)
    with torch.no_grad():
        expected = base.hidden(tokens)
        base.attend("dense")
        assert torch.equal(base.hidden(tokens), expected)


@pytest.mark.parametrize("name", HYBRID)
def test_models_with_a_running_state_are_padded_and_the_log_says_so(
    name: str, machine_with: Machine, logs: Logs
) -> None:
    machine_with(reference_kernel)
    base = BaseModel(plain(name), name)
    prepare(base, FLASH)
    assert base.attention == "padded"
    (left_out,) = (line for line in logs if line["event"] == "packed_attention_left_out")
    assert left_out["kind"] == "flash" and "linear_attention" in left_out["reason"]


@pytest.mark.parametrize("kind", ["dense", "flash"])
def test_a_cache_is_filled_and_read_as_before_by_a_model_that_trains_packed(kind: Kind) -> None:
    def prefill_and_decode(base: BaseModel) -> Tensor:
        tokens = torch.arange(24).view(2, 12)
        cache = DynamicCache(config=base.config)
        with torch.no_grad():
            base.backbone(input_ids=tokens, cache=cache, use_cache=True)
            return base.backbone(input_ids=tokens[:, :1], cache=cache, use_cache=True).last_hidden_state

    base = BaseModel(plain("gemma3"), "gemma3")
    expected = prefill_and_decode(base)
    base.attend(kind)
    assert torch.equal(prefill_and_decode(base), expected)


def test_a_kernel_that_agrees_is_used(machine_with: Machine) -> None:
    machine_with(reference_kernel)
    base = BaseModel(plain("gemma3"), "gemma3")
    prepare(base, FLASH)
    assert base.attention == "flash"


def test_a_kernel_that_mixes_sequences_is_not_used(machine_with: Machine, logs: Logs) -> None:
    machine_with(kernel_that_forgets_bounds)
    base = BaseModel(plain("qwen3"), "qwen3")
    prepare(base, FLASH)
    assert base.attention == "padded"
    assert "differ" in logs[0]["reason"]


def test_a_kernel_without_sinks_is_not_used_where_the_model_has_some(machine_with: Machine, logs: Logs) -> None:
    machine_with(reference_kernel)
    base = BaseModel(plain("gpt-oss"), "gpt-oss")
    prepare(base, FLASH)
    assert base.attention == "padded"
    assert "sinks" in logs[0]["reason"]


def test_a_cpu_pads_and_says_so_if_asked_for_more() -> None:
    base = BaseModel(plain("qwen3"), "qwen3")
    prepare(base, AUTO)
    assert base.attention == "padded"
    for kind in ("flash", "flex"):
        with pytest.raises(CannotPrepare, match=f"TINWORKS_ATTENTION={kind}: it needs CUDA"):
            prepare(base, Preparation(kind))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["flash", "flex"])
@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "gpt-oss"])
def test_packed_equals_padded_on_a_gpu(name: str, kind: Kind) -> None:
    dtype = torch.bfloat16 if kind == "flash" else torch.float32
    base = BaseModel(plain(name).to("cuda", dtype), name)  # type: ignore[arg-type]
    prepare(base, Preparation(kind, "on"))
    if name == "gpt-oss" and kind == "flash":
        assert base.attention == "padded"
        return
    assert base.attention == kind
    works = works_of(base)
    found = run_pass(base, works, micro_batch_tokens=128)
    grads = [work.adapter.grad_flat.clone() for work in works]
    base.attend("padded")
    again = works_of(base)
    expected = run_pass(base, again, micro_batch_tokens=128)
    limit = 0.1 if kind == "flash" else 1e-3
    for mine, theirs, grad, work in zip(found, expected, grads, again, strict=True):
        assert isinstance(mine, ForwardBackwardOutput) and isinstance(theirs, ForwardBackwardOutput)
        for a, b in zip(mine.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
            assert np.linalg.norm(a["logprobs"] - b["logprobs"]) <= limit * math.sqrt(b["logprobs"].size)
        assert float((grad - work.adapter.grad_flat).norm() / work.adapter.grad_flat.norm()) <= limit
