"""MosaicSampler: the Optuna side of the classifier-guided sampler; the algorithm is in proposal.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from .labels import bounded, break_ties
from .pareto import losses
from .proposal import Description, Observations, Proposer, Taken
from .space import Space, shared_space

Floats = npt.NDArray[np.float64]
Decode = Callable[[dict[str, Any]], Sequence[float]]
KnownObjective = Callable[[dict[str, Any]], float]

CLAIM = "mosaic:claim"  # system attribute: the parameters a running trial was given, before it has set them
CLAIMS = 8  # proposals for one trial, at most, where other workers claim the same
LARGEST = 1e100  # signals beyond this are taken for none


class MosaicSampler(BaseSampler):
    """Proposes what a classifier, fitted on the trials so far, takes for most probably good.

    For one objective or several, any directions, on Int, Float and Categorical parameters. It keeps no state:
    every proposal is a function of the seed, the number of earlier trials and the set of stored trials,
    whatever their order. A trial with the user attribute `interrupted` is as if it had never been; the
    configuration of any other trial (complete, failed, pruned, running, or enqueued) is not proposed again
    while an untried one can be found. Running and enqueued trials are pending: they count as if they had
    given what the surrogate expects of them, are bad examples for the classifier, and nothing close to them is
    proposed; two workers that come upon the same point at the same moment both think again. Trials that
    violate a constraint (see `Trial.set_constraint`) come after all feasible ones; an infinite value counts as
    one just beyond the finite ones. What a trial was enqueued with stays as it is and the rest is proposed to go
    with it. Parameters that only some trials have are drawn at random; where there are any, the others may come
    again. The user attribute `origin` of each trial says where its proposal came from: lhs, surrogate, classifier
    or random.

    Args:
        seed: at least 0.
        decode: the numbers that the parameters stand for. Equal numbers (to nine decimals) are one
            configuration, and they are what the classifier sees. Default: the parameters, scaled to 0..1.
        known_objective: the exact value of objective 0 before the evaluation (two objectives or more).
        signal: user attribute (a float, higher is better) that breaks ties of the last objective, the score, and
            that the surrogate is fitted to; where trials have none, the surrogate is fitted to the score, on the
            scale that suits it best.
        search_space: the whole space, if known, so that the first trial is joint, too, and thousands of
            stored trials need not be compared; default: what all complete trials have in common.
        n_startup_trials: size of the Latin hypercube, used while fewer trials are complete.
        exploration: share of proposals that are random or mutate a front member at random.
        structured: share of the others that a surrogate of the signal proposes (see surrogate.py), where it can:
            two objectives, `decode` gives one number >= 0 for each integer parameter, rising with it, and
            `known_objective` rises with them.
        n_candidates: population of the differential evolution, at least 16.
        n_generations: its generations, at least 0.
        n_observations: the classifier learns from at most so many trials, at least 16.
    """

    def __init__(
        self,
        *,
        seed: int,
        decode: Decode | None = None,
        known_objective: KnownObjective | None = None,
        signal: str | None = None,
        search_space: Mapping[str, BaseDistribution] | None = None,
        n_startup_trials: int = 10,
        exploration: float = 0.05,
        structured: float = 0.75,
        n_candidates: int = 64,
        n_generations: int = 12,
        n_observations: int = 600,
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
        if n_startup_trials < 1:
            raise ValueError(f"n_startup_trials must be at least 1, got {n_startup_trials}")
        self._seed = seed
        self._decode = decode
        self._known_objective = known_objective
        self._signal = signal
        self._search_space = None if search_space is None else dict(sorted(search_space.items()))
        self._n_startup_trials = n_startup_trials
        self._proposer = Proposer(
            exploration=exploration,
            structured=structured,
            n_candidates=n_candidates,
            n_generations=n_generations,
            n_observations=n_observations,
        )

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The space given at construction, or what the complete trials share: all parameters are joint."""
        if self._search_space is not None:
            return dict(self._search_space)
        return shared_space([t for t in other_trials(study, trial) if t.state == TrialState.COMPLETE])

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Plain Python values for every parameter of the space."""
        if not search_space:
            return {}
        space, describe = self._described(study, search_space, trial.system_attrs.get("fixed_params", {}))
        trials = other_trials(study, trial)
        count = earlier(trials, trial)
        rng = np.random.default_rng([self._seed, count])
        units, seen = _stored(space, trials)
        for attempt in range(CLAIMS):
            # workers that think again in step would go on meeting: from the second time on each goes its own way
            row, origin = self._propose(study, units, seen, count, describe, rng, explore=attempt > 1)
            parameters = space.parameters(row[None])[0]
            space.check(parameters)
            study._storage.set_trial_system_attr(trial._trial_id, CLAIM, parameters)
            known = {(t.number, row.tobytes()) for t, row in zip(seen, units, strict=True)}
            units, seen = _stored(space, other_trials(study, trial))
            # other workers' claims may have come or changed meanwhile
            new = units[[(t.number, row.tobytes()) not in known for t, row in zip(seen, units, strict=True)]]
            if Taken.of(new, describe(new)).free(row[None], describe(row[None]).keys).all():
                break
        _record_origin(study, trial, origin)
        return parameters

    def propose(self, study: Study, search_space: Mapping[str, BaseDistribution]) -> tuple[dict[str, Any], str]:
        """Parameters for a trial that the study does not have yet, and their origin; nothing is written.

        What `sample_relative` would give the study's next trial, for callers who see to it that one process at a time
        proposes and adds.
        """
        space, describe = self._described(study, search_space, {})
        trials = other_trials(study)
        units, seen = _stored(space, trials)
        rng = np.random.default_rng([self._seed, len(trials)])
        row, origin = self._propose(study, units, seen, len(trials), describe, rng, explore=False)
        (parameters,) = space.parameters(row[None])
        space.check(parameters)
        return parameters, origin

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A uniform value for a parameter outside the joint space; its generator also depends on the name."""
        count = earlier(other_trials(study, trial), trial)
        seed = np.random.SeedSequence([self._seed, count, crc32(param_name.encode())]).generate_state(1)[0]
        _record_origin(study, trial, "random")
        return RandomSampler(seed=int(seed)).sample_independent(study, trial, param_name, param_distribution)

    def _propose(
        self,
        study: Study,
        units: Floats,
        seen: Sequence[FrozenTrial],
        count: int,
        describe: "_Describer",
        rng: np.random.Generator,
        *,
        explore: bool,
    ) -> tuple[Floats, str]:
        """Snapped units (d,) for a trial with `count` earlier ones, given the trials seen, and their origin."""
        described = describe(units)
        pending = [i for i, t in enumerate(seen) if not t.state.is_finished()]
        # further parameters make equal rows different configurations
        whole = all(t.params.keys() <= describe.space.distributions.keys() for t in seen)
        taken = Taken(frozenset(described.keys if whole else ()), units[pending], described.take(pending))
        usable = [i for i, t in enumerate(seen) if t.state == TrialState.COMPLETE and not np.isnan(t.values).any()]
        if len(usable) < self._n_startup_trials:
            return self._startup(describe, taken, count, rng)
        observed = self._observe(study, described.take(usable), units[usable], [seen[i] for i in usable])
        return self._proposer.propose(observed, describe, taken, describe.space.box, rng, explore=explore)

    def _described(
        self, study: Study, search_space: Mapping[str, BaseDistribution], fixed: Mapping[str, Any]
    ) -> tuple[Space, "_Describer"]:
        """The space, and the describer of the part of it where some parameters are fixed."""
        if self._known_objective is not None and len(study.directions) < 2:
            raise ValueError(f"known_objective needs a study of at least 2 objectives, got {len(study.directions)}")
        space = Space(dict(search_space))
        return space, _Describer(space.pinned(fixed), self._decode, self._known_objective, _sign(study))

    def _startup(
        self, describe: "_Describer", taken: Taken, count: int, rng: np.random.Generator
    ) -> tuple[Floats, str]:
        """The next untried row of the Latin hypercube, which depends on the seed only; else a random one."""
        box = describe.space.box
        design = box.latin_hypercube(self._n_startup_trials, np.random.default_rng(self._seed))
        design = np.roll(design, -count, axis=0)
        free = np.flatnonzero(taken.free(design, describe(design).keys))
        if len(free):
            return design[free[0]], "lhs"
        return self._proposer.untried(describe, taken, box, rng), "random"

    def _observe(
        self, study: Study, description: Description, units: Floats, trials: Sequence[FrozenTrial]
    ) -> Observations:
        """The usable trials as arrays in an order that does not depend on their numbers."""
        values = bounded(losses([t.values for t in trials], [d.name.lower() for d in study.directions]))
        signal = np.array([_number(t.user_attrs.get(self._signal or "")) for t in trials])
        violation = np.array([sum(max(0.0, c) for c in t.constraints.values()) for t in trials])
        order = np.lexsort((signal, violation, *values.T, *units.T, *description.features.T))
        smooth = signal[order] if np.isfinite(signal).all() else None
        if self._signal is not None:
            values[:, -1] = break_ties(values[:, -1], signal)
        return Observations(units[order], description.features[order], values[order], smooth, violation[order])


