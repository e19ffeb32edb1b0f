"""What a launcher does to its own instances so that a deployment becomes another one; see `upgrade` and `follower`.

An instance that is replaced runs beside the new one for a while, so the processes need names of their own: that of an
instance is `engine-0`, and its process is called `engine-0`, `engine-0.1` or the like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.service.checkpoint import file_states, fingerprint
from penstock.service.deployment import Deployment
from penstock.service.difference import Difference, difference
from penstock.service.rollout import Named, Step
from penstock.service.supervisor import Program

if TYPE_CHECKING:
    from penstock.service.launcher import Launcher
    from penstock.service.trial import Introduction, Trial

LIMIT = 600.0  # seconds that an instance has from its start until it takes requests, unless the command says
Found = tuple[Deployment, Path]  # of one model, and the folder of its checkpoint
# of all models, and instance -> name of its process -> all programs
Plan = Callable[[Sequence[Found], Mapping[str, str]], Sequence[Program]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What runs of one model.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Of one model.

    Attributes:
        wanted: what will run.
        steps: of this host's instances.
        programs: all that are wanted of all models, by name.
    """

    wanted: Running
    difference: Difference
    steps: Sequence[Step]
    programs: Mapping[str, Program]


def plan_changes(
    file: str, launcher: Launcher, running: Sequence[Running], wanted: Sequence[Found], plan: Plan
) -> list[Change]:
    """
    Args:
        file: which describes `wanted`, for messages.
        running, wanted: of the same models.
        plan: makes the programs.

    Raises:
        ConfigError, OSError: it cannot be.
    """
    found = [_compared(file, launcher, one, *other) for one, other in zip(running, wanted, strict=True)]
    names = {instance: process for after, _, _ in found for instance, process in after.names.items()}
    programs = {program.name: program for program in plan(wanted, names)}
    return [
        Change(
            wanted=after,
            difference=differs,
            steps=_steps(differs, old, {name: programs[process] for name, process in after.names.items()}),
            programs=programs,
        )
        for after, differs, old in found
    ]


def _compared(
    file: str, launcher: Launcher, running: Running, wanted: Deployment, directory: Path
) -> tuple[Running, Difference, dict[str, Program]]:
    """What will run of a model, how it differs from what does, and the programs of instances that go."""
    digest, files = fingerprint(directory), file_states(directory)
    new_model = directory != running.directory
    if not new_model and (digest, files) != (running.digest, running.files):
        why = "has changed since it was loaded: there would be nothing to return to"
        raise ConfigError(f"{file}: model: {directory} {why}; allowed is a new folder for a new checkpoint")
    prefix = running.deployment.prefix
    engines = {
        name for name, program in launcher.programs.items() if program.kind == "engine" and name.startswith(prefix)
    }
    missing = [name for name, process in running.names.items() if process not in engines]
    left = engines.difference(running.names.values())  # of a change that could not be taken back as a whole
    found = difference(file, running.deployment, wanted, new_model=new_model, missing=missing)
    found = replace(found, removed=[*found.removed, *sorted(left)])
    names = _names(launcher, running, wanted, found)
    processes = {**running.names, **{name: name for name in left}}
    old = {name: launcher.programs[processes[name]] for name in (*found.changed, *found.removed)}
    after = Running(deployment=wanted, directory=directory, digest=digest, files=files, names=names)
    return after, found, old


def _names(launcher: Launcher, running: Running, wanted: Deployment, found: Difference) -> dict[str, str]:
    taken, names = set(launcher.programs), {}
    for instance in (name for group in wanted.groups for name in group.instances):
        if instance in found.added or instance in found.changed:
            free = (f"{instance}.{i}" if i else instance for i in count())
            names[instance] = next(name for name in free if name not in taken)
            taken.add(names[instance])
        else:
            names[instance] = running.names[instance]
    return names


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


class OwnFleet:
    """The launcher's programs, as a `rollout.Fleet`; call `look` many times a second.

    Args:
        introduce: has the frontends looked at; None where another launcher does that, and `known` is to be set.

    Attributes:
        introduces: the newest instance that the frontends are to know; "" before the first.
        known: instances that all of them know.
    """

    def __init__(self, launcher: Launcher, introduce: Callable[[str], Introduction] | None) -> None:
        self._launcher, self._introduce = launcher, introduce
        self.introduces = ""
        self.known: set[str] = set()
        self._trials: dict[str, Trial] = {}
        self._introductions: dict[str, Introduction] = {}
        self._next: dict[str, Program] = {}  # that wait for the end of their predecessors
        self._members: set[str] = set()  # that the new master is to know

    def look(self) -> None:
        for name, program in list(self._next.items()):
            if not self._launcher.runs(name):
                del self._next[name]
                self._try_out(program)
        self.known |= {name for name, introduction in self._introductions.items() if introduction.known}

    def start(self, program: Named) -> None:
        assert isinstance(program, Program)
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

            address = partial(self._launcher.endpoint, program.name)
            self._trials[program.name] = Trial(address, self._launcher.secret)

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
            self.introduces = name
            if self._introduce is not None:
                self._introductions[name] = self._introduce(name)

    def serves(self, name: str) -> bool:
        ready = set(self._launcher.ready)
        if name not in self._trials:
            return ready >= self._members
        return name in ready and name in self.known

    def drain(self, name: str) -> None:
        self._launcher.leave(name)

    def end(self, name: str) -> None:
        self._launcher.retire(name)

    def has_gone(self, name: str) -> bool:
        if name in self._launcher.programs and not self._launcher.runs(name):
            self._launcher.forget(name)
            for watching in (self._trials, self._introductions):
                if name in watching:
                    watching.pop(name).close()
            self.known.discard(name)
        return name not in self._launcher.programs

    def close(self) -> None:
        for watching in (self._trials, self._introductions):
            for watched in watching.values():
                watched.close()
