"""The admission webhook in the chart: its certificate, its rules, and what is there without it."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from drakit_formats import crds
from drakit_formats.resource.objects import GROUP, VERSIONS
from drakit_operator.admission import CHECKED, Admission
from drakit_operator.config import Admission as Settings
from drakit_operator.config import read_config
from tests.unit.chart.reading import evaluate, pod_spec, the, written

NAME = "drakit-operator"
SECRET = "drakit-operator-admission"
ISSUED_SECRET = "drakit-operator-admission-tls"
"""Another one, because Helm and cert-manager do not take over objects of each other."""

HOST = "drakit-operator.drakit-system.svc"
OURS = {"certificates": "Secret", "secretName": "our-tls", "caBundle": "PEM"}
ISSUED = {"certificates": "CertManager", "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}


def on(**admission: Any) -> dict[str, Any]:
    return {
        "operator": {"admission": {"enabled": True, **admission}},
        "networkPolicy": {"enabled": True},
    }


def webhooks(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return the(objects, "ValidatingWebhookConfiguration", NAME)["webhooks"]


def test_by_default_there_is_no_webhook(render, tmp_path):
    objects = render({"networkPolicy": {"enabled": True}})
    kinds = {each["kind"] for each in objects}
    assert not kinds & {"ValidatingWebhookConfiguration", "Service", "Secret", "Certificate"}
    text = str(pod_spec(objects, "Deployment", NAME)) + str(the(objects, "NetworkPolicy", NAME))
    assert "admission" not in text
    assert not read_config(written(objects, tmp_path, "operator")).admission.enabled


def test_the_operator_serves_where_the_api_server_asks(render, tmp_path):
    objects = render(on())
    settings = read_config(written(objects, tmp_path, "operator")).admission
    assert (settings.enabled, settings.listen) == (True, ":8443")
    spec = pod_spec(objects, "Deployment", NAME)
    (container,) = spec["containers"]
    assert {"name": "admission", "containerPort": 8443} in container["ports"]
    service = the(objects, "Service", NAME)["spec"]
    (port,) = service["ports"]
    assert (port["port"], port["targetPort"]) == (443, "admission")
    labels = the(objects, "Deployment", NAME)["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "admission"]
    assert mount["mountPath"] == str(Settings().certificates)
    ingress = the(objects, "NetworkPolicy", NAME)["spec"]["ingress"]
    assert {"ports": [{"port": "admission", "protocol": "TCP"}]} in ingress
    for each in webhooks(objects):
        service = each["clientConfig"]["service"]
        assert service == {"name": NAME, "namespace": "drakit-system", "path": "/", "port": 443}


@pytest.mark.parametrize("values", [on(), on(**OURS), on(**ISSUED)], ids=["own", "ours", "issued"])
def test_a_webhook_that_does_not_answer_changes_nothing(render, values):
    for each in webhooks(render(values)):
        assert each["failurePolicy"] == "Ignore"
        assert each["matchPolicy"] == "Equivalent"
        assert each["sideEffects"] == "None"
        assert each["timeoutSeconds"] == 3


def test_the_release_makes_a_certificate_that_the_api_server_accepts(render):
    objects = render(on())
    data = {
        key: base64.b64decode(value)
        for key, value in the(objects, "Secret", SECRET)["data"].items()
    }
    authority, certificate = (
        x509.load_pem_x509_certificate(data[name]) for name in ("ca.crt", "tls.crt")
    )
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.DNSName) == [HOST]
    key = authority.public_key()
    assert isinstance(key, rsa.RSAPublicKey)
    assert certificate.signature_hash_algorithm is not None
    signed = (certificate.signature, certificate.tbs_certificate_bytes, padding.PKCS1v15())
    key.verify(*signed, certificate.signature_hash_algorithm)
    for each in webhooks(objects):
        assert base64.b64decode(each["clientConfig"]["caBundle"]) == data["ca.crt"]


@pytest.mark.parametrize(
    ("values", "secret"),
    [
        pytest.param(on(), SECRET, id="release"),
        pytest.param(on(**ISSUED), ISSUED_SECRET, id="cert-manager"),
        pytest.param(on(**OURS), "our-tls", id="secret"),
    ],
)
def test_pods_get_only_the_certificate_and_start_without_it(render, values, secret):
    (volume,) = [
        each["secret"]
        for each in pod_spec(render(values), "Deployment", NAME)["volumes"]
        if each["name"] == "admission"
    ]
    assert (volume["secretName"], volume["optional"]) == (secret, True)
    assert {each["key"] for each in volume["items"]} == {"tls.crt", "tls.key"}


def test_cert_manager_issues_the_certificate_and_sets_the_authority(render):
    objects = render(on(**ISSUED))
    spec = the(objects, "Certificate", ISSUED_SECRET)["spec"]
    assert (spec["secretName"], spec["dnsNames"]) == (ISSUED_SECRET, [HOST])
    assert spec["issuerRef"] == ISSUED["issuerRef"]
    metadata = the(objects, "ValidatingWebhookConfiguration", NAME)["metadata"]
    injected = metadata["annotations"]["cert-manager.io/inject-ca-from"]
    assert injected == f"drakit-system/{ISSUED_SECRET}"
    assert not [each for each in webhooks(objects) if "caBundle" in each["clientConfig"]]


def test_a_secret_of_others_has_the_given_authority(render):
    objects = render(on(**OURS))
    assert {base64.b64decode(each["clientConfig"]["caBundle"]) for each in webhooks(objects)} == {
        b"PEM"
    }
    assert not [each for each in objects if each["kind"] in ("Secret", "Certificate")]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        pytest.param({"certificates": "CertManager"}, "issuerRef.name is empty", id="no-issuer"),
        pytest.param({"certificates": "Secret"}, "needs secretName", id="no-secret"),
        pytest.param({"certificates": "Secret", "secretName": "a"}, "needs secretName", id="no-ca"),
    ],
)
def test_a_source_without_its_values_is_refused(refusal, values, sentence):
    image = {"image": {"repository": "r.test/d"}}
    assert sentence in refusal(on(**values) | image)


@pytest.mark.parametrize("hostdev", [True, False])
def test_the_operator_answers_about_all_that_the_api_server_asks(render, hostdev):
    values = on() | {"hostdev": {"enabled": hostdev}, "simulated": {"enabled": True}}
    asked = {
        (group, version, resource): tuple(rule["operations"])
        for each in webhooks(render(values))
        for rule in each["rules"]
        for group in rule["apiGroups"]
        for version in rule["apiVersions"]
        for resource in rule["resources"]
    }
    ours = [crds.DRIVERS, *([crds.POLICIES] if hostdev else [])]
    of_dra = {(GROUP, version, name): of for version in VERSIONS for name, of in CHECKED.items()}
    written_by_admins = {(crds.GROUP, crds.VERSION, name): ("CREATE", "UPDATE") for name in ours}
    assert asked == of_dra | written_by_admins
    admission = Admission(
        Settings(),
        connect=None,  # type: ignore[arg-type]
        warn=None,  # type: ignore[arg-type]
        policy_type=Settings if hostdev else None,
        count=lambda _: None,
    )
    answered = {(each.group, each.version, each.plural) for each in admission.resources}
    assert answered == asked.keys()


@pytest.mark.parametrize(
    ("spec", "asks"),
    [
        pytest.param({"devices": {"config": [{}]}}, True, id="claim-with-parameters"),
        pytest.param({"devices": {"requests": []}}, False, id="claim-without"),
        pytest.param({"devices": {}}, False, id="claim-without-requests"),
        pytest.param({}, False, id="empty"),
        pytest.param({"config": [{}]}, True, id="class-with-parameters"),
        pytest.param({"selectors": []}, False, id="class-without"),
    ],
)
def test_the_api_server_asks_only_about_objects_with_parameters(render, spec, asks):
    first, *others = webhooks(render(on()))
    (condition,) = first["matchConditions"]
    assert evaluate(condition["expression"], object={"spec": spec}) is asks
    assert not [each for each in others if "matchConditions" in each]


def test_names_of_webhooks_are_qualified(render):
    for each in webhooks(render(on())):
        assert re.fullmatch(r"[a-z]+\.operator\.drakit\.dev", each["name"])
