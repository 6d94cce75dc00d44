"""Exports in Hugging Face's Trainer, from a config alone, and with weights that stay on the disk."""

import copy

import pytest
import torch
from conftest import EXPORTS, opened, random
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Told(TrainerCallback):
    """The losses that Trainer logs."""

    def __init__(self):
        self.losses, self.norms = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])


def trained(model, at, accumulation: int, **more) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients' norms of two steps of eight sequences, and the weights behind them; labels that count differ in number, and
    none is the first, which old versions count though nothing predicts it."""
    tokens = random(16, 12)
    labels = tokens.clone()
    for row in range(16):
        labels[row, : 1 + row % 5] = -100
    data = [{"input_ids": t, "labels": l} for t, l in zip(tokens, labels, strict=True)]
    settings = {
        "output_dir": str(at), "per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation,
        "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant", "report_to": [],
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "train_sampling_strategy": "sequential", "seed": 0,
    }  # fmt: skip
    told = Told()
    Trainer(model, TrainingArguments(**settings | more), train_dataset=data, callbacks=[told]).train()
    return torch.tensor([told.losses, told.norms]), {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.slow
def test_accumulation_changes_nothing(model, tmp_path):
    """Loss, gradient and step are those of the whole batch, whatever parts it comes in."""
    one, weights = trained(copy.deepcopy(model), tmp_path, 1)
    four, others = trained(copy.deepcopy(model), tmp_path, 4)
    torch.testing.assert_close(four, one, rtol=1e-5, atol=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-5, atol=1e-5)
    tokens = random(16, 12)[:8]
    labels = torch.stack([row.index_fill(0, torch.arange(1 + i % 5), -100) for i, row in enumerate(tokens)])
    assert one[0, 0].item() == pytest.approx(model(tokens, labels=labels).loss.item(), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_computes_the_same(model, tmp_path, reentrant):
    plain, weights = trained(copy.deepcopy(model), tmp_path, 2)
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    saved, others = trained(model, tmp_path, 2, **more)
    torch.testing.assert_close(saved, plain, rtol=1e-5, atol=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-5, atol=1e-5)
    passes = []
    for layer in model.model.layers:
        layer.mixer.register_forward_pre_hook(lambda *_: passes.append(1))
    loss = model(random(2, 9), labels=random(2, 9)).loss
    assert len(passes) == len(model.model.layers)
    loss.backward()
    assert len(passes) == 2 * len(model.model.layers)


def test_no_cache_beside_gradient_checkpointing(model):
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match="use_cache: none beside gradient checkpointing"):
        model(random(1, 4), use_cache=True)
    assert model.generate(random(1, 4), max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 6)
    model.gradient_checkpointing_disable()
    assert model(random(1, 4), use_cache=True).past_key_values.length == 4


def test_labels_that_do_not_count(model):
    tokens, labels = random(2, 8), random(2, 8, seed=1)
    labels[0, :6] = labels[1, 3] = -100
    out = model(tokens, labels=labels)
    each = out.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    counted = labels[:, 1:] != -100
    torch.testing.assert_close(out.loss, -each[counted].mean())
    for items in (40, torch.tensor(40), torch.tensor([40])):
        loss = model(tokens, labels=labels, num_items_in_batch=items).loss
        torch.testing.assert_close(loss.squeeze(), -each[counted].sum() / 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_a_config_alone_has_every_weight(name, dtype):
    """Whatever lay in the memory that it gets."""
    config = AutoConfig.from_pretrained(EXPORTS / name, trust_remote_code=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # so what is not written is NaN
    try:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in model.parameters())
    assert all((m.weight + m.offset == 1).all() for m in model.modules() if hasattr(m, "offset")), "norms scale nothing"
    out = model(random(2, 9), labels=random(2, 9))
    assert out.loss.isfinite() and abs(out.loss.item() - 4.56) < 0.5  # log 96: it knows nothing
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    kept = {n: p.dtype for n, p in model.named_parameters()}
    assert kept == {n: p.dtype for n, p in opened(name, dtype).named_parameters()}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_weights_that_stay_elsewhere(name, kept, tmp_path, place):
    """Every layer; whole passes and steps."""
    layers = {f"model.layers.{i}": place for i in range(len(kept.config.layer_kinds))}
    rest = {
        n: place if n in ("mtp", "ngrams", "norm") else "cpu" for n, _ in kept.model.named_children() if n != "layers"
    }
    places = {f"model.{n}": where for n, where in rest.items()} | {"lm_head": "cpu"} | layers
    model = opened(name, device_map=places, offload_folder=str(tmp_path))
    elsewhere = {n for n, p in model.named_parameters() if p.device.type == "meta"}
    assert bool(elsewhere) == (place == "disk")
    torch.testing.assert_close(model(random(2, 9)).logits, kept(random(2, 9)).logits)
    if kept.config.mtp_depths:
        got, want = (m(random(2, 9), mtp=True).hidden_states[0] for m in (model, kept))
        torch.testing.assert_close(got, want)
    said = [m.generate(random(1, 5), max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, kept)]
    assert torch.equal(*said)
