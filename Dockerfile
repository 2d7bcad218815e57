# Builds two images: the node plugin and the operator (targets `nodeplugin` and `operator`).
#
# `make image-context` writes the build context. It contains all packages as wheels, with the hashes
# of requirements/, and pip. The build downloads only the base image, which needs Python 3.13 and
# glibc. To pin the base image, pass its digest: --build-arg BASE=python:3.13-slim@sha256:...

ARG BASE=python:3.13-slim


FROM ${BASE} AS python
# The working directory must not shadow modules, and logs must not be buffered.
ENV PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
RUN python3 -m venv --without-pip /opt/drakit
# For `kubectl exec ... -- drakit node checkpoint show`. The directory comes last on the PATH, so
# that `python3` is still the base image's interpreter.
ENV PATH="${PATH}:/opt/drakit/bin"


FROM python AS nodeplugin
# Some builders do not include bind mounts in the cache key. A digest in this argument does.
ARG DEPENDENCIES=""
# The modules are compiled here, because the containers' file system is read-only and compilation at
# each start takes more than a second. "unchecked", because some builders change the files' times.
# The client's models are not compiled, because drakit does not use them.
RUN --mount=type=bind,source=pip,target=/build/pip \
    --mount=type=bind,source=nodeplugin,target=/build/wheels \
    : "${DEPENDENCIES}" \
    && /opt/drakit/bin/python3 /build/pip/pip.whl/pip install --quiet --no-cache-dir --no-compile \
        --no-index --find-links=/build/wheels --require-hashes \
        --requirement=/build/wheels/requirements.txt \
    && python3 -m compileall -q --invalidation-mode=unchecked-hash \
        -x 'kubernetes_asyncio/client/(api|models)/' /opt/drakit/lib
ARG DRAKIT=""
RUN --mount=type=bind,source=pip,target=/build/pip \
    --mount=type=bind,source=drakit,target=/build/wheels \
    : "${DRAKIT}" \
    && /opt/drakit/bin/python3 /build/pip/pip.whl/pip install --quiet --no-cache-dir --no-compile \
        --no-index --no-deps /build/wheels/drakit-*.whl \
    && python3 -m compileall -q --invalidation-mode=unchecked-hash \
        /opt/drakit/lib/python3.*/site-packages/drakit*/
# The node plugin runs as root, because root owns the kubelet's directories and sockets. The chart
# drops all capabilities.
ENTRYPOINT ["/opt/drakit/bin/drakit-nodeplugin"]


FROM python AS operator
ARG DEPENDENCIES=""
RUN --mount=type=bind,source=pip,target=/build/pip \
    --mount=type=bind,source=operator,target=/build/wheels \
    : "${DEPENDENCIES}" \
    && /opt/drakit/bin/python3 /build/pip/pip.whl/pip install --quiet --no-cache-dir --no-compile \
        --no-index --find-links=/build/wheels --require-hashes \
        --requirement=/build/wheels/requirements.txt \
    && python3 -m compileall -q --invalidation-mode=unchecked-hash \
        -x 'kubernetes_asyncio/client/(api|models)/' /opt/drakit/lib
ARG DRAKIT=""
RUN --mount=type=bind,source=pip,target=/build/pip \
    --mount=type=bind,source=drakit,target=/build/wheels \
    : "${DRAKIT}" \
    && /opt/drakit/bin/python3 /build/pip/pip.whl/pip install --quiet --no-cache-dir --no-compile \
        --no-index --no-deps /build/wheels/drakit-*.whl \
    && python3 -m compileall -q --invalidation-mode=unchecked-hash \
        /opt/drakit/lib/python3.*/site-packages/drakit*/
# Programs with Kubernetes' CEL compiler and allocator, one for each minor release. DRAKIT_CEL names the
# one for all other releases.
ARG CEL=""
RUN --mount=type=bind,source=cel,target=/build/cel \
    : "${CEL}" && install -m 0755 /build/cel/drakit-cel-* /opt/drakit/bin/
ENV DRAKIT_CEL=/opt/drakit/bin/drakit-cel-1.38
# Kopf reads the user's name, and this user has no entry in the passwd file.
ENV USER=drakit
USER 65532:65532
ENTRYPOINT ["/opt/drakit/bin/drakit-operator"]
