"""Which files the checks of this repository's own source read."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_OURS = {"build", "dist", "env", "venv"}


@cache
def project_files() -> tuple[Path, ...]:
    """Files that git tracks or would add; every visible file where there is no git checkout."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        paths = [ROOT / name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if _visible(path.relative_to(ROOT))]
    return tuple(sorted(path for path in paths if path.is_file()))


def python_files(*folders: str) -> list[Path]:
    """The project's Python files under the given top-level folders."""
    return [
        path
        for path in project_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders
    ]


def _visible(relative: Path) -> bool:
    parts = relative.parts
    return not any(part.startswith(".") or part in NOT_OURS for part in parts)
