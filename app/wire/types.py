"""The protocol's data in the form that the rest of Tinworks works with: plain dataclasses and numpy arrays.

Codecs (`training.py`, `sampling.py`) turn bytes into these and back; nothing here knows about HTTP, protobuf or torch.
Letters in shapes: N tokens of a datum, K targets per token, P tokens of a prompt, S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

LossConfig = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """A claim where consecutive positions of a datum come from: positions `offset` … `offset + length - 1` of the
    tokens that a recorded sequence consists of (`sampled`), or of the prompt that it continues."""

    sampled: bool
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One training example.

    `tokens`: int32 [N], the model's input. `inputs`: the loss function's named arrays, dense, int64 or float32, each
    [N] or [N, K]; a custom loss may have others. Position i of `tokens` predicts `inputs["target_tokens"][i]`.
    `model_input_spans` tile the tokens, `loss_fn_input_spans` the targets; a datum has both or none.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    model_input_spans: Sequence[ProvenanceSpan] = ()
    loss_fn_input_spans: Sequence[ProvenanceSpan] = ()

    @property
    def is_sampled(self) -> np.ndarray:
        """bool [N]: whether a target is claimed to be a sampled token."""
        spans = self.loss_fn_input_spans
        return np.repeat(np.array([s.sampled for s in spans], bool), np.array([s.length for s in spans], np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackward:
    """The decoded body of `forward_backward` (`forward` when `forward_only`)."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss_fn: str
    loss_config: LossConfig
    forward_only: bool

    @property
    def tokens(self) -> int:
        """Tokens of all datums."""
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackwardOutput:
    """Per-datum arrays in request order (name → float32 [N] or [N, K]), and metrics named `name:reduction`."""

    loss_fn_outputs: Sequence[Mapping[str, np.ndarray]]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw the next token.

    `max_tokens` None: as many as the context allows. `temperature` 0: greedy. `top_k` -1 (or 0): off. `seed` any 64-bit
    integer; sequence i of a request draws from a stream derived from (seed, i). `stop_tokens` and `stop_strings` both
    None: the model's own end-of-sequence tokens stop; otherwise only what is listed stops (nothing, if empty).
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Token ids that are scored at positions of a prompt: a matrix of `shape` [P-1, K] whose row i belongs to position
    i+1; a cell of -1 asks for nothing.

    Dense, `tokens` has all cells, row by row. Sparse (CSR), it has those that `rows` and `columns` place: row i's are
    `tokens[rows[i]:rows[i+1]]`, in the given columns.
    """

    shape: tuple[int, int]
    tokens: Sequence[int]
    rows: Sequence[int] | None = None
    columns: Sequence[int] | None = None

    def cell_rows(self) -> np.ndarray:
        """The row of each of `tokens`, int64, ascending."""
        if self.rows is None:
            return np.repeat(np.arange(self.shape[0]), self.shape[1])
        starts = np.asarray(self.rows, np.int64)
        return np.repeat(np.arange(self.shape[0]), starts[1:] - starts[:-1])


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One `asample`: `num_samples` independent continuations of `prompt`, and what is asked about the prompt itself.
    `prompt_alt_tokens_k`: how many tokens are drawn at every position of the prompt but the first. `record`: whether
    the result goes on record for training requests that name it."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: PromptTargets | None = None
    prompt_alt_tokens_k: int = 0
    record: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """For each row the `k` most probable tokens, most probable first. `token_ids` int32 [rows, k], `logprobs` float32
    [rows, k]. A row that says nothing has token 0 and logprob -99999.0 in all its cells."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """One sampled continuation. `tokens` int32 [S] including the stop token, S ≥ 1; `logprobs` float32 [S] of the
    untempered distribution; `stop_reason` "stop" or "length"."""

    stop_reason: str
    tokens: np.ndarray
    logprobs: np.ndarray
    topk: TopK | None = None


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """A token of a sequence that is not finished. `index`: which of the request's sequences; `position`: how many of
    its tokens came before; `topk`: the most probable tokens and their logprobs, most probable first."""

    index: int
    position: int
    token: int
    logprob: float
    topk: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TargetLogprobs:
    """The logprobs of `targets`, one for each of its `tokens` in their order: float32, 0 where that is -1."""

    targets: PromptTargets
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class AltTokens:
    """Tokens drawn at every position of a prompt but the first: row i is of position i+1. `tokens` int64 [P-1, k],
    `logprobs` float32 [P-1, k], untempered."""

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """The answer to a `SampleRequest`. `prompt_logprobs` float32 [P]: NaN at 0 and where not asked for."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: TopK | None = None
    prompt_cache_hit_tokens: int = 0
    target_prompt_logprobs: TargetLogprobs | None = None
    prompt_alt_tokens: AltTokens | None = None


NO_TOKEN_LOGPROB = -99999.0
"""The logprob of an unused cell of a `TopK` (WIRE §4.3)."""


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Hyperparameters of one AdamW step; `grad_clip_norm` 0 means no clipping (SEMANTICS §5, WIRE §5.4)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class DimuonParams:
    """Hyperparameters of one Dimuon step; `grad_clip_norm` 0 or less means no clipping (SEMANTICS §5, WIRE §5.4)."""

    learning_rate: float
    beta1: float = 0.9
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What an adapter consists of. `seed` decides its initial weights together with each module's name."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0

    @property
    def scale(self) -> float:
        """The factor of B·A·x: `alpha / rank` (SEMANTICS §1). The one place that computes it."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a worker tells the API of the base model that it has loaded."""

    architecture: str
    vocab_size: int
    context_length: int
    config_hash: str
    hidden_size: int = 0
    extra: Mapping[str, str] = field(default_factory=dict)
