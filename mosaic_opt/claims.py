"""Trials shared between processes: each is claimed by one, kept alive by it, and given to another if it dies.

There is no master. A process that wants work enters the study's exclusive section, hands the trials of dead processes
to the living, and takes the first trial that waits or adds a new one. What is known stands in the study's database:
`worker` says who has a running trial, `beat` that it is alive, `interrupted` that a trial does not count because its
process ended, `retry_of` which one a trial repeats.
"""

from __future__ import annotations

import datetime
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import optuna
import psutil
from optuna import Trial, TrialPruned
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from mosaic_opt.storage import LockLost, SharedStorage

BEAT_SECONDS = 60  # between two signs of life of a running trial
GRACE_SECONDS = 180  # without one a process of another machine counts as dead
POLL_SECONDS = 0.5  # between two looks for work while others have the last trials
FAILURES = 3  # of trials in a row, after which a process gives up

Space = Mapping[str, BaseDistribution]
Trials = Sequence[FrozenTrial]
Need = Literal["begin", "wait", "done"]  # begin a trial, wait for those that others have, or nothing is left
_CLAIMS = itertools.count(1)  # a number for each trial this process claims
KEPT = ("origin", "complete", "budgets")  # user attributes that a repeated trial takes over


def waiting_trial(space: Space, params: Mapping[str, Any] | None = None, **user_attrs: Any) -> FrozenTrial:
    """A trial to be added in one transaction with all its parameters; None leaves them to the study's sampler."""
    return create_trial(
        state=TrialState.WAITING,
        params=dict(params or {}),
        distributions={name: space[name] for name in params or {}},
        user_attrs=user_attrs,
    )


