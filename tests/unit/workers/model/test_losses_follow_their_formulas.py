"""Each loss against its formula in float64, written here datum by datum with autograd's gradient."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from app.runs.loss_specs import LOSS_SPECS
from app.wire.types import Datum
from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel
from workers.model.forward import Work
from workers.model.losses import LOSSES, LossInputs, combined_metrics, evaluate, full_config

LENGTHS = [5, 1, 9]


def cross_entropy(lp: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    return -(lp * x["weights"]).sum()


def importance_sampling(lp: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    return -(torch.exp(lp - x["logprobs"]) * x["advantages"]).sum()


def surrogate(ratio: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    total = ratio.new_zeros(())
    for i in range(len(ratio)):
        low = x["clip_low_threshold"][i] if "clip_low_threshold" in x else c["clip_low_threshold"]
        high = x["clip_high_threshold"][i] if "clip_high_threshold" in x else c["clip_high_threshold"]
        free = ratio[i] * x["advantages"][i]
        bounded = ratio[i].clamp(float(low), float(high)) * x["advantages"][i]
        total = total - (free if free <= bounded else bounded)
    return total


def ppo(lp: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    return surrogate(torch.exp(lp - x["logprobs"]), x, c)


def cispo(lp: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    low = x.get("clip_low_threshold", torch.tensor(c["clip_low_threshold"]).double())
    high = x.get("clip_high_threshold", torch.tensor(c["clip_high_threshold"]).double())
    bounded = torch.maximum(torch.minimum(torch.exp(lp - x["logprobs"]), high), low)
    return -(bounded.detach() * lp * x["advantages"]).sum()


def dro(lp: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    return -(lp * x["advantages"] - 0.5 * c["beta"] * (lp - x["logprobs"]) ** 2).sum()


def gspo(lp: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    masked = x["sequence_ratio_mask"] != 0
    s = torch.exp((lp.detach() - x["logprobs"])[masked].mean()) if masked.any() else torch.tensor(1.0)
    return surrogate(s * torch.exp(lp - lp.detach()), x, c)


def stable_reinforce(lp: Tensor, x: Mapping[str, Tensor], c: Mapping[str, float]) -> Tensor:
    total = lp.new_zeros(())
    for i in range(len(lp)):
        if x["sampled"][i]:
            r = float(torch.exp(lp[i] - x["logprobs"][i]).detach())
            if c["mask_low"] <= r <= c["mask_high"]:
                total = total - min(r, c["clip_cap"]) * lp[i] * x["advantages"][i]
            total = total + c["kl_coeff"] * 0.5 * (lp[i] - x["logprobs"][i]) ** 2
    return total


FORMULAS: dict[str, Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}


def loss_inputs(arrays: Mapping[str, Tensor], config: Mapping[str, float]) -> LossInputs:
    sampled = arrays["sampled"].bool() if "sampled" in arrays else None
    return LossInputs({key: value for key, value in arrays.items() if key != "sampled"}, config, LENGTHS, sampled)


def random_inputs(name: str, seed: int, per_token_clip: bool) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    lp = -torch.rand(total, generator=generator) * 4
    spec = LOSS_SPECS[name]
    arrays = {
        "weights": torch.randn(total, generator=generator),
        "logprobs": lp + torch.randn(total, generator=generator) * (1.6 if spec.provenance else 0.4),
        "advantages": torch.randn(total, generator=generator),
        "sequence_ratio_mask": (torch.rand(total, generator=generator) > 0.4).float(),
        "clip_low_threshold": torch.rand(total, generator=generator),
        "clip_high_threshold": 1 + torch.rand(total, generator=generator),
    }
    arrays["sequence_ratio_mask"][LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] = 0
    arrays["sampled"] = (torch.rand(total, generator=generator) > 0.2).float()
    names = {*spec.required, *spec.optional, *(["sampled"] if spec.provenance else [])}
    if not per_token_clip:
        names -= {"clip_low_threshold", "clip_high_threshold"}
    return lp, {key: value for key, value in arrays.items() if key in names}


def test_the_table_is_what_the_api_validates_with() -> None:
    assert LOSSES.keys() == LOSS_SPECS.keys() == FORMULAS.keys()
    assert all(spec.name == name and "target_tokens" in spec.required for name, spec in LOSS_SPECS.items())


@pytest.mark.parametrize("name", LOSS_SPECS)
@pytest.mark.parametrize("variant", ["defaults", "configured", "per-token"])
def test_value_and_gradient_equal_the_formula(name: str, variant: str) -> None:
    config = dict(LOSS_SPECS[name].config)
    if variant == "configured":
        config = {key: value * 1.1 + 0.03 for key, value in config.items()}
    for seed in range(5):
        lp, arrays = random_inputs(name, seed, variant == "per-token")
        grad, sums = evaluate(name, lp, loss_inputs(arrays, config))
        exact = lp.double().requires_grad_()
        total = exact.new_zeros(())
        for datum in torch.arange(len(lp)).split(LENGTHS):
            inputs = {key: value[datum].double() for key, value in arrays.items()}
            total = total + FORMULAS[name](exact[datum], inputs, config)
        (expected,) = torch.autograd.grad(total, exact)
        assert float(sums[0]) == pytest.approx(float(total.detach()), rel=1e-5, abs=1e-5)
        torch.testing.assert_close(grad.double(), expected, atol=1e-5, rtol=1e-5)


def test_cross_entropy_without_weights_weighs_one() -> None:
    lp = torch.randn(4, 3)
    grad, sums = evaluate("cross_entropy", lp, LossInputs({}, {}, [4]))
    assert torch.equal(grad, -torch.ones(4, 3))
    assert float(sums[0]) == pytest.approx(-float(lp.double().sum()))


def test_gspo_without_a_mask_takes_the_mean_over_sampled_tokens() -> None:
    lp, arrays = random_inputs("gspo", 7, per_token_clip=False)
    arrays["logprobs"][:3] = arrays["advantages"][:3] = 0.0
    config = full_config("gspo", {})
    mask = ((arrays["logprobs"] != 0) | (arrays["advantages"] != 0)).float()
    masked = evaluate("gspo", lp, loss_inputs(arrays | {"sequence_ratio_mask": mask}, config))
    del arrays["sequence_ratio_mask"]
    plain = evaluate("gspo", lp, loss_inputs(arrays, config))
    assert torch.equal(plain.grad, masked.grad) and torch.equal(plain.sums, masked.sums)


def test_metrics_are_over_sampled_tokens_of_all_parts() -> None:
    q = torch.tensor([0.0, -1.0, -2.0, -1.0])
    advantages = torch.tensor([0.0, 1.0, 1.0, -1.0])
    lp = torch.tensor([-3.0, -1.0, -1.0, -1.5])
    config = full_config("ppo", {})
    parts = [slice(0, 2), slice(2, 4)]
    sums = [
        evaluate("ppo", lp[p], LossInputs({"logprobs": q[p], "advantages": advantages[p]}, config, [2])).sums
        for p in parts
    ]
    metrics = combined_metrics("ppo", torch.stack(sums))
    ratios = np.exp([0.0, 1.0, -0.5])
    assert metrics["ratio:mean"] == pytest.approx(ratios.mean())
    assert metrics["ratio:max"] == pytest.approx(ratios.max())
    assert metrics["clipped:mean"] == pytest.approx(2 / 3)
    assert metrics["kl_sample_train:mean"] == pytest.approx(np.mean([0.0, -1.0, 0.5]))
    assert metrics["loss:sum"] == pytest.approx(-(1.0 + 1.2 - 0.8))
    assert all(key.count(":") == 1 for key in metrics)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_pass_with_a_sampled_loss_equals_peft(qwen: BaseModel, name: str) -> None:
    adapter = reference.random_adapter(qwen, 1)
    data = []
    for i, n in enumerate([6, 13, 2]):
        draw = np.random.default_rng(i)
        (datum,) = reference.random_data(i, [n])
        arrays = {
            "target_tokens": datum.inputs["target_tokens"],
            "logprobs": (-4.5 + 0.5 * draw.normal(size=n)).astype(np.float32),
            "advantages": draw.normal(size=n).astype(np.float32),
            "sequence_ratio_mask": np.ones(n, np.float32),
        }
        names = [*LOSS_SPECS[name].required, *(["sequence_ratio_mask"] if name == "gspo" else [])]
        data.append(Datum(datum.tokens, {key: arrays[key] for key in names}))
    config = LOSS_SPECS[name].config

    def loss(lp: Tensor, inputs: Mapping[str, np.ndarray]) -> Tensor:
        return FORMULAS[name](lp, {key: torch.from_numpy(value) for key, value in inputs.items()}, config)

    peft = reference.PeftReference("qwen3-tied", adapter)
    _, expected = peft.backward(data, loss)
    output = reference.run_one(qwen, Work(adapter, data, name))
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    reference.assert_close(reference.grads_of(adapter), peft.grads(), 1e-5)


def test_non_finite_values_are_reported_as_they_are() -> None:
    lp = torch.tensor([-1.0, float("nan"), -2.0])
    grad, sums = evaluate("cross_entropy", lp, LossInputs({"weights": torch.tensor([1.0, 1.0, 2.0])}, {}, [3]))
    assert np.isnan(combined_metrics("cross_entropy", sums.unsqueeze(0))["loss:sum"])
    assert torch.equal(grad, torch.tensor([-1.0, -1.0, -2.0]))
