"""What an answer is held to, besides what its test asks: the server's own OpenAPI document."""

from __future__ import annotations

import re
from typing import Any

from schemathesis.checks import CHECKS as REGISTERED
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import RejectedPositiveData, positive_data_acceptance

# why what the document allows may be refused all the same: no schema can say it
UNSPEAKABLE = re.compile(
    "logit_bias: .* token ids|fit beside|context length|min_tokens: .* at most max_tokens|no token left to draw"
    "|slo: given, allowed only|the chat template failed|arguments: not JSON|its JSON text|the model has .* token"
    "|only reasoning|^response_format|^structured_outputs|^tools|^tool_choice"
    "|^thinking_token_budget: .* where --reasoning-parser|which means the same$"
)


def is_served_if_valid(context: Any, response: Any, case: Any) -> Any:
    """What the document allows is served, but for what no schema can say."""
    try:
        return positive_data_acceptance(context, response, case)
    except RejectedPositiveData:
        if not UNSPEAKABLE.search(response.json()["error"]["message"]):
            raise
    return None


load_all_checks()
CHECKS = [*(check for check in REGISTERED.get_all() if check is not positive_data_acceptance), is_served_if_valid]
