"""Commands that convert a checkpoint to or from another format."""

from pathlib import Path
from typing import Annotated

import typer

from lathe.cli.app import app
from lathe.cli.options import (
    DATA,
    EVALUATED_MODEL,
    OUTPUT,
    RUN,
    Data,
    Model,
    Output,
    OutputBeside,
    Overrides,
    RecipeName,
    beside,
    input_argument,
    input_option,
    load,
    located,
)
from lathe_base.artifacts.remote import input_path
from lathe_base.console import show
from lathe_base.errors import Code, UserError


@app.command(epilog="Example: lathe export run/int8 --output run/int8-onnx")
def export(
    ctx: typer.Context,
    model: Model = RUN / "int8",
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny",
    override: Overrides = None,
    format: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT",
            help="Additional format to write: gguf, compressed-tensors or openvino; may be "
            "repeated. "
            "Default: the recipe's Export.formats.",
        ),
    ] = None,
    output: OutputBeside = None,
) -> None:
    """Export a checkpoint to a static ONNX graph with KV cache, and verify it against the
    checkpoint.

    The default output is MODEL-onnx. A quantized checkpoint gives an INT8 or INT4 graph.
    """
    named = [f"Export.formats=[{', '.join(format)}]"] if format else []
    settings = load(recipe, [*(override or []), *named])
    from lathe import backends

    model = located(ctx, settings, "model", model, EVALUATED_MODEL)
    data = located(ctx, settings, "data", data, DATA)
    # A recipe's output folder that is the model itself is where it was trained, not for the export.
    if Path(settings.Engine.save_load.output_dir or model) != model:
        output = located(ctx, settings, "output", output, OUTPUT)
    output = output or beside(model, "onnx")
    result = backends.of(settings).export(settings, model, data, output)
    show(exported=result.folder, flavour=result.flavour, bytes=result.n_bytes)


@app.command(epilog="Example: lathe prove run/int8-onnx run/int8 --engine llama.cpp")
def prove(
    exported: Annotated[Path, input_argument("Folder written by `lathe export`.")] = RUN
    / "int8-onnx",
    model: Model = RUN / "int8",
    engine: Annotated[
        str,
        typer.Option(
            help="onnxruntime, openvino, openvino-genai, llama.cpp, vllm or transformers."
        ),
    ] = "onnxruntime",
    data: Data = RUN / "data",
    recipe: RecipeName = "tiny",
    override: Overrides = None,
) -> None:
    """Verify that another engine reproduces the checkpoint's results with an export.

    llama.cpp reads the gguf format, transformers and vllm compressed-tensors, openvino-genai
    openvino. The engine's package must be installed.
    """
    settings = load(recipe, override)
    from lathe.export.prove import prove_in_engine

    result = prove_in_engine(settings, exported, model, data, engine)
    fidelity = result.fidelity
    show(
        engine=result.engine,
        prompts=result.prompts,
        kl_from_float=f"{fidelity.kl:.2g}",
        kl_of_torch=f"{fidelity.torch_kl:.2g}",
        logit_error=f"{fidelity.logit_error:.2g}",
        argmax_agreement=f"{fidelity.argmax_agreement:.1%}",
        torch_agreement=f"{fidelity.torch_agreement:.1%}",
        greedy_agreement=f"{fidelity.greedy_agreement:.1%}",
        perplexity=f"{fidelity.perplexity:.2f}",
        float_perplexity=f"{fidelity.float_perplexity:.2f}",
    )


