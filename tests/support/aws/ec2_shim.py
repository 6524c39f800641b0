"""The EC2 test server: moto behind a layer that adds attribute-based fleets, client tokens, capacity, faults and lag.

Like EC2, it rejects a fleet with two subnets of one zone or over four InstanceRequirements structures, a root volume
that is smaller than the image, and IOPS or a throughput that are too high for the volume, and it ignores types that
cost over 20 % more than the cheapest one, unless the request lifts price protection. A mapping for another device than
the root device of the image is an error here; EC2 would attach a second volume. Launches with an unknown image (unless
a parameter names it), key pair, instance profile or security group, or with a security group of another VPC, fail like
on EC2. An unknown KMS key ends the instances after the launch: "Amazon Web Services authenticates the KMS key
asynchronously" (CreateVolume), with the reason of CiscoDevNet/cloud-cml#8. So does an unknown default key, which EC2
takes for encrypted volumes without a key, with that of aws/karpenter-provider-aws#1407.

Runs in the interpreter of moto's own virtualenv, with host and region as arguments, prints its port, and exits at the
end of its standard input.
POST /_shim takes a JSON object of:
  capacity       {"subnet-1" | "c6i.large" | "spot" | "subnet-1 c6i.large": number of instances that it still provides}
  refused        {"spot" | "on-demand": [code, message]}: launches of this usage class fail with this error in `Errors`
  faults         [{"action", "code", "status", "message", "times"}]: error responses instead of the action
  lost           [{"action", "times"}]: the action is executed, but its response never arrives
  lag            number of DescribeInstances calls that hide instances launched from now on; DescribeTags hides them as
                 long
  shown          number of instances of each launch that DescribeInstances shows at first; each further call shows one
                 more
  default_key    ARN of the account's default key of EBS; empty for the one that AWS manages
  early_end      [code, message, seconds]: instances launched from now on end after these seconds, for this reason
  honour_tokens  false: ignore client tokens
  has_iam        false: instance profiles are on another server, and are not checked
POST /_shim/reset discards these settings and all instances. GET /_shim returns the number of requests per action
(`requests`), the fields of the last one (`last`), and the number of requests that may have changed instances
(`changes`). With ?changes=N it waits for another number than N, at most a second.
"""

from __future__ import annotations

import base64
import fnmatch
import importlib
import io
import json
import os
import re
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Answer = tuple[str, bytes]

XML = [("Content-Type", "text/xml")]
NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
#: Instance type, vCPU, MiB, USD per hour, architecture, GPUs; cheapest first.
CATALOGUE = (
    *(
        (f"{family}.{size}", cpu, cpu * gib * 1024, cpu * price, architecture, 0)
        for size, cpu in (("large", 2), ("xlarge", 4), ("2xlarge", 8))
        for family, gib, price, architecture in (
            ("c7g", 2, 0.0363, "arm64"),
            ("c6i", 2, 0.0425, "x86_64"),
            ("m6i", 4, 0.048, "x86_64"),
            ("r6i", 8, 0.063, "x86_64"),
        )
    ),
    ("m4.large", 2, 8 * 1024, 0.1, "x86_64", 0),
    ("g5.xlarge", 4, 16 * 1024, 1.006, "x86_64", 1),
    ("m6i.24xlarge", 96, 384 * 1024, 4.608, "x86_64", 0),
    ("g5.12xlarge", 48, 192 * 1024, 5.672, "x86_64", 4),
)
#: Instance families of the catalogue that are not among those "currently recommended for use" (API reference of
#: InstanceRequirementsRequest). Requests without InstanceGenerations get them, too.
PREVIOUS_FAMILIES = {"m4"}
#: The answer of GetEbsDefaultKmsKeyId for the key that AWS manages (example of the AWS CLI reference).
AWS_KEY = "alias/aws/ebs"
#: Maximum number of InstanceRequirements structures in a request (the words are those of osbuild/osbuild-composer, pull
#: request 3946).
MAX_REQUIREMENTS = 4
#: EC2's default of OnDemandMaxPricePercentageOverLowestPrice.
PRICE_PROTECTION = 20
#: Resources that can be tagged by each action (API references of CreateFleet and RunInstances).
TAGGABLE = {
    "CreateFleet": {"fleet", "instance", "volume"},
    "RunInstances": {"elastic-gpu", "instance", "network-interface", "spot-instances-request", "volume"},
}
_TAGGED = re.compile(r"TagSpecification\.\d+\.ResourceType")
_TAG_KEY = re.compile(r"(?:LaunchTemplateData\.)?(?:TagSpecification\.\d+\.)?Tag\.\d+\.Key")
#: Calls whose MaxResults is at least 5: by botocore's models, and for the first two by the API reference.
PAGED = {
    *("DescribeInstances", "DescribeTags", "DescribeInstanceTypes", "DescribeRouteTables", "DescribeSecurityGroups"),
    *("DescribeSubnets", "DescribeVpcs"),
}
MIN_RESULTS = 5
#: API reference of RunInstances: "Maximum 64 ASCII characters".
MAX_TOKEN = 64
#: In bytes, before the encoding (github-aws-runners/terraform-aws-github-runner#3700).
MAX_USER_DATA = 16_384
#: Keys of tags in instance metadata (aws/karpenter-provider-aws#1527).
_METADATA_KEY = re.compile(r"[0-9a-zA-Z\-_+=,.@:]{1,255}")
_RESERVED_KEYS = {".", "..", "_index"}
_TEMPLATE_DATA = "LaunchTemplateData."
#: Prefix of an image that a Systems Manager parameter names.
_RESOLVED = "resolve:"
#: Reservations per page of DescribeInstances. EC2 may return fewer than requested; a small page tests the paging.
PAGE = 2
#: Seconds that GET /_shim waits for a change.
WAIT_S = 1.0
_OVERRIDE = re.compile(r"LaunchTemplateConfigs\.1\.Overrides\.(\d+)\.(.+)")
_ALLOWED = re.compile(r"InstanceRequirements\.AllowedInstanceType\.\d+")


