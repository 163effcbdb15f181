"""A call of every public method of the official SDK, and of every command of its command line.

Each entry says how the method is called, what has to be true of its answer, and whether it works here or is refused on
purpose. An entry stands for the deprecated `…_async` twin too. `docs/compatibility.md` is made of this table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker import types
from tinker.lib.public_interfaces.sampling_client import QueueState

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch
from tests.e2e.tenant import Tenant

DATA = batch(33, [12])
PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
GREEDY = types.SamplingParams(max_tokens=3, temperature=0.0)


@dataclass
class World:
    """What calls are made on: a tenant with a trained run, checkpoints of it, and every client. `other`: a second
    tenant. `home`: the home folder of whoever runs commands."""

    tenant: Tenant
    other: Tenant
    home: Path
    _numbers: Any = field(default_factory=itertools.count)

    @cached_property
    def ServiceClient(self) -> tinker.ServiceClient:
        return self.tenant.connect(user_metadata={"team": "red"}, project_id="reds")

    @cached_property
    def TrainingClient(self) -> tinker.TrainingClient:
        run = self.ServiceClient.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result(60)
        run.forward_backward(DATA, "cross_entropy").result(60)
        run.optim_step(types.AdamParams(learning_rate=1e-3)).result(60)
        return run

    @cached_property
    def SamplingClient(self) -> tinker.SamplingClient:
        return self.ServiceClient.create_sampling_client(base_model=MODEL).result(60)

    @cached_property
    def RestClient(self) -> tinker.RestClient:
        return self.tenant.rest

    @cached_property
    def AdminClient(self) -> tinker.AdminClient:
        return tinker.AdminClient(base_url=self.tenant.base_url, api_key=self.tenant.key)

    @property
    def name(self) -> str:
        """A checkpoint name that was never used."""
        return f"name-{next(self._numbers)}"

    @property
    def folder(self) -> str:
        """A path at which there is nothing."""
        return str(self.home / self.name)

    @property
    def session_id(self) -> str:
        return self.TrainingClient.model_id.partition(":")[0]

    def state(self) -> str:
        """The path of a new training checkpoint."""
        return self.TrainingClient.save_state(self.name).result(60).path

    def weights(self) -> str:
        """The path of a new sampler checkpoint."""
        return self.TrainingClient.save_weights_for_sampler(self.name).result(60).path

    def external(self) -> str:
        """The path of a new exported checkpoint."""
        return self.TrainingClient.save_weights_external(self.name).result(60).path

    def their_state(self) -> str:
        """The path of a checkpoint of the other tenant."""
        return self.other.run().save_state(self.name).result(60).path


Arguments = Callable[[World], tuple[tuple[Any, ...], Mapping[str, Any]]]


def args(*make: Any, **keywords: Any) -> Arguments:
    """Arguments; those that are functions are called with the world, anew for each call."""

    def value(x: Any, world: World) -> Any:
        return x(world) if callable(x) and getattr(x, "__name__", "") == "<lambda>" else x

    return lambda world: (tuple(value(x, world) for x in make), {k: value(x, world) for k, x in keywords.items()})


@dataclass(frozen=True)
class Call:
    """How a method is called and what its answer must be. `refused`: what the error says, if that is the answer.
    `on`: what it is called on, if not the world's client of that class."""

    arguments: Arguments
    holds: Callable[[Any, World], object]
    note: str = ""
    refused: str | None = None
    on: Callable[[World], Any] | None = None


def outputs_are_whole(answer: types.ForwardBackwardOutput, world: World) -> bool:
    return len(answer.loss_fn_outputs[0]["logprobs"].data) == 12 and "loss:sum" in answer.metrics


def samples(client: tinker.SamplingClient, world: World) -> bool:
    return len(client.sample(PROMPT, 1, GREEDY).result(60).sequences[0].tokens) > 0


def trains(client: tinker.TrainingClient, world: World) -> bool:
    return outputs_are_whole(client.forward_backward(DATA, "cross_entropy").result(60), world)


def is_path(kind: str) -> Callable[[Any, World], bool]:
    return lambda answer, world: f"/{kind}/" in (answer if isinstance(answer, str) else answer.path)


def is_none(answer: Any, world: World) -> bool:
    return answer is None


