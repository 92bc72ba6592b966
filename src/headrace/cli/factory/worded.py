"""Errors of the user's code in a few lines: type, text and notes, without frames."""

from itertools import dropwhile
from traceback import format_exception_only

from headrace.errors import shown

_TRACEBACK = "Traceback (most recent call last):\n"


def worded(error: BaseException) -> str:
    """Return an exception's type, text and notes.

    The text of an error that comes from a worker process holds that process's traceback, as torch's errors do. Its last
    lines are the type and the text; the notes are in it, and once more on the error itself.
    """
    if isinstance(error, SystemExit):
        what = f"SystemExit({shown(error.code)}), which would end the process"
        return f'{what}. What a script does when it is started belongs under if __name__ == "__main__":'
    text = "".join(format_exception_only(error)).rstrip()
    lines = text.rpartition(_TRACEBACK)[2].splitlines()
    said = [line for line in dropwhile(lambda line: line.startswith(" "), lines) if line.strip()]
    kept: list[str] = []
    for place, line in enumerate(said):
        # A note that the rank has added to may begin as the worker's note.
        repeated = line.startswith("headrace: ") and any(later.startswith(line) for later in said[place + 1 :])
        kept += [] if repeated else [line]
    return "\n".join(kept) or text
