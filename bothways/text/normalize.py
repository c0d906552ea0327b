"""One line as it stands in a file -> the text of it, and back.

Nothing a person wrote is changed: only the line's frame goes.
"""

BYTE_ORDER_MARK = "\ufeff"


def clean_line(line: str, first: bool = False) -> str:
    """The line without its end (`\\n` or `\\r\\n`), and without a byte order mark if it is the first of its file."""
    if first:
        line = line.removeprefix(BYTE_ORDER_MARK)
    return line[:-1].removesuffix("\r") if line.endswith("\n") else line


def as_line(text: str) -> str:
    """A text that a model has written, as one line: bytes are its alphabet, and one of them ends lines."""
    return text.replace("\r\n", " ").replace("\n", " ") + "\n"
