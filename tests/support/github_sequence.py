"""Rules about several requests to GitHub: whose credential each has, its pages in turn, and entity tags of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from remuda.adapters.github.responses import decompress
from remuda.http import ClientResponse
from tests.support.github_requests import SentRequest, is_for_messages, is_for_service, operation_of

#: Kinds of credentials by their text.
TokenKinds = dict[str, set[str]]
REGISTRATION, REMOVAL, INSTALLATION, ADMIN, QUEUE = "registration", "removal", "installation", "admin", "queue"
#: Requests whose answers have a credential: its field and its kind (github.com/actions/scaleset).
ISSUED = {
    "POST registration-token": ("token", REGISTRATION),
    "POST remove-token": ("token", REMOVAL),
    "POST access_tokens": ("token", INSTALLATION),
    "POST runner-registration": ("token", ADMIN),
    "POST sessions": ("messageQueueAccessToken", QUEUE),
    "PATCH sessions/1": ("messageQueueAccessToken", QUEUE),
}
#: Requests to the service that have the token of the session, as those for messages (session_client.go).
OF_SESSIONS = frozenset({"POST acquirejobs"})
#: A 304 answer is possible to these.
WITH_ENTITY_TAG = frozenset({"GET runs", "GET runs/1", "GET jobs"})
_ENTITY_TAG = re.compile(r'(W/)?"[^"]+"')


class BrokenSequence(AssertionError):
    """GitHub would refuse the request, or answer something else than was meant."""


class _Page(NamedTuple):
    path: str
    query: frozenset[tuple[str, str]]


class GitHubSequence:
    """The requests of one client, with what GitHub has answered."""

    def __init__(self, kinds: TokenKinds) -> None:
        """`kinds` may be shared with other clients, whose tokens this one uses."""
        self._kinds = kinds
        self._pages: dict[_Page, set[int]] = {}

    def judge(self, request: SentRequest) -> None:
        """Raise `BrokenSequence` with all that is wrong."""
        if problems := [*self._credential_problems(request), *self._page_problems(request), *_tag_problems(request)]:
            raise BrokenSequence(f"{request}: {'; '.join(problems)}")

    def observe(self, request: SentRequest, response: ClientResponse) -> None:
        field, kind = ISSUED.get(operation_of(request), ("", ""))
        if not kind or not response.is_success:
            return
        with suppress(ValueError, AttributeError):
            token = json.loads(decompress(response).body).get(field)
            if isinstance(token, str):
                self._kinds.setdefault(token, set()).add(kind)

    def _credential_problems(self, request: SentRequest) -> Iterator[str]:
        kinds = self._kinds.get(request.credential[1], set())
        name = operation_of(request)
        if is_for_messages(request) or name in OF_SESSIONS:
            wanted = {QUEUE}
        elif is_for_service(request):
            wanted = {ADMIN}
        elif name == "POST runner-registration":
            wanted = {REGISTRATION}
        else:
            # One that was configured, a JSON web token, or that of an installation.
            wanted = {INSTALLATION} if kinds else set()
        if wanted and not wanted & kinds:
            yield f"its credential is {' or '.join(sorted(kinds)) or 'another one'}, not {' or '.join(wanted)}"

    def _page_problems(self, request: SentRequest) -> Iterator[str]:
        if "page" not in request.query:
            return
        number = int(request.query["page"])
        page = _Page(request.path, frozenset((name, value) for name, value in request.query.items() if name != "page"))
        earlier = self._pages.setdefault(page, set())
        if number > 1 and number - 1 not in earlier:
            yield f"page {number} of the list is asked for without page {number - 1}"
        earlier.add(number)


def _tag_problems(request: SentRequest) -> Iterator[str]:
    tag = request.headers.get("if-none-match")
    if tag is None:
        return
    if operation_of(request) not in WITH_ENTITY_TAG or not _ENTITY_TAG.fullmatch(tag):
        yield f"it must not have the entity tag {tag}"
