"""The model card of a checkpoint: a README.md with Hugging Face's metadata at its top.

It contains the facts in `config.json` and `lathe.json`, but not the time, place or speed of
training, so that the same training writes the same card. `lathe.report.cards.release` adds
evaluation results.
"""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import PurePath
from typing import Any

from lathe.data.cleaning import counted
from lathe.model.architecture import HEAD
from lathe.model.config import GPTConfig
from lathe_base.artifacts.metadata import Corpus, Origin
from lathe_base.config.settings import CardSettings, QuantizationSettings, ServingSettings
from lathe_base.config.text import write
from lathe_base.pages import is_sealed, render_markdown
from lathe_base.storage.ownership import FileKind

README = "README.md"
CARD = FileKind("a model card", is_sealed)
TEMPLATE = "lathe/model/card.md.j2"
TASK = "text-generation"
IMPORTED = {
    "paddlefleetx": "a checkpoint of PaddleFleetX",
    "megatron": "a checkpoint of Megatron",
    "gguf": "a GGUF file",
}
"""What a checkpoint was imported from, by its engine."""
HUB = "hf://"
IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")


def checkpoint_card(config: GPTConfig, meta: Mapping[str, Any]) -> str:
    """The card of a checkpoint without evaluation results.

    Args:
        meta: `lathe.json`; `files` is not read.
    """
    keys = {key: meta[key] for key in ("ancestors", "data") if meta.get(key)}
    values = card_values(config, meta, Origin.model_validate(keys))
    return render_markdown(TEMPLATE, **values)


def card_values(
    config: GPTConfig, meta: Mapping[str, Any], origin: Origin, name: str | None = None
) -> dict[str, Any]:
    """The template's values for a model.

    Args:
        meta: `lathe.json`; empty for a model of Hugging Face's form.
        name: the model's name; default: the recipe's `Serving.model_name`.
    """
    card = card_settings(meta)
    return {
        "front": write(front_matter(config, meta, origin)),
        "name": name or model_name(meta),
        "served": model_name(meta),
        "version": meta.get("lathe"),
        "card": card,
        "config": config,
        "heads": shown_counts(config.n_head),
        "groups": shown_counts(config.n_kv_head),
        "channels": shown_counts(config.n_inner),
        "is_readable_by_transformers": is_plain(config),
        "steps": list(history_steps(config, meta)),
        "losses": measured_losses(meta),
        "formats": describe_formats(config),
        "origin": origin,
        "corpora": [(corpus, source_name(corpus)) for corpus in _corpora(origin)],
        "left_out": [
            (source_name(corpus), counts)
            for corpus in _corpora(origin)
            if (counts := counted(corpus.left_out))
        ],
    }


def card_settings(meta: Mapping[str, Any]) -> CardSettings:
    """The recipe's group Card, with defaults for checkpoints of earlier versions."""
    return CardSettings.model_validate(meta.get("recipe", {}).get("Card", {}))


def model_name(meta: Mapping[str, Any]) -> str:
    """The recipe's `Serving.model_name`."""
    default = ServingSettings().model_name
    return str(meta.get("recipe", {}).get("Serving", {}).get("model_name", default))


