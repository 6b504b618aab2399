"""Preflight checks of a run on the cluster, which report all problems together."""

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kfp.dsl.graph_component import GraphComponent

from components.machines import Pool
from components.stages import component
from lathe import backends
from lathe.data.newest import NEWEST
from lathe.train.batch import resolve_batch
from lathe.train.layout import mesh_shape
from lathe.train.plan import require_fit
from lathe.train.shape import model_config
from lathe_base import storage
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Placements, Recipe
from lathe_base.errors import StageError, UserError
from lathe_base.storage.splits import locate
from lathe_launch.cluster.nodes import gpu_memory, node_pool_shortage
from pipelines.cluster.registry import check_image, image_labels
from pipelines.cluster.results import ResultsReader
from pipelines.cluster.server import Client, connect
from pipelines.commands.arguments import argument, recipe_names, wrong_names
from pipelines.commands.inputs import (
    SEARCHED,
    STORE_SECONDS,
    Problems,
    check_goal,
    check_paths,
    check_steps,
    within,
)
from pipelines.commands.variants import run_pool
from pipelines.compiler.compile import step_images
from pipelines.compiler.graph import steps

FLAVOUR = "lathe.flavour"
"""The image label with its flavour, cpu or cuda."""

NO_ADDRESSES = {"corpus": ("python", "hf://"), "tokenizer": ("train",)}
"""Values or prefixes that are allowed in addition to addresses."""


class Preflight(Problems):
    """The checks of a run on the cluster."""

    def server(self) -> Client | None:
        """An authenticated client."""
        try:
            return connect()
        except UserError as error:
            self.problems.append(error)
        except StageError as error:
            look = "kubectl -n kubeflow logs deployment/ml-pipeline"
            self.problems.append(UserError(str(error), f"try again later; check its log: {look}"))
        return None

    def arguments(self, name: str, arguments: dict[str, Any], mounts: Sequence[str] = ()) -> None:
        """Check argument names, and that addresses are reachable from a cluster.

        Args:
            mounts: mount paths of the pods' volumes.
        """
        self._mounts = mounts
        self.problems += wrong_names(name, arguments)
        for key in ("model", "corpus", "chat", "tokenizer", "cloze", "production"):
            if value := arguments.get(key):
                self.check(key, _check_reachable, key, value, self._mounts)
        self.check("target", check_goal, name, arguments)

    def recipes(
        self, name: str, arguments: dict[str, Any], placement: Placements, is_tried: bool = True
    ) -> None:
        """Check every recipe of the pipeline: settings, backend support, and layout on the pool.

        Args:
            is_tried: whether to reject a shape that cannot be divided, or does not fit the GPU
                memory in the nodes' labels.
        """
        pool = run_pool(arguments)
        for key, recipe in recipe_names(name, arguments).items():
            settings = self.check(recipe, load_recipe, recipe, arguments["overrides"])
            if settings:
                self.check(recipe, check_paths, settings, arguments)
            if settings and key == "recipe":
                self.check(recipe, check_steps, settings)
                self.sources(name, arguments, settings)
                self.check(recipe, _check_keys, recipe, settings)
            has_chats = bool(arguments.get("chat"))
            stages = {step.stage for step in steps(name, has_chats) if step.recipe == key}
            verbs = {"compress"} if (name, key) == SEARCHED else stages
            if settings:
                for verb in sorted(verbs):
                    self.check(recipe, _check_support, recipe, verb, settings, pool)
            trains = any(component(stage).step.machine == "training" for stage in stages)
            if settings and trains and pool.gpus:
                settings = load_recipe(recipe, [*pool.overrides, *arguments["overrides"]])
                before = len(self.problems)
                self.check(recipe, _check_layout, recipe, settings, pool)
                if is_tried and "pretrain" in stages and len(self.problems) == before:
                    self.check(recipe, _check_fit, recipe, settings, pool, placement)

    def sources(self, name: str, arguments: dict[str, Any], recipe: Recipe) -> None:
        """Check the recipe's text and tokenizer, unless arguments replace them."""
        if arguments.get("chat"):  # whose tokenizer is the model's, unless one is given
            return
        for key, value in (
            ("corpus", recipe.Prepare.source),
            ("tokenizer", recipe.Prepare.tokenizer),
        ):
            if argument(name, key) is not None and not arguments.get(key):
                self.check(key, _check_reachable, key, value, self._mounts)

    def images(self, pipeline: GraphComponent, pool: Pool) -> None:
        """Check that the pipeline's images exist in their registries, and that they are built for
        GPUs if the pool has any."""
        for image in step_images(pipeline):
            self.check(f"image {image}", _check_image, image, pool.gpus)

    def nodes(self, pool: Pool, placements: Placements, strict: bool) -> None:
        """Warn of missing machines, or raise an error if `strict`."""
        if not pool.gpus:
            return
        context = os.environ.get("LATHE_KFP_CONTEXT")
        placement = placements.of_step("pretrain")
        wanted = (pool.node_pool, pool.nodes, pool.gpus, context, placement)
        shortage = self.check(f"node pool {pool.node_pool}", node_pool_shortage, *wanted)
        if shortage and strict:
            self.problems.append(shortage)
        elif shortage:
            self.unchecked.append(
                f"warning: {shortage.what}: pods wait until an autoscaler adds nodes, or you do\n"
                f"  hint: {shortage.hint}; STRICT=1 (--strict) refuses to wait"
            )

    def store(self, root: str, client: Client | None) -> None:
        """Check that an object can be written and deleted below the given pipeline root, or else
        that the server's own root, to which steps write with their own keys, can be read from
        here."""
        if not root and client:
            try:
                default = ResultsReader(client).readable_default_root()
                within(STORE_SECONDS, default, storage.exists, f"{default}/")
            except (UserError, StageError) as error:
                self.unchecked.append(f"object store: not checked: {error}")
        elif not root:
            return
        elif urlsplit(root).scheme not in ("s3", "minio"):
            self.unchecked.append(f"object store: not checked: {root} is not on S3")
        elif not os.environ.get("AWS_ACCESS_KEY_ID") and "LATHE_S3_SECRET_DIR" not in os.environ:
            self.unchecked.append(
                f"object store: not checked: AWS_ACCESS_KEY_ID is not set here for {root}"
            )
        else:
            self.check("object store", _check_writable, root)


