"""Where the configs are."""

from pathlib import Path


def conf_dir() -> Path:
    """The folder of configs: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def short(path: Path) -> str:
    """`conf/...` for the library's, wherever it lies; a file of one's own in full."""
    return f"conf/{path.relative_to(conf_dir())}" if path.is_relative_to(conf_dir()) else str(path)
