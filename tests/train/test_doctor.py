"""`depthmix doctor`: which backend each operator uses, and why."""

import os

import pytest
import torch

import forking
from depthmix import ops
from depthmix.ops.backend import BACKENDS
from depthmix.train import doctor
from project import ROOT

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def lines(monkeypatch, why):
    monkeypatch.setattr(doctor, "why_no_kernels", lambda device_type, index: why)
    monkeypatch.setattr(doctor, "choose_device", lambda name: CPU)
    return doctor.report().splitlines()


def test_each_operator_has_a_line(monkeypatch):
    found = lines(monkeypatch, "the moon is full")
    for operator in ("depth_attention", "depth_sum", "stream_mix", "sinkhorn"):
        assert f"    {operator}: reference, because the moon is full" in found


def test_every_operator_of_the_library_is_named():
    named = doctor.backends(CPU)
    of = {"stream_read": "stream_mix", "stream_write": "stream_mix", "depth_scores": "depth_sum"}
    callables = {name for name in ops.__all__ if name not in ("BackendError", "use_backend")}
    assert {of.get(name, name) for name in callables} == set(named)


@pytest.mark.parametrize("why", [None, "triton is not installed"])
def test_on_a_gpu(why, monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "why_no_kernels", lambda *place: asked.append(place) or why)
    expected = "triton kernels" if why is None else f"reference, because {why}"
    assert set(doctor.backends(CUDA).values()) == {expected}
    assert asked == [("cuda", 0)]


def test_where_kernels_are_interpreted_they_still_have_to_be_forced(monkeypatch):
    assert any("if they are forced" in line for line in lines(monkeypatch, None))


def test_without_a_gpu_it_says_so_itself():
    """In a process of its own, since the interpreter may be on in this one."""
    code = "import torch; from depthmix.train import doctor; print(doctor.backends(torch.device('cpu')))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = forking.python(code, env=environment)
    reasons = ("kernels run on GPUs, and the tensors are on cpu", "triton is not installed")
    assert any(f"reference, because {why}" in ran.stdout for why in reasons)


def test_it_says_how_to_force_one(monkeypatch):
    (said,) = [line for line in lines(monkeypatch, None) if "to force a backend" in line]
    assert all(f'"{name}"' in said for name in BACKENDS)
    assert "depthmix.ops.use_backend" in said


def test_it_says_when_the_order_of_the_backward_is_lost(monkeypatch):
    said = " ".join(lines(monkeypatch, None))
    assert "source by source" in said
    assert "FSDP2" in said
    assert (ROOT / "docs" / "reference" / "performance.md").read_text().count("FSDP2")
