"""Names, parameters and fields that users' own code relies on. A change here breaks somebody's script.

Each entry: module, dotted name, and the parameters that must exist, in this order (more keywords may follow).
"""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

CALLABLES: list[tuple[str, str, str]] = [
    ("search_r1.llm_agent.generation", "LLMGenerationManager", "tokenizer actor_rollout_wg config is_validation"),
    ("search_r1.llm_agent.generation", "LLMGenerationManager.run_llm_loop", "self gen_batch initial_input_ids"),
    ("search_r1.llm_agent.generation", "LLMGenerationManager._create_loss_mask", "self batch metrics"),
    (
        "search_r1.llm_agent.generation",
        "GenerationConfig",
        "max_turns max_start_length max_prompt_length max_response_length max_obs_length num_gpus no_think_rl"
        " search_url topk",
    ),
    ("search_r1.search.retrieval_server", "main", "arguments"),
    ("verl.search.server", "main", "arguments"),
    ("verl.tools.search_tool", "SearchTool", "config tool_schema"),
    ("verl.protocol", "DataProto", "batch non_tensor_batch meta_info"),
    ("verl.protocol", "DataProto.from_single_dict", "data meta_info auto_padding"),
    ("verl.protocol", "DataProto.from_dict", "tensors non_tensors meta_info num_batch_dims auto_padding"),
    ("verl.protocol", "DataProto.from_tensordict", "tensor_dict"),
    ("verl.protocol", "DataProto.to", "self device"),
    ("verl.protocol", "DataProto.select", "self batch_keys non_tensor_batch_keys meta_info_keys deepcopy"),
    ("verl.protocol", "DataProto.select_idxs", "self idxs"),
    ("verl.protocol", "DataProto.slice", "self start end step"),
    ("verl.protocol", "DataProto.pop", "self batch_keys non_tensor_batch_keys meta_info_keys"),
    ("verl.protocol", "DataProto.rename", "self old_keys new_keys"),
    ("verl.protocol", "DataProto.union", "self other"),
    ("verl.protocol", "DataProto.make_iterator", "self mini_batch_size epochs seed dataloader_kwargs"),
    ("verl.protocol", "DataProto.padding", "self size candidate"),
    ("verl.protocol", "DataProto.chunk", "self chunks"),
    ("verl.protocol", "DataProto.split", "self split_size n_parts"),
    ("verl.protocol", "DataProto.concat", "data"),
    ("verl.protocol", "DataProto.reorder", "self indices"),
    ("verl.protocol", "DataProto.repeat", "self repeat_times interleave"),
    ("verl.protocol", "DataProto.sample_level_repeat", "self times"),
    ("verl.protocol", "DataProto.check_consistency", "self"),
    ("verl.protocol", "DataProto.get_data_info", "self"),
    ("verl.protocol", "DataProto.save_to_disk", "self path"),
    ("verl.protocol", "DataProto.load_from_disk", "path"),
    ("verl.protocol", "DataProtoFuture", ""),
    ("verl.protocol", "pad_dataproto_to_divisor", "data size_divisor"),
    ("verl.protocol", "unpad_dataproto", "data pad_size"),
    ("verl.protocol", "union_tensor_dict", "tensor_dict1 tensor_dict2"),
    ("verl.protocol", "union_numpy_dict", "tensor_dict1 tensor_dict2"),
    ("verl.protocol", "fold_batch_dim", "data new_batch_size"),
    ("verl.protocol", "unfold_batch_dim", "data batch_dims"),
    ("verl.protocol", "collate_fn", "items"),
    ("verl.single_controller.base", "Worker.get_master_addr_port", "self"),
    ("verl.single_controller.base", "WorkerGroup", ""),
    ("verl.single_controller.base", "ResourcePool", "process_on_nodes max_colocate_count n_gpus_per_node"),
    ("verl.single_controller.base", "ClassWithInitArgs", "cls args kwargs"),
    (
        "verl.single_controller.base.decorator",
        "register",
        "dispatch_mode execute_mode blocking materialize_futures lane",
    ),
    ("verl.single_controller.base.decorator", "make_nd_compute_dataproto_dispatch_fn", "mesh_name"),
    ("verl.single_controller.base.decorator", "register_dispatch_mode", "name dispatch_fn collect_fn"),
    ("verl.single_controller.base.decorator", "update_dispatch_mode", "mode dispatch_fn collect_fn"),
    *[
        (module, name, parameters)
        for module in ("verl.single_controller.ray", "verl.single_controller.ray.base")
        for name, parameters in [
            ("RayResourcePool", "process_on_nodes use_gpu name_prefix max_colocate_count detached"),
            ("RayClassWithInitArgs", "cls args kwargs"),
            ("RayWorkerGroup", "resource_pool ray_cls_with_init"),
            ("RayWorkerGroup.spawn", "self prefix_set"),
            ("RayWorkerGroup.from_detached", ""),
            ("RayWorkerGroup.execute_all", "self method args"),
            ("RayWorkerGroup.execute_all_sync", "self method args"),
            ("RayWorkerGroup.execute_all_async", "self method args"),
            ("RayWorkerGroup.execute_rank_zero", "self method args"),
            ("RayWorkerGroup.execute_rank_zero_sync", "self method args"),
            ("RayWorkerGroup.execute_rank_zero_async", "self method args"),
            ("create_colocated_worker_cls", "class_dict"),
            ("merge_resource_pool", "a b"),
        ]
    ],
    ("verl.trainer.main_ppo", "main", ""),
    ("verl.trainer.main_ppo", "run_ppo", "config task_runner_class"),
    ("verl.trainer.main_ppo", "TaskRunner", ""),
    ("verl.trainer.main_ppo", "create_rl_dataset", "data_paths data_config tokenizer processor is_train max_samples"),
    ("verl.trainer.main_ppo", "create_rl_sampler", "data_config dataset"),
    ("verl.trainer.main_ppo", "RewardManager", "tokenizer num_examine compute_score reward_fn_key"),
    ("verl.trainer.main_ppo", "_select_rm_score_fn", "data_source"),
    *[
        ("verl.trainer.main_ppo", f"TaskRunner.add_{part}_worker", "self config")
        for part in ("actor_rollout", "critic", "reward_model", "ref_policy")
    ],
    ("verl.trainer.main_ppo", "TaskRunner.init_resource_pool_mgr", "self config"),
    ("verl.trainer.main_generation", "run_generation", "config"),
    ("verl.trainer.main_eval", "run_eval", "config"),
    ("verl.inference.server", "main", "arguments"),
    ("verl.model_merger.__main__", "main", "arguments"),
    ("verl.trainer.ppo.utils", "need_critic", "config"),
    ("verl.trainer.ppo.utils", "need_reference_policy", "role_worker_mapping"),
    ("verl.trainer.ppo.utils", "need_reward_model", "role_worker_mapping"),
    (
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer",
        "config tokenizer role_worker_mapping resource_pool_manager ray_worker_group_cls processor reward_fn"
        " val_reward_fn train_dataset val_dataset collate_fn train_sampler device_name",
    ),
    *[
        ("verl.trainer.ppo.ray_trainer", f"RayPPOTrainer.{name}", "self")
        for name in (
            "init_workers",
            "fit",
            "_train_step",
            "_compute_reward",
            "_compute_advantage",
            "_create_dataloader",
            "_validate",
            "_save_checkpoint",
            "_load_checkpoint",
            "_create_actor_rollout_worker_group",
            "_create_critic_worker_group",
        )
    ],
    ("verl.trainer.ppo.ray_trainer", "ResourcePoolManager", "resource_pool_spec mapping"),
    ("verl.trainer.ppo.ray_trainer", "ResourcePoolManager.create_resource_pool", "self"),
    ("verl.trainer.ppo.ray_trainer", "ResourcePoolManager.get_resource_pool", "self role"),
    ("verl.trainer.ppo.ray_trainer", "apply_kl_penalty", "data kl_ctrl kl_penalty"),
    (
        "verl.trainer.ppo.ray_trainer",
        "compute_advantage",
        "data adv_estimator gamma lam num_repeat norm_adv_by_std_in_grpo config",
    ),
    ("verl.trainer.ppo.ray_trainer", "compute_response_mask", "data"),
    *[
        ("verl.trainer.ppo.core_algos", name, parameters)
        for name, parameters in [
            ("register_adv_est", "name"),
            ("get_adv_estimator_fn", "name"),
            ("register_policy_loss", "name"),
            ("get_policy_loss_fn", "name"),
            ("compute_gae_advantage_return", "token_level_rewards values response_mask gamma lam"),
            *[
                (f"compute_{estimator}_outcome_advantage", "token_level_rewards response_mask index epsilon")
                for estimator in ("grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg")
            ],
            ("compute_reinforce_plus_plus_outcome_advantage", "token_level_rewards response_mask config"),
            ("compute_reinforce_plus_plus_advantage", "token_level_rewards response_mask config"),
            ("compute_remax_outcome_advantage", "token_level_rewards reward_baselines response_mask config"),
            (
                "agg_loss",
                "loss_mat loss_mask loss_agg_mode dp_size batch_num_tokens global_batch_size loss_scale_factor",
            ),
            (
                "compute_policy_loss",
                "old_log_prob log_prob advantages response_mask cliprange cliprange_low cliprange_high clip_ratio_c"
                " loss_agg_mode clip_ratio",
            ),
            *[
                (
                    f"compute_policy_loss_{loss}",
                    "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights",
                )
                for loss in ("vanilla", "gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean")
            ],
            ("compute_value_loss", "vpreds returns values response_mask cliprange_value loss_agg_mode"),
            ("compute_entropy_loss", "logits response_mask loss_agg_mode"),
            ("kl_penalty", "logprob ref_logprob kl_penalty"),
            ("AdaptiveKLController", "init_kl_coef target_kl horizon"),
            ("AdaptiveKLController.update", "self current_kl n_steps"),
            ("FixedKLController", "kl_coef"),
            ("get_kl_controller", "kl_ctrl"),
        ]
    ],
    ("verl.trainer.ppo.reward", "load_reward_manager", "config tokenizer num_examine reward_kwargs"),
    ("verl.trainer.ppo.reward", "compute_reward", "data reward_fn"),
    ("verl.trainer.ppo.reward", "get_custom_reward_fn", "config"),
    ("verl.trainer.ppo.metric_utils", "compute_data_metrics", "batch use_critic"),
    ("verl.trainer.ppo.metric_utils", "compute_timing_metrics", "batch timing_raw"),
    ("verl.trainer.ppo.metric_utils", "compute_throughout_metrics", "batch timing_raw n_gpus"),
    ("verl.trainer.ppo.metric_utils", "bootstrap_metric", "data subset_size reduce_fns n_bootstrap seed"),
    ("verl.trainer.ppo.metric_utils", "calc_maj_val", "data vote_key val_key"),
    ("verl.trainer.ppo.metric_utils", "process_validation_metrics", "data_sources sample_uids infos_dict seed"),
    ("verl.trainer.ppo.metric_utils", "reduce_metrics", "metrics"),
    ("verl.workers.fsdp_workers", "ActorRolloutRefWorker", "config role"),
    *[
        ("verl.workers.fsdp_workers", f"ActorRolloutRefWorker.{name}", "self")
        for name in (
            "init_model",
            "generate_sequences",
            "compute_log_prob",
            "compute_ref_log_prob",
            "update_actor",
            "save_checkpoint",
            "load_checkpoint",
        )
    ],
    ("verl.workers.fsdp_workers", "CriticWorker", "config"),
    ("verl.workers.fsdp_workers", "CriticWorker.compute_values", "self data"),
    ("verl.workers.fsdp_workers", "CriticWorker.update_critic", "self data ppo_epochs ppo_mini_batch_size"),
    *[
        (f"verl.workers.{strategy}_workers", f"{cls}.init_model", "self model_path")
        for strategy in ("fsdp", "megatron")
        for cls in ("ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker")
    ],
    (
        "verl.single_controller.base",
        "Worker._register_dispatch_collect_info",
        "self mesh_name dp_rank is_collect",
    ),
    ("verl.workers.fsdp_workers", "RewardModelWorker", "config"),
    ("verl.workers.fsdp_workers", "RewardModelWorker.compute_rm_score", "self data"),
    ("verl.workers.megatron_workers", "ActorRolloutRefWorker", "config role"),
    ("verl.workers.megatron_workers", "CriticWorker", "config"),
    ("verl.workers.megatron_workers", "RewardModelWorker", "config"),
    ("verl.workers.rollout.base", "BaseRollout.generate_sequences", "self prompts"),
    ("verl.workers.rollout.base", "BaseRollout.update_weights", "self"),
    ("verl.workers.rollout.base", "BaseRollout.release", "self"),
    ("verl.workers.rollout.base", "BaseRollout.resume", "self"),
    ("verl.workers.reward_manager", "register", "name"),
    ("verl.workers.reward_manager", "get_reward_manager_cls", "name"),
    ("verl.workers.reward_manager", "NaiveRewardManager", "tokenizer num_examine compute_score reward_fn_key"),
    (
        "verl.workers.reward_manager",
        "DAPORewardManager",
        "tokenizer num_examine compute_score reward_fn_key max_resp_len overlong_buffer_cfg",
    ),
    ("verl.utils.dataset.rl_dataset", "RLHFDataset", "data_files tokenizer config processor max_samples"),
    ("verl.utils.dataset.rl_dataset", "RLDataset", "data_files tokenizer config processor max_samples"),
    ("verl.utils.dataset.rl_dataset", "collate_fn", ""),
    ("verl.utils.dataset.sft_dataset", "SFTDataset", ""),
    ("verl.utils.dataset.multiturn_sft_dataset", "MultiTurnSFTDataset", ""),
    ("verl.experimental.dataset.sampler", "AbstractSampler", "data_source data_config"),
    ("verl.experimental.dataset.sampler", "AbstractCurriculumSampler.update", "self batch"),
    ("verl.utils.reward_score", "default_compute_score", "data_source solution_str ground_truth extra_info"),
    ("verl.utils.reward_score", "last_boxed_only_string", "string"),
    ("verl.utils.reward_score", "remove_boxed", "s"),
    ("verl.utils.reward_score.math", "compute_score", "solution_str ground_truth"),
    ("verl.utils.reward_score.math_dapo", "compute_score", "solution_str ground_truth"),
    ("verl.utils.reward_score.math_dapo", "last_boxed_only_string", "string"),
    ("verl.utils.reward_score.math_dapo", "remove_boxed", "s"),
    ("verl.utils.reward_score.qa_em", "extract_solution", "solution_str"),
    ("verl.utils.reward_score.qa_em", "compute_score_em", "solution_str ground_truth format_score score"),
    ("verl.utils.reward_score.qa_em", "compute_score_subem", "solution_str ground_truth format_score score"),
    ("verl.utils.reward_score.gsm8k", "extract_solution", "solution_str method"),
    ("verl.utils.reward_score.gsm8k", "compute_score", "solution_str ground_truth method format_score score"),
    ("verl.utils.checkpoint.checkpoint_manager", "find_latest_ckpt_path", "path directory_format"),
    ("verl.trainer.constants_ppo", "get_ppo_ray_runtime_env", ""),
    ("verl.utils", "hf_tokenizer", "name_or_path kwargs"),
    ("verl.utils", "hf_processor", "name_or_path kwargs"),
    ("verl.utils.fs", "copy_to_local", "src cache_dir use_shm"),
    ("verl.utils.hdfs_io", "copy", ""),
    ("verl.utils.hdfs_io", "makedirs", ""),
    ("verl.utils.hdfs_io", "exists", ""),
    ("verl.utils.tracking", "Tracking", "project_name experiment_name default_backend config"),
    ("verl.utils.tracking", "Tracking.log", "self data step"),
    ("verl.utils.tracking", "ValidationGenerationsLogger", ""),
    ("verl.utils.seqlen_balancing", "karmarkar_karp", "seqlen_list k_partitions equal_size"),
    ("verl.utils.seqlen_balancing", "get_seqlen_balanced_partitions", "seqlen_list k_partitions equal_size"),
    ("verl.utils.seqlen_balancing", "log_seqlen_unbalance", "seqlen_list partitions prefix"),
    ("verl.utils.seqlen_balancing", "rearrange_micro_batches", "batch max_token_len dp_group"),
    ("verl.utils.seqlen_balancing", "prepare_dynamic_batch", "data max_token_len dp_group"),
    ("verl.utils.seqlen_balancing", "restore_dynamic_batch", "data batch_idx_list"),
    ("verl.utils.seqlen_balancing", "get_reverse_idx", ""),
    ("verl.utils.seqlen_balancing", "ceildiv", ""),
    ("verl.utils.seqlen_balancing", "roundup_divisible", ""),
    ("verl.utils.ulysses", "ulysses_pad_and_slice_inputs", "input_ids position_ids sp_size group"),
    ("verl.utils.ulysses", "gather_outputs_and_unpad", "x gather_dim unpad_dim padding_size group"),
    ("verl.utils.torch_functional", "logprobs_from_logits", "logits labels"),
    ("verl.utils.torch_functional", "entropy_from_logits", "logits"),
    ("verl.utils.torch_functional", "masked_sum", ""),
    ("verl.utils.torch_functional", "masked_mean", ""),
    ("verl.utils.torch_functional", "masked_var", ""),
    ("verl.utils.torch_functional", "masked_whiten", ""),
    ("verl.utils.torch_functional", "get_response_mask", "response_id eos_token dtype"),
    ("verl.utils.torch_functional", "pad_sequence_to_length", "tensors max_seq_len pad_token_id left_pad"),
    ("verl.utils.torch_functional", "postprocess_data", ""),
    ("verl.utils.torch_functional", "get_cosine_schedule_with_warmup", "optimizer"),
    ("verl.utils.torch_functional", "get_constant_schedule_with_warmup", "optimizer"),
    ("verl.utils.import_utils", "load_extern_object", "module_path object_name"),
    ("verl.experimental.agent_loop.agent_loop", "AgentLoopBase.run", "self sampling_params row"),
    ("verl.experimental.agent_loop.agent_loop", "AgentLoopBase.init_class", "config tokenizer processor own"),
    ("verl.experimental.agent_loop.agent_loop", "AgentLoopBase.apply_chat_template", "self messages tools"),
    ("verl.experimental.agent_loop.agent_loop", "AgentLoopMetrics", "generate_sequences tool_calls compute_score"),
    (
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopOutput",
        "prompt_ids response_ids response_mask response_logprobs reward_score num_turns metrics extra_fields",
    ),
    ("verl.experimental.agent_loop.agent_loop", "TokenOutput", "token_ids log_probs stop_reason num_preempted"),
    ("verl.experimental.agent_loop.agent_loop", "register", "name"),
    ("verl.tools.base_tool", "BaseTool", "config tool_schema"),
    ("verl.tools.base_tool", "BaseTool.get_openai_tool_schema", "self"),
    ("verl.tools.base_tool", "BaseTool.create", "self instance_id kwargs"),
    ("verl.tools.base_tool", "BaseTool.execute", "self instance_id parameters kwargs"),
    ("verl.tools.base_tool", "BaseTool.calc_reward", "self instance_id kwargs"),
    ("verl.tools.base_tool", "BaseTool.release", "self instance_id kwargs"),
    ("verl.tools.sandbox_fusion_tools", "SandboxFusionTool", "config tool_schema"),
    (
        "verl.tools.sandbox_fusion_tools",
        "SandboxFusionTool.execute_code",
        "self instance_id code timeout language",
    ),
    ("verl.tools.code_session_tool", "CodeSessionTool", "config tool_schema"),
    ("verl.sandbox", "SandboxClient", "url"),
    ("verl.sandbox.server", "main", "arguments"),
    ("verl.utils.reward_score.code", "compute_score", "solution_str ground_truth continuous timeout"),
    ("verl.tools.schemas", "ToolResponse", "text image video"),
    ("verl.tools.schemas", "OpenAIFunctionToolSchema.model_validate", "value"),
    ("verl.tools.schemas", "OpenAIFunctionToolSchema.model_dump", "self exclude_none exclude_unset"),
    ("verl.tools.schemas", "OpenAIFunctionSchema", "name description parameters strict"),
    ("verl.tools.schemas", "OpenAIFunctionParametersSchema", "type properties required"),
    ("verl.tools.schemas", "OpenAIFunctionPropertySchema", "type description enum"),
    ("verl.tools.function_tool", "function_tool", "name schema"),
    ("verl.tools.gsm8k_tool", "Gsm8kTool", "config tool_schema"),
    ("verl.tools.mcp_base_tool", "MCPBaseTool", "config tool_schema"),
    ("verl.tools.mcp_search_tool", "MCPSearchTool", "config tool_schema"),
    ("verl.interactions.base", "BaseInteraction", "config"),
    ("verl.interactions.base", "BaseInteraction.start_interaction", "self instance_id kwargs"),
    ("verl.interactions.base", "BaseInteraction.generate_response", "self instance_id messages kwargs"),
    ("verl.interactions.base", "BaseInteraction.calculate_score", "self instance_id kwargs"),
    ("verl.interactions.base", "BaseInteraction.finalize_interaction", "self instance_id kwargs"),
    ("verl.interactions.gsm8k_interaction", "Gsm8kInteraction", "config"),
    ("verl.utils.model", "compute_position_id_with_mask", "mask"),
    ("verl.utils.py_functional", "append_to_dict", "data new_data"),
    ("verl.protocol", "DataProto.to_tensordict", "self"),
    ("verl.protocol", "DataProto.unfold_column_chunks", "self n_split split_keys"),
    ("verl.single_controller.base.decorator", "get_predefined_dispatch_fn", "mode"),
    ("verl.single_controller.ray.base", "ResourcePoolManager", "resource_pool_spec mapping"),
    ("verl.single_controller.ray.base", "create_colocated_worker_raw_cls", "class_dict"),
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer._compute_reward", "self batch metrics"),
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer._compute_advantage", "self batch metrics"),
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer._log_metrics", "self metrics step"),
    ("verl.workers.fsdp_workers", "ActorRolloutRefWorker.update_actor", "self data ppo_epochs ppo_mini_batch_size"),
    ("verl.workers.fsdp_workers", "ActorRolloutRefWorker.generate_sequences", "self prompts sampling"),
    ("verl.workers.rollout.vllm_rollout", "vLLMRollout", ""),
    ("verl.workers.rollout.vllm_rollout.vllm_rollout", "vLLMRollout", ""),
    ("verl.utils.py_functional", "temp_env_var", "key value"),
    ("verl.utils.py_functional", "timeout_limit", "seconds use_signals"),
    ("verl.utils.py_functional", "union_two_dict", "dict1 dict2"),
    (
        "verl.utils.model",
        "create_random_mask",
        "input_ids max_ratio_of_valid_token max_ratio_of_left_padding min_ratio_of_valid_token",
    ),
    ("verl.utils.model", "update_model_config", "module_config override_config_kwargs"),
    ("verl.utils.model", "print_model_size", "model"),
    ("verl.utils.torch_functional", "distributed_mean_max_min_std", "local compute_max compute_min compute_std"),
    ("verl.utils.torch_functional", "distributed_masked_mean", "local mask"),
    ("verl.utils.fs", "is_non_local", "path"),
    ("verl.utils.fs", "md5_encode", "path"),
    ("verl.utils.device", "get_device_name", ""),
    ("verl.utils.device", "get_torch_device", ""),
    ("verl.utils.device", "get_device_id", ""),
    ("verl.utils.metric", "reduce_metrics", "metrics"),
]
ATTRIBUTES: list[tuple[str, str]] = [
    ("verl", "DataProto"),
    ("verl", "__version__"),
    ("verl.protocol", "DataProtoConfig.auto_padding"),
    ("verl.single_controller.base", "Worker.rank"),
    ("verl.single_controller.base", "Worker.world_size"),
    ("verl.single_controller.base.decorator", "Execute.ALL"),
    ("verl.single_controller.base.decorator", "Execute.RANK_ZERO"),
    *[
        ("verl.single_controller.base.decorator", f"Dispatch.{mode}")
        for mode in ("ONE_TO_ALL", "ALL_TO_ALL", "RANK_ZERO", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_METRIC")
    ],
    ("verl.single_controller.ray", "RayWorkerGroup.workers"),
    ("verl.single_controller.ray", "RayWorkerGroup.world_size"),
    ("verl.utils.device", "is_cuda_available"),
    *[
        ("verl.trainer.ppo.utils", f"Role.{role}")
        for role in ("Actor", "Rollout", "ActorRollout", "Critic", "RefPolicy", "RewardModel", "ActorRolloutRef")
    ],
    ("verl.trainer.ppo.ray_trainer", "Role"),
    *[
        ("verl.trainer.ppo.ray_trainer", f"RayPPOTrainer.{name}")
        for name in (
            "actor_rollout_wg",
            "critic_wg",
            "global_step",
            "global_steps",
            "kl_ctrl_in_reward",
            "ref_policy_wg",
            "reward_manager",
            "rm_wg",
        )
    ],
    ("verl.trainer.main_ppo", "TaskRunner.trainer_cls"),
    ("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY"),
    ("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY"),
    ("verl.trainer.ppo.core_algos", "compute_grpo_vectorized_outcome_advantage"),
    ("verl.trainer.ppo.core_algos", "compute_rloo_vectorized_outcome_advantage"),
    ("verl.single_controller.base.decorator", "DISPATCH_MODE_FN_REGISTRY"),
    ("verl.workers.reward_manager.registry", "REWARD_MANAGER_REGISTRY"),
    ("verl.trainer.ppo.ray_trainer", "AdvantageEstimator.GRPO"),
    ("verl.trainer.ppo.core_algos", "AdvantageEstimator.GAE"),
]

# Values that callers leave out. Text is a Python literal, or a name of the module.
_ESTIMATOR = {"epsilon": "1e-6", "config": "None"}
DEFAULTS: list[tuple[str, str, dict[str, str]]] = [
    ("verl.protocol", "DataProto.from_single_dict", {"meta_info": "None", "auto_padding": "False"}),
    (
        "verl.protocol",
        "DataProto.from_dict",
        {
            "tensors": "None",
            "non_tensors": "None",
            "meta_info": "None",
            "num_batch_dims": "1",
            "auto_padding": "False",
        },
    ),
    ("verl.protocol", "DataProto.select", {"deepcopy": "False"}),
    ("verl.protocol", "DataProto.make_iterator", {"seed": "None", "dataloader_kwargs": "None"}),
    ("verl.protocol", "DataProto.padding", {"candidate": "''"}),
    ("verl.protocol", "DataProto.repeat", {"repeat_times": "2", "interleave": "True"}),
    ("verl.protocol", "DataProto.unfold_column_chunks", {"split_keys": "None"}),
    ("verl.protocol", "unfold_batch_dim", {"batch_dims": "2"}),
    (
        "verl.single_controller.ray",
        "RayResourcePool",
        {
            "process_on_nodes": "None",
            "use_gpu": "True",
            "name_prefix": "None",
            "max_colocate_count": "10",
            "detached": "False",
        },
    ),
    ("verl.single_controller.ray", "RayWorkerGroup", {"resource_pool": "None", "ray_cls_with_init": "None"}),
    ("verl.trainer.main_ppo", "run_ppo", {"task_runner_class": "None"}),
    ("verl.trainer.main_ppo", "create_rl_dataset", {"is_train": "True", "max_samples": "-1"}),
    (
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer",
        {
            "ray_worker_group_cls": "RayWorkerGroup",
            "processor": "None",
            "reward_fn": "None",
            "val_reward_fn": "None",
            "train_dataset": "None",
            "val_dataset": "None",
            "collate_fn": "None",
            "train_sampler": "None",
            "device_name": "None",
        },
    ),
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer._compute_reward", {"metrics": "None"}),
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer._compute_advantage", {"metrics": "None"}),
    ("verl.trainer.ppo.ray_trainer", "apply_kl_penalty", {"kl_penalty": "'kl'"}),
    (
        "verl.trainer.ppo.ray_trainer",
        "compute_advantage",
        {"gamma": "1.0", "lam": "1.0", "num_repeat": "1", "norm_adv_by_std_in_grpo": "True", "config": "None"},
    ),
    *[
        ("verl.trainer.ppo.core_algos", f"compute_{name}_outcome_advantage", _ESTIMATOR)
        for name in ("grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg")
    ],
    (
        "verl.trainer.ppo.core_algos",
        "agg_loss",
        {"dp_size": "1", "batch_num_tokens": "None", "global_batch_size": "None", "loss_scale_factor": "None"},
    ),
    (
        "verl.trainer.ppo.core_algos",
        "compute_policy_loss",
        {
            "cliprange": "None",
            "cliprange_low": "None",
            "cliprange_high": "None",
            "clip_ratio_c": "3.0",
            "loss_agg_mode": "'token-mean'",
        },
    ),
    ("verl.trainer.ppo.core_algos", "compute_policy_loss_vanilla", {"rollout_is_weights": "None"}),
    ("verl.trainer.ppo.core_algos", "compute_value_loss", {"loss_agg_mode": "'token-mean'"}),
    ("verl.trainer.ppo.reward", "load_reward_manager", {"num_examine": "0"}),
    ("verl.trainer.ppo.metric_utils", "compute_data_metrics", {"use_critic": "True"}),
    ("verl.trainer.ppo.metric_utils", "bootstrap_metric", {"n_bootstrap": "1000", "seed": "42"}),
    ("verl.trainer.ppo.metric_utils", "process_validation_metrics", {"seed": "42"}),
    (
        "verl.workers.reward_manager",
        "NaiveRewardManager",
        {"compute_score": "None", "reward_fn_key": "'data_source'"},
    ),
    ("verl.workers.reward_manager", "DAPORewardManager", {"max_resp_len": "None", "overlong_buffer_cfg": "None"}),
    ("verl.workers.reward_manager", "NaiveRewardManager.__call__", {"return_dict": "False"}),
    ("verl.utils.fs", "copy_to_local", {"cache_dir": "None", "use_shm": "False", "always_recopy": "False"}),
    ("verl.utils.tracking", "Tracking", {"default_backend": "'console'", "config": "None"}),
    ("verl.utils.dataset.rl_dataset", "RLHFDataset", {"processor": "None", "max_samples": "-1"}),
    ("verl.utils.seqlen_balancing", "rearrange_micro_batches", {"dp_group": "None"}),
    ("verl.utils.torch_functional", "pad_sequence_to_length", {"left_pad": "False"}),
    ("verl.utils.reward_score", "default_compute_score", {"extra_info": "None"}),
    ("verl.utils.reward_score.gsm8k", "extract_solution", {"method": "'strict'"}),
    (
        "verl.utils.reward_score.gsm8k",
        "compute_score",
        {"method": "'strict'", "format_score": "0.0", "score": "1.0"},
    ),
    ("verl.utils.reward_score.qa_em", "compute_score_em", {"format_score": "0.0", "score": "1.0"}),
    (
        "verl.utils.checkpoint.checkpoint_manager",
        "find_latest_ckpt_path",
        {"directory_format": "'global_step_{}'"},
    ),
    ("verl.utils.py_functional", "timeout_limit", {"use_signals": "False"}),
    ("verl.utils.model", "create_random_mask", {"min_ratio_of_valid_token": "0"}),
]


@pytest.mark.parametrize(("module", "name", "expected"), DEFAULTS, ids=[f"{row[0]}.{row[1]}" for row in DEFAULTS])
def test_parameters_have_their_defaults(module, name, expected):
    parameters = inspect.signature(find(module, name)).parameters
    names = vars(importlib.import_module(module))
    assert {key: parameters[key].default for key in expected} == {
        key: names[value] if value in names else ast.literal_eval(value) for key, value in expected.items()
    }


def find(module: str, name: str) -> object:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("module", "name", "parameters"), CALLABLES, ids=lambda value: str(value)[:60])
def test_callable_has_its_parameters(module, name, parameters):
    target = find(module, name)
    assert callable(target)
    if inspect.isclass(target) and parameters:
        target = target.__init__
    if not parameters:
        return
    names = [parameter for parameter in inspect.signature(target).parameters if parameter != "self"]
    expected = [parameter for parameter in parameters.split() if parameter != "self"]
    assert names[: len(expected)] == expected


