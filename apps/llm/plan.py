"""Fine-tuning of Llama 2 70B to be planned:  hpcai plan llm --gpus 8 64 | hpcai plan llm --check

Cut over ``tensor``; a row of a batch is a micro-batch. Steps are planned uncompiled and in bfloat16: what NVIDIA published was
compiled by hand, and its runs multiplied in FP8.
"""

from apps.llm.trial import Trial
from hpcai.cli.plan.workload import Evaluation, Published, Workload

_LLAMA31 = "width: 4096, layers: 32, heads: 32, key_heads: 8, inner: 14336, vocabulary: 128256"
_ADAPTED = (f"model={{{_LLAMA31}, positions: 4096}}", "lora.dropout=0.0")
_TRAINED = (f"model={{{_LLAMA31}, positions: 8192}}", "lora=null", "step.shard=optimizer")


class Plan(Workload):
    subject, yaml, cut, depth = Trial(), "llama2-70b-lora.yaml", "tensor", "model.layers"
    keeps = ("step.shard", "start.weights")  # adapters are of some weights, which are not read
    lean = (("step.accumulate=1", "model.recompute=none"), ("step.accumulate=1", "model.recompute=layers"))
    samples = {8: 3264, 128: 11_100}
    source = "reference convergence of MLPerf: 3,072 to 3,456 rows at a batch of 8, about 11,100 at 128"
    evaluation = Evaluation(samples=173, every=384, cost=1 / 2)  # forward alone; backward finds no gradients of weights
    published = (
        Published("step", 16 * 8192 / (8 * 5762), "h100", 8, 16, words=_TRAINED, of="torchtitan"),  # 8B, uncompiled
        Published("step", 128 * 8192 / (8 * 10_682), "h100", 8, 128, words=_TRAINED, of="NVIDIA, bf16"),
        Published("step", 8 * 4096 / (8 * 17_809), "h100", 8, 8, words=_ADAPTED, of="NVIDIA, bf16"),
        Published("run", 116.1, "h100", 8, 8, ways=4, of="Juniper, DeepSpeed"),
        Published("run", 24.69, "h200", 8, 8, ways=2, of="NVIDIA, FP8"),
        Published("run", 28.07, "h100", 8, 8, ways=4, of="NVIDIA, FP8"),
    )
