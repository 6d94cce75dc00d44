"""Lint of Megatron's fields in the words of programs around it: verl, SkyRL, NeMo-RL, Primus, Python recipes and scripts."""

import json
import re
from pathlib import Path

import pytest
import yaml

from nam_megatron.errors import Refused
from nam_megatron.lint import describe, lint, recipe, report
from nam_megatron.lint.container import SPELLED
from nam_megatron.lint.follow import hole, shown
from nam_megatron.lint.others import of_tree
from nam_megatron.targets import current

VERL = """
TP=${TP:-4}
export NVTE_FUSED_ATTN=1
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \\
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$STAGES \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=False \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=6 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_modules='["moe_act"]' \\
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True \\
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \\
    trainer.nnodes=2 trainer.n_gpus_per_node=8
"""
SKYRL = """
uv run -m skyrl.train.entrypoints.main_base trainer.strategy=megatron \\
  trainer.policy.model.path=a/b \\
  trainer.policy.megatron_config.tensor_model_parallel_size=2 \\
  trainer.policy.megatron_config.transformer_config_kwargs.recompute_granularity=full \\
  trainer.policy.megatron_config.optimizer_config_kwargs.use_precision_aware_optimizer=true \\
  trainer.ref.megatron_config.tensor_model_parallel_size=1 \\
  trainer.placement.policy_num_nodes=1 trainer.placement.policy_num_gpus_per_node=8
"""
NEMO_RL = """
policy:
  model_name: a/b
  max_grad_norm: 0.5
  train_micro_batch_size: 2
  max_total_sequence_length: 1024
  megatron_cfg:
    enabled: true
    activation_checkpointing: false
    recompute_granularity: full
    cuda_graph_impl: none
    cuda_graph_modules: []
    tensor_model_parallel_size: 2
    freeze_moe_router: true
    optimizer: {lr: 5.0e-6, clip_grad: "${policy.max_grad_norm}", min_lr: "${mul:2,3}"}
    distributed_data_parallel_config: {grad_reduce_in_fp32: false}
    env_vars: {NVTE_CPU_OFFLOAD_V1: "1"}
  generation:
    vllm_cfg: {tensor_parallel_size: 4}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""
PRIMUS = """
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${MODEL:llama}.yaml
    overrides:
      micro_batch_size: ${MBS:4}
      norm_epsilon: 1.0e-6
      mock_data: true
      train_data_path: null
      cross_entropy_fusion_impl: te
      cross_entropy_loss_fusion: true
      enable_turbo: true
"""
BRIDGE = '''
"""A recipe."""
import torch
from megatron.bridge.recipes.common import _common_config
ID = "a/b"

def _base():
    cfg = _common_config()
    cfg.model.seq_length = 4096
    cfg.model.context_parallel_size = 2
    return cfg

def train(cp: int = 4, big=None):
    cfg = _base()
    cfg.tokenizer.tokenizer_model = ID
    cfg.model.num_moe_experts = 4 * 8
    cfg.model.context_parallel_size = cp
    cfg.model.layernorm_epsilon = 1e-6
    cfg.model.sequence_parallel = False
    cfg.optimizer.main_grads_dtype = torch.bfloat16
    cfg.model.expert_model_parallel_size = 2
    if torch.cuda.is_available():
        cfg.model.expert_model_parallel_size = 8
    cfg.train = TrainingConfig(train_iters=100, micro_batch_size=1 if big else 2)
    return cfg

def other():
    return ConfigContainer(train=TrainingConfig(train_iters=7))
'''
SPOKEN = """
import subprocess
OLD = "--num-layers 2 --hidden-size 64 --lr 3e-4"
LR = 1e-4
N = 8
FLAGS = {"--swiglu": True, "--bf16": None, "--untie-embeddings-and-output-weights": False, "--seq-length": 512}
MORE = {"micro_batch_size": 1, "train_iters": N}
def main():
    print("--num-experts 8")
    if N > 9:
        raise ValueError("--num-experts")
    words = ["--lr", f"{LR:.1e}", "--num-layers", "{:d}".format(N), "--hidden-size", "%d" % 64, "--min-lr", "{:.1e}".format(low), "--seed",
             str(N)]
    for key, value in MORE.items():
        words += [f"--{key}", str(value)]
    for key, value in FLAGS.items():
        words += [key, str(value)]
    subprocess.run(words + [f"--adam-beta2 {0.95!r}"])
"""
SCRIPT = """
import launcher

def execute(args):
    model = (
        "--num-layers 2 "  # "--num-layers 4"
        f"--hidden-size {args.width} "
        "--swiglu "
    )
    words = ["--lr", "1e-4", "--rollout-batch", "4", "--reward", "x", "--judge", "y"]
    if args.many:
        model += "--num-experts 8 "
    launcher.run(f"{model} {words}")
