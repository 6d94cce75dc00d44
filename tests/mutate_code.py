"""Change our own code, one small mistake at a time: the tests must notice.

    python tests/mutate_code.py sample=150 seed=7     # mistakes in so many lines, drawn by seed, and benchmarks/mutants.json
    python tests/mutate_code.py                       # one in every line that can hold one
    python tests/mutate_code.py nam_megatron/plan.py  # in these files alone; groups=rows,judges: in those groups'
    python tests/mutate_code.py nightly piece=1/8     # an eighth of 200 by the day, drawn the oftener the more harm a mistake does
    python tests/mutate_code.py commit                # twelve in the files of the last commit, by its hash, as CI draws them

tests/mutate_flags.py changes the arguments that a plan becomes, and asks verify alone; this one changes the programs. What a mistake
is and where one can be made, cosmic-ray says, with operators of ours for what it has not: swapped arguments, a lost row, a dropped
condition, a reduction or a cache that is left out.

A worker imports torch and Megatron once and forks for each mutant, which lies in a copy of the checkout. GROUPS says which tests should
notice it: they run in that order, and the first that fails ends it. A file of no group has the tests that name its module. What takes
longer than its processor time, or comes after `seconds` of it, is undecided, and no part of a score.
"""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
RESULT = REPO / "benchmarks" / "mutants.json"
COPIED, LINKED = (
    ("nam_megatron", "launch", "tests"),
    ("conf", "patches", "receipts", "benchmarks", "docs", "examples", "README.md"),
)
LIMIT = 240  # seconds of a processor that a mutant's tests may take


