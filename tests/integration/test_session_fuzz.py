"""Any sequence of requests on one run, right ones and wrong ones, repeated, contradicted and out of order: every future
that is given out ends, as a result or as a failure in the user's words, and nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.integration.conftest import PROTOBUF, Api, running
from tests.integration.fuzz_answers import check_answer
from tests.services import wait_for
from tests.unit.workers.train.train_lab import Lab, message, random_data

CASES, MANY_CASES = 60, 2000

LORAS = st.sampled_from(
    [{"rank": 4}, {"rank": 1, "train_mlp": False}, {"rank": 2, "seed": 3}, {"rank": 0}, {"rank": 9999}]
)
NAMES = st.sampled_from(["a", "b", "c", "../a", ""])
STEPS = st.sampled_from(
    [
        ("forward_backward", {}),
        ("forward_backward", {"forward_only": True}),
        ("forward_backward", {"loss_fn": "nope"}),
        ("optim_step", {"adam_params": {"learning_rate": 1e-3}}),
        ("optim_step", {"adam_params": {"beta1": 7}}),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}),
        ("optim_step", {}),
    ]
)
SAVES = st.tuples(
    st.sampled_from(["save_weights", "save_weights_for_sampler", "save_weights_external"]),
    st.fixed_dictionaries(
        {"path": NAMES}, optional={"overwrite": st.booleans(), "ttl_seconds": st.sampled_from([1, 3600])}
    ),
)
EPHEMERAL = st.tuples(
    st.just("save_weights_for_sampler"),
    st.fixed_dictionaries(
        {"sampling_session_seq_id": st.integers(0, 3), "kind": st.sampled_from(["snapshot", "inflight"])}
    ),
)
LOADS = st.tuples(
    st.just("load_weights"),
    st.fixed_dictionaries(
        {"path": NAMES.map(lambda name: f"tinker://{{run}}/weights/{name}"), "optimizer": st.booleans()}
    ),
)
REQUESTS = STEPS | SAVES | EPHEMERAL | LOADS
MANNERS = st.sampled_from(["plain"] * 6 + ["twice", "contradicted", "late"])
"""How a request is sent: once; twice; followed by another one of its number; or after the one that follows it."""
SCRIPTS = st.lists(st.tuples(REQUESTS, MANNERS), min_size=1, max_size=14)
ENDINGS = st.sampled_from(["nothing", "nothing", "unload", "finish"])


class Client:
    """One session with one run, and the futures that it was given."""

    def __init__(self, api: Api, lora: dict[str, Any]) -> None:
        self._api = api
        self.session_id = api.session()
        created = api.create(self.session_id, lora_config=lora)
        self.model_id = str(created["model_id"])
        self.futures = [str(created["request_id"])]
        self._next = 1

    def ask(self, route: str, fields: dict[str, Any], seq_id: int) -> httpx.Response:
        if route == "forward_backward":
            body = message(self.model_id, seq_id, random_data(seq_id), **fields).SerializeToString()
            answer = self._api.post(route, body, content_type=PROTOBUF)
        else:
            path = {k: v.replace("{run}", self.model_id) for k, v in fields.items() if k == "path"}
            answer = self._api.post(route, {"model_id": self.model_id, "seq_id": seq_id, **fields, **path})
        check_answer(answer)
        if answer.status_code == 200:
            self.futures.append(answer.json()["request_id"])
        return answer

    def play(self, script: list[tuple[tuple[str, dict[str, Any]], str]]) -> None:
        """Send a script. Whoever owns a run and says which number a request has is given a future."""
        held: list[tuple[str, dict[str, Any], int]] = []
        for (route, fields), manner in script:
            seq_id, self._next = self._next, self._next + 1
            if manner == "late":
                held.append((route, fields, seq_id))
                continue
            assert self.ask(route, fields, seq_id).status_code == 200
            if manner == "twice":
                assert self.ask(route, fields, seq_id).status_code == 200
            elif manner == "contradicted":
                other = ("optim_step", {"adam_params": {"eps": 0.5}})
                assert self.ask(*other, seq_id).status_code == 409
            while held:
                assert self.ask(*held.pop()).status_code == 200
        while held:
            assert self.ask(*held.pop()).status_code == 200

    def end(self, how: str) -> None:
        if how == "unload":
            answer = self._api.post("unload_model", {"model_id": self.model_id})
            self.futures.append(answer.json()["request_id"])
            assert self.ask("optim_step", {"adam_params": {}}, self._next).status_code == 200
        elif how == "finish":
            self._api.ok(f"sessions/{self.session_id}/finish", {"reason": {"type": "success"}})
            assert self.ask("optim_step", {"adam_params": {}}, self._next).status_code == 410

    def check_futures(self) -> None:
        for request_id in self.futures:
            wait_for(lambda request_id=request_id: self._api.poll(request_id).status_code != 408)  # type: ignore[misc]
            answer = self._api.poll(request_id)
            check_answer(answer)
            assert answer.status_code == 200, (request_id, answer.text)
            if answer.headers["content-type"] == "application/json" and "error" in answer.json():
                assert answer.json()["category"] == "user", answer.text
            assert self._api.poll(request_id).content == answer.content


@pytest.fixture
def stage(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> Iterator[Callable[..., None]]:
    """Plays one case: a script, an ending, and whether the worker computes on the way or only afterwards."""
    with running(configure, sqlite_url, redis_url, tmp_path, key_cache_s=2) as api:
        lab = Lab(api.database, tmp_path)
        loop = lab.worker()

        def play(
            lora: dict[str, Any], script: list[tuple[tuple[str, dict[str, Any]], str]], ending: str, busy: bool
        ) -> None:
            client = Client(api, lora)
            for part in [[step] for step in script] if busy else [script]:
                client.play(part)
                lab.work(loop) if busy else None
            client.end(ending)
            lab.work(loop)
            client.check_futures()
            failed = [
                entry for entry in lab.logs if entry["event"] in ("pass_failed", "cycle_failed", "restore_failed")
            ]
            assert failed == []

        yield play
        lab.close()


def fuzz(stage: Callable[..., None], cases: int) -> None:
    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(lora=LORAS, script=SCRIPTS, ending=ENDINGS, busy=st.booleans())
    def play(lora: dict[str, Any], script: Any, ending: str, busy: bool) -> None:
        stage(lora, script, ending, busy)

    play()


def test_every_future_of_any_session_ends(stage: Callable[..., None]) -> None:
    fuzz(stage, CASES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_future_of_many_sessions_ends(stage: Callable[..., None]) -> None:
    fuzz(stage, MANY_CASES)