"""
TEXTS = {"verl": VERL, "SkyRL": SKYRL, "NeMo-RL": NEMO_RL, "Primus": PRIMUS, "Megatron-Bridge": BRIDGE}


@pytest.mark.parametrize(
    ("program", "said"),
    {
        "verl": {"tensor_model_parallel_size": 4, "lr": 1e-6, "moe_router_dtype": "fp32", "apply_rope_fusion": False,
                 "decoder_last_pipeline_num_layers": 6, "recompute_modules": ["moe_act"], "optimizer_cpu_offload": True},
        "SkyRL": {"tensor_model_parallel_size": 2, "recompute_granularity": "full", "use_precision_aware_optimizer": True},
        "NeMo-RL": {"cuda_graph_impl": "none", "tensor_model_parallel_size": 2, "lr": 5e-6, "clip_grad": 0.5, "micro_batch_size": 2,
                    "seq_length": 1024, "accumulate_allreduce_grads_in_fp32": False},
        "Primus": {"micro_batch_size": 4, "layernorm_epsilon": 1e-6, "mock_data": True, "cross_entropy_fusion_impl": "te",
                   "cross_entropy_loss_fusion": True},
        "Megatron-Bridge": {"seq_length": 4096, "max_position_embeddings": 4096, "tokenizer_model": "a/b", "num_experts": 32,
                            "context_parallel_size": 4, "layernorm_epsilon": 1e-6, "sequence_parallel": False,
                            "main_grads_dtype": "bf16", "train_iters": 100, "micro_batch_size": 2},
    }.items(),
)  # fmt: skip
def test_fields_of_another_program_are_read_and_nothing_else_is_said(program, said):
    found = lint(TEXTS[program])
    assert found.launch.program == program and found.args.elsewhere
    known = {name: found.args.value(name) for name in found.args.given}
    assert {name: value for name, value in known.items() if type(value).__name__ != "Open"} == said
    assert not found.findings or {f.severity for f in found.findings} == {"open"}
    text = report.text(found)
    assert "default" not in text.replace("defaults", "") and "left to the program" in text


@pytest.mark.parametrize(
    ("program", "open_"),
    [
        ("verl", {"pipeline_model_parallel_size"}),
        ("NeMo-RL", {"min_lr"}),
        ("Megatron-Bridge", {"expert_model_parallel_size"}),
    ],
)
def test_what_a_condition_or_a_variable_decides_is_open(program, open_):
    assert {name for name, _ in lint(TEXTS[program]).args.open_values()} == open_


@pytest.mark.parametrize(("program", "gpus"), [("verl", 16), ("SkyRL", 8), ("NeMo-RL", 16), ("Primus", None)])
def test_gpus_that_train(program, gpus):
    assert lint(TEXTS[program]).launch.gpus == gpus


def test_gpus_are_open_where_another_file_may_part_them():
    assert lint("defaults: base.yaml\n" + NEMO_RL.strip()).launch.gpus is None
    off = lint(NEMO_RL.replace("    enabled: true", "    enabled: false", 1))
    assert off.launch.gpus is None and any("enabled` is false" in note for note in off.launch.notes)
    apart = NEMO_RL.replace("    vllm_cfg", "    colocated: {enabled: false}\n    vllm_cfg")
    assert lint(apart).launch.gpus is None


def test_environment_of_the_training():
    assert lint(VERL).launch.env["NVTE_FUSED_ATTN"] == "1"
    assert lint(NEMO_RL).launch.env == {"NVTE_CPU_OFFLOAD_V1": "1"}


def test_recompute_counts_where_the_program_has_it_on():
    on = lint(NEMO_RL.replace("activation_checkpointing: false", "activation_checkpointing: true"))
    assert on.args.value("recompute_granularity") == "full"


def test_what_a_config_class_refuses_is_found_and_what_only_the_parser_does_is_not():
    clash = VERL.replace("moe_router_dtype=fp32", "overlap_moe_expert_parallel_comm=True").replace(
        "num_layers_in_last_pipeline_stage=6", "recompute_granularity=full"
    )
    told = {f.id: f.lines for f in lint(clash).findings}
    assert told["conflict"] == (9,)
    assert not [f for f in lint(PRIMUS).findings if f.severity == "will fail"]


def test_notes_name_the_model_the_other_files_and_fields_without_a_flag():
    notes = " ".join(lint(NEMO_RL).launch.notes)
    assert "a/b" in notes and "freeze_moe_router" in notes and "enabled" not in notes
    notes = " ".join(lint(BRIDGE, "r.py").launch.notes)
    assert "`train` (line 13)" in notes and "`_common_config()`" in notes


def test_flags_in_the_strings_of_a_python_script():
    found = lint(SCRIPT, "run.py")
    assert found.args.num_layers == 2 and found.args.swiglu and found.args.lr == 1e-4
    assert dict(found.args.open_values()) == {"hidden_size": ("args.width",), "num_experts": ("args.many",)}
    assert any("`--num-experts 8` (line 12), if args.many" in note for note in found.launch.notes)
    assert "GELU" not in report.text(found)


def test_what_a_python_script_starts_is_read_and_what_it_only_says_is_not():
    """A string that nothing uses, and what is printed or raised, were flags; a place to fill in was a value, a table of flags lost."""
    launch = lint(SPOKEN, "run.py").launch
    assert " ".join(map(shown, launch.words)) == (
        "--lr 1.0e-04 --num-layers 8 --hidden-size 64 --min-lr $(:.1e) --seed 8 --micro-batch-size 1 --train-iters 8 "
        "--swiglu --bf16 --seq-length 512 --adam-beta2 0.95"
    )
    alone = "import os\nMODEL = '--num-layers 2 --hidden-size 64'\n"  # for others to import
    assert lint(alone, "model.py").args.num_layers == 2


def words(text: str) -> str:
    return " ".join(map(shown, lint(text, "run.py").launch.words))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # A function that is called, from two others deep, with what it is given and its default.
        ("def common(tp, lr='1'):\n    a = ['--tensor-model-parallel-size', str(tp), '--lr', lr]\n    return a + ['--bf16']\n"
         "def main():\n    run(['torchrun', '--nproc-per-node', '8', 't.py', '--num-layers', '4', *common(2)] + ['--seed', '3'])\n"
         "if __name__ == '__main__':\n    main()\n", "--num-layers 4 --tensor-model-parallel-size 2 --lr 1 --bf16 --seed 3"),
        ("def lr(x):\n    return f'--lr {x}'\ndef main(y):\n    os.system(f'python t.py --num-layers 4 {lr(3)} --seed {y}')\n",
         "--num-layers 4 --lr 3 --seed $y"),
        # What is put into a dictionary later; on a condition its value is open.
        ("A = {'--num-layers': 4, '--lr': 1}\nA.update({'--lr': 2}, swiglu=1)\nA['--seed'] = 3\nrun([f'{k} {v}' for k, v in A.items()])\n",
         "--num-layers 4 --lr 2 swiglu 1 --seed 3"),
        ("B = {'num_layers': 4, 'lr': 1}\ndef go(big):\n    a = {**B, 'seed': 3}\n    a |= dict(lr=2)\n    if big:\n"
         "        a['num_layers'] = 8\n    for k, v in a.items():\n        run(f'--{k}={v}')\n",
         "--num-layers $(a.num_layers) --lr 2 --seed 3"),
        ("B = {'num_layers': 4}\ndef go(a):\n    a['num_layers'] = 8\ndef run():\n    b = {**B}\n    go(b)\n"
         "    return f\"--num-layers {b['num_layers']} --bf16\"\n",
         "--num-layers $(b['num_layers']) --bf16"),
        # Attributes of classes and of what they make.
        ("@dataclass\nclass C:\n    n: int = 4\n    h: int = field(default=64)\nclass D(C):\n    h = 128\nclass L:\n    heads = 8\n"
         "    def of(self, c):\n        return f'--num-layers {c.n} --hidden-size {c.h} --num-attention-heads {self.heads}'\n"
         "    def run(self):\n        c = D(n=8)\n        run('t.py ' + self.of(c) + f' --seed {c.n}')\n",
         "--num-layers 8 --hidden-size 128 --num-attention-heads 8 --seed 8"),
        ("class C:\n    n = 4\n    m = 2\ndef go(x):\n    c = C()\n    c.m = 3\n    if x:\n        c.n = 8\n"
         "    run(f'--num-layers {c.n} --seed {c.m}')\n",
         "--num-layers $(c.n) --seed 3"),
        ("class C:\n    n = 4\ndef of(c):\n    c.n = 8\ndef go():\n    c = C()\n    of(c)\n    run(f'--num-layers {c.n} --bf16')\n",
         "--num-layers $(c.n) --bf16"),
        ("class C:\n    def __init__(self, n):\n        self.n = n\n    n = 4\ndef go():\n    run(f'--num-layers {C(8).n} --bf16')\n",
         "--num-layers $(C(8).n) --bf16"),
        # Two launches are not one with each flag twice.
        ("def go():\n    both = ['--seed', '1']\n    run(['python', 'a.py', *both, '--num-layers', '4', '--bf16'])\n"
         "    run('python b.py --num-layers 8 --lr 1 --swiglu')\n", "--seed 1 --num-layers 8 --lr 1 --swiglu"),
    ],
)  # fmt: skip
def test_what_python_calls_and_keeps_is_followed(text, said):
    """Functions' flags were not read, and what a dictionary got later or an attribute has was open or stale."""
    assert words(text) == said


