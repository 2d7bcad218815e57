# Two images from one file: the node plugin and the operator (targets `nodeplugin`, `operator`).
#
# The build needs no network: all that is installed lies in the build context, which
# `python -m e2e.images context DIR` makes (wheels by the hashes of requirements/, our own wheel, and pip
# to install them). So any base with Python 3.13 will do: a public one, or one made on the spot. To pin
# a public one, build with its digest: --build-arg BASE=python:3.13-slim@sha256:...

ARG BASE=python:3.13-slim


FROM ${BASE} AS python
# A folder of the working directory must never shadow a module; logs must not wait in a buffer.
ENV PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
RUN python3 -m venv --without-pip /opt/drakit
# For people: `kubectl exec … -- drakit node checkpoint show`. Behind what the base has, so that
# `python3` stays the one that the next lines mean.
ENV PATH="${PATH}:/opt/drakit/bin"


FROM python AS nodeplugin
# Some builders do not look into mounts: a digest given here lets them notice new wheels.
ARG DEPENDENCIES=""
# Compiled here because the containers' root is read-only (compiling at each start costs more than
# a second), and "unchecked" because the files' times do not survive every builder. Not compiled are
# the client's many models: drakit uses none of them.
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
# It stays root: the kubelet's directories and sockets are root's. The chart drops all capabilities.
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
# Kubernetes' own CEL compiler as a program: it evaluates the selectors of claims and classes.
ARG CEL=""
RUN --mount=type=bind,source=cel,target=/build/cel \
    : "${CEL}" && install -m 0755 /build/cel/drakit-cel /opt/drakit/bin/drakit-cel
ENV DRAKIT_CEL=/opt/drakit/bin/drakit-cel
# Kopf asks for the user's name, and no passwd file knows this user.
ENV USER=drakit
USER 65532:65532
ENTRYPOINT ["/opt/drakit/bin/drakit-operator"]
