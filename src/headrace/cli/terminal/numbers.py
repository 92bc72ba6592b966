"""Options that are several numbers."""

from headrace.errors import bad_value


def numbers_of(name: str, text: str, most: int) -> tuple[int, ...]:
    """Return the whole numbers in a text, sorted, each once.

    Args:
        name: The option's name, for errors.
        text: What the user wrote: numbers, separated by commas.
        most: The largest that is allowed.

    Raises:
        ValueError: One is no number, or lies outside [1, `most`].
    """
    numbers = set()
    for part in text.split(","):
        digits = part.strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(most)) and 1 <= int(digits) <= most):
            allowed = f"whole numbers >= 1 and <= {most:,}, separated by commas"
            bad_value(name, text, allowed, f"{name} 1,2 tries one and two.")
        numbers.add(int(digits))
    return tuple(sorted(numbers))
