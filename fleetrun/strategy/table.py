"""The one table of strategies: every field, and what it comes to by graph, Paddle and device.

A field has a line: its name, its default (which tells its kind), unit and range, and what it does.
Below it stand, as far as there are any, the parts of a mapping (`.k_steps`), other spellings
(`also`), what the words `auto` and `plan` stand for, the `only` Paddle that has it, whether no
Paddle does as it is fleetrun's `own`, and the value that is `never` passed on. All other lines are
outcomes: `static 2.6.2 gpu: effective: WHY`, of which the first that fits a place counts, and
those that begin with `false` where the field is switched off. `as` takes those of another field;
a field `x_configs` has, after its own, those of `x`. Where a run does not show it, a reason may say
so (`unseen`). Whole numbers are 1 or more, others 0 or more, unless a range says otherwise.

Names and defaults were read from `fleet.DistributedStrategy` of Paddle 2.6.2 and 3.3.1.
`tests/train/test_verdicts.py` measures what is said of CPUs again; what is said of GPUs was read in
the programs of a GPU build, or holds wherever it holds on CPUs. `fields.py` reads the table.
"""

# What several lines say.
WORDS = {
    "ours": "fleetrun sends the gradients itself",
    "rewrites": "fleetrun rewrites the program itself",
    "passes": "Paddle rewrites the program",
    "static_only": "Paddle reads it for static programs only",
    "sharded": "Paddle reads it for sharded static programs only",
    "makes_nothing": "data parallel makes nothing of it",
    "cast": "in dygraph fleet makes a GradScaler at most; the script must call auto_cast",
    # Only a GPU can tell, and none has been asked yet: the reasons of all that is untested.
    "only_a_gpu": "only a GPU can tell: ",
    "one_communicator": "Paddle 3 runs all rings of an older static program over the first "
    "communicator",
    # Seen in static graphs of both Paddles.
    "no_gradients": "with it Paddle sends no gradients at all, and ranks diverge without an error",
}

