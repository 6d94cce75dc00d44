"""Every rule on what a recipe may say, as a page: `python -m nam_megatron.laws > docs/laws.md`."""

from nam_megatron.errors import finish, page
from nam_megatron.laws.page import render

finish(lambda: page(__doc__, render))
