"""A copy of transformers that a machine without a network can use."""

import sys
from pathlib import Path

import transformers

import forking
from benchmarks.carry_models import carry_models, use_carried_models


def link_compiled(copy):
    """Let a copy of transformers use what Python has compiled of the original: seconds of compiling."""
    home = Path(transformers.__file__).parent
    for compiled in home.rglob("__pycache__"):
        folder = copy / compiled.parent.relative_to(home)
        if folder.is_dir():
            (folder / "__pycache__").symlink_to(compiled)


def test_a_carried_copy_is_complete_enough_to_import_the_families(tmp_path):
    (copied, *_) = carry_models(tmp_path)
    models = tmp_path / "transformers" / "models"
    assert copied.startswith("transformers ")
    assert (models / "deepseek_v4").is_dir()
    assert not (models / "bert").exists()
    code = "from transformers.models.deepseek_v4 import modeling_deepseek_v4 as m; print(m.__file__)"
    link_compiled(tmp_path / "transformers")
    done = forking.python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_without_a_carried_copy_the_installed_version_is_used(tmp_path):
    before = list(sys.path)
    assert use_carried_models(tmp_path).startswith("transformers ")
    assert sys.path == before
