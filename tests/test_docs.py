"""The docs: command lines that work as they stand or are marked as needing a GPU, links that lead somewhere, and a README of one page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nam_megatron import cli
from nam_megatron.completion import complete

REPO = Path(__file__).parent.parent
DOCS = REPO / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), REPO / "README.md", REPO / "CONTRIBUTING.md"]
HOUR = (DOCS / "first-hour.md").read_text()
LINK = re.compile(r"\]\(([^)\s:]+)\)")
SHELL = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    found, fenced = set(), False
    for line in page.read_text().splitlines():
        fenced ^= line.startswith("```")
        if not fenced and (heading := re.match(r"#+ (.*)", line)):
            found.add(slug(re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading[1])))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    wrong = []
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            wrong.append(target)
    assert wrong == []


def test_the_site_has_every_page_in_one_of_its_four_kinds():
    tree = yaml.safe_load((REPO / "mkdocs.yml").read_text())

    def files(node):
        if isinstance(node, str):
            return [node]
        return [f for one in (node if isinstance(node, list) else node.values()) for f in files(one)]

    assert sorted(files(tree["nav"])) == sorted(path.name for path in DOCS.glob("*.md"))
    assert [next(iter(part)) for part in tree["nav"]] == ["Start", "Tutorial", "How to", "Reference", "Explanation"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_prose_is_a_wall(page):
    lines = page.read_text().splitlines()
    assert [line[:60] for line in lines if len(line) > 300 and not line.startswith(("|", " ", "<"))] == []


def commands(text: str) -> list[str]:
    """Each command line of a page's shell blocks, without its comment; continued lines joined."""
    lines = "".join(SHELL.findall(text)).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_is_one(page):
    """And each of its keys could be typed with Tab: no page keeps an option that is gone."""
    for line in commands(page.read_text()):
        for part in re.split(r"&&|\|", line.split("  #")[0]):
            words = re.findall(r"(?:^|\s)(nam|-m nam_megatron\.\w+|-m launch)\s+(.*)", part)
            for program, rest in words:
                name = (
                    program.rpartition(".")[2]
                    if "nam_megatron." in program
                    else "launch"
                    if "launch" in program
                    else ""
                )
                said = [name] * bool(name) + rest.split("#")[0].split()
                if said and said[0] in cli.COMMANDS:
                    known(said, line)
                else:
                    assert (
                        not said
                        or name in ("train", "torchrun", "schema", "reference", "laws")
                        or said[0].startswith("-")
                    ), line


def known(said: list[str], line: str) -> None:
    """Its verb is one of the command's."""
    if said[0] in ("launch", "data", "hf") and len(said) > 1 and said[1].isalpha():
        assert said[1] in complete(["nam", said[0], ""]), line


@pytest.fixture
def own(tmp_path):
    """A folder with the tutorial's own files in it, as it tells to write them."""
    (tmp_path / "clone").mkdir()
    for name, text in re.findall(r'```yaml title="../([^"]+)"\n(.*?)```', HOUR, re.DOTALL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "clone"


@pytest.mark.slow
def test_the_tutorials_own_model_is_what_megatron_builds_and_the_same_on_two_ranks(own):
    program = Path(sys.executable).with_name("nam")
    for words in ("verify", "prove resume=false steps=1 +overlay=tp_sp cluster=h200_2"):
        name, *rest = words.split()
        done = subprocess.run(
            [program, name, "--config-dir", "../mine", "conf=samba", *rest], capture_output=True, text=True, cwd=own
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_a_page():
    text = (REPO / "README.md").read_text()
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
    assert len(text.splitlines()) < 150 and max(map(len, prose)) <= 300
    assert "uv run --group test pytest" in text  # .ci/run looks for it


def test_the_readmes_figures_are_the_receipts():
    rows = re.findall(
        r"^\| .*? \| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) % \| \[\w+\]\((\S+)\) \|$",
        (REPO / "README.md").read_text(),
        re.M,
    )
    assert len(rows) >= 7
    for gpus, ms, rate, mfu, path in rows:
        run = json.loads((REPO / path).read_text())
        window = run["outcome"]["figures"]["window"]
        assert (gpus, ms) == (str(run["job"]["world"]), f"{window['median_ms']:,.0f}"), path
        assert rate == f"{window['tokens_per_s_per_gpu']:,.0f}" and run["recipe"]["model"]["depth"] == 52
        assert mfu == f"{run['outcome']['against_forecast']['model_flops_utilisation'] * 100:.1f}"
