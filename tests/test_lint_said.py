"""What lint tells: a page of its messages in golden/lint.txt, and of every report and recipe what must hold."""

import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from lint_cases import GPT, HYBRID, MOE
from presets import lowered
from test_lint import FIXTURES, launch, words

from nam_megatron.compile import argv
from nam_megatron.compile.lower import translate
from nam_megatron.errors import Refused
from nam_megatron.lint import __main__ as command
from nam_megatron.lint import describe, lint, recipe, report
from nam_megatron.lint.read import of_file
from nam_megatron.lint.values import REMOVED
from nam_megatron.targets import current

PAGE = Path(__file__).parent / "golden" / "lint.txt"
# A script with findings of every severity, and what makes of it each row that a description can have.
SCRIPT = """#SBATCH --nodes=2 --gres=gpu:8
export CUDA_DEVICE_MAX_CONNECTIONS=8
for rate in 1e-4 2e-4; do
  srun python pretrain_hybrid.py --hybrid-layer-pattern 'M*-EDG/*-' --multi-latent-attention --tensor-model-parallel-size 2 \\
    --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --num-query-groups 4 --lr $rate --seq-length 2048 --swiglu \\
    --num-experts 8 --moe-router-topk 2 --moe-shared-expert-intermediate-size 512 --batch-size 4 --hiden-size 3 --micro-batch-size 4 \\
    --max-position-embeddings 2048 --train-iters 10 --squared-relu --vocab-size 32000 --dsa-indexer-topk 64 --use-mcore-models \\
    --save $OUT/x --recompute-modules mlp --spec no.such module --normalization RMSNorm
done
"""
OPTIONS = (
    "x", "x=1", "gpus=", "gpus=0", "gpus=1", "gpus=999999", "gpus=1000000", "gpus=²", "format=xml", "format=json", "ignore=none",
    "ignore=batch,companion", "gpus=4 --gpus=8", "--recipe=a.yaml format=text",
)  # fmt: skip


def page() -> Iterator[str]:
    yield report.text(lint(SCRIPT, "train.sh"))
    yield recipe.make(
        lint((FIXTURES[0].parent / "clean_gpt2.sh").read_text(), "clean_gpt2.sh"), Path("mine.yaml")
    ).text()
    for line in OPTIONS:
        try:
            yield f"{line}: {command._options(line.split())}"
        except Refused as refused:
            yield f"{line}: {refused.render()}"
    for out in ("/none/at/all.yaml", "a-b.yaml", "a.txt", ".yaml"):
        with pytest.raises(Refused) as refused:
            recipe.write(launch(GPT, {}), out)
        yield refused.value.render()
    for file in ("/none/at/all", "/none\0"):
        with pytest.raises(Refused) as refused:
            of_file(file)
        yield refused.value.render()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        patch.setenv("COLUMNS", "120")
        command.main(["--help"])
    yield shown.getvalue()


def test_the_page_of_messages_is_as_reviewed(rewrite_golden):
    now = "".join(f"{line.rstrip()}\n" for text in page() for line in text.splitlines())
    if rewrite_golden:
        PAGE.write_text(now)
    assert now == PAGE.read_text()


# What must hold of every report ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.name)
def test_a_report_counts_what_it_tells(path):
    """Its text, its JSON and the launch itself, three ways to the same."""
    found = lint(path.read_text(), path.name, None if "yaml" not in path.suffix else 8)
    data, text = describe.data(found), report.text(found)
    last = text.splitlines()[-1]
    for severity, n in Counter(f.severity for f in found.findings).items():
        assert f"{n} {severity}" in last
    given = [name for name in found.args.given if found.args.value(name) is not None]
    said, left = (int(n) for n in re.search(r"(\d+) arguments? said, (\d+) at Megatron", last).groups())
    assert said == len(found.args.given) and said + left == len(current().by_dest)
    assert data["arguments"].keys() <= found.args.given.keys() and len(data["arguments"]) >= len(given) - 8
    if (count := data["parameters"]) and count["total"] is not None:
        left, rest = divmod(count["total"] - sum(count["by"].values()), found.args.hidden_size)
        table = 1 + found.args.max_position_embeddings if found.model.positions == "learned_absolute" else 1
        assert rest == 0 and left in (table, table + 1), (
            "the last norm, of one vector or two, and positions that are learned"
        )
        assert count["active"] <= count["total"]
        assert f"{count['total']:,}" in text
    for finding in found.findings:
        assert f"[{finding.id}]" in text and finding.flag.removeprefix("without ").split()[0] in text


