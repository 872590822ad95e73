"""Two allocations on the same examples: differences shrunk against the winner's curse, and hopeless candidates.

Examples differ far more in difficulty than good allocations do, so scores are compared example by example.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

HOPELESS = 2.5  # standard errors by which a candidate must be out of reach


def shrunk(scores: npt.ArrayLike, reference: npt.ArrayLike) -> Floats:
    """Expected true gains (k,) of candidates over a reference, given their scores on the same examples.

    The best of several noisy means is too good on average. The mean gain of all candidates is kept as it is, since
    nothing was chosen there; the candidates' deviations from it, paired too, are drawn to zero, the more the noisier
    they are beside their spread (empirical Bayes, Efron and Morris 1975; spread by the method of moments). One
    share for all, so the order of the candidates stays that of their means.

    Args:
        scores: (k, n) of k candidates on n examples.
        reference: (n,) of the reference on the same examples.
    """
    measured = np.asarray(scores, dtype=float)
    if measured.ndim != 2 or not measured.size:
        raise ValueError(f"scores must have shape (candidates, examples), both at least 1; got {measured.shape}")
    k, n = measured.shape
    if np.shape(reference) != (n,):
        raise ValueError(f"reference must have shape ({n},), one an example, got {np.shape(reference)}")
    all_gained = float((measured - np.asarray(reference, dtype=float)).mean())
    deviations = measured - measured.mean(axis=0)
    means = deviations.mean(axis=1)
    if n == 1 or not deviations.any():
        return all_gained + means
    error = float(deviations.var(axis=1, ddof=1).mean()) / n
    spread = max(0.0, float(means @ means) / (k - 1) - error)
    share = spread / (spread + error) if spread + error > 0 else 0.0
    return np.asarray(all_gained + means * share)


def hopeless(scores: npt.ArrayLike, rival: npt.ArrayLike, examples: int) -> bool:
    """Whether a candidate, judged by its first examples, will almost surely end below a rival.

    The rest is predicted from the differences so far with one further, undecided example (difference 0, variance
    1) for caution; out of reach means by HOPELESS standard errors.

    Args:
        scores: (m,) of the candidate on the first examples.
        rival: (m,) of the rival on the same.
        examples: number of all examples, at least m.
    """
    if np.ndim(scores) != 1 or np.shape(scores) != np.shape(rival) or np.size(scores) > examples:
        shapes = f"{np.shape(scores)} and {np.shape(rival)}"
        raise ValueError(f"scores and rival must have the same length, at most {examples}, got shapes {shapes}")
    differences = np.asarray(scores, dtype=float) - np.asarray(rival, dtype=float)
    m, left = len(differences), examples - len(differences)
    mean = differences.sum() / (m + 1)
    variance = (((differences - mean) ** 2).sum() + 1) / (m + 1)
    error = np.sqrt(variance * left * (1 + left / (m + 1)))
    return bool(differences.sum() + left * mean + HOPELESS * error < 0)