def front_matter(config: GPTConfig, meta: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """The metadata of a card, as https://huggingface.co/docs/hub/model-cards defines it."""
    card = card_settings(meta)
    sources = [corpus.source or "" for corpus in _corpora(origin)]
    hub = [s.removeprefix(HUB).split(":")[0] for s in sources if s.startswith(HUB)]
    license: dict[str, str] = {}
    if IDENTIFIER.fullmatch(card.license):
        license = {"license": card.license.lower()}  # an SPDX identifier
    elif card.license:
        license = {"license": "other", "license_name": card.license}
    tags = ["lathe", config.architecture.model_type]
    # The stage of a later checkpoint is another one: then only unequal layers show the pruning.
    if meta.get("stage") == "prune" or not config.is_uniform:
        tags.append("pruned")
    if config.quantization is not None:
        tags.append(f"int{config.quantization.weight_bits}")
    known = {
        **license,
        "language": [card.language] if card.language else None,
        "library_name": "transformers" if is_plain(config) else "lathe",
        "pipeline_tag": TASK,
        "tags": tags,
        "base_model": origin.base_model,
        "datasets": list(dict.fromkeys(hub)),
    }
    return {key: value for key, value in known.items() if value}


def is_plain(config: GPTConfig) -> bool:
    """Whether transformers can run the checkpoint."""
    return config.is_uniform and config.quantization is None


def history_steps(config: GPTConfig, meta: Mapping[str, Any]) -> Iterable[str]:
    """A sentence for each step in the model's history."""
    recipe, step = meta.get("recipe", {}), meta.get("metrics", {}).get("step")
    stage = meta.get("stage")
    compress = recipe.get("Compress", {})
    # A head size that may differ from hidden size / heads does not tell how many there were.
    full = None if config.architecture.has_head_dim else config.n_embd // config.head_dim
    if stage == "prune" or set(config.n_head) != {full or config.n_head[0]}:
        how = compress.get("Prune", {}).get("criterion")
        by = f", by the criterion `{how}`" if stage == "prune" and how else ""
        yield (
            f"Pruned{by}: its layers keep {shown_counts(config.n_head)}"
            f"{f' of {full}' if full else ''} attention heads "
            f"and {shown_counts(config.n_inner)} FFN channels."
        )
    if config.quantization is not None:
        earlier = {"rounding": "nearest"}  # of checkpoints that do not say
        given = earlier | compress.get("Quantization", {})
        known = {key: x for key, x in given.items() if key in QuantizationSettings.model_fields}
        settings = QuantizationSettings.model_validate(known)
        steps = recipe.get("Engine", {}).get("max_steps")
        how = "with GPTQ" if settings.uses_gptq(steps) else "to nearest"
        yield (
            f"Quantized: {len(config.quantization.linears)} of "
            f"{len(config.linear_names()) + 1} linears, first rounded {how}."
        )
    if compress.get("Distill", {}).get("teacher"):
        yield "Distilled from a teacher during training."
    if step is not None:
        trained = f"Trained for {step:,} step{'s' * (step != 1)}" if step else "Not trained"
        yield f"{trained} in the stage `{stage}`."
    elif stage == "import":
        yield f"Imported from {IMPORTED.get(meta.get('engine', ''), 'another format')}."


def measured_losses(meta: Mapping[str, Any]) -> dict[str, float]:
    """The losses in `lathe.json`, in nats per token, that were measured."""
    names = {
        "first_eval_loss": "validation loss before the first step",
        "eval_loss": "validation loss after the last step",
        "loss": "training loss of the last step",
    }
    metrics = meta.get("metrics", {})
    losses = {said: metrics[key] for key, said in names.items() if metrics.get(key) is not None}
    return {said: value for said, value in losses.items() if math.isfinite(value)}


def source_name(corpus: Corpus) -> str:
    """The address of a corpus, or the name of a file or folder without its path."""
    if corpus.source is None:
        return "not stated"
    return corpus.source if "://" in corpus.source else PurePath(corpus.source).name


def shown_counts(counts: Iterable[int]) -> str:
    """`12`, or `9 to 12` if layers differ."""
    low, high = min(known := list(counts)), max(known)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _corpora(origin: Origin) -> list[Corpus]:
    return origin.data.corpora if origin.data else []


def describe_formats(config: GPTConfig) -> dict[str, str]:
    """The linears of each format: `INT8 per channel, INT8 inputs` -> `attn.c_attn (all blocks)`."""
    plan = config.quantization
    by_format: dict[str, list[str]] = {}
    for name in (*config.linear_names(), HEAD):
        linear_format = plan.linears.get(name) if plan else None
        by_format.setdefault(str(linear_format or "float"), []).append(name)
    if plan and plan.kv_cache_bits:
        by_format["INT8, a scale per channel"] = ["keys and values in the KV cache"]
    if plan and plan.position_embedding:
        by_format["INT8 per position"] = [config.architecture.embeddings[1]]
    return {fmt: abbreviated(names, config.n_layer) for fmt, names in by_format.items()}


def abbreviated(names: Iterable[str], n_layer: int) -> str:
    """Paths of linears in few words: `attn.c_attn (blocks 0-3, 5), lm_head`."""
    blocks: dict[str, list[int]] = {}
    for name in names:
        _, block, linear = name.split(".", 2) if "." in name else ("", "", name)
        blocks.setdefault(linear, []).extend([int(block)] if block else [])
    parts = []
    for linear, layers in blocks.items():
        # Within a run of consecutive blocks, block and position grow alike.
        runs = [
            [block for _, block in run]
            for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])
        ]
        shown = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
        some = f"block{'s' if len(layers) > 1 else ''} {shown}"
        where = "all blocks" if len(layers) == n_layer else some
        parts.append(f"{linear} ({where})" if layers else linear)
    return ", ".join(parts)
