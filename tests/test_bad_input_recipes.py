"""Recipes that cannot be read or say what no option means. Each ends in one clear sentence."""

import tracemalloc

from depthmix.errors import USAGE
from train import bad
from train.bad import one_sentence, table

fails = bad.fails

RECIPES = [
    ("empty", b"", "must hold lines of option: value"),
    ("comment", b"# steps: 5\n", "must hold lines of option: value"),
    ("list", b"- steps\n- 5\n", "must hold lines of option: value"),
    ("number", b"5\n", "must hold lines of option: value"),
    ("text", b"steps 5\n", "must hold lines of option: value"),
    ("number as key", b"5: steps\n", "must hold lines of option: value"),
    ("binary", bytes(range(256)), "is not YAML"),
    ("nul", b"steps: 5\0", "is not YAML"),
    ("latin-1", "prompt: caf\xe9".encode("latin-1"), "is not YAML"),
    ("tabs", b"steps:\n\t5\n", "is not YAML at line 2"),
    ("open bracket", b"steps: 5\nmixer_options: {ways: 3\n", "is not YAML at line 3"),
    ("two documents", b"steps: 5\n---\nsteps: 6\n", "is not YAML"),
    ("python object", b"steps: !!python/object/apply:os.getpid []\n", "is not YAML at line 1"),
    ("no such date", b"steps: 2024-13-45\n", "is not YAML"),
    ("deep", b"[" * 1000, "is not YAML"),
    ("unknown key", b"stepz: 5\n", "unknown option 'stepz'", "did you mean 'steps'?"),
    ("flag as key", b"--steps: 5\n", "unknown option '--steps'", "did you mean 'steps'?"),
    ("dashes", b"batch-size: 5\n", "unknown option 'batch-size'", "did you mean 'batch_size'?"),
    ("recipe in a recipe", b"recipe: other.yaml\n", "unknown option 'recipe'"),
    ("of another command", b"arms: [residual]\n", "unknown option 'arms'"),
    ("text for a number", b"steps: many\n", "steps must be a whole number, got 'many'"),
    ("fraction for a number", b"steps: 1.5\n", "steps must be a whole number, got 1.5"),
    ("bool for a number", b"steps: yes\n", "steps must be a whole number, got True"),
    ("nothing for a number", b"steps:\n", "steps must be a whole number, got None"),
    ("list for a number", b"steps: [1, 2]\n", "steps must be a whole number, got [1, 2]"),
    ("dictionary for a number", b"lr: {a: 1}\n", "lr must be a number"),
    ("nan for a whole number", b"steps: .nan\n", "steps must be a whole number, got nan"),
    ("infinity for a whole number", b"steps: .inf\n", "steps must be a whole number, got inf"),
    ("number for text", b"data: 5\n", "data must be text, got 5"),
    ("nothing for text", b"out:\n", "out must be text, got None"),
    ("nul in text", b'out: "a\\0b"\n', "out must be text, got 'a\\x00b'"),
    ("text for a bool", b"quiet: 'true'\n", "quiet must be true or false, got 'true'"),
    ("number for a bool", b"quiet: 1\n", "quiet must be true or false, got 1"),
    ("wrong choice", b"schedule: cosin\n", "schedule must be cosine or wsd or rsqrt", "did you mean 'cosine'?"),
    ("list for a choice", b"schedule: [cosine]\n", "schedule must be cosine or wsd or rsqrt"),
    ("on for compile", b"compile: on\n", "compile must be off or sublayers or model, got True"),
    ("text for options", b"mixer_options: ways=3\n", "mixer_options must be written as option=value"),
    ("numbers as options", b"mixer_options: {3: 4}\n", "mixer_options must be written as option=value"),
    ("a list as an option", b"mixer: attnres\nmixer_options: {ways: [3]}\n", "ways must be 1, 2 or 3, got [3]"),
    ("a date as an option", b"mixer: attnres\nmixer_options: {ways: 2024-01-01}\n", "ways must be 1, 2 or 3"),
    ("a line twice", b"lr: 1\ndim: 16\nlr: 2\n", "gives lr twice, again at line 3"),
    ("an option twice", b"mixer: attnres\nmixer_options: {ways: 3, ways: 1}\n", "gives ways twice, again at line 2"),
    ("an octal number", b"quiet: true\nsteps: 010\n", "at line 2: YAML reads 010 as the octal number 8: write 10, or"),
    (
        "an octal option",
        b"mixer: attnres\nmixer_options: {block_size: 012}\n",
        "at line 2: YAML reads 012 as the octal",
    ),
    ("a negative octal number", b"lr: -010\n", "YAML reads -010 as the octal number -8: write -10"),
    ("a number of base 60", b"steps: 1:30\n", "at line 1: YAML reads 1:30 as a number of base 60", "or quotes"),
    ("a time as text", b"wandb: 12:30\n", "YAML reads 12:30 as a number of base 60"),
    ("a time with a fraction", b"lr: 1:30.5\n", "YAML reads 1:30.5 as a number of base 60"),
    ("on for text", b"wandb: on\n", "wandb must be text, got True", "YAML reads yes, no, on and off as true", "quotes"),
    ("no for a number", b"n_heads: no\n", "n_heads must be a whole number, got False", "put the word in quotes"),
    ("a date as text", b"wandb: 2024-01-31\n", "wandb must be text, got datetime", "as a date: put it in quotes"),
    ("a name that is a number", b"wandb: 1e3\n", "wandb must be text, got 1000.0; put it in quotes"),
    ("on as a key", b"on: 5\n", "must hold lines of option: value"),
    ("a key twice in a list", b"groups: [{match: a, lr: 1, lr: 2}]\n", "gives lr twice, again at line 1"),
    ("negative", b"lr: -1\n", "lr must be a finite number above 0"),
]


