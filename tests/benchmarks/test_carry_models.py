"""A copy of transformers that a machine without a network can use."""

import subprocess
import sys

from benchmarks.carry_models import carry_models, use_carried_models


def test_a_carried_copy_is_complete_enough_to_import_the_families(tmp_path):
    (copied, *_) = carry_models(tmp_path)
    models = tmp_path / "transformers" / "models"
    assert copied.startswith("transformers ")
    assert (models / "deepseek_v4").is_dir()
    assert not (models / "bert").exists()
    code = "from transformers.models.deepseek_v4 import modeling_deepseek_v4 as m; print(m.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path))


def test_without_a_carried_copy_the_installed_version_is_used(tmp_path):
    before = list(sys.path)
    assert use_carried_models(tmp_path).startswith("transformers ")
    assert sys.path == before