@dataclass(frozen=True)
class Group:
    """Files in which a mistake may be made, and the tests that should notice it, the quick and keen ones first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


PUBLISHED = "tests/cpu/test_published.py"
# They ask Megatron, or a hundred plans, and others notice what they would.
SLOW_LOWER = "--deselect=tests/test_lower.py::test_trap_gqa_under_mla_loses_its_positions"
SLOW_PLAN = (
    "--deselect=tests/test_plan.py::test_index_reuse_is_what_megatron_computes_and_is_refused_only_where_it_cannot"
)
SLOW_BUDGET = " ".join(f"--deselect=tests/test_budget.py::test_{name}" for name in (
    "kept_activations_are_the_real_models", "any_plan_adds_up", "more_samples_never_take_less", "plot", "table_of_errors_is_todays",
))  # fmt: skip
SLOW_RECIPE = "--deselect=tests/test_recipe.py::test_no_leaf_is_coerced"
SLOW_TRAIN = " ".join(f"--deselect=tests/cpu/test_train.py::test_{name}" for name in (
    "a_refusal_is_said_once_under_torchrun", "residual_streams_learn", "n_gram_rows_learn_beside_muon",
    "what_only_makes_it_faster_learns_the_same", "the_recipe_chooses_the_loss", "one_rank_speaks",
))  # fmt: skip
SLOW_LINT = "--deselect=tests/test_lint.py::test_any_flags_are_described_and_checked"
TOLD = ("tests/test_said_right.py", "tests/launch/test_told.py")
# How much more often than another a line is drawn: what trains another model and says nothing, and what judges that.
HARM = {
    "nam_megatron/blocks/*": 4, "nam_megatron/runtime/*": 4, "nam_megatron/mends/*": 4, "nam_megatron/compile/*": 4,
    "nam_megatron/recipe/*": 4, "nam_megatron/features/*": 4, "nam_megatron/laws/*": 3, "nam_megatron/judge/*": 3,
    "nam_megatron/prove/*": 3, "nam_megatron/hf/*": 3, "nam_megatron/data/*": 3, "nam_megatron/nemo/*": 2, "launch/record/*": 2,
}  # fmt: skip
SLOW_DATA = "--deselect=tests/test_data.py::test_ctrl_c_is_a_line_whatever_the_processes_do"
BLOCKS = {
    kind: f"tests/blocks/test_{kind}.py"
    + "".join(f" --deselect=tests/blocks/test_{kind}.py::test_kernels_{long}" for long in longest)
    for kind, longest in {
        "mla": ("in_the_interpreter",), "dsa": ("in_the_interpreter", "compile_for_hopper"), "mamba3": ("in_tritons_interpreter",),
        "m2rnn": ("in_the_interpreter", "compile_for_hopper"),
    }.items()
}  # fmt: skip
GROUPS = {
    "rows": Group(
        (
            "nam_megatron/words/setting.py", "nam_megatron/compile/*.py",
            "nam_megatron/recipe/*.py", "nam_megatron/targets/*.py", "nam_megatron/blocks/*.py", "nam_megatron/blocks/*/block.py",
            "nam_megatron/features/*.py", "nam_megatron/laws/*.py",
        ),
        (
            "tests/test_said_right.py", "tests/test_said.py", "tests/test_golden.py", "tests/test_rows.py", "tests/test_laws.py",
            "tests/test_flags.py::test_every_form_says_the_same tests/test_flags.py::test_words_of_a_setting",
            "tests/test_flags.py::test_a_value_its_flag_cannot_say_is_our_mistake",
            "tests/test_translate.py -k plan", "tests/test_effect.py::test_a_leak_is_stopped",
            "tests/test_lower.py::test_refusal", "tests/test_schema.py::test_what_is_made_of_the_code_is_current",
            f"tests/test_plan.py {SLOW_PLAN}", f"tests/test_recipe.py {SLOW_RECIPE}", "tests/test_wishes.py", "tests/test_judges.py",
            f"tests/test_lower.py {SLOW_LOWER}", "tests/test_verify.py::test_variant_is_what_megatron_builds",
            "tests/test_verify.py::test_yarn_is_compared_where_it_is_read",
            "tests/test_public.py -k nemotron_h_8b", "tests/cpu/test_effect_modules.py::test_every_place_tells_the_same_of_a_kind",
        ),
    ),
    "sizes": Group(
        ("nam_megatron/words/sizes.py", "nam_megatron/budget/[!_pt]*.py"), 
        (
            "tests/test_said.py", "tests/test_golden.py", "tests/test_budget.py::test_table_of_errors_is_todays",
            f"tests/test_budget.py {SLOW_BUDGET}",
        ),
    ),
    "judges": Group(
        (
            "nam_megatron/verify.py", "nam_megatron/judge/same.py", "nam_megatron/judge/resume.py", "nam_megatron/runtime/checkpoint.py",
            "nam_megatron/runtime/checksums.py", "nam_megatron/runtime/nonfinite.py",
        ),
        (
            "tests/test_judges.py", "tests/cpu/test_judged_checkpoints.py", "tests/cpu/test_guards.py",
            "tests/test_effect.py::test_a_layout_that_decides_what_is_computed_is_no_other_order_of_sums",
            "tests/test_verify.py::test_command_as_json",
        ),
    ),
    "trainer": Group(
        ("nam_megatron/train.py", "nam_megatron/runtime/pretrain.py"),
        (
            "tests/cpu/test_guards.py", "tests/test_data.py -k trainer_refuses", "tests/test_data.py -k how_often",
            f"tests/cpu/test_train.py {SLOW_TRAIN}", "tests/cpu/test_author_lane.py",
        ),
    ),
    "receipts": Group(
        ("launch/record/receipt.py", "launch/record/redact.py", "launch/record/signature.py", "launch/record/compare.py"),
        (
            "tests/launch/test_redact.py", "tests/launch/test_compare.py", "tests/launch/test_receipt.py",
            "tests/launch/test_secrets.py", "tests/test_said_right.py",
        ),
    ),
} | {
    f"naive {kind}": Group(
        (f"nam_megatron/blocks/{kind}/naive.py",),
        (
            BLOCKS[kind],
            "tests/blocks/test_tensor_parallel.py",
        ),
    )
    for kind in ("mla", "dsa", "mamba3", "m2rnn")
} | {
    f"launch {name}": Group((f"launch/*/{name}.py",), (*TOLD, f"tests/launch/test_{name.replace('linux', 'host')}.py", *more))
    for name, *more in (
        ("steps", "tests/launch/test_report.py", "tests/launch/test_secrets.py"), ("gpu",), ("linux",), ("oom",), ("storage",),
        ("topology",), ("preflight",), ("sanity",), ("stack",), ("inspect",), ("report",), ("hang",),
    )
} | {
    "lint": Group(
        ("nam_megatron/lint/*.py", "nam_megatron/lint/rules/*.py"),
        (
            "tests/test_said_right.py", "tests/test_lint_rules.py", "tests/test_lint_said.py",
            "tests/test_lint_bash.py", "tests/test_lint_inputs.py", f"tests/test_lint.py {SLOW_LINT}",
            "tests/cpu/test_lint_count.py", "tests/cpu/test_lint_stages.py",
        ),
    ),
    "data": Group(
        ("nam_megatron/data/*.py",),
        ("tests/test_said_right.py", "tests/test_indexed.py", "tests/cpu/test_judged_checkpoints.py", f"tests/test_data.py {SLOW_DATA}"),
    ),
    "layers": Group(
        (
            "nam_megatron/blocks/*/layer.py", "nam_megatron/runtime/stack.py", "nam_megatron/runtime/hyper_connections.py",
            "nam_megatron/runtime/ngram_embedding.py", "nam_megatron/runtime/cross_entropy.py", "nam_megatron/mends/stage_log.py",
            "nam_megatron/mends/yarn.py", "nam_megatron/mends/llama_rope.py", "nam_megatron/runtime/gauges.py",
            "nam_megatron/runtime/context.py",
        ),
        (
            "tests/cpu/test_parameters.py", "tests/blocks/test_initial.py",
            "tests/cpu/test_hyper_connections.py --deselect=tests/cpu/test_hyper_connections.py::test_kernels_in_the_interpreter",
            "tests/cpu/test_ngram_embedding.py", "tests/cpu/test_models.py", "tests/blocks/test_tensor_parallel.py",
            "tests/cpu/test_context.py", "tests/cpu/test_gauges.py", "tests/cpu/test_cross_entropy.py", "tests/cpu/test_effect_modules.py",
            "tests/blocks/test_resharding.py", "tests/cpu/test_author_lane.py", "tests/blocks/test_without_gpu.py",
            *(BLOCKS[kind] for kind in ("mamba3", "m2rnn", "mla", "dsa")),
        ),
    ),
    "hf": Group(("nam_megatron/hf/*.py",), ("tests/test_said_right.py", "tests/test_hf_describe.py", "tests/cpu/test_hf.py")),
    "published": Group(
        tuple(f"nam_megatron/hf/{name}.py" for name in ("quantized", "native", "adapters", "families/*")),
        (f"{PUBLISHED} --deselect={PUBLISHED}::test_any_layout_reads_the_weights",),
    ),
}  # fmt: skip


@cache
def written(path: str) -> str:
    """A file as it was when the mutants were drawn."""
    return (REPO / path).read_text(encoding="utf-8")


@cache
def names(path: str) -> frozenset[str]:
    """The modules, and what of them, that a file names in full or imports."""
    text = written(path)
    found = {word for word in re.findall(r"\b(?:nam_megatron|launch)(?:\.\w+)*", text)}
    for module, what in re.findall(r"\bfrom ((?:nam_megatron|launch)[\w.]*) import (\([^)]*|[^(\n]*)", text):
        found |= {f"{module}.{name}" for name in re.findall(r"\w+", what)}
    return frozenset(found)


def naming(path: str, deep: bool = True) -> tuple[str, ...]:
    """The test files that name a module, the short ones first; of one that none names those of the modules that import it, or that
    name its folder's."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = {test for test in tests() if module in names(test)} | interpreting(module)
    if not found and deep:
        found = {
            test
            for other in sources()
            if other != path and module in names(other)
            for test in naming(other, deep=False)
        }
    if not found and "." in module:
        return naming(module.rpartition(".")[0].replace(".", "/") + ".py", deep=False)
    return tuple(sorted(found, key=lambda test: len(written(test)))[:12])


