"""Tables of failures: each operation of an adapter with each class of errors of its service.

An entry says which error the caller gets, and how often the request was sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from remuda.domain.errors import RemudaError
from remuda.http import ClientResponse

#: A response, or a failure of the connection that is raised.
Outcome = ClientResponse | Exception
#: Outcomes by operation.
Scripted = Mapping[str, Sequence[Outcome]]


class ScriptedServer(Protocol):
    """Answers each operation with its outcomes in turn; the last one is repeated."""

    def sends_of(self, operation: str) -> int:
        """How often the same request of this operation was sent at most."""
        ...


S = TypeVar("S", bound=ScriptedServer)


class Expected(NamedTuple):
    #: The exact class of the error. None: the operation copes with it.
    error: type[RemudaError] | None
    #: How often the same request was sent.
    sends: int


class Failing(NamedTuple):
    """One operation of an adapter, and the request in it that fails."""

    name: str
    operation: str
    call: Callable[[Any], Awaitable[Any]]
    #: Outcomes of the other requests.
    before: Scripted = MappingProxyType({})
    #: Deviations from what is expected for all operations of the service; None: the service does not answer so.
    but: Mapping[str, Expected | None] = MappingProxyType({})

    def __str__(self) -> str:
        return f"{self.name}-{self.operation}"


async def deviations(
    make_server: Callable[[Scripted], S],
    failing: Failing,
    outcomes: Mapping[str, Outcome],
    expected: Mapping[str, Expected],
    use: Callable[[S, Failing], Awaitable[None]],
) -> dict[str, tuple[Expected, Expected]]:
    """What was found and what was expected, by the class of error. Empty if all is as the tables say."""
    assert set(failing.but) <= set(expected), "a deviation from nothing"
    found: dict[str, tuple[Expected, Expected]] = {}
    for kind, outcome in outcomes.items():
        wanted = failing.but.get(kind, expected[kind])
        if wanted is None:
            continue
        server = make_server({**failing.before, failing.operation: [outcome]})
        error: type[RemudaError] | None = None
        try:
            await use(server, failing)
        except RemudaError as raised:
            error = type(raised)
        if (was := Expected(error, server.sends_of(failing.operation))) != wanted:
            found[kind] = (was, wanted)
    return found
