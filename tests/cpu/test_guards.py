"""The trainer's wiring without a training: what stops a run at a NaN, and which argument reaches which field of the data's config."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import harness
import pytest
import torch
from harness import Case, on_ranks
from megatron.core import rerun_state_machine as rerun
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunState, RerunStateMachine
from megatron.training import training
from presets import lowered

from nam_megatron.errors import Refused
from nam_megatron.events import early
from nam_megatron.mends import whole_step
from nam_megatron.mends.install import Run
from nam_megatron.runtime import heartbeat, pretrain
from nam_megatron.runtime.nonfinite import Watch
from nam_megatron.runtime.outofmemory import kind_of, where

# Memory ------------------------------------------------------------------------------------------------------------------------------


class Experts(torch.nn.Module):
    def forward(self, x):
        raise torch.OutOfMemoryError


class Shared(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.second = torch.nn.Identity()

    def forward(self, x):
        return self.second(x)


class Both(torch.nn.Module):
    """Its experts run before the shared one's second half."""

    def __init__(self):
        super().__init__()
        self.layer_number, self.shared, self.experts = 2, Shared(), Experts()
        self.shared.second.register_forward_pre_hook(lambda *_: self.early())

    def early(self):
        self.experts(1)

    def forward(self, x):
        return self.shared(x)


def test_who_waits_for_the_experts_is_not_where_memory_ran_out():
    plan = SimpleNamespace(mtp=(), layers=[SimpleNamespace(kind=kind) for kind in ("mlp", "moe")])
    with pytest.raises(torch.OutOfMemoryError) as err:
        torch.nn.Sequential(torch.nn.Identity(), Both())(1)
    assert where(err.value, plan).layer == "layer 2 (moe): 1 (Both, Experts)"


# NaN ---------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Megatron's rerun state machine, as far as it is asked."""

    first_iteration_complete: bool = True
    state: RerunState = RerunState.NOT_RUNNING_YET
    mode: RerunMode = RerunMode.VALIDATE_RESULTS
    rejected: list = field(default_factory=list)

    def get_mode(self):
        return self.mode

    def validate_result(self, result, rejection_func, message, tolerance, fatal):
        self.rejected.append((message, tolerance, fatal, bool(rejection_func(result))))

    def is_unexpectedly_large(self, loss, threshold, context):
        return loss > threshold and context == "loss"


WATCH = SimpleNamespace(verdict=lambda: "first seen here", began_here=lambda: True)


@pytest.fixture
def guard(monkeypatch, capsys):
    """(loss, watch, machine, arguments) -> what `check` does: the words of NonFinite or those on stderr, None for nothing."""

    def checked(loss: float, watch=WATCH, machine=None, **args) -> str | None:
        pretrain.report.cache_clear()
        args = {
            "cuda_graph_impl": "none",
            "check_for_nan_in_loss_and_grad": True,
            "check_for_spiky_loss": False,
            "save": "ckpt",
            "curr_iteration": 6,
        } | args
        monkeypatch.setattr(pretrain, "get_args", lambda: SimpleNamespace(**args))
        monkeypatch.setattr(pretrain, "get_rerun_state_machine", lambda: machine)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
        try:
            pretrain.check(torch.tensor(loss), watch and watch.verdict)
        except pretrain.NonFinite as stop:
            return f"stopped: {stop}"
        return capsys.readouterr().err or None

    return checked


@pytest.mark.parametrize(
    ("code", "done", "signalled", "every", "why"),
    [
        (rerun.EXIT_CODE_RESUME_TO_DISAMBIGUATE, 4, False, 2, "wrong result"),
        (rerun.EXIT_CODE_FAILED_ON_RESULT_VALIDATION, 4, True, None, "wrong result"),
        (1, 4, True, 2, "error"),
        ("no room", 4, False, 2, "error"),
        (None, 4, False, 2, "gave up"),
        (0, 4, False, 2, "planned stop"),
        (0, 4, True, 2, "signal"),
        (0, 3, False, 2, "signal"),  # which another rank got
        (0, 4, False, None, "signal"),
    ],
)
def test_why_megatrons_loop_left_by_itself(code, done, signalled, every, why):
    assert early(code, done, signalled, every) == why


