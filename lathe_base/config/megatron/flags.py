"""What Lathe does with each flag of `pretrain_gpt.py`.

The flags are those of microsoft/Megatron-DeepSpeed at b4d4a0e and of NVIDIA's Megatron-LM up to
core 0.8, by their meaning there.
"""

SIZES = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels"),
    *("seq-length", "encoder-seq-length", "max-position-embeddings", "micro-batch-size"),
    *("global-batch-size", "train-iters", "train-samples", "lr-decay-iters", "lr-decay-samples"),
    *("lr-warmup-iters", "lr-warmup-samples", "eval-iters", "eval-interval", "log-interval"),
    *("save-interval", "seed", "tensor-model-parallel-size", "pipeline-model-parallel-size"),
    *("num-layers-per-virtual-pipeline-stage", "make-vocab-size-divisible-by", "zero-stage"),
    *("loss-scale-window", "hysteresis"),
)
"""Flags whose value is a whole number."""

NUMBERS = (
    *("lr", "min-lr", "lr-warmup-fraction", "weight-decay", "clip-grad", "adam-beta1"),
    *("adam-beta2", "adam-eps", "init-method-std", "attention-dropout", "hidden-dropout"),
    *("layernorm-epsilon", "norm-epsilon", "loss-scale", "initial-loss-scale", "min-loss-scale"),
)
"""Flags whose value is a number."""

WORDS = {
    "lr-decay-style": ("cosine",),
    "optimizer": ("adam",),
    "recompute-granularity": ("full", "selective"),
    "normalization": ("LayerNorm",),
    "position-embedding-type": ("learned_absolute",),
    "mlp-type": ("standard",),
}
"""Flags whose value is a word, and the supported ones."""

SWITCHES = (
    *("fp16", "bf16", "checkpoint-activations", "recompute-activations", "sequence-parallel"),
    *("reset-position-ids", "reset-attention-mask", "cpu-optimizer", "deepspeed"),
)
"""Flags without a value."""

OTHERS = ("split", "data-path", "load", "deepspeed-config", "num-experts")
"""Flags that are read, with values of another kind."""

TAKEN = frozenset((*SIZES, *NUMBERS, *WORDS, *SWITCHES, *OTHERS))

NOT_GPT2 = "the model would not be a GPT-2; a recipe's Model.architecture names the other families"
REFUSED = {
    "num-experts": "mixtures of experts are not supported",
    "curriculum-learning": "sequences that grow during training are not supported",
    "data-efficiency-curriculum-learning": "data that changes with the step is not supported",
    "random-ltd": "dropping random tokens is not supported",
    "rampup-batch-size": "a batch that grows during training is not supported",
    "train-tokens": "the length of a training is a number of steps: give --train-iters",
    "lr-decay-tokens": "the decay is a number of steps: give --lr-decay-iters",
    "lr-warmup-tokens": "the warm-up is a number of steps: give --lr-warmup-iters",
    "lr-wsd-decay-style": "the learning rate decays as a cosine only",
    "apply-residual-connection-post-layernorm": "only layer norms before attention and FFN",
    "init-method-xavier-uniform": "initial weights are normally distributed",
    "eod-mask-loss": "the loss counts the tokens after the end of a document too",
    "mos": "train with Compress.Distill instead",
    "kd": "train with Compress.Distill instead",
    "compression-training": "compress with lathe prune and lathe quantize instead",
    "swiglu": NOT_GPT2,
    "squared-relu": NOT_GPT2,
    "no-position-embedding": NOT_GPT2,
    "use-rotary-position-embeddings": NOT_GPT2,
    "group-query-attention": NOT_GPT2,
    "num-query-groups": NOT_GPT2,
    "num-key-value-heads": NOT_GPT2,
    "multi-latent-attention": NOT_GPT2,
    "disable-bias-linear": NOT_GPT2,
    "untie-embeddings-and-output-weights": NOT_GPT2,
    "apply-layernorm-1p": NOT_GPT2,
    "qk-layernorm": NOT_GPT2,
    "embedding-weights-in-fp32": "the embedding has the precision of the other weights",
    "onnx-safe": "its exact GELU is not GPT-2's, which Lathe computes",
    "fp8": "FP8 is not supported",
    "fp8-format": "FP8 is not supported",
    "context-parallel-size": "context parallelism is not supported",
    "ds-sequence-parallel-size": "DeepSpeed's sequence parallelism is not supported",
    "decoder-seq-length": "an encoder and decoder are not supported",
}
"""Flags that change the numbers in a way that Lathe does not support, and why."""

