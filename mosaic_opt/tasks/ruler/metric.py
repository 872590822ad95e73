"""RULER's metrics (Hsieh et al., 2024, arXiv:2404.06654, appendix): case-insensitive substring matches."""

from __future__ import annotations

import re
from collections.abc import Sequence

MATCH_ALL, MATCH_PART = "string_match_all", "string_match_part"

# Metric by task name in RULER: `all` is the share of references found, `part` is 1 if any is.
METRICS = {
    **{f"niah_{kind}_{number}": MATCH_ALL for kind in ("single", "multikey") for number in (1, 2, 3)},
    **dict.fromkeys(("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"), MATCH_ALL),
    **dict.fromkeys(("qa_1", "qa_2"), MATCH_PART),
}

# RULER's generation limits, for rows of its files, which do not name them.
NEW_TOKENS = {**dict.fromkeys(METRICS, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(task: str, prediction: str, references: Sequence[str]) -> float:
    """RULER's score of one prediction, from 0 to 1.

    task: a key of METRICS.
    prediction: the generated text; control characters count as newlines.
    references: at least one, none empty.
    """
    if task not in METRICS:
        raise ValueError(f"task must be one of {', '.join(METRICS)}, got {task!r}")
    if not references or not all(references):
        raise ValueError(f"references must be non-empty texts, got {list(references)!r}")
    text = _normalised(prediction)
    found = [reference.lower() in text for reference in references]
    return float(any(found)) if METRICS[task] == MATCH_PART else sum(found) / len(found)


def settled(prediction: str, references: Sequence[str], reach: Sequence[float], *, metric: str = MATCH_ALL) -> bool:
    """Whether no continuation of the prediction can change its score (see `Task.settled`).

    What was found stays found, so this is known once every reference is found or out of reach; under
    `string_match_part` one that is found is enough.
    """
    text = _normalised(prediction)
    lowered = [reference.lower() for reference in references]
    found = [reference in text for reference in lowered]
    if metric == MATCH_PART and any(found):
        return True
    return all(
        known or _begun(text, reference) + more < len(reference)
        for known, reference, more in zip(found, lowered, reach, strict=True)
    )


def _begun(text: str, reference: str) -> int:
    """Length of the longest end of `text` with which `reference` begins."""
    return next(n for n in range(len(reference), -1, -1) if text.endswith(reference[:n]))


def _normalised(prediction: str) -> str:
    return _CONTROL.sub("\n", prediction).lower()
