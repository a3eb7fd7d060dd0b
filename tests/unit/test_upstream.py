"""Names of other libraries that an upgrade may change without a word: private ones, or missed by nobody.

A failure lists every name that is gone or different, and the files of ours that rely on it. What it lists is to be
found again in the new version, or the range in pyproject.toml ends below it.
"""

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import bitsandbytes  # noqa: F401  registers its operations
import torch

from sft_play.sizing.kernels import simulation
from sft_play.sizing.step import LOSS_TILES
from sft_play.upstream.transformers import NOT_DECAYED

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for folder in ("sft_play", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
WORDS = {name: set(re.findall(r"\w+", text)) for name, text in FILES.items()}

# "module:name" -> parameters that we pass or that it passes to us
CALLED = {
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state": "",
    "deepspeed.utils.tensor_fragment:fragment_address": "numel start",
    "deepspeed.utils:safe_set_full_fp32_param": "",
    "deepspeed.utils:safe_set_full_optimizer_state": "",
    "deepspeed.utils:safe_get_local_fp32_param": "",
    "deepspeed.utils:safe_get_local_optimizer_state": "",
    "deepspeed.utils:safe_set_local_fp32_param": "",
    "deepspeed.utils:safe_set_local_optimizer_state": "",
    "deepspeed.runtime.zero.partition_parameters:register_external_parameter": "",
    "deepspeed.runtime.zero.partitioned_param_coordinator:"
    "PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release": "",
    "bitsandbytes.functional:QuantState": "absmax shape code blocksize quant_type dtype offset state2",
    "peft:PeftModel.get_base_model": "",
    "peft.tuners.lora.layer:LoraVariant.forward": "module active_adapter x result",
    "torch:ops.aten.mm.default._can_decompose": "",
    "torch._subclasses.fake_impls:_is_tensor_constructor": "func",
    "torch._subclasses.fake_impls:has_meta": "func",
    "torch._subclasses.fake_tensor:torch_decomp_decompositions": "func",
    "torch._dynamo:maybe_mark_dynamic": "t index",
    "torch._functorch:config.patch": "",
    "torch._inductor.async_compile:AsyncCompile.cpp_pybinding": "",
    "torch._inductor.codecache:PyCodeCache.load_by_key_path": "key path attrs",
    "torch._inductor.codecache:PyCodeCache.write": "source_code extra",
    "torch._inductor.compile_fx:compile_fx": "inner_compile config_patches",
    "torch._inductor.compile_fx:compile_fx_inner": "",
    "torch._inductor.graph:GraphLowering.codegen": "",
    "torch._inductor.graph:GraphLowering.compile_to_module": "",
    "torch._inductor.runtime.cache_dir_utils:default_cache_dir": "",
    "torch.nn.attention.varlen:varlen_attn": "scale window_size",
    "torch:get_rng_state": "",
    "torch:set_rng_state": "",
    "torch:is_autocast_enabled": "",
    "torch:ops.aten._grouped_mm.default": "",
    "torch:ops.aten._safe_softmax.default": "",
    "torch:_foreach_sqrt": "",
    "torch:ops.aten._index_put_impl_.default": "",
    "torch:ops.bitsandbytes.gemm_4bit.default": "",
    "torch:ops.torch_attn._varlen_attn_backward.default": "",
    "torch._C._profiler:_ExperimentalConfig": "",
    "torch._subclasses.fake_tensor:FakeTensor.__new__": "elem device",
    "torch._subclasses.fake_tensor:FakeTensorMode": "allow_non_fake_inputs",
    "torch:Tensor._make_subclass": "",
    "torch.autograd:_disable_profiler": "",
    "torch.autograd:_enable_profiler": "",
    "torch.autograd:_prepare_profiler": "",
    "torch.utils._python_dispatch:TorchDispatchMode": "",
    "torch.utils._python_dispatch:TorchDispatchMode.ignore_compile_internals": "",
    "transformers.quantizers.base:HfQuantizer._process_model_after_weight_loading": "model",
    "transformers.quantizers.base:HfQuantizer._process_model_before_weight_loading": "model",
    "transformers.trainer_callback:CallbackHandler": (
        "callbacks model processing_class optimizer lr_scheduler"
    ),
    "transformers.integrations.integration_utils:rewrite_logs": "",
    "transformers.integrations.neftune:activate_neftune": "model neftune_noise_alpha",
    "transformers.core_model_loading:WeightConverter": "",
    "transformers.quantizers.base:HfQuantizer.postprocess_model": "model",
    "transformers.quantizers.base:HfQuantizer.preprocess_model": "model",
    "transformers:PreTrainedModel._get_dtype_plan": "dtype",
    "torch.utils.tensorboard.summary:hparams": "hparam_dict metric_dict",
    "transformers.convert_slow_tokenizer:bytes_to_unicode": "",
    "transformers.utils.chat_template_utils:_compile_jinja_template": "chat_template",
    "transformers.utils.import_utils:create_import_structure_from_path": "module_path",
    "transformers.utils.import_utils:fetch__all__": "file_content",
    "transformers.utils.chat_template_utils:render_jinja_template": (
        "conversations tools chat_template return_assistant_tokens_mask"
    ),
    "torch.distributed.distributed_c10d:_set_pg_timeout": "timeout",
    "torch.distributed.distributed_c10d:_update_default_pg": "pg",
    "torch.distributed.fsdp._fully_shard._fsdp_init:_move_states_to_device": "params buffers device",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._init_sharded_param": "param device",
    "torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty": "tensor num_chunks dim",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._lazy_init": "",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback": "",
    "torch.distributed.fsdp._fully_shard._fsdp_param:nn.Parameter": "data requires_grad",
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache": "",
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached": "op_schema",
    "transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLTextModel._deepstack_process": "hidden_states "
    "visual_pos_masks visual_embeds",
    "transformers.models.smolvlm.modeling_smolvlm:SmolVLMModel.get_image_features": "pixel_values",
    "trl:SFTTrainer._load_best_model": "",
    "trl:SFTTrainer._load_from_checkpoint": "resume_from_checkpoint model",
    "trl:SFTTrainer._save_optimizer_and_scheduler": "output_dir",
    "trl:SFTTrainer._save_checkpoint": "model trial",
    "trl:SFTTrainer._prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
    "trl:SFTTrainer._prepare_inputs": "inputs",
    "trl.kernels.chunked_logprob:ChunkedLogProbFunction.backward": "",
    "trl.kernels.chunked_logprob:ChunkedLogProbFunction.forward": "",
    "trl.kernels.chunked_logprob:_addmm_fp32": "acc a b",
    "trl.kernels.chunked_logprob:_backward_tile": "",
    "trl.kernels.chunked_logprob:_forward_tile": "",
    "trl.trainer.utils:_ChunkedLogProbFunction": "",
    "trl.trainer.utils:_use_triton": "device",
    "trl.trainer.utils:add_fused_lm_head": "model temperature cast_lm_head_to_fp32 outputs",
}

# (our word, whose source is looked at, the text that it must hold)
TRAINER, LOSS = "transformers:Trainer", "trl.kernels.chunked_logprob:ChunkedLogProbFunction"
PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"
ZERO2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module"
ZERO = "deepspeed.runtime.engine:DeepSpeedEngine._configure_zero_optimizer"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
WRITTEN = [
    ("_z3_optimizer", ZERO3, "p._z3_optimizer = self"),
    ("_zero_optimizer", ZERO2, "lp._zero_optimizer = self"),
    ("grad_accum", ZERO2, "param.grad_accum = None"),
    (
        "NOT_DECAYED",
        "transformers:Trainer.get_decay_parameter_names",
        "[" + ", ".join(f'r"{pattern}"' for pattern in NOT_DECAYED) + "]",
    ),
    ("get_parameter_names", "transformers:Trainer.get_decay_parameter_names", "(model, [nn.LayerNorm], "),
    (
        "module_forward_pre_hook",
        ENGINE,
        "self.module_forward_pre_hook = self._create_module_forward_pre_hook()",
    ),
    (
        "module_forward_post_hook",
        ENGINE,
        "self.module_forward_post_hook = self._create_module_forward_post_hook()",
    ),
    ("z3_leaf_parameter", ZERO3, "if z3_leaf_parameter(param):"),
    ("fp16_groups", ZERO3, "self.fp16_groups.append("),
    ("fp32_partitioned_groups_flat", ZERO3, "self.fp32_partitioned_groups_flat.append("),
    ("fp16_partitioned_groups_flat", ZERO3, "self.fp16_partitioned_groups_flat.append("),
    ("fp16_partitioned_groups_flat_id", ZERO3, "self.fp16_partitioned_groups_flat_id.append([p.ds_id"),
    ("trainable_param_groups", ZERO3, "for j, param_group in enumerate(self.trainable_param_groups):"),
    ("param_groups_fp16_flat_cpu_memory", ZERO3, "self.param_groups_fp16_flat_cpu_memory.append("),
    ("_create_param_groups_fp16_flat_cpu_memory", ZERO3, "self._create_param_groups_fp16_flat_cpu_memory()"),
    ("_create_fp32_partitions", ZERO3, "self._create_fp32_partitions()"),
    ("subgroup_to_device", ZERO3, "self.subgroup_to_device[i] = 'cpu'"),
    ("DeepSpeedZeroOptimizer_Stage3", ZERO, "import DeepSpeedZeroOptimizer_Stage3"),
    ("pre_bwd_fn", OFFLOAD, '"pre_bwd_fn" not in module.__dict__'),
    ("post_bwd_fn", OFFLOAD, '"post_bwd_fn" not in module.__dict__'),
    ("_local_tensor", "torch.distributed.tensor._api", "_local_tensor: torch.Tensor"),
    ("_should_skip_dynamo", "torch.utils._python_dispatch:TorchDispatchMode", "cls._should_skip_dynamo()"),
    (
        "in_kernel_invocation",
        "torch._subclasses.fake_tensor:in_kernel_invocation_manager",
        ".in_kernel_invocation = True",
    ),
    ("reorder_for_peak_memory", "torch._inductor.config", "\nreorder_for_peak_memory = True"),
    ("empty_strided_cpu", "torch._inductor.codegen.wrapper", "empty_strided_cpu = torch._C._dynamo.guards."),
    (
        "reinterpret_tensor",
        "torch._inductor.codegen.wrapper",
        "reinterpret_tensor = torch._C._dynamo.guards.",
    ),
    ("cache_linemap", "torch._inductor.output_code", "graph.cache_linemap"),
    ("_fsdp_init", "torch.distributed.fsdp._fully_shard._fully_shard", "from ._fsdp_init import"),
    (
        "_handle",
        "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel",
        "self._handle is not None",
    ),
    ("_call_queue", "concurrent.futures.process:ProcessPoolExecutor", "self._call_queue = "),
    ("_reader", "multiprocessing.queues:Queue", "self._reader, self._writer = "),
    ("_get_fsdp_state", "torch.distributed.fsdp._fully_shard._fully_shard", "self._get_fsdp_state()"),
    ("_fsdp_param_groups", "torch.distributed.fsdp._fully_shard._fully_shard", "state._fsdp_param_group"),
    (
        "_state_ctx",
        f"{FSDP_STATE}._root_post_backward_final_callback",
        "for state in self._state_ctx.all_states",
    ),
    ("_training_state", PARAM_GROUP, "self._training_state = TrainingState.POST_BACKWARD"),
    ("_partial_reduce_output", PARAM_GROUP, "self._partial_reduce_output,"),
    ("_post_forward_indices", PARAM_GROUP, "self._post_forward_indices.append(post_forward_index)"),
    ("post_forward_order", PARAM_GROUP, "self.comm_ctx.post_forward_order.append(self)"),
    ("_unsharded_param", PARAM_GROUP, "_unsharded_param"),
    ("foreach_reduce", PARAM_GROUP, "foreach_reduce("),
    (
        "current_stream",
        "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_all_gather",
        "with device_handle.stream(all_gather_copy_in_stream):",
    ),
    ("current_stream", "torch.cpu:StreamContext.__enter__", "_current_stream = cur_stream"),
    ("cpu", "torch.distributed.fsdp._fully_shard._fsdp_param", "padded_sharded_param.cpu()"),
    ("non_blocking", "torch.distributed.fsdp._fully_shard._fsdp_param", "non_blocking=True"),
    ("non_blocking", "torch.distributed.fsdp._fully_shard._fsdp_collectives", "non_blocking=non_blocking"),
    ("unsharded_accumulated_grad", PARAM_GROUP, "fsdp_param.unsharded_accumulated_grad is not None"),
    ("no_sync", "accelerate:Accelerator.no_sync", 'getattr(model, "no_sync", context)'),
    (
        "_gradient_checkpointing_func",
        "transformers.modeling_layers:GradientCheckpointingLayer",
        "self._gradient_checkpointing_func(",
    ),
    ("_prepare_for_training", TRAINER, "self._prepare_for_training("),
    ("_load_best_model", TRAINER, "self._load_best_model("),
    ("_tr_loss", TRAINER, "self._tr_loss ="),
    ("deepspeed", TRAINER, "self.deepspeed ="),
    ("compute_loss", TRAINER, "self.compute_loss("),
    ("training_step", TRAINER, "self.training_step("),
    ("scale_wrt_gas", TRAINER, 'kwargs["scale_wrt_gas"] = False'),
    ("skip_prepare_dataset", "trl:SFTTrainer", "skip_prepare_dataset"),
    ("few_tiles", LOSS, "range(0, N, TOKEN_CHUNK_SIZE)"),
    ("few_tiles", LOSS, "range(0, vocab, chunk_size)"),
    ("_forward_tile", LOSS, "_forward_tile"),
    ("_backward_tile", LOSS, "_backward_tile"),
    ("_addmm_fp32", LOSS, "_addmm_fp32("),
    ("_use_triton", "trl.trainer.utils:add_fused_lm_head", "compact = _use_triton(hidden_states.device)"),
    ("_ChunkedLogProbFunction", "trl.trainer.utils:add_fused_lm_head", "_ChunkedLogProbFunction.apply("),
    ("_clip_grad_norm", TRAINER, "self._clip_grad_norm("),
    ("_run_epoch", TRAINER, "self._run_epoch("),
    ("zero_grad", TRAINER, "model.zero_grad()"),
    ("_get_grad_norm", TRAINER, "self._get_grad_norm(model, grad_norm=grad_norm)"),
    ("fused_lm_head", "trl.trainer.utils:add_fused_lm_head", "fused_lm_head"),
    ("label_mask", "trl.trainer.utils:add_fused_lm_head", "label_mask="),
    ("is_top1", "trl.trainer.utils:add_fused_lm_head", "is_top1="),
    ("_original_forward", "accelerate:Accelerator", "model._original_forward ="),
    (
        "cast_input_dtype_enabled",
        "peft.tuners.tuners_utils:BaseTunerLayer._cast_input_dtype",
        '"cast_input_dtype_enabled"',
    ),
    ("_is_quantized", "transformers.quantizers.base", "config._is_quantized = True"),
    ("_is_accelerate_prepared", "accelerate:Accelerator", "._is_accelerate_prepared = True"),
    ("bit16_groups", ZERO2, "self.bit16_groups ="),
    ("tensors", "bitsandbytes.autograd._functions:MatMul4Bit", "_, B = ctx.tensors"),
    ("support_avx512bf16_for_cpu", "bitsandbytes.nn:Linear4bit", "self.support_avx512bf16_for_cpu ="),
    ("quant_state", "bitsandbytes.nn:Params4bit", "self.quant_state ="),
    ("bnb_quantized", "bitsandbytes.nn:Params4bit", "not self.bnb_quantized"),
    ("source_cls", "transformers.integrations.bitsandbytes", "new_module.source_cls ="),
    (
        "_weight_conversions",
        "transformers.core_model_loading:convert_and_load_state_dict_in_model",
        "model._weight_conversions =",
    ),
    ("_setup_devices", "transformers:TrainingArguments", "return self._setup_devices"),
    ("_old_forward", "accelerate.hooks:add_hook_to_module", "module._old_forward = old_forward"),
    ("_hf_hook", "transformers.integrations.accelerate:load_offloaded_parameter", "_hf_hook.weights_map"),
    ("weights_map", "transformers:PreTrainedModel.save_pretrained", "load_offloaded_parameter("),
    (
        "hf_device_map",
        "transformers:PreTrainedModel.save_pretrained",
        '"disk" in self.hf_device_map.values()',
    ),
    ("merged_adapters", "peft.tuners.lora:Linear.merge", "self.merged_adapters.append("),
    ("_fingerprint", "datasets:Dataset", "self._fingerprint"),
    ("_parameters", "torch.nn:Module", "_parameters"),
    ("_last_lr", "torch.optim.lr_scheduler:LRScheduler", "self._last_lr"),
    ("num_alloc_retries", "torch.cuda:memory_stats", "num_alloc_retries"),
    (
        "_store",
        "torch.distributed.elastic.rendezvous.static_tcp_rendezvous:StaticTCPRendezvous",
        "self._store",
    ),
    (
        "RANK_FAILED",
        "torch.distributed.elastic.multiprocessing.errors",
        "Root Cause (first observed failure)",
    ),
    # its default is what we set where nothing reads the variable
    ("wait_for_ranks", "torch.distributed.elastic.multiprocessing.api:PContext.close", "timeout: int = 30"),
    *(  # torch 2.11 has no such variable
        [("SHUTDOWN_VARIABLE", "torch.distributed.launcher.api", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")]
        if torch.__version__ >= "2.12"
        else []
    ),
    ("PET_SIGNALS_TO_HANDLE", "torch.distributed.run", "--signals-to-handle"),
    ("_SummaryWriter", "transformers.integrations:TensorBoardCallback", "self._SummaryWriter ="),
    ("rewrite_logs", "transformers.integrations:TensorBoardCallback", "logs = rewrite_logs(logs)"),
    ("rewrite_logs", "transformers.integrations:WandbCallback", "rewrite_logs("),
    ("rewrite_logs", "transformers.integrations:TrackioCallback", "rewrite_logs("),
    ("DS_ACCELERATOR", "deepspeed.accelerator.real_accelerator", "DS_ACCELERATOR"),
]

# "module:name" -> the value that we have written down; ... where it only has to be there
VALUES = {
    "trl.kernels.chunked_logprob:TOKEN_CHUNK_SIZE": LOSS_TILES["cuda"],
    "sft_play.model.layers.cpu:TILE": LOSS_TILES["cpu"],
    "huggingface_hub.constants:HF_HUB_OFFLINE": ...,
    "transformers.utils.logging:_tqdm_active": ...,
    "huggingface_hub.utils._http:_GLOBAL_CLIENT_FACTORY": ...,
    "torch._C:DisableTorchFunction": ...,
    "torch._C:_DisableTorchDispatch": ...,
    "torch._C:_PreserveDispatchKeyGuard": ...,
    "torch._C:_TorchDispatchModeKey.FAKE": ...,
    "torch._C:_get_dispatch_mode": ...,
    "torch._C:_set_meta_in_tls_dispatch_include": ...,
    "torch._C:_set_throw_on_mutable_data_ptr": ...,
    "torch._decomp:decomposition_table": ...,
    "torch._decomp:meta_table": ...,
    "torch._subclasses.fake_impls:_like_tensor_constructors": ...,
    "torch._subclasses.fake_impls:op_implementations_checks": ...,
    "torch._subclasses.fake_tensor:FakeTensorMode.lift_fns": ...,
    "torch._dynamo.config:optimize_ddp": ...,
    "torch._dynamo.utils:counters": ...,
    "torch._dynamo.config:recompile_limit": ...,
    "torch._functorch.config:autograd_cache_allow_custom_autograd_functions": False,
    "torch.compiler.config:cache_key_tag": "",
    "torch.distributed.distributed_c10d:_World": ...,
    "torch.distributed.distributed_c10d:_backend": ...,
    "torch.distributed.distributed_c10d:_group_count": ...,
    "torch.distributed.distributed_c10d:_pg_backend_config": ...,
    "torch.distributed.distributed_c10d:_pg_group_ranks": ...,
    "torch.distributed.distributed_c10d:_pg_map": ...,
    "torch.distributed.distributed_c10d:_pg_names": ...,
    "torch.distributed.distributed_c10d:_pg_to_tag": ...,
    "torch.distributed.distributed_c10d:_tags_to_pg": ...,
    "torch.distributed.distributed_c10d:_unregister_process_group": ...,
    "torch.distributed.distributed_c10d:_world": ...,
    "torch.testing._internal.distributed.fake_pg:FakeStore": ...,
    "torch:ops.c10d._allgather_base_": ...,
    "torch:ops.c10d._reduce_scatter_base_": ...,
    "torch._C:_storage_Use_Count": ...,
    "accelerate.state:AcceleratorState._reset_state": ...,
    "accelerate.state:AcceleratorState._shared_state": ...,
    "transformers:AttentionInterface._global_mapping": ...,
    "transformers:AutoModelForCausalLM._model_mapping._extra_content": ...,
    f"{PARAM_GROUP}._backward_prefetch": ...,
    "torch:Tensor._is_view": ...,
    "torch:Tensor._use_count": ...,
    "torch:UntypedStorage._cdata": ...,
    "torch:UntypedStorage.nbytes": ...,
    "transformers:AutoModelForCausalLM._model_mapping": ...,
    "transformers:AutoModelForImageTextToText._model_mapping": ...,
    "transformers:LlamaPreTrainedModel._no_split_modules": ["LlamaDecoderLayer"],
    "transformers:PreTrainedModel._supports_flash_attn": False,
    "transformers:PreTrainedModel._supports_sdpa": False,
    "transformers:MixtralModel._can_record_outputs": ...,
    "transformers:PretrainedConfig._attn_implementation": ...,
    "deepspeed.checkpoint.constants:BASE_OPTIMIZER_STATE": "base_optimizer_state",
    "deepspeed.checkpoint.constants:OPTIMIZER_STATE_DICT": "optimizer_state_dict",
    "deepspeed.checkpoint.constants:PARAM_SHAPES": "param_shapes",
    "deepspeed.checkpoint.constants:PARAM_SLICE_MAPPINGS": "param_slice_mappings",
    "deepspeed.checkpoint.constants:PARTITION_COUNT": "partition_count",
    "deepspeed.checkpoint.constants:SINGLE_PARTITION_OF_FP32_GROUPS": "single_partition_of_fp32_groups",
}

# fields that some architectures lack: where one is renamed, all would seem to lack it
CONFIG_FIELDS = [
    ("LlamaConfig", "max_position_embeddings"),
    ("Gemma2Config", "attn_logit_softcapping"),
    ("Gemma3TextConfig", "sliding_window"),
    ("Gemma3TextConfig", "layer_types"),
    ("MixtralConfig", "num_local_experts"),
    ("Qwen3MoeConfig", "num_experts"),
    ("Qwen3MoeConfig", "num_experts_per_tok"),
]

# Only a CUDA build has it; the benchmark that calls it runs on a GPU alone.
ON_A_GPU = {"_cuda_clearCublasWorkspaces"}
# Words that only look like private names of libraries: Python's own, keys of a file, parts of our file names.
NOT_PRIVATE = {
    "_asdict",
    "_component_",
    "_cpu",
    "_data_files",
    "_multi_node",
    "_name_or_path",
    "_quick",
    "_sleep",
    "_stderr",
    "_typeshed",
}
# Operations that public functions of torch are dispatched to. For those of `torch.ops.aten` work.py has a rule each, and
# one that is gone is counted by the general rule.
OPERATIONS = {
    "_log_softmax", "_reshape_alias", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_softmax", "_softmax_backward_data", "_unsafe_view",
    "_allgather_base_", "_grouped_mm", "_index_put_impl_", "_reduce_scatter_base_", "_safe_softmax",
}  # fmt: skip


# Why private names stay outside of the room -> files.
OUTSIDE = {
    "the trace works inside of PyTorch's dispatcher and FSDP2, and is nothing else": (
        "sizing/recording/fake_results.py sizing/recording/recorder.py sizing/trace/sharded.py "
        "sizing/trace/zero3.py"
    ),
    "a subclass of the library's overrides its methods, which cannot be elsewhere": (
        "train/trainer.py launch/rendezvous.py"
    ),
}


def test_names_of_the_tracer_and_of_the_architectures_are_there():
    from torch.utils import _python_dispatch
    from transformers import LlamaForCausalLM

    assert callable(_python_dispatch._get_current_dispatch_mode_stack)  # sizing/recording/recorder.py
    assert LlamaForCausalLM._supports_attention_backend is True  # model/load.py
    assert torch.ops.aten.mm.default._schema.name == "aten::mm"  # sizing/recording/operations.py


def users(word: str) -> str:
    return " ".join(name for name, words in WORDS.items() if word in words) or "nobody"


def last(name: str) -> str:
    """`a.b:C.d` -> d; of an operation the name before its overload."""
    return name.removesuffix(".default").rpartition(":")[2].rpartition(".")[2]


GONE = object()


def found(name: str):
    """What a name stands for; GONE where an upgrade has taken it away."""
    try:
        return resolve_name(name)
    except (AttributeError, ImportError):
        return GONE


def report(problems: dict[str, str]) -> None:
    """Fails with all problems: our word for a thing -> what is wrong with it."""
    assert not problems, "\n".join(f"{what}; {users(word)} rely on it" for what, word in problems.items())


def test_what_is_called_is_there_with_its_parameters():
    problems = {}
    for name, wanted in CALLED.items():
        function = found(name)
        if not callable(function):
            problems[f"{name} is gone, or cannot be called any more"] = last(name)
        elif missing := set(wanted.split()) - set(inspect.signature(function).parameters if wanted else ()):
            problems[f"{name} has lost its parameters {sorted(missing)}"] = last(name)
    report(problems)


def test_what_a_library_does_inside_is_still_written_there():
    problems = {}
    source = cache(inspect.getsource)  # it reads a class's whole file anew
    for word, name, text in WRITTEN:
        owner = found(name)
        if owner is GONE:
            problems[f"{name} is gone"] = word
        elif text not in source(owner):
            problems[f"{name} no longer has {text!r}"] = word
    report(problems)


def test_values_are_what_we_wrote_down():
    values = {name: found(name) for name in VALUES}
    report(
        {
            f"{name} is {'gone' if values[name] is GONE else values[name]}, not {wanted!r}": last(name)
            for name, wanted in VALUES.items()
            if values[name] is GONE or (wanted is not ... and values[name] != wanted)
        }
    )


def test_fields_that_some_architectures_lack_have_their_name():
    import transformers

    report(
        {
            f"{config} has no {field}": field
            for config, field in CONFIG_FIELDS
            if not hasattr(getattr(transformers, config)(), field)
        }
    )


def test_operations_that_autocast_treats_apart_are_there():
    places = (torch, torch.nn.functional, torch.Tensor)
    names = simulation.FP32_INPUT | simulation.FP32_RESULT
    gone = [name for name in sorted(names) if not any(hasattr(place, name) for place in places)]
    assert not gone, gone


def private_names() -> dict[str, set[str]]:
    """File -> names with one underscore in front that it takes from elsewhere."""
    taken: dict[str, set[str]] = {}
    own = set()
    for file, text in FILES.items():
        used = taken[file] = set()
        nodes = list(ast.walk(ast.parse(text)))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                of_self = node.value.id == "self" and isinstance(node.ctx, ast.Store)
                (own if of_self else used if node.value.id not in ("self", "os") else set()).add(node.attr)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                used.add(node.value)
            elif isinstance(node, ast.ImportFrom):
                used |= {alias.name for alias in node.names} | set((node.module or "").split("."))
    overridden = set(re.findall(r"super\(\)\.(\w+)\(", "".join(FILES.values()))) & own
    found = {file: used - own | overridden & WORDS[file] for file, used in taken.items()}
    return {file: {n for n in used if re.fullmatch(r"_[a-zA-Z]\w*", n)} for file, used in found.items()}


def test_every_private_name_that_we_take_is_asked_for_here():
    tables = [*CALLED, *VALUES, *(" ".join(row) for row in WRITTEN)]
    tested = {"_get_current_dispatch_mode_stack", "_supports_attention_backend", "_schema"}
    listed = set(re.findall(r"\w+", " ".join(tables))) | ON_A_GPU | NOT_PRIVATE | OPERATIONS | tested
    assert set().union(*private_names().values()) - listed == set()


def test_private_names_of_libraries_have_one_room():
    """Each of the others is here with its reason, and goes from here when it needs none any more."""
    names = {
        file.removeprefix("sft_play/"): found - NOT_PRIVATE - OPERATIONS
        for file, found in private_names().items()
    }
    outside = {
        file for file, found in names.items() if found and not file.startswith(("upstream/", "benchmarks/"))
    }
    assert outside == {file for files in OUTSIDE.values() for file in files.split()}


def test_what_we_take_or_change_says_since_which_version_and_what_would_end_it():
    """In a function's own docstring, its module's, or that of a function which it refers to."""
    for file, text in FILES.items():
        if not file.startswith("sft_play/upstream/") or file.endswith("/patching.py"):
            continue
        tree = ast.parse(text)
        said = {
            node.name: ast.get_docstring(node) or ""
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
        }
        for name in (name for name in said if not name.startswith("_")):
            others = (said.get(other, "") for other in re.findall(r"`(\w+)`", said[name]))
            whole = " ".join([ast.get_docstring(tree) or "", said[name], *others])
            assert re.search(r"\d\.\d+", whole), f"{file}: {name} names no version of the library"
            assert "unnecessary" in whole, f"{file}: {name} does not say what would make it unnecessary"


def test_what_is_asked_for_here_is_used():
    words = {last(name) for name in CALLED} | {row[0] for row in WRITTEN}
    unused = [word for word in sorted(words) if users(word) == "nobody"]
    assert not unused, unused