@pytest.mark.parametrize("loss", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("save", "complete", "stops"),
    [("ckpt", True, False), ("ckpt", False, True), (None, True, True), (None, False, True)],
)
def test_a_loss_that_is_no_number_ends_the_run_where_megatron_would_not(guard, loss, save, complete, stops):
    """In step 1 also with a folder to save in: Megatron's machine skips it and would train on."""
    machine = Machine(first_iteration_complete=complete)
    said = guard(loss, machine=machine, save=save)
    text = f"step 7, rank 3: the loss is {loss}; first seen here"
    assert said == (f"stopped: {text}" if stops else f"error: {text}\n")
    asked = {"NaN": loss != loss, "Inf": loss == loss}
    assert machine.rejected == [
        (f"found {what} in local forward loss calculation", 0.0, True, rejected) for what, rejected in asked.items()
    ]


def test_nothing_is_said_of_a_loss_that_is_a_number_or_that_nobody_asked_about(guard):
    assert guard(2.5, machine=Machine()) is None
    # Megatron's machine repeats the step, and it is watched then
    assert guard(torch.nan, watch=None, machine=Machine()) is None
    silent = Machine()
    assert guard(torch.nan, machine=silent, check_for_nan_in_loss_and_grad=False) is None and silent.rejected == []


def test_a_spike_is_reported_and_trained_on(guard):
    for loss, spiky in ((pretrain.SPIKY + 1.0, True), (pretrain.SPIKY - 1.0, False)):
        machine = Machine()
        assert guard(loss, machine=machine, check_for_spiky_loss=True) is None
        assert machine.rejected[-1] == ("Spiky loss", 0.0, False, spiky) and len(machine.rejected) == 3
    machine = Machine()
    guard(99.0, machine=machine, check_for_spiky_loss=True, check_for_nan_in_loss_and_grad=False)
    assert len(machine.rejected) == 1


@pytest.mark.parametrize(
    ("first_done", "state", "mode", "check", "watched"),
    [
        (False, RerunState.NOT_RUNNING_YET, RerunMode.VALIDATE_RESULTS, True, True),
        (True, RerunState.NOT_RUNNING_YET, RerunMode.VALIDATE_RESULTS, True, False),
        (True, RerunState.RERUNNING_IN_PLACE, RerunMode.VALIDATE_RESULTS, True, True),
        (False, RerunState.NOT_RUNNING_YET, RerunMode.DISABLED, True, False),
        (False, RerunState.NOT_RUNNING_YET, RerunMode.VALIDATE_RESULTS, False, False),
        (True, RerunState.RERUNNING_IN_PLACE, RerunMode.DISABLED, True, False),
    ],
)
def test_which_steps_are_watched(monkeypatch, first_done, state, mode, check, watched):
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=check, cuda_graph_impl="transformer_engine")
    monkeypatch.setattr(pretrain, "get_args", lambda: args)
    assert pretrain.watched(Machine(first_done, state, mode)) == watched


# A step as one CUDA graph ------------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """A group of gradient buffers, as Megatron's DDP has them."""

    looked: list = field(default_factory=list)
    buckets: list = field(default_factory=lambda: [SimpleNamespace(grad_data=torch.ones(3)) for _ in range(2)])

    def check_grads(self, check_for_nan_or_inf, check_for_large):
        self.looked.append((check_for_nan_or_inf, check_for_large))


