"""How the demo reads a budget: bytes, a size with a unit, or a share of the model's weights."""

import re

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def check_budget(text):
    """ValueError for what is no budget of any model, before one is there to take a share of."""
    parse_budget(text, 1 << 40)


def parse_budget(text, weights_bytes):
    """Bytes in `text`: "67108864", "64MiB", or "25%w" of `weights_bytes`; ValueError says what is wrong."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%w|[A-Za-z]*)\s*", text)
    if not match:
        raise ValueError(
            f'the budget "{text}" is neither bytes, a size like "64MiB" nor a share of the weights like "25%w"'
        )
    number, unit = float(match[1]), match[2]
    if unit == "%w":
        budget = int(weights_bytes * number / 100)
    elif unit in UNITS:
        budget = int(number * UNITS[unit])
    else:
        raise ValueError(f'the budget "{text}" has an unknown unit; known are %w, {", ".join(filter(None, UNITS))}')
    if budget <= 0:
        raise ValueError(f'the budget "{text}" is zero')
    return budget
