"""The table of strategies: every field, and its outcomes by graph, Paddle and device.

A field's line has its name, its default (which implies its kind), unit and range, and its purpose.
Below it are, if any, the parts of a mapping (`.k_steps`), other spellings (`also`), the meanings of
the word `auto`, the `only` Paddle that has it, `own` if only fleetrun implements it,
and the value that is `never` passed on. All other lines are outcomes: `static 2.6.2 gpu: effective:
WHY`, of which the first match counts, and those that begin with `false` apply when the field is
off. `as` copies those of another field; a field `x_configs` has, after its own, those of `x`. A
reason may continue with `unseen`, for a run that does not show it. Whole numbers are at least 1,
others at least 0, unless a range says otherwise. `nowhere` lists fields that have no effect; the
lines below hold for each of them.

Names and defaults were read from `fleet.DistributedStrategy` of Paddle 2.6.2 and 3.3.1.
`tests/train/test_verdicts.py` measures the outcomes on CPUs again; those on GPUs were read from the
programs of a GPU build, or are the same as on CPUs. `fields.py` reads the table.
"""

# Phrases that several lines share.
WORDS = {
    "ours": "fleetrun sends the gradients itself",
    "either": "Paddle's reducer or fleetrun's sends the gradients",
    "rewrites": "fleetrun rewrites the program itself",
    "passes": "Paddle rewrites the program",
    "static_only": "Paddle reads it for static programs only",
    "sharded": "Paddle reads it for sharded static programs only",
    "makes_nothing": "data parallel ignores it",
    "cast": "in dygraph fleet only makes a GradScaler; the script must call auto_cast",
    # How the reason of every untested outcome begins.
    "only_a_gpu": "needs a GPU: ",
    # Seen in static graphs of both Paddles.
    "no_gradients": "Paddle then sends no gradients at all, and ranks diverge without an error",
}