@app.command("import", epilog="Example: lathe import SmolLM2-135M-Instruct.Q8_0.gguf")
def import_file(
    source: Annotated[
        Path,
        typer.Argument(
            help="GGUF file, folder in the compressed-tensors format, or folder with LoRA adapters "
            "of peft.",
            parser=input_path,
        ),
    ],
    base: Annotated[
        Path | None,
        input_option("Checkpoint or Hugging Face model that LoRA adapters are merged into."),
    ] = None,
    recipe: RecipeName = "base",
    override: Overrides = None,
    output: Output = RUN / "dense",
) -> None:
    """Convert a GGUF file or a compressed-tensors folder to a checkpoint, or merge LoRA adapters.

    Supports Llama (and Mistral), Qwen2, Qwen3, Gemma 3, SmolLM3, Phi-3, OLMo 2, StarCoder2 and
    GPT-2 models, in F32, F16, BF16 or quantized. Weights become float32; precision lost to
    quantization is not restored. Adapters of peft need --base.
    """
    settings = load(recipe, override)
    from lathe.model.compressed_tensors import import_compressed_tensors
    from lathe.model.gguf import import_gguf
    from lathe.model.lora import CONFIG, import_adapters

    if base is not None or (source / CONFIG).is_file():
        config = import_adapters(settings, source, base, output)
    else:
        make = import_compressed_tensors if source.is_dir() else import_gguf
        config = make(settings, source, output)
    show(model=output, layers=config.n_layer, parameters=config.n_params)


@app.command(
    "import-paddle",
    epilog="Example: lathe import-paddle GPT_345M.tar.gz --tokenizer gpt2/ -r gpt-345m",
)
def import_paddle(
    source: Annotated[
        Path,
        typer.Argument(
            help="PaddleFleetX's model.pdparams, or a folder or tar archive that contains it or "
            "the parts of several ranks.",
            parser=input_path,
        ),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json, or folder with GPT-2's BPE files. Default: the files beside the "
            "model."
        ),
    ] = None,
    recipe: RecipeName = "gpt-345m",
    override: Overrides = None,
    output: Output = RUN / "dense",
) -> None:
    """Convert a PaddleFleetX GPT checkpoint. No code in the file is executed.

    Reads downloaded archives as they are, merges the parts of tensor and pipeline parallelism, and
    turns the ranges of a model that PaddleSlim has quantized into an INT8 plan. The number of heads
    comes from the recipe's Model.num_attention_heads, everything else from the file.
    """
    settings = load(recipe, override)
    from lathe.backends.paddle_checkpoint import import_checkpoint

    config = import_checkpoint(settings, source, tokenizer, output)
    show(model=output, layers=config.n_layer, parameters=config.n_params)


@app.command(
    "import-megatron",
    epilog="Example: lathe import-megatron ckpts/ckpts_tmp --tokenizer gpt2/ --output run/dense",
)
def import_megatron_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of one step (global_stepN or iter_NNNNNNN), or the folder with several "
            "steps that names the newest.",
            parser=input_path,
        ),
    ],
    tokenizer: Annotated[
        Path, typer.Option(help="tokenizer.json, or folder with GPT-2's BPE files.")
    ],
    recipe: RecipeName = "megatron-345m",
    override: Overrides = None,
    output: Output = RUN / "dense",
) -> None:
    """Convert a GPT checkpoint of Megatron-LM or Megatron-DeepSpeed. No code in its files is
    executed.

    The parts of tensor and pipeline parallelism are joined. The number of heads comes from the
    checkpoint, or, if the flags of the training are not in it, from the recipe's
    Model.num_attention_heads. Optimizer states are not converted.
    """
    settings = load(recipe, override)
    from lathe.backends.megatron_checkpoint import import_megatron

    config = import_megatron(settings, source, tokenizer, output)
    show(model=output, layers=config.n_layer, parameters=config.n_params)


@app.command("export-paddle", epilog="Example: lathe export-paddle run/dense --dtype float16")
def export_paddle(
    model: Model = RUN / "dense",
    dtype: Annotated[
        str, typer.Option(help="Data type of the weights: float32 or float16.")
    ] = "float32",
    output: Output = RUN / "paddle",
) -> None:
    """Write a checkpoint as PaddleFleetX's mp_00_sharding_00_pp_00/model.pdparams."""
    from lathe.backends.paddle_checkpoint import export_checkpoint

    if dtype not in ("float32", "float16"):
        raise UserError(
            f"--dtype {dtype}: unknown type", "use float32 or float16", Code.INVALID_VALUE
        )
    show(file=export_checkpoint(model, output, dtype))
