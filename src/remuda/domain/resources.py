"""Resource classes, usage classes, type patterns and pool messages, and whether a message matches a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from remuda.domain.errors import UserError
from remuda.domain.holder import set_of_subject
from remuda.domain.text import quote, suggest

MAX_PATTERN_TEXT = 1_000
MAX_PATTERN = 64
MAX_CLASSES = 50
#: Maximum characters of a rejected value in an error message.
MAX_SHOWN = 80
MAX_CPU = 1_024
MAX_MEMORY_MIB = 32 * 1024 * 1024
MAX_GPU = 64
#: Maximum vCPUs of the instances of a class, unless the class sets another or needs more: those of a 16xlarge.
DEFAULT_MAX_CPU = 64

_CLASS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_PATTERN = re.compile(r"[A-Za-z0-9.*-]+")
_INSTANCE_TYPE = re.compile(r"[A-Za-z0-9.-]{1,64}")
IMAGE_ID = re.compile(r"ami-[0-9a-f]{8,17}")
#: An image id, or a parameter of Systems Manager that contains one.
IMAGE = re.compile(rf"{IMAGE_ID.pattern}|resolve:ssm:[A-Za-z0-9_./:-]{{1,500}}")
#: Letters and generation of an instance family, then its options.
_FAMILY = re.compile(r"[a-z]+[0-9]+(?P<options>[a-z]*)")
_INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
_RUN_ADDRESS = re.compile(r"/actions/runs/([0-9]{1,19})\b")
_ADDRESS = re.compile(r"(?:https?://|git@)[^/:]+[/:](.+?)(?:\.git)?/?")
_SHORT_INSTANCE_ID = re.compile(r"i-[0-9a-f]{0,7}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCOPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}(/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100})?")

#: Labels that GitHub adds to runners by default. As a run id they would attract jobs of other workflows.
_GENERIC_LABELS = frozenset({"self-hosted", "linux", "windows", "macos", "x64", "arm", "arm64"})
#: Between the run id and the class in a label. Neither can contain it.
_LABEL_SEPARATOR = "/"


def labels_of_run(run_id: str, resource_class: str) -> tuple[str, ...]:
    """Return the labels of a run's runners: `123` and `123/large`. No job can ask for them without the run id.

    With the class as a label of its own, a job of any run with `runs-on: large` would match. Why GitHub and the runner
    accept the separator: docs/adr/0040-default-labels.md.
    """
    return run_id, f"{run_id}{_LABEL_SEPARATOR}{resource_class}"


def is_class_name(text: str) -> bool:
    return bool(_CLASS_NAME.fullmatch(text)) and text.lower() not in _GENERIC_LABELS


def split_label(label: str) -> tuple[str, str]:
    """Return the run id and the class of a label; the class is empty if the label has none."""
    run_id, _, resource_class = label.partition(_LABEL_SEPARATOR)
    return run_id, resource_class


class UsageClass(StrEnum):
    ON_DEMAND = "on-demand"
    SPOT = "spot"


class Tier(StrEnum):
    """Trust in the code of a run. An instance's tier may fall, never rise."""

    TRUSTED = "trusted"
    UNTRUSTED = "untrusted"


class Reuse(StrEnum):
    """Reuse policy: which instances a run may claim."""

    #: Instances of at least the run's tier.
    ALWAYS = "always"
    #: Instances of the run's tier that served only the run's repository.
    SAME_REPO = "same-repo"
    #: Instances of the run's tier.
    SAME_TRUST = "same-trust"
    #: None: each instance serves one run.
    NEVER = "never"

    def tiers(self, tier: Tier) -> tuple[Tier, ...]:
        """Return the tiers of instances that a run of `tier` may claim: never a lower one."""
        if self is Reuse.NEVER:
            return ()
        if self is Reuse.ALWAYS and tier is Tier.UNTRUSTED:
            return (Tier.TRUSTED, Tier.UNTRUSTED)
        return (tier,)


class Architecture(StrEnum):
    """Processor architecture, in the words of EC2."""

    X86_64 = "x86_64"
    ARM64 = "arm64"


