"""Command lines that people get wrong. Each ends in one clear sentence."""

import os

import pytest

import forking
from depthmix.errors import CHECKPOINT, DATA, DISK, USAGE
from project import ROOT
from train import bad
from train.bad import COMPARE, TRAIN, one_sentence, table

fails = bad.fails

LINES = [
    ("", USAGE, "expected a command", "train, compare, report, plan, eval"),
    (
        "trian",
        USAGE,
        "unknown command 'trian'; there are train, compare",
        "did you mean 'train'?; see `depthmix --help`",
    ),
    ("TRAIN", USAGE, "unknown command 'TRAIN'", "did you mean 'train'?"),
    ("help", USAGE, "unknown command 'help'", "see `depthmix --help`"),
    ('"it\'s"', USAGE, 'unknown command "it\'s"'),
    ("''", USAGE, "unknown command ''"),
    ("--recipe x.yaml", USAGE, "unknown command 'x.yaml'; there are"),
    ("--verbose list", USAGE, "--verbose"),
    ("list everything", USAGE, "list: unknown argument 'everything'"),
    ("doctor --modules x.py", USAGE, "doctor: unknown argument '--modules'"),
    ("train -- --data {data}", USAGE, "train: unknown argument '--'"),
    ("doctor --fix", USAGE, "doctor: unknown argument '--fix'"),
    ("completion", USAGE, "shell", "required"),
    ("completion fish", USAGE, "invalid choice: 'fish'", "bash", "zsh"),
    # train
    ("train", USAGE, "data is needed", "Folder written by `depthmix data`"),
    ("train --data {data}", USAGE, "out is needed", "Run folder"),
    ("train --out run", USAGE, "data is needed"),
    (f"{TRAIN} --stepz 5", USAGE, "unknown argument '--stepz'", "did you mean '--steps'?"),
    (f"{TRAIN} --step 5", USAGE, "unknown argument '--step'", "did you mean '--steps'?"),  # no abbreviations
    (f"{TRAIN} --mixer_options ways=3", USAGE, "did you mean '--mixer-options'?"),
    (f"{TRAIN} extra", USAGE, "unknown argument 'extra'"),
    (f"{TRAIN} --lr", USAGE, "--lr: expected one argument"),
    (f"{TRAIN} --lr 0.1 --lr 0.001", USAGE, "train: lr is given twice, as '0.1' and as '0.001'; give it once"),
    (f"{TRAIN} --lr 0.1 --seed 1 --lr=0.1", USAGE, "lr is given twice, as '0.1' and as '0.1'; give it once"),
    (f"{TRAIN} --mixer dca --mixer attnres", USAGE, "mixer is given twice, as 'dca' and as 'attnres'"),
    (f"{TRAIN} --quiet --no-quiet", USAGE, "train: --no-quiet comes after --quiet; give one of them once"),
    (f"{TRAIN} --no-qk-norm --qk-norm", USAGE, "--qk-norm comes after --no-qk-norm"),
    (f"{TRAIN} --lr fast", USAGE, "lr must be a number, got 'fast'"),
    (f"{TRAIN} --lr 0", USAGE, "lr must be a finite number above 0, got 0.0"),
    (f"{TRAIN} --lr=-1e-3", USAGE, "lr must be a finite number above 0, got -0.001"),
    (f"{TRAIN} --lr -1e-3", USAGE, "lr must be a finite number above 0, got -0.001"),
    (f"{TRAIN} --lr -inf", USAGE, "lr must be a finite number above 0, got -inf"),
    (
        f"{TRAIN} --wandb -mine",
        USAGE,
        "--wandb: expected one argument (one that begins with a dash is written --wandb=-…)",
    ),
    (f"{TRAIN} --recipe ''", USAGE, "train: --recipe is empty; give the path of a YAML file"),
    (f"{TRAIN} --lr nan", USAGE, "lr must be a finite number above 0, got nan"),
    (f"{TRAIN} --lr inf", USAGE, "lr must be a finite number above 0, got inf"),
    (f"{TRAIN} --lr 1e39", USAGE, "lr must be within the range of float32, from 1.2e-38 to 3.4e+38, got 1e+39"),
    (f"{TRAIN} --adam-eps 1e-300", USAGE, "adam_eps must be within the range of float32, from 1.2e-38"),
    (f"{TRAIN} --clip inf", USAGE, "clip must be a finite number of at least 0, got inf"),
    (f"{TRAIN} --muon-lr 0", USAGE, "muon_lr must be a finite number above 0"),
    (f"{TRAIN} --adam-eps 0", USAGE, "adam_eps must be a finite number above 0"),
    (f"{TRAIN} --norm-eps=-1", USAGE, "norm_eps must be a finite number above 0"),
    (f"{TRAIN} --rope-theta 0", USAGE, "rope_theta must be a finite number above 0"),
    (f"{TRAIN} --steps 0", USAGE, "steps must be at least 1, got 0"),
    (f"{TRAIN} --steps 1.5", USAGE, "steps must be a whole number, got '1.5'"),
    (f"{TRAIN} --lr 0,001", USAGE, "lr must be a number, got '0,001'"),
    (f"{TRAIN} --steps many", USAGE, "steps must be a whole number, got 'many'"),
    (f"{TRAIN} --steps none", USAGE, "steps must be a whole number, got 'none'"),
    (f"{TRAIN} --steps 1e3", USAGE, "steps must be a whole number"),
    (f"{TRAIN} --batch-size 0", USAGE, "batch_size must be at least 1"),
    (f"{TRAIN} --seq-len 0", USAGE, "seq_len must be at least 1"),
    (f"{TRAIN} --log-every 0", USAGE, "log_every must be at least 1"),
    (f"{TRAIN} --eval-every 0", USAGE, "eval_every must be at least 1"),
    (f"{TRAIN} --save-every 0", USAGE, "save_every must be at least 1"),
    (f"{TRAIN} --keep 0", USAGE, "keep must be at least 1"),
    (f"{TRAIN} --eval-tokens 0", USAGE, "eval_tokens must be at least 1 or none"),
    (f"{TRAIN} --micro-batch-size 0", USAGE, "micro_batch_size must be at least 1 or none"),
    (f"{TRAIN} --micro-batch-size 3", USAGE, "micro_batch_size must divide batch_size=4, got 3"),
    (f"{TRAIN} --micro-batch-size 2 --cuda-graph", USAGE, "cuda_graph records a step in one piece: leave out"),
    (f"{TRAIN} --checkpoint-activations --cuda-graph", USAGE, "cuda_graph records a step in one piece: leave out"),
    (f"{TRAIN} --micro-batch-size some", USAGE, "micro_batch_size must be a whole number or none, got 'some'"),
    (f"{TRAIN} --warmup 6", USAGE, "warmup must be shorter than the run of 6 steps, got 6"),
    (f"{TRAIN} --output-scale 0 --mixer rezero", USAGE, "start at zero", "sublayers would never learn"),
    (f"{TRAIN} --output-scale 0 --mixer attnres --mixer-options output_gain=0", USAGE, "sublayers would never learn"),
    (f"{TRAIN} --output-scale 0 --mixer attnres --mixer-options ways=9", USAGE, "ways must be 1, 2 or 3, got 9"),
    (f"{TRAIN} --output-scale 0 --mixer atnres", USAGE, "did you mean 'attnres'?"),
    (f"{TRAIN} --output-scale 0 --dim 0", USAGE, "dim must be"),
    (f"{TRAIN} --warmup=-1", USAGE, "warmup must be at least 0, got -1"),
    (f"{TRAIN} --final-lr 1.5", USAGE, "final_lr must be from 0 to 1, got 1.5"),
    (f"{TRAIN} --decay-fraction nan", USAGE, "decay_fraction must be from 0 to 1"),
    (f"{TRAIN} --beta1 1", USAGE, "beta1 must be at least 0 and below 1"),
    (f"{TRAIN} --beta2=-0.1", USAGE, "beta2 must be at least 0 and below 1"),
    (f"{TRAIN} --weight-decay=-1", USAGE, "weight_decay must be a finite number of at least 0"),
    (f"{TRAIN} --clip=-1", USAGE, "clip must be a finite number of at least 0"),
    (f"{TRAIN} --seed=-1", USAGE, "seed must be at least 0, got -1"),
    (f"{TRAIN} --seed 99999999999999999999", USAGE, "seed must be below 2**64"),
    (f"{TRAIN} --optimizer sgd", USAGE, "optimizer must be adamw or muon, got 'sgd'"),
    (f"{TRAIN} --optimizer moun", USAGE, "did you mean 'muon'?"),
    (f"{TRAIN} --schedule linear", USAGE, "schedule must be cosine or wsd or rsqrt, got 'linear'"),
    (f"{TRAIN} --precision fp16", USAGE, "precision must be auto or fp32 or bf16", "did you mean 'bf16'?"),
    (f"{TRAIN} --compile yes", USAGE, "compile must be off or sublayers or model, got 'yes'"),
    (f"{TRAIN} --on-nan ignore", USAGE, "on_nan must be stop or skip"),
    (f"{TRAIN} --mlp gelu", USAGE, "mlp must be swiglu or relu2"),
    (f"{TRAIN} --quiet=yes", USAGE, "--quiet"),
    (f"{TRAIN} --device gpu", USAGE, "device must be cpu, cuda, cuda:N, mps or auto, got 'gpu'"),
    (f"{TRAIN} --device cuda:99", USAGE, "device 'cuda:99' is not available here"),
    (f"{TRAIN} --device meta", USAGE, "device 'meta' is not available here"),
    (f"{TRAIN} --dim 0", USAGE, "dim must be an integer of at least 1, got 0"),
    (f"{TRAIN} --dim 15", USAGE, "n_heads must divide dim=15"),
    (f"{TRAIN} --dim 18", USAGE, "head_dim must be even for rotary positions, got 9"),
    (f"{TRAIN} --n-blocks 0", USAGE, "n_blocks must be an integer of at least 1"),
    (f"{TRAIN} --n-heads 0", USAGE, "n_heads must be an integer of at least 1"),
    (f"{TRAIN} --n-heads 3", USAGE, "n_heads must divide dim=16"),
    (f"{TRAIN} --n-kv-heads 3", USAGE, "n_kv_heads must divide n_heads=2, got 3"),
    (f"{TRAIN} --mlp-dim 0", USAGE, "mlp_dim must be an integer of at least 1"),
    (f"{TRAIN} --dim 1000000000000", USAGE, "out of memory: use a smaller"),
    (f"{TRAIN} --mixer resnet", USAGE, "unknown mixer 'resnet'", "residual"),
    (f"{TRAIN} --mixer atnres", USAGE, "did you mean 'attnres'?"),
    (f"{TRAIN} --mixer-options ways=3", USAGE, "residual: unknown option 'ways'", "it has no options"),
    (f"{TRAIN} --mixer-options", USAGE, "--mixer-options: expected at least one argument"),
    (f"{TRAIN} --mixer-options ways", USAGE, "mixer_options must be written as option=value"),
    (f"{TRAIN} --mixer attnres --mixer-options ways=3 ways=1", USAGE, "mixer_options gives ways twice"),
    (f"{TRAIN} --mixer-options ways=3 --mixer attnres --mixer-options ways=3", USAGE, "gives ways twice"),
    (f"{TRAIN} --mixer attnres --mixer-options wayz=3", USAGE, "unknown option 'wayz'", "did you mean 'ways'?"),
    (f"{TRAIN} --mixer attnres --mixer-options ways=4", USAGE, "ways must be 1, 2 or 3, got 4"),
    (f"{TRAIN} --mixer attnres --mixer-options block_size=0", USAGE, "block_size must be an integer of at least 1"),
    (f"{TRAIN} --mixer attnres --mixer-options heads=3", USAGE, "heads must divide dim=16"),
    (f"{TRAIN} --mixer attnres --mixer-options weights=softmux", USAGE, "did you mean 'softmax'?"),
    (f"{TRAIN} --mixer layerscale --mixer-options init=1e39", USAGE, "init must be", "within ±3.4e+38", "float32"),
    (f"{TRAIN} --mixer highway --mixer-options bias=-1e300", USAGE, "bias must be a finite number within ±3.4e+38"),
    (f"{TRAIN} --mixer highway --mixer-options bias=inf", USAGE, "bias must be a finite number, got inf"),
    (f"{TRAIN} --mixer hyper --mixer-options n=999999999999", USAGE, "out of memory: use a smaller"),
    (f"{TRAIN} --seq-len 5000", DATA, "train split has 4912 tokens", "seq_len + 1 = 5001"),
    (f"{TRAIN} --seq-len 1300", DATA, "val split has 1235 tokens", "val_fraction"),
    ("train --data nowhere --out run", DATA, "There is no folder nowhere", "depthmix data"),
    ("train --data {corpus} --out run", DATA, "is not prepared data, it has no meta.json"),
    ("train --data {corpus}/00.txt --out run", DATA, "There is no folder"),
    (f"{TRAIN} --wandb depths", USAGE, "wandb is not installed", "pip install wandb"),
    # compare
    ("compare", USAGE, "compare needs --out"),
    ("compare --data {data} --out s", USAGE, "arms must be a list of at least one rule"),
    ("compare --out s --arms residual", USAGE, "data"),
    (f"{COMPARE} --arms", USAGE, "--arms: expected at least one argument"),
    (f"{COMPARE} --arms resnet", USAGE, "arm 'resnet'", "unknown mixer 'resnet'"),
    (f"{COMPARE} --arms residual residual", USAGE, "arms 'residual' and 'residual' are the same"),
    (f"{COMPARE} --arms residual attnres attnres:ways=1", USAGE, "are the same; remove one"),
    (f"{COMPARE} --arms :ways=3", USAGE, "arm ':ways=3' has no rule"),
    (f"{COMPARE} --arms attnres:ways", USAGE, "arm 'attnres:ways': ways needs a value, ways=…: 1, 2 or 3"),
    (f"{COMPARE} --arms attnres:", USAGE, "expected option=value"),
    (f"{COMPARE} --arms attnres:wayz=3", USAGE, "unknown option 'wayz'", "did you mean 'ways'?"),
    (f"{COMPARE} --arms attnres:ways=4", USAGE, "ways must be 1, 2 or 3"),
    (f"{COMPARE} --arms attnres:ways=3,ways=3", USAGE, "gives ways twice"),
    (f"{COMPARE} --arms attnres:heads=5", USAGE, "heads must divide dim=16"),
    (f"{COMPARE} --arms residual --seeds zero", USAGE, "seeds must be a whole number, got 'zero'"),
    (f"{COMPARE} --arms residual --seeds 0,1", USAGE, "compare: seeds are written apart, as in 0 1, got '0,1'"),
    (f"{COMPARE} --arms residual --seeds 1 1", USAGE, "every seed counts once"),
    (f"{COMPARE} --arms residual --seeds=-4", USAGE, "seed must be at least 0, got -4"),
    (f"{COMPARE} --arms residual --budget money", USAGE, "budget must be tokens or time, got 'money'"),
    (f"{COMPARE} --arms residual --steps 0", USAGE, "steps must be at least 1"),
    (f"{COMPARE} --arms residual --mixer dca", USAGE, "takes its rules from --arms"),
    (f"{COMPARE} --arms residual --sample-tokens 0", USAGE, "sample_tokens must be at least 1"),
    (f"{COMPARE} --arms residual --dim 15", USAGE, "n_heads must divide dim=15"),
    (f"{COMPARE} --arms residual --lr 0", USAGE, "lr must be a finite number above 0"),
    ("compare --data nowhere --out s --arms residual", DATA, "There is no folder nowhere"),
    # eval and generate
    ("eval", USAGE, "run is needed", "depthmix train"),
    ("eval --run nowhere", CHECKPOINT, "run 'nowhere' does not exist"),
    ("eval --run {run} --batch-size 0", USAGE, "batch_size must be at least 1, got 0"),
    ("eval --run {run} --seq-len=-3", USAGE, "seq_len must be at least 1 or none, got -3"),
    ("eval --run {run} --input ''", USAGE, "eval: input must not hold an empty word, got ['']"),
    ("report ''", USAGE, "report: run must not hold an empty word"),
    ("data --input {corpus} '' --out d", USAGE, "data: input must not hold an empty word"),
    ("compare --results ''", USAGE, "compare: results must not hold an empty word"),
    ("study tiny", USAGE, "studies are run by `depthmix compare`"),
    ("eval --run {run} --seq-len 1300", DATA, "val split has 1235 tokens"),
    ("eval --run {run} --input nowhere.txt", DATA, "There is no file or folder nowhere.txt"),
    ("eval --run {run} --device tpu", USAGE, "device must be cpu, cuda"),
    ("eval --run {run} --text hello", USAGE, "unknown argument '--text'", "did you mean"),
    ("plan a.yaml --recipe b.yaml", USAGE, "plan: recipe is given twice, as 'a.yaml' and as 'b.yaml'"),
    ("train --recipe a.yaml --recipe b.yaml", USAGE, "recipe is given twice, as 'a.yaml' and as 'b.yaml'"),
    ("eval {run} --run nowhere", USAGE, "eval: run is given twice, as '", "' and as 'nowhere'"),
    ("eval {run} nowhere", USAGE, "unknown argument 'nowhere'"),
    ("eval --run {corpus}", CHECKPOINT, "is not a run folder: it has no recipe.yaml"),
    ("eval --run {corpus}/00.txt", CHECKPOINT, "is a file, not a run folder"),
    ("generate", USAGE, "run is needed", "depthmix train"),
    ("generate --run nowhere", CHECKPOINT, "run 'nowhere' does not exist"),
    ("generate --run {run} --temperature=-1", USAGE, "temperature must be a finite number of at least 0, got -1.0"),
    ("generate --run {run} --temperature nan", USAGE, "temperature must be a finite number of at least 0"),
    ("generate --run {run} --temperature inf", USAGE, "temperature must be a finite number of at least 0"),
    ("generate --run {run} --temperature hot", USAGE, "temperature must be a number, got 'hot'"),
    ("generate --run {run} --top-p 0", USAGE, "top_p must be above 0 and at most 1, got 0.0"),
    ("generate --run {run} --top-p 1.01", USAGE, "top_p must be above 0 and at most 1"),
    ("generate --run {run} --top-p nan", USAGE, "top_p must be above 0 and at most 1"),
    ("generate --run {run} --max-tokens 0", USAGE, "max_tokens must be at least 1, got 0"),
    ("generate --run {run} --max-tokens few", USAGE, "max_tokens must be a whole number"),
    ("generate --run {run} --seed=-1", USAGE, "seed must be at least 0"),
    ("generate --run {run} --seed 99999999999999999999", USAGE, "below 2**64"),
    ("generate --run {run} --device cuda:99", USAGE, "not available here"),
    ("generate --run {run} --prompt", USAGE, "--prompt: expected one argument"),
    ("generate --run {run} --prompt two words", USAGE, "run is given twice", "as 'words'; quotes keep"),
    ("generate --prompt two words --run {run}", USAGE, "run is given twice, as 'words'", "quotes keep"),
    ("generate --run {run} --prompt Th\udcffe", USAGE, "prompt must be UTF-8 text, and its character 3 is not"),
    (f"{COMPARE} --arms residual --prompt \udcff", USAGE, "prompt must be UTF-8 text, and its character 1 is not"),
    # data
    ("data", USAGE, "No folder to write was given: set out"),
    ("data --out d", USAGE, "No input was given"),
    ("data --input {corpus}", USAGE, "No folder to write was given"),
    ("data --input --out d", USAGE, "--input: expected at least one argument"),
    ("data --input nowhere --out d", DATA, "There is no file or folder nowhere"),
    ("data --input {corpus} --out d --vocab-size 256", USAGE, "vocab_size is 256", "at least 257"),
    ("data --input {corpus} --out d --vocab-size big", USAGE, "vocab_size must be a whole number, got 'big'"),
    ("data --input {corpus} --out d --vocab-size 30000", DATA, "too small for a vocabulary of 30000", "it yields"),
    ("data --input {corpus} --out d --val-fraction 0", USAGE, "val_fraction is 0.0", "between 0 and 1"),
    ("data --input {corpus} --out d --val-fraction 1", USAGE, "val_fraction is 1.0"),
    ("data --input {corpus} --out d --val-fraction nan", USAGE, "val_fraction is nan"),
    ("data --input {corpus} --out d --document page", USAGE, "document must be file or line or blank, got 'page'"),
    ("data --input {corpus} --out d --tokenizer nowhere.json", DATA, "There is no tokenizer file nowhere.json"),
    ("data --input {corpus} --out d --tokenizer {corpus}/00.txt", DATA, "is not a tokenizer.json"),
    ("data --input {corpus} --out d --tokenizer {corpus}", DATA, "cannot be read"),
    ("data --input {corpus} --out {corpus}", DATA, "is not prepared data, so it is left alone"),
    ("data --input {corpus} --out {data}", DATA, "already holds prepared data", "overwrite"),
    ("data --input {corpus} --out {corpus}/00.txt", DATA, "is not a folder"),
    ("data --input {corpus} --out {corpus}/00.txt/d", DISK, "cannot be written", "is a file"),
    ("data --input {corpus} --out /proc/d", DISK, "cannot be written"),
    ("data --input hf: --out d", USAGE, "names no dataset", "hf:NAME"),
    ("data --input {corpus} --out d --seed first", USAGE, "seed must be a whole number"),
]


@table(LINES)
def test_command_lines(case, fails, tmp_path):
    line, code, *words = case
    if "--wandb" in line:
        try:
            import wandb  # noqa: F401

            pytest.skip("wandb is installed")
        except ImportError:
            pass
    fails(line, code, *words)
    if "--wandb" not in line:  # found out late, and may be left out of the next command
        assert list(tmp_path.iterdir()) == []  # or the folder would refuse the corrected command as another recipe


def test_a_real_process(tmp_path):
    """What is tested above within one process, as a user sees it."""
    program = "import sys; from depthmix.cli import main; sys.exit(main())"  # as pip writes it
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = forking.python(program, "generate", "--run", "nowhere", env=here, cwd=tmp_path)
    assert done.returncode == CHECKPOINT
    assert done.stdout == ""
    one_sentence(done.stderr, ["does not exist"])
    assert done.stderr.count("\n") == 1


def test_there_are_enough():
    from test_bad_input_data import CORPORA, PREPARED
    from test_bad_input_recipes import RECIPES
    from test_bad_input_runs import BROKEN_RUNS, RESUMED

    lists = (LINES, RECIPES, CORPORA, PREPARED, BROKEN_RUNS, RESUMED)
    assert sum(map(len, lists)) >= 150
