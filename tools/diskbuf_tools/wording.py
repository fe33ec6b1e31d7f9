"""The package's advice in the words of the command line: it names arguments and functions of Python, not options."""

import re

# What the package says, and what the shell calls that; the longer ones first.
_WORDS = (
    (r" ?Check the path; diskbuf\.UniformReplayBuffer\(\.\.\., path=\.\.\.\) makes a store\.", " Check the path."),
    (
        r"Close that (?:one|buffer), or read the store with diskbuf\.open\(path\)",
        "End it first; what only reads works meanwhile",
    ),
    (r"or open with mode='r'", "or wait until it ends"),
    (r"Give lanes=1 to put", "Give --one-lane to put"),
    (r"pass storage_options\b", "pass --storage-option KEY=VALUE"),
    (r"\bdestination_storage_options\b", "--destination-option"),
    (r"\bstorage_options\b", "--storage-option"),
    (r"\bdiskbuf\.(copy|merge|split|repair|verify)(?:\(path\))?\b", r"diskbuf \1"),
)


def in_shell_words(message: object) -> str:
    """A message in one line, with options where the package names arguments."""
    lines = [line.strip() for line in str(message).splitlines() if line.strip()]
    text = ""
    for line in lines:
        text += ("" if not text else " " if text[-1] in ".:;,?!" else "; ") + line
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text
