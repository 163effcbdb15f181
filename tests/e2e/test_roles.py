"""The Procfile's roles as separate processes on Postgres: workers come, go and die, and clients only wait."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tinker
from celery import Celery
from sqlalchemy import select
from tinker import types

from app.fleet.models import Worker
from app.fleet.queues import SAMPLE_TASK, operation_task, sample_queue, wake_queue
from app.runs.models import Run
from app.sampling.keys import samplers_key, unfinished_key
from app.settings import Settings
from tests.e2e.data import batch, largest_gap, logprobs, train
from tests.e2e.roles import Deployment, RoleProcess
from tests.e2e.service import wait_until
from tests.services import PostgresServer, redis_server

POOL = "tiny"
DATA = batch(51, [24, 40, 9])
LONG_DATA = batch(52, [64, 64, 48, 48])
"""So that a script takes long enough to be disturbed."""
PROMPT = types.ModelInput.from_ints([50, 60, 70, 80])
STEPS = 40
EXIT_S = 20.0
METRICS_TOKEN = "token-of-who-watches"


@pytest.fixture(scope="module")
def deployment(shared_postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One web, train, sample and beat process; tests add workers and take them away."""
    folder = tmp_path_factory.mktemp("roles")
    name = shared_postgres.create()
    with redis_server(folder) as redis:
        running = Deployment(folder / "data", database_url=shared_postgres.url(name), redis_url=redis.url)
        running.environment["TINWORKS_METRICS_TOKEN"] = METRICS_TOKEN
        try:
            running.start()
            yield running
        finally:
            running.close()
    shared_postgres.drop(name)


@pytest.fixture(scope="module")
def key(deployment: Deployment) -> str:
    """A key as an operator makes it: alone on standard output."""
    made = deployment.tinworks("keys", "create", "ada", "--name", "laptop")
    assert made.startswith("tml-") and made.count("\n") == 1
    return made.strip()


@pytest.fixture(scope="module")
def client(deployment: Deployment, key: str) -> tinker.ServiceClient:
    """The SDK with the made key."""
    return tinker.ServiceClient(base_url=deployment.base_url, api_key=key)


@pytest.fixture(scope="module")
def sampler(client: tinker.ServiceClient) -> tinker.SamplingClient:
    """Samples of the base model."""
    return client.create_sampling_client(base_model=POOL).result(60)


def _script(
    client: tinker.ServiceClient, *, steps: int = STEPS, at_step: Callable[[str, int], None] | None = None
) -> list[list[float]]:
    """A training script that waits for each step; returns what its final weights give the data."""
    run = client.create_lora_training_client(base_model=POOL, rank=8, seed=4).result(60)
    for step in range(steps):
        forward = run.forward_backward(LONG_DATA, "cross_entropy")
        taken = run.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-8))
        forward.result(60)
        taken.result(60)
        if at_step is not None:
            at_step(run.model_id, step)
    return logprobs(run, LONG_DATA)


@pytest.fixture(scope="module")
def undisturbed(client: tinker.ServiceClient) -> list[list[float]]:
    """The result of the script when nothing happens."""
    return _script(client)


