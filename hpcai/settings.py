"""Settings that every app shares: mesh, step, training, checkpoints, reports. No torch here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import Positive, Settings
from hpcai.errors import MeshError

AXES = ("replicate", "pipeline", "context", "axial", "depth", "height", "tensor", "evaluate")
"""The axes of every mesh, from outermost to innermost; inner ones exchange more. `evaluate` stands beside the others."""


def mesh_shape(sizes: Mapping[str, int], world: int) -> tuple[dict[str, int], int]:
    """The size of each axis of those of ``world`` processes that train, -1 filled in, and how many these are.

    Raises MeshError when the sizes do not multiply to the number of processes.
    """
    evaluate = sizes.get("evaluate", 0)
    if evaluate >= world and evaluate:
        raise MeshError(f"mesh.evaluate is {evaluate}, which leaves no process to train; {world} were started")
    train = world - evaluate
    shape = _fill_free_axis({name: sizes.get(name, 1) for name in AXES[:-1]}, train)
    model_size = math.prod(size for name, size in shape.items() if name != "replicate")
    if evaluate % model_size:
        raise MeshError(f"mesh.evaluate is {evaluate}, but a copy of the model takes {model_size}; give a multiple of {model_size}")
    return shape, train


def _fill_free_axis(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    fixed = math.prod(size for size in sizes.values() if size > 0)
    free = [name for name, size in sizes.items() if size < 0]
    if len(free) > 1:
        raise MeshError(f"mesh: {' and '.join(free)} are both -1; only one axis can take the rest of the processes")
    if world % fixed or (not free and world != fixed):
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "of size 1"
        need = f"a multiple of {fixed} processes" if free else f"{fixed} process{'es' if fixed > 1 else ''}"
        verb = "was" if world == 1 else "were"
        raise MeshError(f"mesh {shape} needs {need}, but {world} {verb} started")
    return {name: (world // fixed if size < 0 else size) for name, size in sizes.items()}


class MeshConfig(Settings):
    """Named axes of the processes. Their product is the number of processes. An app adds the axes that its model is cut along."""

    replicate: Annotated[int, Field(ge=-1)] = -1
    """copies of the model, each with its own samples; -1: as many as the processes that the other axes leave"""
    evaluate: Annotated[int, Field(ge=0)] = 0
    """the last processes of the job, which only evaluate while the others train on"""

    @model_validator(mode="after")
    def _replicate_is_a_size(self) -> Self:
        if self.replicate == 0:
            raise ValueError("replicate is 0; expected a number of copies, or -1 for every process that the other axes leave")
        return self


class Pipeline(Settings):
    """The axis `pipeline` of a mesh."""

    pipeline: Positive = 1
    """cut of a model into stages of consecutive layers"""


class Context(Settings):
    """The axis `context` of a mesh."""

    context: Positive = 1
    """cut of a long sequence along its places"""


class Axial(Settings):
    """The axis `axial` of a mesh."""

    axial: Positive = 1
    """cut of a tensor along one of two dims, and along the other one where the first is needed whole"""


class Depth(Settings):
    """The axis `depth` of a mesh."""

    depth: Positive = 1
    """cut of a volume along its depth"""


class Height(Settings):
    """The axis `height` of a mesh."""

    height: Positive = 1
    """cut of a volume or a map along its height"""


class Tensor(Settings):
    """The axis `tensor` of a mesh."""

    tensor: Positive = 1
    """cut of weights along their rows or columns"""


class LoaderConfig(Settings):
    """How samples come from files to the device: what every app's `data` settings begin with."""

    reader: Literal["auto", "direct", "buffered", "memory", "hdf5", "dali", "gds"] = "auto"
    """auto: buffered where all samples fit into the page cache, otherwise direct; direct: past the page cache (O_DIRECT);
    memory: kept once read; hdf5: by the HDF5 library (compressed files too); dali: batches made by NVIDIA DALI;
    gds: straight to the GPU (GPUDirect Storage)"""
    workers: Positive = 2
    """threads that prepare samples, per process"""
    processes: bool = False
    """worker processes instead of threads, for samples that cost Python time"""
    prefetch: Annotated[float, Field(gt=0)] = 1.0
    """GB of samples that wait ready, per process"""
    order: Literal["strict", "ready"] = "strict"
    """strict: the same batches in every run; ready: a sample that is slow to prepare comes in a later batch of its epoch"""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """skip: a sample that cannot be read or is not finite is replaced by another, reported and counted"""
    once: bool | Literal["auto"] = "auto"
    """whether each sample of a copy that several processes hold together is made by one of them and sent to the others; auto: where
    all of them would make the same of it. Where each reads its own part only (volumes and maps that are cut) it is off"""
    patience: Annotated[float, Field(gt=0)] = 600.0
    """seconds without any sample after which a run stops and names what it waits for"""
    stage: str | None = None
    """folder on each node's own disk, such as $TMPDIR/data, to which the data are copied first"""
    shards: Positive = 1
    """1: every node's disk holds all training samples; more: each holds one shard, and trains on that"""

    def loader_kwargs(self) -> dict[str, Any]:
        """What a `Loader` is told."""
        return {
            "workers": self.workers, "processes": self.processes, "prefetch": int(self.prefetch * 1e9), "order": self.order,
            "on_bad_sample": self.on_bad_sample, "patience": self.patience,
            "once": False if self.reader == "gds" else self.once,
        }  # fmt: skip

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.reader == "gds" and self.processes:
            raise ValueError("reader gds reads to the GPU of this process; set processes to false")
        if self.reader in ("gds", "dali") and self.once is True:
            raise ValueError(f"reader {self.reader} gives samples on the GPU of each process; set once to auto or false")
        if self.reader == "dali" and (self.order == "ready" or self.on_bad_sample == "skip"):
            raise ValueError("reader dali has a strict order and stops at a bad sample; set order strict and on_bad_sample stop")
        if self.shards > 1 and self.stage is None:
            raise ValueError(f"shards is {self.shards}, which needs stage: a folder on each node's own disk")
        return self