TEXT = """
[strategy]
fuse_all_reduce_ops = true  Send many gradients in one allreduce instead of one each.
  dygraph: effective: {either}, in buckets of this size
  static: effective: {rewrites}, in buckets by bytes and by count
  false dygraph: effective: {either}, one by one
  false static: no difference: one allreduce for each gradient, the same as if not set
fuse_grad_size_in_MB = 32 MB, 1..65536  The maximum size of the gradients in one allreduce.
  auto: a tenth of the bytes of all gradients, at least 1 MB
  dygraph: effective: {either}, in buckets of this size
  static: effective: {rewrites}, in buckets by bytes and by count
fuse_grad_size_in_num = 8 gradients  The maximum number of gradients in one allreduce.
  as: fuse_grad_size_in_MB
fuse_grad_size_in_TFLOPS = 50.0 gradients, 1..  The maximum number of gradients in one allreduce,
    despite its name.
  also: _fuse_grad_size_in_TFLOPS
  as: fuse_grad_size_in_MB
last_comm_group_size_MB = 1.0 MB  The maximum size of the last allreduce, for which the
    backward pass must wait.
  dygraph: effective: {either}, in buckets of this size
  static: no effect: Paddle reads it in dygraph only
nccl_comm_num = 1 communicators, 1..16  Communicators that allreduces use in turn, so that
    several run concurrently.
  auto: 1 on one host, 2 on several
  dygraph: effective: {ours}, over communicators in turn
  static 3.3.1 gpu: no effect: Paddle 3 runs all rings of an older static program over the first
      communicator
  static: effective: {rewrites}, over communicators in turn
sync_nccl_allreduce = true  Wait for each allreduce before the next one is sent.
  dygraph: effective: {either}, and waits for each
  static cpu: effective: Paddle waits for gloo; over several communicators, fleetrun does
  static 2.6.2 gpu: effective: sets Paddle's flag
  static 3.3.1 gpu: untested: {only_a_gpu}its flag is for GPUs
  false dygraph: effective: {either}, and continues meanwhile
  false static cpu: no effect: Paddle's operators wait for gloo, unless nccl_comm_num is above 1
  false static 2.6.2 gpu: effective: sets Paddle's flag
  false static 3.3.1 gpu: untested: {only_a_gpu}its flag is for GPUs
use_hierarchical_allreduce = false  Reduce within each group, allreduce among the groups' leaders,
    and broadcast.
  auto: off; to see what it gains, launch with true and with false
  dygraph: effective: {ours}, in two levels
  static: no effect: only dynamic graphs are summed in two levels
hierarchical_allreduce_inter_nranks = 1 ranks  Ranks of one group of the hierarchical allreduce,
    usually the devices of a host.
  auto: the ranks of each host
  as: use_hierarchical_allreduce
calc_comm_same_stream = false  Compute and communicate in one stream.
  also: _calc_comm_same_stream
  dygraph: no effect: data parallel does not read it
  static cpu: no effect: gloo on CPUs has no streams
  static: effective: {rewrites}, for the one stream
fp16_allreduce = false  Send gradients as float16, in dygraph; Paddle's own version sends nothing.
  dygraph 3.3.1 cpu: refused: its gloo sums float16 to infinity; use bf16_allreduce
  dygraph gpu: untested: {only_a_gpu}NCCL is self-tested at the start
  dygraph: effective: {ours}, in 16 bits
  static: refused: Paddle's own version for static graphs sends no gradients, and ranks diverge
bf16_allreduce = false  Send gradients as bfloat16, in dygraph: the range of float32 with less
    precision.
  own: fleetrun
  dygraph gpu: untested: {only_a_gpu}NCCL is self-tested at the start
  dygraph: effective: {ours}, in 16 bits
  static: refused: Paddle's own version for static graphs sends no gradients, and ranks diverge
find_unused_parameters = false  Look for parameters that a step does not use.
  dygraph: effective: passed to DataParallel
  static: no effect: a program's gradients are known when it is built
without_graph_optimization = true  Bypass Paddle's graph executor, and rewrite the program for
    communication.
  never false: {no_gradients}
  dygraph: no effect: dygraph has no graph to optimize
  any: no difference: on, the same as if not set
heter_ccl_mode = false  Communicate between clusters with different devices.
  dygraph 3.3.1: refused: fleet stops with an AttributeError
  any: no effect: {makes_nothing}
gradient_merge = false  Accumulate the gradients of several steps for one update.
  dygraph: effective: fleetrun merges; allreduces are sent at the update only
  static: effective: Paddle merges, and fleetrun fuses the allreduces
gradient_merge_configs:  How gradients are merged.
  .k_steps = 1 steps  The number of steps per update.
  .avg = true  Divide the sum by k_steps.
gradient_scale_configs:  How the gradient of the loss is scaled.
  .scale_strategy = avg | sum | customized  How the gradients of the ranks are combined.
  .scale_gradient = false  Scale gradients instead of the loss.
  dygraph: no effect: {sharded}
  static: no effect: {sharded}
amp = false  Compute in 16 bits where that is safe.
  dygraph cpu: no effect: Paddle's auto_cast does nothing on the CPU (unseen: {cast})
  dygraph: no effect: {cast}
  static cpu: no effect: the loss is scaled, but everything is computed in 32 bits
  static 2.6.2: effective: {passes}
  static: untested: {only_a_gpu}which operators run in 16 bits
amp_configs:  How 16-bit numbers are used.
  .init_loss_scaling = 32768.0  The initial loss scaling factor.
  .incr_every_n_steps = 1000 steps  Finite steps before the factor grows.
  .decr_every_n_nan_or_inf = 2 steps  Steps with NaN or Inf before the factor shrinks.
  .incr_ratio = 2.0  The factor by which it grows.
  .decr_ratio = 0.8  The factor by which it shrinks.
  .use_dynamic_loss_scaling = true  Adapt the factor.
  .custom_white_list = [texts]  Operators that always use 16 bits.
  .custom_black_list = [texts]  Operators that never use 16 bits.
  .custom_black_varnames = [texts]  Variables that never use 16 bits.
  .use_pure_fp16 = false  Use 16-bit floats everywhere (O2).
  .use_fp16_guard = true  Use them only where the program requests it (O2).
  .use_optimizer_fp16 = false  Use them in the optimizer, too.
  .use_pure_bf16 = false  Use bfloat16 everywhere (O2).
recompute = false  Discard activations and recompute them in the backward pass.
  dygraph: no effect: in dygraph the script must call paddle.distributed.fleet.recompute
  static: effective: from the checkpoints listed
recompute_configs:  Which activations are kept.
  .checkpoints = [texts]  The names of the activations to keep.
  .enable_offload = false  Keep them in host memory.
  .checkpoint_shape = [ints]  Their shape (for offloading).
  .enable_tuning = false  Let Paddle choose.
lars = false  Scale each layer's learning rate (LARS), for Momentum and large batches.
  dygraph: no effect: {static_only}
  static: effective: replaces Momentum
lars_configs:  How LARS scales.
  .lars_coeff = 0.001  The trust coefficient.
  .lars_weight_decay = 0.0005  Weight decay.
  .epsilon = 0.0  Added to the divisor to avoid division by 0.
  .exclude_from_weight_decay = [texts]  Parameters whose names contain one of these are exempt.
lamb = false  Scale each layer's learning rate (LAMB), for Adam and large batches.
  dygraph: no effect: in dygraph the script must create a paddle.optimizer.Lamb
  static: effective: replaces Adam
lamb_configs:  How LAMB scales.
  .lamb_weight_decay = 0.01  Weight decay.
  .exclude_from_weight_decay = [texts]  Parameters whose names contain one of these are exempt.
localsgd = false  Let ranks train independently for some steps, then average their parameters.
  dygraph: no effect: {static_only}
  static: no effect: Paddle still sums the gradients at each step
localsgd_configs:  When parameters are averaged.
  .k_steps = 1 steps  The number of steps between two averages.
  .begin_step = 1 steps  The first step without averaging.
adaptive_localsgd = false  The same, with an adaptive number of steps.
  dygraph: no effect: {static_only}
  static: effective: for Momentum and SGD; {passes}
adaptive_localsgd_configs:  How often parameters are averaged at first.
  .init_k_steps = 1 steps  The initial number of steps between two averages.
  .begin_step = 1 steps  The first step without averaging.
dgc = false  Send only the largest gradients (DGC), for Momentum on GPUs.
  dygraph: no effect: {static_only}
  static cpu: refused: Paddle supports it on GPUs only
  static 2.6.2: effective: {passes}
  static 3.3.1: untested: {only_a_gpu}CPUs refuse it
dgc_configs:  How many gradients are sent.
  .rampup_begin_step = 0 steps, 0..  The first step that sends fewer gradients.
  .rampup_step = 1 steps  The number of steps until the last value of `sparsity`.
  .sparsity = [floats]  The shares of gradients that are not sent, in turn.
sync_batch_norm = false  Normalize over the batches of all ranks.
  dygraph: no effect: in dygraph the script must call SyncBatchNorm.convert_sync_batchnorm
  static: no effect: the field never reaches Paddle's pass
cudnn_exhaustive_search = false  Try all cuDNN convolution algorithms and keep the fastest.
  dygraph: no effect: {static_only}; set it as FLAGS_* in the section flags
  static cpu: no effect: CPU builds have no cuDNN
  static 2.6.2: effective: sets Paddle's flag
  static 3.3.1: untested: {only_a_gpu}its flags are for GPUs
conv_workspace_size_limit = 512 MB, 0..  The workspace memory of one convolution.
  also: cudnn_conv_workspace_size_limit
  as: cudnn_exhaustive_search
cudnn_batchnorm_spatial_persistent = false  Use cuDNN's faster batch normalization.
  as: cudnn_exhaustive_search
sharding = false  Distribute optimizer states, gradients or parameters over the ranks.
  dygraph: no effect: in dygraph Paddle shards by hybrid_configs or group_sharded_parallel
  static 2.6.2 cpu: refused: Paddle 2.6.2 shards static programs on GPUs only
  static: effective: {passes}; on CPUs with all ranks in one group
sharding_configs:  How they are distributed.
  .sharding_segment_strategy = segment_broadcast_MB | segment_anchors  How the program is split into
      segments.
  .segment_broadcast_MB = 32.0  The size of a segment's parameters in MB.
  .segment_anchors = [texts]  Variables at which segments end.
  .sharding_degree = 8 ranks  The number of ranks that share one copy.
  .mp_degree = 1 ranks  Model-parallel degree.
  .dp_degree = 1 ranks  Data-parallel degree.
  .pp_degree = 1 ranks  Pipeline-parallel degree.
  .hybrid_dp = false  Use data parallelism between sharding groups.
  .gradient_merge_acc_step = 1 steps  The number of steps per update.
  .optimize_offload = false  Keep optimizer states in host memory.
  .optimize_cast = false  Cast in the optimizer.
  .pp_allreduce_in_optimize = false  Send the gradients of a pipeline in the optimizer.
  ._dp_as_optimizer_sharding = false  Distribute optimizer states over data-parallel ranks.
  .stage = 1  1: optimizer states, 2: and gradients, 3: and parameters.
  .enable_tuning = false  Let Paddle choose.
  .use_calc_stream = false  Communicate in the computation stream.
pipeline = false  Split the model into stages on several devices.
  dygraph: no effect: in dygraph Paddle reads hybrid_configs
  static: refused: Paddle stops unless the program names the device of each operator
pipeline_configs:  How batches pass through the stages.
  .micro_batch_size = 1 samples  The number of samples per micro-batch.
  .accumulate_steps = 1  The number of micro-batches per step.
  .schedule_mode = 1F1B | F-then-B  The order of forward and backward passes.
  .p2p_cache_shape = true  Send shapes only once.
  .enable_partial_send_recv = true  Send activations in parts.
  static: no effect: {makes_nothing} on its own
tensor_parallel = false  Split layers across several devices.
  dygraph: no effect: in dygraph Paddle reads hybrid_configs
  static cpu: refused: over gloo, all ranks of static programs are in one group
  static: untested: {only_a_gpu}groups of ranks need NCCL communicators
tensor_parallel_configs:  How layers are split.
  .tensor_parallel_degree = 1 ranks  The number of ranks per layer.
  .tensor_init_seed = -1, -1..  The seed of the parameters; -1: any.
  static: no effect: {makes_nothing} on its own
hybrid_configs:  The degree of each kind of parallelism.
  .dp_degree = -1, -1..  Data parallelism; -1: all remaining ranks.
  .mp_degree = 1 ranks  Model parallelism.
  .pp_degree = 1 ranks  Pipeline parallelism.
  .sharding_degree = 1 ranks  Sharding.
  .sep_degree = 1 ranks  Sequence parallelism.
  .split_norm_comm = false  Sum the norm of gradients group by group (Paddle 3).
  .mp_configs.mp_async_allreduce = false  Model parallelism: send the gradient of a layer's input
      while that of its weight is computed; the input must need one.
  .mp_configs.mp_skip_c_identity = false  With mp_async_allreduce: leave out an operator that only
      copies.
  .mp_configs.mp_fused_linear_param_grad_add = false  With mp_async_allreduce: add to the gradient
      in the kernel that computes it; needs CUDA or XPU.
  .mp_configs.need_broadcast_data = true  Send the batch of the first rank to the others.
  .mp_configs.sync_param = true  After each step, send the embeddings, norms and biases that all
      ranks have from the first rank to the others.
  .mp_configs.sync_grad = false  Before each step, do the same for their gradients.
  .mp_configs.sync_moment = false  After each step, do the same for their moments.
  .mp_configs.recompute_allgather = false  Sequence-parallel layers: gather the input again instead
      of keeping it; needs sp_async_reduce_scatter (Paddle 3).
  .mp_configs.sp_async_reduce_scatter = false  Sequence-parallel layers: send the gradient of the
      input while that of the weight is computed (Paddle 3).
  .pp_configs.overlap_p2p_comm = false  Pipelines with virtual stages: send activations during the
      computation (Paddle 3).
  .pp_configs.use_batch_p2p_comm = true  Pipelines: send and receive in one group (Paddle 3).
  .pp_configs.dp_comm_overlap = false  Pipelines: send dp's gradients during the backward pass.
  .pp_configs.sharding_comm_overlap = false  Pipelines: send sharding's gradients during the
      backward pass.
  .sharding_configs.comm_overlap = false  Send gradients during the backward pass; needs
      accumulate_steps.
  .sharding_configs.accumulate_steps = 1  The number of backward passes before an update.
  .sharding_configs.comm_buffer_size_MB = 256 MB  The size of a buffer (Paddle 3).
  .sharding_configs.split_param = false  Split each parameter among the ranks.
  .sharding_configs.tensor_fusion = false  Send gradients in buffers instead of one by one.
  .sharding_configs.use_reduce_avg = true  Let the collective average instead of dividing first;
      needs NCCL (Paddle 3).
  dygraph: effective: fleet.init creates groups of ranks by it (unseen: the script has not
      created these groups with fleet.init)
  static: no effect: Paddle reads it in dygraph only
a_sync = true  Let trainers continue without waiting for the parameter servers.
  any: no effect: only training with parameter servers reads it
a_sync_configs:  How trainers and servers communicate.
  .k_steps = -1, -1..  The number of steps between two exchanges; -1: as a_sync.
  .max_merge_var_num = 1  The number of gradients merged before they are sent.
  .send_queue_size = 16  The length of the send queue.
  .independent_recv_thread = false  Receive in a separate thread.
  .min_send_grad_num_before_recv = 1  The number of gradients sent before anything is received.
  .thread_pool_size = 1 threads  The number of threads that send and receive.
  .send_wait_times = 1  How often to wait for more to send.
  .runtime_split_send_recv = false  Split sending at run time.
  .launch_barrier = true  Wait for all trainers before the first step.
  .heter_worker_device_guard = cpu | gpu | xpu  The device of heterogeneous trainers.
  .lr_decay_steps = 10 steps  The number of steps between two changes of the learning rate.
  .use_ps_gpu = 0, 0..  1: keep tables on GPUs.
auto = false  Let Paddle choose a strategy.
  dygraph: no effect: {static_only}
  static: refused: Paddle stops while it rewrites the program
semi_auto = false  Partition the model by its annotations.
  as: auto
auto_search = false  Search for a partition of the model.
  as: auto
asp = false  Train with half of the weights at 0 (2:4 sparsity).
  never true: {no_gradients}
qat = false  Quantization-aware training.
  never true: {no_gradients}
qat_configs:  How the model is quantized.
  .channel_wise_abs_max = true  Use one scale per channel.
  .weight_bits = 8 bits  The number of bits of a weight.
  .activation_bits = 8 bits  The number of bits of an activation.
  .not_quant_pattern = [texts]  Layers that are not quantized.
  .algo = ""  Paddle's name for the algorithm.
  any: no effect: qat is refused
nowhere: split_data = true; adam_d2sum = false; elastic = false; fuse_grad_merge = false;
    is_fl_ps_mode = false; with_coordinator|is_with_coordinator = false
[build_strategy]
fuse_elewise_add_act_ops = false  Fuse a sum and an activation into one operator.
  static: effective: where a sum is next to an activation; not with the bias of a convolution,
      which Paddle misreads
fuse_all_optimizer_ops = false  Update all parameters in one operator (Momentum, Adam).
  dygraph: effective: for Momentum and Adam; no other optimizer has a fused operator
  static: effective: {rewrites}, for Momentum and Adam
fuse_bn_act_ops = false  Fuse batch normalization and activation.
  static cpu: no effect: nothing changes with 32-bit numbers on CPUs
  static: untested: {only_a_gpu}nothing changes with 32-bit NCHW; half precision and NHWC need
      one
fuse_bn_add_act_ops = true  Fuse batch normalization, sum and activation.
  as: fuse_bn_act_ops
fuse_relu_depthwise_conv = false  Fuse ReLU and depthwise convolution.
  static cpu: no effect: Paddle supports it on GPUs only
  static: untested: {only_a_gpu}it is for kernels without cuDNN
fuse_gemm_epilogue = false  Fuse matrix product, bias and activation.
  static cpu: no effect: Paddle supports it on GPUs only
  static: no effect: it does not match the operators of this Paddle
fused_attention = false  Fuse attention.
  static cpu: no effect: nothing changes on CPUs
  static: untested: {only_a_gpu}its kernels are for GPUs
fused_feedforward = false  Fuse a feed-forward block.
  as: fused_attention
fuse_dot_product_attention = false  Fuse the dot products of attention.
  only: 3.3.1
  static cpu: refused: Paddle stops: its CPU builds lack the pass or the cuDNN frontend
  static: untested: {only_a_gpu}it needs the cuDNN frontend
fuse_resunit = false  Fuse a residual unit.
  only: 3.3.1
  as: fuse_dot_product_attention
enable_inplace = false  Let operators overwrite their inputs.
  static 2.6.2: effective: adds operators that share memory
  static 3.3.1: no effect: Paddle 3.3.1 no longer has this pass
enable_addto = false  Accumulate gradients in place.
  as: fused_attention
enable_auto_fusion = false  Generate fused operators.
  static cpu: no effect: Paddle supports it on GPUs only
  static: refused: Paddle stops: its pass lacks an attribute
allow_cuda_graph_capture = false  Allow CUDA graph capture.
  as: fused_attention
nowhere: fuse_broadcast_ops = false; enable_backward_optimizer_op_deps|bwd_opt_deps = true;
    cache_runtime_context = false; reduce_strategy = 0, 0..1; debug_graphviz_path = ""
nowhere: enable_sequential_execution = false; fix_op_run_order = false
  only: 2.6.2
[execution_strategy]
nowhere: num_threads|thread_num = 1 threads; num_iteration_per_drop_scope = 10 steps;
    num_iteration_per_run = 1 steps; use_thread_barrier = false
  only: 2.6.2
"""
