"""A launcher changes the deployment that it runs into what another file says: `penstock up --apply`.

An instance that is replaced runs beside the new one for a while, so the processes need names of their own: that of an
instance is `engine-0`, and its process is called `engine-0`, `engine-0.1` or the like.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError, PenstockError
from penstock.service.checkpoint import file_states, fingerprint, read_defaults
from penstock.service.control import Client, ControlSocket, Question
from penstock.service.deployment import Deployment
from penstock.service.difference import Difference, difference
from penstock.service.rollout import Rollout, Step
from penstock.service.supervisor import Program

if TYPE_CHECKING:
    from penstock.service.launcher import Launcher
    from penstock.service.trial import Trial

log = logging.getLogger("penstock.launcher")
LIMIT = 600.0  # seconds that an instance has from its start until it takes requests, unless the command says
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
# deployment, folder of its checkpoint, instance -> name of its process -> all programs
Plan = Callable[[Deployment, Path, Mapping[str, str]], Sequence[Program]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What runs.

    Attributes:
        directory: of the checkpoint.
        digest: of the checkpoint, as of `checkpoint.fingerprint`.
        files: as of `checkpoint.file_states`; the digest is of samples.
        names: instance -> name of its process.
    """

    deployment: Deployment
    directory: Path
    digest: str
    files: Mapping[str, tuple[int, int, int]]
    names: Mapping[str, str]


