"""Bodies of the training routes (WIRE §2.3, §2.4). `forward_backward` is protobuf: `app.wire.training`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SecretStr, model_validator

from app.schemas import Identifier, Items, Request, RunSeq, SessionSeq, Texts

Name = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
Ttl = Field(None, ge=3600, le=10 * 366 * 86400)


class Lora(Request):
    """The adapter that a run trains."""

    rank: int = Field(32, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _trains_something(self) -> Lora:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("at least one of train_unembed, train_mlp and train_attn must be true")
        return self


class OptimizerConfig(Request):
    """The optimizer of a run, fixed when it is created: `{type: "adamw"}` or `{type: "dimuon", version: 1}`."""

    type: Literal["adamw", "dimuon"] = "adamw"
    version: Literal[1] | None = None

    @model_validator(mode="after")
    def _has_the_fields_of_its_type(self) -> OptimizerConfig:
        if self.type == "adamw" and self.version is not None:
            raise ValueError("version: adamw has none")
        return self

    def stored(self) -> dict[str, Any]:
        """As a run keeps it and its client reads it."""
        return {"type": self.type} if self.type == "adamw" else {"type": self.type, "version": 1}


class CreateModel(Request):
    """`create_model`."""

    session_id: Identifier
    model_seq_id: SessionSeq
    base_model: str = Field(min_length=1, max_length=500)
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    type: Literal["create_model"] = "create_model"


class CreateFromWeights(Request):
    """`load_weights` that makes a new run of a checkpoint. `weights_access_token`: a key or token of the account whose
    checkpoint it is, if that is another one."""

    session_id: Identifier
    model_seq_id: SessionSeq
    path: str
    optimizer: bool
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: SecretStr | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeights(Request):
    """`load_weights` into a run that exists."""

    model_id: Identifier
    seq_id: RunSeq
    path: str
    optimizer: bool
    weights_access_token: SecretStr | None = None
    type: Literal["load_weights"] = "load_weights"


class AdamStep(Request):
    """Hyperparameters of one AdamW step (WIRE §5.4)."""

    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class DimuonStep(Request):
    """Hyperparameters of one Dimuon step (WIRE §5.4). A `grad_clip_norm` of 0 or less means no clipping."""

    type: Literal["dimuon"]
    learning_rate: float = Field(ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)


class OptimStep(Request):
    """`optim_step` of a run whose optimizer is AdamW."""

    model_id: Identifier
    seq_id: RunSeq
    adam_params: AdamStep
    type: Literal["optim_step"] = "optim_step"


class OtherOptimStep(Request):
    """`optim_step` of a run whose optimizer is another than AdamW."""

    model_id: Identifier
    seq_id: RunSeq
    optimizer_params: DimuonStep
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Request):
    """`save_weights`: a training checkpoint `tinker://<run>/weights/<path>`."""

    model_id: Identifier
    seq_id: RunSeq
    path: str = Name
    ttl_seconds: int | None = Ttl
    overwrite: bool = False
    user_metadata: Texts | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsForSampler(Request):
    """`save_weights_for_sampler`: named (`path`), or ephemeral (`sampling_session_seq_id`)."""

    model_id: Identifier
    seq_id: RunSeq
    path: str | None = Field(None, min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    sampling_session_seq_id: SessionSeq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Ttl
    overwrite: bool = False
    user_metadata: Texts | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    @model_validator(mode="after")
    def _one_form(self) -> SaveWeightsForSampler:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("exactly one of path and sampling_session_seq_id must be given")
        if self.path is not None and self.kind != "snapshot":
            raise ValueError("kind: a named save is always a snapshot")
        if self.path is None and (self.ttl_seconds is not None or self.user_metadata is not None):
            raise ValueError("ttl_seconds and user_metadata: an ephemeral save has none, it lives with its session")
        return self


class SaveWeightsExternal(Request):
    """`save_weights_external`: weights to be downloaded, `tinker://<run>/external_weights/<path>`. No recipients at all
    and an empty list of them are not the same: whoever sends a list wants no file to be readable by everybody."""

    model_id: Identifier
    seq_id: RunSeq
    path: str = Name
    ttl_seconds: int | None = Ttl
    age_encryption_recipients: Items[Annotated[str, Field(max_length=4096)]] | None = Field(
        None, min_length=1, max_length=10
    )
    type: Literal["save_weights_external"] = "save_weights_external"


class GetInfo(Request):
    """`get_info`."""

    model_id: Identifier
    type: Literal["get_info"] = "get_info"


class UnloadModel(Request):
    """`unload_model`, which SDKs before 0.25 may send."""

    model_id: Identifier
    type: Literal["unload_model"] = "unload_model"


class ModelData(BaseModel):
    """What a client needs to find the tokenizer (WIRE §8)."""

    arch: str
    model_name: str
    tokenizer_id: str | None


class Info(BaseModel):
    """Answer of `get_info`."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    optimizer_config: dict[str, Any]
    is_lora: bool = True
    lora_rank: int
    model_name: str


class Future(BaseModel):
    """A promise: poll `retrieve_future` with `request_id`."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None