def interpreting(module: str) -> set[str]:
    """Test files that run one of tests/gpu which names a module in Triton's interpreter."""
    gpu = {path.stem for path in (REPO / "tests/gpu").glob("test_*.py") if module in names(f"tests/gpu/{path.name}")}
    said = {f"tests/gpu/{stem}.py" for stem in gpu} | {f'"{stem.removeprefix("test_")}": "' for stem in gpu}
    return {
        test
        for test in tests()
        if "interpreter.passes" in written(test) and any(word in written(test) for word in said)
    }


@cache
def tests() -> list[str]:
    """Of this environment: those that need a GPU, or run inside another, are not among them."""
    elsewhere = {"gpu", "inside", "stand_in"}
    found = (p.relative_to(REPO) for p in (REPO / "tests").rglob("test_*.py") if p.stem != "test_mutants")
    return [str(p) for p in found if not elsewhere & {*p.parts}]


@cache
def sources() -> list[str]:
    """Every program of ours."""
    return sorted(
        str(p.relative_to(REPO)) for folder in ("nam_megatron", "launch") for p in (REPO / folder).rglob("*.py")
    )


def completed(groups: dict[str, Group]) -> dict[str, Group]:
    """And a group for each file that stands in none."""
    has = {str(p.relative_to(REPO)) for group in groups.values() for glob in group.files for p in REPO.glob(glob)}
    return groups | {
        path: Group((path,), ("tests/test_said_right.py", *naming(path))) for path in sources() if path not in has
    }


