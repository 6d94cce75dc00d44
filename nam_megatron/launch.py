"""The launcher of an installed package: python -m nam_megatron.launch VERB ... In a checkout `python -m launch VERB ...` is the same.

A wheel holds `launch/` and `patches/` in `nam_megatron/beside/`, so that no module of so plain a name stands among others' packages.
"""

import sys
from pathlib import Path
from typing import NoReturn

from nam_megatron.launcher import BESIDE


def main() -> NoReturn:
    sys.path.insert(0, str(BESIDE if BESIDE.is_dir() else Path(__file__).parent.parent))
    from launch.__main__ import main as launch

    launch()


if __name__ == "__main__":
    main()
