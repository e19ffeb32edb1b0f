"""A launcher changes the deployment that it began into what another file says: `penstock up --apply`. Its own instances
go first (`change`), then hosts that joined, one after the other (`joined`). Of several models all change, or none does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError, PenstockError
from penstock.service.change import LIMIT, Change, Found, OwnFleet, Plan, Running, plan_changes
from penstock.service.checkpoint import read_defaults
from penstock.service.control import Client, ControlSocket, Question
from penstock.service.deployment import Deployment
from penstock.service.joined import JoinedHosts, Target
from penstock.service.rollout import Named, Rollout, Step

if TYPE_CHECKING:
    from penstock.core.wire.master import HostProgress
    from penstock.service.launcher import Launcher, Registration
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
        models: that run, each with the registration of its instances here.
        read: a question -> the models that it describes; raises ConfigError.
        plan: makes their programs.
        frontends: addresses of all, by HTTP.
        surround: sets the environment of engines that start, by the models that they are for.
        tidy: puts away what was made for programs that are not there any more.
        became: told what runs now of a model.
    """

    def __init__(
        self,
        control: ControlSocket,
        launcher: Launcher,
        models: Sequence[tuple[Registration, Running]],
        read: Callable[[Question], Sequence[Found]],
        plan: Plan,
        frontends: Sequence[tuple[str, int]],
        surround: Callable[[Sequence[Deployment]], None],
        tidy: Callable[[], None] = lambda: None,
        became: Callable[[Running], None] = lambda running: None,
    ) -> None:
        self._control, self._launcher = control, launcher
        self._models = [_Model(registration, running, self._introduce) for registration, running in models]
        self._read, self._plan = read, plan
        self._frontends, self._surround = frontends, surround
        self._tidy, self._became = tidy, became
        self._tls = self._models[0].running.deployment.server["ssl_certfile"] is not None
        self._under_way: _Course | None = None

    def _introduce(self, name: str) -> Introduction:
        from penstock.service.trial import Introduction

        return Introduction(name, self._frontends, self._tls)

    def look(self, now: float) -> None:
        for model in self._models:
            model.joined.look(now)
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
            for model in self._models:
                model.settle()
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
        file = str(question["file"])
        wanted = self._matched(file, self._read(question))
        for model, (_, directory) in zip(self._models, wanted, strict=True):
            running = model.running.directory
            if directory != running and (why := _unlike(running, directory)):
                raise ConfigError(f"{file}: model: {why}")
        changes = plan_changes(file, self._launcher, [model.running for model in self._models], wanted, self._plan)
        limit = float(question.get("limit") or LIMIT)
        course = self._under_way = _Course(
            client=client,
            changes=changes,
            limit=limit,
            checks=bool(question.get("check")),
            until=now + limit,
            fleet=_Fleet(OwnFleet(self._launcher, self._introduce), self._models, limit),
        )
        for model, change in zip(self._models, changes, strict=True):
            model.ask_hosts(change.wanted, limit)
        self._hear(course, now)

    def _matched(self, file: str, wanted: Sequence[Found]) -> Sequence[Found]:
        """In the order of those that run."""
        if len(wanted) == len(self._models) == 1:
            return wanted
        found = {deployment.prefix: (deployment, directory) for deployment, directory in wanted}
        running = [model.running.deployment.prefix for model in self._models]
        if found.keys() != set(running):
            names = [
                " ".join(prefix.rstrip("/") or "one without a name" for prefix in each) for each in (found, running)
            ]
            raise ConfigError(f"{file}: models: {names[0]}, allowed while the deployment runs are {names[1]}")
        return [found[prefix] for prefix in running]

    def _hear(self, course: _Course, now: float) -> None:
        """Begin, once all hosts have said what they would do."""
        if any(model.waits for model in self._models) and now < course.until:
            return
        wrong, lines, steps = list[str](), list[str](), list[Step]()
        for model, change in zip(self._models, course.changes, strict=True):
            lines += change.difference.lines
            steps += change.steps
            for name, answer in model.answers.items():
                if answer is None or answer.state != "able":
                    why = answer.why if answer is not None else f"no answer within {course.limit:g} s"
                    wrong.append(f"{name}: {why}")
                elif answer.lines:
                    lines += [f"{name}: {line}" for line in answer.lines]
                    before, after = model.target(name, model.running, returns=True), model.target(name, change.wanted)
                    steps.append(Step(start=after, stop=before, limited=False))
        if wrong or course.checks:
            if not wrong:
                course.client.tell(plan=lines)
            course.client.tell(over=True, error="\n".join(wrong), code=2 if wrong else 0)
            self._end(course)
            return
        for change in course.changes:
            if change.difference.master:
                master = f"{change.difference.prefix}master"
                steps.append(Step(start=change.programs[master], stop=self._launcher.programs[master]))
        course.client.tell(plan=lines)
        log.info("the deployment changes: %s", "; ".join(lines) or "nothing is to be done")
        course.rollout = Rollout(steps, course.limit)
        for model, change in zip(self._models, course.changes, strict=True):
            if change.wanted.digest != model.running.digest:
                model.registration.other = change.wanted.digest
        self._surround([change.wanted.deployment for change in course.changes])

    def _become(self, course: _Course) -> None:
        for program in course.changes[0].programs.values():
            if program.kind == "frontend":
                self._launcher.change(program)
        for model, change in zip(self._models, course.changes, strict=True):
            model.become(change.wanted)
            self._became(model.running)

    def _end(self, course: _Course) -> None:
        course.end()
        for model in self._models:
            model.forget_questions()
        self._surround([model.running.deployment for model in self._models])
        self._tidy()
        self._under_way = None

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.client.tell(over=True, error="the deployment has ended", code=1)
            self._end(self._under_way)
        for model in self._models:
            model.joined.close()
        self._control.close()