class Upgrades:
    """Call `look` many times a second.

    Args:
        control: gets the questions.
        read: a question -> the deployment that it describes; raises ConfigError.
        plan: makes its programs.
        frontends: addresses of all, by HTTP.
        surround: sets the environment of engines that start, by the deployment that they are for.
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
    ) -> None:
        self._control, self._launcher = control, launcher
        self._running = running
        self._read, self._plan = read, plan
        self._frontends, self._surround = frontends, surround
        self._under_way: _Change | None = None

    def look(self, now: float) -> None:
        for client, question in self._control.questions():
            try:
                self._answer(client, question)
            except Exception as error:  # what runs goes on
                if not isinstance(error, PenstockError | OSError):
                    log.exception("a change of the deployment could not be begun")
                client.tell(over=True, error=str(error) or type(error).__name__, code=2)
                client.close()
        change = self._under_way
        if change is None:
            return
        if self._launcher.stopping:
            change.client.tell(over=True, error="the deployment is being stopped", code=1)
            self._end(change)
            return
        change.look(now)
        if change.rollout.over:
            if not change.rollout.failure:
                self._become(change)
            self._end(change)

    def _answer(self, client: Client, question: Question) -> None:
        if self._under_way is not None:
            raise ConfigError("another change is under way: wait for its end")
        if self._launcher.stopping:
            raise ConfigError("the deployment is being stopped")
        change = self._change(client, question)
        client.tell(plan=change.difference.lines)
        if question.get("check"):
            client.tell(over=True, error="", code=0)
            client.close()
            return
        log.info("the deployment changes: %s", "; ".join(change.difference.lines) or "nothing is to be done")
        self._under_way = change
        self._surround(change.wanted.deployment)

    def _change(self, client: Client, question: Question) -> _Change:
        """Raises ConfigError, OSError."""
        file, running = str(question["file"]), self._running
        wanted, directory = self._read(question)
        digest, files = fingerprint(directory), file_states(directory)
        new_model = directory != running.directory
        if not new_model and (digest, files) != (running.digest, running.files):
            why = "has changed since it was loaded: there would be nothing to return to"
            raise ConfigError(f"{file}: model: {directory} {why}; allowed is a new folder for a new checkpoint")
        if new_model and (why := _unlike(running.directory, directory)):
            raise ConfigError(f"{file}: model: {why}")
        engines = {name for name, program in self._launcher.programs.items() if program.kind == "engine"}
        missing = [name for name, process in running.names.items() if process not in engines]
        left = engines.difference(running.names.values())  # of a change that could not be taken back as a whole
        found = difference(file, running.deployment, wanted, new_model=new_model, missing=missing)
        found = replace(found, removed=[*found.removed, *sorted(left)])
        names = self._names(wanted, found)
        programs = {program.name: program for program in self._plan(wanted, directory, names)}
        processes = {**running.names, **{name: name for name in left}}
        old = {name: self._launcher.programs[processes[name]] for name in (*found.changed, *found.removed)}
        steps = self._steps(found, old, {name: programs[process] for name, process in names.items()})
        if found.master:
            steps.append(Step(start=programs["master"], stop=self._launcher.programs["master"]))
        limit = float(question.get("limit") or LIMIT)
        return _Change(
            client=client,
            wanted=Running(deployment=wanted, directory=directory, digest=digest, files=files, names=names),
            difference=found,
            rollout=Rollout(steps, limit),
            fleet=_Fleet(self._launcher, self._frontends, wanted.server["ssl_certfile"] is not None),
            frontends=[program for program in programs.values() if program.kind == "frontend"],
        )

    def _names(self, wanted: Deployment, found: Difference) -> dict[str, str]:
        taken, names = set(self._launcher.programs), {}
        for instance in (name for group in wanted.groups for name in group.instances):
            if instance in found.added or instance in found.changed:
                free = (f"{instance}.{i}" if i else instance for i in count())
                names[instance] = next(name for name in free if name not in taken)
                taken.add(names[instance])
            else:
                names[instance] = self._running.names[instance]
        return names

    @staticmethod
    def _steps(found: Difference, old: Mapping[str, Program], new: Mapping[str, Program]) -> list[Step]:
        """Those that come go before those that leave.

        Args:
            old, new: programs of instances, as they are and as they shall be.
        """
        added, removed = list(found.added), list(found.removed)
        beyond = max(0, len(added) - len(removed))
        steps = [Step(start=new[name]) for name in added[:beyond]]
        steps += [Step(start=new[name], stop=old[name]) for name in found.changed]
        steps += [Step(start=new[a], stop=old[b]) for a, b in zip(added[beyond:], removed, strict=False)]
        return steps + [Step(stop=old[name]) for name in removed[len(added) - beyond :]]

    def _become(self, change: _Change) -> None:
        self._running = change.wanted
        for program in change.frontends:
            self._launcher.change(program)
        self._launcher.serve_model(change.wanted.deployment.prefix, change.wanted.digest)

    def _end(self, change: _Change) -> None:
        change.end()
        self._surround(self._running.deployment)
        self._under_way = None

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.client.tell(over=True, error="the deployment has ended", code=1)
            self._end(self._under_way)
        self._control.close()


@dataclass(slots=True, kw_only=True)
class _Change:
    """One that is under way."""

    client: Client
    wanted: Running
    difference: Difference
    rollout: Rollout
    fleet: _Fleet
    frontends: Sequence[Program]
    told: tuple[str, int, int] | None = None

    def look(self, now: float) -> None:
        rollout = self.rollout
        self.fleet.look()
        failed = rollout.failure
        rollout.look(now, self.fleet)
        if rollout.failure != failed:
            log.warning("the deployment goes back to what it was: %s", rollout.failure)
        state = rollout.doing, rollout.done, rollout.total
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
    """The launcher's programs, as a `rollout.Fleet`."""

    def __init__(self, launcher: Launcher, frontends: Sequence[tuple[str, int]], tls: bool) -> None:
        self._launcher, self._frontends, self._tls = launcher, frontends, tls
        self._trials: dict[str, Trial] = {}
        self._next: dict[str, Program] = {}  # that wait for the end of their predecessors
        self._members: set[str] = set()  # that the new master is to know

    def look(self) -> None:
        for name, program in list(self._next.items()):
            if not self._launcher.runs(name):
                del self._next[name]
                self._try_out(program)

    def start(self, program: Program) -> None:
        program = replace(program, starts=False)
        name = program.name
        if name in self._launcher.programs:
            self._members = set(self._launcher.ready)
            self._launcher.forget_ready()
            self._launcher.retire(name)
            self._next[name] = program
        else:
            self._try_out(program)

    def _try_out(self, program: Program) -> None:
        self._launcher.try_out(program)
        if program.address is not None:
            from penstock.service.trial import Trial

            self._trials[program.name] = Trial(program.name, program.address, self._frontends, self._tls)

    def verdict(self, name: str) -> str | None:
        if name in self._next:
            return None
        if ended := self._launcher.end_of(name):
            return ended
        if name in self._trials:
            return self._trials[name].verdict
        return "" if self._launcher.is_up(name) else None

    def admit(self, name: str) -> None:
        self._launcher.accept(name)
        if name in self._trials:
            self._trials[name].introduce()

    def serves(self, name: str) -> bool:
        ready = set(self._launcher.ready)
        if name not in self._trials:
            return ready >= self._members
        return name in ready and self._trials[name].known

    def drain(self, name: str) -> None:
        self._launcher.leave(name)

    def end(self, name: str) -> None:
        self._launcher.retire(name)

    def has_gone(self, name: str) -> bool:
        if name in self._launcher.programs and not self._launcher.runs(name):
            self._launcher.forget(name)
            if trial := self._trials.pop(name, None):
                trial.close()
        return name not in self._launcher.programs

    def close(self) -> None:
        for trial in self._trials.values():
            trial.close()


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
