"""Parts of a page that are made from the code: each is between two markers."""

import re

MADE_PART = re.compile(r"<!-- made from the code: (.*?) -->.*?<!-- end: \1 -->", re.DOTALL)


def filled(page: str, marker: str, content: str) -> str:
    """Return `page` with `content` between its markers. Raises `ValueError` if the page has no such markers."""
    begin, end = f"<!-- made from the code: {marker} -->\n", f"<!-- end: {marker} -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the markers of {marker} are missing")
    return f"{before}{begin}\n{content.strip()}\n\n{end}{after}"


def hand_written(page: str) -> str:
    """Return `page` without its generated parts."""
    return MADE_PART.sub("", page)
