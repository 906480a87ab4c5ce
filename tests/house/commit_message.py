"""Check a commit message: `scope: do something` in at most 72 characters, then an empty line and the reason.

git calls it through pre-commit: `python tests/house/commit_message.py FILE`.
"""

import re
import sys
from pathlib import Path

MAX_SUBJECT = 72
_SUBJECT = re.compile(r"(?P<scope>[a-z0-9][\w .,/+-]{0,30}): (?P<change>[a-z`]\S* \S.*)")
_OF_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ")


def faults(message: str) -> list[str]:
    """Return the faults of a message, comments of git left out."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(_OF_GIT):
        return []
    found = []
    if len(subject) > MAX_SUBJECT:
        found.append(f"the subject has {len(subject)} characters, at most {MAX_SUBJECT} are allowed")
    if not _SUBJECT.fullmatch(subject):
        found.append("the subject must read `scope: do something`, as in `scheduler: cap drafts while prompts wait`")
    elif subject.endswith("."):
        found.append("the subject ends with a full stop")
    if not "".join(lines[1:]).strip():
        found.append("the body is missing: it says why the change is made")
    elif lines[1].strip():
        found.append("the line after the subject must be empty")
    return found


def main(path: str) -> int:
    """Print the faults of the message in a file; return 1 if there are any."""
    found = faults(Path(path).read_text("utf-8"))
    for fault in found:
        print(f"error: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
