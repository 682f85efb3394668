"""Our own decoder with a head for classes: trained, saved, loaded, begun from a language model."""

import json

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForSequenceClassification

from depthmix.hf import DepthmixForSequenceClassification
from hf.tiny import LENGTH, causal_lm, hf_config, tokens


@pytest.mark.parametrize("mixer", ["attnres", "dca"])
def test_a_language_model_becomes_a_classifier_that_is_saved_and_loaded(mixer, tmp_path):
    model = causal_lm(mixer, pad_token_id=0)
    model.save_pretrained(tmp_path / "lm")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3)
    assert type(classifier) is DepthmixForSequenceClassification
    ids = tokens(2).clamp(min=1)
    ids[0, 5:] = 0  # padding
    hidden = model.model(ids).last_hidden_state
    out = classifier(ids, labels=torch.tensor([0, 2]))
    torch.testing.assert_close(out.logits, classifier.score(torch.stack([hidden[0, 4], hidden[1, LENGTH - 1]])))
    out.loss.backward()
    assert all(p.grad is not None for p in classifier.parameters())
    classifier.save_pretrained(tmp_path / "classes")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classes")
    assert torch.equal(again(ids).logits, out.logits)
    said = json.loads((tmp_path / "classes" / "config.json").read_text())["auto_map"]
    assert said["AutoModelForSequenceClassification"] == "modeling_depthmix.DepthmixForSequenceClassification"


def test_it_begins_as_a_configuration_says():
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(hf_config("attnres", num_labels=5))
    assert classifier(tokens(1)).logits.shape == (1, 5)
    assert classifier.dtype == torch.float32
