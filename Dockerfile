# syntax=docker/dockerfile:1
# Two images from one recipe:
#
#   docker build --target cpu  -t oarlock:cpu .
#   docker build --target cuda -t oarlock:cuda .
#
# Packages are those of the lock files, which have the extras kv-events and otel as well, and pip refuses any other
# bytes. The CUDA image's torch is the general index's, built for CUDA 13.0: it needs NVIDIA's driver 580.65.06 or later,
# and a server says so where it finds an older one.
# The CPU image takes torch from PyTorch's own index, because the wheel of the general one carries CUDA along, several
# gigabytes; that index has wheels of the same version for other kinds of machines, too:
#
#   --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126    for drivers since 525.60.13, which have CUDA 12
#
# Then torch is pinned by its version and not by hashes. Empty: the general index.
#
# The base image is named by its digest, an index of all architectures: Python 3.13.14 as of 5 August 2026, from
# github.com/docker-library/repo-info, repos/python/remote/3.13-slim-bookworm.md at commit 3effc3eac4f6. Debian's and
# Python's fixes since then reach an image only with a newer digest:
#
#   docker buildx imagetools inspect python:3.13-slim-bookworm        prints it
#   --build-arg PYTHON_IMAGE=python:3.13-slim-bookworm@sha256:...     or, for good, the default below
#
# Both images hold a virtual environment and the checkout, run as an unprivileged user and write nothing outside /cache
# and /tmp, so that the root file system may be mounted read-only.

ARG PYTHON_IMAGE=python:3.13-slim-bookworm@sha256:67a1e1f215ccda113cfc024e8639049257e88f273898f595b61476d128d387e8

# ---------------------------------------------------------------- what both builds start from
FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/oarlock
COPY requirements.txt requirements.lock requirements-cuda.lock ./

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    grep '^torch==' requirements.txt > torch.txt \
    && pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r torch.txt \
    && rm torch.txt \
    && pip install --require-hashes -r requirements.lock
# The kernels are compiled here, for every level of instruction set: the image itself holds no compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . .
RUN pip install --no-deps --no-build-isolation --editable . && python -m compileall -q oarlock oarlock/*/ \
    && python -m oarlock.workers.kernels.cpu.prebuild

FROM build AS build-cuda
# On Linux the wheels bring their own CUDA and NCCL libraries; the driver comes from the host.
ARG TORCH_INDEX
RUN --mount=type=cache,target=/root/.cache/pip \
    grep '^torch==' requirements.txt > torch.txt \
    && if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" -r torch.txt; \
       else pip install --require-hashes -r requirements.lock -r requirements-cuda.lock; fi \
    && rm torch.txt \
    && pip install --require-hashes -r requirements.lock
COPY . .
RUN pip install --no-deps --no-build-isolation --editable . && python -m compileall -q oarlock oarlock/*/

# ---------------------------------------------------------------- what both images run on
FROM ${PYTHON_IMAGE} AS runtime
RUN useradd --uid 10001 --create-home --home-dir /home/oarlock oarlock \
    && mkdir -p /cache/huggingface /cache/oarlock && chown -R oarlock:oarlock /cache
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    OARLOCK_HOST=0.0.0.0
WORKDIR /opt/oarlock
USER oarlock
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# /health answers 200 only when the model is loaded and every rank has made progress lately. The image has no curl.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["oarlock"]
CMD ["serve"]

# ---------------------------------------------------------------- the two images
FROM runtime AS cuda
# Triton compiles what launches its kernels, on the machine that runs them: with a C compiler and Python's headers, which
# the base image has. What it compiles stays in the volume.
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && echo '#include <Python.h>' | gcc -fsyntax-only -x c "-I$(python -c 'import sysconfig as s; print(s.get_paths()["include"])')" -
USER oarlock
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/cache/oarlock/triton CC=gcc
COPY --from=build-cuda /opt/venv /opt/venv
COPY --from=build-cuda /opt/oarlock /opt/oarlock

# The last stage is what a plain `docker build` makes: it runs anywhere.
FROM runtime AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
COPY --from=build-cpu /opt/oarlock /opt/oarlock
