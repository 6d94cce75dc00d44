"""The series: every mend, in the one order in which both trainers take them. What it says of a plan needs no torch."""

from nam_megatron.mends import Mend, Moment, Place, Plan, Trainer

MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge"
TRITON = "https://github.com/triton-lang/triton"
# With places of several faults.
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
SHARDED = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
ONLY_MEGATRON, ONLY_BRIDGE = (Trainer.MEGATRON,), (Trainer.BRIDGE,)


def _sharded_state(plan: Plan) -> bool:
    """Megatron's distributed optimizer holds the state; Megatron-FSDP has its own."""
    feature = plan.recipe.feature
    return feature.distributed_optimizer.enabled and feature.megatron_fsdp is None


def _plain_adam(plan: Plan) -> bool:
    """Megatron's DDP keeps the weights and Adam updates them: then any parallel layout can read any other's checkpoint."""
    feature = plan.recipe.feature
    return feature.muon is None and feature.megatron_fsdp is None


def _whole_step(plan: Plan) -> bool:
    graphs = plan.recipe.feature.cuda_graphs
    return graphs is not None and graphs.impl == "full_iteration"


SERIES: tuple[Mend, ...] = (
    Mend(
        "step_rate",
        "Megatron's TFLOP/s leave out whole layers of these families, and nobody sees what a layer measures.",
        (
            Place("megatron.training.training:print_rank_last",
                  "a408eeba0100cc6cc12d493465be0d6557d8c7ccdeaefa9c1405cc1860d10be8"),
        ),
        (),
        "Megatron counts every layer of a hybrid, and has a hook for its step line",
        ("tests/cpu/test_train.py::test_layouts_train",),
        Moment.COMMAND,
        trainers=ONLY_MEGATRON,
    ),
    Mend(
        "events",
        "Figures and checkpoints of a run stand in the text of its log alone, where any process can print them.",
        (
            Place("megatron.training.training:training_log",
                  "5e34a182d566e325edb4e0f342819036db16801b5d9972cd294f1b8406f51f5d"),
            Place("megatron.training.training:save_checkpoint",
                  "b652984ca8c8309dede9bb01bb9df1ec30e22ff17d2d5316134cd02d1b692d0e"),
            Place("megatron.training.checkpointing:schedule_async_save",
                  "867df4dbb33225c2432aff4a55b462e27ad6cebe733194099b8a81029a5d6b86"),
        ),
        (),
        "Megatron's training loop has callbacks for its lines and its checkpoints",
        ("tests/cpu/test_events.py::test_each_event_is_said_by_its_rank_and_agrees_with_the_log",),
        Moment.COMMAND,
        trainers=ONLY_MEGATRON,
    ),
    Mend(
        "whole_step",
        "A step that is replayed as one CUDA graph goes on with a loss or gradients that are not finite.",
        (
            Place("megatron.core.full_cuda_graph:FullCudaGraphWrapper",
                  "f4b984969bdff7c300703f3130783ba85d965aa8ecaea627e80c70a206e7b316"),
        ),
        (f"{MEGATRON}/issues/2056",),
        "Megatron looks at losses and gradients after a replay, and fills small memory by kernels",
        (
            "tests/cpu/test_guards.py::test_each_replay_is_looked_at_once_and_eager_steps_by_themselves",
            "tests/gpu/test_whole_step.py::test_a_nan_in_a_replay_stops_the_run_before_the_update",
        ),
        Moment.COMMAND,
        _whole_step,
        ONLY_MEGATRON,
    ),
    Mend(
        "bridge_step_rate",
        "Bridge's TFLOP/s leave out whole layers of these families.",
        (
            Place("megatron.bridge.training.utils.train_utils:print_rank_last",
                  "8daba70527a3a366b909647122ee4af38381d477c382675638daaaa3dc697448"),
        ),
        (),
        "Bridge counts every layer of a hybrid",
        ("tests/nemo/inside/check_train.py::test_commands_that_stop_and_resume_are_one_run",),
        Moment.COMMAND,
        trainers=ONLY_BRIDGE,
    ),
    Mend(
        "bridge_save_time",
        "Bridge's lines of checkpoints bear no time, and a launcher takes them for no lines of Megatron's.",
        (
            Place("megatron.bridge.training.checkpointing:print_rank_0",
                  "b6d1fd1e68dedcb33ec00f3b9719402eab7a15ed1cb63c843723b741d0d4e27e"),
        ),
        (),
        "the launcher reads events of the trainer in the place of its log",
        ("tests/nemo/inside/check_train.py::test_commands_that_stop_and_resume_are_one_run",),
        Moment.COMMAND,
        trainers=ONLY_BRIDGE,
    ),
    Mend(
        "bridge_events",
        "Checkpoints of a run stand in the text of its log alone, where any process can print them.",
        (
            Place("megatron.bridge.training.checkpointing:save_checkpoint",
                  "901f55a32884c5e7c941894339d023721a27afed85cecae9b8b688a8f032f489"),
            Place("megatron.bridge.training.checkpointing:schedule_async_save",
                  "9fb220ffb7f222a3ef05f7f4264cc66b812f1c8bee5913160eb56fe1235d07e4"),
        ),
        (),
        "Bridge's callbacks tell of checkpoints too",
        ("tests/nemo/inside/check_train.py::test_commands_that_stop_and_resume_are_one_run",),
        Moment.COMMAND,
        trainers=ONLY_BRIDGE,
    ),
    Mend(
        "shipped_helpers",
        "Megatron runs `make` for the datasets' C++ helpers at every start and exits where it fails, and its wheel has no Makefile.",
        (
            Place("megatron.core.datasets.utils:compile_helpers",
                  "84029a50ae8cfac18dfe03efaf3c3977e82d3a51682ae4d410616b4c01f16f63"),
        ),
        (),
        "the wheel's compile_helpers takes the helpers that it ships",
        ("tests/cpu/test_train.py::test_it_learns",),
        Moment.START,
    ),
    Mend(
        "bridge_helpers",
        "Bridge holds the function that runs that `make` under a name of its own.",
        (
            Place("megatron.bridge.training.initialize:compile_helpers",
                  "84029a50ae8cfac18dfe03efaf3c3977e82d3a51682ae4d410616b4c01f16f63"),
        ),
        (),
        "shipped_helpers goes",
        ("tests/nemo/inside/check_train.py::test_both_train_the_same",),
        Moment.START,
        trainers=ONLY_BRIDGE,
    ),
    Mend(
        "checksums",
        "A checkpoint says nothing of what its files held when they were written, or only in one of our two formats.",
        (
            Place("megatron.core.dist_checkpointing:save",
                  "e9626ecdf679a00130eb10820d769ee90e0168d8c7ff3298d981f98f6998c4e3"),
            Place(
                "torch.distributed.checkpoint:save", "543518d6108ff76b5964a2d0aec3493c8bf4cf78931c2fa7a6289fd7d2a45f03"
            ),
        ),
        (),
        "Megatron's --verify-integrity knows both formats, and each rank hashes what it wrote",
        ("tests/cpu/test_checksums.py::test_each_file_that_was_saved_has_its_checksum",),
        Moment.START,
    ),
    Mend(
        "tracker",
        "The file that names the newest checkpoint is emptied before it is written: a kill or a full disk then leaves none named.",
        (
            Place("megatron.training.checkpointing:save_checkpoint",
                  "b652984ca8c8309dede9bb01bb9df1ec30e22ff17d2d5316134cd02d1b692d0e"),
        ),
        (),
        "the pinned Megatron writes this file under another name first",
        ("tests/cpu/test_save_faults.py::test_the_tracker_names_a_step_whatever_befalls_its_writing",),
        Moment.START,
        trainers=ONLY_MEGATRON,
    ),
    Mend(
        "background",
        "A rank waits without end for the process that writes its checkpoints, once that one has died.",
        (
            Place("megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller._get_process",
                  "ba04e15392b247a2fe24825704c3010d0c4496de53c713d94e1d5e5c786ec765"),
            Place("megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.close",
                  "2d467d0ac4a0bb879b0bc5b683d8e6ebc5fc89cd5a24c768c355dd279c5afe11"),
        ),
        (f"{MEGATRON}/issues/6970", f"{MEGATRON}/pull/6971"),
        "the pinned Megatron-Core ends a rank whose writer has died",
        ("tests/cpu/test_resume.py::test_a_writer_that_dies_ends_the_run",),
        Moment.START,
        lambda plan: plan.recipe.schedule.async_save,
    ),
    Mend(
        "marked_fp32",
        "Parameters that have to stay in fp32, those of our recurrences and streams, are cast to bf16.",
        (
            Place("megatron.core.transformer.module:Float16Module.__init__",
                  "b086a6919afe19b09fc96f527e28667fb2d674de4c751c7e53aea50d224cddde"),
        ),
        (f"{MEGATRON}/pull/5308",),
        "the pinned Megatron-Core honours `keep_in_fp32` (0.20)",
        ("tests/cpu/test_train.py::test_marked_parameters_stay_in_fp32",),
        Moment.START,
    ),
    Mend(
        "group_order",
        "Adam's moments of a group of bf16 and fp32 parameters are saved under other parameters' names.",
        (
            Place(f"{OPTIMIZER}._build_optimizer_group_ranges",
                  "c0ccc7598123b0872ed6122810b0c746e4ff8583990c6bc6f77846290c208a43"),
            Place(f"{OPTIMIZER}._set_main_param_and_optimizer_states",
                  "40cab784659711a8e7cdd5a0d84e60de0e1a2fa648316d4d697af83725311b4b"),
            Place(f"{OPTIMIZER}._build_model_and_main_param_groups",
                  "3fce9be2b6d1d143559761811d30afc63d63c6405dbead686f30996997096951"),
        ),
        (f"{MEGATRON}/issues/2777", f"{MEGATRON}/pull/5929"),
        "the pinned Megatron-Core contains pull request 5929",
        ("tests/cpu/test_author_lane.py::test_it_is_saved_and_gone_on_with",),
        Moment.START,
        _sharded_state,
    ),
    Mend(
        "master_weights",
        "From the second bucket of gradients on, a parameter's master weight and moments are saved as they begin in its neighbour.",
        (
            Place(f"{OPTIMIZER}.sharded_param_state_fully_reshardable",
                  "6df6392a0ebb4c79b632fccd59d2703ac0021f0a73ef9e87eb32d0b3bdfb23b0"),
            Place(f"{OPTIMIZER}.load_parameter_state_from_fully_reshardable",
                  "ea3388fac4318b9fdac2561b6648ce480d4dfbe8d3caf9dc7aad2f9a782f1ec1"),
        ),
        (f"{MEGATRON}/pull/5077",),
        "the pinned Megatron-Core contains pull request 5077; the look at what is loaded stays as long as older checkpoints are read",
        ("tests/cpu/test_resume.py::test_a_checkpoint_with_the_state_of_other_weights_is_refused",),
        Moment.START,
        _sharded_state,
    ),
    Mend(
        "context",
        "Under context parallelism a token beside masked ones weighs more, and the indexer's loss counts once for each rank.",
        (
            Place("megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
                  "9990d300271b7dfc071737061e8ff478591140befafc5938967906fe9cd73d67"),
            Place("megatron.core.transformer.multi_token_prediction:roll_tensor",
                  "576f3fcb1c365bc92bcaea1d9253eb5014b6335f446c2a0f0b490587776ec426"),
            Place("megatron.core.transformer.multi_token_prediction:process_mtp_loss",
                  "7a459bac5884e8bf3bf19381b3eb2b02f1d443e7e5c48bae78b90c2b4ee52767"),
        ),
        (f"{MEGATRON}/issues/7452",),
        "the pinned Megatron-Core takes the means over all ranks that share a sequence",
        (
            "tests/cpu/test_context.py::test_the_loss_is_the_mean_over_the_tokens_of_all_ranks",
            "tests/cpu/test_context.py::test_what_mtp_counts_is_a_ranks_share_of_all_tokens",
            "tests/cpu/test_context.py::test_the_indexers_loss_has_the_main_losss_scale",
        ),
        Moment.START,
        lambda plan: plan.recipe.parallel.context > 1,
    ),
    Mend(
        "autotune",
        "Triton chooses a kernel's configuration by the clock, and two deterministic runs part.",
        (
            Place("triton.runtime.autotuner:Autotuner.prune_configs",
                  "b385c19a8634b13415f506a28f24f08f2ebd5c3300264881b3b8bce27ca46cd8"),
            Place("triton.runtime.autotuner:Autotuner.do_bench",
                  "bca40b4b649bb07157ec4cd53c1d770d2946627df8f4704613a0b19d4ccfb7e8"),
            Place("triton.runtime.autotuner:Autotuner.check_disk_cache",
                  "968882d8360702e6a82a064e031a5ac2387d115e9dcc9010db1c8585414e937a"),
        ),
        (f"{TRITON}/issues/9368", f"{MEGATRON}/pull/6966"),
        "Triton chooses without a clock where it is asked to",
        ("tests/gpu/test_autotune.py::test_the_middle_one_of_those_that_fit_without_a_clock",),
        Moment.START,
        lambda plan: plan.recipe.precision.deterministic,
    ),
    Mend(
        "wgrad",
        "Megatron's own linear layers refuse gradient_accumulation_fusion without a kernel of APEX's.",
        (
            Place("megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
                  "0a5b564dd254cb937e31c7707f240c80980b7b588f2b3bf8e503355a5d2cc5e5"),
        ),
        (),
        "the pinned Megatron-Core adds weight gradients by Transformer Engine's GEMM",
        ("tests/cpu/test_train.py::test_gradients_that_the_gemm_adds_are_the_same",),
        Moment.START,
        lambda plan: plan.recipe.precision.fused_grad_accumulation,
    ),
    Mend(
        "padding",
        "The tokenizer's pad token inside the data is trained as token 0 without loss, and masks its places in all later samples.",
        (
            Place("megatron.core.datasets.gpt_dataset:GPTDataset.__init__",
                  "c0af98cd31196c2c9cd7a733f3b6b653d7401bdfda02b8e24ce5b46120ec5804"),
            Place("megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__",
                  "fc9cde713ea87aeddc68d16bca93c3dd6cae116570685acb0f1f279c7b4104ef"),
            Place("megatron.training.datasets.fim_dataset:GPTFIMDataset.__init__",
                  "809aa23e4210ac0e3a0477ff42dbf39906a69e964fab4366e312f73083a431b8"),
        ),
        (f"{MEGATRON}/issues/1711",),
        "the pinned Megatron-Core tells padding from a token of the data, and keeps no sample's mask for another one",
        ("tests/cpu/test_train.py::test_a_pad_token_inside_the_data_is_a_token",),
        Moment.START,
    ),
    Mend(
        "sample_order",
        "Of a dataset written anew at its path the old order of samples is taken; so is a damaged one, or one not written to its end.",
        (
            Place("megatron.core.datasets.megatron_dataset:MegatronDataset.__init__",
                  "653cbcbfead965bacf3e73799115b692cd01341e8ab56d24cda8aa0ac08dacc4"),
            Place("megatron.core.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices",
                  "31ef3869909a992bddcf816811c83ec73c625ff8b54f7ab614ef783e3ede39a9"),
            Place("megatron.core.datasets.blended_dataset:BlendedDataset._build_indices",
                  "c526c2c6ddd9d47ee82fbc7352ca7fb112b5ab67753792f4f56bb6d934ed0b79"),
        ),
        (),
        "the pinned Megatron-Core finds a kept order by the lengths of the documents, too, and takes none that is not as it was written",
        (
            "tests/cpu/test_train.py::test_an_order_is_kept_for_the_lengths_that_it_was_made_of",
            "tests/cpu/test_train.py::test_an_order_that_was_damaged_is_made_again",
        ),
        Moment.START,
        lambda plan: plan.recipe.data.name in ("indexed", "blend", "built"),
    ),
    Mend(
        "mtp_counts",
        "Megatron reads all logits of MTP's depths once more for its log, after our cross entropy has put their gradient there.",
        (
            Place("megatron.core.transformer.multi_token_prediction:_compute_mtp_acceptance_counts",
                  "cf771eb0e275b10889fa7fdb621de55ee3a328a8b7c46d170e476ec1d50a0a61"),
        ),
        (),
        "precision.cross_entropy has no `fused`",
        ("tests/gpu/test_cross_entropy.py::test_megatron_counts_the_same",),
        Moment.START,
        lambda plan: plan.recipe.precision.cross_entropy == "fused",
    ),
    Mend(
        "mtp_routers",
        "A router in MTP with a loss stops the first step: its place in a depth is beyond the rows of the log's table.",
        (
            Place("megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.record",
                  "f14cfa4dd21e1b6d2816389b7986c08aaa15d5712f2536a708b624d3f74c9c0e"),
        ),
        (f"{MEGATRON}/issues/7172",),
        "the pinned Megatron-Core has a row in its log for every layer of an MTP depth",
        ("tests/cpu/test_train.py::test_experts_in_mtp_are_in_the_log",),
        Moment.START,
        lambda plan: plan.recipe.feature.mtp is not None and "E" in plan.recipe.feature.mtp.pattern,
    ),
    Mend(
        "yarn",
        "The arguments of YaRN reach GQA's config alone; MLA keeps a length of 4096 and betas of 32 and 1.",
        (
            Place("megatron.training.argument_utils:_apply_yarn_config_from_args",
                  "7363716d469e99137e895537b00aa7afe4a85ef25cf44a2f7002fe6a365def33"),
        ),
        (),
        "the pinned Megatron-Core hands these arguments to MLA's config",
        ("tests/cpu/test_author_lane.py::test_the_angles_that_are_trained_are_yarns",),
        Moment.START,
        lambda plan: plan.recipe.feature.yarn is not None,
        ONLY_MEGATRON,
    ),
    Mend(
        "bridge_evaluation",
        "Bridge draws the samples of evaluations at random, whatever `dataloader_type` says.",
        (
            Place("megatron.bridge.data.loaders:build_train_valid_test_data_loaders",
                  "53c6b036d468d96a081018a18ab9457a743e3e36c4c194299ac23daebc5c37de"),
            Place("megatron.bridge.data.loaders:build_train_valid_test_data_iterators",
                  "2c67d864e7f2c4bacfbcb962ed43a55f1c77532103c72bfd2962e31f7d3cae84"),
        ),
        (f"{BRIDGE}/issues/1194",),
        "the pinned Megatron-Bridge asks `dataloader_type` for evaluations too",
        ("tests/nemo/inside/check_train.py::test_both_train_the_same",),
        Moment.START,
        trainers=ONLY_BRIDGE,
    ),
    Mend(
        "bridge_answers",
        "Bridge reads prompts and answers of one folder alone.",
        (
            Place("megatron.bridge.data.utils:get_dataset_provider",
                  "797bf7a8c382521d068bc045d698a53579f7cf50b97c757f1cac07050426b83b"),
            Place("megatron.bridge.data.builders.gpt_sft:gpt_sft_train_valid_test_datasets_provider",
                  "50e90c6c186f9ca27ad33d2e8d2050ec65974b146a43a912b1e8d94b80deed98"),
        ),
        (),
        "the pinned Megatron-Bridge mixes prompts and answers of several folders by weight",
        ("tests/nemo/inside/check_train.py::test_a_blend_of_answers_is_learned_in_its_shares_and_resumed",),
        Moment.START,
        lambda plan: plan.recipe.data.name == "sft_blend",
        ONLY_BRIDGE,
    ),
    Mend(
        "bridge_exit",
        "Where Bridge cannot load a checkpoint it ends the process with code 0, as if it had trained.",
        (
            Place("megatron.bridge.training.checkpointing:_load_checkpoint_from_path",
                  "6ea5d3ebb6b4de0109e409ac15bff11bcad4641243b1c2e41452908989e4f8ca"),
        ),
        (),
        "the pinned Megatron-Bridge ends with another code, or raises",
        ("tests/nemo/inside/check_mends.py::test_a_checkpoint_that_bridge_cannot_load_is_no_success",),
        Moment.START,
        trainers=ONLY_BRIDGE,
    ),
    Mend(
        "bridge_export",
        "A converter of Bridge's takes a model of ours for one that it knows, and leaves layers out or takes them for others.",
        (
            Place("megatron.bridge.models.conversion.model_bridge:MegatronModelBridge.stream_weights_megatron_to_hf",
                  "bef4dfc3e4496163b149eb4feffc8f42850a3ef47efa5b8ba3ea05d04b1c5b8e"),
        ),
        (),
        "Bridge asks whether a converter knows the model's class before it converts",
        ("tests/nemo/inside/check_converter.py::test_an_export_through_autobridge_there_and_back",),
        Moment.START,
        trainers=ONLY_BRIDGE,
    ),
    Mend(
        "stage",
        "With another learning rate no group of parameters is found in a checkpoint, whatever --override-opt_param-scheduler says.",
        (
            Place(f"{OPTIMIZER}.load_state_dict", "7e5f988b86b485012fe3031b4960e8624d3b6e8db12a49367ffeae5777de029f"),
            Place("megatron.core.optimizer.optimizer:MegatronOptimizer._filter_and_reorder_param_groups",
                  "08e55f3aea6499b771bfd42a027d2a5064dff3e9718496d6753dd862a2f172b9"),
            Place("megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict",
                  "ac7965bdea40acc7ef49256e5f7760177c1c576395293d57fac626f9fc410771"),
        ),
        (f"{MEGATRON}/issues/963", f"{MEGATRON}/issues/1138"),
        "--override-opt_param-scheduler gives a loaded optimizer the rates of the command line",
        ("tests/cpu/test_resume.py::test_a_next_stage_has_its_own_rates_and_the_state",),
        Moment.START,
        lambda plan: bool(plan.recipe.schedule.changes),
        ONLY_MEGATRON,
    ),
    Mend(
        "experts_apart",
        "A checkpoint of a layout whose experts are sharded apart cannot be read by one where they are not, nor the other way.",
        (
            Place("megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
                  "403774c7dde1d5460414ceec11ca3d6946e1eff7a9713a51aff30ac61425df4c"),
        ),
        (f"{MEGATRON}/issues/1517",),
        "the pinned Megatron-Core reads a checkpoint of two optimizers into one, and back",
        (
            "tests/cpu/test_train.py::test_experts_and_nothing_else_are_reduced_apart",
            "tests/cpu/test_resume.py::test_a_run_goes_on_in_another_layout_and_comes_back",
        ),
        Moment.MODEL,
        _plain_adam,
    ),
    Mend(
        "sinks",
        "The norm that clips counts attention's sinks of the first tensor rank alone.",
        (
            Place("megatron.core.tensor_parallel.layers:param_is_not_tensor_parallel_duplicate",
                  "4b03f1ce9c8caf67d1a4193294a713a044e6fc6a8c2222e88b090bf21ec5f2e6"),
        ),
        (f"{MEGATRON}/issues/7452", f"{MEGATRON}/pull/7530"),
        "`softmax_offset` comes marked as sharded from the pinned Megatron-Core or Transformer Engine",
        ("tests/cpu/test_train.py::test_each_tensor_rank_has_its_own_sinks",),
        Moment.MODEL,
        lambda plan: plan.recipe.parallel.tensor > 1,
    ),
    Mend(
        "llama_rope",
        "HybridModel keeps plain RoPE's angles where Llama-3.1's are asked for; Megatron scales them in its GPT alone.",
        (
            Place("megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
                  "e7cf7dec1dc7a10d0b969820ea3f93d7a6a7452c136db28f5d9b90d6220eb19f"),
        ),
        (),
        "the pinned Megatron-Core hands `rope_scaling` to HybridModel's angles",
        ("tests/cpu/test_effect_modules.py::test_a_layer_reads_what_its_recipe_says",),
        Moment.MODEL,
        lambda plan: plan.recipe.feature.llama_rope is not None,
    ),
    Mend(
        "stage_log",
        "A pipeline whose stages do not all have DSA or MoE layers waits without end at its first line of the log.",
        (
            Place("megatron.core.transformer.experimental_attention_variant.dsa:DSAIndexerLossLoggingHelper.reduce_loss_in_tracker",
                  "dfe25f1b456c3f793b41d1e355c92529084e9c20070271413186348823c430dd"),
            Place("megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.ensure_initialized",
                  "2a5eaead424ab05abf0e877ab2480b178a1f54b74d81c6f0497bff59318c4dbe"),
        ),
        (f"{MEGATRON}/pull/3401",),
        "every stage of the pinned Megatron-Core takes part in the log's sums",
        ("tests/cpu/test_train.py::test_a_stage_without_experts_takes_part_in_the_log_of_theirs",),
        Moment.WRAPPED,
    ),
    Mend(
        "fsdp",
        "Megatron-FSDP scales the sum of a rank's own gradients anew with each microbatch, and sums those that it has to average.",
        (
            Place(f"{SHARDED}:GradReducePipeline._bucket_group_gradient_reduce",
                  "7c6cbea590b5dbe1cac4147636a22176b7ad2368582cac7c9e2c9fa45350e15b"),
            Place(f"{SHARDED}:ParamAndGradBuffer._init_optimizer_named_parameters",
                  "dbdb270d2dfaae60e9831d65a8d92309f0c1f8220a51c2e87aa4fb5ce29600c4"),
        ),
        (f"{MEGATRON}/issues/6660", f"{MEGATRON}/pull/6773"),
        "the pinned Megatron-Core hands the optimizer the gradients that one rank would",
        (
            "tests/prove/test_prove.py::test_a_sample_of_layouts_is_proven",
            "tests/prove/test_prove.py::test_a_planted_bug_is_found",
        ),
        Moment.WRAPPED,
        lambda plan: plan.recipe.feature.megatron_fsdp is not None,
    ),
)  # fmt: skip
MENDS: dict[str, Mend] = {mend.name: mend for mend in SERIES}


def needed(plan: Plan, trainer: Trainer) -> tuple[Mend, ...]:
    """What stands while `trainer` trains a plan by our own command, in the order of the series."""
    return tuple(mend for mend in SERIES if trainer in mend.trainers and mend.needed(plan))