GROUPS = completed(GROUPS)


def asked(group: str, path: str) -> list[str]:
    """The tests of a group, those that name the file first; and of a file that none of them names, those that do."""
    named = {*naming(path, deep=False)}
    others = {
        words: named.isdisjoint(word.partition("::")[0] for word in words.split()) for words in GROUPS[group].tests
    }
    return sorted(others, key=lambda words: others[words]) + (sorted(named) if all(others.values()) else [])


# Survivors that are right: `path: the line as it was -> as it is`, and why no test can or should tell them apart.
SAME: dict[str, str] = {
    "nam_megatron/prove/proof.py: return [torch.load(path, weights_only=True) if path.exists() else [] for path in paths]"
    " -> return [torch.load(path, weights_only=False) if path.exists() else [] for path in paths]": "what its own ranks wrote",
    "nam_megatron/hf/evaluate.py: log_samples=False, -> ": "the harness hands back more, and nobody reads it",
    "nam_megatron/blocks/m2rnn/layer.py: sharded |= sharded_state_dict_default(module, path, sharded_offsets, metadata, "
    "tp_group=self.tp_group) -> sharded |= sharded_state_dict_default(module, path, sharded_offsets, metadata,)": "the group it takes "
    "by itself is the same one",
    "nam_megatron/lint/follow.py: return self.status(nodes[0]) -> return self.status(nodes[ -1])": "there is one",
    "nam_megatron/hf/check.py: elif isinstance(module, SparseAttention) and module.indexer is not None: -> elif isinstance(module, "
    "SparseAttention):": "a layer without an indexer takes another's keys and never selects",
    'nam_megatron/runtime/checkpoint.py: torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)'
    ' -> torch.load(io.BytesIO(file.read(length)), map_location="cpu",)': "torch's own default since 2.6",
    'nam_megatron/words/setting.py: row = Row((inner.__doc__ or "").strip().partition("\\n")[0] if inner else "")'
    ' -> row = Row((inner.__doc__).strip().partition("\\n")[0] if inner else "")': "every section has a docstring; schema.json holds it",
    'launch/record/receipt.py: "id": secrets.token_hex(8), -> "id": secrets.token_hex( 7),': "random enough, too",
    "nam_megatron/compile/argv.py: "
    'return json.dumps(tree, indent=1) + "\\n" -> return json.dumps(tree,) + "\\n"': "how plan.json is laid out",
    "nam_megatron/budget/memory.py: before = sum(n * size for n, size in zip(sets, kept, strict=True))"
    " -> before = sum(n * size for n, size in zip(kept, sets, strict=True))": "a product, whichever way round",
    "nam_megatron/recipe/__init__.py: for error in err.errors(include_url=False): -> for error in err.errors(include_url=True):": (
        "only a link more in what pydantic says, which nobody prints"
    ),
    "nam_megatron/blocks/mamba3/block.py: if not odd and not 16 <= self.chunk * self.mimo_rank <= 128:"
    " -> if not odd and not 15 <= self.chunk * self.mimo_rank <= 128:": "15 has no even factor, and odd chunks are refused before",
    'nam_megatron/targets/target.py: kind = TYPES.get(flag.type or "str", (str,)) -> kind = TYPES.get(flag.type, (str,))': (
        "None is not in the table, and its default is that of a text"
    ),
    "nam_megatron/words/sizes.py: symbols: Mapping[str, float] = field(repr=False) -> symbols: Mapping[str, float] = field(repr=True)": (
        "how it looks in a debugger"
    ),
    'launch/record/receipt.py: "id": secrets.token_hex(8), -> "id": secrets.token_hex( 9),': "random enough, too",
    'launch/record/events.py: by = event["rank"], event["pid"] -> by = event["pid"], event["rank"]': "a key, whichever way round",
    "nam_megatron/budget/search.py: best, beyond = 0, max(1, start) -> best, beyond = 0, max( 2, start)": (
        "1 is the value between 0 and a 2 that is too large"
    ),
    "nam_megatron/lint/read.py: LONGEST = 1_000_000  # characters -> LONGEST = 999999  # characters": "no launch, either",
    "nam_megatron/hf/export.py: done += sum(tensor.nbytes for tensor in group) -> pass": "how far a progress line says it is",
    'nam_megatron/mends/stage_log.py: record("global_load_balancing_loss", nothing, 1, layers, reduce_group=everything, '
    "needs_dp_avg=False)"
    ' -> record("global_load_balancing_loss", nothing, 2, layers, reduce_group=everything, needs_dp_avg=False)': (
        "a zero, at whichever layer"
    ),
    "nam_megatron/lint/values.py: LONGEST_LIST = 10_000 -> LONGEST_LIST = 9999": "longer than any list of layers, too",
    "launch/host/gpu.py: first = gpus[0] -> first = gpus[ -1]": "of GPUs that were found alike",
    "launch/run/inspect.py: "
    'number = {pid: int(n[:9]) if (n := known.get("RANK", "")).isdecimal() else None for pid, known in environs.items()}'
    ' -> number = {pid: int(n[: 10]) if (n := known.get("RANK", "")).isdecimal() else None for pid, known in environs.items()}': (
        "there are no ranks of ten digits"
    ),
    "launch/host/preflight.py: with ThreadPoolExecutor(1) as pool: -> with ThreadPoolExecutor( 2) as pool:": "one thing is asked of it",
    "nam_megatron/verify.py: widths = [min(max(len(c[i]) for c in cells), 60) for i in range(5)]"
    " -> widths = [min(max(len(c[i]) for c in cells), 61) for i in range(5)]": "how wide a table is",
}