TEXT = """
[strategy]
fuse_all_reduce_ops = true  Send many gradients in one allreduce instead of one each.
  dygraph: effective: {ours}, in buckets of this size
  static: effective: {rewrites}, in buckets by bytes and by count
  false dygraph: effective: {ours}, one by one
  false static: effective: {rewrites}, with one allreduce for each
fuse_grad_size_in_MB = 32 MB, 1..65536  Most bytes of gradients in one allreduce.
  auto: a tenth of the bytes of all gradients, at least 1 MB
  plan: what ends the step soonest, from times that the first steps measure; else as auto
  dygraph: effective: {ours}, in buckets of this size
  static: effective: {rewrites}, in buckets by bytes and by count
fuse_grad_size_in_num = 8 gradients  Most gradients in one allreduce.
  as: fuse_grad_size_in_MB
fuse_grad_size_in_TFLOPS = 50.0 gradients, 1..  Most layers (gradients) in one allreduce, whatever
    its name says.
  also: _fuse_grad_size_in_TFLOPS
  as: fuse_grad_size_in_MB
last_comm_group_size_MB = 1.0 MB  Most bytes in the allreduce that goes out last, for which
    backward must wait.
  dygraph: effective: {ours}, in buckets of this size
  static: no effect: Paddle reads it in dygraph only
nccl_comm_num = 1 communicators, 1..16  Communicators that allreduces take in turn, so that
    several run at once.
  auto: 1 on one host, 2 on several
  dygraph: effective: {ours}, over communicators in turn
  static 3.3.1 gpu: no effect: {one_communicator}
  static: effective: {rewrites}, with one communicator each
sync_nccl_allreduce = true  Wait for each allreduce before the next one is sent.
  dygraph: effective: {ours}, and waits or does not
  static cpu: effective: gloo is waited for, over several communicators by fleetrun
  static 2.6.2 gpu: effective: sets Paddle's flag
  static 3.3.1 gpu: untested: {only_a_gpu}its flag is a GPU's
  false dygraph: effective: {ours}, and goes on meanwhile
  false static cpu: no effect: Paddle's operators wait for gloo, unless nccl_comm_num is above 1
  false static 2.6.2 gpu: effective: sets Paddle's flag
  false static 3.3.1 gpu: untested: {only_a_gpu}its flag is a GPU's
use_hierarchical_allreduce = false  Reduce within each group, allreduce among the groups' leaders,
    and broadcast.
  auto: on where that is measured to be faster, with several hosts of several ranks
  dygraph: effective: {ours}, in two levels
  static 3.3.1 gpu: refused: {one_communicator}: groups would wait for each other for ever
  static 2.6.2 gpu: untested: {only_a_gpu}{rewrites}, in two levels on the computation's stream
  static: effective: {rewrites}, in two levels
hierarchical_allreduce_inter_nranks = 1 ranks  Ranks of one group of the hierarchical allreduce,
    usually the devices of a host.
  auto: the ranks of each host
  as: use_hierarchical_allreduce
calc_comm_same_stream = false  Compute and communicate in one stream.
  also: _calc_comm_same_stream
  dygraph: no effect: data parallel does not read it
  static cpu: no effect: gloo on CPUs has no streams
  static: effective: {rewrites}, for the one stream
fp16_allreduce = false  Send gradients as float16, in dygraph; Paddle's own sends nothing.
  dygraph 3.3.1 cpu: refused: its gloo sums float16 to infinity: see bf16_allreduce
  dygraph gpu: untested: {only_a_gpu}NCCL is self-tested at the start
  dygraph: effective: {ours}, in 16 bits
  static: refused: in static graphs Paddle's own sends no gradients at all, and ranks diverge
bf16_allreduce = false  Send gradients as bfloat16, in dygraph: the range of float32 with fewer
    digits.
  own: fleetrun
  dygraph gpu: untested: {only_a_gpu}NCCL is self-tested at the start
  dygraph: effective: {ours}, in 16 bits
  static: refused: in static graphs Paddle's own sends no gradients at all, and ranks diverge
find_unused_parameters = false  Look for parameters that a step does not use.
  dygraph: effective: handed to DataParallel
  static: no effect: a program has the gradients that it has
without_graph_optimization = true  Leave Paddle's graph executor out, and rewrite the program for
    communication.
  never false: {no_gradients}
  dygraph: no effect: dygraph has no graph to optimize
  any: no difference: on, as without it
heter_ccl_mode = false  Communicate between clusters of different devices.
  dygraph 3.3.1: refused: true makes fleet stop with an AttributeError
  any: no effect: {makes_nothing}
split_data = true  Give each rank its part of the data.
  any: no effect: {makes_nothing}
gradient_merge = false  Add gradients up over several steps before one update.
  dygraph: effective: fleetrun merges; allreduces are sent at the update only
  static: effective: Paddle merges, and fleetrun fuses the allreduces
gradient_merge_configs:  How gradients are merged.
  .k_steps = 1 steps  Steps whose gradients make one update.
  .avg = true  Divide the sum by k_steps.
fuse_grad_merge = false  Merge gradients in fused memory.
  dygraph: no effect: {static_only}
  static: no effect: no part of the program follows it
gradient_scale_configs:  How the loss's gradient is scaled.
  .scale_strategy = avg | sum | customized  What gradients of the ranks become.
  .scale_gradient = false  Scale gradients instead of the loss.
  dygraph: no effect: {sharded}
  static: no effect: {sharded}
amp = false  Compute with 16-bit numbers where it is safe.
  dygraph cpu: no effect: Paddle's auto_cast does nothing on the CPU (unseen: {cast})
  dygraph: untested: {only_a_gpu}the script must call auto_cast, and operators in 16 bits are
      counted (unseen: {cast})
  static cpu: no effect: the loss is scaled, and all is computed in 32 bits
  static 2.6.2: effective: {passes}
  static: untested: {only_a_gpu}what is computed in 16 bits
amp_configs:  How 16-bit numbers are used.
  .init_loss_scaling = 32768.0  First factor of the loss.
  .incr_every_n_steps = 1000 steps  Good steps before the factor grows.
  .decr_every_n_nan_or_inf = 2 steps  Bad steps before the factor shrinks.
  .incr_ratio = 2.0  What the factor grows by.
  .decr_ratio = 0.8  What the factor shrinks by.
  .use_dynamic_loss_scaling = true  Let the factor change.
  .custom_white_list = [texts]  Operators that always use 16 bits.
  .custom_black_list = [texts]  Operators that never do.
  .custom_black_varnames = [texts]  Variables that never do.
  .use_pure_fp16 = false  Use 16-bit floats everywhere (O2).
  .use_fp16_guard = true  Only where the program asks for it (O2).
  .use_optimizer_fp16 = false  In the optimizer, too.
  .use_pure_bf16 = false  Use bfloat16 everywhere (O2).
recompute = false  Forget activations and compute them again in backward.
  dygraph: no effect: in dygraph the script must call paddle.distributed.fleet.recompute
  static: effective: from the checkpoints that it names
recompute_configs:  What is kept.
  .checkpoints = [texts]  Names of the activations that are kept.
  .enable_offload = false  Keep them in the host's memory.
  .checkpoint_shape = [ints]  Their shape, which offloading needs.
  .enable_tuning = false  Let Paddle choose.
lars = false  Scale each layer's learning rate (LARS), for Momentum and large batches.
  dygraph: no effect: {static_only}
  static: effective: in the place of Momentum
lars_configs:  How LARS scales.
  .lars_coeff = 0.001  Trust in each layer's own rate.
  .lars_weight_decay = 0.0005  Weight decay.
  .epsilon = 0.0  Added to a divisor that may be 0.
  .exclude_from_weight_decay = [texts]  Parameters whose names hold one of these are left alone.
lamb = false  Scale each layer's learning rate (LAMB), for Adam and large batches.
  dygraph: no effect: in dygraph the script must make a paddle.optimizer.Lamb
  static: effective: in the place of Adam
lamb_configs:  How LAMB scales.
  .lamb_weight_decay = 0.01  Weight decay.
  .exclude_from_weight_decay = [texts]  Parameters whose names hold one of these are left alone.
localsgd = false  Let ranks train alone for some steps, then average their parameters.
  dygraph: no effect: {static_only}
  static: effective: for Momentum and SGD; fleetrun leaves out the sums of gradients that Paddle
      keeps
localsgd_configs:  When parameters are averaged.
  .k_steps = 1 steps  Steps between two averages.
  .begin_step = 1 steps  The first step that is not averaged.
adaptive_localsgd = false  The same, with a number of steps that adapts itself.
  dygraph: no effect: {static_only}
  static: effective: for Momentum and SGD; {passes}
adaptive_localsgd_configs:  When parameters are averaged at first.
  .init_k_steps = 1 steps  Steps between the first two averages.
  .begin_step = 1 steps  The first step that is not averaged.
dgc = false  Send only the largest gradients (DGC), for Momentum on GPUs.
  dygraph: no effect: {static_only}
  static cpu: refused: Paddle has it for GPUs only
  static 2.6.2: effective: {passes}
  static 3.3.1: untested: {only_a_gpu}CPUs refuse it
dgc_configs:  How many gradients are sent.
  .rampup_begin_step = 0 steps, 0..  The first step that sends less.
  .rampup_step = 1 steps  Steps until the last of `sparsity`.
  .sparsity = [floats]  Shares of the gradients that are not sent, one after another.
adam_d2sum = false  Adam with the sum of squares of all ranks.
  as: split_data
sync_batch_norm = false  Normalise over the batches of all ranks.
  dygraph: no effect: in dygraph the script must call SyncBatchNorm.convert_sync_batchnorm
  static: no effect: the field never reaches Paddle's pass
cudnn_exhaustive_search = false  Try all of cuDNN's convolutions and keep the fastest.
  dygraph: no effect: {static_only}; the section flags has the same as FLAGS_*
  static cpu: no effect: a build for CPUs has no cuDNN
  static 2.6.2: effective: sets Paddle's flag
  static 3.3.1: untested: {only_a_gpu}its flags are a GPU's
conv_workspace_size_limit = 512 MB, 0..  Memory that one convolution may use to be faster.
  also: cudnn_conv_workspace_size_limit
  as: cudnn_exhaustive_search
cudnn_batchnorm_spatial_persistent = false  cuDNN's faster batch normalisation.
  as: cudnn_exhaustive_search
sharding = false  Share optimizer states, gradients or parameters out over the ranks.
  dygraph: no effect: in dygraph Paddle shards by hybrid_configs or group_sharded_parallel
  static 2.6.2 cpu: refused: Paddle 2.6.2 shards static programs on GPUs only
  static: effective: {passes}; on CPUs with all ranks in one group
sharding_configs:  How they are shared out.
  .sharding_segment_strategy = segment_broadcast_MB | segment_anchors  What cuts the program into
      segments.
  .segment_broadcast_MB = 32.0  Size of a segment's parameters in MB.
  .segment_anchors = [texts]  Variables at which segments end.
  .sharding_degree = 8 ranks  Ranks that share one copy.
  .mp_degree = 1 ranks  Ranks of model parallelism.
  .dp_degree = 1 ranks  Ranks of data parallelism.
  .pp_degree = 1 ranks  Ranks of pipeline parallelism.
  .hybrid_dp = false  Data parallelism between the groups that share.
  .gradient_merge_acc_step = 1 steps  Steps whose gradients are merged.
  .optimize_offload = false  Keep optimizer states in the host's memory.
  .optimize_cast = false  Cast in the optimizer.
  .pp_allreduce_in_optimize = false  Send a pipeline's gradients in the optimizer.
  ._dp_as_optimizer_sharding = false  Share optimizer states over data-parallel ranks.
  .stage = 1  1: optimizer states, 2: and gradients, 3: and parameters.
  .enable_tuning = false  Let Paddle choose.
  .use_calc_stream = false  Communicate in the stream that computes.
pipeline = false  Cut the model into stages on several devices.
  dygraph: no effect: in dygraph Paddle reads hybrid_configs
  static: refused: Paddle stops unless the program says the device of each operator
pipeline_configs:  How batches go through the stages.
  .micro_batch_size = 1 samples  Samples in one micro-batch.
  .accumulate_steps = 1  Micro-batches of one step.
  .schedule_mode = 1F1B | F-then-B  Order of forward and backward.
  .p2p_cache_shape = true  Send shapes only once.
  .enable_partial_send_recv = true  Send parts of activations.
  static: no effect: {makes_nothing} by itself
tensor_parallel = false  Cut layers over several devices.
  dygraph: no effect: in dygraph Paddle reads hybrid_configs
  static cpu: refused: over gloo, all ranks of static programs are in one group
  static: untested: {only_a_gpu}groups of ranks need its communicators
tensor_parallel_configs:  How layers are cut.
  .tensor_parallel_degree = 1 ranks  Ranks of one layer.
  .tensor_init_seed = -1, -1..  Seed of the parameters; -1: any.
  static: no effect: {makes_nothing} by itself
hybrid_configs:  Ranks of each kind of parallelism.
  .dp_degree = -1, -1..  Data parallelism; -1: what the others leave.
  .mp_degree = 1 ranks  Model parallelism.
  .pp_degree = 1 ranks  Pipeline parallelism.
  .sharding_degree = 1 ranks  Sharding.
  .sep_degree = 1 ranks  Sequences.
  dygraph: effective: fleet.init makes groups of ranks by it (unseen: the script has not made
      these groups by fleet.init)
  static: no effect: Paddle reads it in dygraph only
a_sync = true  Let trainers go on without waiting for the parameter servers.
  any: no effect: only training with parameter servers reads it
a_sync_configs:  How trainers and servers keep in touch.
  .k_steps = -1, -1..  Steps between two exchanges; -1: as a_sync has it.
  .max_merge_var_num = 1  Gradients that are merged before they are sent.
  .send_queue_size = 16  Gradients that wait to be sent.
  .independent_recv_thread = false  Receive in a thread of its own.
  .min_send_grad_num_before_recv = 1  Gradients sent before anything is received.
  .thread_pool_size = 1 threads  Threads that send and receive.
  .send_wait_times = 1  Turns to wait for more to send.
  .runtime_split_send_recv = false  Cut sending up while running.
  .launch_barrier = true  Wait for everybody before the first step.
  .heter_worker_device_guard = cpu | gpu | xpu  Where heterogeneous trainers compute.
  .lr_decay_steps = 10 steps  Steps between two changes of the learning rate.
  .use_ps_gpu = 0, 0..  1: keep tables on GPUs.
is_fl_ps_mode = false  Federated training.
  as: a_sync
with_coordinator = false  A coordinator of federated training.
  also: is_with_coordinator
  as: a_sync
elastic = false  Go on when hosts come and go; fleetrun has its own.
  as: split_data
auto = false  Let Paddle choose a strategy.
  dygraph: no effect: {static_only}
  static: refused: true makes Paddle stop while it rewrites the program
semi_auto = false  Cut the model up as its annotations say.
  as: auto
auto_search = false  Look for a way to cut the model up.
  as: auto
asp = false  Train with half of the weights at 0 (2:4 sparsity).
  never true: {no_gradients}
qat = false  Train for a quantized model.
  never true: {no_gradients}
qat_configs:  How it is quantized.
  .channel_wise_abs_max = true  One scale for each channel.
  .weight_bits = 8 bits  Bits of a weight.
  .activation_bits = 8 bits  Bits of an activation.
  .not_quant_pattern = [texts]  Layers that are left alone.
  .algo = ""  Paddle's name of the algorithm.
  any: no effect: qat is refused
[build_strategy]
fuse_elewise_add_act_ops = false  Add and activate in one operator.
  static: effective: where a sum is next to an activation; not with a bias of convolutions, read
      wrongly
fuse_all_optimizer_ops = false  Update all parameters in one operator (Momentum, Adam).
  dygraph: effective: for Momentum and Adam, whose fused operators are used; no other optimizer
      has one
  static: effective: {rewrites}, for Momentum and Adam
fuse_bn_act_ops = false  Batch normalisation and activation in one operator.
  static cpu: no effect: nothing changes with 32-bit numbers on CPUs
  static: untested: {only_a_gpu}nothing changes with 32-bit NCHW, half precision and NHWC run
      there
fuse_bn_add_act_ops = true  Batch normalisation, sum and activation in one operator.
  as: fuse_bn_act_ops
fuse_relu_depthwise_conv = false  ReLU and depthwise convolution in one operator.
  static cpu: no effect: nothing changes on CPUs, with depthwise convolutions either
  static: untested: {only_a_gpu}it is for kernels without cuDNN
fuse_broadcast_ops = false  Broadcast many parameters at once.
  static: no effect: the program stays as it is
fuse_gemm_epilogue = false  Matrix product, bias and activation in one operator.
  static cpu: no effect: Paddle has it for GPUs only
  static: no effect: it does not match this Paddle's operators
fused_attention = false  Attention in one operator.
  static cpu: no effect: nothing changes on CPUs
  static: untested: {only_a_gpu}it is for kernels of a GPU
fused_feedforward = false  A feed-forward block in one operator.
  as: fused_attention
fuse_dot_product_attention = false  Dot products of attention in one operator.
  only: 3.3.1
  static cpu: refused: Paddle stops: its builds for CPUs lack the pass, or cuDNN's frontend
  static: untested: {only_a_gpu}it needs cuDNN's frontend
fuse_resunit = false  A residual unit in one operator.
  only: 3.3.1
  as: fuse_dot_product_attention
enable_inplace = false  Let operators write over what they read.
  static 2.6.2: effective: adds operators that share memory
  static 3.3.1: no effect: 3.3.1 has no such pass any more
enable_addto = false  Add gradients up in place.
  as: fused_attention
enable_backward_optimizer_op_deps = true  Update when all of backward is done.
  also: bwd_opt_deps
  as: fuse_broadcast_ops
enable_auto_fusion = false  Generate fused operators.
  static cpu: no effect: Paddle has it for GPUs only
  static: refused: Paddle stops: its pass lacks an attribute
enable_sequential_execution = false  Run operators in the program's order.
  only: 2.6.2
  static 2.6.2: no effect: accepted, and nothing changes
fix_op_run_order = false  Run operators in the same order each step.
  only: 2.6.2
  as: enable_sequential_execution
cache_runtime_context = false  Keep each operator's context.
  as: fuse_broadcast_ops
allow_cuda_graph_capture = false  Let the graph be captured.
  as: fused_attention
reduce_strategy = 0, 0..1  0: allreduce gradients, 1: reduce each on one rank.
  as: fuse_broadcast_ops
debug_graphviz_path = ""  File that the graph is drawn into.
  as: fuse_broadcast_ops
[execution_strategy]
num_threads = 1 threads  Threads that run operators.
  also: thread_num
  auto: 1 on one host, nccl_comm_num + 1 on several
  only: 2.6.2
  static 2.6.2: no effect: accepted, and the program stays as it is
num_iteration_per_drop_scope = 10 steps  Steps between two clean-ups of temporary variables.
  only: 2.6.2
  as: num_threads
num_iteration_per_run = 1 steps  Steps of one call of the executor.
  only: 2.6.2
  as: num_threads
use_thread_barrier = false  Let the threads of parameter servers wait for each other.
  only: 2.6.2
  as: num_threads
"""
