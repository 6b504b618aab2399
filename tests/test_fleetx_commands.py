"""PaddleFleetX's command lines with Lathe's commands: the same `-c FILE -o ...`, on toy models."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.command_line import lathe
from tests.support.fleetx import published, write_configurations

FOLDER = "fleetx/ppfleetx/configs/nlp/gpt"
MODEL = "PaddleFleetX_GPT_345M_220826"
SMALL = {
    "Global.device": "cpu",
    "Model.vocab_size": "512",
    "Model.hidden_size": "32",
    "Model.num_attention_heads": "4",
    "Model.ffn_hidden_size": "128",
    "Model.max_position_embeddings": "32",
    "Data.Train.dataset.max_seq_len": "32",
    "Data.Eval.dataset.max_seq_len": "32",
    "Engine.eval_iters": "1",
    "Engine.mix_precision.dtype": "float32",
    "Engine.max_steps": "2",
    "Export.prompts": "2",
    "Export.new_tokens": "4",
}
"""In place of the published shape: 24 layers, because the published plans name them."""

LR = {"Optimizer.lr.decay_steps": "72000", "Compress.pretrained": f"./{MODEL}"}
NO_DROPOUT = {"Model.hidden_dropout_prob": "0.0", "Model.attention_probs_dropout_prob": "0.0"}
PRUNE = {
    **{"Engine.max_steps": "2", "Optimizer.weight_decay": "0.0"},
    **{"Optimizer.lr.max_lr": "2.5e-5", "Optimizer.lr.min_lr": "5.0e-6"},
    **(LR | NO_DROPOUT),
}
QAT = {
    **{"Engine.max_steps": "2", "Optimizer.weight_decay": "0.02"},
    **{"Optimizer.lr.max_lr": "5.0e-6", "Optimizer.lr.min_lr": "1.0e-6"},
    **(LR | NO_DROPOUT),
}
TWO_SHARDS = {
    "Distributed.sharding.sharding_degree": "2",
    "Global.local_batch_size": "4",
    "Global.micro_batch_size": "2",
}
EVALUATE = {
    **NO_DROPOUT,
    "Engine.save_load.ckpt_dir": "./output",
    "Offline_Eval.eval_path": "./lambada_test.jsonl",
    "Offline_Eval.cloze_eval": "True",
}
FROM_OUTPUT = NO_DROPOUT | {"Engine.save_load.ckpt_dir": "./output"}


def run(
    verb: str, file: str, settings: dict[str, str], cwd: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    options = [f"-o{key}={value}" for key, value in (SMALL | settings).items()]
    command = [*warm.python(), "-m", "lathe", verb, *more, "-c", f"{FOLDER}/{file}", *options]
    environment = {**os.environ, **warm.for_children(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of PaddleFleetX with its data set, model and LAMBADA, all of them small."""
    home = tmp_path_factory.mktemp("home")
    write_configurations(home)
    texts = [f"Line {i} is read, and then line {i} is read again." for i in range(400)]
    corpus = "\n".join(json.dumps({"text": text}) for text in texts)
    (home / "corpus.jsonl").write_text(corpus, encoding="utf-8")
    (home / "lambada_test.jsonl").write_text(corpus[: corpus.index("\n", 600)], encoding="utf-8")
    options = ("-o", "Prepare.vocab_size=300", "-o", "Data.Train.dataset.split=[800, 100, 100]")
    made = lathe("prepare", "--source", "corpus.jsonl", *options, "--output", "data", cwd=home)
    assert made.returncode == 0, made.stderr
    run("pretrain", "pretrain_gpt_345M_single_card.yaml", {}, home, "--output", MODEL)
    return home


