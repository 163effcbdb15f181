"""The external engine against a real vLLM server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests.e2e.service import free_port
from tests.engine_suite.models import ATTENTION, make_adapter, prompt
from tests.engine_suite.rig import WHO, Asked, EngineFactory, Outcomes, Rig, ask, at_rest, rig, tokens_of
from tests.services import dies_with_us, wait_for
from tests.vllm.engines import CACHE_BYTES
from workers.model.base import BaseModel
from workers.sample.engines.external import ExternalEngine, ExternalOptions
from workers.sample.engines.vllm_plugin import OWNER
from workers.snapshot_files import BadSnapshot

START_S = 150.0

__all__ = ["at_rest", "rig"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFactory]:
    """Engines with a server of their own. It has our plugin, without which a CPU computes wrongly."""
    started: list[subprocess.Popen[bytes]] = []

    def make(folder: Path) -> ExternalEngine:
        port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
        flags = "--enable-lora --max-lora-rank 8 --max-loras 4 --enforce-eager --enable-prompt-tokens-details"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += [*flags.split(), "--port", str(port), "--served-model-name", "mine", "--dtype", "float32"]
        command += ["--kv-cache-memory-bytes", str(CACHE_BYTES), "--no-enable-chunked-prefill"]
        own = {OWNER: str(os.getpid()), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
        with log.open("wb") as output:
            server = subprocess.Popen(
                dies_with_us(command), env=os.environ | own, stdout=output, stderr=subprocess.STDOUT
            )
        started.append(server)
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: server.poll() is not None or answers(url), START_S, every_s=0.2)
        assert server.poll() is None, log.read_text()[-3000:]
        outline = BaseModel.outline(folder, dtype=torch.float32)

        def decode(tokens: Sequence[int]) -> str:
            return str(outline.tokenizer().decode(list(tokens)))

        return ExternalEngine(outline, ExternalOptions(url, model="mine"), decode=decode)

    yield make
    for server in started:
        server.kill()
        server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def test_tokens_and_logprobs_of_everybody_in_one_batch(rig: Rig) -> None:
    asked = {
        f"{who} {n}": Asked(
            ask(
                f"{who} {n}",
                prompt(n),
                max_tokens=8,
                temperature=0.0,
                stop_tokens=(),
                prompt_logprobs=who != "unembedding",
            ),
            who,
        )
        for n in (2, 9, 40)
        for who in WHO
    }
    for name, result in rig.serve(asked.values()).items():
        rig.check(asked[name], result)
        if result.prompt_logprobs is None:
            continue
        expected = rig.reference.next_logprobs(asked[name].request.prompt, asked[name].who)
        np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=1e-4, rtol=0)


def test_seeds_stops_and_top_k(rig: Rig) -> None:
    request = ask("r", prompt(6), max_tokens=9, seed=3, num_samples=3, topk_sample_logprobs=2, stop_tokens=())
    first, second = tokens_of(rig.sample(request)), tokens_of(rig.sample(request))
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3
    text = str(rig.tokenizer.decode(first[0][2:4]))
    [sequence, *_] = rig.sample(
        ask("s", prompt(6), max_tokens=9, seed=3, num_samples=3, stop_strings=(text,))
    ).sequences
    assert (sequence.stop_reason, sequence.tokens.tolist()) == ("stop", first[0][:4])
    [top, *_] = rig.sample(request).sequences
    assert top.topk is not None
    table = rig.reference.logprobs([*prompt(6), *top.tokens.tolist()])[5:-1]
    np.testing.assert_array_equal(top.topk.token_ids, table.topk(2, dim=-1).indices)


def test_an_adapter_that_the_server_refuses_hurts_nobody(rig: Rig, tmp_path: Path) -> None:
    make_adapter(rig.model, tmp_path / "wide", rank=16, targets=ATTENTION, seed=1)
    with pytest.raises(BadSnapshot):
        rig.load("wide", tmp_path / "wide")
    outcomes = Outcomes()
    rig.engine.submit(outcomes.job(ask("r", prompt(4), max_tokens=2)))
    rig.finish(outcomes, 1)
    assert len(outcomes.result("r").sequences) == 1