class _Underway:
    """The script in a thread, and a moment in the middle of it."""

    def __init__(self, client: tinker.ServiceClient, *, middle: int = STEPS // 4) -> None:
        self.model_id = ""
        self.steps = 0
        self._middle = middle
        self._reached = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._result = self._pool.submit(_script, client, at_step=self._note)
        self._pool.shutdown(wait=False)

    def _note(self, model_id: str, step: int) -> None:
        self.model_id, self.steps = model_id, step + 1
        if step >= self._middle:
            self._reached.set()

    def wait_for_middle(self) -> None:
        wait_until(lambda: self._reached.is_set() or self._result.done(), timeout_s=60, what="the middle of the run")
        assert not self._result.done(), self._result.result()

    def result(self) -> list[list[float]]:
        return self._result.result(90)


def _holder(deployment: Deployment, model_id: str) -> str | None:
    with deployment.database.read() as session:
        return session.scalar(select(Run.worker_id).where(Run.id == model_id))


def _claimed_by(deployment: Deployment, worker_id: str | None) -> int:
    """How many samples a worker has claimed now."""
    waiting = deployment.redis.zrange(unfinished_key(POOL), 0, -1)
    claims = deployment.redis.mget([f"sample:{raw.decode()}:claim" for raw in waiting]) if waiting else []
    return sum(claim is not None and claim.decode() == worker_id for claim in claims)


def _kill_all(processes: list[RoleProcess]) -> None:
    for process in processes:
        process.kill()


def test_a_doorbell_costs_redis_one_push_and_one_pop(deployment: Deployment, client: tinker.ServiceClient) -> None:
    """Celery's notes of what is not acknowledged yet (`unacked`, a set and a hash) would be two round trips more."""
    run = client.create_lora_training_client(base_model=POOL, rank=4).result(60)

    def notes() -> int:
        calls = deployment.redis.info("commandstats")
        return sum(calls.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("hset", "hdel"))

    before = notes()
    for _ in range(STEPS):
        run.optim_step(types.AdamParams()).result(60)
    assert notes() - before < STEPS / 2
    assert deployment.redis.hlen("unacked") == 0


def test_a_made_key_trains_saves_and_samples(
    deployment: Deployment, client: tinker.ServiceClient, sampler: tinker.SamplingClient
) -> None:
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=deployment.base_url, api_key="tml-nobody-made-this").get_server_capabilities()
    run = client.create_lora_training_client(base_model=POOL, rank=8, seed=1).result(60)
    losses = []
    for _ in range(8):
        forward = run.forward_backward(DATA, "cross_entropy")
        step = run.optim_step(types.AdamParams(learning_rate=3e-3))
        losses.append(forward.result(60).metrics["loss:sum"])
        step.result(60)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]

    path = run.save_state("after-eight").result(60).path
    trained = client.create_training_client_from_state(path)
    expected = logprobs(run, DATA)
    assert largest_gap(logprobs(trained, DATA), expected) < 1e-4

    tuned = run.save_weights_and_get_sampling_client().result(60)
    assert len(tuned.sample(PROMPT, 2, types.SamplingParams(max_tokens=5, stop=[])).result(60).sequences) == 2
    for datum, trainer in zip(DATA, expected, strict=True):
        last = list(datum.loss_fn_inputs["target_tokens"].data)[-1]
        whole = types.ModelInput.from_ints([*datum.model_input.to_ints(), last])
        assert tuned.compute_logprobs(whole).result(60)[1:] == pytest.approx(trainer, abs=1e-4)
        assert sampler.compute_logprobs(whole).result(60)[1:] != pytest.approx(trainer, abs=1e-2)


def test_more_workers_on_one_host_each_hear_their_own_bell(
    deployment: Deployment, client: tinker.ServiceClient, sampler: tinker.SamplingClient
) -> None:
    deployment.scale(train=2, sample=2)
    with deployment.database.read() as session:
        workers = {row.id: row.roles for row in session.scalars(select(Worker))}
    trainers = [worker_id for worker_id, roles in workers.items() if roles == ["train"]]
    assert sorted(workers.values()) == [["sample"], ["sample"], ["train"], ["train"]]
    assert deployment.health() == (200, '{"status":"ok"}')

    celery = Celery(broker=deployment.environment["REDIS_URL"], set_as_current=False)
    for worker_id in trainers:
        celery.send_task(operation_task("forward"), args=["no-such-run"], queue=wake_queue(worker_id))
    celery.send_task(SAMPLE_TASK, args=["no-such-sample"], queue=sample_queue(POOL))
    queues = [sample_queue(POOL), *map(wake_queue, trainers)]
    wait_until(lambda: not deployment.redis.exists(*queues), timeout_s=5, what="every bell was heard")

    runs = [client.create_lora_training_client(base_model=POOL, rank=4, seed=seed) for seed in range(4)]
    params = types.SamplingParams(max_tokens=8, stop=[])
    samples = [sampler.sample(PROMPT, 1, params) for _ in range(20)]
    for run in [future.result(60) for future in runs]:
        train(run, DATA, 2)
    assert all(len(sample.result(60).sequences[0].tokens) == 8 for sample in samples)


def test_a_terminated_train_worker_hands_its_run_over(
    deployment: Deployment, client: tinker.ServiceClient, undisturbed: list[list[float]]
) -> None:
    deployment.scale(train=2)
    underway = _Underway(client)
    underway.wait_for_middle()
    holder = _holder(deployment, underway.model_id)
    assert holder is not None
    leaving = deployment.process_of(holder)
    leaving.terminate()
    lease_s = Settings.model_fields["lease_s"].default
    wait_until(
        lambda: _holder(deployment, underway.model_id) not in (holder, None),
        timeout_s=lease_s / 2,
        what="another worker has the run, long before its lease would have run out",
    )
    assert underway.steps < STEPS
    assert largest_gap(underway.result(), undisturbed) < 1e-3
    assert leaving.wait(EXIT_S) == 0
    with deployment.database.read() as session:
        assert session.get(Worker, holder) is None
    assert len(deployment.alive("train")) == 1


