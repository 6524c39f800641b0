"""The agent killed, its host rebooted, or an effect failing, at each effect on its host: file, process, mount, timer.

Afterwards a new agent continues over what is left, and `tests.support.effects.judge` says what must hold: the armed
dead-man timer is that of the record, no sandbox serves two runners, no credential stays, and the instance serves its
assignments or, after a failure, ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import pytest

from remuda.agent.sandbox import DISK_RESERVE
from tests.support.effects import seam
from tests.support.effects.host import Effect, EffectCut
from tests.support.effects.judge import FAILED
from tests.support.effects.life import READ, Lived, Meanwhile, Work, live

#: An instance first serves a run, or a runner set, and then a run of another repository. The others take rare turns.
LIVES = {
    "run": partial(live, ((Work.RUN, "octo/first"), (Work.RUN, "octo/second"))),
    "set": partial(live, ((Work.SET, "octo/first"), (Work.RUN, "octo/second"))),
    "ephemeral": partial(live, ((Work.EPHEMERAL, "octo/first"), (Work.RUN, "octo/second"))),
    "busy": partial(live, ((Work.BUSY, "octo/first"),), expires=True),
    "damaged": partial(live, ((Work.DAMAGING, "octo/first"),)),
    "refused": partial(live, ((Work.REFUSED, "octo/first"),)),
    "spent": partial(live, ((Work.SPENT, "octo/first"), (Work.RUN, "octo/second"))),
    "full": partial(live, ((Work.RUN, "octo/first"), (Work.RUN, "octo/first")), disk_free=DISK_RESERVE // 2),
    "layers": partial(live, ((Work.RUN, "octo/first"),), builds_layers=True),
}
#: Effects of each life at least. With fewer, the model does not see what the agent does.
MIN_EFFECTS = 250
#: Before and after these, the next agent finds the same.
INVISIBLE = frozenset({"fsync", READ})
#: On a draft, beside its write and its rename: the next agent empties it first, and they fail together.
INVISIBLE_ON_DRAFTS = frozenset({"open", "fchmod", "fsync"})
#: A function whose effects are cut once in each state of an assignment; others once in each assignment, too.
PREPARATION = "_prepare"


FAILURES = frozenset({EffectCut.FAIL, EffectCut.KEEPS_FAILING})


def _is_invisible(effect: Effect, cut: EffectCut) -> bool:
    name = effect.target.rpartition("/")[2]
    is_draft = name.startswith(".") and name.endswith(".new")
    return (is_draft and effect.name in INVISIBLE_ON_DRAFTS) or (effect.name in INVISIBLE and cut not in FAILURES)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashSchedule:
    cut: EffectCut
    meanwhile: Meanwhile = Meanwhile.NOTHING
    #: Whether effects of a kind are cut again in another state or assignment. `run` is a command, such as a timer's.
    in_each_phase: frozenset[str] | None = frozenset()
    #: Whether each round of a loop is cut, by the name of the file. Otherwise one effect of each line is.
    in_each_round: bool = True
    #: States of the assignment in which effects are cut; empty for all.
    states: tuple[str, ...] = ()
    #: Lives that are looked through, and those of them that are cut: others are by another schedule.
    lives: tuple[str, ...] = ("run", "set")
    cut_lives: tuple[str, ...] = ("run", "set")

    def choose(self, life: str) -> Iterator[int]:
        """The numbers of the effects to cut in a life: those whose kind no life before has."""
        seen: set[object] = set()
        for name in self.lives:
            lived = uncut(name)
            for number, (effect, phase) in enumerate(zip(lived.effects, lived.phases, strict=True), 1):
                kind = (
                    effect.kind if self.in_each_round else (effect.name, effect.lines),
                    self._kind_of_phase(effect, phase),
                )
                is_cut = phase.endswith(self.states or "") and not _is_invisible(effect, self.cut)
                if is_cut and kind not in seen:
                    seen.add(kind)
                    if name == life:
                        yield number

    def _kind_of_phase(self, effect: Effect, phase: str) -> str:
        if self.in_each_phase is not None and effect.name not in self.in_each_phase:
            return ""
        if any(code.co_name == PREPARATION for code, _ in effect.lines):
            return phase.rpartition(" ")[2]
        return phase


#: Lives without a layer, and those of them that take a rare turn.
WHOLE = tuple(name for name in LIVES if name != "layers")
RARE = ("refused", "damaged", "busy")
#: States in which the control plane can release an assignment.
ASSIGNED = ("claimed", "running")
SCHEDULES = {
    "killed": CrashSchedule(cut=EffectCut.KILL, in_each_phase=None, lives=WHOLE, cut_lives=WHOLE),
    "killed while the store is slow": CrashSchedule(
        cut=EffectCut.KILL,
        meanwhile=Meanwhile.UNREACHABLE,
        in_each_phase=None,
        in_each_round=False,
        states=("running", "releasing", FAILED),
        lives=RARE,
        cut_lives=RARE,
    ),
    "killed and released": CrashSchedule(
        cut=EffectCut.KILL, meanwhile=Meanwhile.RELEASE, in_each_phase=None, states=ASSIGNED
    ),
    "killed and reconfigured": CrashSchedule(cut=EffectCut.KILL, meanwhile=Meanwhile.RECONFIGURE, in_each_round=False),
    "rebooted": CrashSchedule(cut=EffectCut.REBOOT, in_each_round=False),
    "failed": CrashSchedule(cut=EffectCut.FAIL, in_each_phase=frozenset({"run"}), lives=WHOLE, cut_lives=WHOLE),
    "keeps failing": CrashSchedule(cut=EffectCut.KEEPS_FAILING, in_each_round=False),
    "killed while a layer is built": CrashSchedule(
        cut=EffectCut.KILL, in_each_round=False, lives=tuple(LIVES), cut_lives=("layers",)
    ),
    "failed while a layer is built": CrashSchedule(
        cut=EffectCut.FAIL, in_each_round=False, lives=tuple(LIVES), cut_lives=("layers",)
    ),
}
CASES = [(name, life) for name, schedule in SCHEDULES.items() for life in schedule.cut_lives]
#: Schedules that have gone wrong: schedule, life, effect, end of its target, and a function that causes it.
GONE_WRONG: dict[str, tuple[str, str, str, str, str]] = {
    "the pre-runner script ran again beside a sandbox": ("failed", "run", "replace", "state.json", "_run_script"),
    "a just-in-time configuration stayed on disk": ("killed and released", "set", "replace", "jit.json", "_register"),
    "credentials stayed on disk without settings": ("killed", "run", "unlink", "", "_drop_registration"),
    "jobs could not write to their cache": ("rebooted", "run", "chown", "", "_mount_caches"),
    "jobs saw the cache of an image": ("failed", "run", "run", "caches", "_discard_state_of_image"),
    "a former dead-man timer stayed armed": ("failed", "run", "run", ".timer", "set_dead_man_timer"),
}


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    gc.collect()
    # What exists already need not be looked at after each life.
    gc.freeze()
    with seam.installed():
        yield
    gc.unfreeze()


@cache
def uncut(life: str) -> Lived:
    return LIVES[life]()


def problems_of(lived: Lived, *, at: int, cut: EffectCut) -> list[str]:
    """The first violation, if there is one: others follow from it."""
    problems = lived.violations[:1]
    if cut not in FAILURES and lived.outcome != "served":
        problems.append(lived.outcome)
    return [f"{cut.value} at effect {at}, {lived.effects[at - 1]}: {problem}" for problem in problems]


@pytest.mark.parametrize("life", LIVES)
def test_life_without_a_cut(life: str) -> None:
    lived = uncut(life)
    assert lived.violations == []
    assert lived.outcome == "served"
    assert len(lived.effects) > MIN_EFFECTS


@pytest.mark.parametrize("name", GONE_WRONG)
def test_schedule_that_has_gone_wrong(name: str) -> None:
    schedule, life, what, target, function = GONE_WRONG[name]
    cut, meanwhile = SCHEDULES[schedule].cut, SCHEDULES[schedule].meanwhile
    found = [
        number
        for number, effect in enumerate(uncut(life).effects, 1)
        if effect.name == what
        and effect.target.endswith(target)
        and any(code.co_name == function for code, _ in effect.lines)
    ]
    assert found
    for number in found:
        assert problems_of(LIVES[life]({number: cut}, meanwhile), at=number, cut=cut) == []


@pytest.mark.parametrize(("schedule", "life"), CASES)
def test_every_effect_cut(life: str, schedule: str) -> None:
    """After a kill, what the next agent does to recover is cut, too."""
    chosen, problems = SCHEDULES[schedule], []
    known = {effect.kind for name in LIVES for effect in uncut(name).effects}
    for number in chosen.choose(life):
        lived = LIVES[life]({number: chosen.cut}, chosen.meanwhile)
        problems += problems_of(lived, at=number, cut=chosen.cut)
        if chosen.cut is not EffectCut.KILL:
            continue
        for later, effect in enumerate(lived.effects[number:], number + 1):
            if effect.kind not in known:
                known.add(effect.kind)
                again = LIVES[life]({number: chosen.cut, later: chosen.cut}, chosen.meanwhile)
                problems += problems_of(again, at=later, cut=chosen.cut)
    assert not problems, "\n".join(problems)
