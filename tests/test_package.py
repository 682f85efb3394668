"""The package as others get it: light to import, layered, and installable from its wheel."""

import ast
import subprocess
import sys
import tomllib
import venv

import pytest

import depthmix
from project import ROOT, code_blocks, python

LAYERS = {"errors": 0, "files": 1, "ops": 0, "mixers": 1, "models": 2, "insight": 3, "config": 3, "device": 3}
LAYERS |= {"data": 4, "runs": 5, "train": 6, "study": 7}


def test_import_is_light():
    """Neither triton nor transformers, nor what is slow in torch; at most 0.3 s more than torch. The best of three: others share the machine."""
    code = (
        "import sys, time, torch; before = set(sys.modules); t = time.perf_counter(); import depthmix; "
        "t = time.perf_counter() - t; new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(t, sorted(new & {'triton', 'transformers', 'safetensors', 'numpy', 'sympy'}), 'torch._dynamo' in sys.modules)"
    )
    results = [python(code).split(maxsplit=1) for _ in range(3)]
    assert all(rest.strip() == "[] False" for _, rest in results), results
    assert min(float(seconds) for seconds, _ in results) < 0.3


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize("path", sorted((ROOT / "depthmix").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    """ops <- mixers <- models <- insight, config <- data <- runs <- train <- study."""
    own = path.relative_to(ROOT / "depthmix").with_suffix("").parts[0]
    if own in ("__init__", "__main__", "cli"):
        return
    for name in imports(path):
        if name.startswith("depthmix."):
            layer = name.split(".")[1]
            assert layer == own or LAYERS[layer] < LAYERS[own], f"{path} imports {name}"


def test_no_file_is_long():
    long = {
        str(p.relative_to(ROOT)): n
        for p in (ROOT / "depthmix").rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 500
    }
    assert not long


def test_public_names():
    assert {"list_mixers", "create_mixer", "Mixer", "Decoder", "DecoderConfig", "depth_mixing", "ops"} <= set(
        depthmix.__all__
    )
    assert all(hasattr(depthmix, name) for name in depthmix.__all__)
    assert all(hasattr(depthmix.Mixer, call) for call in ("start", "read", "write", "finish", "mixing"))


def test_torch_is_a_range_for_users_and_pinned_for_developers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(d.startswith("torch>=") for d in project["dependencies"])
    assert {d.split(">")[0] for d in project["dependencies"]} == {"torch", "numpy", "safetensors"}
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("depthmix-*.whl"))


def test_wheel_runs_the_readme_in_a_fresh_environment_without_extras(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    interpreter = tmp_path / "env" / "bin" / "python"
    command = [
        interpreter,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
        wheel,
    ]
    subprocess.run([str(c) for c in command], check=True, capture_output=True)
    out = python(code_blocks(ROOT / "README.md")[0], interpreter=interpreter, cwd=tmp_path)
    assert out.strip() == "torch.Size([2, 16, 64])"
    where = python(
        "import depthmix; print(depthmix.__file__, depthmix.__version__)", interpreter=interpreter, cwd=tmp_path
    )
    assert str(tmp_path) in where
    assert depthmix.__version__ in where
    extras = python(
        "import importlib.util as u; print(u.find_spec('transformers'), u.find_spec('pytest'))", interpreter=interpreter
    )
    assert extras.strip() == "None None"
