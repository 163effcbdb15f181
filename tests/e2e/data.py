"""Training data for end-to-end tests."""

from __future__ import annotations

import random

import tinker
from tinker import types

VOCAB = 2048


def datum(tokens: list[int], targets: list[int], weights: list[float] | None = None) -> types.Datum:
    """A cross-entropy datum."""
    inputs = {"target_tokens": targets, "weights": weights if weights is not None else [1.0] * len(targets)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def batch(seed: int, lengths: list[int]) -> list[types.Datum]:
    """Random next-token data: the same for the same arguments."""
    draw = random.Random(seed)
    data = []
    for length in lengths:
        tokens = [draw.randrange(3, VOCAB) for _ in range(length + 1)]
        data.append(datum(tokens[:-1], tokens[1:]))
    return data


def train(client: tinker.TrainingClient, data: list[types.Datum], steps: int, lr: float = 2e-3) -> None:
    """`steps` pipelined steps on the same data."""
    futures = []
    for _ in range(steps):
        futures.append(client.forward_backward(data, "cross_entropy"))
        futures.append(client.optim_step(types.AdamParams(learning_rate=lr, eps=1e-8)))
    for future in futures:
        future.result(120)


def logprobs(client: tinker.TrainingClient, data: list[types.Datum]) -> list[list[float]]:
    """What the run's present weights give the targets."""
    output = client.forward(data, "cross_entropy").result(120)
    return [list(map(float, o["logprobs"].tolist())) for o in output.loss_fn_outputs]


def largest_gap(left: list[list[float]], right: list[list[float]]) -> float:
    """Largest difference between two ragged arrays of one shape."""
    assert [len(row) for row in left] == [len(row) for row in right]
    return max(abs(x - y) for a, b in zip(left, right, strict=True) for x, y in zip(a, b, strict=True))
