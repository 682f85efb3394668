"""`depthmix.insight.explore`: a page for a notebook, of any model with a mixer and either kind of tokenizer."""

import html
import json
import re

import pytest
import torch
from tokenizers import Tokenizer

import depthmix
from depthmix import insight
from depthmix.errors import DIVERGED, UserError
from depthmix.train.inspect import encode_text, text_by_token
from train import small

TEXT = "The <b>sea</b> & é"


def data_of(page):
    (data,) = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', page.html)
    return json.loads(data)


def test_it_is_a_whole_page_of_the_librarys_numbers_and_text_stays_text():
    run = small.load_run()
    run.model.train()
    found = insight.explore(run.model, run.tokenizer, TEXT, cuts=True)
    assert run.model.training
    assert all(p.grad is None for p in run.model.parameters())
    (model,) = data_of(found)["models"]
    text = text_by_token(run.model.eval(), *encode_text(run, TEXT), run.tokenizer, cuts=True)
    assert "".join(model["text"]["tokens"]) == TEXT
    assert model["text"]["losses"][1:] == pytest.approx(text["losses"][1:], rel=1e-3)
    assert model["text"]["cuts"][-1] is None
    shown = found._repr_html_()
    assert shown.count("<") == 2  # the frame's own tag and its end: all of the page is escaped
    (page,) = re.findall(r' srcdoc="([^"]*)"></iframe>$', shown)
    assert html.unescape(page) == found.html
    assert ' sandbox="allow-scripts" ' in shown
    assert TEXT not in found.html
    assert "page of" in repr(found)


def test_two_models_one_of_hugging_face_and_a_tokenizer_of_transformers():
    transformers = pytest.importorskip("transformers")
    from hf.test_retrofit import make

    plain = Tokenizer.from_file(str(small.data() / "tokenizer.json"))
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=plain)
    other = depthmix.retrofit(make("llama", vocab_size=small.VOCAB), "attnres", quiet=True, block_size=2)
    found = data_of(insight.explore(small.load_run().model, wrapped, TEXT, against=other))
    assert found == data_of(insight.explore(small.load_run().model, plain, TEXT, against=other))
    assert [model["label"] for model in found["models"]] == ["residual", "attnres:block_size=2"]
    assert ["".join(model["text"]["tokens"]) for model in found["models"]] == [TEXT] * 2
    ids = torch.tensor([plain.encode(TEXT).ids])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(other(input_ids=ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")
    assert found["models"][1]["text"]["losses"][1:] == pytest.approx(loss.tolist(), rel=1e-3)


def test_what_cannot_be_explored_is_said():
    run = small.load_run()
    for text in ("", "s"):
        with pytest.raises(UserError, match="a prediction needs two: write a sentence"):
            insight.explore(run.model, run.tokenizer, text)
    with pytest.raises(ValueError, match="expected a model with one mixer, found 0"):
        insight.explore(torch.nn.Linear(2, 2), run.tokenizer, TEXT)
    with torch.no_grad():
        run.model.head.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="the output of the model is not a number") as error:
        insight.explore(run.model, run.tokenizer, TEXT)
    assert error.value.exit_code == DIVERGED
    with pytest.raises(AttributeError, match="has no attribute 'explored'"):
        insight.explored  # noqa: B018


def test_its_scripts_run_in_the_frame(open_page, tmp_path):
    run = small.load_run()
    path = tmp_path / "notebook.html"
    frame = insight.explore(run.model, run.tokenizer, TEXT)._repr_html_()
    path.write_text(f'<!doctype html><meta charset="utf-8"><title>t</title>{frame}', encoding="utf-8")
    page = open_page(path)
    inside = page.frame_locator("iframe")
    inside.locator(".tokens button").nth(3).click()
    assert "predicting “ ”" in inside.locator(".chance").first.inner_text().replace("·", " ")
    # A frame without an origin cannot keep the chosen word in its address.
