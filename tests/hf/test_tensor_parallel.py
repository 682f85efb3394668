"""The tensor-parallel plan, on two processes: logits, gradients and generated tokens of the model in one piece."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch import distributed

import forking
from hf.tiny import causal_lm, tokens
from project import ROOT

LIMIT = timedelta(seconds=60)  # until the other is taken to be gone


def load_sharded(folder):
    """The model with its matrices divided among the processes."""
    from transformers.distributed import DistributedConfig

    from depthmix.hf import DepthmixForCausalLM

    return DepthmixForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto", tp_size=2))


def checks(rank, folder, store):
    from torch.distributed.tensor import DTensor

    from depthmix.hf import DepthmixForCausalLM

    torch.set_num_threads(1)
    before = dict(os.environ)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=LIMIT)
    try:
        plain, sharded, ids = DepthmixForCausalLM.from_pretrained(folder), load_sharded(folder), tokens()
        weight = sharded.model.sublayers[0].q_proj.weight
        assert isinstance(weight, DTensor)
        assert weight.to_local().shape[0] == weight.shape[0] // 2
        wanted, found = (model(ids, labels=ids) for model in (plain, sharded))
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-6)
        wanted.loss.backward()
        found.loss.backward()
        for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(gradient, q.grad, rtol=1e-4, atol=1e-5, msg=f"{rank}: {name}")
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(sharded.generate(ids, **how), plain.generate(ids, **how))
    finally:
        distributed.destroy_process_group()
        os.environ.clear()
        os.environ |= before


def test_with_two_processes(tmp_path):
    """This one and another."""
    causal_lm("attnres", {"qk_norm": True, "vocab_size": 14}).save_pretrained(tmp_path / "model")
    given = (tmp_path / "model", tmp_path / "store")
    code = "import sys; from hf.test_tensor_parallel import checks; checks(1, *sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(forking.python, code, *given, env=environment)
        checks(0, *given)
        assert other.result().returncode == 0, other.result().stderr