@dataclass(frozen=True)
class Mutant:
    """`path` with one operator's `occurrence`-th mistake. was, becomes: the line it stands in."""

    path: str
    operator: str
    occurrence: int
    line: int
    was: str
    becomes: str

    @property
    def text(self) -> str:
        return f"{self.path}: {self.was} -> {self.becomes}"


# Mistakes ------------------------------------------------------------------------------------------------------------------------


@cache
def operators() -> dict[str, Any]:
    """Of cosmic-ray's operators those whose mistakes a person makes, and ours, by name."""
    import cosmic_ray.plugins
    from mistakes import OWN

    core = [
        *(f"ReplaceBinaryOperator_{a}_{b}" for a, b in (
            ("Add", "Sub"), ("Sub", "Add"), ("Mul", "Add"), ("Div", "Mul"), ("FloorDiv", "Mul"), ("FloorDiv", "Add"), ("Mod", "FloorDiv"),
            ("Pow", "Mul"), ("BitAnd", "BitOr"), ("BitOr", "BitAnd"), ("LShift", "RShift"), ("RShift", "LShift"),
        )),
        *(f"ReplaceComparisonOperator_{a}_{b}" for a, b in (
            ("Eq", "NotEq"), ("NotEq", "Eq"), ("Lt", "LtE"), ("LtE", "Lt"), ("Gt", "GtE"), ("GtE", "Gt"), ("Lt", "Gt"), ("Gt", "Lt"),
            ("LtE", "GtE"), ("GtE", "LtE"), ("Is", "IsNot"), ("IsNot", "Is"),
        )),
        "ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue",
        "ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot", "NumberReplacer", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak",
        "ZeroIterationForLoop",
    ]  # fmt: skip
    return {name: cosmic_ray.plugins.get_operator(f"core/{name}")() for name in core} | {o.__name__: o() for o in OWN}


