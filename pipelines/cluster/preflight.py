"""Preflight checks of a run on the cluster, which report all problems together."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kfp.dsl.graph_component import GraphComponent

from components.machines import Pool
from components.step import component
from lathe import backends
from lathe.data.run_inputs import NEWEST
from lathe.train.batches import resolve_batch
from lathe.train.layout import mesh_shape
from lathe.train.plan import require_fit
from lathe.train.shape import model_config
from lathe_base import storage
from lathe_base.checks import Check, Finding
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Placements, Recipe
from lathe_base.errors import Code, StageError, UserError
from lathe_base.storage.splits import locate
from lathe_launch.cluster.nodes import gpu_memory, node_pool_shortage
from pipelines.cluster.registry import check_image, image_labels
from pipelines.cluster.results import ResultsReader
from pipelines.cluster.server import Client, connect
from pipelines.commands.arguments import TASKS, argument, recipe_names, wrong_names
from pipelines.commands.inputs import (
    SEARCHED,
    STORE_SECONDS,
    check_goal,
    check_paths,
    check_steps,
    within,
)
from pipelines.compiler.compile import FUNCTIONS, placed_steps, step_images

FLAVOUR = "lathe.flavour"
"""The image label with its flavour, cpu or cuda."""

SERVER = "Pipelines"
NO_ADDRESSES = {"corpus": ("python", "hf://"), "tokenizer": ("train",)}
"""Values or prefixes that are allowed in addition to addresses."""


@dataclass(frozen=True)
class Preflight:
    """The checks of a run on the cluster.

    Attributes:
        root: the pipeline root; default: the server's.
        placement: placement of the steps' pods.
        is_strict: whether missing machines are an error rather than a warning.
        is_tried: whether to reject a recipe that does not fit the GPU memory in the nodes' labels.
    """

    name: str
    arguments: dict[str, Any]
    root: str = ""
    placement: Placements = field(default_factory=Placements)
    is_strict: bool = False
    is_tried: bool = True

    @cached_property
    def client(self) -> Client:
        """An authenticated client."""
        try:
            return connect()
        except StageError as error:
            look = "kubectl -n kubeflow logs deployment/ml-pipeline"
            raise UserError(
                str(error), f"try again later; check its log: {look}", error.code
            ) from None

    def checks(self) -> Iterator[Check]:
        """All that can be checked before the pipeline is built."""
        yield Check(SERVER, lambda: self.client)
        yield from self.given()
        yield Check("object store", self._check_store, after="" if self.root else SERVER)
        if self.name in FUNCTIONS:
            for key, recipe in recipe_names(self.name, self.arguments).items():
                yield from self.recipe(key, recipe)
            yield from self.nodes()

    def given(self) -> Iterator[Check]:
        """Whether the pipeline has these arguments, and the cluster can reach what they name."""
        yield Check("arguments", lambda: wrong_names(self.name, self.arguments))
        for key in ("model", "corpus", "chat", "tokenizer", "cloze", "production"):
            if value := self.arguments.get(key):
                yield Check(key, partial(self._check_reachable, key, value))
        yield Check("target", lambda: check_goal(self.name, self.arguments))

    def recipe(self, key: str, recipe: str) -> Iterator[Check]:
        """Settings, backend support, and layout on the pool of one of the pipeline's recipes."""
        arguments, pool = self.arguments, Pool.from_arguments(self.arguments)
        has_chats = bool(arguments.get("chat"))
        # Loaded once, by the first check; the others come after it.
        settings = cache(lambda: load_recipe(recipe, arguments["overrides"]))

        def check(what: str, run: Callable[[], object], after: str = recipe) -> Check:
            return Check(f"{recipe}: {what}", run, after=after)

        yield Check(recipe, settings)
        yield check("paths", lambda: check_paths(settings(), arguments))
        if key == "recipe":
            yield check("steps", lambda: check_steps(settings()))

            # What the recipe names, the cluster has to reach, unless an argument replaces it. The
            # tokenizer of conversations is the model's.
            def check_source(what: str, field: str) -> None:
                self._check_reachable(what, getattr(settings().Prepare, field))

            def check_tasks() -> None:
                for option in settings().Offline_Eval.tasks:
                    self._check_reachable(TASKS, option.partition("=")[2])

            sources = {} if has_chats else {"corpus": "source", "tokenizer": "tokenizer"}
            for what, field in sources.items():
                if argument(self.name, what) is not None and not arguments.get(what):
                    yield check(what, partial(check_source, what, field))
            yield check(TASKS, check_tasks)
            yield check("keys", lambda: _check_keys(recipe, settings()))
        # Whether the recipe's engine supports what its steps do; of a search, that is one question.
        stages = {step.stage for step in placed_steps(self.name, has_chats) if step.recipe == key}
        for verb in sorted({"compress"} if (self.name, key) == SEARCHED else stages):
            yield check(verb, partial(_check_support, recipe, verb, settings, pool))
        if pool.gpus and any(component(stage).step.machine == "training" for stage in stages):
            trained = cache(lambda: load_recipe(recipe, [*pool.overrides, *arguments["overrides"]]))
            layout = check("layout", lambda: _check_layout(recipe, trained(), pool))
            yield layout
            if self.is_tried and "pretrain" in stages:
                yield check(
                    "memory",
                    lambda: _check_fit(recipe, trained(), pool, self.placement),
                    after=layout.name,
                )

    def nodes(self) -> Iterator[Check]:
        """Whether the pool has the machines."""
        pool = Pool.from_arguments(self.arguments)
        if pool.gpus:
            yield Check(f"node pool {pool.node_pool}", partial(self._check_nodes, pool))

    def _check_nodes(self, pool: Pool) -> Iterator[Finding]:
        context = os.environ.get("LATHE_KFP_CONTEXT")
        placement = self.placement.of_step("pretrain")
        shortage = node_pool_shortage(pool.node_pool, pool.nodes, pool.gpus, context, placement)
        if shortage and self.is_strict:
            raise shortage
        if shortage:
            said = f"{shortage.what}: pods wait until an autoscaler adds nodes, or you do"
            hint = f"{shortage.hint}; STRICT=1 (--strict) refuses to wait"
            yield Finding(f"node pool {pool.node_pool}", "warning", said, hint)

    def _check_store(self) -> None:
        """Check that an object can be written and deleted below the given pipeline root, or else
        that the server's own root, to which steps write with their own keys, can be read from
        here."""
        root = self.root
        if not root:
            try:
                default = ResultsReader(self.client).readable_default_root()
                within(STORE_SECONDS, default, storage.exists, f"{default}/")
            except UserError as error:
                raise StageError(str(error), error.code) from None
        elif urlsplit(root).scheme not in ("s3", "minio"):
            raise StageError(f"{root} is not on S3", Code.UNSUPPORTED)
        elif not os.environ.get("AWS_ACCESS_KEY_ID") and "LATHE_S3_SECRET_DIR" not in os.environ:
            raise StageError(f"AWS_ACCESS_KEY_ID is not set here for {root}", Code.MISSING_OPTION)
        else:
            # Only a write shows that a key may write.
            probe = f"{root.rstrip('/')}/.lathe-probe-{uuid.uuid4().hex}"
            storage.write_text(probe, "")
            storage.remove(probe)

    def _check_reachable(self, key: str, value: str) -> None:
        location = locate(value.removeprefix(NEWEST)).location
        is_here = storage.uri_scheme(location) == "file" or not storage.is_remote(location)
        mounts = [volume.mount_path for volume in self.placement.volumes]
        if is_here and any(f"{location}/".startswith(f"file://{mount}/") for mount in mounts):
            if key != "model":
                return
            raise UserError(
                f"model {value}: Pipelines cannot import a model from a volume",
                "upload it to Pipelines' own store, and give that address",
                Code.UNSUPPORTED,
            )
        if not is_here or value.startswith(NO_ADDRESSES.get(key, ())):
            return
        raise UserError(
            f"{key} {value}: a local path, which the cluster cannot access",
            f"upload it: python -m lathe_base.storage put {location} "
            f"s3://BUCKET/{Path(location).name} and give that address",
            Code.BAD_PATH,
        )


