"""`create_custom_loss` of the SDK: the loss runs on the server and gives what it gives on the client."""

from __future__ import annotations

import pytest
import tinker
import torch
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch


def hinge(logprobs: torch.Tensor, weights: torch.Tensor, margin: torch.Tensor) -> tuple[torch.Tensor, dict]:
    excess = torch.clamp(margin - logprobs, min=0)
    loss = (excess * weights).sum() / logprobs.shape[0]
    return loss, {"custom/excess:mean": excess.mean(), "custom/loss:sum": loss}


def by_client(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    total = torch.zeros(())
    for datum, lp in zip(data, logprobs, strict=True):
        inputs = (datum.loss_fn_inputs[name].to_torch() for name in ("weights", "margin"))
        total = total + hinge(lp, *inputs)[0]
    return total, {"by_client": 1.0}


def with_margin(data: list[types.Datum], margin: float) -> list[types.Datum]:
    extra = types.TensorData(data=[margin], dtype="float32", shape=[])
    return [types.Datum(d.model_input, {**d.loss_fn_inputs, "margin": extra}) for d in data]


def test_a_loss_on_the_server_trains_like_the_same_loss_on_the_client(client: tinker.ServiceClient) -> None:
    loss = client.create_custom_loss(hinge, {"logprobs": 1, "weights": 1, "margin": 0}).result(30)
    assert loss.loss_id is not None
    data = with_margin(batch(3, [6, 11, 4]), -1.5)
    after = {}
    for name, function in (("server", loss), ("client", by_client)):
        run = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result(30)
        trained = run.forward_backward_custom(data, function)
        run.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-4)).result(30)
        after[name] = run.forward(batch(3, [6, 11, 4]), "cross_entropy").result(30).metrics["loss:sum"]
        metrics = trained.result(30).metrics
        if name == "server":
            assert metrics["custom/loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-5)
            assert metrics["custom/excess:mean"] > 0
            on_server = metrics["loss:sum"]
        assert metrics["loss:sum"] == pytest.approx(on_server, rel=1e-4)
    assert after["server"] == pytest.approx(after["client"], rel=1e-5)


def draws(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict]:
    return (logprobs * torch.rand_like(logprobs)).sum(), {}


def test_a_loss_that_is_not_allowed_is_refused_by_the_name_of_its_node(client: tinker.ServiceClient) -> None:
    with pytest.raises(
        tinker.TinkerError, match=r"graph.nodes\[1\] \('rand_like'\).target: function 'torch.rand_like'"
    ):
        client.create_custom_loss(draws, {"logprobs": 1}).result(30)


def selects(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict]:
    return logprobs[logprobs > -5].sum(), {}


def test_a_loss_whose_shapes_depend_on_values_fails_its_request_and_the_run_goes_on(
    client: tinker.ServiceClient,
) -> None:
    run = client.create_lora_training_client(base_model=MODEL, rank=4).result(30)
    loss = client.create_custom_loss(selects, {"logprobs": 1}).result(30)
    with pytest.raises(tinker.TinkerError, match=r"data\[0\]: loss 'selects', node 'getitem'.* depends on the values"):
        run.forward_backward_custom(batch(1, [5]), loss).result(30)
    assert "loss:sum" in run.forward_backward(batch(1, [5]), "cross_entropy").result(30).metrics