@pytest.fixture
def replayed(monkeypatch):
    """(losses of the microbatches of each step) -> what is looked at in each: (how often `begin` ran, the losses, Megatron's looks at
    gradients).

    A step that is None is the one before, repeated by Megatron's machine. Gradients of the second group are what the step's last loss is.
    """
    machine = Machine()
    monkeypatch.setattr(whole_step, "get_rerun_state_machine", lambda: machine)

    class Megatrons(whole_step.FullCudaGraphWrapper):
        """As Megatron's class: eager for so many steps, then a capture and its first replay, then replays."""

        cuda_graph: ClassVar = {"training": None}
        curr_iteration: ClassVar = {"training": 0}

        def __init__(self, forward_backward_func, cuda_graph_warmup_steps):
            self.forward_backward_func = forward_backward_func
            self.cuda_graph_warmup_steps = cuda_graph_warmup_steps

        def __call__(self, **named):
            if self.curr_iteration["training"] == self.cuda_graph_warmup_steps:
                self.cuda_graph["training"] = "captured"
            self.curr_iteration["training"] += 1
            return self.forward_backward_func(**named)

    def looks(steps, warm_up):
        begun, seen, groups = [], [], [Group(), Group()]
        monkeypatch.setattr(whole_step, "FullCudaGraphWrapper", Megatrons)
        whole_step.install(Run(None, 0.0, begin=lambda: begun.append(1), look=lambda loss: seen.append(loss.item())))
        chunk = SimpleNamespace(bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:])
        losses = []
        wrapped = training.FullCudaGraphWrapper(
            lambda **_: [{"lm loss": torch.tensor([loss, 9.0])} for loss in losses], warm_up
        )
        found = []
        for step in steps:
            losses = step or losses
            machine.state = RerunState.INITIAL_RUN if step else RerunState.RERUNNING_IN_PLACE
            groups[1].buckets[1].grad_data[1] = losses[-1]
            wrapped(model=[chunk], data_iterator=None, num_microbatches=len(losses))
            found.append((len(begun), list(seen), [len(group.looked) for group in groups]))
            begun.clear(), seen.clear()
        assert all(look == (True, False) for group in groups for look in group.looked)
        return found

    monkeypatch.setattr(training, "FullCudaGraphWrapper", training.FullCudaGraphWrapper)
    return looks


def test_each_replay_is_looked_at_once_and_eager_steps_by_themselves(replayed):
    """Gradients in every step: Megatron's own look at them is off in all. Where all are finite it would say nothing, and is spared."""
    assert replayed([(1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, torch.inf)], warm_up=2) == [
        (0, [], [0, 0]), (0, [], [0, 0]), (0, [5.0, 6.0], [0, 0]), (1, [7.0, torch.inf], [1, 1]),
    ]  # fmt: skip


def test_a_repeated_step_is_not_the_one_that_is_captured(replayed):
    """Eager, it names the layer; a replay that is repeated is replayed."""
    assert replayed([(1.0,), (torch.nan,), None, (2.0,), None], warm_up=2) == [
        (0, [], [0, 0]), (0, [], [1, 1]), (0, [], [2, 2]), (0, [2.0], [2, 2]), (1, [2.0], [3, 3]),
    ]  # fmt: skip


@pytest.mark.parametrize("listed", [False, True])
def test_samples_that_are_read_ahead_come_in_their_order(monkeypatch, listed):
    """Behind the repetition of a step too, and to the last one, where fewer are left than a step has."""
    monkeypatch.setattr(rerun, "get_rerun_state_machine", lambda: Machine())
    read = []
    samples = RerunDataIterator(read.append(i) or i for i in range(7))
    given = [samples] if listed else samples

    def step() -> list[int]:
        found = [next(samples) for _ in range(2)]
        whole_step.read_ahead(given, 2)
        return found

    assert step() == [0, 1] and read == [0, 1, 2, 3]
    samples.rewind()
    assert step() == [0, 1] and read == [0, 1, 2, 3]
    samples.advance()
    assert [step(), step(), next(samples)] == [[2, 3], [4, 5], 6] and read == [*range(7)]
    with pytest.raises(StopIteration):
        next(samples)
    whole_step.read_ahead([None], 2)


@pytest.mark.parametrize(("bad", "number"), [(1, 2), (0, 1)])
def test_megatrons_machine_finds_a_replays_loss_again_in_an_eager_step(guard, monkeypatch, bad, number):
    """By the number of its microbatch: the step that is repeated from a checkpoint, on another GPU, runs eagerly."""
    guard(1.0, machine=Machine(), watch=None, cuda_graph_impl="full_iteration")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.state, machine.first_iteration_complete = RerunState.INITIAL_RUN, True
    monkeypatch.setattr(pretrain, "get_rerun_state_machine", lambda: machine)
    losses = torch.ones(2)
    losses[bad] = torch.nan
    for loss in losses:
        pretrain.look(loss)
    assert machine.rerun_requested and machine.failed_validation_call.sequence == number


def test_a_graph_is_looked_at_although_the_arguments_deny_it(guard, monkeypatch):
    whole = {"cuda_graph_impl": "full_iteration", "check_for_nan_in_loss_and_grad": False}
    machine = Machine()
    assert guard(torch.nan, watch=None, machine=machine, **whole) is None  # it will be repeated
    assert [rejected for *_, rejected in machine.rejected] == [True, False]
    args = SimpleNamespace(**whole, check_for_spiky_loss=False, save=None, curr_iteration=6)
    monkeypatch.setattr(pretrain, "get_args", lambda: args)
    machine.state = RerunState.RERUNNING_IN_PLACE
    with pytest.raises(
        pretrain.NonFinite, match="step 7, rank 3: the loss is nan; the step was replayed as one CUDA graph"
    ):
        pretrain.look(torch.tensor(torch.nan))