def image_checks(pipeline: GraphComponent, pool: Pool) -> Iterator[Check]:
    """Whether the pipeline's images exist in their registries, and are built for GPUs if the pool
    has any."""
    for image in step_images(pipeline):
        yield Check(f"image {image}", partial(_check_image, image, pool.gpus))


def _check_support(name: str, stage: str, recipe: Callable[[], Recipe], pool: Pool) -> None:
    settings = recipe()
    try:
        backends.of(settings).check_support(stage, settings, has_gpu=bool(pool.gpus))
    except UserError as error:
        raise UserError(f"recipe {name}: {error.what}", error.hint, error.code) from None


def _check_keys(name: str, recipe: Recipe) -> None:
    if recipe.Production.keys:
        raise UserError(
            f"recipe {name}: Production.keys names {recipe.Production.keys[0]}, which steps cannot "
            "access",
            "kubectl -n lathe create configmap lathe-verification-keys --from-file=signing.pub, "
            "and remove Production.keys",
            Code.UNSUPPORTED,
        )


def _check_layout(name: str, recipe: Recipe, pool: Pool) -> None:
    try:
        _, dp, sharding, _ = mesh_shape(recipe.Distributed, pool.nodes * pool.gpus)
        resolve_batch(recipe, dp * sharding)
    except UserError as error:
        machines = f"NODES={pool.nodes} GPUS={pool.gpus}"
        raise UserError(
            f"recipe {name} with {machines}: {error.what}", error.hint, error.code
        ) from None


def _check_fit(name: str, recipe: Recipe, pool: Pool, placements: Placements) -> None:
    memory = None
    with suppress(StageError):  # the check of the nodes says why they cannot be asked
        context, placement = os.environ.get("LATHE_KFP_CONTEXT"), placements.of_step("pretrain")
        memory = gpu_memory(pool.node_pool, context, placement)
    config = model_config(recipe, recipe.Prepare.vocab_size)
    try:
        require_fit(config, recipe, pool.nodes * pool.gpus, memory, pool.gpus)
    except UserError as error:
        machines = f"NODES={pool.nodes} GPUS={pool.gpus}"
        hint = f"{error.hint} (make submit: NO_TRY=1)"
        raise UserError(f"recipe {name} with {machines}: {error.what}", hint, error.code) from None


def _check_image(image: str, gpus: int) -> None:
    check_image(image)
    if gpus and image_labels(image).get(FLAVOUR) == "cpu":
        raise UserError(
            f"image {image} is CPU-only, but GPUS={gpus} requests GPUs",
            f"make images FLAVOUR=cuda && make push REGISTRY={image.rpartition('/')[0]} "
            "FLAVOUR=cuda, or GPUS=0",
            Code.NO_GPU,
        )
