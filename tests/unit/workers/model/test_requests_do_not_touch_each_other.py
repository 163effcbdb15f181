"""A NaN, an error or a forward-only request of one run changes nothing for another."""

import numpy as np
import pytest
import torch

from app.errors import InvalidRequest
from app.wire.types import Datum, ForwardBackwardOutput
from tests.unit.workers.model import model_reference as reference
from workers.model import forward
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass


def work(base: BaseModel, seed: int, backward: bool = True) -> Work:
    return Work(
        reference.random_adapter(base, seed), reference.random_data(seed, [6, 11, 3]), "cross_entropy", {}, backward
    )


def test_forward_leaves_no_gradient_and_the_same_logprobs(qwen: BaseModel) -> None:
    only_forward, backward = work(qwen, 1, backward=False), work(qwen, 1)
    outputs = run_pass(qwen, [only_forward, backward], micro_batch_tokens=64)
    assert not only_forward.adapter.has_grad and not only_forward.adapter.grad_flat.any()
    assert backward.adapter.has_grad and backward.adapter.grad_flat.any()
    for a, b in zip(outputs[0].loss_fn_outputs, outputs[1].loss_fn_outputs, strict=True):  # type: ignore[union-attr]
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)


@pytest.mark.parametrize("backward", [True, False])
def test_one_runs_nan_stays_its_own(qwen: BaseModel, backward: bool) -> None:
    alone, together, sick = work(qwen, 1), work(qwen, 1), work(qwen, 2, backward)
    sick.adapter.flat[::7] = float("nan")
    (expected,) = run_pass(qwen, [alone], micro_batch_tokens=4096)
    poisoned, output = run_pass(qwen, [sick, together], micro_batch_tokens=4096)
    assert isinstance(poisoned, ForwardBackwardOutput) and isinstance(output, ForwardBackwardOutput)
    assert np.isnan(poisoned.metrics["loss:sum"])
    assert isinstance(expected, ForwardBackwardOutput)
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    torch.testing.assert_close(together.adapter.grad_flat, alone.adapter.grad_flat, atol=1e-5, rtol=1e-5)
    assert bool(sick.adapter.grad_flat.isnan().any()) == backward


@pytest.mark.parametrize("pending", [False, True])
def test_a_work_that_raises_adds_nothing_and_the_others_succeed(
    qwen: BaseModel, monkeypatch: pytest.MonkeyPatch, pending: bool
) -> None:
    good, bad, expected = work(qwen, 1), work(qwen, 2), work(qwen, 1)
    if pending:
        for each in (good, bad, expected):
            run_pass(qwen, [each], micro_batch_tokens=64)
    before = bad.adapter.grad_flat.clone()
    run_pass(qwen, [expected], micro_batch_tokens=16)
    evaluate, broken = forward.evaluate, len(bad.data[1].tokens)

    def failing(name: str, lp: torch.Tensor, inputs: forward.LossInputs) -> object:
        if list(inputs.lengths) == [broken] and torch.equal(
            inputs.arrays["weights"], torch.from_numpy(bad.data[1].inputs["weights"])
        ):
            raise RuntimeError("this loss cannot be evaluated")
        return evaluate(name, lp, inputs)

    monkeypatch.setattr(forward, "evaluate", failing)
    first, second = run_pass(qwen, [bad, good], micro_batch_tokens=16)
    assert isinstance(first, RuntimeError)
    assert isinstance(second, ForwardBackwardOutput)
    assert torch.equal(bad.adapter.grad_flat, before)
    assert bad.adapter.has_grad == pending
    torch.testing.assert_close(good.adapter.grad_flat, expected.adapter.grad_flat, atol=1e-5, rtol=1e-5)


def datum(tokens: int = 4, **inputs: object) -> Datum:
    arrays = {"target_tokens": np.arange(tokens), **inputs}
    return Datum(np.arange(tokens, dtype=np.int32), arrays)  # type: ignore[arg-type]


ONES = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("loss_fn", "config", "data", "message"),
    [
        ("cross_entropy", {}, [], r"data: must hold"),
        ("cubic", {}, [datum()], r"loss_fn: 'cubic'"),
        ("cross_entropy", {}, [datum(), datum(0)], r"data\[1\]\.model_input: has no tokens"),
        ("cross_entropy", {}, [datum(), datum(129)], r"data\[1\]\.model_input: 129 tokens"),
        ("cross_entropy", {}, [datum(target_tokens=np.arange(3))], r"data\[0\].*'target_tokens'\]: has shape \[3\]"),
        ("cross_entropy", {}, [datum(weights=ONES[:3])], r"data\[0\].*'weights'\]: has shape \[3\]"),
        ("cross_entropy", {}, [datum(weights=ONES), datum()], r"data\[1\].*'weights'\]: must be in every datum"),
        ("cross_entropy", {}, [datum(mask=ONES)], r"data\[0\].*'mask'\]: unknown"),
        ("cross_entropy", {}, [datum(target_tokens=np.full(4, 97))], r"data\[0\].*'target_tokens'\]: token 97"),
        (
            "cross_entropy",
            {},
            [Datum(np.full(4, -1, np.int32), {"target_tokens": np.arange(4)})],
            r"data\[0\]\.model_input: token -1",
        ),
        ("cross_entropy", {"beta": 1.0}, [datum()], r"loss_fn_config\['beta'\]: unknown"),
        ("dro", {"beta": "x"}, [datum(logprobs=ONES, advantages=ONES)], r"loss_fn_config\['beta'\]: must be a finite"),
        ("ppo", {}, [datum(logprobs=ONES)], r"data\[0\].*'advantages'\]: missing"),
        ("ppo", {}, [datum(target_tokens=np.ones((4, 2), int))], r"data\[0\]\.loss_fn_inputs"),
    ],
)
def test_bad_data_fail_by_name_and_leave_the_others(
    qwen: BaseModel, loss_fn: str, config: dict[str, float | str], data: list[Datum], message: str
) -> None:
    adapter = reference.random_adapter(qwen, 0)
    failed, output = run_pass(qwen, [Work(adapter, data, loss_fn, config), work(qwen, 1)], micro_batch_tokens=64)
    assert isinstance(failed, InvalidRequest)
    with pytest.raises(InvalidRequest, match=message):
        raise failed
    assert isinstance(output, ForwardBackwardOutput)
    assert not adapter.has_grad and not adapter.grad_flat.any()
