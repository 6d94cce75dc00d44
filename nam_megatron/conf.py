"""Where the configs are."""

from pathlib import Path


def conf_dir() -> Path:
    """The folder of configs: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


# A file of ours for this process alone -> the one of a person's that it was read from.
READ_FROM: dict[Path, str] = {}
READ = "read from "


def short(path: Path) -> str:
    """`conf/...` for the library's, wherever it lies; a file of one's own in full."""
    if path in READ_FROM:
        return READ + READ_FROM[path]
    path = path.resolve() if ".." in path.parts else path
    return f"conf/{path.relative_to(conf_dir())}" if path.is_relative_to(conf_dir()) else str(path)
