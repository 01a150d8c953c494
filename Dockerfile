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
#   RUN pip install simpy numpy pydantic ruamel.yaml "typer<0.30" rich jinja2 scipy \
#    && pip install --no-deps /src

FROM python:3.12@sha256:dd4fe98ab39f91e936f8e7e7a65a3ce59ecfb11e32f9a125b3132779920ba7f7 AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch \
 && pip install --no-cache-dir "$(echo /wheels/ddpsim-*.whl)[calibrate]" \
 && useradd --create-home ddpsim
USER ddpsim
WORKDIR /work
ENTRYPOINT ["ddpsim"]
