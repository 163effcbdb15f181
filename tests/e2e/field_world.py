"""What the checks of request fields share: two tenants, their things, and how a changed request is sent."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import numpy as np

from app.wire import tinker_pb2 as pb
from tests.e2e.wire_client import WireClient

PROTOBUF = "application/x-protobuf"
ROWS = [[5, 9, 200, 31, 7], [12, 1000, 44, 8]]
MORE_ROWS = [[77, 3, 15, 16, 17, 18]]
PROMPT = [5, 9, 200]
LR = 1e-2

Changes = Mapping[str, Any]
"""Path of a field, like `prompt.chunks.0.tokens` → its value. A text `$name` stands for that attribute of the world."""


class Absent:
    """The value of a field that is left out."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was refused, or a future that failed; `status` is 200 then."""

    status: int
    text: str
    category: str | None = None

    @property
    def blames_the_request(self) -> bool:
        return 400 <= self.status < 500 or self.category == "user"


class World:
    """Two tenants of a service. Whatever is slow to make is made once, when it is asked for first."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.wire = WireClient(base_url)
        self.other = WireClient(base_url)
        self._serial = itertools.count(1000)
        self.things: dict[str, Any] = {}
        self._seen: dict[tuple[object, str], Any] = {}

    def see(self, probe: Callable[[World, Changes], Any], changes: Changes) -> Any:
        """What the probe observes; asked once for the same changes."""
        key = (probe, repr(sorted(changes.items())))
        if key not in self._seen:
            self._seen[key] = probe(self, changes)
        return self._seen[key]

    def serial(self) -> int:
        """A number that was not used before."""
        return next(self._serial)

    def body(self, base: dict[str, Any], changes: Changes) -> dict[str, Any]:
        """The base with some fields changed."""
        made = copy.deepcopy(base)
        for path, value in changes.items():
            *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
            place: Any = made
            for part in parents:
                place = place[part]
            if value is ABSENT:
                del place[last]
            else:
                place[last] = self.resolved(value)
        return made

    def resolved(self, value: Any) -> Any:
        """The attribute that a text like `$name` stands for; anything else as it is."""
        if isinstance(value, str) and value.startswith("$"):
            return getattr(self, value[1:])
        return value

    # -- requests

    def json(self, answer: httpx.Response) -> Any:
        """The JSON of an answer, or the refusal."""
        if answer.status_code >= 400:
            detail = answer.json()
            return Refusal(answer.status_code, str(detail.get("detail") or detail.get("error")))
        return answer.json() if answer.content else None

    def settle(self, answer: httpx.Response, wire: WireClient | None = None) -> Any:
        """What became of a future: protobuf bytes, JSON, or a refusal."""
        future = self.json(answer)
        if isinstance(future, Refusal):
            return future
        return self.result((wire or self.wire).wait(future["request_id"]))

    def result(self, answer: httpx.Response) -> Any:
        """What a poll that is over says."""
        if answer.headers.get("content-type") == PROTOBUF:
            return answer.content
        said = self.json(answer)
        if isinstance(said, dict) and "error" in said:
            return Refusal(200, said["error"], said["category"])
        return said

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of a GET, or the refusal."""
        return self.json(self.wire.http.get(path, params=query))

    # -- things

    @property
    def session(self) -> str:
        """The tenant's session."""
        return self.wire.session_id

    @property
    def key(self) -> str:
        """The tenant's API key."""
        return str(self.wire.http.headers["X-API-Key"])

    @property
    def other_key(self) -> str:
        """The other tenant's API key."""
        return str(self.other.http.headers["X-API-Key"])

    def run(self, wire: WireClient | None = None, **lora: Any) -> str:
        """A new run of rank 2."""
        return (wire or self.wire).create_run(rank=2, **lora)

    def step(self, run: str, seq_id: int, rows: list[list[int]] = ROWS, wire: WireClient | None = None) -> None:
        """Train a run for a step; takes two sequence ids."""
        (wire or self.wire).forward_backward(run, seq_id, rows)
        (wire or self.wire).optim_step(run, seq_id + 1, LR)

    @cached_property
    def trained(self) -> Sequence:
        """A run after a step."""
        run = self.run()
        self.step(run, 1)
        return Sequence(run, 3)

    @property
    def trained_run(self) -> str:
        """Its id."""
        return self.trained.run

    @property
    def spare_session(self) -> str:
        """A new session."""
        return str(self.wire.post("create_session", {}).json()["session_id"])

    @cached_property
    def spare_run(self) -> str:
        """A run that nobody needs."""
        return self.run()

    @cached_property
    def weights(self) -> str:
        """A training checkpoint of it."""
        return self._saved("save_weights", "first")

    @cached_property
    def later_weights(self) -> str:
        """Another one, after one more step."""
        assert self.weights
        self.step(self.trained.run, self.trained.next(2), MORE_ROWS)
        return self._saved("save_weights", "second")

    @cached_property
    def taken(self) -> str:
        """A name that the run's checkpoints of both kinds have already."""
        for route in ("save_weights", "save_weights_for_sampler"):
            self._saved(route, "taken")
        return "taken"

    @cached_property
    def sampler_weights(self) -> str:
        """A sampler checkpoint of it."""
        return self._saved("save_weights_for_sampler", "first")

    def _saved(self, route: str, name: str) -> str:
        body = {"model_id": self.trained.run, "seq_id": self.trained.next(), "path": name}
        return str(self.settle(self.wire.post(route, body))["path"])

    @cached_property
    def others_weights(self) -> str:
        """A training checkpoint of the other tenant, who has not published it."""
        run = self.run(self.other)
        self.step(run, 1, wire=self.other)
        body = {"model_id": run, "seq_id": 3, "path": "theirs"}
        return str(self.settle(self.other.post("save_weights", body), self.other)["path"])

    @cached_property
    def sampler(self) -> str:
        """A sampling session of the base model."""
        return self.sampler_of(base_model="tiny")

    def sampler_of(self, **target: str) -> str:
        """A new sampling session."""
        body = {"session_id": self.session, "sampling_session_seq_id": self.serial(), **target}
        return str(self.json(self.wire.post("create_sampling_session", body))["sampling_session_id"])

    @cached_property
    def large_result(self) -> str:
        """A finished sample whose result is so large that it can be announced first."""
        body = {
            "prompt": {"chunks": [{"tokens": PROMPT * 32}]},
            "sampling_params": {"max_tokens": 1},
            "topk_prompt_logprobs": 2048,
            "prompt_logprobs": True,
            "sampling_session_id": self.sampler,
            "seq_id": self.serial(),
        }
        request_id = self.wire.post("asample", body).json()["request_id"]
        self.wire.wait(request_id)
        return str(request_id)

    @cached_property
    def record(self) -> Recorded:
        """A sample of the base model that is on record."""
        return self._recorded(self.sampler)

    @cached_property
    def later_record(self) -> Recorded:
        """One of the weights after a step, with the same tokens and other logprobs."""
        run = self.run()
        self.wire.forward_backward(run, 1, ROWS)
        self.wire.optim_step(run, 2, 1e-4)
        body = {"model_id": run, "seq_id": 3, "sampling_session_seq_id": self.serial()}
        saved = self.settle(self.wire.post("save_weights_for_sampler", body))
        found = self._recorded(saved["sampling_session_id"])
        assert found.tokens == self.record.tokens
        return found

    def _recorded(self, sampler: str, on_record: bool = True) -> Recorded:
        body = {
            "prompt": {"chunks": [{"tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 3, "temperature": 0.0, "stop": []},
            "sampling_session_id": sampler,
            "seq_id": self.serial(),
            "record_stability_info": on_record,
        }
        submitted = self.wire.post("asample", body).json()
        answer = self.wire.wait(submitted["request_id"])
        sequence = pb.SampleResponse.FromString(answer.content).sequences[0]
        return Recorded(submitted["sample_sequence_ids"][0], np.frombuffer(sequence.tokens, "<i4").tolist())

    @property
    def record_id(self) -> str:
        """The name of the sample on record."""
        return self.record.sequence_id

    @cached_property
    def unrecorded_id(self) -> str:
        """The name of a sample that is not on record."""
        return self._recorded(self.sampler, on_record=False).sequence_id

    @property
    def later_record_id(self) -> str:
        """The name of the one of later weights."""
        return self.later_record.sequence_id


@dataclass
class Sequence:
    """A run and its next sequence id."""

    run: str
    seq_id: int

    def next(self, many: int = 1) -> int:
        """The first of so many sequence ids that are taken now."""
        first, self.seq_id = self.seq_id, self.seq_id + many
        return first


@dataclass(frozen=True, slots=True)
class Recorded:
    """A sampled sequence that training requests can name."""

    sequence_id: str
    tokens: list[int]