def test_a_replay_says_nothing_of_a_microbatch(tmp_path):
    """What the eager ones took, compilation included, would be said of the run until its end."""
    (tmp_path / heartbeat.FOLDER).mkdir()
    heart = heartbeat.Heart()
    heart.start(tmp_path / "plan", 0)
    told = []
    for done, blind in enumerate((False, False, True)):
        heart.step(done, blind)
        told.append(json.loads((tmp_path / heartbeat.FOLDER / "0").read_text())["spent"] is not None)
        if not blind:
            heart.looked()
    assert told == [False, True, False]


def test_nothing_is_looked_at_while_a_step_is_captured(guard, monkeypatch):
    """A look would wait for the GPU, and end the capture."""
    machine = Machine()
    guard(1.0, machine=machine, cuda_graph_impl="full_iteration")
    machine.rejected.clear()
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        loss, tokens, _ = pretrain.loss_func(torch.ones(2, 4), None, torch.ones(2, 4))
        assert (loss.item(), tokens.item(), bool(machine.rejected)) == (8.0, 8, not capturing)


class Layer(torch.nn.Module):
    def __init__(self, number: int | None, factor: float = 1.0):
        super().__init__()
        if number is not None:
            self.layer_number = number
        self.factor, self.inner = factor, torch.nn.Identity()

    def forward(self, x, *, mask=None):
        return self.inner(x) * self.factor, mask


class Model(torch.nn.Module):
    """A stage with blocks of every place that is named; those of `skipped` do not run."""

    def __init__(self, skipped=(), **factors: float):
        super().__init__()
        self.embedding, self.output_layer = (
            Layer(None, factors.get("embedding", 1)),
            Layer(None, factors.get("output", 1)),
        )
        self.decoder, self.mtp = torch.nn.Module(), torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([Layer(4, factors.get("four", 1)), Layer(5, factors.get("five", 1))])
        self.decoder.final_norm = Layer(None)
        self.mtp.layers = torch.nn.ModuleList([Layer(1, factors.get("mtp", 1))])
        self.skipped = skipped

    def forward(self, x):
        blocks = [self.embedding, *self.decoder.layers, self.decoder.final_norm, *self.mtp.layers, self.output_layer]
        for i, block in enumerate(blocks):
            if i not in self.skipped:
                at, named = ((), {"x": x}) if i else ((x,), {})  # Megatron names the input of a layer
                x, _ = block(*at, **named, mask=[torch.ones(1), {"ids": torch.tensor([7])}])
        return x


NAN = float("nan")


@pytest.mark.parametrize(
    ("model", "x", "here", "said"),
    [
        (Model(), 1.0, False, "every block's output is finite, so it began in the loss itself"),
        (Model(), NAN, False, "it came with the input of this pipeline stage"),
        (Model(skipped=(0,)), NAN, False, "it came with the input of this pipeline stage"),
        (Model(embedding=NAN), 1.0, True, "first seen in the output of embedding (Layer)"),
        (Model(four=float("inf"), five=0), 1.0, True, "first seen in the output of decoder.layers.0 (layer 4, Layer)"),
        (Model(five=-float("inf")), 1.0, True, "first seen in the output of decoder.layers.1 (layer 5, Layer)"),
        (Model(mtp=NAN), 1.0, True, "first seen in the output of mtp.layers.0 (layer 1, Layer)"),
        (Model(output=NAN), 1.0, True, "first seen in the output of output_layer (Layer)"),
        (Model(skipped=(1, 2), output=NAN), 1.0, True, "first seen in the output of output_layer (Layer) (2 blocks could not be seen)"),
        (Model(skipped=(3,)), 1.0, False, "every block's output is finite, so it began in the loss itself (1 blocks could not be seen)"),
    ],
    ids=lambda v: v[:60] if isinstance(v, str) else "",
)  # fmt: skip
def test_where_a_nan_began(model, x, here, said):
    watch = Watch(model)
    with torch.no_grad():
        model(torch.full((2, 3), x))
    watch.close()
    assert (watch.began_here(), watch.verdict()) == (here, said)
    model(torch.full((2, 3), NAN))  # a recomputed pass is not looked at
    assert watch.verdict() == said


