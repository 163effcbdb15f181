"""Teach a model pig latin through the official Tinker SDK, then ask it: the first thing to run against Tinworks.

tinworks up                     # in one terminal
python examples/pig_latin.py    # in another
"""

from __future__ import annotations

import argparse
import os

import tinker
from rich.console import Console
from rich.progress import track
from tinker import types

EXAMPLES = {
    "banana split": "anana-bay plit-say",
    "quantum physics": "uantum-qay ysics-phay",
    "donut shop": "onut-day op-shay",
    "pickle jar": "ickle-pay ar-jay",
    "space exploration": "ace-spay exploration-way",
    "rubber duck": "ubber-ray uck-day",
    "coding wizard": "oding-cay izard-way",
}
QUESTION = "banana split"
console = Console()


def prompt_for(english: str) -> str:
    """What the model is asked."""
    return f"English: {english}\nPig Latin:"


def make_datum(tokenizer, english: str, pig_latin: str) -> types.Datum:
    """One example: each token predicts the next one, and only the answer's tokens count."""
    prompt = tokenizer.encode(prompt_for(english), add_special_tokens=False)
    answer = tokenizer.encode(f" {pig_latin}\n\n", add_special_tokens=False)
    tokens = prompt + answer
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def mean_loss(output: types.ForwardBackwardOutput, data: list[types.Datum]) -> float:
    """The mean negative log-likelihood of the tokens that count."""
    total = count = 0.0
    for result, datum in zip(output.loss_fn_outputs, data, strict=True):
        weights = datum.loss_fn_inputs["weights"].data
        total -= sum(logprob * weight for logprob, weight in zip(result["logprobs"].data, weights, strict=True))
        count += sum(weights)
    return total / count


def ask(training_client: tinker.TrainingClient, tokenizer, english: str) -> tuple[str, float]:
    """The greedy answer of the weights as they are now, and the log-probability of the right one."""
    sampling_client = training_client.save_weights_and_get_sampling_client().result()
    prompt = tokenizer.encode(prompt_for(english), add_special_tokens=False)
    params = types.SamplingParams(max_tokens=20, temperature=0.0, stop=["\n"])
    sample = sampling_client.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()

    right = tokenizer.encode(f" {EXAMPLES[english]}\n\n", add_special_tokens=False)
    logprobs = sampling_client.compute_logprobs(types.ModelInput.from_ints(prompt + right)).result()
    return tokenizer.decode(sample.sequences[0].tokens).strip(), sum(logprobs[len(prompt) :])


def main() -> None:
    """Train, and show the answer before and after."""
    parser = argparse.ArgumentParser(description="Teach a model pig latin through the Tinker SDK.")
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", default="tiny", help="a model that the server serves")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")

    with tinker.ServiceClient(base_url=options.base_url) as service_client:  # its end tells the server that we are done
        teach(service_client, options)


def teach(service_client: tinker.ServiceClient, options: argparse.Namespace) -> None:
    """The whole of it: a training client, steps, a sampling client."""
    training_client = service_client.create_lora_training_client(
        base_model=options.model, rank=options.rank, seed=options.seed
    ).result()
    tokenizer = training_client.get_tokenizer()
    data = [make_datum(tokenizer, english, pig_latin) for english, pig_latin in EXAMPLES.items()]
    before = ask(training_client, tokenizer, QUESTION)

    losses = []
    for step in track(range(options.steps), "Training", console=console):
        # Both are sent before the first is waited for: the server does them in order, without a pause in between.
        forward_backward = training_client.forward_backward(data, "cross_entropy")
        optim_step = training_client.optim_step(types.AdamParams(learning_rate=options.lr))
        losses.append(mean_loss(forward_backward.result(), data))
        optim_step.result()
        if step % max(options.steps // 6, 1) == 0 or step == options.steps - 1:
            console.print(f"  step {step + 1:3d}  loss {losses[-1]:.4f}")

    after = ask(training_client, tokenizer, QUESTION)
    console.print(f"{QUESTION!r} in pig latin, and the log-probability of the right answer:")
    for when, (answer, logprob) in (("before", before), ("after", after)):
        console.print(f"  {when:<6}  {answer!r}  {logprob:.2f}")


if __name__ == "__main__":
    main()