class ScheduleConfig(Settings):
    """Learning rate as a pure function of the global optimizer step. Lengths are in epochs, or in steps (`unit`)."""

    unit: Literal["epochs", "steps"] = "epochs"
    """unit of `warmup`, `decay_at` and `length`"""
    warmup: Annotated[float, Field(ge=0)] = 0.0
    """length of the linear warm-up from `start` to the learning rate"""
    start: Annotated[float, Field(ge=0)] = 0.0
    """learning rate at the first step of the warm-up"""
    decay: Literal["none", "steps", "linear", "cosine"] = "none"
    """after the warm-up: constant; the factors `decay_to` from the epochs `decay_at`; or a slope to `floor` at the last step"""
    length: Annotated[float, Field(gt=0)] | None = None
    """length of the slope after the warm-up; null: to the last step. A cosine rises again after it, as torch's does"""
    decay_at: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """when a factor begins"""
    decay_to: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """factors of the learning rate, one per entry of `decay_at`"""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """last factor of a linear or cosine decay"""
    first_step: Literal[0, 1] = 0
    """number of the first step: 0, at `start`, or 1, one step up the warm-up"""
    held: bool = False
    """the rate stays the same for a whole epoch; otherwise it follows the fraction of it"""
    late: bool = False
    """a factor begins one epoch (or step) after the one that `decay_at` names"""
    after_warmup: bool = False
    """`decay_at` counts from the end of the warm-up, and the peak is the rate of its last step"""

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if len(self.decay_at) != len(self.decay_to):
            raise ValueError(
                f"decay_at has {len(self.decay_at)} entries and decay_to {len(self.decay_to)}; give one factor per epoch"
            )
        if list(self.decay_at) != sorted(self.decay_at):
            raise ValueError(f"decay_at {list(self.decay_at)} must rise")
        if (self.decay == "steps") != bool(self.decay_at):
            raise ValueError("decay: steps needs decay_at and decay_to, and they need decay: steps")
        if self.length is not None and self.decay not in ("linear", "cosine"):
            raise ValueError(f"length is {self.length:g}, but decay is {self.decay}; only linear and cosine have a length")
        if self.unit == "steps" and self.held:
            raise ValueError("held is true, which holds the rate for an epoch, but unit is steps; expected epochs, or held: false")
        return self


