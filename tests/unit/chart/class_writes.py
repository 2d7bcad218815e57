"""
Writes of DeviceClasses that the operator's admission policy must allow or refuse.

A unit test evaluates the policy for them, and a test on a cluster sends them to the API server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drakit_explain.model import PolicyFacts
from drakit_operator.policies.status import DRIVER, desired_class

Object = dict[str, Any]
Edit = Callable[[Object], object]

PREFIX = "class.test/lab-"
"""The prefix of extended resources that the chart's values must allow."""

NOT_CONTROLLED = "the operator may change only the DeviceClasses that a HostDevicePolicy controls"
OWNERS = "the operator may give a DeviceClass no owner but its HostDevicePolicy, and no finalizer"
OWNER_NAME = "the owner of the DeviceClass has a name that no HostDevicePolicy can have"
SELECTOR = "the only selector of a DeviceClass of HostDevicePolicy"
OTHER_FIELDS = (
    "the operator may set only the selector and the extended resource of a DeviceClass; all other "
    "fields of its spec, such as config, must stay as they are"
)
EXTENDED = (
    "does not begin with a prefix in the chart's value hostdev.extendedResourcePrefixes; add its "
    "prefix to the value, or choose another name"
)


def _nothing(body: Object) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """A write of the operator: edits of the class that it has of a policy."""

    name: str
    old: Edit | None = None
    """The class before the write; None for a new class."""

    new: Edit | None = _nothing
    """The class that is written; None to delete the old one."""

    sentence: str = ""
    """The reason why it is refused. Empty if it is allowed."""

    def bodies(
        self, name: str, *, policy: str, uid: str, namespace_uid: str = "default"
    ) -> tuple[Object | None, Object | None]:
        """
        Return the class before and after the write.

        :param uid: of the policy. The garbage collector deletes a class whose owner does not exist.
        :param namespace_uid: of the namespace `default`, which is another owner.
        """
        facts = PolicyFacts(name=policy, uid=uid, generation=1, class_name=name)
        made = desired_class(facts, api_version="resource.k8s.io/v1")
        assert made is not None
        # An operator that runs during the test would delete the class as one of the policy.
        del made["metadata"]["labels"]

        def edited(edit: Edit | None) -> Object | None:
            if edit is None:
                return None
            body = copy.deepcopy(made)
            edit(body)
            for owner in body["metadata"].get("ownerReferences", []):
                if owner["kind"] == "Namespace":
                    owner["uid"] = namespace_uid
            return body

        return edited(self.old), edited(self.new)


def _owner(**fields: Any) -> Edit:
    """Change fields of the owner; None removes a field."""

    def edit(body: Object) -> None:
        (owner,) = body["metadata"]["ownerReferences"]
        owner |= fields
        for key in [key for key, value in owner.items() if value is None]:
            del owner[key]

    return edit


def _second_owner(body: Object) -> None:
    other = {"apiVersion": "v1", "kind": "Namespace", "name": "default"}
    body["metadata"]["ownerReferences"].append(other)


def _spec(**fields: Any) -> Edit:
    return lambda body: body["spec"].update(fields)


def _cel(*expressions: str) -> Edit:
    return _spec(selectors=[{"cel": {"expression": each}} for each in expressions])


def _of_policy(name: str) -> str:
    attributes = f'device.attributes["{DRIVER}"]'
    return (
        f'device.driver == "{DRIVER}" && "policy" in {attributes} && '
        f'{attributes}.policy == "{name}"'
    )


def _both(*edits: Edit) -> Edit:
    return lambda body: [edit(body) for edit in edits]


def _widened(body: Object) -> None:
    (selector,) = body["spec"]["selectors"]
    selector["cel"]["expression"] += " || true"


def _second_selector(body: Object) -> None:
    body["spec"]["selectors"].append({"cel": {"expression": "true"}})


def _config(value: int) -> Edit:
    parameters = {"driver": DRIVER, "parameters": {"value": value}}
    return _spec(config=[{"opaque": parameters}])


_foreign: Edit = _both(lambda body: body["metadata"].pop("ownerReferences"), _cel("true"))
_finalizer: Edit = lambda body: body["metadata"].update(finalizers=["class.test/kept"])  # noqa: E731
_continued = 'x" || "" == "'