def _busy_sampler(deployment: Deployment) -> tuple[RoleProcess, str]:
    """A sample worker that has several requests in flight."""
    workers = [(process, deployment.worker_id(process)) for process in deployment.alive("sample")]

    def busy() -> list[tuple[RoleProcess, str]]:
        return [(p, worker_id) for p, worker_id in workers if worker_id and _claimed_by(deployment, worker_id) >= 3]

    wait_until(busy, timeout_s=20, what="a worker has several requests in flight")
    return busy()[0]


def test_samples_of_one_prompt_meet_at_one_worker(deployment: Deployment, sampler: tinker.SamplingClient) -> None:
    deployment.scale(sample=2)
    workers = {str(deployment.worker_id(process)) for process in deployment.alive("sample")}
    assert len(workers) == 2

    def both_are_known() -> bool:
        return all(deployment.redis.hexists(samplers_key(POOL), worker_id) for worker_id in workers)

    wait_until(both_are_known, timeout_s=5, what="both have said that they live")
    params = types.SamplingParams(max_tokens=200, stop=[])
    futures = [sampler.sample(PROMPT, 1, params) for _ in range(16)]
    _, home = _busy_sampler(deployment)
    assert [_claimed_by(deployment, other) for other in workers - {home}] == [0]
    assert all(len(future.result(60).sequences[0].tokens) == 200 for future in futures)


def test_web_shows_what_workers_have_measured(
    deployment: Deployment, client: tinker.ServiceClient, sampler: tinker.SamplingClient
) -> None:
    run = client.create_lora_training_client(base_model=POOL, rank=4).result(60)
    train(run, DATA, 2)
    sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=8, stop=[])).result(60)

    def page() -> str:
        headers = {"authorization": f"Bearer {METRICS_TOKEN}"}
        return httpx.get(f"{deployment.base_url}/metrics", headers=headers).text

    def counted(name: str) -> float:
        """The sum over workers."""
        lines = [line for line in page().splitlines() if line.startswith(f"tinworks_{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    names = ("trained_tokens_total", "sampled_tokens_total", "leases_total", "resident_runs", "slots")
    wait_until(lambda: all(map(counted, names)), timeout_s=30, what="workers have shown what they measure")
    assert run.model_id not in page() and '"ada"' not in page()


def test_a_drained_worker_is_emptied_and_its_clients_notice_nothing(
    deployment: Deployment,
    client: tinker.ServiceClient,
    sampler: tinker.SamplingClient,
    undisturbed: list[list[float]],
) -> None:
    deployment.scale(train=2, sample=2)
    underway = _Underway(client)
    underway.wait_for_middle()
    holder = _holder(deployment, underway.model_id)
    idle_sampler = deployment.worker_id(deployment.alive("sample")[0])
    assert holder is not None and idle_sampler is not None

    def state(worker_id: str) -> str:
        workers = json.loads(deployment.tinworks("workers", "--json"))
        return next(str(worker["state"]) for worker in workers if worker["id"] == worker_id)

    for worker_id in (holder, idle_sampler):
        assert worker_id in deployment.tinworks("workers", "drain", worker_id)
    wait_until(lambda: state(holder) == state(idle_sampler) == "drained", timeout_s=20, what="both are empty")
    assert largest_gap(underway.result(), undisturbed) < 1e-3
    assert _holder(deployment, underway.model_id) != holder
    params = types.SamplingParams(max_tokens=8, stop=[])
    samples = [sampler.sample(PROMPT, 1, params) for _ in range(20)]
    assert all(len(sample.result(60).sequences[0].tokens) == 8 for sample in samples)
    assert state(holder) == state(idle_sampler) == "drained"

    for worker_id in (holder, idle_sampler):
        deployment.tinworks("workers", "undrain", worker_id)
    wait_until(lambda: "dra" not in state(holder) + state(idle_sampler), timeout_s=20, what="both work again")


def test_samples_of_a_killed_worker_are_answered_by_another(
    deployment: Deployment, sampler: tinker.SamplingClient
) -> None:
    deployment.scale(sample=2)
    params = types.SamplingParams(max_tokens=200, stop=[])
    futures = [sampler.sample(PROMPT, 1, params) for _ in range(24)]
    victim, worker_id = _busy_sampler(deployment)
    victim.kill()
    assert _claimed_by(deployment, worker_id) > 0
    wait_until(lambda: _claimed_by(deployment, worker_id) == 0, timeout_s=15, what="its claims have run out")
    for future in futures:
        assert len(future.result(60).sequences[0].tokens) == 200


@pytest.mark.parametrize("how", ["once", "again and again", "by SIGQUIT"])
def test_a_sample_worker_that_is_told_to_stop_leaves_no_sample_behind(
    deployment: Deployment, sampler: tinker.SamplingClient, how: str
) -> None:
    """One SIGTERM lets it finish what it has begun; a second one, or SIGQUIT, hands that over at once."""
    deployment.scale(sample=2)
    params = types.SamplingParams(max_tokens=240, stop=[])
    futures = [sampler.sample(PROMPT, 1, params) for _ in range(48)]
    leaving, worker_id = _busy_sampler(deployment)
    number = signal.SIGQUIT if how == "by SIGQUIT" else signal.SIGTERM
    leaving.send(number)

    were_done: list[bool] = []  # all samples, when it had none any more

    def has_left() -> bool:
        if how == "again and again" and leaving.is_alive:
            leaving.send(number)
        if not were_done and _claimed_by(deployment, worker_id) == 0:
            were_done.append(all(future.done() for future in futures))
        return not leaving.is_alive

    wait_until(has_left, timeout_s=EXIT_S + 10, what="it ends")
    assert how == "once" or were_done == [False]
    assert deployment.worker_id(leaving) is None
    assert _claimed_by(deployment, worker_id) == 0
    for future in futures:
        assert len(future.result(60).sequences[0].tokens) == 240


def _restart_web(deployment: Deployment) -> None:
    (web,) = deployment.alive("web")
    web.terminate()
    web.wait(10)
    deployment.run("web")
    deployment.wait_healthy()


def test_clients_back_off_from_a_full_queue_and_finish(
    deployment: Deployment, sampler: tinker.SamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.scale(sample=1)
    with monkeypatch.context() as patch:
        patch.setitem(deployment.environment, "TINWORKS_MAX_WAITING_SAMPLES_PER_TENANT", "4")
        _restart_web(deployment)
        futures = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=40, stop=[])) for _ in range(12)]
        wait_until(lambda: deployment.redis.keys("samples:*:refused:*"), timeout_s=10, what="a sample was refused")
        assert all(len(future.result(60).sequences[0].tokens) == 40 for future in futures)
    _restart_web(deployment)


