# A worker on CPUs, with Ray: torch without CUDA, and the native kernels of every ISA built ahead, so that the image
# needs no compiler. PIP_INDEX_URL or PIP_EXTRA_INDEX_URL name an index with torch's CPU wheels; PyPI's own are CUDA's.
#   docker build -f deploy/docker/worker.Dockerfile --build-arg PIP_EXTRA_INDEX_URL=… -t baton-worker-cpu:0.1.0 .
ARG BASE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1
FROM ${BASE} AS build
ARG EXTRAS=worker,ray
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY deploy/docker/constraints.txt constraints.txt
COPY baton baton
RUN python3 -m venv /opt/baton/venv \
    && /opt/baton/venv/bin/pip install --quiet --no-cache-dir --no-compile -c constraints.txt ".[${EXTRAS}]" \
    && BATON_CACHE_DIR=/tmp/kernels /opt/baton/venv/bin/python -m baton.kernels.abi.build /opt/baton/kernels \
    && /opt/baton/venv/bin/pip uninstall -y --quiet pip \
    && find /opt/baton/venv -name tests -type d -prune -exec rm -rf {} +
COPY models/demo /opt/baton/models/demo

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin baton \
    && install -d -o 10001 -g 10001 -m 0700 /run/baton /var/cache/baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    BATON_CACHE_DIR=/var/cache/baton BATON_KERNELS_DIR=/opt/baton/kernels BATON_CLUSTER__RUN_DIR=/run/baton
USER 10001:10001
WORKDIR /tmp
EXPOSE 8100 8101 8102
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=600s \
    CMD ["sh", "-c", "grep -q '\"state\":\"ready\"' /run/baton/slots/*.json"]
ENTRYPOINT ["baton"]
CMD ["worker", "--role", "decode"]