WRITES = (
    # The writes of the operator.
    Write(name="create"),
    Write(name="create-with-an-extended-resource", new=_spec(extendedResourceName=f"{PREFIX}a")),
    Write(name="restore-the-selector", old=_widened),
    Write(
        name="restore-the-selector-beside-a-config", old=_both(_widened, _config(1)), new=_config(1)
    ),
    Write(
        name="restore-beside-an-owner-of-an-admin",
        old=_both(_widened, _second_owner),
        new=_second_owner,
    ),
    Write(name="restore-beside-a-finalizer", old=_both(_widened, _finalizer), new=_finalizer),
    Write(name="remove-the-extended-resource", old=_spec(extendedResourceName="other.test/a")),
    Write(name="delete", old=_nothing, new=None),
    Write(name="delete-what-an-admin-changed", old=_both(_cel("true"), _config(1)), new=None),
    # The owner.
    Write(name="create-without-an-owner", new=_foreign, sentence=NOT_CONTROLLED),
    Write(name="create-for-another-kind", new=_owner(kind="Node"), sentence=NOT_CONTROLLED),
    Write(
        name="create-for-another-group",
        new=_owner(apiVersion="drakit.dev.evil.test/v1"),
        sentence=NOT_CONTROLLED,
    ),
    Write(name="create-without-a-controller", new=_owner(controller=None), sentence=NOT_CONTROLLED),
    Write(name="create-for-no-controller", new=_owner(controller=False), sentence=NOT_CONTROLLED),
    Write(name="create-with-a-second-owner", new=_second_owner, sentence=OWNERS),
    Write(name="create-with-a-finalizer", new=_finalizer, sentence=OWNERS),
    Write(name="adopt-a-foreign-class", old=_foreign, sentence=NOT_CONTROLLED),
    Write(name="disown-a-class", old=_nothing, new=_foreign, sentence=NOT_CONTROLLED),
    Write(name="delete-a-foreign-class", old=_foreign, new=None, sentence=NOT_CONTROLLED),
    Write(
        name="give-a-class-to-another-policy",
        old=_nothing,
        new=_both(_owner(name="other"), _cel(_of_policy("other"))),
        sentence=OWNERS,
    ),
    Write(name="add-an-owner", old=_nothing, new=_second_owner, sentence=OWNERS),
    Write(name="add-a-finalizer", old=_nothing, new=_finalizer, sentence=OWNERS),
    Write(
        name="create-for-a-name-that-continues-the-selector",
        new=_both(_owner(name=_continued), _cel(_of_policy(_continued))),
        sentence=OWNER_NAME,
    ),
    Write(
        name="create-for-a-name-that-is-too-long",
        new=_both(_owner(name="x" * 254), _cel(_of_policy("x" * 254))),
        sentence=OWNER_NAME,
    ),
    # The spec.
    Write(name="create-without-a-selector", new=_cel(), sentence=SELECTOR),
    Write(
        name="create-without-selectors", new=lambda body: body["spec"].clear(), sentence=SELECTOR
    ),
    Write(name="select-all-devices", new=_cel("true"), sentence=SELECTOR),
    Write(name="select-more-devices", new=_widened, sentence=SELECTOR),
    Write(name="add-a-selector", new=_second_selector, sentence=SELECTOR),
    Write(name="select-another-policy", new=_cel(_of_policy("other")), sentence=SELECTOR),
    Write(name="widen-the-selector", old=_nothing, new=_widened, sentence=SELECTOR),
    Write(name="create-with-a-config", new=_config(1), sentence=OTHER_FIELDS),
    Write(name="add-a-config", old=_nothing, new=_config(1), sentence=OTHER_FIELDS),
    Write(name="change-the-config", old=_config(1), new=_config(2), sentence=OTHER_FIELDS),
    Write(name="remove-the-config", old=_config(1), sentence=OTHER_FIELDS),
    Write(
        name="provide-a-foreign-extended-resource",
        new=_spec(extendedResourceName="class.test/other"),
        sentence=EXTENDED,
    ),
    Write(
        name="change-to-a-foreign-extended-resource",
        old=_nothing,
        new=_spec(extendedResourceName="class.test.evil.test/lab-a"),
        sentence=EXTENDED,
    ),
)