PROVIDER = """
class Small(GPTModelProvider):
    normalization: str = "RMSNorm"
    activation_func = F.silu
    gated_linear_unit: bool = True
    hidden_size: int = 64
class Smaller(Small):
    hidden_size: int = 32
    num_layers: int = W
"""


@pytest.mark.parametrize("recipe_", ["", "def recipe():\n    return Container(model=Smaller(num_layers=8))\n"])
def test_a_class_of_bridges_says_its_fields(recipe_):
    found = lint("from a import GPTModelProvider\nW = 4\n" + PROVIDER + recipe_, "p.py")
    said = (found.args.swiglu, found.args.normalization, found.args.hidden_size, found.args.num_layers)
    assert said == (True, "RMSNorm", 32, 8 if recipe_ else 4) and found.launch.program == "Megatron-Bridge"
    assert any("read is the " + ("function" if recipe_ else "class") in note for note in found.launch.notes)


def test_a_text_whose_places_are_filled_in_elsewhere_is_read_there():
    """As it was written, `%d` was a value that no flag takes."""
    made = "MODEL = '--num-layers {n} --hidden-size %d'\nARGS = MODEL.format(n=2) % 64\nrun(f't.py {ARGS} --lr 1')\n"
    assert words(made) == "--num-layers 2 --hidden-size 64 --lr 1"


def test_a_command_behind_a_table_of_flags_is_no_value_of_its_last():
    """`torchrun` was a stray word; and what such a loop makes of None, it decides."""
    made = (
        "T = {'num_layers': 2, 'swiglu': None, 'bf16': True}\nflags = []\nfor k, v in T.items():\n    if v is True:\n"
        "        flags.append(f'--{k}')\n    elif v is not None:\n        flags += [f'--{k}', str(v)]\n"
        "run(['torchrun', 't.py', *flags, '--lr', '1'])\n"
    )
    assert words(made) == "--num-layers 2 --bf16 --lr 1"
    assert "`--swiglu` (line 3), if line 3 says what is None" in " ".join(lint(made, "run.py").launch.notes)


def test_flags_of_other_functions_are_named():
    made = "A = '--num-layers 2 --hidden-size 64'\ndef go(more):\n    run('t.py ' + A2 + ' --bf16' + more)\nrun(A)\n"
    assert any(note.endswith("not read here: --bf16") for note in lint(made, "run.py").launch.notes)


def test_a_section_that_nothing_takes_sets_no_field():
    text = BRIDGE.replace(
        "    return cfg\n\ndef other", "    smoke = TrainingConfig(train_iters=5)\n    return cfg\n\ndef other"
    )
    assert lint(text, "r.py").args.train_iters == 100


def test_verl_has_fields_for_mindspeeds_llm_in_megatrons_names():
    text = VERL.replace("actor.megatron.", "actor.mindspeed.").replace("override_transformer_config", "llm_kwargs")
    found = lint(text.replace("apply_rope_fusion=False", "spec='[mindspeed_llm.spec, layer_spec]'"))
    assert (found.args.tensor_model_parallel_size, found.args.moe_router_dtype, found.args.said("spec")) == (
        4,
        "fp32",
        False,
    )


def test_words_over_a_recipe_of_bridges_are_its_fields():
    run = "python scripts/run_recipe.py --recipe a model.tensor_model_parallel_size=2 train.train_iters=5 checkpoint.save=x"
    found = lint(run)
    assert (found.launch.program, found.args.tensor_model_parallel_size, found.args.train_iters) == (
        "Megatron-Bridge",
        2,
        5,
    )
    with pytest.raises(Refused):  # of any program
        lint(run.replace("run_recipe", "train").replace("--recipe a", ""))


def test_python_without_flags_and_broken_python_are_refused():
    for text in ("import os\nprint(1)\n", "import os\ndef (:\n"):
        with pytest.raises(Refused):
            lint(text, "x.py")


def test_every_spelling_of_bridges_is_an_argument():
    """One that is none would lose the field without a word."""
    sections = {"fp8": 1, "should_pad_vocab": True, "weight_decay_incr_style": "linear", "gated_linear_unit": True}
    for name, rule in SPELLED.items():
        for value in (True, "silu", [["a"], None], 3):
            try:
                pairs = list(rule(value, sections))
            except (TypeError, ValueError):  # a value of another field's shape
                continue
            assert {dest for dest, _ in pairs} <= current().by_dest.keys(), name


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ("${.n}", 4),
        ("${..n}", 3),
        ("${n}", 3),
        ("${MODEL.n}", 4),
        ("${.no}", None),
        ("${....n}", None),
        ("${x.y}", None),
    ],
)
def test_what_a_yaml_refers_to_is_read(said, layers):
    """OmegaConf's words for a value that stands elsewhere in the file."""
    args = lint(f"n: 3\nMODEL:\n  n: 4\n  hidden_size: 64\n  num_layers: {said}\n", "m.yaml").args
    assert (args.num_layers == 4 if layers == 4 else args.num_layers == 3) if layers else dict(args.open_values())


NEMO = "trainer:\n  devices: 8\n  num_nodes: 2\nexp_manager: {}\nmodel:\n  num_layers: 4\n  normalization: layernorm\n  hidden_size: 0\n"


def test_a_config_of_the_first_nemos_is_its_own():
    found = lint(NEMO + "  openai_gelu: true\n  optim:\n    lr: 1e-3\n", "m.yaml")
    assert (found.launch.program, found.launch.gpus, found.args.num_layers, found.args.lr) == ("NeMo", 16, 4, 0.001)
    assert [f.id for f in found.findings] == ["not-positive"] and not found.args.said("normalization")
    assert lint(NEMO.replace("exp_manager: {}\n", ""), "m.yaml").launch.program is None


OFFLOADED = "cpu_offloading: false, cpu_offloading_num_layers: 95, pipeline_model_parallel_size: 4"


@pytest.mark.parametrize(
    "text", [f"trainer: {{}}\nexp_manager: {{}}\nmodel: {{{OFFLOADED}}}", f"actor_rollout_ref: {{actor: {{megatron: {{{OFFLOADED}}}}}}}"]
)  # fmt: skip
def test_layers_to_offload_are_none_where_offloading_is_off(text):
    on, off = ({f.id for f in lint(said, "m.yaml").findings} for said in (text.replace("g: false", "g: true"), text))
    assert "cpu-offloading" in on - off


def test_why_a_value_is_open_says_no_untrue_word_of_what_is_computed():
    found = lint(SCRIPT, "run.py")
    assert "worked out by the program where it runs, and open here: --hidden-size $(args.width)" in report.text(found)


