"""Settings shared by all apps: mesh, step, training, checkpoints, reports. Imports no torch."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import PositiveFloat, PositiveInt, Rate, Settings
from hpcai.errors import MeshError

AXES = ("replicate", "pipeline", "context", "axial", "depth", "height", "tensor", "evaluate")
"""The axes of every mesh, outermost first; inner ones communicate more. `evaluate` is separate from the others, and `expert` is a
part of `replicate`."""


def mesh_shape(sizes: Mapping[str, int], world: int) -> tuple[dict[str, int], int]:
    """Return the size of each axis, with -1 resolved, and the number of training processes of ``world``.

    Raises MeshError if the product of the sizes is not the number of processes.
    """
    evaluate = sizes.get("evaluate", 0)
    if evaluate >= world and evaluate:
        raise MeshError(f"mesh.evaluate is {evaluate}, which leaves no process to train; {world} were started")
    train = world - evaluate
    shape = _fill_free_axis({name: sizes.get(name, 1) for name in AXES[:-1]}, train)
    model_size = math.prod(size for name, size in shape.items() if name != "replicate")
    if evaluate % model_size:
        raise MeshError(f"mesh.evaluate is {evaluate}, but a replica has {model_size} ranks; give a multiple of {model_size}")
    if shape["replicate"] % (expert := sizes.get("expert", 1)):
        replicas = shape["replicate"]
        raise MeshError(f"mesh.expert is {expert}, which does not divide {replicas} replicas; take a divisor of {replicas}")
    return shape, train


def _fill_free_axis(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    fixed = math.prod(size for size in sizes.values() if size > 0)
    free = [name for name, size in sizes.items() if size < 0]
    if len(free) > 1:
        raise MeshError(f"mesh: {' and '.join(free)} are both -1; only one axis can be -1")
    if world % fixed or (not free and world != fixed):
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "of size 1"
        need = f"a multiple of {fixed} processes" if free else f"{fixed} process{'es' if fixed > 1 else ''}"
        verb = "was" if world == 1 else "were"
        raise MeshError(f"mesh {shape} needs {need}, but {world} {verb} started")
    return {name: (world // fixed if size < 0 else size) for name, size in sizes.items()}


class MeshConfig(Settings):
    """Sizes of the axes of the mesh. Their product is the number of processes. An app adds the axes that its model supports."""

    replicate: Annotated[int, Field(ge=-1)] = -1
    """data parallelism: replicas of the model, each with its own samples; -1: all processes that the other axes leave"""
    evaluate: Annotated[int, Field(ge=0)] = 0
    """number of processes, the last ones of the job, that only evaluate while the others train"""

    @model_validator(mode="after")
    def _replicate_is_a_size(self) -> Self:
        if self.replicate == 0:
            raise ValueError("replicate is 0; expected a number of replicas, or -1 for all processes that the other axes leave")
        return self


class Depth(Settings):
    """The axis `depth` of a mesh."""

    depth: PositiveInt = 1
    """spatial parallelism: a volume is sharded along its depth"""


class Height(Settings):
    """The axis `height` of a mesh."""

    height: PositiveInt = 1
    """spatial parallelism: a volume or a map is sharded along its height"""


class Tensor(Settings):
    """The axis `tensor` of a mesh."""

    tensor: PositiveInt = 1
    """tensor parallelism: weights are sharded along rows or columns"""


class LoaderConfig(Settings):
    """Loading of samples, the base of the `data` settings of every app."""

    renamed = {"once": "scatter", "threads": "workers"}

    reader: Literal["auto", "direct", "buffered", "memory", "hdf5", "dali", "gds"] = "auto"
    """auto: buffered if all samples fit into the page cache, otherwise direct; direct: without the page cache (O_DIRECT);
    memory: cached in memory after the first read; hdf5: the HDF5 library (also compressed files); dali: batches of NVIDIA DALI;
    gds: directly to the GPU (GPUDirect Storage)"""
    workers: PositiveInt = 2
    """threads per process that prepare samples"""
    processes: bool = False
    """worker processes instead of threads, for samples prepared in pure Python"""
    prefetch: Annotated[float, Field(gt=0)] = 1.0
    """GB of prefetched samples per process"""
    order: Literal["strict", "ready"] = "strict"
    """strict: the same batches in every run; ready: a slow sample moves to a later batch of its epoch"""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """skip: an unreadable or non-finite sample is replaced by another one, logged and counted"""
    scatter: bool | Literal["auto"] = "auto"
    """each sample of a model-parallel replica is prepared by one rank and sent to the others; auto: if all ranks would prepare the
    same sample, not if each reads only its own shard (sharded volumes and maps)"""
    patience: Annotated[float, Field(gt=0)] = 600.0
    """timeout of a sample in seconds, after which the run stops and names the missing sample"""
    stage: str | None = None
    """directory on the local disk of each node, such as $TMPDIR/data, to which the data are copied first"""
    shards: PositiveInt = 1
    """1: every node has all training samples on its disk; more: each node has one shard, and trains on it"""

    def loader_kwargs(self) -> dict[str, Any]:
        """Return keyword arguments of `Loader`."""
        same = self.model_dump(include={"workers", "processes", "order", "on_bad_sample", "patience"})
        return same | {"prefetch": int(self.prefetch * 1e9), "scatter": False if self.reader == "gds" else self.scatter}

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.reader == "gds" and self.processes:
            raise ValueError("reader gds reads to the GPU of this process; set processes to false")
        if self.reader in ("gds", "dali") and self.scatter is True:
            raise ValueError(f"reader {self.reader} gives samples on the GPU of each process; set scatter to auto or false")
        if self.reader == "dali" and (self.order == "ready" or self.on_bad_sample == "skip"):
            raise ValueError("reader dali has a strict order and stops at a bad sample; set order strict and on_bad_sample stop")
        if self.shards > 1 and self.stage is None:
            raise ValueError(f"shards is {self.shards}, which needs stage: a folder on each node's own disk")
        return self


class ScheduleConfig(Settings):
    """Learning rate, a pure function of the global optimizer step. Lengths are in epochs, or in steps (`unit`)."""

    renamed = {"first": "first_step"}

    unit: Literal["epochs", "steps"] = "epochs"
    """unit of `warmup`, `decay_at` and `length`"""
    warmup: Annotated[float, Field(ge=0)] = 0.0
    """length of the linear warm-up from `start` to the learning rate"""
    start: Annotated[float, Field(ge=0)] = 0.0
    """learning rate at the first step of the warm-up"""
    decay: Literal["none", "steps", "linear", "polynomial", "cosine", "sqrt"] = "none"
    """after the warm-up: constant; factors `decay_to` from epochs `decay_at` on; linear, a `power` of it, cosine or 1 - sqrt to
    `floor` at the last step"""
    power: Annotated[float, Field(gt=0)] = 2.0
    """exponent of a polynomial decay"""
    length: Annotated[float, Field(gt=0)] | None = None
    """length of the decay; null: from the warm-up to the last step. A cosine rises again after it (torch)"""
    stable: bool = False
    """warm-up-stable-decay (WSD): the rate is constant after the warm-up, and the decay takes the last `length` of the run, which
    may be made longer until then; otherwise the decay follows the warm-up"""
    decay_at: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """epochs (or steps) at which the factors begin"""
    decay_to: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """factors of the learning rate, one per entry of `decay_at`"""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """last factor of a linear, polynomial, cosine or sqrt decay"""
    first_step: Literal[0, 1] = 0
    """number of the first step: 0, at `start`, or 1, one step up the warm-up"""
    held: bool = False
    """update the rate once per epoch; otherwise in every step, from the fraction of the epoch"""
    late: bool = False
    """a factor begins one epoch (or step) after the one that `decay_at` names"""
    after_warmup: bool = False
    """`decay_at` counts from the end of the warm-up, and the peak is the rate of its last step"""
    from_zero: bool = False
    """a linear, cosine or sqrt decay counts from the first step: the rate falls at the end of the warm-up (BERT of MLPerf)"""

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if len(self.decay_at) != len(self.decay_to):
            advice = "give one factor per epoch"
            raise ValueError(f"decay_at has {len(self.decay_at)} entries and decay_to {len(self.decay_to)}; {advice}")
        if list(self.decay_at) != sorted(self.decay_at):
            raise ValueError(f"decay_at {list(self.decay_at)} must rise")
        if (self.decay == "steps") != bool(self.decay_at):
            raise ValueError("decay: steps needs decay_at and decay_to, and they need decay: steps")
        if self.length is not None and self.decay in ("none", "steps"):
            raise ValueError(f"length is {self.length:g}, but decay is {self.decay}; the others have a length")
        if self.stable and self.length is None:
            raise ValueError("stable is true, but length is null; give the length of the decay, such as a tenth of the run")
        if self.unit == "steps" and self.held:
            raise ValueError("held is true, which keeps the rate for an epoch, but unit is steps; expected epochs, or held: false")
        return self


class StepConfig(Settings):
    """One optimizer step: precision, gradients, optimizer, learning rate."""

    renamed = {"products": "matmul", "average": "ema_decay"}

    precision: Literal["auto", "fp32", "bf16", "bf16-params", "fp64"] = "fp32"
    """bf16: autocast, with weights and optimizer in fp32; bf16-params: bfloat16 weights and gradients, with fp32 master weights in
    the optimizer; auto: bf16 if it is faster on the device, otherwise fp32"""
    matmul: Literal["precision", "fp8"] = "precision"
    """fp8: FP8 matrix products in the linear layers and experts that a model selects, with one scale per matrix; on GPUs from Ada
    and Hopper on twice as fast as bf16 in linear layers"""
    tf32: Literal["auto"] | bool = "auto"
    """TF32 on GPUs: float32 products and convolutions with a mantissa of 10 bits, several times as fast; auto: torch's default,
    TF32 in convolutions only"""
    cudnn_benchmark: bool = False
    """torch.backends.cudnn.benchmark: cuDNN picks the fastest algorithm for each shape"""
    accumulate: PositiveInt = 1
    """gradient accumulation: micro-batches per step and process"""
    clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = None
    """maximum L2 norm of the gradient"""
    clip_per: Literal["batch", "sample"] = "batch"
    """clip the gradient of the batch, or that of each sample before the average (AlphaFold 2), which needs micro-batches of one
    sample"""
    bucket_mb: Annotated[float, Field(gt=0)] = 25.0
    """size in MB of the gradient buckets, whose all-reduce overlaps with the backward pass"""
    optimizer: Literal["sgd", "adagrad", "adam", "adamw", "lamb", "lars", "muon"] = "adamw"
    """sgd: momentum; adam, adagrad: weight decay in the gradient; adamw: decoupled weight decay; lamb, lars: for large batches,
    with a trust ratio for each parameter in `decay_names`; muon: orthogonalized momentum for the matrices in `muon_names`, adamw
    for the rest"""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """peak learning rate"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """momentum of sgd and lars"""
    lr_in_momentum: bool = True
    """sgd: v = momentum*v + lr*g, p -= v (Keras and the MLPerf codes), not v = momentum*v + g, p -= lr*v (torch)"""
    nesterov: bool = False
    """sgd: Nesterov momentum"""
    muon_momentum: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Nesterov momentum of muon"""
    muon_names: tuple[str, ...] = ("*.[0-9]*.weight",)
    """matrices that muon updates, as shell patterns of their names; by default those of repeated layers, which have numbers"""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """decay rates of the two moments of adam, adamw (also of muon) and lamb"""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """adagrad, adam, adamw, lamb: added to the denominator"""
    trust: Annotated[float, Field(gt=0)] = 0.001
    """lars: trust coefficient, the factor of |w| / (|g| + weight_decay*|w|)"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """bf16: moments in half the memory, with stochastic rounding"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """sgd, adagrad, adam, lars: added to the gradient as weight_decay*w (Keras l2 = weight_decay/2); adamw, lamb, muon:
    decoupled"""
    decay_names: tuple[str, ...] = ("*.weight",)
    """parameters with weight decay, as shell patterns of their names"""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """decay of an exponential moving average of the weights, which is then evaluated and exported"""
    capture: Literal["none", "auto", "forward", "whole"] = "none"
    """CUDA graphs, captured once for each shape of the batch: forward and backward with gradient reductions, or the whole step with
    the optimizer; auto: whole if the GPU supports it, none if the step needs the host"""
    capture_shapes: PositiveInt = 4
    """maximum number of captured shapes of the batch; others are an error, or with auto run without a graph"""
    compile: Literal["none", "blocks", "whole"] = "none"
    """torch.compile of each repeated block, or of the whole model"""
    compile_cache: Path | None = None
    """directory of compiled code, for later jobs"""
    shard: Literal["none", "optimizer", "weights"] = "none"
    """sharding over the replicas: optimizer state and update, or also weights (FSDP, torch's fully_shard)"""
    shard_within: Annotated[int, Field(ge=2)] | None = None
    """hybrid sharding: over so many neighbouring replicas, such as those of a node; null: over all"""
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError(f"nesterov is for sgd with momentum; optimizer is {self.optimizer}, momentum {self.momentum:g}")
        if self.precision == "fp64" and self.moments == "bf16":
            raise ValueError("moments bf16 with precision fp64 loses the precision; set moments to fp32")
        if self.capture in ("forward", "whole") and self.shard == "weights":
            raise ValueError(f"capture {self.capture} with shard weights is not supported; set shard optimizer or capture none")
        if self.shard_within is not None and self.shard == "none":
            raise ValueError(f"shard_within is {self.shard_within}, but nothing is sharded; set shard to optimizer or weights")
        if self.clip_per == "sample" and (self.clip is None or self.shard == "weights"):
            reason = "clip is null; give it a norm" if self.clip is None else "shard is weights, and no rank has the full gradient"
            raise ValueError(f"clip_per is sample, but {reason}")
        if self.compile_cache is not None and self.compile == "none":
            raise ValueError("compile_cache is given, but nothing is compiled; set compile to blocks or whole")
        return self


class TrainConfig(Settings):
    """Length of the training, frequency of evaluations and reports, target."""

    renamed = {"agree_every": "replica_check_every"}

    steps: PositiveInt | None = None
    """total number of optimizer steps"""
    epochs: PositiveInt | None = None
    """total number of passes over the training samples"""
    evaluate_every: PositiveInt = 1
    """epochs between evaluations; the last step is always evaluated"""
    evaluate_from: PositiveInt | None = None
    """epochs before the first evaluation; the others follow every `evaluate_every`; null: evaluate_every"""
    evaluate: Literal["wait", "background"] = "wait"
    """wait: training waits for evaluations; background: they run in a thread. mesh.evaluate: on processes of their own"""
    keep_validation: bool = False
    """cache the validation samples on the device"""
    report_every: PositiveInt = 10
    """steps between reports of the loss"""
    replica_check_every: PositiveInt | None = 100
    """steps between checks that replicas of the weights are equal; if they differ, the run ends; null: no checks"""
    metric: str | None = None
    """name of the evaluated metric that is compared with `target`"""
    target: float | None = None
    """stop when the metric is this good"""
    better: Literal["lower", "higher"] = "lower"
    """direction of the metric"""
    hopeless: float | None = None
    """the run stops as diverged if the metric of an evaluation is this bad"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of weights, sample order and dropout"""
    collect_every: PositiveInt | None = 1000
    """steps between Python's garbage collections, at once on all processes, because all wait for one; null: automatic"""
    hang_after: Annotated[float, Field(gt=0)] | None = 1800.0
    """timeout of a step (or batch of an evaluation) in seconds, after which the run ends with the stack of each process; four times
    as long for the first step, which may compile; null: none"""
    power_cap: PositiveInt | None = None
    """required power limit of each GPU in watts, set by the scheduler or `nvidia-smi -pl`; null: any"""
    profile: tuple[PositiveInt, PositiveInt] | None = None
    """first and last step of a profiler trace, in report.directory/profile"""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps {self.steps} and epochs {self.epochs} are both given; give one, the other null")
        if self.target is not None and self.metric is None:
            raise ValueError(f"target {self.target:g} needs metric: the name of the value that is compared with it")
        if self.hopeless is not None and self.metric is None:
            raise ValueError(f"hopeless {self.hopeless:g} needs metric: the name of the value that is compared with it")
        if self.hopeless is not None and self.target is not None and (self.hopeless < self.target) != (self.better == "higher"):
            raise ValueError(f"hopeless {self.hopeless:g} is better than target {self.target:g}, where {self.better} is better")
        return self


class CheckpointConfig(Settings):
    """Checkpoints, in `report.directory`/checkpoints."""

    every_steps: PositiveInt | None = None
    """steps between checkpoints; null: at the end of every epoch"""
    keep: PositiveInt = 2
    """number of newest checkpoints to keep"""
    writers: PositiveInt = 8
    """maximum number of processes of a node that share the writing and reading of replicated data, each with a file of its own"""
    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the newest complete checkpoint in the directory of the run, if there is one"""
    other_data: bool = False
    """resume with a data set other than that of the checkpoint"""


class ReportConfig(Settings):
    """Reports of a run. metrics.jsonl and settings.yaml are always written to the directory."""

    directory: Path | None = None
    """directory of the run; null: no files"""
    sinks: tuple[Literal["terminal", "tensorboard", "wandb", "mlflow", "mlperf"], ...] = ("terminal",)
    """progress in the terminal, files for TensorBoard, Weights & Biases or MLflow, a log for MLPerf's compliance checkers"""
    project: str | None = None
    """project of Weights & Biases, experiment of MLflow; null: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, or the name of the app"""


class RunConfig(Settings):
    """Settings of every app. An app sets the classes of `model` and `data`, and the defaults of each section."""

    model: Settings = Settings()
    data: LoaderConfig = LoaderConfig()
    mesh: MeshConfig = MeshConfig()
    step: StepConfig = StepConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _every_process_stages(self) -> Self:
        if self.mesh.evaluate and self.data.stage is not None:
            raise ValueError(
                f"data.stage is {self.data.stage} and mesh.evaluate {self.mesh.evaluate}: processes that only evaluate cannot "
                "take part in staging; set mesh.evaluate to 0 or data.stage to null (hpcai data stage copies beforehand)"
            )
        return self


FrozenStorage = Literal["as they are", "bf16", "8bit"]


class LoRAConfig(Settings):
    """LoRA adapters of linear layers; defaults of MLPerf for Llama 2 70B. Names of modules may begin after any dot, such as q_proj
    for a layer of each block and layers.0.self_attn.q_proj for one."""

    renamed = {"frozen": "base_dtype"}

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """the scale is alpha / rank"""
    stabilised: bool = False
    """rank-stabilized LoRA: the scale is alpha / sqrt(rank) (Kalajdzievski 2023)"""
    dropout: Rate = 0.0
    """of the inputs of A"""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_proj", "k_proj", "v_proj", "o_proj")
    rank_pattern: dict[str, PositiveInt] = {}
    """ranks of layers for which it is not ``rank``, by name; a longer name comes before a shorter one"""
    alpha_pattern: dict[str, PositiveFloat] = {}
    """likewise for ``alpha``"""
    modules_to_save: tuple[str, ...] = ()
    """embeddings, norms or the output layer (lm_head) if they are trained, too, and saved beside the adapters"""
    base_dtype: FrozenStorage = "as they are"
    """storage format of the frozen weights of all linear layers but the output layer; the step sets the compute dtype"""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.stabilised else self.rank)

    def for_layer(self, name: str) -> Self | None:
        """Return the settings with rank and alpha of one layer, or None if it has no adapter."""
        if not longest_end(name, self.targets):
            return None
        rank = self.rank_pattern.get(longest_end(name, self.rank_pattern), self.rank)
        alpha = self.alpha_pattern.get(longest_end(name, self.alpha_pattern), self.alpha)
        return self.model_copy(update={"rank": rank, "alpha": alpha})

    def alpha_for(self, rank: int) -> float:
        """Return the alpha with which adapters of another rank have the same scale."""
        return round(self.alpha * math.sqrt(rank / self.rank), 12) if self.stabilised else self.alpha * rank / self.rank

    def saves(self, parameter: str) -> bool:
        """Whether ``parameter`` belongs to one of ``modules_to_save``."""
        return bool(longest_end(parameter.rpartition(".")[0], self.modules_to_save))


def longest_end(name: str, ends: Iterable[str]) -> str:
    """Return the longest of ``ends`` that is ``name`` or follows a dot in it, or an empty string."""
    return max((end for end in ends if f".{name}".endswith(f".{end}")), key=len, default="")
