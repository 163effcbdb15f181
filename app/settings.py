"""Every setting of Tinworks: typed, with its default, read from the environment and checked at start.

`DATABASE_URL`, `REDIS_URL` and `PORT` keep the names that platforms give them; everything else is `TINWORKS_<NAME>`.
The README's table of settings is generated from the descriptions here.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

_LEAST_SILENCE_S = 12.0
_SILENT_LEASES = 1.5


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
    redis_cert_reqs: Literal["required", "none"] = Field(
        "required",
        description="Of a `rediss://` Redis: `none` takes any certificate, also one that it has signed itself (Heroku)",
    )
    port: int = Field(8000, validation_alias=AliasChoices("PORT", "port"), description="Port of the web process")
    data_dir: Path = Field(
        Path("tinworks-data"), description="Folder of blobs (checkpoints, large bodies) and of what is on its way there"
    )
    shared_dir: Path | None = Field(
        None,
        description="Folder that trainers and samplers see alike, a shared volume or `/dev/shm` of one machine: new "
        "weights reach samplers through it at once, and the blob store a moment later",
    )
    shared_dir_bytes: int = Field(
        20 * 2**30, ge=0, description="Weights kept in `TINWORKS_SHARED_DIR` once they are in the blob store"
    )

    # -- a bucket instead of the data folder (docs/storage.md); boto3 reads credentials from AWS_*
    s3_bucket: str = Field(
        "", description="Bucket of S3, or of a service like it, that holds the blobs; credentials come from `AWS_*`"
    )
    s3_prefix: str = Field("", description="What the keys in the bucket begin with, if it is not ours alone")
    s3_endpoint_url: str = Field(
        "",
        validation_alias=AliasChoices(
            "TINWORKS_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "s3_endpoint_url"
        ),
        description="Where the bucket's service is, if it is not Amazon's; `AWS_ENDPOINT_URL` is understood",
    )
    s3_public_url: str = Field(
        "", description="Where clients that download reach that service, if it is not where we do"
    )
    s3_region: str = Field(
        "",
        validation_alias=AliasChoices("TINWORKS_S3_REGION", "AWS_REGION", "AWS_DEFAULT_REGION", "s3_region"),
        description="The bucket's region; `AWS_REGION` is understood",
    )
    s3_path_style: bool | None = Field(
        None, description="The bucket in the path, not in the host's name; unset: with an endpoint of its own"
    )
    s3_sse: str = Field(
        "", description="Encryption by the service: `AES256`, `aws:kms` or `aws:kms:KEY`; unset: the bucket's own"
    )
    orphan_grace_s: float = Field(
        3600.0,
        ge=0,
        description="Blobs that nothing refers to are deleted after so long; longer than any save or pass may take",
    )
    tenant_storage_bytes: int = Field(
        0, ge=0, description="Size of all checkpoints of one tenant; a save beyond it fails; 0: no limit"
    )

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
    requests_per_s: float = Field(
        100.0,
        ge=0,
        description="Requests of one tenant in one web process, 429 beyond it and a reserve of ten seconds; 0: any. "
        "Training, samples, polls and heartbeats do not count: they have queues of their own",
    )
    poll_hold_s: float = Field(25.0, gt=0, le=30, description="How long a poll is held before it answers 408")
    inline_bytes: int = Field(64 * 2**10, description="Bodies and results above this size are stored as blobs")
    metadata_first_bytes: int = Field(
        2**20, ge=2**10, description="A result above this size is announced first, so that clients make room for it"
    )
    result_ttl_s: int = Field(
        24 * 3600,
        description="How long a run is quiet before its results are forgotten; of one that never is, those that are as "
        "old and 2000 operations behind",
    )

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
    slot_slice_s: float = Field(
        30.0,
        gt=0,
        description="How long a run that always has work keeps its slot while other runs wait for one",
    )
    runs_per_tenant: int = Field(
        256, ge=0, description="Runs of one tenant in slots of one base model; more of his wait; 0: any number"
    )
    pass_tokens: int = Field(16384, ge=1, description="Token budget of one forward/backward pass over many runs")
    micro_batch_tokens: int = Field(4096, ge=1, description="Tokens, padding included, of one micro-batch at most")
    attention: Literal["auto", "padded", "flash", "flex"] = Field(
        "auto",
        description="How sequences of different lengths share a micro-batch of training: padded, or packed for a "
        "flash-attention kernel or torch's flex attention; auto: flash or flex on CUDA where the model allows it",
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Recompute layers in the backward to save memory; auto: for models of a billion parameters, and "
        "for datums of smaller ones whose activations would take more than 2 GiB",
    )
    claim_interval_s: float = Field(1.0, gt=0, description="How often a train loop looks for work without a doorbell")
    lease_s: float = Field(
        8.0,
        gt=0,
        description="A run's lease; renewed every third of it, taken over after it. The same for all: whether a worker "
        "lives is judged by it",
    )
    max_pass_s: float = Field(
        600.0, gt=0, description="A pass or a restore longer than this is taken for hung and ends its worker"
    )
    gap_timeout_s: float = Field(
        1200.0, gt=0, description="A sequence id missing for so long becomes a failed operation"
    )
    snapshot_seconds: float = Field(
        5.0,
        gt=0,
        description="Seconds of computing that the recovery of a worker's runs repeats at most: a run's state is saved "
        "before it has done more",
    )
    snapshot_cost_factor: float = Field(
        20.0, ge=0, description="Or so many times the seconds that it takes to save this run, if that is more"
    )
    snapshot_operations: int = Field(
        1024, ge=1, description="Operations after which a run's state is saved in any case"
    )
    snapshot_bytes: int = Field(64 * 2**20, ge=1, description="Bytes of request bodies after which it is saved, too")

    # -- sampling
    sample_engine: Literal["auto", "native", "vllm", "external"] = Field(
        "auto",
        description="What a sample worker computes with (docs/sampling.md); auto: vLLM where it is installed, if there "
        "is CUDA and the worker does not train, else the native engine",
    )
    max_running_sequences: int = Field(256, ge=1, description="Sequences decoded together by one sample worker")
    adapter_cache: int = Field(64, ge=1, description="Adapters that a sample worker keeps loaded")
    adapter_dir: Path | None = Field(
        None,
        description="Folder of the adapters that sample workers have fetched, which all of a host may share; unset: "
        "`adapters` in the data directory",
    )
    adapter_disk_bytes: int = Field(
        20 * 2**30, ge=0, description="Adapters kept in that folder, besides those that are loaded"
    )
    sample_claim_s: float = Field(10.0, gt=0, description="A sampler's claim on a request; renewed while it runs")
    sample_ttl_s: int = Field(900, ge=60, description="How long the result of a sample is kept")
    sampled_sequence_ttl_s: int = Field(
        86400, ge=60, description="How long a sample stays on record for training requests that name it"
    )
    max_waiting_samples: int = Field(20000, ge=1, description="Unfinished samples per base model; 429 beyond it")
    max_waiting_samples_per_tenant: int = Field(
        10000, ge=1, description="Unfinished samples of one tenant per base model; 429 beyond it"
    )
    route_prefix_tokens: int = Field(
        256,
        ge=0,
        description="Samples whose prompts begin with the same so many tokens go to the same sample worker; 0: to any",
    )
    sample_drain_s: float = Field(
        20.0, ge=0, description="How long a sample worker that is told to stop goes on with what it has begun"
    )

    # -- vLLM, in sample workers
    vllm_tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share vLLM's weights")
    vllm_data_parallel_size: int = Field(1, ge=1, description="Copies of vLLM in one worker, each of so many GPUs")
    vllm_gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of each GPU's memory that vLLM takes (on a CPU: of the machine's)"
    )
    vllm_kv_cache_bytes: int = Field(
        0, ge=0, description="Size of vLLM's cache of keys and values; 0: what the weights leave of its share"
    )
    vllm_max_loras: int = Field(8, ge=1, description="Adapters in one batch of vLLM; others wait for a step")
    vllm_max_cpu_loras: int = Field(
        0, ge=0, description="Adapters that vLLM keeps in the machine's memory; 0: `TINWORKS_ADAPTER_CACHE`"
    )
    vllm_max_lora_rank: int = Field(
        0, ge=0, le=512, description="Largest rank that vLLM serves and has memory for; 0: `TINWORKS_MAX_LORA_RANK`"
    )
    vllm_max_model_len: int = Field(
        0, ge=0, description="Tokens of prompt and sample together that vLLM serves; 0: the model's context"
    )
    vllm_enforce_eager: bool = Field(False, description="Start vLLM quickly, without compiling: it samples slower")
    vllm_url: str = Field("", description="The vLLM server of the external engine, like `http://host:8000`")
    vllm_model: str = Field("", description="The base model's name there; unset: the first that it lists")
    vllm_api_key: str = Field("", repr=False, description="The key that it wants, if any")

    # -- sessions
    session_silence_s: float = Field(300.0, gt=0, description="Silence after which a session's runs leave their slots")
    session_retention_s: float = Field(7 * 86400.0, gt=0, description="Silence after which a session is gone")
    ephemeral_idle_s: float = Field(
        86400.0,
        ge=3600,
        description="How long weights that were saved without a name are kept after they were last sampled from, while "
        "their session lives; a run's newest ones always are",
    )
    auto_last_ttl_s: int = Field(
        7 * 86400,
        ge=0,
        description="How long the last state of each run of a session that has ended is kept, as its checkpoint "
        "`weights/auto-last`; 0: not at all",
    )

    # -- logs and metrics
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged")
    log_format: Literal["json", "console"] = Field("json", description="Structured JSON lines, or for people")
    traces: float = Field(
        0.0, ge=0, le=1, description="Share of requests that OpenTelemetry traces; needs `tinworks[otel]` and `OTEL_*`"
    )
    alive_file: Path | None = Field(
        None, description="File that workers and beat touch while they live, for health checks (`python -m app.alive`)"
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port on which a web process shows its metrics to everybody; 0: none"
    )
    metrics_token: str = Field(
        "",
        repr=False,
        description="Shows them at `/metrics` of the service itself, to who sends `Authorization: Bearer` and this",
    )

    @field_validator("database_url")
    @classmethod
    def _dialect(cls, url: str) -> str:
        for prefix in ("postgres://", "postgresql://"):
            if url.startswith(prefix):
                return "postgresql+psycopg://" + url.removeprefix(prefix)
        if not url.startswith(("sqlite://", "postgresql+psycopg://")):
            raise ValueError("DATABASE_URL must start with sqlite:// or postgresql://")
        return url

    @field_validator("shared_dir", "adapter_dir", "alive_file", mode="before")
    @classmethod
    def _no_folder(cls, folder: object) -> object:
        return folder or None

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

    @property
    def worker_silence_s(self) -> float:
        """A worker that was not seen for so long does not count as live. It shows itself every third of a lease."""
        return max(_LEAST_SILENCE_S, _SILENT_LEASES * self.lease_s)

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

    @field_validator("s3_endpoint_url", "s3_public_url")
    @classmethod
    def _endpoint(cls, url: str) -> str:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError("TINWORKS_S3_ENDPOINT_URL and TINWORKS_S3_PUBLIC_URL must start with http:// or https://")
        return url.rstrip("/")

    @field_validator("s3_prefix")
    @classmethod
    def _prefix(cls, prefix: str) -> str:
        prefix = prefix.strip("/")
        if prefix and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._=-]*(/[A-Za-z0-9_][A-Za-z0-9._=-]*)*", prefix):
            raise ValueError("TINWORKS_S3_PREFIX may have letters, digits, `.`, `_`, `=`, `-` and `/`")
        return prefix

    @field_validator("s3_sse")
    @classmethod
    def _sse(cls, sse: str) -> str:
        if sse and not re.fullmatch(r"AES256|aws:kms(:.+)?", sse):
            raise ValueError("TINWORKS_S3_SSE must be AES256, aws:kms or aws:kms:KEY")
        return sse

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, url: str) -> str:
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("REDIS_URL must start with redis://, rediss:// or unix://")
        return url

    @model_validator(mode="after")
    def _redis_certificates(self) -> Settings:
        """redis-py and Celery's transport both read this from the URL; the latter has no default."""
        if self.redis_url.startswith("rediss://") and "ssl_cert_reqs=" not in self.redis_url:
            mark = "&" if "?" in self.redis_url else "?"
            self.redis_url = f"{self.redis_url}{mark}ssl_cert_reqs={self.redis_cert_reqs}"
        return self


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process, read from the environment once."""
    return Settings()
