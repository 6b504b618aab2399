"""Claims in the README, each with the tests that verify it.

Keys are quotes from the README; values are tests, from any suite.
"""

import re

import pytest

from tests.documents.pages import ROOT, TEXTS

README = " ".join(TEXTS["README.md"].split())
CLAIMS = {
    "Lathe trains or fine-tunes a GPT-2/3 or Llama-family language model": [
        "tests/train/test_trainer.py::test_steps_equal_a_hand_written_loop",
        "tests/train/test_families.py::test_training_continues_from_a_checkpoint",
    ],
    "The steps are components of a Kubeflow pipeline": [
        "tests/pipelines/test_golden.py::test_no_drift",
    ],
    "the same pipeline runs, unchanged, on a laptop with no cluster, no Docker and no GPU": [
        "tests/pipelines/test_full.py"
        "::test_full_deploys_and_qat_of_its_model_is_stopped_by_the_gate",
    ],
    "`make run` trains a small model on the English prose that ships with Python itself": [
        "tests/pipelines/test_tiny.py::test_the_default_run_learns_and_compresses",
        "tests/data/test_sources.py::test_python_prose",
    ],
    "It ends with a table like this one": [
        "tests/documents/test_readme.py"
        "::test_the_table_of_the_first_run_has_rows_that_a_run_prints",
        "tests/pipelines/test_tiny.py::test_the_default_run_learns_and_compresses",
    ],
    "and the gate passes": [
        "tests/pipelines/test_tiny.py::test_the_default_run_learns_and_compresses",
    ],
    "OpenAI clients work too": [
        "tests/serve/gateway/test_completions.py::test_greedy_is_the_checkpoints_own",
    ],
    "Use your own text, tokenizer, test set and settings": [
        "tests/pipelines/test_makefile.py::test_variables_become_options",
        "tests/pipelines/test_makefile.py::test_overrides_after_two_dashes",
    ],
    "**Trains** GPT-2/3, Llama, Mistral, Qwen, Gemma 3, SmolLM3 and Phi-3 models": [
        "tests/train/test_families.py::test_steps_equal_a_loop_with_transformers",
        "tests/model/test_families.py::test_logits_equal_transformers",
    ],
    "with data, tensor and pipeline parallelism and sharding in any combination": [
        "tests/train/test_layouts.py::test_layout_traces_the_losses_of_one_process",
        "tests/train/test_layouts.py::test_eight_processes",
    ],
    "resumes from its last saved state, bit for bit on the same number of processes": [
        "tests/train/test_resume.py::test_killed_run_resumes_bit_identically",
        "tests/train/test_resume.py::test_twenty_kills_at_random_moments",
    ],
    "**Prunes** attention heads, FFN channels and layers, by weights or by data": [
        "tests/compress/test_widths.py::test_layers_go_where_the_loss_is_least",
        "tests/compress/test_criteria.py::test_every_criterion_can_be_named_in_a_recipe",
    ],
    "with distillation": [
        "tests/train/test_distill.py::test_pruned_model_learns_from_the_dense_one",
    ],
    "**quantizes** to INT8 or INT4, except sensitive layers": [
        "tests/compress/test_sensitivity.py::test_quantize_leaves_in_float_what_was_chosen",
        "tests/compress/test_sensitivity.py::test_int4_int8_and_float_beside_each_other",
    ],
    "`PIPELINE=compress` chooses widths and formats": [
        "tests/pipelines/test_compress.py::test_the_pipeline_and_the_verb_are_one_search",
    ],
    "**Proves** every export against its checkpoint": [
        "tests/export/test_stage.py::test_export",
        "tests/export/test_stage.py::test_a_failed_proof_leaves_nothing",
        "tests/export/test_stage.py::test_a_changed_graph_fails_the_proof",
    ],
    "passes a model only if a paired non-inferiority test shows that it is as good as its "
    "baseline, within a margin you set": [
        "tests/evaluate/test_gate.py::test_verdicts",
        "tests/config/test_recipe.py::test_no_shipped_recipe_lets_through_what_is_not_proven",
        "tests/evaluate/test_intervals.py::test_the_interval_of_losses_covers_as_often_as_it_says",
        "tests/pipelines/test_summary.py::test_a_run_prints_its_verdict_and_deploys_what_passed",
        "tests/pipelines/test_golden.py"
        "::test_a_model_goes_live_only_where_releases_are_named_and_the_gate_passes_it",
    ],
    "**Attests and signs** the inputs and outputs of every step": [
        "tests/provenance/test_chain.py::test_every_statement_is_one_of_in_toto",
        "tests/provenance/test_signature.py::test_a_signed_folder_verifies_wherever_it_is",
    ],
    "`lathe verify --chain` traces a model back to its corpus": [
        "tests/provenance/test_chain.py::test_it_leads_from_the_export_to_the_corpus",
    ],
    "**Exports** to ONNX, GGUF (llama.cpp, Ollama), compressed-tensors (vLLM, transformers) and": [
        "tests/export/test_formats.py::test_transformers_reads_the_gguf_file_that_was_written",
        "tests/export/test_formats.py::test_transformers_computes_what_compressed_tensors_holds",
        "tests/export/test_formats.py::test_openvino_genai_computes_what_torch_does",
    ],
    "and proves each file in the engine that reads it": [
        "tests/export/test_formats.py::test_a_proof_in_an_engine",
    ],
    "**Serves** on Triton, with onnxruntime or OpenVINO": [
        "tests/serve/test_backend.py::test_greedy_is_the_checkpoints_own",
        "tests/serve/runtime/test_openvino.py::test_triton_serves_with_openvino",
    ],
    "continuous batching, streaming, beam search and OpenAI's HTTP interface": [
        "tests/serve/runtime/test_batcher.py::test_everyone_gets_what_they_get_alone",
        "tests/serve/runtime/test_batcher.py::test_beam_search_is_torchs",
        "tests/serve/gateway/test_completions.py::test_a_stream_is_the_whole_in_pieces",
    ],
    "compares models in the browser": [
        "tests/serve/test_playground.py::test_two_models_answer_side_by_side",
    ],
    "rolls out releases and rolls them back": [
        "tests/release/test_releases.py::test_deploy_again_another_and_back",
        "tests/launch/test_rollout.py::test_a_rollout_that_hangs_goes_back",
    ],
    "**Runs on a cluster** as a Kubeflow pipeline, with multi-node training as TrainJobs": [
        "tests/pipelines/test_submit.py::test_followed_to_its_success",
        "tests/launch/test_training.py::test_two_nodes_one_of_which_is_preempted",
    ],
    "and artifacts in an object store": [
        "tests/pipelines/test_run.py::test_a_run_whose_artifacts_all_live_in_a_store",
    ],
    "PaddleSlim can prune, quantize and evaluate the same checkpoints": [
        "tests/paddle/test_stages.py::test_quantization_is_what_the_torch_engine_reads",
        "tests/paddle/test_stages.py::test_evaluation_is_torchs",
        "tests/paddle/test_gpt.py::test_paddleslim_prunes_the_same_heads_and_channels",
    ],
    "PaddleFleetX checkpoints can be imported and exported": [
        "tests/paddle/test_pdparams.py::test_there_and_back",
        "tests/paddle/test_pdparams.py::test_paddle_saves_what_is_read_and_loads_what_is_written",
    ],
    "Nearly every step is also a command": [
        "tests/documents/test_readme.py::test_nearly_every_step_is_a_command",
    ],
    "Settings come from a YAML recipe with PaddleFleetX's key names": [
        "tests/config/test_recipe.py::test_a_fleetx_file_reads_as_it_is",
    ],
    "an invalid setting is reported with its file, line and the closest valid key": [
        "tests/config/test_recipe.py::test_a_mistake_in_a_file_names_its_place",
    ],
    "Outputs only replace earlier outputs of the same kind": [
        "tests/storage/test_files.py::test_nothing_but_our_own_is_replaced",
    ],
    "every artifact is verified when it is read": [
        "tests/storage/test_verified.py::test_one_flipped_byte_is_found_whatever_the_times_say",
    ],
    "it never imports Kubeflow Pipelines": [
        "tests/test_floor_plan.py::test_a_library_is_imported_where_it_belongs",
    ],
}


@pytest.mark.parametrize(("claim", "tests"), CLAIMS.items())
def test_a_claim_stands_in_readme_and_its_tests_exist(claim: str, tests: list[str]) -> None:
    assert claim in README
    for node in tests:
        file, _, name = node.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(?:async )?def {name}\(", text, re.M), node


def test_every_point_of_what_it_does_has_a_claim() -> None:
    points = re.findall(r"^- \*\*.+$", TEXTS["README.md"], re.M)
    assert len(points) >= 7
    for point in points:
        assert any(claim in point for claim in CLAIMS), point
