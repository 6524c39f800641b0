"""AWS below `deploy` and `destroy`, for tests without a server. Requests are checked like those of the adapters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import code_of, translate
from tests.support.aws.contract import check_request
from tests.support.aws.request_rules import judge_request


def check_api_request(service: str, operation: str, parameters: dict[str, Any]) -> None:
    """Check a request that goes through a client of botocore, which adds some tokens itself."""
    check_request(service, operation, parameters)
    judge_request(service, operation, parameters, adds_tokens=True)


class ScriptedApi:
    """Answers of AWS in the order of the calls. The last one of an operation is repeated."""

    def __init__(self, **answers: list[Any]) -> None:
        self._answers = answers
        #: Operations with their parameters.
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def call(self, service: str, operation: str, **parameters: Any) -> Any:
        answer = self._answer(service, operation, parameters)
        if isinstance(answer, ClientError):
            raise translate(answer, service, operation) from answer
        return answer

    async def find(self, service: str, operation: str, missing: Collection[str], **parameters: Any) -> Any:
        answer = self._answer(service, operation, parameters)
        if isinstance(answer, ClientError):
            if code_of(answer) in missing:
                return None
            raise translate(answer, service, operation) from answer
        return answer

    async def items(self, service: str, operation: str, key: str, **parameters: Any) -> Any:
        for item in (await self.call(service, operation, **parameters)).get(key, ()):
            yield item

    def new_token(self) -> str:
        return f"remuda-{len(self.calls)}"

    def _answer(self, service: str, operation: str, parameters: dict[str, Any]) -> Any:
        check_api_request(service, operation, parameters)
        self.calls.append((operation, parameters))
        answers = self._answers[operation]
        return answers.pop(0) if len(answers) > 1 else answers[0]