class StepConfig(Settings):
    """One optimizer step: precision, gradients, optimizer, learning rate."""

    precision: Literal["auto", "fp32", "bf16", "bf16-params", "fp64"] = "fp32"
    """bf16: autocast, weights and optimizer stay fp32; bf16-params: weights and gradients too are bfloat16, the optimizer keeps an
    fp32 master copy of them; auto: bf16 where the processor computes in it faster, otherwise fp32"""
    products: Literal["precision", "fp8"] = "precision"
    """fp8: linear layers of the parts that a model names round what they multiply to 8 bits of floating point, with a scale of each
    matrix; on GPUs since Ada and Hopper twice as fast as bf16"""
    tf32: Literal["auto"] | bool = "auto"
    """on GPUs, products and convolutions of float32 round what they multiply to 10 bits, and are several times as fast; auto: as
    torch is set, which rounds in convolutions alone"""
    cudnn_benchmark: bool = False
    """convolutions on NVIDIA GPUs try their algorithms once for each shape, and keep the fastest: for batches of few shapes"""
    accumulate: Positive = 1
    """micro-batches per step and process"""
    clip: Annotated[float, Field(gt=0)] | None = None
    """largest L2 norm of the gradient"""
    clip_per: Literal["batch", "sample"] = "batch"
    """what `clip` bounds: the gradient of the whole batch, or that of each sample before they are averaged (AlphaFold 2); sample
    needs micro-batches of one sample"""
    bucket_mb: Annotated[float, Field(gt=0)] = 25.0
    """size of the gradient buckets that are summed while the backward pass goes on, MB"""
    optimizer: Literal["sgd", "adam", "adamw", "lamb", "lars"] = "adamw"
    """sgd: momentum; adam: weight decay in the gradient; adamw: decoupled from it; lamb, lars: for large batches, they
    adapt the rate to each parameter that `decay_names` names"""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """peak learning rate"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """momentum of sgd and lars"""
    lr_in_momentum: bool = True
    """sgd: v = momentum*v + lr*g, p -= v (Keras and the MLPerf codes), not v = momentum*v + g, p -= lr*v (torch)"""
    nesterov: bool = False
    """sgd: the update looks one step ahead"""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """decay rates of the two moments of adam, adamw and lamb"""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """what adam, adamw and lamb add to the denominator"""
    trust: Annotated[float, Field(gt=0)] = 0.001
    """lars: the factor of |w| / (|g| + weight_decay*|w|)"""
    moments: Literal["fp32", "bf16"] = "fp32"
    """bf16: moments take half the memory, and are rounded stochastically"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """sgd, adam, lars: added to the gradient as weight_decay*w (Keras l2 = weight_decay/2); adamw, lamb: decoupled"""
    decay_names: tuple[str, ...] = ("*.weight",)
    """parameters that decay, as shell patterns of their names"""
    average: Annotated[float, Field(gt=0, lt=1)] | None = None
    """decay of an exponential moving average of the weights, which is then what is evaluated and saved for people"""
    capture: Literal["none", "auto", "forward", "whole"] = "none"
    """CUDA Graphs: forward and backward with the gradient sums, or the whole step with its update, recorded once for each shape of
    the batch; auto: whole, where there is a GPU that can, and none where the step turns out to need the host"""
    capture_shapes: Positive = 4
    """at most so many shapes of the batch are captured; others are refused, and with auto run uncaptured"""
    compile: Literal["none", "blocks", "whole"] = "none"
    """torch.compile of each repeated block, or of the model as one"""
    compile_cache: Path | None = None
    """folder that keeps compiled code, with which later jobs begin"""
    shard: Literal["none", "optimizer", "weights"] = "none"
    """what the copies of the model divide among them: the optimizer's state and work, or the weights too (torch's fully_shard)"""
    shard_within: Annotated[int, Field(ge=2)] | None = None
    """how many neighbouring copies divide it, such as those of one node; null: all of them"""
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError(f"nesterov is for sgd with momentum; optimizer is {self.optimizer}, momentum {self.momentum:g}")
        if self.precision == "fp64" and self.moments == "bf16":
            raise ValueError("moments bf16 with precision fp64 loses what fp64 is for; set moments to fp32")
        if self.capture in ("forward", "whole") and self.shard == "weights":
            raise ValueError(f"capture {self.capture} with shard weights cannot be done; set shard to optimizer or capture to none")
        if self.shard_within is not None and self.shard == "none":
            raise ValueError(f"shard_within is {self.shard_within}, but nothing is divided; set shard to optimizer or weights")
        if self.clip_per == "sample" and (self.clip is None or self.shard == "weights"):
            lacks = "clip is null; give it a norm" if self.clip is None else "shard is weights, and no process has a whole gradient"
            raise ValueError(f"clip_per is sample, but {lacks}")
        if self.compile_cache is not None and self.compile == "none":
            raise ValueError("compile_cache is given, but nothing is compiled; set compile to blocks or whole")
        return self


class TrainConfig(Settings):
    """How long, how often, how good."""

    steps: Positive | None = None
    """optimizer steps in all"""
    epochs: Positive | None = None
    """passes over the training samples in all"""
    evaluate_every: Positive = 1
    """epochs between evaluations; the last step is always evaluated"""
    evaluate_from: Positive | None = None
    """epochs before the first evaluation, from which the others are counted; null: evaluate_every"""
    evaluate: Literal["wait", "background"] = "wait"
    """wait: training waits for an evaluation; background: it goes on beside it. mesh.evaluate gives evaluation its own processes"""
    keep_validation: bool = False
    """keep the validation samples on the device once they are read"""
    report_every: Positive = 10
    """steps between reports of the loss"""
    agree_every: Positive | None = 100
    """steps within which weights that come to differ between processes that should hold the same end the run; null: never"""
    metric: str | None = None
    """name of the evaluated metric that is compared with `target`"""
    target: float | None = None
    """stop when the metric is this good"""
    better: Literal["lower", "higher"] = "lower"
    """which values of the metric are better"""
    hopeless: float | None = None
    """a run whose metric is this bad at any evaluation has diverged: it stops and says so"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of the weights, the order of the samples and the dropout"""
    collect_every: Positive | None = 1000
    """steps between Python's garbage collections, which may otherwise stop one process at any time while all wait; null: leave
    them to Python"""
    hang_after: Annotated[float, Field(gt=0)] | None = 1800.0
    """seconds without a finished step (or batch of an evaluation) after which the run ends and says where each process stands; four
    times as many for the first step, which may compile; null: wait for ever"""
    power_cap: Positive | None = None
    """watts to which each GPU of the run must be limited, by the scheduler or `nvidia-smi -pl`; null: any limit"""
    profile: tuple[Positive, Positive] | None = None
    """first and last step of a trace, in report.directory/profile"""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps {self.steps} and epochs {self.epochs} are both given; give one, the other null")
        if self.target is not None and self.metric is None:
            raise ValueError(f"target {self.target:g} needs metric: the name of what is compared with it")
        if self.hopeless is not None and self.metric is None:
            raise ValueError(f"hopeless {self.hopeless:g} needs metric: the name of what is compared with it")
        if self.hopeless is not None and self.target is not None and (self.hopeless < self.target) != (self.better == "higher"):
            raise ValueError(f"hopeless {self.hopeless:g} is better than target {self.target:g}, where {self.better} is better")
        return self


