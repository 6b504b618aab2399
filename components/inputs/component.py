"""Arguments of a run -> what the other steps read, and what their pods request."""

from typing import NamedTuple

from kfp import dsl

from components.images import TRAIN
from components.step import step


@step("waiting", hours=0.5, is_cached=False, seconds=2)
@dsl.component(base_image=TRAIN, install_kfp_package=False)
def inputs(
    recipe: str,
    overrides: list[str],
    prune_recipe: str = "",
    qat_recipe: str = "",
    finetune_recipe: str = "",
    corpus: str = "",
    tokenizer: str = "",
    model: str = "",
    init: str = "",
    cloze: str = "",
    has_chats: bool = False,
    gpus: int = 1,
    nodes: int = 1,
    cpus: int = 0,
    memory: str = "",
    node_pool: str = "gpu",
    queue: str = "",
) -> NamedTuple(
    "RunInputs",
    [
        *[("corpus", str), ("text", dict), ("weights", dict), ("scored", dict)],
        *[("prepare", str), ("pretrain", str), ("prune", str), ("analyze", str)],
        *[("quantize", str), ("evaluate", str), ("export", str), ("deploy", str)],
        *[("gate", str), ("release", str), ("report", str), ("price", str)],
        *[("choose", str), ("estimate", str), ("finetune", str)],
        *[("cpu_cpus", str), ("cpu_memory", str)],
        *[("cpu_memory_limit", str), ("text_cpus", str), ("text_memory", str)],
        *[("text_memory_limit", str), ("gpu_gpus", str), ("gpu_cpus", str)],
        *[("gpu_memory", str), ("gpu_memory_limit", str), ("gpu_node_selector", dict)],
        *[("gpu_tolerations", list), ("node_gpus", str), ("node_cpus", str)],
        *[("node_memory", str), ("node_memory_limit", str), ("node_node_selector", dict)],
        *[("node_tolerations", list), ("training_gpus", str), ("training_cpus", str)],
        *[("training_memory", str), ("training_memory_limit", str)],
        *[("training_node_selector", dict), ("training_tolerations", list)],
    ],
):
    """Identify a run's external inputs by their contents, so that changed contents are not cached,
    give each step the settings that it reads, and size the steps' pods.

    Args:
        recipe: Name or path of the run's recipe, with the default text and tokenizer.
        overrides: Settings that replace the recipes', as `Group.key=value`.
        prune_recipe: Recipe of the pruning steps, in pipelines that have one.
        qat_recipe: Recipe of the quantization steps, in pipelines that have one.
        finetune_recipe: Recipe of the step finetune, in pipelines that have one.
        corpus: File, folder, address or data set name; the recipe's when empty.
        tokenizer: Tokenizer file or folder; the model's when empty, else the recipe's.
        model: Checkpoint folder that the run starts from.
        init: Checkpoint folder with the initial weights for training.
        cloze: LAMBADA-format file; the held-out examples of the corpus when empty.
        has_chats: Whether the corpus is conversations.
        gpus: GPUs per node; 0 for none.
        nodes: Nodes to train on; with several, the steps that train start a TrainJob.
        cpus: CPU cores of every step that computes; 0 estimates them.
        memory: Memory of every step that computes, such as 32Gi; estimated when empty.
        node_pool: Value of the node label lathe/node-pool for steps with GPUs.
        queue: Kueue LocalQueue of the training, which is then a TrainJob; none when empty.

    Returns:
        corpus: Location of the text; for `newest:PLACE`, the newest one now.
        text: Content identifiers of the text, the tokenizer and the model with a tokenizer.
        weights: Content identifiers of the initial weights and a teacher.
        scored: Content identifiers of everything that evaluations read.
        prepare: Settings of the step prepare, and of those that tokenize in shards, as a recipe.
        pretrain: Settings of the step pretrain, and of certify, as a recipe.
        prune: Settings of the step prune, as a recipe.
        analyze: Settings of the step analyze, as a recipe.
        quantize: Settings of the step quantize, as a recipe.
        evaluate: Settings of the step evaluate, as a recipe.
        export: Settings of the step export, and of design, as a recipe.
        deploy: Settings of the step rehearse, as a recipe.
        gate: Settings of the step gate, as a recipe.
        release: Settings of the step release, as a recipe.
        report: Settings of the step report, as a recipe.
        price: Settings of the step price, as a recipe.
        choose: Settings of the step choose, as a recipe.
        estimate: Settings of the step estimate, as a recipe.
        finetune: Settings of the step finetune, as a recipe.
        cpu_cpus: CPUs of steps on CPUs.
        cpu_memory: Memory request of steps on CPUs.
        cpu_memory_limit: Memory limit of steps on CPUs.
        text_cpus: CPUs of steps that tokenize.
        text_memory: Memory request of steps that tokenize.
        text_memory_limit: Memory limit of steps that tokenize.
        gpu_gpus: GPUs of steps on one GPU.
        gpu_cpus: CPUs of steps on one GPU.
        gpu_memory: Memory request of steps on one GPU.
        gpu_memory_limit: Memory limit of steps on one GPU.
        gpu_node_selector: Node labels of steps on one GPU.
        gpu_tolerations: Tolerations of steps on one GPU.
        node_gpus: GPUs of the step certify.
        node_cpus: CPUs of the step certify.
        node_memory: Memory request of the step certify.
        node_memory_limit: Memory limit of the step certify.
        node_node_selector: Node labels of the step certify.
        node_tolerations: Tolerations of the step certify.
        training_gpus: GPUs of steps that train.
        training_cpus: CPUs of steps that train.
        training_memory: Memory request of steps that train.
        training_memory_limit: Memory limit of steps that train.
        training_node_selector: Node labels of steps that train.
        training_tolerations: Tolerations of steps that train.
    """
    from collections import namedtuple

    from components.machines import Pool
    from components.plan import log_contents, plan
    from components.stage import stage
    from lathe.data.run_inputs import look_up
    from lathe_base.config.recipe import load_recipe

    with stage(recipe, overrides):
        others = prune_recipe, qat_recipe, finetune_recipe
        settings = [load_recipe(name, overrides) for name in (recipe, *others) if name]
        resolved = look_up(settings, corpus, tokenizer, model, init, cloze)
        log_contents(resolved)
        pool = Pool(gpus, nodes, cpus, memory, node_pool, queue)
        planned = plan(recipe, overrides, *others, model or init, pool, has_chats)
        found = vars(resolved) | planned
        return namedtuple("RunInputs", found)(**found)