def negative_likelihood(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/likelihood:sum": loss}


def mean_likelihood(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = -torch.stack([row.mean() for row in logprobs]).mean()
    return loss, {"mean": float(loss)}


def _today() -> tuple[datetime, datetime]:
    """A window that holds now, also at midnight."""
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight - timedelta(days=1), midnight + timedelta(days=1)


_CONSOLE = "The address is that of the hosted console, which the SDK builds by itself."
_LOCAL = "Needs no server."
_COUNTED = "Real counts; cost is null."

SERVICE = {
    "close": Call(args("success"), is_none, on=lambda world: world.tenant.connect()),
    "copy_weights": Call(args(lambda w: w.state(), ttl_seconds=3600), is_path("weights")),
    "create_custom_loss": Call(
        args(negative_likelihood, {"logprobs": 1, "weights": 1}),
        lambda loss, world: (
            "custom/likelihood:sum" in world.TrainingClient.forward_backward_custom(DATA, loss).result(60).metrics
        ),
        "Traced by the SDK, checked and run by the server.",
    ),
    "create_lora_training_client": Call(args(MODEL, rank=4, seed=3), trains),
    "create_rest_client": Call(
        args(), lambda rest, world: world.session_id in rest.list_sessions(limit=100).result(10).sessions
    ),
    "create_sampling_client": Call(args(base_model=MODEL), samples),
    "create_training_client_from_state": Call(args(lambda w: w.state()), trains),
    "create_training_client_from_state_with_optimizer": Call(
        args(lambda w: w.their_state(), weights_access_token=lambda w: w.other.key),
        trains,
        "`weights_access_token`: a key, or a token, of the account that owns the checkpoint.",
    ),
    "get_console_url": Call(args(), lambda url, world: url.startswith("https://"), _CONSOLE),
    "get_server_capabilities": Call(
        args(), lambda answer, world: MODEL in [model.model_name for model in answer.supported_models]
    ),
    "get_telemetry": Call(args(), lambda answer, world: True, _LOCAL),
}

TRAINING = {
    "create_sampling_client": Call(args(lambda w: w.weights()), samples),
    "forward": Call(args(DATA, "cross_entropy"), outputs_are_whole),
    "forward_backward": Call(args(DATA, "cross_entropy"), outputs_are_whole),
    "forward_backward_custom": Call(
        args(DATA, mean_likelihood),
        lambda answer, world: "mean" in answer.metrics,
        "A function runs in the client; a `LossHandle` of `create_custom_loss` on the server.",
    ),
    "get_console_url": Call(args(), lambda url, world: url.startswith("https://"), _CONSOLE),
    "get_info": Call(args(), lambda answer, world: (answer.lora_rank, answer.is_lora) == (4, True)),
    "get_telemetry": Call(args(), lambda answer, world: True, _LOCAL),
    "get_tokenizer": Call(
        args(), lambda tokenizer, world: tokenizer.encode("a b"), "Read on the client's machine; see the README."
    ),
    "load_state": Call(args(lambda w: w.state()), lambda answer, world: answer.path or answer.model_id),
    "load_state_with_optimizer": Call(args(lambda w: w.state()), lambda answer, world: answer.path or answer.model_id),
    "optim_step": Call(
        args(types.AdamParams(learning_rate=1e-4)), lambda answer, world: "grad_norm" in (answer.metrics or {})
    ),
    "save_state": Call(args(lambda w: w.name, user_metadata={"a": "b"}), is_path("weights")),
    "save_weights_and_get_sampling_client": Call(args(kind="inflight"), samples),
    "save_weights_external": Call(
        args(lambda w: w.name), is_path("external_weights"), "PEFT layout, age-encrypted where recipients are given."
    ),
    "save_weights_for_sampler": Call(args(lambda w: w.name), is_path("sampler_weights")),
}

SAMPLING = {
    "compute_logprobs": Call(args(PROMPT), lambda answer, world: len(answer) == 4 and answer[0] is None),
    "create": Call(args(lambda w: w.ServiceClient.holder, base_model=MODEL), samples),
    "from_sampler_handle": Call(
        args(lambda w: w.SamplingClient.get_sampler_handle(), api_key=lambda w: w.tenant.key), samples
    ),
    "get_base_model": Call(args(), lambda answer, world: MODEL in answer),
    "get_sampler_handle": Call(args(), lambda answer, world: len(answer) > 20),
    "get_telemetry": Call(args(), lambda answer, world: True, _LOCAL),
    "get_tokenizer": Call(
        args(),
        lambda tokenizer, world: tokenizer.encode("a b"),
        "Read on the client's machine, by the name that the client was made with; see the README.",
        on=lambda world: world.TrainingClient.save_weights_and_get_sampling_client().result(60),
    ),
    "on_queue_state_change": Call(args(QueueState.ACTIVE, None), is_none, "Called by the SDK itself."),
    "sample": Call(
        args(PROMPT, 2, GREEDY, include_prompt_logprobs=True, topk_prompt_logprobs=2),
        lambda answer, world: len(answer.sequences) == 2 and len(answer.topk_prompt_logprobs) == 4,
    ),
}

REST = {
    "assign_session_project": Call(args(lambda w: w.session_id, "red"), is_none),
    "copy_weights": Call(args(lambda w: w.state(), "project"), is_path("weights")),
    "delete_checkpoint": Call(
        args(lambda w: w.TrainingClient.model_id, lambda w: "weights/" + w.state().rpartition("/")[2]), is_none
    ),
    "delete_checkpoint_from_tinker_path": Call(args(lambda w: w.weights()), is_none),
    "export_session_trace": Call(
        args(lambda w: w.session_id),
        lambda url, world: url.startswith(world.tenant.base_url),
        "Training operations of the session as a Perfetto trace; samples leave no record that could be shown.",
    ),
    "get_audit_log": Call(args("checkpoints"), lambda answer, world: answer.entries),
    "get_billing_usage": Call(
        args(lambda w: _today()[0], lambda w: _today()[1]), lambda answer, world: answer.data, _COUNTED
    ),
    "get_current_checkpoint_storage_usage": Call(args(), lambda answer, world: answer.data, _COUNTED),
    "get_external_weights_urls": Call(
        args(lambda w: w.external()), lambda answer, world: "adapter_model.safetensors" in answer.urls
    ),
    "get_sampler": Call(
        args(lambda w: w.RestClient.get_session(w.session_id).result(10).sampler_ids[0]),
        lambda answer, world: answer.base_model,
    ),
    "get_server_capabilities": Call(args(), lambda answer, world: answer.supported_models),
    "get_session": Call(
        args(lambda w: w.session_id), lambda answer, world: world.TrainingClient.model_id in answer.training_run_ids
    ),
    "get_telemetry": Call(args(), lambda answer, world: True, _LOCAL),
    "get_training_run": Call(
        args(lambda w: w.TrainingClient.model_id), lambda answer, world: answer.base_model == MODEL
    ),
    "get_training_run_by_tinker_path": Call(args(lambda w: w.state()), lambda answer, world: answer.lora_rank == 4),
    "get_weights_info_by_tinker_path": Call(args(lambda w: w.state()), lambda answer, world: answer.lora_rank == 4),
    "list_checkpoints": Call(args(lambda w: w.state().split("/")[2]), lambda answer, world: answer.checkpoints),
    "list_sessions": Call(args(limit=100), lambda answer, world: world.session_id in answer.sessions),
    "list_training_runs": Call(args(limit=5), lambda answer, world: answer.cursor.total_count),
    "list_user_checkpoints": Call(args(limit=5), lambda answer, world: answer.checkpoints),
    "publish_checkpoint_from_tinker_path": Call(args(lambda w: w.state()), is_none),
    "search_sessions": Call(
        args(types.SessionSearchRequest(user_metadata={"team": "red"})), lambda answer, world: answer.sessions
    ),
    "set_checkpoint_ttl_from_tinker_path": Call(args(lambda w: w.state(), 7200), is_none),
    "unpublish_checkpoint_from_tinker_path": Call(args(lambda w: w.state()), is_none),
    "whoami": Call(args(), lambda answer, world: answer.user_urn),
}

ADMIN = {
    name: REST[name]
    for name in ("get_audit_log", "get_billing_usage", "get_current_checkpoint_storage_usage", "get_telemetry")
}

METHODS: dict[str, Mapping[str, Call]] = {
    "ServiceClient": SERVICE,
    "TrainingClient": TRAINING,
    "SamplingClient": SAMPLING,
    "RestClient": REST,
    "AdminClient": ADMIN,
}


@dataclass(frozen=True)
class Command:
    """A command of the command line: its arguments, and what it prints. `typed`: what is typed when it asks."""

    arguments: Callable[[World], tuple[str, ...]]
    prints: str
    note: str = ""
    refused: str | None = None
    typed: Callable[[World], str] | None = None


def words(*given: Any) -> Callable[[World], tuple[str, ...]]:
    """Arguments; functions are called with the world."""
    return lambda world: tuple(x(world) if callable(x) else x for x in given)


COMMANDS: dict[str, Command] = {
    "auth login": Command(
        words(),
        "Logged in as",
        "It names the hosted console's address; a key of this server is right.",
        typed=lambda w: f"{w.tenant.key}\n",
    ),
    "auth status": Command(words(), "Tinker accessible: yes"),
    "auth whoami": Command(words(), "Organization"),
    "auth logout": Command(words(), "Removed credential"),
    "billing checkpoint-storage": Command(words(), "", _COUNTED),
    "billing usage": Command(words(*(f"{day:%Y-%m-%d}" for day in _today())), "", _COUNTED),
    "checkpoint delete": Command(words(lambda w: w.state(), "-y"), "Deleted 1"),
    "checkpoint download": Command(
        words(lambda w: w.state(), "-o", lambda w: w.folder), "", "Needs a slot for a moment: the SDK exports a copy."
    ),
    "checkpoint info": Command(words(lambda w: w.state()), "tinker://"),
    "checkpoint list": Command(words(), "checkpoints"),
    "checkpoint publish": Command(words(lambda w: w.state()), ""),
    "checkpoint push-hf": Command(
        words(lambda w: w.state(), "--repo", "me/adapter", "--no-model-card"),
        "me/adapter",
        "The files are right; the upload goes to the Hugging Face Hub (tested with a hub of our own making).",
    ),
    "checkpoint set-ttl": Command(words(lambda w: w.state(), "--ttl", "3600"), ""),
    "checkpoint unpublish": Command(words(lambda w: w.state()), ""),
    "model list": Command(words(), MODEL),
    "run info": Command(words(lambda w: w.TrainingClient.model_id), MODEL),
    "run list": Command(words(), MODEL),
    "session export-trace": Command(words(lambda w: w.session_id, "-o", lambda w: w.folder + ".pftrace"), ""),
    "version": Command(words(), "0.38", _LOCAL),
}
