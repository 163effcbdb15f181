"""Every setting of Tinworks: typed, with its default, read from the environment and checked at start.

`DATABASE_URL`, `REDIS_URL` and `PORT` keep the names that platforms give them; everything else is `TINWORKS_<NAME>`.
The README's table of settings is generated from the descriptions here.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """The configuration of one process."""

    model_config = SettingsConfigDict(env_prefix="TINWORKS_", extra="ignore", populate_by_name=True)

    # -- where things are
    database_url: str = Field(
        "sqlite:///tinworks-data/tinworks.db",
        validation_alias=AliasChoices("DATABASE_URL", "database_url"),
        description="SQLAlchemy URL of the database; `postgres://` is understood",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("REDIS_URL", "redis_url"),
        description="The broker, the sample store and the completion notices",
    )
    port: int = Field(8000, validation_alias=AliasChoices("PORT", "port"), description="Port of the web process")
    data_dir: Path = Field(Path("tinworks-data"), description="Folder of blobs (checkpoints, large bodies)")

    # -- who may use it
    auth: Literal["keys", "open"] = Field(
        "keys",
        description="`keys`: only keys made by `tinworks keys create`; `open`: any `tml-…` key, each its own tenant",
    )
    secret_key: str = Field(
        "",
        repr=False,
        description="Signs tokens and download links; 32 characters or more; unset: a random one in the database",
    )
    token_ttl_s: float = Field(3600.0, gt=0, description="How long a token is valid that a client got for its key")
    key_cache_s: float = Field(2.0, ge=0, le=60, description="How long a process trusts a key that it has looked up")

    # -- HTTP
    max_request_bytes: int = Field(
        256 * 2**20, ge=2**20, description="Largest request body after decompression; 413 beyond it"
    )
    poll_hold_s: float = Field(25.0, gt=0, le=30, description="How long a poll is held before it answers 408")
    inline_bytes: int = Field(64 * 2**10, description="Bodies and results above this size are stored as blobs")
    metadata_first_bytes: int = Field(
        2**20, ge=2**10, description="A result above this size is announced first, so that clients make room for it"
    )
    result_ttl_s: int = Field(24 * 3600, description="How long results are kept after they were made")

    # -- downloads
    public_url: str = Field(
        "", description="Base URL of download links; unset: the one by which the client that asks for them came"
    )
    download_url_ttl_s: int = Field(3600, ge=60, le=7 * 86400, description="How long a download link is valid")

    # -- what clients are told
    pjwt_auth_enabled: bool = Field(True, description="Let clients exchange their key for short-lived tokens")
    proto_compress_fwdbwd: bool = Field(True, description="Ask clients to zstd-compress forward_backward bodies")
    parallel_fwdbwd_chunks: bool = Field(True, description="Let clients send the chunks of a large batch in parallel")
    sample_max_concurrent_requests: int = Field(2000, ge=1, description="In-flight samples per sampling client")
    sample_use_retrieve_futures: bool = Field(
        False,
        description="One poll per sampling client, not per sample; for a Redis that does not die together with web",
    )
    sample_join_sampling_session: bool = Field(
        False, description="Copies of a sampling client ask for their number instead of drawing one"
    )
    custom_loss_server_side: bool = Field(True, description="Let clients upload traced losses, to run them here")
    sample_cancel_enabled: bool = Field(True, description="Let clients cancel samples that nobody waits for any more")

    # -- training
    base_model: str = Field("", description="What a worker serves: `[ALIAS[,ALIAS…]=]NAME_OR_PATH`")
    torch_threads: int = Field(0, ge=0, description="Cores that a worker computes with; 0: all, at most 8")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Of the base model; auto: bfloat16 on CUDA, float32 on a CPU"
    )
    gpus: str = Field("", description="CUDA devices that a worker sees, `0,1,2,3`; it trains on all of them")
    train_ranks: int = Field(0, ge=0, description="Ranks of a train worker on its host; 0: one per device in `gpus`")
    max_lora_rank: int = Field(128, ge=1, le=1024, description="Largest rank that a run may have")
    lora_alpha: float = Field(32.0, gt=0, description="LoRA's alpha; the scale of an adapter is alpha / rank")
    train_slots: int = Field(64, ge=1, description="Runs resident in one train worker")
    pass_tokens: int = Field(16384, ge=1, description="Token budget of one forward/backward pass over many runs")
    micro_batch_tokens: int = Field(4096, ge=1, description="Tokens, padding included, of one micro-batch")
    attention: Literal["auto", "padded", "flash", "flex"] = Field(
        "auto",
        description="How sequences of different lengths share a micro-batch of training: padded, or packed for a "
        "flash-attention kernel or torch's flex attention; auto: flash or flex on CUDA where the model allows it",
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto", description="Recompute layers in the backward to save memory; auto: for models of a billion parameters"
    )
    claim_interval_s: float = Field(1.0, gt=0, description="How often a train loop looks for work without a doorbell")
    lease_s: float = Field(9.0, gt=0, description="A run's lease; renewed every third of it, taken over after it")
    max_pass_s: float = Field(600.0, gt=0, description="A pass longer than this is taken for hung and ends its worker")
    gap_timeout_s: float = Field(
        1200.0, gt=0, description="A sequence id missing for so long becomes a failed operation"
    )
    snapshot_operations: int = Field(64, ge=1, description="Operations after which a run's state is saved for recovery")
    snapshot_bytes: int = Field(64 * 2**20, ge=1, description="Bytes of request bodies after which it is saved")

    # -- sampling
    max_running_sequences: int = Field(256, ge=1, description="Sequences decoded together by the native engine")
    adapter_cache: int = Field(64, ge=1, description="Adapters that a sample worker keeps loaded")
    sample_claim_s: float = Field(10.0, gt=0, description="A sampler's claim on a request; renewed while it runs")
    sample_ttl_s: int = Field(900, ge=60, description="How long the result of a sample is kept")
    sampled_sequence_ttl_s: int = Field(
        86400, ge=60, description="How long a sample stays on record for training requests that name it"
    )
    max_waiting_samples: int = Field(20000, ge=1, description="Samples waiting per pool; 429 beyond it")

    # -- sessions
    session_silence_s: float = Field(300.0, gt=0, description="Silence after which a session's runs leave their slots")
    session_retention_s: float = Field(7 * 86400.0, gt=0, description="Silence after which a session is gone")

    # -- logs
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged")
    log_format: Literal["json", "console"] = Field("json", description="Structured JSON lines, or for people")

    @field_validator("database_url")
    @classmethod
    def _dialect(cls, url: str) -> str:
        for prefix in ("postgres://", "postgresql://"):
            if url.startswith(prefix):
                return "postgresql+psycopg://" + url.removeprefix(prefix)
        if not url.startswith(("sqlite://", "postgresql+psycopg://")):
            raise ValueError("DATABASE_URL must start with sqlite:// or postgresql://")
        return url

    @field_validator("gpus")
    @classmethod
    def _devices(cls, gpus: str) -> str:
        named = [device.strip() for device in gpus.split(",")] if gpus.strip() else []
        if not all(named) or len(set(named)) < len(named):
            raise ValueError("TINWORKS_GPUS must be a list of different devices, like 0,1,2,3")
        return ",".join(named)

    @property
    def local_ranks(self) -> int:
        """Ranks of a train worker on its host."""
        return self.train_ranks or max(1, len(self.gpus.split(",")))

    @field_validator("secret_key")
    @classmethod
    def _secret(cls, secret: str) -> str:
        if 0 < len(secret) < 32:
            raise ValueError("TINWORKS_SECRET_KEY must have at least 32 characters, like `openssl rand -hex 32` prints")
        return secret

    @field_validator("public_url")
    @classmethod
    def _public(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError("TINWORKS_PUBLIC_URL must start with http:// or https://")
        return url.rstrip("/")

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, url: str) -> str:
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("REDIS_URL must start with redis://, rediss:// or unix://")
        return url


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process, read from the environment once."""
    return Settings()
