"""`stable_reinforce` as the cookbook asks for it: sample on record, name the sequence, train."""

from __future__ import annotations

import pytest
import tinker
import torch
from tinker import types

from tests.e2e.conftest import MODEL

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def training(service) -> tinker.TrainingClient:  # type: ignore[no-untyped-def]
    client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-stable-reinforce")
    return client.create_lora_training_client(base_model=MODEL, rank=4).result(30)


def sample(training: tinker.TrainingClient, *, recorded: bool) -> list[types.SampledSequence]:
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=recorded).result(30)
    params = types.SamplingParams(max_tokens=6, seed=3)
    return list(sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params).result(30).sequences)


def datum(sequence: types.SampledSequence, advantage: float, sequence_id: str | None = None) -> types.Datum:
    """As the cookbook builds it, zeros before the sampled tokens."""
    before, tokens, name = len(PROMPT) - 1, list(sequence.tokens), sequence_id or sequence.sequence_id
    assert sequence.logprobs is not None
    inputs = {
        "target_tokens": torch.tensor([0] * before + tokens),
        "logprobs": torch.tensor([0.0] * before + list(sequence.logprobs)),
        "advantages": torch.tensor([0.0] * before + [advantage] * len(tokens)),
    }
    made = types.Datum(types.ModelInput.from_ints(PROMPT + tokens[:-1]), inputs)  # type: ignore[arg-type]
    return made.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=len(PROMPT)),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=before),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
        ],
    )


def test_recorded_samples_train(training: tinker.TrainingClient) -> None:
    data = [
        datum(each, advantage) for each, advantage in zip(sample(training, recorded=True), (1.0, -0.5), strict=True)
    ]
    first = training.forward_backward(data, "stable_reinforce")
    training.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-6)).result(30)
    before = first.result(30)
    assert before.metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-3), "the policy is the one that sampled"
    after = training.forward(data, "stable_reinforce", {"kl_coeff": 0.1, "clip_cap": 1.5}).result(30)
    assert after.metrics["ratio:mean"] != pytest.approx(1.0, abs=1e-6)
    assert advantage_of(data, after) > advantage_of(data, before)


def advantage_of(data: list[types.Datum], output: types.ForwardBackwardOutput) -> float:
    """What a policy gradient step increases."""
    pairs = zip(data, output.loss_fn_outputs, strict=True)
    return float(sum((d.loss_fn_inputs["advantages"].to_torch() * o["logprobs"].to_torch()).sum() for d, o in pairs))


def test_a_sequence_that_is_not_on_record_is_refused_with_what_to_do(training: tinker.TrainingClient) -> None:
    (sequence, _) = sample(training, recorded=False)
    with pytest.raises(
        tinker.TinkerError, match=r"data\[0\].model_input_spans\[0\].sequence_id.*record_stability_info"
    ):
        training.forward_backward([datum(sequence, 1.0)], "stable_reinforce").result(30)


def test_wrong_provenance_names_the_datum_and_the_field(training: tinker.TrainingClient) -> None:
    left, right = sample(training, recorded=True)
    assert left.tokens != right.tokens, "of one seed, so they differ today and always"
    with pytest.raises(tinker.TinkerError, match=r"data\[1\].*on record is"):
        data = [datum(left, 1.0), datum(left, 1.0, right.sequence_id)]
        training.forward_backward(data, "stable_reinforce").result(30)
    bare = types.Datum(datum(left, 1.0).model_input, datum(left, 1.0).loss_fn_inputs)
    with pytest.raises(tinker.TinkerError, match=r"data\[0\].loss_fn_input_spans: missing"):
        training.forward_backward([bare], "stable_reinforce").result(30)
    assert training.forward_backward([datum(left, 1.0)], "importance_sampling").result(30), "others take spans too"