@table(RECIPES)
def test_recipes(case, fails, tmp_path):
    _, content, *words = case
    (tmp_path / "recipe.yaml").write_bytes(content)
    given = "" if b"data:" in content else "--data {data}"
    given += "" if b"out:" in content else " --out run"
    given += "" if b"mixer:" in content else " --device nowhere"  # should the recipe be taken, it ends there
    one_sentence(fails(f"train {given} --recipe recipe.yaml", USAGE), words)


@table(
    [
        ("train --recipe nowhere.yaml", USAGE, "cannot read the recipe nowhere.yaml: No such file"),
        ("eval --recipe {tmp}", USAGE, "cannot read the recipe {tmp}: Is a directory"),
        ("data --recipe {corpus}/00.txt/x", USAGE, "cannot read the recipe", "Not a directory"),
        ("generate --recipe ''", USAGE, "generate: --recipe is empty"),
        ("compare --recipe", USAGE, "--recipe: expected one argument"),
    ]
)
def test_recipes_that_cannot_be_read(case, fails):
    fails(*case)


@table(
    [
        ("train", "arms: [dca]", "unknown option 'arms' in the recipe", "; `depthmix compare` and", "have it"),
        ("compare", "seeds: 3", "seeds must be a list, got 3"),
        ("compare", "seeds: [a]", "seeds must be a whole number, got 'a'"),
        ("compare", "seeds: [1.5]", "seeds must be a whole number, got 1.5"),
        ("compare", "arms: residual", "arms must be a list, got 'residual'"),
        (
            "compare",
            "data: d\nout: s\narms: [{attnres: 3}]",
            "an arm is a rule, or has mixer and",
            "got {{'attnres': 3}}",
        ),
        ("compare", "data: d\nout: s\nseeds: []\narms: [residual]", "seeds must be a list of at least one integer"),
        ("data", "input: book.txt", "input must be a list, got 'book.txt'"),
        ("data", "val_fraction: half", "val_fraction must be a number, got 'half'"),
        ("eval", "input: [1]", "input must be text, got 1"),
        ("train", "question: Why?", "unknown option 'question' in the recipe", "; `depthmix compare` and", "have it"),
        ("generate", "top_p: [0.9]", "top_p must be a number, got [0.9]"),
    ]
)
def test_recipes_of_other_commands(case, fails, tmp_path):
    command, text, *words = case
    (tmp_path / "recipe.yaml").write_text(text)
    fails(f"{command} --recipe recipe.yaml", USAGE, *words)


def bomb(levels, each=10):
    """A list of ten lists of ten …: every level is ten times as large once aliases are written out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * each)}]" for i in range(1, levels)]
    return "\n".join([*lines, f"steps: *a{levels - 1}"]).encode()


ALIASES = [
    ("seven levels", bomb(7), "its aliases expand to more than 100,000 characters"),
    ("as keys", b"a: &a {x: 1}\n? {? *a : 1}\n: 2\n", "is not YAML"),
    ("by merging", bomb(7).replace(b"steps: ", b"<<: "), "its aliases expand to"),
    ("many levels", bomb(800, 2), "its aliases expand to"),
    ("holds itself", b"steps: &a [*a]\n", "one of its values holds itself"),
    ("long", b"prompt: " + b"x" * 200_000, "it has more than 100,000 characters"),
]


@table(ALIASES)
def test_recipes_stay_small(case, fails, tmp_path):
    """306 bytes once gave a message of 39 megabytes."""
    _, content, *words = case
    (tmp_path / "recipe.yaml").write_bytes(content)
    tracemalloc.start()
    err = fails("train --recipe recipe.yaml", USAGE, "recipe.yaml", *words)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert len(err) < 500


def test_an_alias_may_be_used(fails, tmp_path):
    (tmp_path / "recipe.yaml").write_text("steps: &n 3\nwarmup: *n\n")
    fails("train --recipe recipe.yaml --data {data} --out run", USAGE, "warmup must be shorter than the run of 3 steps")


@table(
    [
        ("text", "steps: " + "x" * 50_000, "steps must be a whole number, got 'xxx"),
        ("list", f"steps: [{'1, ' * 10_000}1]", "steps must be a whole number, got [1, 1, "),
        ("unknown", "x" * 900 + ": 5", "unknown option 'xxx"),
        ("twice", "steps: 1\n" + f"{'x' * 900}: 1\n{'x' * 900}: 1", "gives xxx"),
        ("options", "mixer: attnres\nmixer_options: {ways: " + "9" * 4000 + "}", "ways"),
    ]
)
def test_messages_stay_short(case, fails, tmp_path):
    _, text, *words = case
    (tmp_path / "recipe.yaml").write_text(text)
    assert len(fails("train --recipe recipe.yaml --data {data} --out run", USAGE, *words)) < 2100


def test_flags_are_not_echoed_whole(fails):
    for line in (
        f"train --steps {'x' * 10_000}",
        f"train --{'x' * 10_000}",
        f"{'x' * 10_000}",
        f"eval a {'b' * 10_000}",
    ):
        assert len(fails(line, USAGE)) < 2100
