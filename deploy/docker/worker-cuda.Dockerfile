# A worker on NVIDIA GPUs, with Ray: torch with its own CUDA libraries (PyPI's wheels), on CUDA's runtime base. The native
# kernels of every ISA and the CUDA ones (sm_90a) are built ahead, so that the image needs neither g++ nor nvcc.
#   docker build -f deploy/docker/worker-cuda.Dockerfile -t baton-worker-cuda:0.1.0 .
ARG BUILD_BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143
FROM ${BUILD_BASE} AS build
ARG EXTRAS=worker,ray
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY deploy/docker/constraints.txt constraints.txt
COPY baton baton
RUN python3 -m venv /opt/baton/venv \
    && /opt/baton/venv/bin/pip install --quiet --no-cache-dir --no-compile -c constraints.txt ".[${EXTRAS}]" \
    && BATON_CACHE_DIR=/tmp/kernels /opt/baton/venv/bin/python -m baton.kernels.abi.build /opt/baton/kernels \
    && BATON_CACHE_DIR=/tmp/kernels /opt/baton/venv/bin/python -m baton.kernels.cuda.build /opt/baton/kernels \
    && /opt/baton/venv/bin/pip uninstall -y --quiet pip
COPY models/demo /opt/baton/models/demo

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin baton \
    && install -d -o 10001 -g 10001 -m 0700 /run/baton /var/cache/baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    BATON_CACHE_DIR=/var/cache/baton BATON_KERNELS_DIR=/opt/baton/kernels BATON_CLUSTER__RUN_DIR=/run/baton \
    BATON_WORKER__DEVICE=cuda NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
EXPOSE 8100 8101 8102
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=600s \
    CMD ["sh", "-c", "grep -q '\"state\":\"ready\"' /run/baton/slots/*.json"]
ENTRYPOINT ["baton"]
CMD ["worker", "--role", "decode"]