@dataclass(frozen=True, slots=True)
class TypePatterns:
    """Patterns of instance types, literal except for `*`: `c* m6i.large`. A type must match one of them."""

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, *, field: str = "allowed-instance-types") -> TypePatterns:
        fix = "give patterns such as 'c* m6i.large', literal except for *"
        if len(text) > MAX_PATTERN_TEXT:
            raise UserError(
                f"{field} is {len(text)} characters long, more than {MAX_PATTERN_TEXT}", field=field, fix=fix
            )
        words = tuple(dict.fromkeys(text.replace(",", " ").split()))
        if not words:
            raise UserError(f"{field} is empty", field=field, fix=fix)
        for word in words:
            if len(word) > MAX_PATTERN or not _PATTERN.fullmatch(word):
                raise UserError(f"{field}: {word[:MAX_PATTERN]!r} is not a type pattern", field=field, fix=fix)
        return cls(words)

    def matches(self, instance_type: str) -> bool:
        return any(_matches(word, instance_type) for word in self.words)

    @property
    def match_all(self) -> bool:
        return any(set(word) == {"*"} for word in self.words)

    @property
    def architecture(self) -> Architecture | None:
        """The architecture of all matching types; None if they may have different ones."""
        found = {_architecture(word) for word in self.words}
        return found.pop() if len(found) == 1 else None

    def narrowed(self, other: TypePatterns) -> TypePatterns:
        """Return patterns of types that match both; without words if there are none."""
        if self.match_all or other.match_all:
            return other if self.match_all else self
        both = (_common(mine, its) for mine in self.words for its in other.words)
        return TypePatterns(tuple(dict.fromkeys(word for word in both if word)))

    def __str__(self) -> str:
        return " ".join(self.words)


def split_type(pattern: str) -> tuple[str, str]:
    """Return the patterns of family and size: `c*` means the family `c*` in all sizes."""
    family, dot, size = pattern.partition(".")
    if dot:
        return family, size
    head, star, tail = pattern.partition("*")
    return head + star, star + tail


def _architecture(pattern: str) -> Architecture | None:
    """The architecture of the types of one pattern, by their names; None if the pattern does not tell.

    Families of Graviton processors have the option `g` after their generation: `c7g`, `im4gn`, but not `g5` ("Amazon
    EC2 instance type naming conventions" in EC2 Instance Types). Only `a1` is older than this rule.
    """
    family = split_type(pattern)[0]
    found = _FAMILY.match(family)
    if found is None or family.startswith("mac"):
        return None
    if "g" in found["options"] or family == "a1":
        return Architecture.ARM64
    return None if "*" in family else Architecture.X86_64


def _common(one: str, other: str) -> str:
    """Return a pattern of the types that match both patterns, or an empty text if no type does.

    Exact for patterns with one `*` in the family and in the size; for others it may miss types.
    """
    parts = [_common_part(*pair) for pair in zip(split_type(one), split_type(other), strict=True)]
    return ".".join(parts) if all(parts) else ""


def _common_part(one: str, other: str) -> str:
    if "*" not in one or "*" not in other:
        literal, pattern = (one, other) if "*" not in one else (other, one)
        return literal if _matches(pattern, literal) else ""
    (head, _, rest), (other_head, _, other_rest) = one.partition("*"), other.partition("*")
    heads, tails = sorted((head, other_head), key=len), sorted((rest, other_rest), key=len)
    if not heads[1].startswith(heads[0]) or not tails[1].endswith(tails[0]):
        return ""
    return f"{heads[1]}*{tails[1]}"


