"""Bodies of the checkpoint routes (WIRE §2.6, §5.6)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from app.paging import Cursor, Page
from app.schemas import Identifier, Request, SessionSeq

LEAST_TTL_S, GREATEST_TTL_S = 3600, 10 * 366 * 86400
_MAX_PATH = 500


class CheckpointsQuery(Page):
    """Query of `GET checkpoints`."""

    limit: int = Field(100, ge=1, le=1000)


class CheckpointInfo(BaseModel):
    """A checkpoint, as lists show it."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None
    expires_at: datetime | None


class Checkpoints(BaseModel):
    """Answer of both lists of checkpoints; only the one over all runs has pages."""

    checkpoints: list[CheckpointInfo]
    cursor: Cursor | None = None


class SetTtl(Request):
    """`PUT …/ttl`: seconds from now, or null for never."""

    ttl_seconds: int | None = Field(ge=LEAST_TTL_S, le=GREATEST_TTL_S)


class AskWeightsInfo(Request):
    """`weights_info`."""

    tinker_path: str = Field(max_length=_MAX_PATH)


class WeightsInfo(BaseModel):
    """What of: enough to make a run that the checkpoint fits into."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: dict[str, Any]


class ExternalWeightsUrls(BaseModel):
    """Answer of `…/external_weights_urls`: a URL by the name of each file."""

    urls: dict[str, str]
    expires: datetime


class SignedUrl(BaseModel):
    """Where `…/archive` leads to."""

    url: str
    expires: datetime


class CopyWeights(Request):
    """`copy_weights`: into a project, or into a session as the run `model_seq_id`. A weights access token comes in a
    header."""

    source_path: str = Field(max_length=_MAX_PATH)
    destination_project_id: str | None = Field(None, min_length=1, max_length=200)
    session_id: Identifier | None = None
    model_seq_id: SessionSeq | None = None
    ttl_seconds: int | None = Field(None, ge=LEAST_TTL_S, le=GREATEST_TTL_S)
    weights_access_token: None = None

    @model_validator(mode="after")
    def _one_destination(self) -> CopyWeights:
        if (self.session_id is None) != (self.model_seq_id is None):
            raise ValueError("session_id and model_seq_id: must be given together")
        if (self.session_id is None) == (self.destination_project_id is None):
            raise ValueError("exactly one of destination_project_id and session_id must be given")
        return self


class WeightsCopied(BaseModel):
    """Answer of `copy_weights`."""

    tinker_path: str
