"""Mixed passes give each adapter what plain transformers + PEFT give it alone."""

import numpy as np
import pytest
import torch

from app.wire.types import ForwardBackwardOutput, LoraConfig
from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass
from workers.model.lora import Adapter, Routing, routed

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MIXTURE = [
    {"rank": 1},
    {"rank": 8, "train_mlp": False, "train_unembed": False},
    {"rank": 3, "train_attn": False, "train_mlp": False},
    {"rank": 5, "train_attn": False, "train_unembed": False},
]


def mixed_works(base: BaseModel) -> list[Work]:
    works = []
    for i, config in enumerate(MIXTURE):
        adapter = reference.random_adapter(base, i, **config)
        lengths = np.random.default_rng(i).integers(1, 40, 4).tolist()
        works.append(Work(adapter, reference.random_data(i, lengths), "cross_entropy"))
    return works


def run(base: BaseModel, works: list[Work], micro_batch_tokens: int = 4096) -> list[ForwardBackwardOutput]:
    outputs = run_pass(base, works, micro_batch_tokens=micro_batch_tokens)
    assert all(isinstance(output, ForwardBackwardOutput) for output in outputs), outputs
    return outputs  # type: ignore[return-value]


def assert_same_logprobs(mine: ForwardBackwardOutput, theirs: list[np.ndarray]) -> None:
    for output, logprobs in zip(mine.loss_fn_outputs, theirs, strict=True):
        assert output["logprobs"].dtype == np.float32
        assert output["logprobs"].shape == logprobs.shape
        np.testing.assert_allclose(output["logprobs"], logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("micro_batch_tokens", [48, 4096])
def test_mixed_ranks_and_targets_equal_peft(base: BaseModel, micro_batch_tokens: int) -> None:
    works = mixed_works(base)
    for work, output in zip(works, run(base, works, micro_batch_tokens), strict=True):
        peft = reference.PeftReference(base.name_or_path, work.adapter)
        logprobs, loss = peft.backward(work.data)
        assert_same_logprobs(output, logprobs)
        assert output.metrics["loss:sum"] == pytest.approx(loss, abs=1e-4)
        reference.assert_close(reference.grads_of(work.adapter), peft.grads(), 1e-5)


def test_several_targets_per_token_equal_peft(base: BaseModel) -> None:
    adapter = reference.random_adapter(base, 1)
    data = [
        *reference.random_data(1, [7, 12], k=3),
        *reference.random_data(2, [5]),
        *reference.random_data(3, [9, 2], k=1),
    ]
    peft = reference.PeftReference(base.name_or_path, adapter)
    logprobs, loss = peft.backward(data)
    output = reference.run_one(base, Work(adapter, data, "cross_entropy"))
    assert_same_logprobs(output, logprobs)
    assert output.metrics["loss:sum"] == pytest.approx(loss, abs=1e-4)
    reference.assert_close(reference.grads_of(adapter), peft.grads(), 1e-5)


def test_a_fresh_adapter_is_the_base_bit_for_bit(base: BaseModel) -> None:
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = reference.plain_model(base.name_or_path)(input_ids=tokens).logits
    adapter = base.new_adapter(LoraConfig(rank=4, seed=0))
    with torch.no_grad(), routed(Routing.of([(adapter, 2)], row_tokens=12)):
        assert torch.equal(base.lm_head(base.hidden(tokens)), expected)


def test_results_do_not_depend_on_order_or_micro_batches(qwen: BaseModel) -> None:
    def grads(order: list[int], micro_batch_tokens: int) -> tuple[list[np.ndarray], torch.Tensor]:
        adapter = reference.random_adapter(qwen, 5)
        data = reference.random_data(5, [3, 30, 17, 17, 1, 25])
        output = reference.run_one(qwen, Work(adapter, [data[i] for i in order], "cross_entropy"), micro_batch_tokens)
        by_datum = dict(zip(order, output.loss_fn_outputs, strict=True))
        return [by_datum[i]["logprobs"] for i in range(6)], adapter.grad_flat.clone()

    logprobs, grad = grads([0, 1, 2, 3, 4, 5], 4096)
    for order, micro_batch_tokens in [([5, 3, 1, 0, 2, 4], 4096), ([0, 1, 2, 3, 4, 5], 1), ([4, 2, 5, 0, 1, 3], 60)]:
        other, other_grad = grads(order, micro_batch_tokens)
        for a, b in zip(logprobs, other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
        torch.testing.assert_close(grad, other_grad, atol=1e-4, rtol=1e-5)


def test_two_requests_of_one_run_add_up(qwen: BaseModel) -> None:
    def gradient(parts: list[slice], together: bool) -> torch.Tensor:
        adapter: Adapter = reference.random_adapter(qwen, 2)
        data = reference.random_data(2, [9, 4, 11, 6])
        works = [Work(adapter, data[part], "cross_entropy") for part in parts]
        for group in [works] if together else [[work] for work in works]:
            run(qwen, group)
        return adapter.grad_flat.clone()

    whole = gradient([slice(0, 4)], True)
    torch.testing.assert_close(gradient([slice(0, 2), slice(2, 4)], True), whole, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(gradient([slice(0, 2), slice(2, 4)], False), whole, atol=1e-4, rtol=1e-5)


def test_doubled_data_double_loss_and_gradient(qwen: BaseModel) -> None:
    data = reference.random_data(3, [8, 15])
    once, twice = reference.random_adapter(qwen, 3), reference.random_adapter(qwen, 3)
    single = reference.run_one(qwen, Work(once, data, "cross_entropy"))
    double = reference.run_one(qwen, Work(twice, data * 2, "cross_entropy"))
    assert double.metrics["loss:sum"] == pytest.approx(2 * single.metrics["loss:sum"], rel=1e-6)
    torch.testing.assert_close(twice.grad_flat, 2 * once.grad_flat, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
def test_bfloat16_base_follows_float32_within_its_precision(device: str) -> None:
    exact = BaseModel(reference.plain_model("qwen3-tied"), "exact")
    rough = BaseModel(reference.plain_model("qwen3-tied").bfloat16().to(device), "rough")  # type: ignore[arg-type]
    data = reference.random_data(4, [20, 13])
    grads = []
    for base in (exact, rough):
        adapter = reference.random_adapter(base, 4)
        reference.run_one(base, Work(adapter, data, "cross_entropy"))
        assert adapter.grad_flat.dtype == torch.float32
        grads.append(adapter.grad_flat.cpu())
    cosine = torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0)
    assert float(cosine) > 0.99