ANY_TYPE = TypePatterns(("*",))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceClass:
    name: str
    #: Minimum vCPUs.
    cpu: int
    #: Minimum memory.
    memory_mib: int
    #: Maximum vCPUs; 0: `DEFAULT_MAX_CPU`.
    max_cpu: int = 0
    #: Minimum GPUs.
    gpu: int = 0
    types: TypePatterns = ANY_TYPE
    #: Image of the class's instances; empty: the pool's.
    ami: str = ""
    #: Architecture that the image must have; None: any.
    architecture: Architecture | None = None

    @property
    def largest_cpu(self) -> int:
        """Maximum vCPUs of a launched instance."""
        return self.max_cpu or max(self.cpu, DEFAULT_MAX_CPU)

    def describe(self) -> dict[str, Any]:
        """Return the class as users write it, without what is left to its default."""
        written = {
            "cpu": self.cpu,
            "mmem": self.memory_mib,
            "max-cpu": self.max_cpu,
            "gpu": self.gpu,
            "instance-types": "" if self.types.match_all else str(self.types),
            "ami": self.ami,
            "architecture": self.architecture.value if self.architecture else "",
        }
        return {name: value for name, value in written.items() if value}


def check_image_architecture(wanted: ResourceClass, image: str, architecture: str, *, field: str) -> None:
    """Reject an image whose architecture is not that of its class and of the class's instance types.

    EC2 considers only types with the architecture of the image, so such a class could never launch an instance.
    Example: `{"architecture": "arm64"}` with an image for x86_64, or `{"instance-types": "c7g.*"}` with the same image.
    """
    if wanted.architecture and architecture != wanted.architecture:
        raise UserError(
            f"class {wanted.name!r} is for {wanted.architecture}, and its image {image} is for {architecture}",
            field=field,
            fix=f"give the class an ami for {wanted.architecture}, or set its architecture to {architecture}",
        )
    of_types = wanted.types.architecture
    if of_types and architecture != of_types:
        raise UserError(
            f"the instance types {wanted.types} of class {wanted.name!r} are for {of_types}, "
            f"and its image {image} is for {architecture}",
            field=field,
            fix=f"give the class an ami for {of_types}, or instance-types for {architecture}",
        )


DEFAULT_CLASSES: tuple[ResourceClass, ...] = tuple(
    ResourceClass(name=name, cpu=cpu, memory_mib=memory_mib)
    for name, cpu, memory_mib in (
        ("large", 2, 4_096),
        ("xlarge", 4, 8_192),
        ("2xlarge", 8, 16_384),
        ("4xlarge", 16, 32_768),
        ("8xlarge", 32, 65_536),
        ("12xlarge", 48, 98_304),
        ("16xlarge", 64, 131_072),
    )
)


#: Fields of a class as users write them.
CLASS_FIELDS = ("cpu", "mmem", "max-cpu", "gpu", "instance-types", "ami", "architecture")


def parse_classes(document: Any, *, field: str = "resource-class-config") -> tuple[ResourceClass, ...]:
    """Parse custom classes: `{"large": {"cpu": 2, "mmem": 4096}, …}`. They replace the defaults."""
    fix = 'give an object such as {"large": {"cpu": 2, "mmem": 4096}}'
    if not isinstance(document, Mapping) or not document:
        raise UserError(f"{field} must be a non-empty object of classes", field=field, fix=fix)
    if len(document) > MAX_CLASSES:
        raise UserError(f"{field} has {len(document)} classes, more than {MAX_CLASSES}", field=field, fix=fix)
    classes = []
    for name, body in document.items():
        if not isinstance(name, str) or not is_class_name(name):
            raise UserError(
                f"{field}: {quote(name, MAX_SHOWN)} is not a valid class name",
                field=field,
                fix="use up to 40 letters, digits, - and _, and not a default runner label",
            )
        if not isinstance(body, Mapping):
            raise UserError(f"{field}: class {name!r} must be an object", field=field, fix=fix)
        classes.append(_parse_class(name, body, field))
    return tuple(classes)


