# syntax=docker/dockerfile:1
# The image for every node of a job, whatever its GPUs: one torch, one CUDA, one NCCL. See docs/docker.md.
#
#   docker build --tag megatron-hexi:0.1.0 .

# The image that megatron-core 0.19.0 itself is tested on (docker/.ngc_version.dev at its tag core_v0.19.0):
# Python 3.12, torch 2.13, CUDA 13.3, Transformer Engine, with code for A100 and H100. By digest, because a tag
# may be moved. Another base: --build-arg BASE=…
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3@sha256:43c018d6a12963f1a1bad85ef8574b5c2a978eec2be0ebcacfb87f69e0d210e1

FROM ${BASE} AS wheel
WORKDIR /source
COPY setup.py pyproject.toml MANIFEST.in README.md LICENSE ./
COPY patches patches
COPY megatron_hexi megatron_hexi
# The base's own constraints are for what it holds, not for what builds a wheel.
RUN PIP_CONSTRAINT='' python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
LABEL org.opencontainers.image.title="megatron-hexi" \
      org.opencontainers.image.description="Long-context training on mixed GPU clusters, as a plugin for Megatron-LM" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="nvcr.io/nvidia/pytorch:26.06-py3"

COPY docker/constraints.txt /etc/megatron-hexi/constraints.txt
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# What the base built for its GPUs must stay: pip fails where a requirement would replace it.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python -m pip list --format=freeze \
    | grep --ignore-case --extended-regexp '^(apex|flash|nvidia|pytorch|torch|transformer.engine|triton)' \
      >/etc/megatron-hexi/base.txt \
    && PIP_CONSTRAINT='' python -m pip install --no-cache-dir \
      --constraint /etc/megatron-hexi/base.txt --constraint /etc/megatron-hexi/constraints.txt \
      "$(echo /wheels/*.whl)[plan,train,pictures,convert]" \
    && hexi --version

RUN useradd --create-home --no-log-init --uid 10001 --shell /bin/bash hexi
USER 10001
WORKDIR /home/hexi

# Docker knows 0 and 1 only. Alone, because a check must not wait for the ranks of a job.
HEALTHCHECK --interval=10m --timeout=3m --start-period=2m --retries=2 \
    CMD ["bash", "-c", "hexi doctor --local || exit 1"]
CMD ["hexi", "doctor"]