def _check_reachable(key: str, value: str, mounts: Sequence[str]) -> None:
    location = locate(value.removeprefix(NEWEST)).location
    is_here = storage.uri_scheme(location) == "file" or not storage.is_remote(location)
    if is_here and any(f"{location}/".startswith(f"file://{mount}/") for mount in mounts):
        if key != "model":
            return
        raise UserError(
            f"model {value}: Pipelines cannot import a model from a volume",
            "upload it to Pipelines' own store, and give that address",
        )
    if not is_here or value.startswith(NO_ADDRESSES.get(key, ())):
        return
    raise UserError(
        f"{key} {value}: a local path, which the cluster cannot access",
        f"upload it: python -m lathe_base.storage put {location} "
        f"s3://BUCKET/{Path(location).name} and give that address",
    )


def _check_support(name: str, stage: str, recipe: Recipe, pool: Pool) -> None:
    try:
        backends.of(recipe).check_support(stage, recipe, has_gpu=bool(pool.gpus))
    except UserError as error:
        raise UserError(f"recipe {name}: {error.what}", error.hint) from None


def _check_keys(name: str, recipe: Recipe) -> None:
    if recipe.Production.keys:
        raise UserError(
            f"recipe {name}: Production.keys names {recipe.Production.keys[0]}, which steps cannot "
            "access",
            "kubectl -n lathe create configmap lathe-verification-keys --from-file=signing.pub, "
            "and remove Production.keys",
        )


def _check_layout(name: str, recipe: Recipe, pool: Pool) -> None:
    try:
        _, dp, sharding, _ = mesh_shape(recipe.Distributed, pool.nodes * pool.gpus)
        resolve_batch(recipe, dp * sharding)
    except UserError as error:
        machines = f"NODES={pool.nodes} GPUS={pool.gpus}"
        raise UserError(f"recipe {name} with {machines}: {error.what}", error.hint) from None


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
        raise UserError(f"recipe {name} with {machines}: {error.what}", hint) from None


def _check_image(image: str, gpus: int) -> None:
    check_image(image)
    if gpus and image_labels(image).get(FLAVOUR) == "cpu":
        raise UserError(
            f"image {image} is CPU-only, but GPUS={gpus} requests GPUs",
            f"make images FLAVOUR=cuda && make push REGISTRY={image.rpartition('/')[0]} "
            "FLAVOUR=cuda, or GPUS=0",
        )


def _check_writable(root: str) -> None:
    probe = f"{root.rstrip('/')}/.lathe-probe-{uuid.uuid4().hex}"
    storage.write_text(probe, "")
    storage.remove(probe)