class Ec2Shim:
    def __init__(
        self,
        app: Callable[[Environ, StartResponse], Iterable[bytes]],
        reset: Callable[[], None],
        known: Callable[[str], set[str]],
        fail: Callable[[list[str], str, str], None],
    ) -> None:
        """`known` returns the instance `profiles` or KMS `keys` of the server. `fail` ends instances with a reason."""
        self._known = known
        self._fail = fail
        self._app = app
        self._reset = reset
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._changes = 0
        self._discard()

    def _discard(self) -> None:
        self.capacity: dict[str, int] = {}
        self.refused: dict[str, tuple[str, str]] = {}
        self.faults: list[dict[str, Any]] = []
        self.lost: list[dict[str, Any]] = []
        self.lag = 0
        self.shown: int | None = None
        self.default_key = ""
        self.early_end: tuple[str, str, float] | None = None
        self.honour_tokens = True
        self.has_iam = True
        self._hidden: set[str] = set()
        self._tokens: dict[str, tuple[list[tuple[str, str]], Answer]] = {}
        self._requests: Counter[str] = Counter()
        #: The fields of the last request per action.
        self._last: dict[str, dict[str, str]] = {}
        #: The fields of the newest version per launch template. Moto does not keep all of them.
        self._templates: dict[str, dict[str, str]] = {}
        #: Instances with tags in their metadata.
        self._tags_in_metadata: set[str] = set()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ["PATH_INFO"].startswith("/_shim"):
            return self._control(environ, body, start_response)
        form = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
        action = dict(form).get("Action", "")
        if not action:
            return self._pass(environ, body, start_response)
        with self._lock:
            status, answer = self._answer(environ, form, action)
            response_lost = self._take(self.lost, action)
            if not action.startswith("Describe"):
                self._note_change()
        if response_lost:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start_response(status, [*XML, ("Content-Length", str(len(answer)))])
        return [answer]

    def _control(self, environ: Environ, body: bytes, start_response: StartResponse) -> Iterable[bytes]:
        with self._lock:
            if environ["PATH_INFO"] == "/_shim/reset":
                self._discard()
                self._reset()
                self._note_change()
            elif environ["REQUEST_METHOD"] == "POST":
                for name, value in json.loads(body).items():
                    if name not in {
                        "capacity",
                        "refused",
                        "faults",
                        "lost",
                        "lag",
                        "shown",
                        "default_key",
                        "early_end",
                        "honour_tokens",
                        "has_iam",
                    }:
                        raise ValueError(name)
                    setattr(self, name, value)
            elif known := dict(parse_qsl(environ["QUERY_STRING"])).get("changes"):
                self._changed.wait_for(lambda: str(self._changes) != known, WAIT_S)
            seen = {"requests": self._requests, "last": self._last, "changes": self._changes}
            answer = json.dumps(seen).encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(answer)))])
        return [answer]

    def _note_change(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _answer(self, environ: Environ, form: list[tuple[str, str]], action: str) -> Answer:
        self._requests[action] += 1
        self._last[action] = dict(form)
        fault = self._take(self.faults, action)
        if fault is not None:
            status = f"{fault.get('status', 400)} FAULT"
            return status, _error(fault["code"], fault.get("message", "an injected fault"))
        if rejection := self._rejection(environ, form, action):
            return "400 BAD", rejection
        if action in {"CreateLaunchTemplate", "CreateLaunchTemplateVersion"}:
            name, source = dict(form).get("LaunchTemplateName", ""), dict(form).get("SourceVersion")
            base = self._templates.get(name, {}) if source else {}
            self._templates[name] = {**base, **_below(_TEMPLATE_DATA, dict(form))}
        if action == "CreateFleet" and dict(form).get("DryRun") == "true":
            return "412 DRY", _error("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")
        if action == "CreateFleet":
            return self._create_fleet(environ, form)
        if action == "RunInstances" and dict(form).get("DryRun") != "true":
            return self._run_instances(environ, form)
        if action == "GetEbsDefaultKmsKeyId":
            key = self.default_key or AWS_KEY
            return (
                "200 OK",
                f'<{action}Response xmlns="{NAMESPACE}"><kmsKeyId>{key}</kmsKeyId></{action}Response>'.encode(),
            )
        if action == "DescribeInstances":
            form = [(key, str(min(PAGE, int(value))) if key == "MaxResults" else value) for key, value in form]
        status, answer = self._call_moto(environ, form)
        if action in {"DescribeInstances", "DescribeTags"} and self._hidden:
            answer = _without(answer, self._hidden)
        if action == "DescribeInstances" and self._hidden:
            self.lag -= 1
            if self.shown is not None:
                self._hidden.remove(min(self._hidden))
            elif self.lag <= 0:
                self._hidden.clear()
        return status, answer

    def _rejection(self, environ: Environ, form: list[tuple[str, str]], action: str) -> bytes:
        """The error for a request that EC2 does not carry out, or nothing."""
        for key, kind in form:
            if _TAGGED.fullmatch(key) and kind not in TAGGABLE.get(action, {kind}):
                return _error(
                    "InvalidParameterValue", f"'{kind}' is not a valid taggable resource type for this operation."
                )
        if invalid := _invalid_request(action, form) or self._invalid_tags(action, form):
            return _error(*invalid)
        return self._invalid_fleet(environ, dict(form)) if action == "CreateFleet" else b""

    def _take(self, injected: list[dict[str, Any]], action: str) -> dict[str, Any] | None:
        for fault in injected:
            if fault["action"] == action:
                fault["times"] = fault.get("times", 1) - 1
                if fault["times"] <= 0:
                    injected.remove(fault)
                return fault
        return None

    # Fleets

    def _invalid_fleet(self, environ: Environ, values: dict[str, str]) -> bytes:
        """The error for two overrides with the same instance pool (type and zone), or too many of them, or nothing."""
        if len([key for key in values if key.endswith(".InstanceRequirements.VCpuCount.Min")]) > MAX_REQUIREMENTS:
            most = f"the maximum allowed number of InstanceRequirements ({MAX_REQUIREMENTS})"
            return _error("InvalidParameterValue", f"Your request contains more than {most}")
        zones = self._pairs(environ, "DescribeSubnets", {}, "subnetId", "availabilityZone")
        pools = [(zones.get(subnet, subnet), kind) for subnet, kind in self._choices(environ, values)]
        if len(set(pools)) == len(pools):
            return b""
        return _error("InvalidFleetConfig", "The fleet configuration contains duplicate instance pools.")

    def _invalid_volume(self, environ: Environ, values: dict[str, str]) -> tuple[str, str] | None:
        """The error for a mapping that is not the root device, or smaller than the snapshot of the image, or None."""
        data = self._template(environ, values)
        device, size = _found("deviceName", data), _found("volumeSize", data)
        if not device or not size:
            return None
        image = self._image(environ, values)
        root = _found("rootDeviceName", image)
        if device != root:
            return "InvalidBlockDeviceMapping", f"{device} is mapped, but the root device of the image is {root}"
        sizes = dict(re.findall(r"<deviceName>(.*?)</deviceName>.*?<volumeSize>(.*?)</", image.decode(), re.DOTALL))
        needed = int(sizes.get(device, 0))
        if int(size) >= needed:
            return None
        message = f"Volume of size {size}GB is smaller than snapshot 'snap-1', expect size >= {needed}GB"
        return "InvalidBlockDeviceMapping", message

    def _pairs(self, environ: Environ, action: str, parameters: dict[str, str], key: str, value: str) -> dict[str, str]:
        """Two fields of each item that a Describe call returns."""
        _, answer = self._call_moto(environ, [("Action", action), *parameters.items()])
        text = answer.decode()
        keys, found = (re.findall(rf"<{name}>(.*?)</{name}>", text) for name in (key, value))
        return dict(zip(keys, found, strict=False))

    def _create_fleet(self, environ: Environ, form: list[tuple[str, str]]) -> Answer:
        values = dict(form)
        token = values.get("ClientToken", "")
        if token and self.honour_tokens and token in self._tokens:
            earlier, answer = self._tokens[token]
            if earlier == form:
                return answer
            return "400 BAD", _error("IdempotentParameterMismatch", "The client token was used with other parameters.")
        made, refused = self._launch(environ, form)
        if made and (self.lag > 0 or self.shown is not None):
            self._hidden |= set(sorted(name for names in made.values() for name in names)[self.shown :])
        answer = ("200 OK", _fleet(made, refused, _usage(values)))
        self._tokens[token] = (form, answer)
        return answer

    def _launch(
        self, environ: Environ, form: list[tuple[str, str]]
    ) -> tuple[dict[tuple[str, str], list[str]], list[tuple[str, str, str, str]]]:
        values = dict(form)
        wanted = int(values["TargetCapacitySpecification.TotalTargetCapacity"])
        made: dict[tuple[str, str], list[str]] = {}
        refused: list[tuple[str, str, str, str]] = []
        pairs = self._choices(environ, values)
        if not pairs:
            refused.append(("", "", "InvalidFleetConfiguration", "No instance type matches the requirements."))
        data = self._templates.get(_template_name(values), {})
        image = values.get("LaunchTemplateConfigs.1.Overrides.1.ImageId") or data.get("ImageId", "")
        invalid = self._invalid_volume(environ, values) or _high_ratio(_below("BlockDeviceMapping.1.Ebs.", data))
        invalid = invalid or self._invalid_data(environ, {**data, "ImageId": image}, _instance_tags(values))
        if _usage(values) in self.refused:
            return {}, [(*pair, *self.refused[_usage(values)]) for pair in pairs]
        if invalid is not None:
            return {}, [("", "", *invalid)]
        for subnet, kind in pairs:
            missing = wanted - sum(map(len, made.values()))
            if missing == 0:
                break
            count = self._room(subnet, kind, _usage(values), missing)
            if foreign := self._foreign_group(environ, data, subnet):
                refused.append((subnet, kind, *foreign))
                continue
            if count:
                status, answer = self._call_moto(environ, _single(form, subnet, kind, count))
                if not status.startswith("200"):
                    refused.append((subnet, kind, *_error_of(answer)))
                    continue
                made[subnet, kind] = re.findall(r"<item>(i-[0-9a-f]+)</item>", answer.decode())
                self._note_launch(data, made[subnet, kind])
            if count < missing:
                message = f"We do not have sufficient {kind} capacity in the subnet you requested."
                refused.append((subnet, kind, "InsufficientInstanceCapacity", message))
        return made, refused

    def _run_instances(self, environ: Environ, form: list[tuple[str, str]]) -> Answer:
        values = dict(form)
        data = {**self._templates.get(values.get("LaunchTemplate.LaunchTemplateName", ""), {}), **values}
        invalid = self._invalid_data(environ, data, _instance_tags(values))
        if invalid := invalid or self._foreign_group(environ, data, data.get("SubnetId", "")):
            return "400 BAD", _error(*invalid)
        status, answer = self._call_moto(environ, form)
        if status.startswith("200"):
            self._note_launch(data, re.findall(r"<instanceId>(i-[0-9a-f]+)</instanceId>", answer.decode()))
        return status, answer

    def _invalid_data(self, environ: Environ, data: dict[str, str], tags: list[str]) -> tuple[str, str] | None:
        """The error for launch data that names something unknown, or None. `data` are fields of RunInstances."""
        image, key = data.get("ImageId", ""), data.get("KeyName", "")
        profile = data.get("IamInstanceProfile.Name") or data.get("IamInstanceProfile.Arn", "").rpartition("/")[2]
        # Both codes and their words: "Error codes for the Amazon EC2 API".
        if image and not image.startswith(_RESOLVED) and not self._exists(environ, "Images", "image-id", image):
            return "InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist"
        if key and not self._exists(environ, "KeyPairs", "key-name", key):
            return "InvalidKeyPair.NotFound", f"The key pair '{key}' does not exist"
        if profile and self.has_iam and profile not in self._known("profiles"):
            # aws/karpenter-provider-aws#3051
            message = f"Value ({profile}) for parameter iamInstanceProfile.name is invalid."
            return "InvalidParameterValue", f"{message} Invalid IAM Instance Profile name"
        if data.get("MetadataOptions.InstanceMetadataTags") != "enabled":
            return None
        return next(filter(None, map(_invalid_metadata_key, (*tags, *_instance_tags(data)))), None)

    def _foreign_group(self, environ: Environ, data: dict[str, str], subnet: str) -> tuple[str, str] | None:
        """The error for a security group that is unknown or not in the VPC of the subnet, or None."""
        wanted = [value for name, value in data.items() if re.fullmatch(r"SecurityGroupId\.\d+", name)]
        vpcs = self._pairs(environ, "DescribeSubnets", {}, "subnetId", "vpcId")
        for group in wanted:
            form = [("Filter.1.Name", "group-id"), ("Filter.1.Value.1", group)]
            vpc = _found("vpcId", self._describe(environ, "DescribeSecurityGroups", form))
            if not vpc:
                return "InvalidGroup.NotFound", f"The security group '{group}' does not exist"
            if subnet and vpc != vpcs.get(subnet):
                # ansible/ansible-modules-core#347
                message = f"Security group {group} and subnet {subnet} belong to different networks."
                return "InvalidParameter", message
        return None

    def _exists(self, environ: Environ, kind: str, filter_name: str, value: str) -> bool:
        form = [("Filter.1.Name", filter_name), ("Filter.1.Value.1", value)]
        return f">{value}<" in self._describe(environ, f"Describe{kind}", form).decode()

    def _note_launch(self, data: dict[str, str], names: list[str]) -> None:
        if data.get("MetadataOptions.InstanceMetadataTags") == "enabled":
            self._tags_in_metadata |= set(names)
        key = data.get("BlockDeviceMapping.1.Ebs.KmsKeyId", "")
        is_encrypted = data.get("BlockDeviceMapping.1.Ebs.Encrypted") == "true"
        if key and key not in self._known("keys"):
            self._fail(names, "Client.InvalidKMSKey.InvalidState", "The KMS key provided is in an incorrect state")
        elif not key and is_encrypted and self.default_key and self.default_key not in self._known("keys"):
            self._fail(names, "Client.InternalError", "Client error on launch")
        elif self.early_end is not None:
            code, message, seconds = self.early_end
            threading.Timer(seconds, self._fail, (names, code, message)).start()

    def _invalid_tags(self, action: str, form: list[tuple[str, str]]) -> tuple[str, str] | None:
        """The error for tags that instances with tags in their metadata cannot have, or None."""
        named = {value for name, value in form if name.startswith("ResourceId.")}
        if action != "CreateTags" or named.isdisjoint(self._tags_in_metadata):
            return None
        keys = [value for name, value in form if _TAG_KEY.fullmatch(name)]
        return next(filter(None, map(_invalid_metadata_key, keys)), None)

    def _choices(self, environ: Environ, values: dict[str, str]) -> list[tuple[str, str]]:
        return _choices(values, _found("architecture", self._image(environ, values)))

    def _image(self, environ: Environ, values: dict[str, str]) -> bytes:
        """The image: that of the first override, or else that of the launch template."""
        name = values.get("LaunchTemplateConfigs.1.Overrides.1.ImageId", "")
        form = [
            ("Filter.1.Name", "image-id"),
            ("Filter.1.Value.1", name or _found("imageId", self._template(environ, values))),
        ]
        return self._describe(environ, "DescribeImages", form)

    def _template(self, environ: Environ, values: dict[str, str]) -> bytes:
        """The default version of the launch template."""
        form = [("LaunchTemplateName", _template_name(values)), ("LaunchTemplateVersion.1", "$Default")]
        return self._describe(environ, "DescribeLaunchTemplateVersions", form)

    def _describe(self, environ: Environ, action: str, form: list[tuple[str, str]]) -> bytes:
        return self._call_moto(environ, [("Action", action), ("Version", "2016-11-15"), *form])[1]

    def _room(self, subnet: str, kind: str, usage: str, most: int) -> int:
        keys = [key for key in (subnet, kind, usage, f"{subnet} {kind}") if key in self.capacity]
        room = min((most, *(self.capacity[key] for key in keys)))
        for key in keys:
            self.capacity[key] -= room
        return room

    # The inner server

    def _call_moto(self, environ: Environ, form: list[tuple[str, str]]) -> Answer:
        body = urlencode(form).encode()
        inner = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        statuses: list[str] = []
        chunks = self._app(inner, lambda status, _headers, _problem=None: statuses.append(status))
        answer = b"".join(chunks)
        return statuses[0], answer

    def _pass(self, environ: Environ, body: bytes, start_response: StartResponse) -> Iterable[bytes]:
        return self._app({**environ, "wsgi.input": io.BytesIO(body)}, start_response)


def _invalid_request(action: str, form: list[tuple[str, str]]) -> tuple[str, str] | None:
    """The error for fields that EC2 rejects whatever exists, or None."""
    values = dict(form)
    least = values.get("MaxResults", "")
    if action in PAGED and least and int(least) < MIN_RESULTS:
        # aws/aws-sdk-ruby#2575
        message = (
            f"Value ( {least} ) for parameter maxResults is invalid. Expecting a value greater than {MIN_RESULTS}."
        )
        return "InvalidParameterValue", message
    if action == "DescribeInstances" and least and "InstanceId.1" in values:
        # aws/karpenter-provider-aws#8642
        return "InvalidParameterCombination", "The parameter instancesSet cannot be used with the parameter maxResults"
    for name, key in form:
        if _TAG_KEY.fullmatch(name) and key.lower().startswith("aws:"):
            # jcjorel/ec2-spot-converter#13
            return "InvalidParameterValue", "Tag keys starting with 'aws:' are reserved for internal use"
    token = values.get("ClientToken", "")
    if len(token) > MAX_TOKEN or not token.isascii():
        return "InvalidClientToken", "The specified client token is not valid."
    if action == "CreateFleet" and int(values.get("TargetCapacitySpecification.TotalTargetCapacity", "1")) < 1:
        # The code is EC2's (hashicorp/terraform-provider-aws, ec2_fleet.go); its words for a capacity of 0 are unknown.
        return "InvalidTargetCapacitySpecification", "TotalTargetCapacity must be at least 1"
    for name, code in (
        ("UserData", "InvalidParameterValue"),
        (f"{_TEMPLATE_DATA}UserData", "InvalidUserData.Malformed"),
    ):
        if len(base64.b64decode(values.get(name, ""))) > MAX_USER_DATA:
            return code, f"User data is limited to {MAX_USER_DATA} bytes"
    return None


def _invalid_metadata_key(key: str) -> tuple[str, str] | None:
    if _METADATA_KEY.fullmatch(key) and key not in _RESERVED_KEYS:
        return None
    message = (
        f"'{key}' is not a valid tag key. Tag keys must match pattern ([0-9a-zA-Z\\-_+=,.@:]{{1,255}}), and must not "
        "be a reserved name ('.', '..', '_index')"
    )
    return "InvalidParameterValue", message


def _instance_tags(values: dict[str, str]) -> list[str]:
    """The keys of the tags of instances in a request or in launch data."""
    numbers = [name.split(".")[1] for name, value in values.items() if _TAGGED.fullmatch(name) and value == "instance"]
    return [
        value
        for name, value in values.items()
        if _TAG_KEY.fullmatch(name) and name.split(".")[1] in numbers and name.startswith("TagSpecification.")
    ]


def _below(prefix: str, values: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _template_name(values: dict[str, str]) -> str:
    return values["LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName"]


def _high_ratio(volume: dict[str, str]) -> tuple[str, str] | None:
    """The error for a volume with too many IOPS for its size or too much throughput for its IOPS, or None.

    The texts are those of EC2: rocicorp/mono#4410, runs-on/runs-on#260. The IOPS of 3,000 are gp3's baseline.
    """
    kind, gib = volume.get("VolumeType", ""), int(volume.get("VolumeSize", "0"))
    iops, throughput = int(volume.get("Iops", "3000")), int(volume.get("Throughput", "0"))
    most = {"gp3": 500, "io1": 50, "io2": 1000}.get(kind, 0)
    if gib and most and iops > most * gib and not (kind == "gp3" and iops == 3000):
        message = f"Iops to volume size ratio of {iops / gib:.6f} is too high; maximum is {most}"
        return "InvalidParameterValue", message
    if throughput > iops / 4:
        message = f"Throughput (MiBps) to iops ratio of {throughput / iops:.6f} is too high; maximum is 0.250000"
        return "InvalidParameterValue", f"{message} MiBps per iops"
    return None


def _usage(values: dict[str, str]) -> str:
    return values.get("TargetCapacitySpecification.DefaultTargetCapacityType", "on-demand")


def _found(tag: str, answer: bytes) -> str:
    match = re.search(f"<{tag}>(.*?)</{tag}>", answer.decode())
    return match[1] if match else ""


def _choices(values: dict[str, str], architecture: str) -> list[tuple[str, str]]:
    """Pairs of subnet and instance type that match the image and an override, cheapest type first."""
    overrides: dict[int, dict[str, str]] = {}
    for key, value in values.items():
        found = _OVERRIDE.fullmatch(key)
        if found:
            overrides.setdefault(int(found[1]), {})[found[2]] = value
    kinds = {number: _kinds(each, _usage(values), architecture) for number, each in sorted(overrides.items())}
    return [
        (overrides[number]["SubnetId"], kind)
        for kind, *_ in CATALOGUE
        for number, known in kinds.items()
        if kind in known
    ]


def _kinds(override: dict[str, str], usage: str, architecture: str) -> set[str]:
    """The instance types that an override selects. Price protection of spot instances is not modelled."""
    needs = {key.removeprefix("InstanceRequirements."): value for key, value in override.items()}
    generations = {value for key, value in needs.items() if key.startswith("InstanceGeneration")}
    fitting = {
        kind: price
        for kind, cpu, mmem, price, its_architecture, gpus in CATALOGUE
        if int(needs["VCpuCount.Min"]) <= cpu <= int(needs.get("VCpuCount.Max", cpu))
        and mmem >= int(needs["MemoryMiB.Min"])
        and int(needs.get("AcceleratorCount.Min", 0)) <= gpus <= int(needs.get("AcceleratorCount.Max", gpus))
        and _generation(kind) in (generations or {"current", "previous"})
        and architecture in {its_architecture, ""}
    }
    if usage == "on-demand" and fitting:
        percentage = int(needs.get("OnDemandMaxPricePercentageOverLowestPrice", PRICE_PROTECTION))
        most = min(fitting.values()) * (1 + percentage / 100)
        fitting = {kind: price for kind, price in fitting.items() if price <= most}
    allowed = [value for key, value in override.items() if _ALLOWED.fullmatch(key)]
    return {kind for kind in fitting if not allowed or any(fnmatch.fnmatchcase(kind, each) for each in allowed)}


def _generation(kind: str) -> str:
    return "previous" if kind.partition(".")[0] in PREVIOUS_FAMILIES else "current"


def _single(form: list[tuple[str, str]], subnet: str, kind: str, count: int) -> list[tuple[str, str]]:
    total = "TargetCapacitySpecification.TotalTargetCapacity"
    kept = [(key, value) for key, value in form if not _OVERRIDE.fullmatch(key) and key != total]
    override = "LaunchTemplateConfigs.1.Overrides.1"
    return [*kept, (total, str(count)), (f"{override}.SubnetId", subnet), (f"{override}.InstanceType", kind)]


def _fleet(made: dict[tuple[str, str], list[str]], refused: list[tuple[str, str, str, str]], usage: str) -> bytes:
    def place(subnet: str, kind: str) -> str:
        inner = "".join(
            f"<{tag}>{value}</{tag}>" for tag, value in (("subnetId", subnet), ("instanceType", kind)) if value
        )
        return f"<launchTemplateAndOverrides><overrides>{inner}</overrides></launchTemplateAndOverrides>"

    groups = "".join(
        f"<item>{place(subnet, kind)}<lifecycle>{usage}</lifecycle><instanceType>{kind}</instanceType>"
        f"<instanceIds>{''.join(f'<item>{name}</item>' for name in names)}</instanceIds></item>"
        for (subnet, kind), names in made.items()
    )
    errors = "".join(
        f"<item>{place(subnet, kind)}<lifecycle>{usage}</lifecycle><errorCode>{code}</errorCode>"
        f"<errorMessage>{escape(message)}</errorMessage></item>"
        for subnet, kind, code, message in refused
    )
    return (
        f'<CreateFleetResponse xmlns="{NAMESPACE}"><fleetId>fleet-1</fleetId><errorSet>{errors}</errorSet>'
        f"<fleetInstanceSet>{groups}</fleetInstanceSet></CreateFleetResponse>"
    ).encode()


def _error(code: str, message: str) -> bytes:
    return (
        f"<Response><Errors><Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error></Errors>"
        "<RequestID>1</RequestID></Response>"
    ).encode()


def _error_of(answer: bytes) -> tuple[str, str]:
    code = re.search(r"<Code>(.*?)</Code>", answer.decode(), re.DOTALL)
    message = re.search(r"<Message>(.*?)</Message>", answer.decode(), re.DOTALL)
    return (code[1] if code else "InternalError"), (message[1].strip() if message else "")


def _without(answer: bytes, names: set[str]) -> bytes:
    """A response of DescribeInstances or DescribeTags without these instances."""
    root = ET.fromstring(answer)  # noqa: S314 - from our own server
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    for listed, name in (("instancesSet", "instanceId"), ("tagSet", "resourceId")):
        for items in root.iter(f"{space}{listed}"):
            for item in list(items):
                if item.findtext(f"{space}{name}") in names:
                    items.remove(item)
    ET.register_namespace("", space.strip("{}"))
    return ET.tostring(root)


# The process ----------------------------------------------------------------------------------------------------------


def main() -> None:
    # Imported here: moto is installed in the server's virtualenv only, and tests import constants of this module.
    _import_moto_fast(sys.argv[2])
    from moto.ec2.models import ec2_backends  # noqa: PLC0415
    from moto.ec2.models.instances import StateReason  # noqa: PLC0415
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415
    from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: PLC0415

    class QuietHandler(WSGIRequestHandler):  # type: ignore[misc]  # its types are in the other virtualenv
        def log(self, *_line: object) -> None:
            """Write no access log."""

    def reset() -> None:
        """Reset EC2 only: moto's own reset would load every service first."""
        for account in ec2_backends.values():
            for backend in list(account.values()):
                backend.reset()

    def fail(names: list[str], code: str, message: str) -> None:
        for account in ec2_backends.values():
            for backend in account.values():
                found = [each for each in backend.all_instances() if each.id in names]
                for instance in found:
                    instance.terminate()
                    instance.state_reason = StateReason(message, code)

    app = Ec2Shim(DomainDispatcherApplication(create_backend_app), reset, _known, fail)
    server = make_server(sys.argv[1], 0, app, threaded=True, request_handler=QuietHandler)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    print(server.server_port, flush=True)  # noqa: T201 - read by `Ec2Server`
    server.serve_forever()


def _known(kind: str) -> set[str]:
    """Names of instance profiles or ARNs of keys. A service that nobody has called is not loaded, and has none."""
    module, attribute = {"profiles": ("moto.iam.models", "iam_backends"), "keys": ("moto.kms.models", "kms_backends")}[
        kind
    ]
    backends = getattr(sys.modules.get(module), attribute, {})
    return {
        found.name if kind == "profiles" else found.arn
        for account in backends.values()
        for backend in account.values()
        for found in (backend.instance_profiles if kind == "profiles" else backend.keys).values()
    }


def _import_moto_fast(region: str) -> None:
    """Import moto's EC2 with one reading of botocore's endpoints instead of three, and the offerings of one region."""
    boto3: Any = importlib.import_module("boto3")
    utils: Any = importlib.import_module("moto.utilities.utils")
    load, real = utils.load_resource, boto3.Session
    boto3.Session = cache(real)
    utils.load_resource = lambda path: [] if "/instance_type_offerings/" in path and region not in path else load(path)
    importlib.import_module("moto.ec2.models")
    boto3.Session, utils.load_resource = real, load


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
