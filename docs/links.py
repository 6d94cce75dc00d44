"""A hook of mkdocs: what a page links to outside of docs/ (receipts, benchmarks, code) is no page of the site.

With `repo_url` in mkdocs.yml it is a link into the repository, without one the text says which file it is.
"""

import re
from typing import Any

OUT = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, config: Any, **_: object) -> str:
    root = config.get("repo_url")
    if root:
        return OUT.sub(rf"[\1]({root.rstrip('/')}/blob/main/\2)", markdown)
    return OUT.sub(r'<span title="\2">\1</span>', markdown)
