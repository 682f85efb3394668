"""lm-evaluation-harness, `--model hf`, on a task of one's own: a run folder as it is, and the log-likelihoods that we compute."""

import json
import sys

import pytest
import torch

import depthmix
from train import small

DOCUMENTS = [
    {"question": "The sea", "choices": [" is deep", " goes out", " and"], "answer": 0},
    {"question": "A small boat goes", "choices": [" wide", " out at dawn"], "answer": 1},
]
TASK = """
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@torch.no_grad()
def log_likelihood(trained, question, choice):
    """Of a choice after a question, from one forward of all tokens."""
    ids = trained.tokenizer.encode(question + choice).ids
    known = len(trained.tokenizer.encode(question).ids)
    logs = trained.model(torch.tensor([ids]))[0].log_softmax(-1)
    return sum(logs[at - 1, ids[at]].item() for at in range(known, len(ids)))


def test_a_run_folder_through_model_hf_on_a_local_task(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[eval]'")
    from lm_eval.__main__ import cli_evaluate

    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(line) + "\n" for line in DOCUMENTS))
    (tmp_path / "own_choice.yaml").write_text(TASK.format(documents=documents))
    run = small.run().path
    given = f"--model hf --model_args pretrained={run},trust_remote_code=True --tasks own_choice --device cpu"
    given += f" --include_path {tmp_path} --output_path {tmp_path}/out --log_samples --batch_size 2"
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", *given.split()])
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    cli_evaluate()

    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_own_choice_*.jsonl")
    trained, right = depthmix.load(run, "cpu"), []
    found = {line["doc"]["question"]: line for line in map(json.loads, samples.read_text().splitlines())}
    for document in DOCUMENTS:
        wanted = [log_likelihood(trained, document["question"], choice) for choice in document["choices"]]
        theirs = [float(answers[0][0]) for answers in found[document["question"]]["resps"]]
        assert theirs == pytest.approx(wanted, rel=1e-4)
        right.append(wanted.index(max(wanted)) == document["answer"])
    accuracy = json.loads(results.read_text())["results"]["own_choice"]["acc,none"]
    assert accuracy == pytest.approx(sum(right) / len(right))