def _parse_class(name: str, body: Mapping[str, Any], field: str) -> ResourceClass:
    for key in body:
        if key not in CLASS_FIELDS:
            raise UserError(
                f"{field}: class {name!r} has an unknown field {quote(key, MAX_SHOWN)}",
                field=field,
                fix=suggest(str(key), CLASS_FIELDS),
            )
    given = {key: value for key, value in body.items() if value is not None}

    def number(key: str, most: int, *, least: int = 1) -> int:
        if key not in given:
            fix = f"give an integer from {least} to {most}"
            raise UserError(f"{field}: class {name!r} has no {key}", field=field, fix=fix)
        return _integer(given.get(key), f"{field}: {key} of {name!r}", most, field, least=least)

    def optional(key: str, most: int, *, least: int = 1) -> int:
        return number(key, most, least=least) if key in given else 0

    cpu = number("cpu", MAX_CPU)
    types, ami, architecture = (given.get(key) for key in ("instance-types", "ami", "architecture"))
    if ami is not None and (not isinstance(ami, str) or not IMAGE.fullmatch(ami)):
        raise UserError(
            f"{field}: ami of {name!r} is {quote(ami, MAX_SHOWN)}",
            field=field,
            fix="give an image such as ami-0123456789abcdef0, or resolve:ssm:NAME",
        )
    if architecture is not None and architecture not in list(Architecture):
        raise UserError(
            f"{field}: architecture of {name!r} is {quote(architecture, MAX_SHOWN)}",
            field=field,
            fix=f"give {' or '.join(Architecture)}",
        )
    if types is not None and not isinstance(types, str):
        raise UserError(
            f"{field}: instance-types of {name!r} is {quote(types, MAX_SHOWN)}",
            field=field,
            fix="give patterns such as 'c7g.* m7g.large' in one text",
        )
    return ResourceClass(
        name=name,
        cpu=cpu,
        memory_mib=number("mmem", MAX_MEMORY_MIB),
        max_cpu=optional("max-cpu", MAX_CPU, least=cpu),
        gpu=optional("gpu", MAX_GPU, least=0),
        types=ANY_TYPE if types is None else TypePatterns.parse(types, field=f"{field}: instance-types of {name!r}"),
        ami=ami or "",
        architecture=Architecture(architecture) if architecture is not None else None,
    )