class _Model:
    """One of the models that run, on this host and on those that joined.

    Attributes:
        asked: hosts that are to change too, where they have anything to change.
    """

    def __init__(self, registration: Registration, running: Running, introduce: Callable[[str], Introduction]) -> None:
        self.registration, self.running = registration, running
        self.joined = JoinedHosts(registration, introduce)
        self.asked: list[str] = []

    def target(self, host: str, running: Running, *, returns: bool = False) -> Target:
        deployment = running.deployment
        return Target(
            prefix=deployment.prefix,
            host=host,
            model=deployment.model,
            digest=running.digest,
            policy=deployment.policy,
            returns=returns,
        )

    def ask_hosts(self, wanted: Running, limit: float) -> None:
        """What they would do to become that, if it concerns them."""
        if wanted.directory != self.running.directory or wanted.deployment.policy != self.running.deployment.policy:
            self.asked = sorted(self.joined.hosts)
        for host in self.asked:
            self.joined.ask(self.target(host, wanted), limit)

    @property
    def answers(self) -> dict[str, HostProgress | None]:
        """Of those that were asked and are still there."""
        return {host: self.joined.answer(host) for host in self.asked if not self.joined.has_left(host)}

    @property
    def waits(self) -> bool:
        return None in self.answers.values()

    def forget_questions(self) -> None:
        self.asked = []
        self.joined.forget_questions()

    def become(self, wanted: Running) -> None:
        before, self.running = self.running, wanted
        if wanted.digest != before.digest:
            self.registration.other = before.digest
        self.registration.digest = wanted.digest

    def settle(self) -> None:
        """Hosts that serve another checkpoint come after: they were away, or new, or the launcher was, in a change."""
        behind = False
        for host, progress in self.joined.hosts.items():
            order, answer = self.joined.order(host), self.joined.answer(host)
            ordered = order is not None and order.acts and order.digest == self.running.digest
            if progress.model == self.running.digest and (progress.state != "changes" or ordered):
                continue
            if not ordered:
                log.warning("%s is to serve what the others do", host)
                self.joined.change(self.target(host, self.running), LIMIT)
            behind |= not ordered or answer is None or answer.state == "changes"
        if not behind:  # who still serves something else is not part of the deployment
            self.registration.other = ""


@dataclass(slots=True, kw_only=True)
class _Course:
    """A change that is under way.

    Attributes:
        changes: of all models, in their order.
        limit: seconds that an instance has.
        checks: whether only its plan was asked for.
        until: hosts have time to answer.
        rollout: None until they have answered.
    """

    client: Client
    changes: Sequence[Change]
    limit: float
    checks: bool
    until: float
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

    def __init__(self, own: OwnFleet, models: Sequence[_Model], limit: float) -> None:
        self._own, self._limit = own, limit
        self._joined = {model.running.deployment.prefix: model.joined for model in models}
        self._hosts: dict[str, Target] = {}
        self._at = ""  # the host whose turn it is

    @property
    def doing(self) -> str:
        """What that host does, for people."""
        answer = self._answer(self._at) if self._at else None
        return f"{self._at}: {answer.doing}" if answer is not None and answer.doing else ""

    def look(self) -> None:
        self._own.look()

    def start(self, program: Named) -> None:
        if isinstance(program, Target):
            self._hosts[program.name] = program
            self._at = program.name
            self._joined[program.prefix].change(program, self._limit)
        else:
            self._own.start(program)

    def verdict(self, name: str) -> str | None:
        if name not in self._hosts:
            return self._own.verdict(name)
        host = self._hosts[name]
        if self._joined[host.prefix].has_left(host.host):
            return "it has left, or cannot be reached"
        answer = self._answer(name)
        if answer is None or answer.state == "changes":
            return None
        return "" if answer.state == "changed" else answer.why or answer.state

    def _answer(self, name: str) -> HostProgress | None:
        host = self._hosts[name]
        return self._joined[host.prefix].answer(host.host)

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