@pytest.mark.parametrize(("module", "name"), ATTRIBUTES)
def test_attribute_exists(module, name):
    find(module, name)


def test_register_defaults_are_the_documented_ones():
    from verl.single_controller.base.decorator import Dispatch, Execute, register

    defaults = {name: p.default for name, p in inspect.signature(register).parameters.items()}
    assert defaults["dispatch_mode"] is Dispatch.ALL_TO_ALL
    assert defaults["execute_mode"] is Execute.ALL
    assert (defaults["blocking"], defaults["materialize_futures"]) == (True, True)


def test_worker_group_has_its_attributes_after_start():
    from verl.single_controller.base import ClassWithInitArgs, Worker
    from verl.single_controller.local import LocalWorkerGroup

    group = LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Worker))
    assert group.world_size == 1


def test_roles_are_spelled_as_users_know_them():
    from verl.trainer.ppo.utils import Role

    assert {str(role) for role in Role} >= {
        "actor",
        "rollout",
        "actor_rollout",
        "critic",
        "ref",
        "rm",
        "actor_rollout_ref",
    }


def test_the_merger_takes_the_options_that_scripts_give_it():
    from verl.model_merger.__main__ import parser

    line = "merge --backend megatron --local_dir D --target_dir T --hf_upload_path R --private --test_hf_dir H"
    flags = "--tie-word-embedding --is-value-model --trust-remote-code --use_cpu_initialization"
    found = vars(parser().parse_args([*line.split(), *flags.split(), "--lora", "adapter"]))
    assert all(found[name] is True for name in ("private", "tie_word_embedding", "is_value_model", "trust_remote_code"))
    assert (found["command"], found["backend"], found["test_hf_dir"]) == ("merge", "megatron", "H")
