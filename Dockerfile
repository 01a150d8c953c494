# The command line with calibrate, on CPUs:
#
#   docker build -t ddpsim .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" ddpsim run scenario.yaml
#
# To measure a GPU cluster, build on NVIDIA's PyTorch image and keep its torch and NCCL. Its torch
# is a build of its own, which pip would replace: install the rest by name, and ddpsim alone.
#
#   FROM nvcr.io/nvidia/pytorch:YY.MM-py3
#   COPY . /src
#   RUN pip install simpy numpy pydantic ruamel.yaml "typer<0.30" rich plotly jinja2 scipy \
#    && pip install --no-deps /src

FROM python:3.12 AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch \
 && pip install --no-cache-dir "$(echo /wheels/ddpsim-*.whl)[calibrate]" \
 && useradd --create-home ddpsim
USER ddpsim
WORKDIR /work
ENTRYPOINT ["ddpsim"]
