"""docs/scale.md says what is true: its layouts can be had, and what it names is there."""

import re
import shlex
import subprocess

import yaml
from torch.distributed.run import get_args_parser

from depthmix.config import TrainConfig
from depthmix.parallel.layout import SIZES, Layout
from project import ROOT

PAGE = (ROOT / "docs" / "scale.md").read_text()


def test_the_line_of_the_recipe():
    block, comment = re.search(r"```yaml\n(parallel:.*?)# (\d+) processes\n```", PAGE, re.S).groups()
    assert Layout.of(yaml.safe_load(block)["parallel"]).size == int(comment)
    assert {name for name in SIZES if f"| `{name}`" in PAGE} == set(SIZES)


def test_options_and_blocks_can_be_read():
    for name in re.findall(r"`(\w+): [\w.]+`", PAGE):
        assert name in TrainConfig.__dataclass_fields__, name
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S):
        assert isinstance(yaml.safe_load(block), dict)


def test_the_commands_are_ones_that_torchrun_takes():
    """Those of one machine, of several and of Slurm, with the arguments of `depthmix train` behind them."""
    parser, text = get_args_parser(), PAGE.replace("\\\n", " ")
    found = [
        shlex.split(line.split("torchrun", 1)[1]) for line in re.findall(r"^(?:    |srun )torchrun .*", text, re.M)
    ]
    assert len(found) >= 4
    for command in found:
        given = parser.parse_args([part.replace("$SLURM_NNODES", "4") for part in command])
        assert given.module
        assert given.training_script == "depthmix"
        assert given.training_script_args[:2] == ["train", "--recipe"]
    nodes = [given.rdzv_endpoint for given in map(parser.parse_args, found) if given.nnodes != "1"]
    assert [end.rpartition(":")[0] for end in nodes if end] == ["HEAD", "$head"]


def test_the_launch_file_is_one():
    script = re.search(r"```bash\n(.*?)```", PAGE, re.S)[1]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.M))
    assert f"--nproc-per-node {asked['gpus-per-node']} " in script
    assert asked["ntasks-per-node"] == "1"  # torchrun starts the others


def test_the_file_for_accelerate_is_the_one_shown():
    shown = re.search(r"```yaml\n(distributed_type:.*?)```", PAGE, re.S)[1]
    assert (ROOT / "examples" / "accelerate-fsdp2.yaml").read_text() == shown