# Of what a launch says, what its recipe does not: other values, no key, and whether our compiler takes it.
LOST = {
    "clean_dsa.txt": ("eval_interval number", "", False), "clean_fp8.sh": ("eval_interval", "", False),
    "clean_fsdp.sh": ("GPT eval_interval", "", False),
    "clean_gpt2.sh": ("--data-path --fp16 --split GPT accumulate_allreduce_grads_in_fp32 bias_gelu_fusion eval_interval",
                      "--merge-file --vocab-file", False),
    "clean_mla.yaml": ("GPT eval_interval", "", False), "clean_moe.sh": ("--load --save --save-interval GPT eval_interval", "", False),
    "clean_mtp.txt": ("eval_interval number", "", False), "fp8_mamba.sh": ("eval_interval", "", True),
    "fsdp_muon.txt": ("GPT eval_interval number", "", True), "graphs.sh": ("--cuda-graph-modules eval_interval", "", True),
    "kernels.sh": ("--attention-backend --cross-entropy-fusion-impl eval_interval", "", True),
    "mla_refused.txt": ("--mscale-all-dim --rotary-scaling-factor apply_rope_fusion eval_interval number", "--num-query-groups", False),
    "pipeline_layout.sh": ("--hybrid-layer-pattern --pipeline-model-parallel-size eval_interval",
                           "--num-virtual-stages-per-pipeline-rank", True),
    "training.yaml": ("--data-path --openai-gelu GPT bias_gelu_fusion eval_interval", "--use-flash-attn", True),
}  # fmt: skip


def carried(made: recipe.Made) -> tuple[str, str, bool]:
    lost = {re.split("[: ]", line)[0] for line in made.lost}
    return " ".join(sorted(lost)), " ".join(sorted(line.split(" ")[0] for line in made.keyless)), bool(made.refused)


def same_layers(found, made: recipe.Made) -> bool:
    theirs = lint(argv.shell(translate(made.recipe))).model
    return ([k for _, k in theirs.layers], theirs.mtp_depths) == (
        [k for _, k in found.model.layers],
        found.model.mtp_depths,
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LOST)
def test_a_recipe_says_what_of_a_launch_it_has_not(name):
    path = FIXTURES[0].parent / name
    found = lint(path.read_text(), name, None if "yaml" not in path.suffix else 8)
    made = recipe.make(found, Path("mine.yaml"))
    assert carried(made) == LOST[name]
    assert made.refused or same_layers(found, made)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("base", "change", "lost", "keyless"),
    [  # what a recipe says in one way, said in another
        (MOE, {"--recompute-activations": True, "--position-embedding-type": None, "--use-rotary-position-embeddings": True,
               "--train-iters": None, "--train-samples": "640", "--lr-decay-samples": "640", "--lr-warmup-samples": "128",
               "--grad-reduce-in-bf16": True, "--group-query-attention": True, "--num-query-groups": "16", "--eval-iters": "0"},
         "GPT", ""),
        (MOE, {"--rampup-batch-size": "16 16 1000", "--moe-router-load-balancing-type": "aux_loss", "--lr-decay-iters": "10"},
         "--rampup-batch-size GPT eval_interval", ""),
        (MOE, {"--moe-router-load-balancing-type": "none", "--moe-aux-loss-coeff": None, "--mtp-num-layers": "0"},
         "GPT eval_interval", ""),
        (HYBRID, {"--enable-cuda-graph": True, "--lr-warmup-fraction": "0.2", "--lr-decay-iters": "10", "--init-method-std": "0.01",
                  "--embedding-init-method-std": "0.01", "--kv-channels": "64", "--max-position-embeddings": "4096",
                  "--is-hybrid-model": True, "--padded-vocab-size": "32000",
                  "--spec": "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"},
         "--enable-cuda-graph eval_interval", "--is-hybrid-model"),
    ],
    ids=["samples", "ramp", "no balance", "hybrid"],
)  # fmt: skip
def test_what_is_said_in_another_way_comes_back(base, change, lost, keyless):
    found = launch(base, change)
    made = recipe.make(found, Path("mine.yaml"))
    assert carried(made) == (lost, keyless, False) and same_layers(found, made)


