"""Write the shipped haystack from the plain text of the Jargon File.

    python analysis/haystack.py jargon.txt mosaic_opt/tasks/data/haystack.txt

The source (public domain) is `usr/share/doc/jargon-text/jargon.txt.gz` of the Debian package `jargon-text`,
unzipped. The output has one paragraph a line: ASCII, whole sentences, prose only. The same input gives the
same output, byte for byte; `mosaic_opt/tasks/data/README.md` says what the rules are for.
"""

from __future__ import annotations

import argparse
import codecs
import re
from pathlib import Path

MAX_BYTES = 1_000_000
MIN_WORDS = 20
# fmt: off
TO_ASCII = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": " - ", "–": "-", "…": "...", "\u00a0": " ", "×": "x"}
    | {"é": "e", "è": "e", "ê": "e", "à": "a", "ä": "a", "å": "a", "ö": "o", "ü": "u", "ï": "i"}
    | {"ç": "c", "ñ": "n"}
)
# fmt: on
SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')]))\s+(?=["'(]?[A-Z])""")
# A sentence that only points elsewhere means nothing without the dictionary around it.
CROSS_REFERENCE = re.compile(
    r"^\W*(?:see|compare|contrast|cf\.?|opposite|oppose|antonym|syn\.?|also|now see)\b", re.I
)
# Markup, code, addresses and tables; a long number could pass for a needle's value.
NOT_PROSE = re.compile(r"[{}\[\]<>|\\^~_*=+#$%@&/`]|https?:|www\.|\d{5}|\d,\d{3}|--|\.\.\.\.|\.(?:com|org|net|edu)\b")
DICTIONARY_TALK = re.compile(r"\b(?:usu|esp|prob|syn|vi|vt|adj|obs|abbrev|var)\.|\bcf\b|this (?:entry|lexicon)", re.I)
# Paragraphs with these stems are dropped; in ROT13, so that this file does not show them.
UNWANTED = re.compile(
    r"\b(?:"
    + codecs.decode(
        "shpx|fuvg|ohyyfuvg|nff|nffubyr|nefr|ovgpu|onfgneq|phag|qvpx|cravf|intvan|gvg|obbo|pbpx|chffl|juber|fyhg|"
        "encr|encvfg|frk|cbea|betnfz|znfgheong|pbaqbz|ahqr|anxrq|avttre|avtte|wnc|wncf|snt|snttbg|ergneq|fcvpx|xvxr|"
        "pbba|tlc|tlccrq|ubzb|anmv|uvgyre|snfpvfz|snfpvfg|ubybpnhfg|fhvpvqr|xvyy|zheqre|qenc|cvff|penc|qnza|"
        "uryy|srpny|srprf|ghq|gheq|fang|fabg|jnax|enpvfz|enpvfg|urebva|pbpnvar|znevwhnan|yfq|qeht|"
        "greebe|obzo|puvax|qntb|fynir|pergva|pergvabhf|cebfgvghgr|rerpgvba|rebgvp|zbeba|vqvbg|"
        "ohttre|fjrne|bofprar|ibzvg|chxr|encvat|zbyrfg|gbegher|cvzc|qbhpur|wrex|fhpx|fperj|cbeabtencu|"
        "oybbql|pevccyr|pevccyrjner|nany",
        "rot13",
    )
    + r")(?:s|es|ed|er|ers|ing|y|ly|ic|ism|ist|ists|ual|ually|uality|ish|head|heads|ness|up)?\b",
    re.I,
)


def paragraphs(source: str) -> list[str]:
    """Blocks between blank lines, each joined to one line; headings and tables among them."""
    blocks = re.split(r"\n\s*\n", source)
    return [" ".join(line.strip() for line in block.splitlines()) for block in blocks]


def to_plain(paragraph: str) -> str:
    """ASCII punctuation, spaces folded; no cross-reference braces, etymology or sense number."""
    text = paragraph.translate(TO_ASCII)
    text = re.sub(r"^(?:\d+\.|\[[^\]]*\]|\([a-z]\))\s*", "", text.strip())
    text = re.sub(r"^\[[^\]]*\]\s*", "", text)
    text = re.sub(r"\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\(\s*(?:see|also|compare|cf)\b[^()]*\)", "", text, flags=re.I)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"\s+([,.;:!?])", r"\1", text)


def clean(paragraph: str) -> str | None:
    """The paragraph's prose as whole sentences, or None where it is not plain prose."""
    text = to_plain(paragraph)
    if not text.isascii() or UNWANTED.search(text) or text.startswith(":"):
        return None
    kept = [s for s in SENTENCE_END.split(text) if not (CROSS_REFERENCE.match(s) or DICTIONARY_TALK.search(s))]
    text = " ".join(kept)
    if NOT_PROSE.search(text) or len(text.split()) < MIN_WORDS:
        return None
    if not re.match(r"""["'(]?[A-Z]""", text) or not re.search(r"""[.!?]["')]?$""", text):
        return None
    balanced = text.count("(") == text.count(")") and text.count('"') % 2 == 0
    return text if balanced else None


def haystack(source: str) -> str:
    """Clean paragraphs in order, one a line, at most MAX_BYTES bytes; none repeats an earlier sentence."""
    lines: list[str] = []
    seen: set[str] = set()
    size = 0
    for text in filter(None, map(clean, paragraphs(source))):
        sentences = SENTENCE_END.split(text)
        if seen.intersection(sentences) or size + len(text) + 1 > MAX_BYTES:
            continue
        seen.update(sentences)
        lines.append(text)
        size += len(text) + 1
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the Jargon File as plain text (UTF-8)")
    parser.add_argument("target", type=Path, help="the haystack file to write")
    arguments = parser.parse_args()
    text = haystack(arguments.source.read_text(encoding="utf-8"))
    arguments.target.write_text(text, encoding="ascii")
    print(f"{arguments.target}: {len(text)} bytes, {text.count(chr(10))} paragraphs")


if __name__ == "__main__":
    main()