def test_a_yaml_that_starts_from_others_is_their_programs():
    """Its own values were failures, and what the others say Megatron's defaults."""
    text = "extends: [base.yaml]\nnum_layers: 4\nhidden_size: 64\nnum_attention_heads: 4\ntokenizer_type: Llama3Tokenizer\n"
    found = lint(text + "hybrid_attention_ratio: 0.5\no_lora_rank: 8\n", "model.yaml")
    assert {f.severity for f in found.findings} <= {"open"} and "GELU" not in report.text(found)
    alone = lint(text.partition("\n")[2] + "lr: 1\nhybrid_attention_ratio: 0.5\n", "model.yaml")
    assert {f.id for f in alone.findings} >= {"removed-flag"}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("tensor_model_parallel_size: two", {"bad-value"}),
        ("tensor_model_parallel_size: true", {"bad-value"}),
        ("pipeline_model_parallel_size: -3", {"not-positive"}),
        ("moe_ffn_hidden_size: 0", {"not-positive"}),
        ("num_moe_experts: -1", {"not-positive"}),
        ("num_moe_experts: 0", set()),
        ("tensor_model_parallel_size: auto", set()),
        ("tensor_model_parallel_size: 2.0", set()),
        ("moe_token_dispatcher_type: own", set()),
    ],
)
def test_a_size_that_no_program_can_build_is_a_failure(said, found):
    """Another program takes values of its own, but no `two` layers and no -3 stages."""
    text = NEMO_RL.replace("tensor_model_parallel_size: 2", said)
    assert {f.id for f in lint(text).findings} - {"unknown-variable"} == found


CONDITIONS = """
FULL = True
def main(args, use_fp8=False):
    words = ["--num-layers", 8, "--hidden-size", "64", "--lr", args.lr] + (["--bf16"] if FULL else ["--fp16"])
    if use_fp8 == "--deep":
        words += ["--fp8-format", "hybrid", "--fp8-recipe", args.recipe]
    elif args.half:
        words.append("--fp16-lm-cross-entropy")
    words += ["--swiglu"] if args.gated else ["--squared-relu"]
    args.sp and words.append("--sequence-parallel")
    FULL = args.full
    if FULL:
        words.append("--disable-bias-linear")
"""


def test_a_conditional_flag_of_a_python_script_is_neither_there_nor_absent():
    """Those of an `a if b else c` were dropped without a word, and those behind an `and` taken as there."""
    found = lint(CONDITIONS, "run.py")
    assert found.args.num_layers == 8 and found.args.given.keys() - found.args.hanging == {
        "num_layers",
        "hidden_size",
        "lr",
        "bf16",
    }
    assert found.args.hanging.keys() == {
        "fp8", "fp8_recipe", "fp16_lm_cross_entropy", "swiglu", "squared_relu", "sequence_parallel", "add_bias_linear",
    }  # fmt: skip
    said = [note.removeprefix("conditional, neither there nor absent here: ") for note in found.launch.notes]
    assert said[1:] == [
        "`--fp8-format hybrid` (line 6), `--fp8-recipe $(args.recipe)` (line 6), if use_fp8 == '--deep'",
        "`--fp16-lm-cross-entropy` (line 8), if not (use_fp8 == '--deep') and args.half",
        "`--swiglu` (line 9), if args.gated",
        "`--squared-relu` (line 9), if not (args.gated)",
        "`--sequence-parallel` (line 10), if args.sp",
        "`--disable-bias-linear` (line 13), if FULL",
    ]


@pytest.mark.parametrize(
    ("text", "taken"),
    [(PRIMUS, "MBS=4"), (VERL, "TP=4"), ("seq_length: ${SEQ:4096}\nnum_layers: 4\n", "SEQ=4096"),
     ("TP=${TP:-$(nproc --all)}; python t.py --num-layers ${N:-4}", "N=4, TP=$(nproc --all)")],
)  # fmt: skip
def test_a_default_that_is_taken_for_a_variable_is_said_with_its_value(text, taken):
    """In another program's YAML it was taken unsaid, elsewhere said without what it is."""
    notes = [note for note in lint(text).launch.notes if note.startswith("taken as not set")]
    assert notes == [f"taken as not set in your environment (the text's own defaults are read): {taken}"]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("python pretrain_gpt.py --num-layers 2 --num-attention-heads 4", "add `--hidden-size VALUE`"),
        ("python pretrain_gpt.py --num-layers 2 --hidden-size $H", "put a value in for `--hidden-size $H` (H)"),
        (
            "python pretrain_hybrid.py --num-layers 2 --hidden-size 64 --num-attention-heads 4",
            "--hybrid-layer-pattern PATTERN",
        ),
        (NEMO_RL, "NeMo-RL decides"),
    ],
)
def test_no_recipe_says_what_to_do_about_it(text, hint):
    """It pointed to findings, which the command does not print then."""
    with pytest.raises(Refused) as refused:
        recipe.make(lint(text), Path("mine.yaml"))
    assert hint in refused.value.render()


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("recompute_granularty: full", {"misspelt-field"}),
        ("expert_model_paralel_size: 4", {"misspelt-field"}),
        ("num_layer: 4", {"misspelt-field"}),
        ("ep_comm_overlap: true", set()),
        ("reduce_scatter_with_fp32_accumulation: true", set()),
        ("pad_buckets_for_high_nccl_busbw: true", set()),
        ("overlap_param_gather_with_optim_step: true", set()),
        ("data_paths: [a]", set()),
        ("param_offload: true", set()),
        ("moe_token_dispatcher_type: all2all", {"bad-value"}),
        ("moe_token_dispatcher_type: alltoall\n    moe_flex_dispatcher_backend: hybridep", {"flex-ignored"}),
        ("moe_token_dispatcher_type: flex\n    moe_flex_dispatcher_backend: hybrid_ep", {"bad-value"}),
        ("moe_flex_dispatcher_backend: hybridep", set()),
        ("tokenizer_type: Llama3Tokenizer", set()),
        ("recompute_method: uniform", {"recompute"}),
        ("recompute_modules: 'moe,layernorm'", set()),
    ],
)
def test_a_misspelt_word_of_megatrons_is_found_in_another_programs_text(said, found):
    """Mistakes planted in published launches, which were a program's own words, and so silent."""
    text = NEMO_RL.replace("tensor_model_parallel_size: 2", said).replace(
        "activation_checkpointing: false", "activation_checkpointing: true"
    )
    text = text.replace("recompute_granularity: full", "recompute_granularity: selective")
    assert {f.id for f in lint(text).findings} - {"unknown-variable"} == found


RECIPE_HEAD = """from megatron.bridge.recipes.common import _common_config
W = 4
TABLE = {'a': 8, 'b': 16}
{more}
def train(size, cp: int = 2):
    cfg = _common_config()
    cfg.model.hidden_size = 64
"""