def places(path: str) -> list[list[tuple[str, int]]]:
    """The lines of a file in which a mistake can be made: of each the (operator, occurrence) that make one."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from mistakes import beside_the_program

    counts: Counter[str] = Counter()
    found: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for node in ast_nodes(get_ast(written(path))):
        outside = None
        for name, operator in operators().items():
            for start, _ in operator.mutation_positions(node):
                outside = beside_the_program(node) if outside is None else outside
                if not outside:
                    found[start[0]].append((name, counts[name]))
                counts[name] += 1
    return list(found.values())


def made(path: str, name: str, occurrence: int) -> Mutant | None:
    """None where nothing changes, or Python would not take it."""
    from cosmic_ray.mutating import mutate_code

    source = written(path)
    after = mutate_code(source, operators()[name], occurrence)
    if after is None or after == source or not compiles(after):
        return None
    return Mutant(path, name, occurrence, *difference(source.splitlines(), after.splitlines()))


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def difference(before: Sequence[str], after: Sequence[str]) -> tuple[int, str, str]:
    """The number of the first line that differs, and what stands there on both sides."""
    first = next(i for i, (a, b) in enumerate(zip(before, (*after, ""), strict=False)) if a != b)
    rest = 0
    while rest < min(len(before), len(after)) - first and before[-1 - rest] == after[-1 - rest]:
        rest += 1
    sides = (side[first : max(len(side) - rest, first)] for side in (before, after))
    was, becomes = (" ".join(line.strip() for line in lines) for lines in sides)
    return first + 1, was, becomes


def drawn(groups: Sequence[str], files: Sequence[str], sample: int | None, seed: int) -> list[tuple[str, Mutant]]:
    """(group, mutant), one of each line, or of `sample` lines, a line the likelier the more harm is done there; the same for the same
    seed and code."""
    paths = {
        str(p.relative_to(REPO)): group for group in groups for glob in GROUPS[group].files for p in REPO.glob(glob)
    }
    paths = {path: paths[path] for path in sorted(paths) if not files or path in files}
    dice = random.Random(seed)
    chosen: list[tuple[str, Mutant]] = []
    if sample is None:
        for path, group in paths.items():
            chosen += [(group, mutant) for ways in places(path) if (mutant := made(path, *dice.choice(ways)))]
        return chosen
    left = {path: len(written(path).splitlines()) * harm(path) for path in paths}
    untried: dict[str, list[list[tuple[str, int]]]] = {}
    while len(chosen) < sample and left:
        (path,) = dice.choices([*left], [*left.values()])
        if path not in untried:
            untried[path] = places(path)
            dice.shuffle(untried[path])
        if not untried[path]:
            del left[path]
        elif mutant := made(path, *dice.choice(untried[path].pop())):
            chosen.append((paths[path], mutant))
    return chosen


def harm(path: str) -> int:
    return next((weight for glob, weight in HARM.items() if fnmatch(path, glob)), 1)


def of_commit() -> tuple[list[str], int]:
    """The files of ours that the last commit changed, and a seed that nobody chose: its hash."""

    def said(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=False).stdout.split()

    # Against its parent: of a clone without history, where the last commit stands for all, nothing is known to have changed.
    changed = said("diff", "--name-only", "HEAD^", "HEAD")
    return [path for path in changed if path in sources()], int((said("rev-parse", "HEAD") or ["0"])[0][:8], 16)


# One after the other -------------------------------------------------------------------------------------------------------------


def copied(folder: Path) -> Path:
    """The checkout as a mutant may change it. Times of files stay, so that compiled ones are right for the others."""
    for name in COPIED:
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        (folder / name).symlink_to(REPO / name)
    shutil.copy2(REPO / "pyproject.toml", folder)
    return folder


def work(folder: Path) -> None:
    """A worker: a line of JSON in for each mutant, one out. Everything heavy that is not ours is imported before the forks."""
    os.chdir(folder)
    # Beside its own folder, in which the tests' modules have their names.
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() not in (REPO, Path(__file__).parent))]
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import _pytest.assertion.rewrite  # noqa: F401
    import hydra  # noqa: F401
    import hypothesis  # noqa: F401
    import megatron.core.models.hybrid.hybrid_model
    import megatron.training.argument_utils
    import megatron.training.training  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import rich.console  # noqa: F401
    import torch
    import triton  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        task = json.loads(line)
        out.write(json.dumps(judged(folder, task)) + "\n")
        out.flush()


def judged(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """{"word": killed | survived | undecided, "by": the test that noticed, "seconds": of a processor}"""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    path = folder / task["path"] if task["path"] else None
    if path:
        whole, times = path.read_bytes(), path.stat()
        path.write_text(task["source"], encoding="utf-8")
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115  the child writes to it
    try:
        if (pid := os.fork()) == 0:
            forked(said.fileno(), task["tests"])
        end = begun + 5 * LIMIT
        while (done := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if done[0] == 0:
            os.waitpid(pid, 0)
    finally:
        if path:
            path.write_bytes(whole)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    said.seek(0)
    text = said.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = os.waitstatus_to_exitcode(done[1]) if done[0] else None
    word = verdict(code, text)
    by = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    seconds = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)
    return {"word": word, "by": by[0] if by else None, "seconds": seconds, "text": text[-3000:]}


def verdict(code: int | None, text: str) -> str:
    """Of pytest's exit code, less than zero of a signal and None where nobody waited any more, and of what it said."""
    if code == 0:
        return "survived"
    # Its processor time was over, no test was chosen (5), or none has the name: no test has said anything.
    silent = code in (None, 5, -signal.SIGXCPU, -signal.SIGKILL) or "ERROR: not found: " in text
    return "undecided" if silent else "killed"


