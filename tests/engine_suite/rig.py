"""An engine under test, what it is compared with, and short ways to ask it for samples."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from app.wire.types import PromptTargets, SampleRequest, SampleResult, SamplingParams, StreamedToken
from tests.engine_suite.models import ATTENTION, MLP, make_adapter, make_model
from workers.sample.engines.base import AdapterHandle, Engine, Job

EngineFactory = Callable[[Path], Engine]
"""Makes an engine that serves the model in a folder, with adapters of rank up to 8: in float32, its own end of
sequence, its context of 256 tokens, its tokenizer for stop strings, any top k, at least 8 sequences at a time."""

LIMIT_S = 60.0
TOLERANCE = 1e-4
"""Of logprobs in float32 (SEMANTICS §6)."""

ADAPTERS: dict[str, tuple[int, Sequence[str]]] = {
    "all layers": (4, (*ATTENTION, *MLP)),
    "attention": (8, ATTENTION),
    "unembedding": (2, (*ATTENTION, *MLP, "lm_head")),
}
"""Rank and targets."""
WHO = (None, *ADAPTERS)
"""Whose weights serve a request: the base model's, or an adapter's."""


MakeModel = Callable[[Path], PreTrainedModel]
"""Writes a model with an end of sequence to a folder."""
MakeAdapters = Callable[[PreTrainedModel, Path], dict[str, Path]]
"""Writes adapters of a model below a folder; by their names."""


def make_adapters(model: PreTrainedModel, folder: Path) -> dict[str, Path]:
    """`ADAPTERS`."""
    paths = {name: folder / f"adapter-{i}" for i, name in enumerate(ADAPTERS)}
    for seed, (name, (rank, targets)) in enumerate(ADAPTERS.items()):
        make_adapter(model, paths[name], rank=rank, targets=targets, seed=seed)
    return paths


def ask(
    name: str,
    tokens: Sequence[int],
    *,
    num_samples: int = 1,
    prompt_logprobs: bool = False,
    topk_prompt_logprobs: int = 0,
    topk_sample_logprobs: int = 0,
    prompt_logprobs_last_n: int | None = None,
    targets: PromptTargets | None = None,
    alternatives: int = 0,
    **params: object,
) -> SampleRequest:
    """A request; `params` are those of `SamplingParams`."""
    return SampleRequest(
        name,
        tokens,
        SamplingParams(**params),  # type: ignore[arg-type]
        num_samples,
        prompt_logprobs,
        topk_prompt_logprobs,
        topk_sample_logprobs,
        prompt_logprobs_last_n,
        targets,
        alternatives,
    )


def tokens_of(result: SampleResult) -> list[list[int]]:
    """Of each sequence."""
    return [sequence.tokens.tolist() for sequence in result.sequences]


@dataclass(frozen=True)
class Asked:
    """A request, and whose weights serve it."""

    request: SampleRequest
    who: str | None = None


class Outcomes(dict[str, SampleResult | Exception]):
    """By request id; a second one for the same request is an error. Tokens on the way are in `streamed`."""

    def __init__(self) -> None:
        super().__init__()
        self.streamed: dict[str, list[StreamedToken]] = {}

    def job(
        self,
        request: SampleRequest,
        adapter: AdapterHandle | None = None,
        *,
        on_token: Callable[[], None] | None = None,
    ) -> Job:
        """A job that ends here; `on_token` is called after each of its tokens."""
        name = request.request_id
        self.streamed[name] = []

        def deliver(outcome: SampleResult | Exception) -> None:
            assert name not in self, f"{name} was delivered twice"
            self[name] = outcome

        def take(token: StreamedToken) -> None:
            self.streamed[name].append(token)
            if on_token is not None:
                on_token()

        return Job(request, adapter, deliver, take)

    def result(self, name: str) -> SampleResult:
        """The result of a request; raises the error if it has one."""
        outcome = self[name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Reference:
    """Plain transformers, and PEFT around copies of it, one per adapter."""

    def __init__(self, folder: Path, adapters: dict[str, Path]) -> None:
        self.models: dict[str | None, torch.nn.Module] = {None: self._plain(folder)}
        for name, path in adapters.items():
            self.models[name] = peft.PeftModel.from_pretrained(self._plain(folder), path).eval()

    @staticmethod
    def _plain(folder: Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], who: str | None = None) -> torch.Tensor:
        """[len(tokens), V] float64: row i is the distribution after token i."""
        logits = self.models[who](input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), -1)

    def next_logprobs(self, tokens: Sequence[int], who: str | None = None) -> np.ndarray:
        """Of tokens 1 … of `tokens`, each given those before."""
        table = self.logprobs(tokens, who)
        return table[torch.arange(len(tokens) - 1), torch.tensor(list(tokens)[1:], dtype=torch.long)].numpy()


class Rig:
    """The engine with its model, adapters and reference."""

    def __init__(
        self,
        factory: EngineFactory,
        folder: Path,
        *,
        make_model: MakeModel = make_model,
        make_adapters: MakeAdapters = make_adapters,
    ) -> None:
        self.folder = folder
        self.model = make_model(folder / "model")
        self.eos: int = self.model.generation_config.eos_token_id
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        paths = make_adapters(self.model, folder)
        self.reference = Reference(folder / "model", paths)
        self.engine = factory(folder / "model")
        self._bell = threading.Event()
        self.engine.on_event(self._bell.set)
        self._loaders = ThreadPoolExecutor(2)
        self.handles: dict[str | None, AdapterHandle | None] = {None: None}
        self.handles |= {name: self.load(path.name, path) for name, path in paths.items()}

    def load(self, snapshot_id: str, folder: Path) -> AdapterHandle:
        """Load an adapter as a worker does: in another thread, while this one turns the engine."""
        loading = self._loaders.submit(self.engine.load_adapter, snapshot_id, folder)
        loading.add_done_callback(lambda _: self._bell.set())
        self.turn_until(loading.done)
        return loading.result()

    def turn_until(self, done: Callable[[], bool]) -> None:
        """Turn the engine until `done`. Raises TimeoutError."""
        deadline = time.monotonic() + LIMIT_S
        while not done():
            if not self.engine.step() and not done():
                self._bell.wait(0.05)
                self._bell.clear()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine did not come to an end within {LIMIT_S} s")

    def finish(self, outcomes: Outcomes, count: int) -> None:
        """Turn the engine until so many jobs have an outcome."""
        self.turn_until(lambda: len(outcomes) >= count)

    def serve(self, asked: Iterable[Asked | SampleRequest]) -> dict[str, SampleResult]:
        """Submit all at once; all have to succeed."""
        outcomes, count = Outcomes(), 0
        for count, item in enumerate(asked, 1):  # noqa: B007
            each = item if isinstance(item, Asked) else Asked(item)
            self.engine.submit(outcomes.job(each.request, self.handles[each.who]))
        self.finish(outcomes, count)
        return {name: outcomes.result(name) for name in outcomes}

    def sample(self, request: SampleRequest, who: str | None = None) -> SampleResult:
        """The result of one request that is alone."""
        return self.serve([Asked(request, who)])[request.request_id]

    def tokens(self, request: SampleRequest, who: str | None = None) -> list[list[int]]:
        """What `sample` samples."""
        return tokens_of(self.sample(request, who))

    def check(self, asked: Asked, result: SampleResult) -> None:
        """All logprobs are the reference's; if it is greedy, all tokens too."""
        for sequence in result.sequences:
            assert (sequence.tokens.dtype, sequence.logprobs.dtype) == (np.int32, np.float32)
            assert len(sequence.tokens) == len(sequence.logprobs)
            begin = len(asked.request.prompt) - 1
            tokens = [*asked.request.prompt, *sequence.tokens.tolist()]
            table = self.reference.logprobs(tokens[:-1], asked.who)[begin:]
            if asked.request.params.temperature == 0:
                assert sequence.tokens.tolist() == table.argmax(-1).tolist(), asked
            expected = table[torch.arange(len(table)), torch.from_numpy(sequence.tokens).long()]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=TOLERANCE, rtol=0)

    def close(self) -> None:
        """End the engine."""
        self._loaders.shutdown()
        self.engine.close()


@pytest.fixture(scope="module")
def rig(engine_factory: EngineFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One engine for all tests."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        made = Rig(engine_factory, tmp_path_factory.mktemp("engine"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def at_rest(rig: Rig) -> Iterator[None]:
    """No test leaves work behind."""
    yield
    rig.turn_until(lambda: (rig.engine.running, rig.engine.waiting) == (0, 0))