class _Describer:
    """What rows of units stand for; decodes each configuration once in its life of one proposal."""

    def __init__(
        self, space: Space, decode: Decode | None, known_objective: KnownObjective | None, sign: float
    ) -> None:
        self.space, self._decode, self._known_objective, self._sign = space, decode, known_objective, sign
        self._memory: dict[bytes, tuple[Floats, float]] = {}

    def __call__(self, units: Floats) -> Description:
        """Description of snapped units (n, d); the known loss, if any, is also the last feature."""
        keys = _keys(units)
        if self._decode is None and self._known_objective is None:
            return Description(self.space.box.features(units), keys, None)
        self._remember(keys, units)
        vectors = np.array([self._memory[key][0] for key in keys])
        known = np.array([self._memory[key][1] for key in keys])
        features = self.space.box.features(units) if self._decode is None else vectors
        if self._decode is not None:
            keys = _keys(vectors)
        if self._known_objective is None:
            return Description(features, keys, None)
        return Description(np.column_stack([features, known]), keys, known)

    def _remember(self, keys: Sequence[bytes], units: Floats) -> None:
        new = {key: i for i, key in enumerate(keys) if key not in self._memory}
        parameters = self.space.parameters(units[list(new.values())])
        for key, configuration in zip(new, parameters, strict=True):
            try:
                vector = np.array([] if self._decode is None else self._decode(configuration), dtype=float)
                known = 0.0 if self._known_objective is None else self._sign * self._known_objective(configuration)
            except KeyError as error:
                raise ValueError(
                    f"decode and known_objective must do with the parameters that all complete trials share, "
                    f"{list(configuration)}; {error} is none of them: give search_space, and fix no parameter"
                ) from error
            if vector.ndim != 1 or not (np.isfinite(vector).all() and np.isfinite(known)):
                raise ValueError(
                    f"decode must give a sequence of finite numbers, known_objective one, got {vector} and {known}"
                )
            self._memory[key] = vector, known


