# syntax=docker/dockerfile:1
# Two images from one recipe:
#
#   docker build --target cpu  -t oarlock:cpu .
#   docker build --target cuda -t oarlock:cuda .
#
# TORCH_INDEX names the package index that torch comes from, and nothing else. PyTorch publishes one for each kind of
# machine: https://download.pytorch.org/whl/cpu, .../whl/cu126, .../whl/cu128 and so on. The CPU image takes the first
# unless told otherwise, because the wheel of the general index carries CUDA along, several gigabytes; the CUDA image
# takes the general index's. Another CUDA version, or a mirror: --build-arg TORCH_INDEX=...; empty: the general index.
#
# Both hold a virtual environment and the checkout, run as an unprivileged user and write nothing outside /cache and
# /tmp, so that the root file system may be mounted read-only.

ARG PYTHON_IMAGE=python:3.13-slim-bookworm

# ---------------------------------------------------------------- what both builds start from
FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/oarlock
COPY requirements.txt ./

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    grep '^torch==' requirements.txt > torch.txt \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r torch.txt \
    && rm torch.txt \
    && pip install -r requirements.txt
# The kernels are compiled here, for every level of instruction set: the image itself holds no compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . .
RUN pip install --no-deps --no-build-isolation --editable . && python -m compileall -q server engine workers oarlock.py \
    && python -m workers.kernels.cpu.prebuild

FROM build AS build-cuda
# On Linux the wheels bring their own CUDA and NCCL libraries; the driver comes from the host.
ARG TORCH_INDEX
RUN --mount=type=cache,target=/root/.cache/pip \
    grep '^torch==' requirements.txt > torch.txt \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r torch.txt \
    && rm torch.txt \
    && pip install -r requirements.txt
COPY . .
RUN pip install --no-deps --no-build-isolation --editable . && python -m compileall -q server engine workers oarlock.py

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
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/venv /opt/venv
COPY --from=build-cuda /opt/oarlock /opt/oarlock

# The last stage is what a plain `docker build` makes: it runs anywhere.
FROM runtime AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
COPY --from=build-cpu /opt/oarlock /opt/oarlock