def test_health_names_the_role_whose_last_worker_died(deployment: Deployment) -> None:
    _kill_all(deployment.alive("sample"))
    wait_until(lambda: deployment.health()[0] == 503, timeout_s=20, what="healthz notices")
    assert deployment.health()[1] == '{"status":"unavailable","missing":["no live sample worker for tiny"]}'
    for route in ("livez", "readyz"):
        assert httpx.get(f"{deployment.base_url}/{route}").status_code == 200


def test_web_can_be_restarted_under_clients_that_wait(
    deployment: Deployment,
    client: tinker.ServiceClient,
    sampler: tinker.SamplingClient,
    undisturbed: list[list[float]],
) -> None:
    """A script trains, and a sample waits for a worker that is not there, while web goes and comes back."""
    deployment.scale(train=1)
    _kill_all(deployment.alive("sample"))
    waiting = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, stop=[]))
    wait_until(lambda: deployment.redis.zcard(unfinished_key(POOL)), timeout_s=10, what="the sample waits")
    underway = _Underway(client)
    underway.wait_for_middle()
    (web,) = deployment.alive("web")
    web.terminate()
    deployment.run("sample")  # it takes longer to start than web has to end
    web.wait(10)
    assert not waiting.done() and underway.steps < STEPS
    deployment.run("web")
    assert len(waiting.result(60).sequences[0].tokens) == 4
    assert largest_gap(underway.result(), undisturbed) < 1e-3
    deployment.wait_healthy()


def test_a_clean_shutdown_of_everything_leaves_no_worker_behind(deployment: Deployment) -> None:
    deployment.scale(train=1, sample=1)
    leaving = [deployment.alive(role)[0] for role in ("train", "sample", "beat")]
    names = [deployment.worker_id(process) for process in leaving[:2]]
    for process in leaving:
        process.terminate()
    assert [process.wait(EXIT_S) for process in leaving] == [0, 0, 0]
    with deployment.database.read() as session:
        assert not set(names) & set(session.scalars(select(Worker.id)))
