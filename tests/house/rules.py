"""The packages and the files of the repository, for the rules."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("server", "engine", "workers", "base")


def python_files(*folders: str) -> list[Path]:
    """Return every Python file of these folders of the repository, sorted."""
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def place(path: Path) -> str:
    """Return a path as the repository names it."""
    return path.relative_to(ROOT).as_posix()