def forked(out: int, tests: Sequence[str]) -> None:
    """The tests, in a process and a session of their own. Ends it."""
    code = 0
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(out, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
        import pytest

        words = ["-x", "-q", "--tb=line", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
        for test in tests:  # one after the other, for each is collected before it runs
            code = code or int(pytest.main([*words, f"--basetemp={tempfile.mkdtemp()}", *test.split()]))
    except BaseException:
        code = 1
        raise
    finally:
        sys.stdout.flush()
        os._exit(code)


class Worker:
    """A process that judges; `busy` with one mutant at a time."""

    def __init__(self, folder: Path):
        words = [sys.executable, "-W", "ignore", str(Path(__file__)), "worker", str(folder)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, group: str, mutant: Mutant | None) -> dict[str, Any]:
        from cosmic_ray.mutating import mutate_code

        source, tests = None, list(GROUPS[group].tests)
        if mutant:
            source = mutate_code(written(mutant.path), operators()[mutant.operator], mutant.occurrence)
            tests = asked(group, mutant.path)
        task = {"path": mutant and mutant.path, "source": source, "tests": tests}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def judge(
    chosen: Sequence[tuple[str, Mutant]], workers: int, trusted: bool, seconds: float
) -> Iterator[tuple[str, Mutant, dict[str, Any]]]:
    """Every mutant and what came of it, in the order in which they end. trusted: the tests are known to pass on what is not changed.
    seconds: of all processors, after which nothing more is begun."""
    from concurrent.futures import ThreadPoolExecutor, as_completed
    from queue import SimpleQueue

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.environ["TMPDIR"] = folder  # of the tests, too: all of it goes
        free: SimpleQueue[Worker] = SimpleQueue()
        made = [Worker(copied(Path(folder, str(n)))) for n in range(workers)]
        for worker in made:
            free.put(worker)

        def asked(group: str, mutant: Mutant | None) -> dict[str, Any]:
            if group in failing or sum(spent) > seconds:
                return {
                    "word": "undecided",
                    "by": None,
                    "seconds": 0.0,
                    "text": "its tests fail" if group in failing else "time",
                }
            worker = free.get()
            try:
                spent.append((answer := worker.ask(group, mutant))["seconds"])
                return answer
            finally:
                free.put(worker)

        spent: list[float] = []
        failing: set[str] = set()
        with ThreadPoolExecutor(workers) as pool:
            for group in dict.fromkeys(group for group, _ in chosen if not trusted):
                whole = asked(group, None)
                said = f"{whole['seconds']} s without a mistake"
                if whole["word"] != "survived":  # nothing is known of its mutants
                    failing.add(group)
                    said = f"undecided, its tests do not pass on the code as it is: {whole['by']}\n{whole['text']}"
                print(f"{group}: {said}", file=sys.stderr, flush=True)
            waiting = {pool.submit(asked, group, mutant): (group, mutant) for group, mutant in chosen}
            for done in as_completed(waiting):
                yield *waiting[done], done.result()
        for worker in made:
            worker.process.kill()
            worker.process.wait()


COMMANDS = {
    "nightly": {"sample": "200"},
    "commit": {"sample": "12", "trusted": "true", "seconds": "200", "workers": "1"},
}


def main(words: Sequence[str]) -> int:
    """1 where a mutant survived that is not known to be the same."""
    options = dict(word.split("=") for word in words if "=" in word)
    files = [word for word in words if "=" not in word]
    command = files.pop(0) if files[:1] and files[0] in COMMANDS else None
    options = COMMANDS.get(command or "", {}) | options
    groups = options["groups"].split(",") if "groups" in options else list(GROUPS)
    sample, seed = int(options["sample"]) if "sample" in options else None, int(options.get("seed", 0))
    if command == "nightly" and "seed" not in options:
        seed = datetime.now(UTC).toordinal()
    if command == "commit":
        files, seed = of_commit()
        if not files:
            print("0 mutants: the last commit is not known to change a program", flush=True)
            return 0
    workers = int(options.get("workers", len(os.sched_getaffinity(0))))
    piece, pieces = map(int, options.get("piece", "1/1").split("/"))
    chosen = drawn(groups, files, sample, seed)[piece - 1 :: pieces]
    print(f"{len(chosen)} mutants, seed {seed}", file=sys.stderr, flush=True)
    found = []
    for group, mutant, result in judge(
        chosen, workers, options.get("trusted") == "true", float(options.get("seconds", "inf"))
    ):
        found.append((group, mutant, result))
        if log := options.get("log"):
            with open(log, "a") as file:
                file.write(json.dumps({"group": group, "mutant": mutant.text, "line": mutant.line} | result) + "\n")
        if result["word"] == "survived":
            reason = SAME.get(mutant.text)
            place = f"{mutant.path}:{mutant.line} {mutant.operator}"
            print(
                f"survived {place}: {mutant.was}\n    -> {mutant.becomes}" + f"\n    {reason}" * bool(reason),
                flush=True,
            )
    told = report(found, sample, seed)
    if not files and "groups" not in options and "piece" not in options:
        RESULT.write_text(json.dumps(told, indent=1) + "\n")
    print(
        f"{told['noticed']} of {told['mutants'] - told['undecided']} noticed, {len(told['same'])} the same, "
        f"{len(told['survived'])} survived; {told['undecided']} undecided"
    )
    return bool(told["survived"])


def report(found: Sequence[tuple[str, Mutant, dict[str, Any]]], sample: int | None, seed: int) -> dict[str, Any]:
    """What benchmarks/mutants.json holds."""
    lost = [mutant for _, mutant, result in found if result["word"] == "survived"]
    undecided = sum(result["word"] == "undecided" for *_, result in found)
    return {
        "sample": sample,
        "seed": seed,
        "mutants": len(found),
        "noticed": len(found) - len(lost) - undecided,
        "undecided": undecided,
        "processor_seconds": round(sum(result["seconds"] for *_, result in found)),
        "groups": {
            group: dict(sorted(Counter(result["word"] for g, _, result in found if g == group).items()))
            for group in sorted({group for group, *_ in found})
        },
        "same": {mutant.text: SAME[mutant.text] for mutant in lost if mutant.text in SAME},
        "survived": sorted(mutant.text for mutant in lost if mutant.text not in SAME),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