@pytest.mark.parametrize(
    ("more", "body", "value"),
    [
        ("W = 5", "cfg.model.num_layers = W", None),  # two values of one name
        ("if size: W = 5", "cfg.model.num_layers = W", None),
        ("def other():\n    global W\n    W = 5", "cfg.model.num_layers = W", None),
        ("", "cfg.model.num_layers = W; W = 5", 4),  # what a name was at that line
        ("", "W += 1; cfg.model.num_layers = W", 5),
        ("", "a, W = 3, 5\n    cfg.model.num_layers = W", None),
        ("", "for W in (1, 2): pass\n    cfg.model.num_layers = W", None),
        ("", "try:\n        cfg.model.num_layers = 4\n    except KeyError:\n        cfg.model.num_layers = 8", None),
        ("", "try:\n        cfg.model.num_layers = 4\n    except KeyError:\n        raise SystemExit", 4),
        ("", "if size:\n        for i in TABLE:\n            W = i\n    cfg.model.num_layers = W", None),  # deep in it
        ("", "try:\n        W = 7\n    except KeyError:\n        pass\n    cfg.model.num_layers = W", None),
        ("", "if size:\n        return cfg\n    cfg.model.num_layers = 4", None),
        ("", "if size:\n        raise ValueError\n    cfg.model.num_layers = 4", 4),
        ("", "cfg.model.num_layers = TABLE[size]", None),
        ("", "cfg.model.num_layers = TABLE['b']", 16),
        ("", "cfg.model.num_layers = 4 if size else 8", None),
        ("", "cfg.model.num_layers = size or 8", None),
        ("", "cfg.model.num_layers = 8 if cp == 2 else W", 8),  # of the defaults, which a note names
        ("", "cfg.model.num_layers = cp and W", 4),
        ("", "m = cfg.model\n    m.num_layers = 4", 4),  # under another name
        ("", "cfg.model.num_layers = 8\n    m = cfg.model\n    n = m\n    n.num_layers = 4", 4),
        ("def of(m):\n    m.num_layers = 4", "of(cfg.model)", 4),
        ("", "if size:\n        m = cfg.model\n        m.num_layers = 4", None),
        ("", "cfg.model.num_layers = 8\n    find(cfg).num_layers = 4\n    m = find(cfg)\n    m.num_layers = 4", None),
        ("", "setattr(cfg.model, 'num_layers', 4)", 4),
        ("", "cfg.model.num_layers = 8\n    other = _common_config()\n    other.model.num_layers = 4", None),
    ],
)  # fmt: skip
def test_a_field_of_a_recipe_is_known_where_the_text_decides_it(more, body, value):
    """A stale, merged or dropped value is the worst that can be said: each of these was taken as the last one read."""
    text = RECIPE_HEAD.replace("{more}", more) + f"    {body}\n    return cfg\n"
    found = lint(text, "recipe.py").args
    assert found.said("num_layers") and type(found.value("num_layers")).__name__ == ("Open" if value is None else "int")
    assert value is None or found.value("num_layers") == value


def test_what_a_recipe_takes_back_or_has_changed_is_not_said():
    body = "cfg.model.num_layers = 4; cfg.model.num_query_groups = 8; cfg.model.num_layers = cfg.model.num_query_groups = None"
    flex = "m = cfg.model; m.moe_token_dispatcher_type = 'alltoall'; m.moe_flex_dispatcher_num_sms = 16; apply_flex_dispatcher_backend(m)"
    found = lint(RECIPE_HEAD.replace("{more}", "") + f"    {body}; {flex}\n    return cfg\n", "recipe.py")
    assert not found.findings and not found.args.any_said("num_layers", "num_query_groups")


@pytest.mark.parametrize("body", ["setattr(cfg.model, size, 4)", "cfg.model = GPTModelProvider(num_layers=4, **size)"])
def test_what_may_set_any_field_is_said(body):
    notes = lint(RECIPE_HEAD.replace("{more}", "") + f"    {body}\n    return cfg\n", "recipe.py").launch.notes
    assert any("it may set any field" in note for note in notes)
    assert any(note.endswith("a caller may give others: cp=2") for note in notes)


STRINGS = 'import os\nN = 4\ndef run(size, n=2):\n    args = "--hidden-size 64 --num-attention-heads 4 "\n    {body}\n    os.system(args)\n'


@pytest.mark.parametrize(
    ("body", "words", "noted"),
    [
        ('try:\n        args += "--num-layers 4"\n    except OSError:\n        args += "--num-layers 8"', (), "does not fail"),
        ('try:\n        args += "--num-layers 4"\n    except OSError:\n        raise', ("--num-layers", "4"), None),
        ('args += {"a": "--num-layers 4", "b": "--num-layers 8"}[size]', (), "if the key is 'b'"),
        ('T = {"a": "--num-layers 4", "b": "--num-layers 8"}\n    args += T["b"]', ("--num-layers", "8"), None),
        ('if size:\n        return\n    args += "--num-layers 4"', (), "if not (size)"),
        ('if "--num-layers 4" in size: pass', (), None),
        ('parser.add_argument("--num-layers", default=4)', (), None),
        ('args += size or "--num-layers 4"', (), "if not (size)"),
        ('args += os.environ.get("A", "--num-layers 4")', ("--num-layers", "4"), "by what changes them"),
        ('args += f"--num-layers {8 if N == 4 else 2}"', ("--num-layers", "8"), None),
        ('args = args.replace("--num-layers 4", "--num-layers 8")', (), "by what changes them"),
        ('args += f"--num-layers {n}"', ("--num-layers", "$n"), None),  # a caller's
        ('args += f"--num-layers {N}"', ("--num-layers", "4"), None),
        ('N = 4; N += size; args += f"--num-layers {N}"', ("--num-layers", "$N"), None),
        ("""args += f"--num-layers {os.environ['it''s']} --swiglu" """, ("--num-layers", "$(os.environ['its'])", "--swiglu"), None),
    ],
)  # fmt: skip
def test_a_flag_of_a_python_script_is_there_where_the_text_decides_it(body, words, noted):
    launch = lint(STRINGS.replace("{body}", body), "run.py").launch
    assert tuple(map(shown, launch.words)) == ("--hidden-size", "64", "--num-attention-heads", "4", *words)
    assert (noted is None) == (len(launch.notes) == 1) and any((noted or "strings are read") in n for n in launch.notes)


def test_words_for_which_others_stand_by_default_are_open():
    """Of those that the environment may have it was said that they lack the flag of the default."""
    found = lint(STRINGS.replace("{body}", 'args += os.environ.get("A") or "--num-layers 4"'), "run.py")
    assert found.forks[0][0][1].launch.words[-1] == hole("os.environ.get('A')")


def test_what_a_script_takes_for_its_arguments_is_said():
    run = 'torchrun pretrain_gpt.py --num-layers ${1:-4} --hidden-size 64 "$@"'
    given = "taken as called without arguments, which may say otherwise: "
    assert [n for n in lint(run).launch.notes if n.startswith(given)] == [f"{given}$1=4, $@"]
    assert not any(given in n for n in lint(f"set -- 4\n{run}").launch.notes)


