"""The native engine samples from every family of models with adapters as PEFT would, or refuses it by name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from app.wire.types import Datum, SampleResult
from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.families import FAMILIES, PeftOf, plain
from tests.unit.workers.sample.native_lab import Inbox, ask, drain, prompt
from workers.model.base import BaseModel, UnsupportedModel
from workers.model.forward import Work
from workers.model.lora import Adapter
from workers.sample.engines.native import NativeEngine

WITHOUT_CACHE = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
SAMPLED = [name for name in FAMILIES if name not in WITHOUT_CACHE]

pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")


def adapter_of(base: BaseModel, seed: int, rank: int, **trained: bool) -> Adapter:
    adapter = reference.random_adapter(base, seed, rank, **trained)
    for _, b in adapter.modules.values():
        b.data.mul_(0.2 / rank**0.5)
    return adapter


@torch.no_grad()
def logprobs(model: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens), V], by one full forward."""
    logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), -1)


def trainers_logprobs(
    base: BaseModel, adapter: Adapter, prompt_tokens: Sequence[int], sampled: np.ndarray
) -> np.ndarray:
    """What `forward` gives for sampled tokens."""
    tokens = np.array([*prompt_tokens, *sampled])
    datum = Datum(tokens[:-1].astype(np.int32), {"target_tokens": tokens[1:]})
    work = Work(adapter, [datum], "cross_entropy", backward=False)
    return reference.run_one(base, work).loss_fn_outputs[0]["logprobs"][len(prompt_tokens) - 1 :]


@pytest.mark.parametrize("name", SAMPLED)
def test_sequences_of_several_adapters_side_by_side(name: str) -> None:
    base = BaseModel(plain(name), name)
    engine, inbox = NativeEngine(base, eos=(), prefill_tokens=16), Inbox()
    adapters = [None, adapter_of(base, 1, 4), adapter_of(base, 2, 1)]
    cases = {f"{i}-{n}": (prompt(n, seed=i), adapter) for i, adapter in enumerate(adapters) for n in (1, 9, 30)}
    for key, (tokens, adapter) in cases.items():
        engine.submit(inbox.job(ask(key, tokens, max_tokens=8, temperature=0.0), adapter))
        engine.step()
    drain(engine)
    models = [plain(name), *(PeftOf(name, adapter).model for adapter in adapters if adapter is not None)]
    for key, (tokens, adapter) in cases.items():
        outcome = inbox[key]
        assert isinstance(outcome, SampleResult), outcome
        [sequence] = outcome.sequences
        expected = logprobs(models[adapters.index(adapter)], [*tokens, *sequence.tokens])[len(tokens) - 1 : -1]
        assert sequence.tokens.tolist() == expected.argmax(-1).tolist(), key
        picked = expected.max(-1).values.numpy()
        np.testing.assert_allclose(sequence.logprobs, picked, atol=1e-4, rtol=0)
        if adapter is not None:
            trained = trainers_logprobs(base, adapter, tokens, sequence.tokens)
            np.testing.assert_allclose(sequence.logprobs, trained, atol=1e-4, rtol=0)


@pytest.mark.parametrize("group", ["attn", "mlp", "unembed"])
@pytest.mark.parametrize("name", SAMPLED)
def test_an_adapter_of_one_kind_of_layers(name: str, group: str) -> None:
    """Each kind changes what is sampled, beside the base model in the same batch."""
    base = BaseModel(plain(name), name)
    assert {target.group for target in base.targets.values()} == {"attn", "mlp", "unembed"}
    adapter = adapter_of(base, 3, 3, **{f"train_{kind}": kind == group for kind in ("attn", "mlp", "unembed")})
    engine, inbox, tokens = NativeEngine(base, eos=()), Inbox(), prompt(12)
    for who, given in (("base", None), ("adapter", adapter)):
        engine.submit(inbox.job(ask(who, tokens, max_tokens=6, seed=1), given))
    drain(engine)
    for who, model in (("base", plain(name)), ("adapter", PeftOf(name, adapter).model)):
        [sequence] = inbox.result(who).sequences
        table = logprobs(model, [*tokens, *sequence.tokens])[len(tokens) - 1 : -1]
        expected = table[torch.arange(6), torch.from_numpy(sequence.tokens).long()]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4, rtol=0)
        other = logprobs(plain(name), [*tokens, *sequence.tokens])[len(tokens) - 1 : -1]
        assert bool((table - other).abs().max() > 1e-2) == (who == "adapter")


@pytest.mark.parametrize("name", WITHOUT_CACHE)
def test_models_with_linear_attention_are_refused_by_name(name: str) -> None:
    base = BaseModel(plain(name), name)
    with pytest.raises(UnsupportedModel, match=r"ForCausalLM has linear_attention layers, .* \(-Q train\)"):
        NativeEngine(base)
