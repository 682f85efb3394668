"""Named domains: the validation loss of each is reported by training, its metrics and evaluation."""

import json

import pytest
import torch

from depthmix.config import DataConfig, EvalConfig
from depthmix.data.dataset import TokenData
from depthmix.data.prepare import prepare
from depthmix.runs.restore import load_model
from depthmix.train.brief import train_briefly
from depthmix.train.loop import train
from depthmix.train.measure import evaluate_run, measure
from train import small


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    place = tmp_path_factory.mktemp("domains")
    for name, text in (("sea", small.LINES[0]), ("boat", small.LINES[1])):
        lines = [json.dumps({"text": f"{text} {i} " * (5 + i % 3)}) for i in range(24)]
        (place / f"{name}.jsonl").write_text("\n".join(lines))
    inputs = [f"{name}={place / name}.jsonl" for name in ("sea", "boat")]
    return prepare(DataConfig(input=inputs, out=str(place / "data"), vocab_size=290, val_fraction=0.2))


def by_hand(model, data, seq_len):
    """Each domain's mean loss over its full windows, token by token."""
    found = {}
    for name, part in data.split("val").parts().items():
        losses = []
        for start in range(0, part.n_tokens - seq_len, seq_len):
            ids = torch.from_numpy(part.window(start, seq_len + 1))
            with torch.no_grad():
                logs = model(ids[None, :-1]).double().log_softmax(-1)[0]
            losses.append(-logs[torch.arange(seq_len), ids[1:]])
        found[name] = torch.cat(losses)
    return found


def test_training_reports_each_domain(domains, tmp_path, capsys):
    config = small.config(tmp_path / "run", data=str(domains), steps=4, eval_every=2, eval_tokens=None)
    folder = train(config)
    result = json.loads((folder.path / "result.json").read_text())
    losses = by_hand(load_model(str(folder.path), torch.device("cpu")).model, TokenData.open(domains), config.seq_len)
    for name in ("sea", "boat"):
        assert result["domains"][name] == pytest.approx(losses[name].mean().item(), abs=1e-5)
    assert result["val_loss"] == pytest.approx(torch.cat(list(losses.values())).mean().item(), abs=1e-5)
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["val_loss/sea"] for line in lines if "val_loss" in line][-1] == result["domains"]["sea"]
    assert evaluate_run(EvalConfig(run=str(folder.path)))[0].domains == pytest.approx(result["domains"])
    measure(EvalConfig(run=str(folder.path)))
    assert "\n    boat: loss " in capsys.readouterr().out


def test_a_study_keeps_the_loss_of_each_domain(domains, tmp_path):
    config = small.config(tmp_path, data=str(domains), steps=4)
    result = train_briefly(config, TokenData.open(domains))
    assert result["domains"].keys() == {"sea", "boat"}


def test_a_limit_on_tokens_is_shared_by_size(domains, tmp_path):
    val = TokenData.open(domains).split("val")
    config = small.config(tmp_path, data=str(domains), steps=4)
    limit = 6 * config.seq_len
    config.eval_tokens = limit
    result = train_briefly(config, TokenData.open(domains))
    assert val.n_tokens > limit
    assert result["domains"].keys() == {"sea", "boat"}
