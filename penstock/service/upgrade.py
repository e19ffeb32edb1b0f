"""A launcher changes the deployment that it began into what another file says: `penstock up --apply`. Its own instances
go first (`change`), then hosts that joined, one after the other (`joined`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError, PenstockError
from penstock.service.change import LIMIT, Change, OwnFleet, Plan, Running, plan_change
from penstock.service.checkpoint import read_defaults
from penstock.service.control import Client, ControlSocket, Question
from penstock.service.deployment import Deployment
from penstock.service.joined import JoinedHosts, Target
from penstock.service.rollout import Named, Rollout, Step

if TYPE_CHECKING:
    from penstock.service.launcher import Launcher
    from penstock.service.trial import Introduction

log = logging.getLogger("penstock.launcher")
# What frontends read of a checkpoint: they keep the one that they began with.
OF_FRONTENDS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


class Upgrades:
    """Call `look` many times a second.

    Args:
        control: gets the questions.
        read: a question -> the deployment that it describes; raises ConfigError.
        plan: makes its programs.
        frontends: addresses of all, by HTTP.
        surround: sets the environment of engines that start, by the deployment that they are for.
        tidy: puts away what was made for programs that are not there any more.
        became: told of what runs now.
    """

    def __init__(
        self,
        control: ControlSocket,
        launcher: Launcher,
        running: Running,
        read: Callable[[Question], tuple[Deployment, Path]],
        plan: Plan,
        frontends: Sequence[tuple[str, int]],
        surround: Callable[[Deployment], None],
        tidy: Callable[[], None] = lambda: None,
        became: Callable[[Running], None] = lambda running: None,
    ) -> None:
        self._control, self._launcher = control, launcher
        self._running = running
        self._read, self._plan = read, plan
        self._frontends, self._surround = frontends, surround
        self._tidy, self._became = tidy, became
        self._tls = running.deployment.server["ssl_certfile"] is not None
        self._joined = JoinedHosts(launcher, self._introduce)
        self._under_way: _Course | None = None

    def _introduce(self, name: str) -> Introduction:
        from penstock.service.trial import Introduction

        return Introduction(name, self._frontends, self._tls)

    def look(self, now: float) -> None:
        self._joined.look(now)
        for client, question in self._control.questions():
            try:
                self._answer(client, question, now)
            except Exception as error:  # what runs goes on
                if not isinstance(error, PenstockError | OSError):
                    log.exception("a change of the deployment could not be begun")
                client.tell(over=True, error=str(error) or type(error).__name__, code=2)
                client.close()
                if self._under_way is not None and self._under_way.client is client:
                    self._end(self._under_way)
        course = self._under_way
        if course is None:
            self._settle()
            return
        if self._launcher.stopping:
            course.client.tell(over=True, error="the deployment is being stopped", code=1)
            self._end(course)
        elif course.rollout is None:
            self._hear(course, now)
        else:
            course.look(now, course.rollout)
            if course.rollout.over:
                if not course.rollout.failure:
                    self._become(course)
                self._end(course)

    def _answer(self, client: Client, question: Question, now: float) -> None:
        if self._under_way is not None:
            raise ConfigError("another change is under way: wait for its end")
        if self._launcher.stopping:
            raise ConfigError("the deployment is being stopped")
        file, (wanted, directory) = str(question["file"]), self._read(question)
        if directory != self._running.directory and (why := _unlike(self._running.directory, directory)):
            raise ConfigError(f"{file}: model: {why}")
        change = plan_change(file, self._launcher, self._running, wanted, directory, self._plan)
        limit = float(question.get("limit") or LIMIT)
        concerns_all = directory != self._running.directory or wanted.policy != self._running.deployment.policy
        course = self._under_way = _Course(
            client=client,
            change=change,
            limit=limit,
            checks=bool(question.get("check")),
            until=now + limit,
            hosts=sorted(self._joined.hosts) if concerns_all else [],
            fleet=_Fleet(OwnFleet(self._launcher, self._introduce), self._joined, limit),
        )
        for name in course.hosts:
            self._joined.ask(self._target(name, change.wanted), course.limit)
        self._hear(course, now)

    @staticmethod
    def _target(name: str, running: Running, *, returns: bool = False) -> Target:
        policy = running.deployment.policy
        model, digest = running.deployment.model, running.digest
        return Target(name=name, model=model, digest=digest, policy=policy, returns=returns)

    def _hear(self, course: _Course, now: float) -> None:
        """Begin, once all hosts have said what they would do."""
        answers = {name: self._joined.answer(name) for name in course.hosts if not self._joined.has_left(name)}
        if any(answer is None for answer in answers.values()) and now < course.until:
            return
        wrong, lines, steps = [], list(course.change.difference.lines), list(course.change.steps)
        for name, answer in answers.items():
            if answer is None or answer.state != "able":
                wrong.append(f"{name}: {answer.why if answer is not None else f'no answer within {course.limit:g} s'}")
            elif answer.lines:
                lines += [f"{name}: {line}" for line in answer.lines]
                before, after = (
                    self._target(name, self._running, returns=True),
                    self._target(name, course.change.wanted),
                )
                steps.append(Step(start=after, stop=before, limited=False))
        if wrong or course.checks:
            if not wrong:
                course.client.tell(plan=lines)
            course.client.tell(over=True, error="\n".join(wrong), code=2 if wrong else 0)
            self._end(course)
            return
        if course.change.difference.master:
            steps.append(Step(start=course.change.programs["master"], stop=self._launcher.programs["master"]))
        course.client.tell(plan=lines)
        log.info("the deployment changes: %s", "; ".join(lines) or "nothing is to be done")
        course.rollout = Rollout(steps, course.limit)
        if course.change.wanted.digest != self._running.digest:
            self._launcher.other = course.change.wanted.digest
        self._surround(course.change.wanted.deployment)

    def _become(self, course: _Course) -> None:
        before, self._running = self._running, course.change.wanted
        for program in course.change.programs.values():
            if program.kind == "frontend":
                self._launcher.change(program)
        if self._running.digest != before.digest:
            self._launcher.other = before.digest
        self._launcher.serve_model(self._running.digest)
        self._became(self._running)

    def _end(self, course: _Course) -> None:
        course.end()
        self._joined.forget_questions()
        self._surround(self._running.deployment)
        self._tidy()
        self._under_way = None

    def _settle(self) -> None:
        """Hosts that serve another checkpoint come after: they were away, or new, or the launcher was, in a change."""
        behind = False
        for name, progress in self._joined.hosts.items():
            order, answer = self._joined.order(name), self._joined.answer(name)
            ordered = order is not None and order.acts and order.digest == self._running.digest
            if progress.model == self._running.digest and (progress.state != "changes" or ordered):
                continue
            if not ordered:
                log.warning("%s is to serve what the others do", name)
                self._joined.change(self._target(name, self._running), LIMIT)
            behind |= not ordered or answer is None or answer.state == "changes"
        if not behind:  # who still serves something else is not part of the deployment
            self._launcher.other = ""

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.client.tell(over=True, error="the deployment has ended", code=1)
            self._end(self._under_way)
        self._joined.close()
        self._control.close()


@dataclass(slots=True, kw_only=True)
class _Course:
    """A change that is under way.

    Attributes:
        limit: seconds that an instance has.
        checks: whether only its plan was asked for.
        until: hosts have time to answer.
        hosts: that are to change too, where they have anything to change.
        rollout: None until they have answered.
    """

    client: Client
    change: Change
    limit: float
    checks: bool
    until: float
    hosts: Sequence[str]
    fleet: _Fleet
    rollout: Rollout | None = None
    told: tuple[str, int, int] | None = None

    def look(self, now: float, rollout: Rollout) -> None:
        self.fleet.look()
        failed = rollout.failure
        rollout.look(now, self.fleet)
        if rollout.failure != failed:
            log.warning("the deployment goes back to what it was: %s", rollout.failure)
        state = self.fleet.doing or rollout.doing, rollout.done, rollout.total
        if state != self.told:
            self.told = state
            self.client.tell(doing=state[0], done=state[1], total=state[2], returns=rollout.returns)
        if rollout.over:
            end = "is what it was before" if rollout.failure else "is what the file says"
            log.info("the deployment %s", end)
            self.client.tell(over=True, error=rollout.failure, code=1 if rollout.failure else 0)

    def end(self) -> None:
        self.fleet.close()
        self.client.close()


class _Fleet:
    """The launcher's programs, and the hosts that joined, as one `rollout.Fleet`."""

    def __init__(self, own: OwnFleet, joined: JoinedHosts, limit: float) -> None:
        self._own, self._joined, self._limit = own, joined, limit
        self._hosts: set[str] = set()
        self._at = ""  # the host whose turn it is

    @property
    def doing(self) -> str:
        """What that host does, for people."""
        answer = self._joined.answer(self._at) if self._at else None
        return f"{self._at}: {answer.doing}" if answer is not None and answer.doing else ""

    def look(self) -> None:
        self._own.look()

    def start(self, program: Named) -> None:
        if isinstance(program, Target):
            self._hosts.add(program.name)
            self._at = program.name
            self._joined.change(program, self._limit)
        else:
            self._own.start(program)

    def verdict(self, name: str) -> str | None:
        if name not in self._hosts:
            return self._own.verdict(name)
        if self._joined.has_left(name):
            return "it has left, or cannot be reached"
        answer = self._joined.answer(name)
        if answer is None or answer.state == "changes":
            return None
        return "" if answer.state == "changed" else answer.why or answer.state

    def admit(self, name: str) -> None:
        if name in self._hosts:
            self._at = ""
        else:
            self._own.admit(name)

    def serves(self, name: str) -> bool:
        return name in self._hosts or self._own.serves(name)

    def drain(self, name: str) -> None:
        self._own.drain(name)

    def end(self, name: str) -> None:
        self._own.end(name)

    def has_gone(self, name: str) -> bool:
        return self._own.has_gone(name)

    def close(self) -> None:
        self._own.close()


def _unlike(running: Path, wanted: Path) -> str:
    """What frontends would have to read anew; "" when nothing."""
    for name in OF_FRONTENDS:
        before, after = (
            (folder / name).read_bytes() if (folder / name).is_file() else b"" for folder in (running, wanted)
        )
        if before != after:
            return f"{name} of {wanted} differs from that of {running}, allowed is the same: frontends keep theirs"
    if read_defaults(running) != read_defaults(wanted):
        return f"config.json of {wanted} has other end-of-sequence tokens than that of {running}"
    return ""
