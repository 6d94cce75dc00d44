"""Megatron-Core 0.19.2. The flags beside this file are dumped (runtime/dump.py), the reviewed fields are looked at by people."""

from pathlib import Path

from nam_megatron.targets.target import Target

HERE = Path(__file__).parent

TARGET = Target(
    name="v0_19",
    pin="0.19.2",
    flags_file=HERE / "v0_19.json",
    reviewed_file=HERE / "v0_19.yaml",
    te_version="2.20.2",
    configs=(
        "transformer",
        "model",
        "optimizer",
        "ddp",
        "train",
        "scheduler",
        "rerun_state_machine",
        "rng",
        "validation",
    ),
    renamed={
        "rotary_seq_len_interpolation_factor": ("model.seq_len_interpolation_factor",),
        "check_for_nan_in_loss_and_grad": ("rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad"),
        # Of MLA's config, and of GQA's, where they are no fields but attributes.
        "rotary_scaling_factor": ("transformer.rotary_scaling_factor", "transformer.yarn_rotary_scaling_factor"),
        "mscale": ("transformer.mscale", "transformer.yarn_mscale"),
        "mscale_all_dim": ("transformer.mscale_all_dim", "transformer.yarn_mscale_all_dim"),
        "yarn_original_max_position_embeddings": (
            "transformer.original_max_position_embeddings",
            "transformer.yarn_original_max_position_embeddings",
        ),
        "yarn_beta_fast": ("transformer.beta_fast", "transformer.yarn_beta_fast"),
        "yarn_beta_slow": ("transformer.beta_slow", "transformer.yarn_beta_slow"),
        "yarn_correction_range_round_to_int": ("transformer.yarn_correction_range_round_to_int",),
        "embedding_init_method_std": (),  # Megatron fills in init_method_std; compared as that
    },
    chips={(9, 0): "Hopper (H100, H200)"},
    lacking={
        (8, 0): "no FP8, and neither the kernels nor the forecasts were measured there",
        (
            10,
            0,
        ): "CUDA_DEVICE_MAX_CONNECTIONS follows other rules there, and neither the kernels nor the forecasts were measured",
        (
            10,
            3,
        ): "CUDA_DEVICE_MAX_CONNECTIONS follows other rules there, and neither the kernels nor the forecasts were measured",
    },
)
