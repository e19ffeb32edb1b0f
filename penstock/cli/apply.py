"""`penstock up --apply FILE`: a deployment that runs on this machine becomes what a file says."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.output import make_progress
from penstock.cli.run_folder import PREFIX, temporary_folder
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.host_port import join_host_port
from penstock.service.control import ask

if TYPE_CHECKING:
    from penstock.service.deployment import Deployment

ADDRESS = "address"  # file in a run's folder: JSON, [host, port of the first frontend]


def apply(file: str, text: str, deployment: Deployment, *, check: bool, limit: float) -> int:
    """0 when it is what the file says, 1 when it has returned to what it was, 2 when nothing was tried.

    Args:
        text: of the file, which the launcher reads itself.
        check: only say what would be done.
        limit: seconds that an instance has from its start until it takes requests.
    """
    folder = _find(file, deployment.server["host"], deployment.server["port"])
    question = {"file": file, "text": text, "folder": os.getcwd(), "check": check, "limit": limit}
    try:
        answers = _shown(ask(folder, question))
    except OSError as error:
        raise Unavailable(f"the launcher of the deployment does not answer: {error}") from None
    if answers is None:
        raise Unavailable("the launcher of the deployment has ended")
    if answers["error"]:
        print(answers["error"], file=sys.stderr)
    return int(answers["code"])


def _find(file: str, host: str, port: int) -> Path:
    """The folder of the run that serves there. Raises ConfigError."""
    runs: list[tuple[Path, Any]] = []
    for path in temporary_folder().glob(f"{PREFIX}*/{ADDRESS}"):
        with contextlib.suppress(OSError, ValueError):  # another user's, or it has just gone
            if path.stat().st_uid == os.geteuid() and not path.parent.is_symlink():
                runs.append((path.parent, json.loads(path.read_text())))
    found = [folder for folder, address in runs if address == [host, port] or not port]
    if len(found) == 1:
        return found[0]
    serving = ", ".join(join_host_port(*address) for _, address in runs) or "none"
    raise ConfigError(
        f"{file}: port: {join_host_port(host, port)}, allowed is where one of your deployments on this machine serves "
        f"({serving}); --port gives another one than the file's",
        "port",
    )


def _shown(answers: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
    """Show how it goes; the last answer, if one came."""
    from rich.console import Console

    console = Console(stderr=True)
    bars = make_progress(console)
    bars.disable = not console.is_terminal  # it would leave an empty line
    with bars:
        bar = bars.add_task("")
        doing = ""
        for answer in answers:
            if "over" in answer:
                return answer
            if "plan" in answer:
                print("\n".join(answer["plan"]) or "nothing is to be done", flush=True)
            if "doing" in answer and answer["doing"] != doing:
                doing = answer["doing"]
                shown = f"going back: {doing}" if answer["returns"] else doing
                bars.update(bar, description=shown, completed=answer["done"], total=answer["total"])
                if not console.is_terminal:
                    print(shown, file=sys.stderr, flush=True)
    return None