@pytest.mark.parametrize(
    ("mode", "found"), [("", True), ("--megatron-to-hf-mode raw", True), ("--megatron-to-hf-mode bridge", False)]
)
def test_a_checkpoint_to_roll_out_with_says_nothing_of_the_model(mode, found):
    """slime builds it from the flags, unless its bridge does: without their norm on queries and keys it is no Qwen3."""
    flags = (
        "--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
        "--kv-channels 128 --use-rotary-position-embeddings --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu "
        "--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 151936"
    )
    text = f"python train.py --hf-checkpoint /models/Qwen3-8B --load /models/Qwen3-8B_torch_dist {mode} {flags}"
    assert any(f.id == "not-the-card" and "qk norm" in f.detail for f in lint(text).findings) == found


def test_rlinf_is_not_areal():
    tree = {
        "runner": {},
        "actor": {
            "model": {"precision": "fp16", "tensor_model_parallel_size": 4},
            "megatron": {"ckpt_format": "torch"},
        },
    }
    said = of_tree(tree, current())
    assert (said.program, said.words) == ("RLinf", ("--tensor-model-parallel-size=4", "--ckpt-format=torch"))
    del tree["runner"]
    assert of_tree(tree, current()).program == "AReaL"


AREAL = """
allocation_mode: sglang:d4+{}
actor: {{path: a/b, dtype: bfloat16, gradient_checkpointing: {}, optimizer: {{type: adam, lr: 1e-6, min_lr_ratio: 0.1,
  lr_scheduler_type: cosine}}, megatron: {{recompute_granularity: full, exp_avg_dtype: bfloat16, fp8_config: {{mode: hybrid}}}}}}
"""


@pytest.mark.parametrize(
    ("backend", "gpus", "sizes"),
    [
        ("megatron:d2t4", 8, (4, 1, 1, 1, None)),
        ("megatron:d4p2t2c1e4", 16, (2, 2, 1, 4, 1)),
        ("megatron:(attn:d1p2t4|ffn:d1p2t2e2)", 8, (4, 2, 1, 2, 2)),
    ],
)
@pytest.mark.parametrize("recomputed", [True, False])
def test_areal_says_layout_precision_and_schedule_in_words_of_its_own(backend, gpus, sizes, recomputed):
    launch = (found := lint(AREAL.format(backend, str(recomputed).lower()))).launch
    names = "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size"
    assert launch.gpus == gpus and launch.program == "AReaL"
    assert tuple(found.args.value(name) for name in names.split()) == sizes[:4]
    assert found.args.said("expert_tensor_parallel_size") == (sizes[4] is not None)
    assert sizes[4] in (None, found.args.value("expert_tensor_parallel_size"))
    told = {"bf16": True, "lr_decay_style": "cosine", "min_lr": 1e-7, "exp_avg_dtype": "bf16", "fp8": "hybrid"}
    assert {name: found.args.value(name) for name in told} == pytest.approx(told)
    assert found.args.said("recompute_granularity") == recomputed


def test_areal_with_a_list_for_a_dtype_is_read_without_it():
    tree = {
        "actor": {"backend": "megatron:d8", "megatron": {"main_grads_dtype": ["a"], "main_params_dtype": "float16"}}
    }
    said = of_tree(tree, current())
    assert said.program == "AReaL" and "--main-params-dtype=fp16" in said.words


def test_areal_with_another_backend_trains_nothing_of_megatrons():
    launch = lint(AREAL.format("fsdp:d8", "true")).launch
    assert launch.gpus is None and any("another backend trains" in note for note in launch.notes)
    verl = "actor_rollout_ref: {actor: {strategy: %s, megatron%s: {seed: 1}}, rollout: {tensor_model_parallel_size: 2, seed: 1}}"
    nemo = "policy: {dtensor_cfg: {sequence_parallel: true, context_parallel_size: 1}, megatron_cfg%s: {enabled: true, seed: 1}}"
    assert lint(nemo % "").launch.words
    for strategy in ("fsdp", "megatron"):
        notes = " ".join(lint(verl % (strategy, "")).launch.notes)
        assert ("another backend trains" in notes) is (strategy == "fsdp")
    for text in (verl % ("fsdp", "_"), nemo % "_"):
        with pytest.raises(Refused, match="no Megatron flag"):
            lint(text)


@pytest.mark.parametrize(
    ("unread", "said"),
    [
        ("--glu-activation swiglu", "GPT, 2 layers, as far as it is read: --glu-activation may make it another"),
        ("--multi-head-latent-attention --lf-gate --yarn-x 1 --my-experts 9", "--yarn-x and 1 more may make"),
        ("--multiple-of 256", "--multiple-of may make it another"),
        ("--spec mine.specs layers --no-such-thing 3", "--spec may make it another"),
        ("--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec --no-such-thing 3", None),
        ("--log-batch-size-to-tensorboard --DDP-impl local --deepspeed-activation-checkpointing", None),
    ],
)
def test_a_model_that_unread_flags_may_change_has_no_exact_count(unread, said):
    """bigscience's tr9c has a SwiGLU by a flag of its fork's, and was counted without."""
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --position-embedding-type rope"
    text = f"deepspeed pretrain_gpt.py {shape} {unread}"
    found = json.loads(report.as_json(lint(text)))["trains"]
    rows = found["text"]
    assert (found["parameters"] is None, rows["parameters"].startswith("?; without those")) == (bool(said),) * 2
    assert (said in rows["model"]) if said else rows["model"] == "GPT, 2 layers"


def test_json_of_a_program_with_flags_of_its_own():
    """What such a program leaves unsaid is not known, --spec too; JSON ended in a traceback."""
    words = "--load x --tensor_model_parallel_size 2 --micro_batch_size 1 --my_experts 3 --lora_rank 8"
    for spec in ("", " --spec $SPEC", " --spec"):
        assert json.loads(report.as_json(lint(f"megatron sft {words}{spec}")))["trains"]["parameters"] is None


@pytest.mark.parametrize(("split", "read"), [("args.split", False), ("'99,1,0'", True)])
def test_a_program_of_megatrons_is_no_recipe_of_bridges(split, read):
    """It hands on what its parser read: which words these are is said by the command that starts it."""
    body = f"GPTDatasetConfig(random_seed=args.seed, split={split}, tokenizer=tokenizer, reset_position_ids=args.reset)"
    text = f"def from_args(args):\n    tokenizer = get_tokenizer()\n    return {body}\n"
    if read:
        assert "--split=99,1,0" in lint(text, "train.py").launch.words
        return
    with pytest.raises(Refused, match=r"there is no Megatron flag in `train\.py`"):
        lint(text, "train.py")


SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 99 --position-embedding-type rope --seq-length 8"
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router"
FORK = "--la-module gla --la-mode chunk --layer-types LL --max-padding 8 --extra-vocab 9 --la-gate-fn swish --use-la-module"
PATTERN = "--hybrid-layer-pattern MM --num-layers 4 --moe-layer-freq 1"