class CheckpointConfig(Settings):
    """Files to resume from, below `report.directory`/checkpoints."""

    every_steps: Positive | None = None
    """steps between checkpoints; null: at the end of every epoch"""
    keep: Positive = 2
    """newest checkpoints that are kept"""
    writers: Positive = 8
    """processes that write, and read, what several hold alike: those of one node. Each that writes has a file of its own"""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest whole checkpoint of the run's directory, if there is one"""
    other_data: bool = False
    """go on with another data set than the one that the checkpoint was trained on"""


class ReportConfig(Settings):
    """Where the numbers go. metrics.jsonl and settings.yaml are always written into the directory."""

    directory: Path | None = None
    """the run's directory; null: nothing is written"""
    sinks: tuple[Literal["terminal", "tensorboard", "mlperf"], ...] = ("terminal",)
    """progress for people, TensorBoard files, a log for MLPerf's checkers"""


class RunConfig(Settings):
    """What the settings of every app hold. An app gives `model` and `data` their own classes and each section its defaults."""

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
                f"data.stage is {self.data.stage} and mesh.evaluate {self.mesh.evaluate}: processes that only evaluate cannot take "
                "part in staging; set mesh.evaluate to 0 or data.stage to null (hpcai data stage copies beforehand)"
            )
        return self
