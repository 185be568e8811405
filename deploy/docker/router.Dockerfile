# The router (and planner and console): no torch, no compiler. Any base with Python 3.11 or newer will do.
#   docker build -f deploy/docker/router.Dockerfile -t baton-router:0.1.0 .
ARG BASE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1
FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY deploy/docker/constraints.txt constraints.txt
COPY baton baton
RUN python3 -m venv /opt/baton/venv \
    && /opt/baton/venv/bin/pip install --quiet --no-cache-dir --no-compile -c constraints.txt . \
    && /opt/baton/venv/bin/pip uninstall -y --quiet pip \
    && find /opt/baton/venv -name tests -type d -prune -exec rm -rf {} +
# The demo model's tokenizer: what a router needs of a model.
COPY models/demo/*.json models/demo/LICENSE-CORPUS.md /opt/baton/models/demo/

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin baton \
    && install -d -o 10001 -g 10001 -m 0700 /run/baton /var/cache/baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HOME=/tmp BATON_CACHE_DIR=/var/cache/baton BATON_CLUSTER__RUN_DIR=/run/baton
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["baton"]
CMD ["router"]
