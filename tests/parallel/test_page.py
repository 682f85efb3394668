"""docs/guides/several-gpus.md and docs/guides/pipeline.md say what is true: their layouts can be had, and what they name is there."""

import re
import shlex
import subprocess

import yaml
from torch.distributed.run import get_args_parser

from depthmix.config import TrainConfig
from depthmix.parallel.layout import OF_PIPELINES, SIZES, Layout
from depthmix.parallel.pipeline import SCHEDULES
from project import ROOT

PAGE, PIPELINES = ((ROOT / "docs" / "guides" / name).read_text() for name in ("several-gpus.md", "pipeline.md"))


def test_the_line_of_the_recipe():
    block, comment = re.search(r"```yaml\n(parallel:.*?)# (\d+) processes\n```", PAGE, re.S).groups()
    assert Layout.of(yaml.safe_load(block)["parallel"]).size == int(comment)
    assert {name for name in SIZES if f"| `{name}`" in PAGE} == set(SIZES)


def test_pipelines():
    lines = re.findall(r"^parallel: \{.*?\}", PAGE + PIPELINES, re.M)
    layouts = [Layout.of(yaml.safe_load(line)["parallel"]) for line in lines]
    assert {layout.pp for layout in layouts} == {1, 4}
    flags = re.search(r"--nproc-per-node (\d+) .*--parallel (.*)", PIPELINES)
    given = (flag.split("=") for flag in flags[2].split())
    assert Layout.of({name: int(value) for name, value in given}).size == int(flags[1])
    assert {name for name in OF_PIPELINES if f"| `{name}`" in PIPELINES} == set(OF_PIPELINES)
    for page in (PAGE, PIPELINES):
        assert all(f"`{schedule}`" in page for schedule in SCHEDULES)


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
