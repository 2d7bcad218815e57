# Builds two images: the node plugin and the operator (targets `nodeplugin` and `operator`). They
# contain Python, the libraries that it loads and packages: no shell, package manager or compiler.
#
# `make image-context` writes the build context. It contains all packages as wheels, with the hashes
# of requirements/, and pip. The build downloads only the base image, of which Python 3.13 and
# libraries are copied. Another base is Debian with Python 3.13: --build-arg BASE=...

ARG BASE=python:3.13.15-slim-trixie@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b


FROM ${BASE} AS python
# The working directory must not shadow modules.
ENV PYTHONSAFEPATH=1
# Some builders do not include bind mounts in the cache key. A digest in an argument does.
ARG ROOT=""
RUN --mount=type=bind,source=root.py,target=/build/root.py \
    : "${ROOT}" \
    && python3 -m venv --without-pip /opt/drakit && python3 /build/root.py python /files


FROM python AS nodeplugin-packages
ARG DEPENDENCIES=""
RUN --mount=type=bind,source=pip,target=/build/pip \
    --mount=type=bind,source=nodeplugin,target=/build/wheels \
    --mount=type=bind,source=root.py,target=/build/root.py \
    : "${DEPENDENCIES}" \
    && /opt/drakit/bin/python3 /build/pip/pip.whl/pip install --quiet --no-cache-dir --no-compile \
        --no-index --find-links=/build/wheels --require-hashes --root=/packages \
        --requirement=/build/wheels/requirements.txt \
    && python3 /build/root.py packages /packages


FROM python AS operator-packages
ARG DEPENDENCIES=""
RUN --mount=type=bind,source=pip,target=/build/pip \
    --mount=type=bind,source=operator,target=/build/wheels \
    --mount=type=bind,source=root.py,target=/build/root.py \
    : "${DEPENDENCIES}" \
    && /opt/drakit/bin/python3 /build/pip/pip.whl/pip install --quiet --no-cache-dir --no-compile \
        --no-index --find-links=/build/wheels --require-hashes --root=/packages \
        --requirement=/build/wheels/requirements.txt \
    && python3 /build/root.py packages /packages


FROM python AS drakit
ARG DRAKIT=""
RUN --mount=type=bind,source=pip,target=/build/pip \
    --mount=type=bind,source=drakit,target=/build/wheels \
    --mount=type=bind,source=root.py,target=/build/root.py \
    : "${DRAKIT}" \
    && /opt/drakit/bin/python3 /build/pip/pip.whl/pip install --quiet --no-cache-dir --no-compile \
        --no-index --no-deps --root=/packages /build/wheels/drakit-*.whl \
    && python3 /build/root.py packages /packages


FROM scratch AS runtime
COPY --from=python /files/ /
# For `kubectl exec ... -- drakit node checkpoint show`. Logs must not be buffered.
ENV PATH=/opt/drakit/bin PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1


FROM runtime AS nodeplugin
COPY --from=nodeplugin-packages /packages/ /
COPY --from=drakit /packages/ /
# The node plugin runs as root, because root owns the kubelet's directories and sockets. The chart
# drops all capabilities.
ENTRYPOINT ["/opt/drakit/bin/drakit-nodeplugin"]


FROM runtime AS operator
COPY --from=operator-packages /packages/ /
# Kubernetes' CEL compiler and allocator of several minor releases: one program, which has a name for
# each. DRAKIT_CEL is the one for all other releases.
COPY cel/ /opt/drakit/bin/
COPY --from=drakit /packages/ /
ENV DRAKIT_CEL=/opt/drakit/bin/drakit-cel-1.37
# Kopf reads the user's name.
ENV USER=nonroot
USER 65532:65532
ENTRYPOINT ["/opt/drakit/bin/drakit-operator"]
