# The locked versions on CUDA. With the driver and the NVIDIA Container Toolkit on the host (docs/guides/install.md):
#   docker build --tag sft-play .
#   docker run --rm --gpus all --shm-size 8g --volume "$PWD:/runs" sft-play plan --model qwen3-8b
# "devel" has nvcc, with which DeepSpeed compiles its optimizer on first use.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/sft-play
COPY . .
RUN make install V=1
ENV PATH=/opt/sft-play/.venv/bin:$PATH HF_HOME=/runs/.cache/huggingface
WORKDIR /runs
ENTRYPOINT ["sft-play"]
