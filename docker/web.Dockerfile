# syntax=docker/dockerfile:1
# The web role, and beat and release with other commands. No torch.
#   docker build -f docker/web.Dockerfile -t tinworks-web .

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
RUN useradd --uid 10001 --create-home tinworks && install -d -o tinworks -g tinworks /data /shared
COPY requirements/web.lock /tmp/requirements.lock
RUN pip install --require-hashes -r /tmp/requirements.lock
COPY --from=build /wheels /wheels
RUN pip install --no-deps /wheels/*.whl
USER 10001
WORKDIR /home/tinworks
ENV TINWORKS_DATA_DIR=/data TINWORKS_ALIVE_FILE=/tmp/tinworks-alive
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ.get(\"PORT\", 8000)}/livez', timeout=4)"]
STOPSIGNAL SIGTERM
CMD ["/bin/sh", "-c", "exec uvicorn --factory app.main:create_app --host 0.0.0.0 --port ${PORT:-8000} --no-access-log --backlog 4096 --timeout-graceful-shutdown 5 --timeout-keep-alive 75"]