CHANGES = {
    "no-bias-gelu-fusion": "GELU was exact; Lathe computes GPT-2's approximation with tanh",
    "fp32-residual-connection": "the residual stream has the precision of the model",
    "fp16-lm-cross-entropy": "the loss is computed in float32",
    "attention-softmax-in-fp32": "the attention kernel accumulates in float32 anyway",
    "no-query-key-layer-scaling": "attention scores are not rescaled layer by layer; the same "
    "in exact arithmetic",
    "accumulate-allreduce-grads-in-fp32": "gradients are added up as the recipe's precision says",
    "dataloader-type": "samples are those of the type `single`",
    "finetune": "belongs to --load",
    "no-load-optim": "belongs to --load",
    "no-load-rng": "belongs to --load",
    "no-load-lr-state": "belongs to --load",
    "override-lr-scheduler": "belongs to --load",
    "use-checkpoint-lr-scheduler": "belongs to --load",
    "override-opt-param-scheduler": "belongs to --load",
    "use-checkpoint-opt-param-scheduler": "belongs to --load",
    "train-data-path": "Lathe splits one data set: give its folder and Data.Train.dataset.split",
    "valid-data-path": "Lathe splits one data set: give its folder and Data.Train.dataset.split",
    "test-data-path": "Lathe splits one data set: give its folder and Data.Train.dataset.split",
    "exit-interval": "Engine.max_steps ends a training; it may be raised later",
    "exit-duration-in-mins": "SIGTERM ends a training, and the same command resumes it",
    "create-moe-param-group": "there are no experts",
    "scattered-embeddings": "it changes where dropout falls",
    "sample-rate": "all samples are used",
}
"""Flags that may change the numbers a little, or belong to something that the recipe does not
decide; named with this explanation."""

WITHOUT_EFFECT = frozenset(
    (
        *("save", "vocab-file", "merge-file", "tokenizer-type", "tokenizer-model"),
        *("data-impl", "mmap-warmup", "num-workers", "distributed-backend", "local-rank"),
        *("local_rank", "DDP-impl", "tensorboard-dir", "tensorboard-queue-size"),
        *("tensorboard-log-interval", "log-timers-to-tensorboard", "log-params-norm"),
        *("log-batch-size-to-tensorboard", "log-validation-ppl-to-tensorboard"),
        *("log-optimizer-states-to-tensorboard", "no-log-learnig-rate-to-tensorboard"),
        *("no-log-loss-scale-to-tensorboard", "log-num-zeros-in-grad", "log-throughput"),
        *("log-memory-to-tensorboard", "log-world-size-to-tensorboard", "timing-log-level"),
        *("no-save-optim", "no-save-rng", "checkpoint-num-layers", "checkpoint-in-cpu"),
        *("deepspeed-activation-checkpointing", "partition-activations", "profile-backward"),
        *("contigious-checkpointing", "synchronize-each-layer", "no-pipeline-parallel"),
        *("distribute-checkpointed-activations", "recompute-method", "recompute-num-layers"),
        *("distribute-saved-activations", "zero-reduce-scatter", "zero-contigious-gradients"),
        *("zero-reduce-bucket-size", "zero-allgather-bucket-size", "remote-device"),
        *("use-pin-memory", "memory-centric-tiled-linear", "tile-factor", "split-transformers"),
        *("no-masked-softmax-fusion", "no-bias-dropout-fusion", "use-cpu-initialization"),
        *("no-gradient-accumulation-fusion", "use-contiguous-buffers-in-ddp", "use-flash-attn"),
        *("use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton", "lazy-mpu-init"),
        *("use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"),
        *("no-scatter-gather-tensors-in-pipeline", "no-async-tensor-model-parallel-allreduce"),
        *("adlr-autoresume", "adlr-autoresume-interval", "cpu-torch-adam", "use-tutel"),
        *("openai-gelu", "aml-data-download-path", "wandb-project", "wandb-exp-name"),
        *("attention-backend", "use-mcore-models", "transformer-impl", "ckpt-format"),
        *("deepscale", "deepscale-config", "deepspeed-mpi", "bert-no-binary-head", "topk"),
        *("expert-interval", "moe-expert-parallel-size", "vocab-extra-ids", "data-cache-path"),
    )
)
"""Flags that are not taken and do not change the numbers, or only those of models that are refused
anyway."""

SPLIT = "969, 30, 1"
DEFAULTS: dict[str, float] = {
    "attention-dropout": 0.1,
    "hidden-dropout": 0.1,
    "init-method-std": 0.02,
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "adam-eps": 1e-8,
    "clip-grad": 1.0,
    "min-lr": 0.0,
    "seed": 1234,
    "eval-iters": 100,
    "eval-interval": 1000,
    "log-interval": 100,
    "make-vocab-size-divisible-by": 128,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "initial-loss-scale": 2.0**32,
    "loss-scale-window": 1000,
    "hysteresis": 2,
    "min-loss-scale": 1.0,
}
"""The defaults of `pretrain_gpt.py`."""