@published
@pytest.mark.slow
def test_pruning_and_what_follows_it(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    home = tmp_path / "home"
    pruned = run("prune", "prune_gpt_345M_single_card.yaml", PRUNE, home)
    assert f"model: ./{MODEL}, from the recipe's Compress.pretrained" in pruned.stderr
    assert "model: output" in pruned.stdout
    evaluated = run("evaluate", "eval_pruned_gpt_345M_single_card.yaml", EVALUATE, home)
    assert re.search(r"cloze examples: \d+\ncloze accuracy: ", evaluated.stdout)
    exported = run("export", "generation_pruned_gpt_345M_single_card.yaml", FROM_OUTPUT, home)
    assert "exported: output-onnx\nflavour: fp32" in exported.stdout
    text = run(
        *("generate", "generation_pruned_gpt_345M_single_card.yaml"),
        FROM_OUTPUT | {"Generation.max_dec_len": "4"},
        home,
        "Line 7 is",
    )
    assert text.stdout.startswith("Line 7 is")


@published
@pytest.mark.slow
def test_quantization_and_what_follows_it(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    home = tmp_path / "home"
    run("quantize", "qat_gpt_345M_single_card.yaml", QAT, home)
    plan = json.loads((home / "output" / "config.json").read_text())["lathe"]["quantization"]
    assert len(plan["activation_scales"]) == 4 * 24 - 7  # all but those of the published plan
    evaluated = run("evaluate", "eval_qat_gpt_345M_single_card.yaml", EVALUATE, home)
    assert "computed by: onnxruntime" in evaluated.stdout
    exported = run("export", "generation_qat_gpt_345M_single_card.yaml", FROM_OUTPUT, home)
    assert "exported: output-onnx\nflavour: int8" in exported.stdout


@published
@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "file", "settings"),
    [
        ("prune", "prune_gpt_345M_single_card.yaml", PRUNE | TWO_SHARDS),
        ("quantize", "qat_gpt_6.7B_sharding16.yaml", QAT | TWO_SHARDS),
        ("quantize", "qat_gpt_345M_mp8.yaml", QAT | {"Distributed.mp_degree": "2"}),
    ],
)
def test_compression_in_two_processes(
    verb: str, file: str, settings: dict[str, str], home: Path, tmp_path: Path
) -> None:
    output = {"Engine.save_load.output_dir": str(tmp_path / "output")}
    done = run(verb, file, settings | output, home)
    assert f"model: {tmp_path / 'output'}" in done.stdout
    assert done.stderr.count("ignoring keys of PaddleFleetX") == 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, the second where commands look by default, and their data."""
    home = tmp_path_factory.mktemp("models")
    texts = [f"Line {i} is read, and then line {i} is read again." for i in range(400)]
    corpus = "\n".join(json.dumps({"text": text}) for text in texts)
    (home / "corpus.jsonl").write_text(corpus, encoding="utf-8")
    small = [f"-o{key}={value}" for key, value in (SMALL | {"Model.num_layers": "1"}).items()]
    options = ("-o", "Prepare.vocab_size=300", *small)
    made = lathe("prepare", "--source", "corpus.jsonl", *options, cwd=home)
    assert made.returncode == 0, made.stderr
    for seed, output in ((1, "mine"), (2, "run/dense"), (3, "run/int8")):
        done = lathe("pretrain", *small, f"-oGlobal.seed={seed}", "--output", output, cwd=home)
        assert done.returncode == 0, done.stderr
    return home


def parent(folder: Path) -> str:
    """Digest of the model that a checkpoint was made from."""
    return str(json.loads((folder / "lathe.json").read_text())["parent"])


def test_the_models_path_in_a_recipe_is_the_model_that_is_pruned(models: Path) -> None:
    command = ("prune", "-oEngine.max_steps=0", "-oData.Train.dataset.max_seq_len=32")
    named = lathe(*command, "-oCompress.pretrained=mine", "--output", "named", cwd=models)
    given = lathe(
        *command, "mine", "-oCompress.pretrained=run/dense", "--output", "given", cwd=models
    )
    default = lathe(*command, "--output", "default", cwd=models)
    assert {done.returncode for done in (named, given, default)} == {0}, named.stderr
    assert "model: mine, from the recipe's Compress.pretrained" in named.stderr
    assert (
        "mine is used as model, not run/dense of the recipe's Compress.pretrained" in given.stderr
    )
    digests = [parent(models / name) for name in ("named", "given", "default")]
    assert digests[0] == digests[1] != digests[2]


def test_the_checkpoints_path_in_a_recipe_is_the_model_that_is_evaluated(models: Path) -> None:
    done = lathe("evaluate", "-oEngine.save_load.ckpt_dir=./mine", cwd=models)
    assert done.returncode == 0, done.stderr
    assert "evaluation: mine-eval" in done.stdout


def test_a_training_does_not_resume_from_another_folder(models: Path) -> None:
    done = lathe("pretrain", "-oEngine.save_load.ckpt_dir=mine", cwd=models)
    assert done.returncode == 2
    assert "a training resumes from its own output folder, run/dense" in done.stderr


def test_a_recipe_that_compresses_is_not_silently_trained_dense(models: Path) -> None:
    done = lathe("pretrain", "-oCompress.Prune.enable=True", "--data", "nowhere", cwd=models)
    assert "Compress.Prune.enable is True, but pretrain trains the whole model" in done.stderr


def test_a_checkpoint_of_paddlefleetx_names_the_command_that_imports_it(models: Path) -> None:
    (models / "downloaded").mkdir()
    (models / "downloaded" / "model.pdparams").write_bytes(b"")
    for path in ("downloaded", "downloaded/model"):
        done = lathe("prune", f"-oCompress.pretrained=./{path}", cwd=models)
        assert done.returncode == 2
        assert f"lathe import-paddle {path}" in done.stderr