def test_an_mtp_depths_layers_are_numbered_from_one_again():
    plan = lowered("nam56r_native_dp", "feature.mtp.depths=1").plan
    for name, kinds in (("decoder.layers", [layer.kind for layer in plan.layers]), ("mtp.layers.0.layers", plan.mtp)):
        assert [kind_of(f"{name}.7", n, plan) for n in range(len(kinds) + 2)] == ["unknown", *kinds, "unknown"]


# The data's config ---------------------------------------------------------------------------------------------------------------------

# Megatron's field <- the argument that it is; all different, and none of them Megatron's default.
FIELDS = {
    "random_seed": "seed", "sequence_length": "seq_length", "split": "split", "multiple_validation_sets": "multiple_validation_sets",
    "full_validation": "full_validation", "num_dataset_builder_threads": "num_dataset_builder_threads", "path_to_cache": "data_cache_path",
    "mmap_bin_files": "mmap_bin_files", "reset_position_ids": "reset_position_ids", "reset_attention_mask": "reset_attention_mask",
    "eod_mask_loss": "eod_mask_loss", "create_attention_mask": "create_attention_mask_in_dataloader",
    "object_storage_cache_path": "object_storage_cache_path", "mid_level_dataset_surplus": "mid_level_dataset_surplus",
    "allow_ambiguous_pad_tokens": "allow_ambiguous_pad_tokens", "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap", "context_parallel_size": "context_parallel_size",
    "data_parallel_size": "data_parallel_size",
}  # fmt: skip
FIM = {
    "fim_rate": "fim_rate", "fim_spm_rate": "fim_spm_rate", "fim_split_sample": "fim_split_sample",
    "fim_fragment_rate": "fim_fragment_rate", "fim_no_prefix": "fim_no_prefix",
}  # fmt: skip
TOKENS = {"prefix": "<p>", "middle": "<m>", "suffix": "<s>", "pad": "<q>", "eod": "<e>"}


class Words:
    vocab_size, known, eod = 100, [*TOKENS.values()], 4

    @property
    def _tokenizer(self):
        return self

    def tokens_to_ids(self, tokens):
        return [self.known.index(t) if t in self.known else None for t in tokens]

    def ids_to_tokens(self, ids):
        return [self.known[i] for i in ids]


def arguments(**changes) -> SimpleNamespace:
    """Each argument holds its own name, so that whatever arrives says where it comes from."""
    given = {argument: f"<{argument}>" for argument in (*FIELDS.values(), *FIM.values())}
    given |= {f"fim_{name}_token": token for name, token in TOKENS.items()}
    given |= {
        "mock_data": False,
        "fim_data": False,
        "padded_vocab_size": 100,
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
    }
    return SimpleNamespace(**given | changes)


@pytest.fixture
def configured(monkeypatch):
    words = Words()
    monkeypatch.setattr(pretrain, "GPTDatasetConfig", lambda **fields: fields)
    monkeypatch.setattr(pretrain, "GPTFIMDatasetConfig", lambda **fields: fields)
    monkeypatch.setattr(pretrain, "get_tokenizer", lambda: words)

    def of(args: SimpleNamespace, blend=("blend", None)):
        monkeypatch.setattr(pretrain, "get_blend_and_blend_per_split", lambda _: blend)
        kind, fields = pretrain.dataset_config(args)
        assert fields.pop("tokenizer") is words
        return kind.__name__, fields

    return of


COMMON = {name: f"<{argument}>" for name, argument in FIELDS.items()} | {"sequence_parallel_size": 4}


def test_every_argument_of_the_data_reaches_its_field(configured):
    assert configured(arguments()) == ("GPTDataset", COMMON | {"blend": "blend", "blend_per_split": None})
    assert configured(arguments(), (None, "parts")) == (
        "GPTDataset",
        COMMON | {"blend": None, "blend_per_split": "parts"},
    )
    mock = configured(arguments(mock_data=True), (None, None))
    assert mock == ("MockGPTDataset", COMMON | {"blend": None, "blend_per_split": None})
    assert configured(arguments(sequence_parallel=False))[1]["sequence_parallel_size"] == 0
    fim = COMMON | {name: f"<{argument}>" for name, argument in FIM.items()} | {"fim_extra_tokens": TOKENS}
    assert configured(arguments(fim_data=True)) == ("GPTFIMDataset", fim | {"blend": "blend", "blend_per_split": None})


