"""Bodies of the sampling routes (WIRE §2.5, §5.5)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from app.schemas import Identifier, Items, Request, SessionSeq


class CreateSamplingSession(Request):
    """`create_sampling_session`: of a base model, or of a checkpoint."""

    session_id: Identifier
    sampling_session_seq_id: SessionSeq
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class SamplingSessionCreated(BaseModel):
    """Answer of `create_sampling_session`."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class Sampler(BaseModel):
    """Answer of `samplers/{id}`."""

    sampler_id: str
    base_model: str
    model_path: str | None


class JoinSamplingSession(Request):
    """`join_sampling_session`."""

    sampling_session_id: Identifier
    type: Literal["join_sampling_session"] = "join_sampling_session"


class SamplingSessionJoined(BaseModel):
    """Answer of `join_sampling_session`: the number of the new client; the session's first one is 0."""

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class TextChunk(Request):
    """Tokens of a prompt. Older clients leave `type` out."""

    tokens: Items[Annotated[int, Field(ge=0, lt=2**31)]]
    type: Literal["encoded_text"] = "encoded_text"

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type", "encoded_text") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "encoded_text":
            raise ValueError(f"{kind[:40]} chunks are not supported, only encoded_text")
        return data


class Prompt(Request):
    """A prompt: its chunks follow each other."""

    chunks: Items[TextChunk] = Field(min_length=1)


class Params(Request):
    """How to sample."""

    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | Items[str] | Items[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)


class TokenMatrix(Request):
    """Token ids in a matrix, -1 for a cell without one (WIRE §5.2): dense, or in CSR form."""

    data: Items[Annotated[int, Field(ge=-1, lt=2**31)]]
    dtype: Literal["int64"]
    shape: Items[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=2, max_length=2)
    sparse_crow_indices: Items[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    sparse_col_indices: Items[Annotated[int, Field(ge=0, lt=2**31)]] | None = None


class Sample(Request):
    """`asample`. Its model is the sampling session's."""

    prompt: Prompt
    sampling_params: Params = Params()
    num_samples: int = Field(1, ge=1, le=4096)
    sampling_session_id: Identifier
    seq_id: int = Field(ge=0, lt=2**63)
    base_model: None = None
    model_path: None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    target_prompt_logprobs: TokenMatrix | None = None
    prompt_alt_tokens_k: int = Field(0, ge=0)
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"

    @field_validator("base_model", "model_path", mode="before")
    @classmethod
    def _not_a_model(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("not supported in a sample: its model is that of its sampling session")
        return value