@pytest.mark.parametrize(
    ("rules", "text", "finds"),
    [
        ("graphs-modules", f"torchrun pretrain_gpt.py {SHAPE} {GRAPHS}", True),
        ("graphs-modules", f"N=$(python flags.py)\ntorchrun pretrain_gpt.py {SHAPE} {GRAPHS} $N", False),
        ("missing-flag fp32", f"A=(env LR=1 pretrain.sh {SHAPE})\n${{A[@]}}", False),
        ("missing-flag fp32", f"A=(env LR=1 pretrain {SHAPE})\n${{A[@]}}", True),
        ("companion-later", f"torchrun pretrain_gpt.py {SHAPE} --split 1,0,0 --train-data-path a", True),
        ("companion-later", f"torchrun pretrain_gpt.py {SHAPE} --split 1,0,0 --train-data-path a {FORK}", False),
        ("num-layers-ignored moe-layer-freq-ignored", f"torchrun pretrain_mamba.py {SHAPE} {PATTERN}", True),
        ("num-layers-ignored moe-layer-freq-ignored", f"torchrun pretrain_mamba.py {SHAPE} {PATTERN} {FORK}", False),
        (
            "recompute-ignored recompute",
            f"torchrun pretrain_gpt.py {SHAPE} --recompute-granularity full --recompute-num-layers 1 --recompute-method block",
            False,
        ),
    ],
)
def test_what_another_program_or_text_may_say_is_no_failure(rules, text, finds):
    """Experts of flags that a command prints, a launch by a script that has the rest, a fork's own layers."""
    assert {f.id for f in lint(text).findings} & set(rules.split()) == (set(rules.split()) if finds else set())


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        ("pretrain_t5.py", "--decoder-num-layers 2", "pretrain_t5.py may make it another"),
        ("pretrain_gpt.py", "$(python flags.py)", "$(python flags.py) may make it another"),
        ("pretrain_gpt.py", "$MODEL_ARGS", "$MODEL_ARGS may make it another"),
        ("pretrain_gpt.py", "--t5-swiglu", "--t5-swiglu may make it another"),
        ("pretrain_gpt.py", "--spec my.layers spec", "--spec may make it another"),
        ("pretrain_gpt.py", "--its-fused-norm", "GPT, 2 layers"),
        ("pretrain_gpt.py", "$MODEL_PARALLEL_ARGS", "GPT, 2 layers"),
        ("pretrain_gpt.py", "${VP:+--num-layers-per-virtual-pipeline-stage $VP} $SEARCH_ARGS", "GPT, 2 layers"),
    ],
)
def test_a_model_of_which_only_a_part_is_read_has_no_exact_count(script, words, says):
    rows = json.loads(report.as_json(lint(f"torchrun {script} {SHAPE} {words}")))["trains"]["text"]
    assert rows["model"].endswith(says) and rows["parameters"].startswith("?") is ("another" in says)


def test_a_long_blend_is_cut_and_a_short_one_is_not():
    paths = " ".join(f"1 /data/{n}" for n in range(9))
    found = [lint(f"torchrun pretrain_gpt.py {SHAPE} --data-path {p}") for p in (paths, "1 /data/0")]
    also = [json.loads(report.as_json(one))["trains"]["text"]["also"] for one in found]
    assert also == ["--data-path 1 /data/0 1 /data/1 1 /data/2 ... (18 words)", "--data-path 1 /data/0"]


def test_two_fields_of_one_setting_with_two_values_are_told():
    tree = {"modules": {"pre_trainer": {"framework": "megatron", "overrides": {"norm_epsilon": 1e-6, "num_layers": 2}}}}
    tree |= {"work_group": "w", "user_name": "u", "exp_name": "e"}
    for epsilon, finds in ((1e-5, True), (1e-6, False)):
        tree["modules"]["pre_trainer"]["overrides"]["layernorm_epsilon"] = epsilon
        found = {f.id: f.detail for f in lint(yaml.safe_dump(tree)).findings}
        assert found == ({"given-twice": "its program knows which counts"} if finds else {})


def test_an_item_of_a_list_may_hold_several_words_and_another_list_is_another_launch():
    tasks = {
        "a": {"args": ["--seq-length 4096", "--calib 9"]},
        "b": {"args": ["--sft --seq-length 8 --lr 1e-4", "--bf16"]},
    }
    found = lint(yaml.safe_dump({"job": "j", "pipeline": tasks}))
    assert {"--seq-length", "8", "--lr", "1e-4", "--sft"} <= set(found.launch.words)
    assert "4096" not in found.launch.words and any("pipeline.a" in note for note in found.launch.notes)
    tasks = {"a": {"args": ["--swiglu", "--bf16"]}, "b": {"args": ["--swiglu", "--seq-length", "8"]}}
    assert {"--bf16", "8"} <= set(lint(yaml.safe_dump({"job": "j", "pipeline": tasks})).launch.words), "they agree"


def test_only_what_is_wanted_and_not_given_is_asked_for():
    words = "--fine-grained-activation-offloading --offload-modules moe_act --num-experts 4 --transformer-impl transformer_engine"
    found = [f.detail for f in lint(f"torchrun pretrain_gpt.py {SHAPE} {words}").findings if f.id == "companion"]
    assert "wants NVTE_CPU_OFFLOAD_V1=1 in the environment" in found and not any(
        "--offload-modules" in f for f in found
    )


def test_one_model_or_another_is_not_two():
    made = [f"m = TransformerConfig(num_layers={n}, hidden_size={n}28)" for n in (1, 2)]
    for text in (
        f"    if size:\n        {made[0]}\n    else:\n        {made[1]}\n    m.seq_length = 64\n    use(m)\n",
        f"    m.seq_length = 64\n    if size:\n        {made[0]}\n        return m\n    {made[1]}\n    return m\n",
    ):
        found = lint(
            f"def main(cfg, size):\n    cfg.train = TrainingConfig(train_iters=9, micro_batch_size=1)\n{text}", "r.py"
        )
        assert not any("not told apart" in note for note in found.launch.notes)


OF_A_FORK = f"torchrun pretrain_mamba_ours.py {SHAPE} --keep-last 3 --debug-mode --eval-loss-save"


@pytest.mark.parametrize(
    ("script", "more", "layers", "width"),
    [
        ("pretrain_mamba_ours.py", "--keep-last 3 --debug-mode --eval-loss-save", "?", "hidden 64, MLP ?"),
        ("pretrain_mamba.py", "--hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5", "?", "hidden 64, MLP ?"),
        ("pretrain_mamba.py", "", "none", "hidden 64"),
    ],
)
def test_a_hybrid_whose_layers_ratios_or_a_fork_make_is_not_one_of_none(script, more, layers, width):
    found = lint(f"torchrun {script} {SHAPE} {more}")
    rows = dict(describe.rows(found.args, found.model))
    assert rows["layers"] == layers and rows["width"] == width


@pytest.mark.parametrize(("flag", "activation"), [("--xielu", "?"), ("--act-swish", "?"), ("--keep-last", "GELU")])
def test_a_forks_own_activation_is_not_megatrons_default(flag, activation):
    """Apertus was told as a GPT of GELU, counted to the last parameter."""
    found = lint(f"torchrun pretrain_gpt.py {SHAPE} --normalization RMSNorm {flag}")
    rows = dict(describe.rows(found.args, found.model))
    assert rows["activation"].startswith(activation) and rows["parameters"].startswith("?") is (activation == "?")


