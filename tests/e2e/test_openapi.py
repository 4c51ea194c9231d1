"""The server keeps what its OpenAPI document says, whatever it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from outboard.serve.openapi import openapi
from serving import serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PATHS = openapi("mock")["paths"]
# Each with requests that fit the document; those with a body with some that do not, too.
JOBS = [(path, method, False) for path in PATHS for method in ("get", "post") if method in PATHS[path]]
JOBS += [(path, "post", True) for path in PATHS if "post" in PATHS[path]]


pytestmark = pytest.mark.no_cover  # the server is another process


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    with serving("mock", "--option", "max_model_len=64", "--request-timeout", "20") as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize(("path", "method", "broken"), JOBS)
def test_the_document(api: Any, path: str, method: str, broken: bool) -> None:
    mode = schemathesis.GenerationMode.NEGATIVE if broken else schemathesis.GenerationMode.POSITIVE
    operation = api[path][method]

    @given(st.data())
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    def ask(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        answer = case.call_and_validate(checks=CHECKS, timeout=30)
        if broken:
            assert answer.status_code in (200, 400, 404), answer.status_code

    ask()
