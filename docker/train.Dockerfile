# syntax=docker/dockerfile:1
# The train role, for NVIDIA GPUs: torch brings its CUDA libraries, the host its driver.
#   docker build -f docker/train.Dockerfile -t tinworks-train .

FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY requirements/build.lock requirements/
RUN pip install --no-cache-dir --require-hashes -r requirements/build.lock
COPY pyproject.toml setup.py README.md ./
COPY app app
COPY workers workers
COPY migrations migrations
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Triton and torch.compile build small modules at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home tinworks && install -d -o tinworks -g tinworks /data /shared
COPY requirements/train.lock /tmp/requirements.lock
RUN pip install --require-hashes -r /tmp/requirements.lock
COPY --from=build /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
USER 10001
WORKDIR /home/tinworks
ENV TINWORKS_DATA_DIR=/data TINWORKS_ALIVE_FILE=/tmp/tinworks-alive HF_HOME=/data/huggingface \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /data
# A model may take minutes to load; then the file is touched every few seconds.
HEALTHCHECK --interval=30s --timeout=10s --start-period=15m CMD ["python", "-m", "app.alive"]
STOPSIGNAL SIGTERM
CMD ["celery", "-A", "workers", "worker", "-Q", "train"]
