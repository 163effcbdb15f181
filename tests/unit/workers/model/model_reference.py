"""What the engine is compared with: plain transformers and PEFT, one adapter and one sequence at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import peft
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from app.wire.types import Datum, ForwardBackwardOutput, LoraConfig
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass
from workers.model.lora import Adapter

VOCAB = 97
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": VOCAB}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def plain_model(name: str) -> PreTrainedModel:
    """The same random model for the same name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        if name == "qwen3-tied":
            model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=16, tie_word_embeddings=True))
        else:
            model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.1)
    return model.eval()


def random_adapter(base: BaseModel, seed: int, rank: int = 4, **config: bool) -> Adapter:
    """An adapter whose B is not zero."""
    adapter = base.new_adapter(LoraConfig(rank=rank, seed=seed, **config))
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapter.modules.values():
        b.data.copy_(torch.empty(b.shape).normal_(std=0.5 / adapter.scale, generator=generator))
    return adapter


def random_data(seed: int, lengths: Sequence[int], k: int | None = None) -> list[Datum]:
    """Datums for cross-entropy, targets unrelated to the tokens, weights of both signs."""
    draw = np.random.default_rng(seed)
    data = []
    for n in lengths:
        shape = (n,) if k is None else (n, k)
        inputs = {
            "target_tokens": draw.integers(0, VOCAB, shape),
            "weights": draw.normal(size=shape).astype(np.float32),
        }
        data.append(Datum(draw.integers(0, VOCAB, n).astype(np.int32), inputs))
    return data


def run_one(base: BaseModel, work: Work, micro_batch_tokens: int = 4096) -> ForwardBackwardOutput:
    """The output of a pass of one work."""
    (output,) = run_pass(base, [work], micro_batch_tokens=micro_batch_tokens)
    assert isinstance(output, ForwardBackwardOutput), output
    return output


class PeftReference:
    """A plain copy of the model, wrapped by PEFT, with the weights of `adapter`."""

    def __init__(self, name: str, adapter: Adapter) -> None:
        config = peft.LoraConfig(
            r=adapter.config.rank,
            lora_alpha=32,
            target_modules=sorted({path.rpartition(".")[2] for path in adapter.modules}),
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            self.model = peft.get_peft_model(plain_model(name), config)
        self.parameters: dict[str, Tensor] = {}
        for path, (a, b) in adapter.modules.items():
            layer = self.model.base_model.model.get_submodule(path)
            for suffix, mine in (("lora_A", a), ("lora_B", b)):
                theirs = getattr(layer, suffix)["default"].weight
                theirs.data.copy_(mine.data)
                self.parameters[f"{path}.{suffix}"] = theirs

    def logprobs(self, datum: Datum) -> Tensor:
        """log p(target), like the targets."""
        logits = self.model(input_ids=torch.tensor(np.asarray(datum.tokens)).long().unsqueeze(0)).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        picked = torch.log_softmax(logits.float(), -1).gather(1, targets.view(len(targets), -1))
        return picked.view(targets.shape)

    def backward(
        self, data: Sequence[Datum], loss: Callable[[Tensor, Mapping[str, np.ndarray]], Tensor] | None = None
    ) -> tuple[list[np.ndarray], float]:
        """Log-probabilities and the summed loss (default: cross-entropy); gradients are in `grads`."""
        logprobs, total = [], 0.0
        for datum in data:
            lp = self.logprobs(datum)
            value = loss(lp, datum.inputs) if loss else -(lp * torch.from_numpy(datum.inputs["weights"])).sum()
            value.backward()
            logprobs.append(lp.detach().numpy())
            total += float(value.detach())
        return logprobs, total

    def grads(self) -> dict[str, Tensor]:
        """By the names of `Adapter.state`."""
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}


def grads_of(adapter: Adapter) -> dict[str, Tensor]:
    """By the names of `Adapter.state`."""
    found = {}
    for path, (a, b) in adapter.modules.items():
        assert a.grad is not None and b.grad is not None
        found |= {f"{path}.lora_A": a.grad.clone(), f"{path}.lora_B": b.grad.clone()}
    return found


def assert_close(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> None:
    """Every tensor's largest difference is under `tolerance` of its own size (or of 1, if it is smaller)."""
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        size = max(1.0, float(theirs[name].abs().max()))
        assert float((tensor - theirs[name]).abs().max()) <= tolerance * size, name
