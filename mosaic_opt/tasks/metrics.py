"""Metrics: functions of a prediction, its references and a row's classes, from 0 to 1, best over the references.

The numbers are those of LongBench's scorer (Bai et al., 2024, arXiv:2308.14508) and RULER's. Every function takes
`answers` (at least one) and `classes` (used by `classification` alone); an empty prediction is allowed.
"""

from __future__ import annotations

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mosaic_opt.tasks import ruler

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]")
# What LongBench leaves out of Chinese tokens: ASCII punctuation, full-width forms (but not U+FF0E), and these of the
# general and CJK punctuation (U+300A, which opens a title, is not among them; U+300B, which closes it, is).
_PUNCTUATION_ZH = re.compile(
    f"[{re.escape(string.punctuation)}\uff01-\uff0d\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff64"
    "\u3001-\u3003\u300b-\u3011\u3014-\u301f\u3030\u303e\u303f\u2013\u2014\u2018\u2019\u201b-\u201f\u2026\u2027\ufe4f]"
)
_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_PARAGRAPH_ZH = re.compile(r"段落(\d+)")
NO_CODE = ("`", "#", "//")  # in a line that code similarity passes over


def f1(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """F1 of the words that both have, counted as often as they occur; case, punctuation and articles left out."""
    words = _words(prediction)
    return max(_overlap(words, _words(answer)) for answer in answers)


def f1_zh(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """F1 of the jieba tokens that both have; case, punctuation and white space left out."""
    tokens = _tokens_zh(prediction)
    return max(_overlap(tokens, _tokens_zh(answer)) for answer in answers)


def rouge_l(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """ROUGE-L as the package `rouge` 1.0.1 has it, without its recursion; 0 where a text has no sentence.

    Texts are split at '.'; the words found are those of a longest common subsequence of any sentence of the one with
    any of the other. Words are case-sensitive and counted once: precision and recall are shares of the sets of words.
    """
    return max(_rouge_l(prediction, answer) for answer in answers)


def rouge_l_zh(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """ROUGE-L of jieba tokens; the sentences still end at '.' alone."""
    return rouge_l(" ".join(_cut(prediction)), [" ".join(_cut(answer)) for answer in answers])


def classification(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 / number of class names found in the prediction if the answer is among them, else 0.

    classes: the names to look for; none: the answer alone.
    """
    return max(_classified(prediction, answer, classes or (answer,)) for answer in answers)


def retrieval(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Share of the prediction's numbers that equal the answer's in "Paragraph 12"; see `count`."""
    return count(prediction, [_first(_PARAGRAPH, answer) for answer in answers])


def retrieval_zh(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Share of the prediction's numbers that equal the answer's in "段落12"; see `count`."""
    return count(prediction, [_first(_PARAGRAPH_ZH, answer) for answer in answers])


def count(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Share of the prediction's numbers (runs of digits) that equal the answer; 0 where it has none."""
    numbers = _NUMBER.findall(prediction)
    return max(numbers.count(answer) for answer in answers) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Edit similarity of the prediction's first line of code to the answer, in whole hundredths.

    The line is the first without '`', '#' or '//' after the leading newlines; none: an empty line. The similarity is
    that of insertions and deletions, 1 - distance / (sum of both lengths), as fuzzywuzzy has it.
    """
    from rapidfuzz import fuzz

    line = next(filter(is_code, prediction.lstrip("\n").split("\n")), "")
    return max(round(fuzz.ratio(line, answer)) / 100 if line else 0.0 for answer in answers)


def has_code_line(prediction: str) -> bool:
    """Whether the line that `code_similarity` takes is complete, so that what follows cannot matter."""
    return any(map(is_code, prediction.lstrip("\n").split("\n")[:-1]))


def string_match_all(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER: share of the answers found in the prediction, whatever the case."""
    return ruler.score("vt", prediction, answers)


def string_match_part(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """RULER: 1 if any of the answers is found in the prediction, whatever the case."""
    return ruler.score("qa_1", prediction, answers)


def exact_match(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 if the whole prediction equals an answer, white space around both left out."""
    return float(prediction.strip() in [answer.strip() for answer in answers])


METRICS: dict[str, Callable[[str, Sequence[str], Sequence[str]], float]] = {
    metric.__name__: metric
    for metric in (
        f1,
        f1_zh,
        rouge_l,
        rouge_l_zh,
        classification,
        retrieval,
        retrieval_zh,
        count,
        code_similarity,
        string_match_all,
        string_match_part,
        exact_match,
    )
}


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split()


def _tokens_zh(text: str) -> list[str]:
    tokens = ("".join(_PUNCTUATION_ZH.sub("", token.lower()).split()) for token in _cut(text))
    return [token for token in tokens if token]


def _overlap(predicted: Sequence[str], gold: Sequence[str]) -> float:
    common = (Counter(predicted) & Counter(gold)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _rouge_l(prediction: str, answer: str) -> float:
    predicted, gold = _sentences(prediction), _sentences(answer)
    if not predicted or not gold:
        return 0.0
    identity: dict[str, int] = {}
    ids = [
        [np.array([identity.setdefault(word, len(identity)) for word in sentence]) for sentence in text]
        for text in (predicted, gold)
    ]
    found = {word for reference in ids[1] for sentence in ids[0] for word in _common(reference, sentence)}
    precision, recall = (len(found) / len(set(np.concatenate(text).tolist())) for text in ids)
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    """Words of each part between full stops; a part of white space alone is one empty word, an empty part nothing."""
    return [part.split() or [""] for part in text.split(".") if part]


def _common(reference: NDArray[np.int64], sentence: NDArray[np.int64]) -> set[int]:
    """The words of one longest common subsequence.

    There may be several: going back from both ends a shared word is always taken, and else a word of `sentence` is
    left out, unless leaving out one of `reference` keeps strictly more. Memory: a byte for each pair of words.
    """
    length = np.zeros(len(sentence) + 1, np.int64)  # of the subsequence with each beginning of `sentence`
    upward = np.empty((len(reference), len(sentence)), bool)
    for row, word in enumerate(reference):
        longer = np.where(sentence == word, length[:-1] + 1, length[1:])
        before, length = length, np.concatenate(([0], np.maximum.accumulate(longer)))
        upward[row] = before[1:] > length[:-1]
    found = set()
    i, j = len(reference) - 1, len(sentence) - 1
    while i >= 0 and j >= 0:
        if reference[i] == sentence[j]:
            found.add(int(reference[i]))
            i, j = i - 1, j - 1
        elif upward[i, j]:
            i -= 1
        else:
            j -= 1
    return found


def _classified(prediction: str, answer: str, classes: Sequence[str]) -> float:
    found = [name for name in classes if name in prediction]
    # LongBench removes from the list that it goes through, and so passes over the name after a removed one. Kept for
    # equal scores; it matters only where two names found in a row are both part of the answer.
    for name in found:
        if name in answer and name != answer:
            found.remove(name)
    return 1 / len(found) if answer in found else 0.0


def _first(pattern: re.Pattern[str], answer: str) -> str:
    """The number that the pattern finds; the whole answer where it finds none."""
    match = pattern.search(answer)
    return match.group(1) if match else answer.strip()


def is_code(line: str) -> bool:
    """Whether `code_similarity` takes a line for code."""
    return not any(mark in line for mark in NO_CODE)


def _cut(text: str) -> list[str]:
    return list(_segmenter().cut(text))


@cache
def _segmenter() -> Any:
    """A jieba tokenizer whose dictionary is read from the package: no cache file, no log."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its regular expressions, and pkg_resources
        import jieba
    segmenter = jieba.Tokenizer()
    segmenter.FREQ, segmenter.total = segmenter.gen_pfdict(segmenter.get_dict_file())
    segmenter.initialized = True
    return segmenter