def test_a_vocabulary_that_the_model_has_not_is_refused(configured):
    assert configured(arguments(padded_vocab_size=101)) and configured(
        arguments(padded_vocab_size=99, mock_data=True), (None, None)
    )
    with pytest.raises(Refused, match="the tokenizer has 100 entries, and the model's vocabulary 99"):
        configured(arguments(padded_vocab_size=99))


@pytest.mark.parametrize("name", TOKENS)
def test_a_token_that_the_tokenizer_has_not_is_refused_by_its_key(configured, name):
    with pytest.raises(Refused) as refused:
        configured(arguments(fim_data=True, **{f"fim_{name}_token": "<other>"}))
    assert [(p.key, p.message) for p in refused.value.problems] == [
        (f"feature.fim.{name}_token", "the tokenizer has no token `<other>`")
    ]


def test_documents_that_end_with_another_token_are_refused(configured, monkeypatch):
    """Megatron would part no two documents, and permute across them."""
    monkeypatch.setattr(Words, "eod", 2)
    with pytest.raises(Refused) as refused:
        configured(arguments(fim_data=True))
    assert [(p.key, p.message) for p in refused.value.problems] == [
        ("feature.fim.eod_token", "documents of this tokenizer do not end with `<e>`")
    ]


@pytest.mark.parametrize(
    ("changes", "blend", "said"),
    [
        ({"mock_data": True}, ("x", None), "mock data and a data path at once"),
        ({"mock_data": True}, (None, "x"), "mock data and a data path at once"),
        ({}, (None, None), "no training data: neither a data path nor mock data"),
        ({"mock_data": True, "fim_data": True}, (None, None), "fill-in-the-middle of mock data"),
    ],
)
def test_data_is_never_replaced_by_mock_data(configured, changes, blend, said):
    """Megatron takes the absence of a data path for a wish for mock data."""
    with pytest.raises(Refused, match=said):
        configured(arguments(**changes), blend)


# Arguments whose other half is in Megatron's scripts: looked up in pretrain_hybrid.py and training.py of 0.19.2.
ELSEWHERE = {
    "spec", "yaml_cfg", "sft", "dataloader_inter_document_masking", "hybrid_context_parallel", "logits_load_dir", "log_straggler",
    "inprocess_restart",
}  # fmt: skip


@pytest.mark.parametrize("names", [*((name,) for name in sorted(ELSEWHERE)), ("sft", "spec")], ids=" ".join)
def test_arguments_that_nothing_here_would_act_on_are_refused(names):
    with pytest.raises(Refused) as refused:
        pretrain.settings(SimpleNamespace(**{name: name in names for name in ELSEWHERE}), None)
    flags = {f"`--{name.replace('_', '-')}` is not served by this trainer" for name in names}
    assert {problem.message for problem in refused.value.problems} == flags


@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf])
def test_megatrons_machine_hears_of_gradients_that_are_not_finite(bad):
    """Its own DDP, buckets and machine: it is asked where one is, or where a step is repeated, and repeats the step itself."""

    def look(rig):
        rerun.initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
        machine, asked = rerun.get_rerun_state_machine(), []
        machine.state, machine.first_iteration_complete = RerunState.INITIAL_RUN, True
        validate = machine.validate_result
        machine.validate_result = lambda **named: asked.append(named["message"]) or validate(**named)
        groups = [*rig.ddp.bucket_groups, *rig.ddp.expert_parallel_bucket_groups]
        harness.step(rig)
        if bad is not None:
            groups[-1].buckets[-1].grad_data[3] = bad
        whole_step.look_at_gradients([rig.ddp])
        first = len(asked), machine.rerun_requested
        machine.state = RerunState.RERUNNING_IN_PLACE
        whole_step.look_at_gradients([rig.ddp])
        return len([b for group in groups for b in group.buckets]), *first, len(asked) - first[0]

    ((buckets, asked, again, repeated),) = on_ranks(Case("*E"), look)
    assert (asked, again) == ((0, False) if bad is None else (2 * buckets, True))
    assert repeated == 2 * buckets
