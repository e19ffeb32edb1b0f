"""The server against its own OpenAPI document: whatever the document allows is answered, never with a fault of ours,
and with no status that the document does not have."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from penstock.api.app import create_app
from penstock.api.openapi import document
from penstock.obs.exposition import Exposition
from penstock.obs.metrics import Metrics
from penstock.service.frontend import Models
from tests.helpers.documented import CHECKS

SCRIPTED = importlib.import_module("tests.api.conftest").ScriptedFrontend  # fixtures come too late for a schema
RELAXED: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "derandomize": True}


def application() -> Any:
    return create_app(Models([SCRIPTED()]), Exposition([Metrics("org/tiny", ["engine-0"])]))


schema = schemathesis.openapi.from_asgi("/openapi.json", application())


@schema.parametrize()
@settings(max_examples=6, **RELAXED)
def test_nothing_that_is_undocumented_comes_back(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)


@pytest.mark.slow
def test_nor_after_many_more() -> None:
    for result in schema.get_all_operations():  # here, as `parametrize` makes its cases whenever tests are collected

        @given(case=result.ok().as_strategy())
        @settings(max_examples=400, **RELAXED)
        def hold(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)

        hold()


def test_the_document_has_every_status_and_no_loose_ends() -> None:
    described = document(application().routes, "1")
    assert described["paths"]["/v1/chat/completions"]["post"]["responses"].keys() == {
        *("200", "400", "401", "404", "408", "413", "429", "431", "500", "503"),
    }
    operations = [each["operationId"] for methods in described["paths"].values() for each in methods.values()]
    assert len(set(operations)) == len(operations)
    text = str(described)
    assert "$defs" not in text
    assert "422" not in text
    assert {"Error", "Targets"} <= described["components"]["schemas"].keys()