@pytest.mark.few(1)
@pytest.mark.parametrize("gpus", [None, 1, 2, 3, 4, 8, 12, 16, 24])
def test_a_recipe_is_for_as_many_gpus_as_its_launch(gpus):
    """And its batch is what Megatron makes of none: a pass of every replica."""
    start = f"torchrun --nproc-per-node {gpus} " if gpus else ""
    flags = MOE | {"--global-batch-size": None, "--moe-token-dispatcher-type": "alltoall"}
    made = recipe.make(lint(f"{start}pretrain_gpt.py {' '.join(words(flags))}"), Path("mine.yaml"))
    assert made.recipe.world_size == (gpus or 8)
    assert made.recipe.schedule.global_batch_size == (4 * gpus if gpus else made.recipe.schedule.global_batch_size)
    assert bool(gpus) != any("GPU" in line for line in made.lost)


# Flags of other times and of other programs -------------------------------------------------------------------------------------


def test_a_flag_of_another_time_is_found_with_a_hint_that_can_be_followed():
    for flag, hint in REMOVED.items():
        found = [f for f in launch(GPT, {flag: "3"}).findings if f.id == "removed-flag"]
        assert len(found) == 1 and found[0].fix == hint, flag
        named = re.findall(r"`(--[\w-]+)", hint)
        assert all(current().by_name(name) and name not in REMOVED for name in named), flag


NEEDED = "missing-flag", "fp32"


@pytest.mark.parametrize(
    ("flags", "given", "finds", "megatrons"),
    [  # what is read and found where another program has the parser, and in Megatron's own script
        ("--hidden_size 4 --seq_length 8", "", "unknown-flag 2", "unknown-flag 2"),
        ("--hidden_size 4 --seq_length 8 --micro_batch_size=1", "hidden_size seq_length micro_batch_size", "",
         "unknown-flag 3"),
        ("--hidden_size 4 --seq_length 8 --bf16 true", "bf16", "unknown-flag 2 stray-word 1", "unknown-flag 2 stray-word 1"),
        ("--hidden_size 4 --seq_length 8 --micro_batch_size 1 --bf16 true --swiglu false --my_own 3",
         "hidden_size seq_length micro_batch_size bf16 swiglu", "", "unknown-flag 3 stray-word 2"),
        ("--a_b 1 --c_d 2 --e_f 3 --hidden_size 4", "", "unknown-flag 1", "unknown-flag 1"),
        ("--a-b 1 --c-d 2", "", "", ""),
        ("--a-b 1 --c-d 2 --e-f 3 --hidden-size 4", "hidden_size", "", ""),
        ("--hidden-sise 4 --seq-lenght 8 --micro-batch-sice 1", "", "unknown-flag 3", "unknown-flag 3"),
        ("--bf16=1 --lr x stray", "lr", "bad-value 2 stray-word 1", "bad-value 2 stray-word 1"),
        ("--hidden-size 4 --hidden-size 5 --lr 1e-4 --lr 1e-4", "hidden_size lr", "given-twice 1", "given-twice 1"),
        ("--hidden 4 --num-l 3", "", "unknown-flag 2", "unknown-flag 2"),
        ("--micro-batch-size one --recompute-modules mlp moe --lr", "micro_batch_size recompute_modules lr",
         "missing-value 1 bad-value 1 recompute-ignored 1", "missing-value 1 bad-value 1 recompute-ignored 1"),
    ],
)  # fmt: skip
def test_flags_that_are_not_megatrons(flags, given, finds, megatrons):
    for script, wanted in (("train.py", finds), ("pretrain_gpt.py", megatrons)):
        found = lint(f"python {script} --num-layers 2 {flags}", "x")
        ids = Counter(f.id for f in found.findings if f.id not in NEEDED and not f.id.startswith("default-"))
        assert " ".join(f"{rule} {n}" for rule, n in ids.items()) == wanted
        if script == "train.py":
            assert " ".join(name for name in found.args.given if name != "num_layers") == given
            assert bool(found.args.foreign) != any(f.id in NEEDED for f in found.findings)


def test_a_plan_of_ours_is_told_by_its_json_and_text_alike():
    for name in ("nam56r_smoke", "nam56r_fused"):
        found = lint(argv.plan_json(lowered(name)), name)
        tree = json.loads(report.as_json(found))
        assert f"{tree['trains']['parameters']['total']:,}" in report.text(found)
