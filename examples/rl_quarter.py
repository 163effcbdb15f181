"""Reinforcement learning through the official Tinker SDK, as small as it gets.

The reward of a sample is the share of its tokens that lie in the first quarter of the vocabulary: about 0.25 before,
and near 1 after thirty steps. Each step samples with the weights as they are, trains on what was sampled, and prints by
how much the logprobs of sampler and trainer differ for the same tokens: where they agree, training is on-policy.

tinworks up                     # in one terminal
python examples/rl_quarter.py   # in another
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

import tinker
from rich.console import Console
from tinker import types

LOSSES = ("importance_sampling", "ppo", "cispo", "stable_reinforce")
QUESTIONS = ("Tell me about rivers.", "What is 7 + 5?")
console = Console(highlight=False)


@dataclass(frozen=True)
class Step:
    """What is printed of a step. `gap`: mean of |sampler's − trainer's logprob| over the sampled tokens."""

    reward: float
    gap: float


def reward_of(tokens: Sequence[int], vocabulary: int) -> float:
    """The share of the tokens that lie in the first quarter of the vocabulary."""
    return sum(token < vocabulary // 4 for token in tokens) / len(tokens)


def make_datum(prompt: Sequence[int], sequence: types.SampledSequence, advantage: float, *, spans: bool) -> types.Datum:
    """One sample to train on: zeros stand for the prompt's tokens, which are not learned.

    With `spans` it says which recorded sequence it comes from; `stable_reinforce` looks up its logprobs by that.
    """
    before, tokens = len(prompt) - 1, list(sequence.tokens)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([*prompt, *tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": [0] * before + tokens,
            "logprobs": [0.0] * before + list(sequence.logprobs or ()),
            "advantages": [0.0] * before + [advantage] * len(tokens),
        },
    )
    if not spans:
        return datum
    name = sequence.sequence_id
    return datum.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=len(prompt)),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=before),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
        ],
    )


def take_step(
    training_client: tinker.TrainingClient,
    prompts: Sequence[Sequence[int]],
    vocabulary: int,
    options: argparse.Namespace,
    number: int,
) -> Step:
    """Sample a group of sequences for every prompt, reward them, train on them once. `number`: of the step."""
    recorded = options.loss == "stable_reinforce"
    sampling_client = training_client.save_weights_and_get_sampling_client(record_stability_info=recorded).result()
    # With seeds the same command samples the same again.
    first = (options.seed * options.steps + number) * len(prompts)
    params = [types.SamplingParams(max_tokens=options.tokens, stop=[], seed=first + i) for i in range(len(prompts))]
    samples = [
        sampling_client.sample(types.ModelInput.from_ints(list(prompt)), options.group, of_prompt)
        for prompt, of_prompt in zip(prompts, params, strict=True)
    ]
    data, rewards, sampled = [], [], []
    for prompt, sample in zip(prompts, samples, strict=True):
        sequences = sample.result().sequences
        group = [reward_of(sequence.tokens, vocabulary) for sequence in sequences]
        mean = sum(group) / len(group)
        for sequence, reward in zip(sequences, group, strict=True):
            data.append(make_datum(prompt, sequence, reward - mean, spans=recorded))
            sampled.append(list(sequence.logprobs or ()))
        rewards += group
    # Both are sent before the first is waited for: the server does them in order, without a pause in between.
    forward_backward = training_client.forward_backward(data, options.loss)
    # `eps`: once all samples of a group earn the same there is nothing to learn, and Adam must not magnify noise.
    optim_step = training_client.optim_step(types.AdamParams(learning_rate=options.lr, eps=1e-2))
    gaps = [
        abs(ours - theirs)
        for logprobs, output in zip(sampled, forward_backward.result().loss_fn_outputs, strict=True)
        for ours, theirs in zip(logprobs, output["logprobs"].data[-len(logprobs) :], strict=True)
    ]
    optim_step.result()
    return Step(sum(rewards) / len(rewards), sum(gaps) / len(gaps))


def learn(service_client: tinker.ServiceClient, options: argparse.Namespace) -> list[Step]:
    """The whole of it: a training client, and its steps."""
    training_client = service_client.create_lora_training_client(
        base_model=options.model, rank=options.rank, seed=options.seed
    ).result()
    tokenizer = training_client.get_tokenizer()
    prompts = [tokenizer.encode(question, add_special_tokens=False) for question in QUESTIONS]
    steps = []
    for number in range(1, options.steps + 1):
        steps.append(take_step(training_client, prompts, len(tokenizer), options, number))
        console.print(f"step {number:3d}  reward {steps[-1].reward:.3f}  sampler/trainer gap {steps[-1].gap:.2e}")
    return steps


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Reinforcement learning through the Tinker SDK.")
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", default="tiny", help="a model that the server serves")
    parser.add_argument("--loss", default=LOSSES[0], choices=LOSSES)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--group", type=int, default=32, help="samples of each prompt")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each sample")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    """Connect and learn."""
    options = parse()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    with tinker.ServiceClient(base_url=options.base_url) as service_client:  # its end tells the server that we are done
        learn(service_client, options)


if __name__ == "__main__":
    main()
