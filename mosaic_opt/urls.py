"""Storage URLs as text: their forms, where they come from, and what is shown of them; nothing is opened here."""

from __future__ import annotations

import re

URL_VARIABLE = "MOSAIC_STORAGE_URL"
KINDS = "sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE or journal:///FILE"
_PASSWORDS = (  # before the last @ of a URL, and in its query
    (re.compile(r"(?<=://)([^\s:/@'\"]*):[^\s'\"]*@"), r"\1:***@"),
    (re.compile(r"([?&](?:ssl)?password=)[^&\s'\"]*"), r"\1***"),
)


def hidden(text: str) -> str:
    """A text with the password of every URL in it replaced."""
    for pattern, shown in _PASSWORDS:
        text = pattern.sub(shown, text)
    return text