def _integer(value: Any, what: str, most: int, field: str, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        fix = f"give an integer from {least} to {most}"
        raise UserError(f"{what} is {quote(value, MAX_SHOWN)}", field=field, fix=fix)
    return value


def _matches(pattern: str, text: str) -> bool:
    """Match greedily in linear time: no pattern can make it slow."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == text
    *middle, last = rest
    if not text.startswith(first) or len(text) < len(first) + len(last) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolMessage:
    """Message that an instance was idle at an epoch. It may be stale: only the record proves it."""

    id: str
    epoch: int
    resource_class: str
    instance_type: str
    usage_class: UsageClass
    cpu: int
    #: The message carries it as `mmem`.
    memory_mib: int = field(metadata={"key": "mmem"})
    tier: Tier = Tier.TRUSTED
    #: See `Instance.repository`.
    repository: str = ""

    def __post_init__(self) -> None:
        if not is_instance_id(self.id):
            raise ValueError("its id is not an instance id")
        if self.epoch < 1:
            raise ValueError("its epoch is below 1")
        if not _CLASS_NAME.fullmatch(self.resource_class):
            raise ValueError("its class is not a valid class name")
        if not _INSTANCE_TYPE.fullmatch(self.instance_type):
            raise ValueError("its instance type is not a valid type name")
        if self.repository and not is_repository(self.repository):
            raise ValueError("its repository is not of the form owner/name")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerRequest:
    """Requirements of a run for each of its instances."""

    resource_class: ResourceClass
    usage_class: UsageClass
    patterns: TypePatterns
    tier: Tier
    reuse: Reuse = Reuse.SAME_TRUST
    #: The run's repository in lower case, or empty if unknown.
    repository: str = ""


def mismatch(message: PoolMessage, request: RunnerRequest) -> str | None:
    """Return why a message does not match a request, for people. None if it matches."""
    wanted = request.resource_class
    if message.resource_class != wanted.name:
        return f"class {message.resource_class}, not {wanted.name}"
    if message.usage_class is not request.usage_class:
        return f"{message.usage_class}, not {request.usage_class}"
    if not request.patterns.matches(message.instance_type):
        return f"type {message.instance_type} is not among {request.patterns}"
    if message.cpu < wanted.cpu:
        return f"{message.cpu} cpu, {wanted.cpu} wanted"
    if message.memory_mib < wanted.memory_mib:
        return f"{message.memory_mib} MiB, {wanted.memory_mib} wanted"
    if message.tier not in request.reuse.tiers(request.tier):
        return f"tier {message.tier}, not {request.tier}"
    if request.reuse is Reuse.SAME_REPO and message.repository != request.repository:
        return f"served {message.repository or 'more than one repository'}, not {request.repository} alone"
    return None


def is_instance_id(text: str) -> bool:
    """Whether the text is an instance id, or a part of one that is long enough to name an instance."""
    return _INSTANCE_ID.fullmatch(text) is not None


def check_instance_id(text: str, *, field: str) -> str:
    if is_instance_id(text):
        return text
    if is_short_instance_id(text):
        given = len(text.removeprefix("i-"))
        problem, fix = f"{text!r}, with {given} digits", "give at least the first 8 digits after i-"
    else:
        problem, fix = f"{quote(text, MAX_SHOWN)}, not an instance id such as i-0123456789abcdef0", ""
    listed = "run remuda status --wide, which lists the ids"
    raise UserError(f"{field} is {problem}", field=field, fix=f"{fix}: {listed}" if fix else listed)


def is_short_instance_id(text: str) -> bool:
    """Whether the text is the beginning of an instance id that is too short to name one instance safely."""
    return _SHORT_INSTANCE_ID.fullmatch(text) is not None


def check_run_id(text: str, *, field: str = "run-id") -> str:
    """Check a run id. It becomes a label, so it must be one word that attracts no jobs of other workflows."""
    if in_address := _RUN_ADDRESS.search(text):
        raise UserError(f"{field} is {text[:80]!r}, an address", field=field, fix=f"give the run id: {in_address[1]}")
    if not _RUN_ID.fullmatch(text):
        raise UserError(
            f"{field} is {text[:80]!r}",
            field=field,
            fix="give the workflow's run id (github.run_id): up to 64 letters, digits, '.', '_' or '-'",
        )
    if set_of_subject(text) is not None:
        raise UserError(
            f"{field} is {text[:80]!r}, which stands for a runner set",
            field=field,
            fix="give the workflow's run id (github.run_id)",
        )
    if text.lower() in _GENERIC_LABELS:
        raise UserError(
            f"{field} is {text!r}, a default label of self-hosted runners",
            field=field,
            fix="give the workflow's run id (github.run_id)",
        )
    return text


def check_scope(text: str, *, field: str = "github-scope") -> str:
    in_address = _ADDRESS.fullmatch(text)
    if in_address and _SCOPE.fullmatch(in_address[1]):
        raise UserError(
            f"{field} is {text[:80]!r}, an address", field=field, fix=f"give the name alone: {in_address[1]}"
        )
    if not _SCOPE.fullmatch(text):
        raise UserError(
            f"{field} is {text[:80]!r}",
            field=field,
            fix="give an organisation ('owner') or a repository ('owner/repo')",
        )
    return text


def is_repository(text: str) -> bool:
    return "/" in text and _SCOPE.fullmatch(text) is not None


def check_repository(text: str, *, field: str = "repository") -> str:
    if not is_repository(text):
        raise UserError(f"{field} is {text[:80]!r}", field=field, fix="give the run's repository as owner/name")
    return text


def normalize_repository(repository: str) -> str:
    """Return the name in lower case, as records store it: GitHub ignores case."""
    return repository.lower()


def repository_of(scope: str, repository: str, *, field: str = "repository") -> str:
    """Return the repository of a run whose runners register in `scope`, or empty if unknown.

    Runners of an organisation serve only its own repositories.
    """
    owner, _, name = scope.partition("/")
    if name:
        return scope
    if repository and repository.partition("/")[0].lower() != owner.lower():
        raise UserError(
            f"{field} is {repository!r}, which is not a repository of {scope}",
            field=field,
            fix=f"give a repository of {scope}, or change the scope",
        )
    return repository