def _keys(rows: Floats) -> list[bytes]:
    """One hashable key a row, equal where all numbers are equal to nine decimals."""
    # adding zero drops the sign of -0
    return [row.tobytes() for row in np.round(rows, 9) + 0.0]


def other_trials(study: Study, trial: FrozenTrial | None = None) -> list[FrozenTrial]:
    """All trials but this one, if given, and those tagged as interrupted."""
    number = None if trial is None else trial.number
    trials = study.get_trials(deepcopy=False)
    return [t for t in trials if t.number != number and not t.user_attrs.get("interrupted")]


def earlier(trials: Sequence[FrozenTrial], trial: FrozenTrial) -> int:
    """How many of the other trials were begun before this one."""
    return sum(t.number < trial.number for t in trials)


def _stored(space: Space, trials: Sequence[FrozenTrial]) -> tuple[Floats, list[FrozenTrial]]:
    """Units (n, d) of the trials that lie wholly in the space, and these trials.

    A trial that has not set its parameters yet counts with those it was given.
    """
    given = [{**t.system_attrs.get(CLAIM, {}), **t.system_attrs.get("fixed_params", {})} for t in trials]
    units, kept = space.units([{**known, **t.params} for known, t in zip(given, trials, strict=True)])
    return units, [trials[i] for i in kept]


def _sign(study: Study) -> float:
    return -1.0 if study.directions[0] == StudyDirection.MAXIMIZE else 1.0


def _number(value: Any) -> float:
    """A float from a user attribute; NaN for anything else, and for numbers too large to be squared."""
    number = float(value) if isinstance(value, int | float | np.integer | np.floating) else float("nan")
    return number if abs(number) < LARGEST else float("nan")


def _record_origin(study: Study, trial: FrozenTrial, origin: str) -> None:
    """Store where a proposal came from, unless somebody (who enqueued the trial, say) already has."""
    storage = study._storage
    if "origin" not in storage.get_trial(trial._trial_id).user_attrs:
        storage.set_trial_user_attr(trial._trial_id, "origin", origin)