class Claims:
    """One process's share in the trials of a study.

    Args:
        study: of a `SharedStorage`, or a study of this process alone.
        space: distributions of all parameters of a trial.
        grace: seconds without a sign of life after which another machine's process counts as dead.
    """

    def __init__(self, study: optuna.Study, space: Space, *, grace: float = GRACE_SECONDS) -> None:
        self.study, self.space, self.grace = study, dict(space), grace
        self._beats: dict[int, tuple[Any, float]] = {}  # trial number -> last beat seen, and when

    def work(
        self,
        evaluate: Callable[[Trial], Any],
        *,
        need: Callable[[Trials], Need],
        fresh: Callable[[Trials], FrozenTrial],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Take and evaluate trials for as long as there is a need.

        Args:
            evaluate: gives the values of a trial, all of whose parameters are set.
            need: says, from all trials, what is to be done.
            fresh: makes the next trial (see `waiting_trial`) where one is to begin and none waits.
            after: called after each trial and while waiting for others.

        Raises:
            Exception: what `evaluate` raised, if it did so FAILURES times in a row.
        """
        failures = 0
        while True:
            now, trial = self._take(need, fresh)
            if trial is not None:
                error = self._evaluated(trial, evaluate)
                failures = failures + 1 if error else 0
                if error and failures >= FAILURES:
                    raise error
            elif now == "done":
                return
            else:
                time.sleep(POLL_SECONDS)
            after()

    def recover(self) -> None:
        """Hand the running trials of dead processes to the living."""
        with orderly(self.study):
            self._recover()

    def _take(
        self, need: Callable[[Trials], Need], fresh: Callable[[Trials], FrozenTrial]
    ) -> tuple[Need, Trial | None]:
        """What is to be done; to begin, also a running trial of this process's own with all its parameters."""
        trial = None
        try:
            with exclusive(self.study):
                trials = self._recover()
                now = need(trials)
                if now != "begin":
                    return now, None
                if any(trial.state == TrialState.WAITING for trial in trials):
                    trial = self.study.ask(self.space)
                    trial.set_user_attr("worker", list(this_process()))
                else:
                    trial = self._begun(fresh(trials))
        except LockLost:  # another process may have counted the same trials
            if trial is not None:
                self._hand_on(self._stored(trial))
            return self._take(need, fresh)
        return now, trial

    def _begun(self, template: FrozenTrial) -> Trial:
        """A new trial of this process's own; in one transaction if all its parameters are known."""
        template.set_user_attr("worker", [*this_process(), next(_CLAIMS)])
        if template.params.keys() != self.space.keys():
            self.study.add_trial(template)
            return self.study.ask(self.space)
        template.state, template.datetime_start = TrialState.RUNNING, datetime.datetime.now()
        return Trial(self.study, self.study._storage.create_new_trial(self.study._study_id, template))

    def _evaluated(self, trial: Trial, evaluate: Callable[[Trial], Any]) -> Exception | None:
        """Evaluate a trial and store its end; gives the error of one that failed."""
        try:
            with self._beating(trial):
                values = evaluate(trial)
        except TrialPruned:
            self._tell(trial.number, state=TrialState.PRUNED)
        except UpdateFinishedTrialError:
            pass  # this process was taken for dead; another has the trial's configuration
        except (OSError, StorageInternalError, SQLAlchemyError):  # a disk or a database, not this trial
            with suppress(OSError, StorageInternalError, SQLAlchemyError):
                self._give_up(trial)
            raise
        except Exception as error:
            trial.set_user_attr("error", str(error).strip() or type(error).__name__)
            self._tell(trial.number, state=TrialState.FAIL)
            return error
        except BaseException:
            self._give_up(trial)
            raise
        else:
            told = self._tell(trial.number, values=values)
            if told and told.state == TrialState.FAIL and not told.user_attrs.get("interrupted"):
                return ValueError(f"a trial's values must be numbers; got {values!r}")
        return None

    def _give_up(self, trial: Trial) -> None:
        """Hand a trial of this process's own to the next."""
        with orderly(self.study):
            self._hand_on(self._stored(trial))

    def _tell(self, number: int, **end: Any) -> FrozenTrial | None:
        """End a trial, unless it has ended; gives it as it is then, None if that was while this looked."""
        with suppress(UpdateFinishedTrialError):  # between Optuna's look and its writing, or an answer was lost
            return self.study.tell(number, **end, skip_if_finished=True)
        return None

    @contextmanager
    def _beating(self, trial: Trial) -> Iterator[None]:
        """Inside, the trial shows a sign of life every BEAT_SECONDS."""
        ended = threading.Event()

        def beat() -> None:
            count = 0
            while not ended.wait(BEAT_SECONDS):
                count += 1
                try:
                    trial.set_user_attr("beat", count)
                except UpdateFinishedTrialError:
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _recover(self) -> Trials:
        """As `recover`, inside the exclusive section: a running trial there is somebody's or abandoned.

        Gives all trials as they are then.
        """
        trials = self.study.get_trials(deepcopy=False)
        dead = [trial for trial in trials if trial.state == TrialState.RUNNING and not self._lives(trial)]
        for trial in dead:
            self._hand_on(trial)
        return self.study.get_trials(deepcopy=False) if dead else trials

    def _lives(self, trial: FrozenTrial) -> bool:
        """Whether a running trial's process lives; this one has none while it looks for one."""
        worker = trial.user_attrs.get("worker", [])
        if not alive(trial) or tuple(worker[:3]) == this_process():
            return False
        if worker[0] == this_process()[0]:
            return True
        now, beat = time.monotonic(), trial.user_attrs.get("beat")
        seen, since = self._beats.setdefault(trial.number, (beat, now))
        if seen != beat:
            self._beats[trial.number] = (beat, now)
            return True
        # while the database was away nobody could show a sign of life
        return now - max(since, getattr(self.study._storage, "back", since)) < self.grace

    def _hand_on(self, trial: FrozenTrial) -> None:
        """End a running trial as interrupted; if its parameters are known, one like it waits for the next process."""
        try:
            self.study._storage.set_trial_user_attr(trial._trial_id, "interrupted", True)
        except UpdateFinishedTrialError:  # it has come to its end meanwhile
            return
        repeated = {other.user_attrs.get("retry_of") for other in self.study.get_trials(deepcopy=False)}
        if trial.params.keys() == self.space.keys() and trial.number not in repeated:
            kept = {key: trial.user_attrs[key] for key in KEPT if key in trial.user_attrs}
            self.study.add_trial(waiting_trial(self.space, trial.params, **kept, retry_of=trial.number))
        self._tell(trial.number, state=TrialState.FAIL)

    def _stored(self, trial: Trial) -> FrozenTrial:
        return self.study._storage.get_trial(trial._trial_id)


def alive(trial: FrozenTrial) -> bool:
    """Whether a running trial's process may be alive: it is there, or on another machine."""
    worker = trial.user_attrs.get("worker")
    if not isinstance(worker, list) or len(worker) < 3:
        return False
    machine, pid, started = worker[:3]
    return machine != this_process()[0] or _started(pid) == started


def this_process() -> tuple[str, int, float]:
    """Machine (or container), process id and when it started: no two processes are equal in all three."""
    return _process(os.getpid())


@lru_cache(1)
def _process(pid: int) -> tuple[str, int, float]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()  # hosts may share a name
        inside = f"{boot} {os.readlink('/proc/self/ns/pid')}"  # process ids mean nothing outside
    except OSError:
        inside = ""
    return f"{socket.gethostname()} {inside}".strip(), pid, _started(pid)


def _started(pid: int) -> float:
    """When a process of this machine started; 0 where there is none, or it has ended already.

    Linux: clock ticks since the machine started, which a change of its clock leaves alone; elsewhere seconds.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return 0.0
        with suppress(OSError):
            # behind the name, which may hold anything, starttime is the 20th number (proc(5))
            return float(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        return float(process.create_time())
    except psutil.Error:
        return 0.0


def exclusive(study: optuna.Study) -> AbstractContextManager[None]:
    """What one process at a time may be in, for a study; nothing where the study is of this process alone."""
    return exclusive_by_name(study._storage, study.study_name)


@contextmanager
def orderly(study: optuna.Study) -> Iterator[None]:
    """As `exclusive`, for what does no harm if done twice: a lock that was lost meanwhile is no error."""
    with orderly_by_name(study._storage, study.study_name):
        yield


@contextmanager
def orderly_by_name(storage: BaseStorage, name: str) -> Iterator[None]:
    """As `orderly`, for a study that may not exist yet."""
    with suppress(LockLost), exclusive_by_name(storage, name):
        yield


def exclusive_by_name(storage: BaseStorage, name: str) -> AbstractContextManager[None]:
    """As `exclusive`, for a study that may not exist yet."""
    return storage.exclusive(name) if isinstance(storage, SharedStorage) else nullcontext()