@pytest.mark.parametrize(("more", "noted"), [("", True), ("--swiglu --normalization RMSNorm", False)])
def test_a_question_mark_is_explained_where_there_is_one(more, noted):
    said = (
        "--ffn-hidden-size 128 --position-embedding-type rope --rotary-base 10000 --hidden-dropout 0 --attention-dropout 0 --bf16 "
        "--norm-epsilon 1e-6 --disable-bias-linear --untie-embeddings-and-output-weights --adam-beta1 0.9 --adam-beta2 0.95 "
        "--weight-decay 0.1 --clip-grad 1 --lr-decay-style cosine --min-lr 0 --init-method-std 0.02 --global-batch-size 8 --lr 1 "
        "--lr-warmup-iters 0 --train-iters 9 --micro-batch-size 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--context-parallel-size 1"
    )
    found = lint(f"torchrun --nproc-per-node 1 own.py {SHAPE} {more} {said} --its-a 1 --its-b 1 --its-c 1", "own.sh")
    assert any("`?` is not said here" in n for n in describe.notes(found.args, found.model)) is noted


def test_blocks_of_no_layer_are_told_where_the_layout_stands_and_are_no_finding():
    """Who writes 0 knows; the report said `recompute full`, too."""
    found = lint(
        f"torchrun pretrain_gpt.py {SHAPE} --recompute-granularity full --recompute-num-layers 0 --recompute-method block"
    )
    assert "recompute full, of no layer" in dict(describe.rows(found.args, found.model))["layout"]
    assert "recompute-ignored" not in {f.id for f in found.findings}


def test_a_script_that_starts_another_is_no_stray_word_before_it():
    found = lint(f"torchrun --nproc-per-node 8 profiled.py pretrain_gpt.py {SHAPE}")
    assert found.launch.script == "pretrain_gpt.py" and "stray-word" not in {f.id for f in found.findings}


@pytest.mark.parametrize(("pattern", "doubted"), [("M-*-", True), ("ME*E", False)])
def test_experts_that_no_letter_of_a_forks_pattern_stands_for_may_be_in_its_layers(pattern, doubted):
    text = report.text(lint(f"{OF_A_FORK} --hybrid-override-pattern {pattern} --num-experts 8 --moe-router-topk 2"))
    assert ("--num-experts 8 may make it another" in " ".join(text.split())) is doubted


def test_experts_are_as_wide_as_the_mlp_in_any_program_with_megatrons_layers():
    words = "--num-experts 8 --moe-router-topk 2 --rollout-a 1 --rollout-b 2 --hf-checkpoint c"
    for more, wide in (("--ffn-hidden-size 320", "8 of 320 (the MLP's), top 2"), ("", "8 of ?, top 2")):
        assert wide in report.text(lint(f"python train.py {SHAPE} {words} {more}"))


@pytest.mark.parametrize(("flag", "told"), [("--log-expert-load", True), ("--moe-gating-type sigmoid", False)])
def test_a_choice_of_one_is_told_beside_own_flags_that_do_not_choose(flag, told):
    words = f"{SHAPE} --num-experts 8 --moe-router-topk 1 {flag}"
    assert ("moe-top-1" in {f.id for f in lint(f"torchrun train.py {words}").findings}) is told


TEXTS_OF_TWO = '''
SMALL = """
    --num-layers 36 --hidden-size 2560
"""
LARGE = """
    --num-layers 36 --hidden-size 4096
"""

def small():
    return config(words=f"""{SMALL} --global-batch-size 256""")

def large():
    return config(words=f"""{LARGE} --global-batch-size 1024 --lr 1e-4""")
'''


def test_texts_of_two_launches_are_not_put_together():
    found = lint(TEXTS_OF_TWO, "configs.py")
    assert found.args.hidden_size == 4096 and found.args.global_batch_size == 1024 and not found.findings


@pytest.mark.parametrize("word", ['"${{ARGS[@]}}"', '"$@"', "$*", "${{@:2}}", "$ARGS", "${{ARGS}}"])
def test_a_shells_variable_in_the_text_of_a_script_is_filled_in_by_the_shell(word):
    text = (
        f'def made(a):\n    return f"""ARGS=(\n{{a}}\n)\ntorchrun pretrain_gpt.py {word} --num-layers 2 --bf16\n"""\n'
    )
    found = lint(text, "generate.py")
    assert found.args.num_layers == 2 and "stray-word" not in {f.id for f in found.findings}


def test_the_fields_of_several_models_are_not_one_models():
    """A projector of one layer was told with the heads of the language model."""
    made = "cfg.train = TrainingConfig(train_iters=9, global_batch_size=8, micro_batch_size=1)\n    "
    models = ["TransformerConfig(num_layers=32, hidden_size=4096)", "TransformerConfig(num_layers=1, hidden_size=512)"]
    for several in (models, models[:1]):
        text = (
            f"def main(cfg):\n    {made}"
            + "\n    ".join(f"m{i} = {one}" for i, one in enumerate(several))
            + "\n    use(m0, m1)\n"
        )
        found = lint(text, "r.py")
        assert found.args.train_iters == 9 and ("num_layers" in found.args.given) is (len(several) == 1)
        assert any("whose fields are not told apart: num_layers, hidden_size" in n for n in found.launch.notes) is (
            len(several) > 1
        )


@pytest.mark.parametrize(
    ("layout", "fix"),
    [
        ("Et|tL", "an `m` for each depth of MTP"),
        ("Et|mL", "a `t` for each layer"),
        ("tt|m", "end it with `L`"),
        ("Et|tXmL", "write E, t, m and L"),
        ("Et|tZYXWVmL", "write E, t, m and L"),
    ],
)
def test_what_a_layout_lacks_is_said_of_the_layout(layout, fix):
    """The fix spoke of a pattern's `|`, and the flag was the pipeline's size."""
    words = f"{SHAPE} --mtp-num-layers 1 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout '{layout}'"
    (found,) = (
        f for f in lint(f"torchrun --nproc-per-node 2 pretrain_gpt.py {words}").findings if f.id == "pipeline-split"
    )
    assert found.flag == f"--pipeline-model-parallel-layout {layout}" and fix in found.fix
    assert "no layer" not in found.detail or f"no layer `{min(set(layout) - set('EtmL|'))}`" in found.detail


@pytest.mark.parametrize("words", [SHAPE, "--hidden-size 64"])
def test_what_is_not_known_of_a_script_or_its_environment_is_shown_as_it_is_written(words):
    """The marks around it came out, which no terminal and no font has."""
    text = f"export LOGS=$(hostname)/logs\ntorchrun --nproc-per-node 2 $(realpath .)/train_it.py {words} --lr 1e-4"
    found = lint(text, "r.sh")
    data = json.loads(report.as_json(found))
    assert data["script"] == "$(realpath .)/train_it.py" and data["environment"] == {"LOGS": "$hostname/logs"}
    assert "$(realpath .)/train_it.py" in (said := report.text(found)) and not re.search("[\ue000-\uf8ff]", said)
