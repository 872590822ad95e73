"""From a trial to its values: parameters -> allocation -> measurement -> values and attributes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from optuna import Trial, TrialPruned
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from mosaic_opt.allocation import Allocation, from_weights
from mosaic_opt.paired import hopeless

if TYPE_CHECKING:
    from mosaic_opt.evaluator import Measurement

MEASUREMENT = "measurement"  # trial attribute
Direction = Literal["minimize", "maximize"]
Measure = Callable[..., "Measurement"]  # (allocation, complete=False, after_batch=None), see Evaluator.evaluate


class Objective(ABC):
    """Callable for Optuna: suggests, decodes, measures, records.

    Args:
        measure: gives the measurement of an allocation, usually `Evaluator.evaluate`.
        layers: number of evictable layers.
        race: stop a measurement between batches once its scores are hopeless against the best completed trial that
            is as cheap (paired, see `paired.hopeless`). Such a trial is pruned and keeps its partial scores as
            `raced_scores`; it never has a score.
    """

    directions: tuple[Direction, ...]
    metric_names: tuple[str, ...]

    def __init__(self, *, measure: Measure, layers: int, race: bool = False) -> None:
        self.measure, self.layers, self.race = measure, layers, race

    @property
    @abstractmethod
    def space(self) -> Mapping[str, Any]:
        """Distributions of the parameters, one per layer, bottom first."""

    @abstractmethod
    def suggest(self, trial: Trial) -> dict[str, Any]:
        """Ask the trial for one parameter per layer, bottom first."""

    @abstractmethod
    def decode(self, params: dict[str, Any]) -> tuple[int, ...]:
        """Layer budgets in tokens that the parameters stand for."""

    def known(self, params: dict[str, Any]) -> dict[str, Any]:
        """Trial attributes that are known before anything is measured."""
        return {"budgets": list(self.decode(params))}

    @abstractmethod
    def values(self, trial: Trial, allocation: Allocation, measurement: Measurement) -> Any:
        """What Optuna is told."""

    def __call__(self, trial: Trial) -> Any:
        try:
            params = self.suggest(trial)
            for key, value in self.known(params).items():
                if key not in trial.user_attrs:
                    trial.set_user_attr(key, value)
            allocation = Allocation(self.decode(params))
            options = {"after_batch": self._referee(trial, allocation)} if self.race else {}
            measurement = self.measure(allocation, **options)
            for key, value in attributes(measurement).items():
                trial.set_user_attr(key, value)
            return self.values(trial, allocation, measurement)
        except (KeyboardInterrupt, SystemExit):
            trial.set_user_attr("interrupted", True)
            raise

    def _referee(self, trial: Trial, allocation: Allocation) -> Callable[[Mapping[int, float]], None] | None:
        """What ends the measurement of an allocation that cannot win any more; None without a rival."""
        rival = _rival(trial.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)), allocation)
        if rival is None:
            return None
        scores: Sequence[float] = measured(rival)["example_scores"]

        def after_batch(so_far: Mapping[int, float]) -> None:
            if hopeless(list(so_far.values()), [scores[index] for index in so_far], len(scores)):
                for key, value in {"raced_scores": dict(so_far), "raced_against": rival.number}.items():
                    trial.set_user_attr(key, value)
                raise TrialPruned(f"hopeless against trial {rival.number} after {len(so_far)} examples")

        return after_batch


def _rival(trials: Sequence[FrozenTrial], allocation: Allocation) -> FrozenTrial | None:
    """The best of the measured trials that keep no more pairs than this allocation."""
    cheap = [t for t in trials if is_measured(t) and measured(t)["mean_budget"] <= allocation.mean]
    return max(cheap, key=by_score, default=None)


def by_score(trial: FrozenTrial) -> tuple[float, float]:
    """What orders measured trials: the score, then the log-likelihood."""
    return measured(trial)["score"], measured(trial)["log_likelihood"]


class LevelObjective(Objective):
    """Stage 1: every layer takes one of a few levels; minimise the mean budget, maximise the score.

    Args:
        levels: budgets a layer can take, in tokens, rising.
        measured: see `Objective`.
    """

    directions: tuple[Direction, ...] = ("minimize", "maximize")
    metric_names = ("mean budget", "score")

    def __init__(self, *, levels: Sequence[int], **measured: Any) -> None:
        super().__init__(**measured)
        self.levels = tuple(levels)

    @property
    def space(self) -> dict[str, IntDistribution]:
        each = IntDistribution(0, len(self.levels) - 1)
        return dict.fromkeys(parameter_names("layer", self.layers), each)

    def suggest(self, trial: Trial) -> dict[str, int]:
        return {name: trial.suggest_int(name, one.low, one.high) for name, one in self.space.items()}

    def decode(self, params: dict[str, Any]) -> tuple[int, ...]:
        return tuple(self.levels[params[name]] for name in parameter_names("layer", self.layers))

    def encode(self, indices: Sequence[int]) -> dict[str, int]:
        """Parameters of an allocation given as level indices."""
        return dict(zip(parameter_names("layer", self.layers), map(int, indices), strict=True))

    def mean_budget(self, params: dict[str, Any]) -> float:
        """Objective 1, known before anything is measured."""
        budgets = self.decode(params)
        return sum(budgets) / len(budgets)

    def values(self, trial: Trial, allocation: Allocation, measurement: Measurement) -> tuple[float, float]:
        return allocation.mean, measurement.score


class WeightObjective(Objective):
    """Stage 4: weights decoded to one exact mean budget; maximise the score.

    The constraint (mean budget minus the target, feasible at <= 0) is recorded with each trial: every decoded
    trial meets it, an imported one may not.

    Args:
        budget: target mean budget in tokens.
        floor, cap: bounds of a layer budget in tokens.
        measured: see `Objective`.
    """

    directions: tuple[Direction, ...] = ("maximize",)
    metric_names = ("score",)

    def __init__(self, *, budget: int, floor: int, cap: int, **measured: Any) -> None:
        super().__init__(**measured)
        self.budget, self.floor, self.cap = budget, floor, cap

    @property
    def space(self) -> dict[str, FloatDistribution]:
        return dict.fromkeys(parameter_names("weight", self.layers), FloatDistribution(0.0, 1.0))

    def suggest(self, trial: Trial) -> dict[str, float]:
        return {name: trial.suggest_float(name, one.low, one.high) for name, one in self.space.items()}

    def decode(self, params: dict[str, Any]) -> tuple[int, ...]:
        weights = [params[name] for name in parameter_names("weight", self.layers)]
        return from_weights(weights, self.budget, floor=self.floor, cap=self.cap, base=self.floor).budgets

    def encode(self, allocation: Allocation) -> dict[str, float]:
        """Weights that decode to this allocation, up to rounding, if its mean is the target."""
        beyond = [max(0, budget - self.floor) for budget in allocation.budgets]
        largest = max(beyond) or 1
        return {
            name: value / largest for name, value in zip(parameter_names("weight", self.layers), beyond, strict=True)
        }

    def values(self, trial: Trial, allocation: Allocation, measurement: Measurement) -> float:
        over = allocation.mean - self.budget
        trial.set_constraint("mean_budget", over)
        # optuna-dashboard 0.21 reads the older list only; Optuna reads both
        trial.storage.set_trial_system_attr(trial._trial_id, "constraints", [over])
        return measurement.score


def parameter_names(prefix: str, layers: int) -> list[str]:
    """`layer_00`, `layer_01` ...: as many digits as the last needs, at least two."""
    digits = max(2, len(str(layers - 1)))
    return [f"{prefix}_{layer:0{digits}d}" for layer in range(layers)]


def attributes(measurement: Measurement, *, outputs: bool = False) -> dict[str, Any]:
    """Trial attributes of a measurement, JSON-serialisable.

    As few as can be, each is a transaction: the log-likelihood, which a sampler reads, and all the rest in one.
    """
    recorded: dict[str, Any] = {
        "score": measurement.score,
        "mean_budget": measurement.mean_budget,
        "realised_mean": measurement.realised_mean,
        "kv_bytes": measurement.kv_bytes,
        "example_scores": list(measurement.scores),
        "example_log_likelihoods": list(measurement.log_likelihoods),
        "seconds": measurement.seconds,
    }
    if len(set(measurement.tasks)) > 1:
        recorded["task_scores"] = measurement.task_scores
    if outputs:
        recorded["outputs"] = list(measurement.outputs)
    return {"log_likelihood": measurement.log_likelihood, MEASUREMENT: recorded}


def is_measured(trial: FrozenTrial) -> bool:
    """Whether a trial's allocation was measured here; an imported one's was not."""
    return (
        trial.state == TrialState.COMPLETE and {"budgets", "log_likelihood", MEASUREMENT} <= trial.user_attrs.keys()
    )


def measured(trial: FrozenTrial) -> dict[str, Any]:
    """What a completed trial's attributes say: `budgets`, `log_likelihood` and all that is in its measurement."""
    recorded = trial.user_attrs
    return {"budgets": recorded["budgets"], "log_likelihood": recorded["log_likelihood"], **recorded[MEASUREMENT]}
