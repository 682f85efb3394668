"""The command line: parse, validate, call. Every field of a command's dataclass is a flag and a line of a YAML recipe."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import sys
import time
import traceback
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from depthmix.config import (
    AccelerateConfig,
    CompareConfig,
    DataConfig,
    EvalConfig,
    ExploreConfig,
    GenerateConfig,
    InspectConfig,
    PlanConfig,
    ReportConfig,
    RetrofitConfig,
    TrainConfig,
)
from depthmix.errors import DATA, DISK, INTERNAL, INTERRUPTED, PIPE, USAGE, UserError
from depthmix.files import remedy
from depthmix.names import DEFAULT_MIXER, install_command
from depthmix.shown import shorten
from depthmix.values import build_config, nearest

EXIT_CODES = "Exit codes: 0 done; 1 a bug (--debug shows where); 2 wrong option or recipe; 3 unusable data; 4 unusable checkpoint; 5 diverged; 6 disk full or not writable; 130 interrupted and saved."


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one sentence, and which accepts values such as -1e-3."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # argparse recognises -1 and -0.5 as values, but takes -1e-3 for an option.
        self._negative_number_matcher = re.compile(r"-(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf|nan)$")

    def error(self, message: str) -> typing.NoReturn:
        unknown = re.match(r"argument COMMAND: invalid choice: (['\"].*['\"]) \(choose from", message)
        if unknown:
            near = nearest(unknown[1][1:-1].lower(), COMMANDS)
            message = f"unknown command {unknown[1]}; there are {', '.join(COMMANDS)}{near}"
            if unknown[1][1:-1] == "study":
                message = "studies are run by `depthmix compare`: give it the study's recipe, as in `depthmix compare recipes/studies/tiny.yaml`"
        elif message.endswith("expected one argument"):
            flag = message.removeprefix("argument ").partition(":")[0]
            message += f" (one that begins with a dash is written {flag}=-…)"
        raise UserError(f"{message.strip()}; see `{self.prog} --help`")


class Once(argparse.Action):
    """Store an option that may be given once. argparse would silently let the last one win."""

    advice = "give it once"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            before = getattr(namespace, self.dest)
            namespace.twice = f"{self.dest} is given twice, as {before!r} and as {values!r}; {self.advice}"
        setattr(namespace, self.dest, values)


class OnceOrAsWord(Once):
    """Store an option that may be given once, with its flag or as a word. An extra word may belong to another option."""

    advice = "quotes keep several words together"


class OnceOrNot(argparse.BooleanOptionalAction):
    """Store --flag or --no-flag, which may be given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            before = "--" if getattr(namespace, self.dest) else "--no-"
            namespace.twice = (
                f"{option_string} comes after {before}{self.dest.replace('_', '-')}; give one of them once"
            )
        super().__call__(parser, namespace, values, option_string)


def add_flags(parser: argparse.ArgumentParser, config: type, completing: bool) -> None:
    """Add one flag per field. Defaults come from the recipe and the dataclass."""
    hints, plain = typing.get_type_hints(config), config()
    recipe = parser.add_argument(
        "--recipe",
        action=Once,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file with any of the options below; flags override it",
    )
    actions: list[argparse.Action] = [recipe]
    for field in (field for field in dataclasses.fields(config) if field.metadata["flag"]):
        flag, hint = "--" + field.name.replace("_", "-"), hints[field.name]
        default = getattr(plain, field.name)
        shown = (
            ""
            if default in ("", [], {}, None)
            else f" (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"
        )
        text = field.metadata["help"].replace("%", "%%") + shown
        how: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
        if hint is bool:
            how["action"] = OnceOrNot
        elif get_origin(hint) in (list, dict):
            one = hint if get_origin(hint) is dict else get_args(hint)[0]
            how["metavar"] = "OPTION=VALUE" if get_origin(one) is dict else "VALUE"
            how |= {"nargs": "+", "action": "extend"}  # a second --input adds to the first
        else:
            how["metavar"] = "{" + ",".join(get_args(hint)) + "}" if get_origin(hint) is Literal else "VALUE"
            how["action"] = OnceOrAsWord if field.metadata["first"] else Once
        actions.append(parser.add_argument(flag, **how))
        if field.metadata["first"]:
            several = get_origin(hint) is list
            how = {"nargs": "*", "action": "extend"} if several else {"nargs": "?", "action": OnceOrAsWord}
            how |= {"default": argparse.SUPPRESS, "metavar": field.name.upper()}
            actions.append(parser.add_argument(field.name, help=f"Same as {flag}", **how))
    for action in actions if completing else ():
        offer(action, hints.get(action.dest))


def offer(action: argparse.Action, hint: Any) -> None:
    """Declare a flag's values for shell completion only: parsing with them would replace our error messages by
    argparse's.
    """
    import shtab

    from depthmix.mixers import list_mixers

    words = {"mixer": list_mixers(), "arms": list_mixers(), "device": ["auto", "cpu", "cuda", "mps"]}
    paths = dict.fromkeys(("data", "out", "run", "against", "init", "model"), shtab.DIRECTORY)
    paths |= dict.fromkeys(("recipe", "input", "images", "tokenizer"), shtab.FILE)
    action.choices = get_args(hint) if get_origin(hint) is Literal else words.get(action.dest)
    if action.dest in paths:
        action.complete = paths[action.dest]  # type: ignore[attr-defined]  # read by shtab


def run_data(config: DataConfig) -> None:
    from depthmix.data import prepare, prepare_images
    from depthmix.train.progress import phases

    with phases() as progress:
        if config.images:
            print(prepare_images.summary(prepare_images.prepare_images(config, progress)))
        else:
            folder = prepare.prepare(config, progress)
            print(prepare.summary(folder))
            for warning in prepare.warnings(folder):
                print(f"depthmix: warning: {warning}", file=sys.stderr)


def this_rank() -> int | None:
    """Return this process's rank among those that torchrun has started; None if it is alone."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(rank) if rank.isdigit() and size.isdigit() and int(size) > 1 else None


def run_train(config: TrainConfig) -> None:
    from depthmix.compare.arms import options_apart
    from depthmix.train.loop import train

    folder = train(options_apart("train", config))
    result = folder.read_result()
    if this_rank():
        return
    if "accuracy" in result:
        learnt = f"accuracy {result['accuracy']:.2%}"
    else:
        from depthmix.train.evaluate import describe_learnt

        learnt = describe_learnt(result["perplexity"], result["bits_per_byte"])
    print(f"validation loss {result['val_loss']:.4f}, {learnt}; run in {folder.path}")


def run_compare(config: CompareConfig) -> None:
    begun = time.monotonic()  # a time limit includes importing torch
    from depthmix.compare.engine import compare

    compare(config, begun=begun).show()


def run_report(config: ReportConfig) -> None:
    from depthmix.compare.report import report

    print(f"Report: {report(config)}")


def run_plan(config: PlanConfig) -> None:
    from depthmix.compare.arms import Arm, options_apart, parse_arms, rule_of
    from depthmix.compare.modules import load_modules
    from depthmix.mixers import list_mixers
    from depthmix.parallel.plan.figure import check_path, draw
    from depthmix.parallel.plan.plan import plan

    if config.figure:
        check_path(config.figure)
    load_modules(Path(), config.modules, "modules")
    given_apart = config.mixer_options
    config = options_apart("plan", config)
    if config.arms and given_apart:
        raise UserError("plan: mixer_options belong to one mixer: write them behind its arm, as in NAME:option=value")
    named = config.mixer != DEFAULT_MIXER or config.mixer_options  # a recipe of `train`
    chosen = [Arm(config.mixer, config.mixer_options).label] if named else list_mixers()
    plain_first = [DEFAULT_MIXER, *(label for label in chosen if label != DEFAULT_MIXER)]
    arms = parse_arms(list(dict.fromkeys(map(rule_of, config.arms))) or plain_first)
    planned = plan(config, [(arm.label, arm.name, arm.options) for arm in arms])
    print(planned.text)
    for warning in planned.warnings:
        print(f"depthmix: warning: {warning}", file=sys.stderr)
    if config.figure:
        draw(planned.rows, config, config.figure)


def run_eval(config: EvalConfig) -> None:
    from depthmix.train.measure import measure

    measure(config)


def run_generate(config: GenerateConfig) -> None:
    from depthmix.train.generate import generate_stream

    c = config
    for piece in generate_stream(c.run, c.prompt, c.max_tokens, c.temperature, c.top_p, c.seed, c.device, c.accelerate):
        print(piece, end="", flush=True)
    print()


def run_inspect(config: InspectConfig) -> None:
    from depthmix.train.inspect import inspect

    inspect(config)


def run_explore(config: ExploreConfig) -> None:
    from depthmix.compare.report import explored
    from depthmix.report.serve import explore

    explore(config, explored)


def run_retrofit(config: RetrofitConfig) -> None:
    from depthmix.compare.arms import options_apart
    from depthmix.runs.retrofit import retrofit_folder

    print(retrofit_folder(options_apart("retrofit", config)))


def run_accelerate(config: AccelerateConfig) -> None:
    from depthmix.train.accelerate import accelerate

    accelerate(config)


def run_list() -> None:
    from depthmix.mixers import list_mixers, mixer_class, rule_summary

    for name in list_mixers():
        print(f"{name}: {rule_summary(name)}")
        for option in mixer_class(name).options.values():
            print(f"    {option.name}: {option.describe()} (default: {option.default})")


def run_doctor() -> None:
    from depthmix.train.doctor import report

    print(report())


COMMANDS: dict[str, tuple[type | None, Callable[..., None], str]] = {
    "train": (TrainConfig, run_train, "train one model, on text or on images"),
    "compare": (CompareConfig, run_compare, "train several rules on the same data and compare them at equal cost"),
    "report": (ReportConfig, run_report, "write one page about runs: results, costs, and what layers read"),
    "plan": (PlanConfig, run_plan, "estimate memory, communication and step time of a recipe on GPUs you do not have"),
    "eval": (
        EvalConfig,
        run_eval,
        "measure a trained model: loss, perplexity and bits per byte of text, accuracy on images",
    ),
    "generate": (GenerateConfig, run_generate, "continue a text with a trained model"),
    "inspect": (InspectConfig, run_inspect, "look inside a trained model: what layers read from each other"),
    "explore": (ExploreConfig, run_explore, "type a text in a browser and see what the layers read at each token"),
    "retrofit": (
        RetrofitConfig,
        run_retrofit,
        "give a pretrained Hugging Face model a rule, with the same logits",
    ),
    "accelerate": (
        AccelerateConfig,
        run_accelerate,
        "check and time a Hugging Face model that mixes over depth on depthmix's operators",
    ),
    "data": (DataConfig, run_data, "prepare a corpus or images"),
    "list": (None, run_list, "list the rules and their options"),
    "doctor": (None, run_doctor, "show versions, the device, and which operators will use kernels"),
}


WITHOUT_MODULES = ("data", "doctor")


@functools.cache
def build_parser(completing: bool = False) -> argparse.ArgumentParser:
    """Build the whole program's parser, or the one that shell completion is generated from."""
    import depthmix

    parser = Parser(
        prog="depthmix",
        description="Mixing over depth in Transformers: train, compare, look inside.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"depthmix {depthmix.__version__}")
    debug: Any = {"action": "store_true", "default": argparse.SUPPRESS, "help": "show the traceback of an error"}
    parser.add_argument("--debug", **debug)
    modules: Any = {
        "action": "append",
        "default": argparse.SUPPRESS,
        "metavar": "FILE",
        "help": "Python file that registers rules of your own, or folder of such files; it runs first. May be repeated",
    }
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (config, _, text) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=(config.__doc__ if config else text.capitalize() + "."), allow_abbrev=False
        )
        sub.add_argument("--debug", **debug)
        if name not in WITHOUT_MODULES:
            sub.add_argument("--modules", **modules)
        if config:
            add_flags(sub, config, completing)
        if config in (CompareConfig, PlanConfig):
            how: Any = {"nargs": "?", "action": OnceOrAsWord, "metavar": "RECIPE", "help": "Same as --recipe"}
            sub.add_argument("recipe", default=argparse.SUPPRESS, **how)
    completion = commands.add_parser("completion", help='print shell completion: eval "$(depthmix completion bash)"')
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    return parser


def dispatch(argv: Sequence[str]) -> None:
    parser = build_parser()
    namespace, unknown = parser.parse_known_args(argv)
    given = vars(namespace)
    command = given.pop("command")
    modules = given.pop("modules", [])
    given.pop("debug", None)  # read by `main`, so that it covers errors in this function
    twice = given.pop("twice", "")
    if unknown:
        config = COMMANDS[command][0] if command in COMMANDS else None
        flags = ["--" + f.name.replace("_", "-") for f in dataclasses.fields(config)] if config else []
        flags += ["--recipe"] * bool(config) + ["--modules"] * (command not in WITHOUT_MODULES)
        near = nearest(unknown[0], flags) if unknown[0] != "--" else ""
        raise UserError(f"{command or 'depthmix'}: unknown argument {unknown[0]!r}{near}")
    if twice:  # checked after unknown flags, whose value the extra word may be
        raise UserError(f"{command}: {twice}")
    if command is None:
        parser.print_help()
        raise UserError(f"expected a command: {', '.join(COMMANDS)}")
    if command == "completion":
        import shtab

        print(shtab.complete(build_parser(completing=True), given["shell"]))
        return
    if modules:
        from depthmix.compare.modules import load_modules

        load_modules(Path(), modules, "--modules")
    config, run, _ = COMMANDS[command]
    run(build_config(command, config, given, RECORDED.get(command, options_of_init))) if config else run()


def options_of_init(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the model in `init` decides."""
    if not given.get("init") or not Path(given["init"]).exists():  # the command itself reports a missing folder
        return {}
    from depthmix.runs.init import init_values

    # The options of the folder's mixer do not apply to another mixer or to the arms of a comparison.
    return init_values(given["init"], not {"mixer", "arms"} & given.keys())


def options_of_run(given: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of the run in `out`, for a bare `depthmix train --out RUN`. A command that names its data gets
    no recorded options.
    """
    out = Path(given.get("out") or ".")
    if "data" in given or not given.get("out") or not (out / "recipe.yaml").is_file():
        return options_of_init(given)
    from depthmix.mixers import list_mixers
    from depthmix.runs.folder import RunFolder
    from depthmix.runs.restore import read_train_config

    folder = RunFolder.open(out)
    recorded = read_train_config(folder)
    if recorded.mixer not in list_mixers():
        what = f"{out} was trained with the rule {recorded.mixer!r}, which is not one of depthmix's"
        raise UserError(f"{what}: give its file again, with --modules FILE")
    try:
        place = folder.find_data(recorded.data)
    except UserError as error:
        advice = f"say where it lies now, with --recipe {out / 'recipe.yaml'} --out {out} --data FOLDER"
        raise UserError(
            f"{out} was trained on {recorded.data}, which is not there as it was: {advice}", DATA
        ) from error
    if Path(recorded.data).absolute() != place:
        recorded.data = str(place)
    if given.get("mixer", recorded.mixer) != recorded.mixer:
        recorded.mixer_options = {}  # they belong to the recorded mixer
    return dataclasses.asdict(recorded)


# Options recorded elsewhere, by command. They apply where neither flags nor a recipe give a value.
RECORDED = {"train": options_of_run}


def advise_on_torch_error(error: BaseException) -> str:
    """Return advice for a known error of torch; "" for an unknown one."""
    text = str(error)
    words = [
        "out of memory",
        "not enough memory",
        "can't allocate memory",
        "cannot allocate memory",
        "bad_alloc",
        "size calculation overflowed",
        "failed to map segment",
        "status_alloc_failed",
    ]
    if isinstance(error, MemoryError) or any(w in text.lower() for w in words):
        return "out of memory: use a smaller model, batch_size, micro_batch_size or seq_len, or checkpoint_activations"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"torch.compile failed ({text.strip().splitlines()[0]}): use --compile off"
    return ""


def explain(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code for an error."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("depthmix"):
        return f"this needs the package {error.name}: {install_command('train')}", USAGE
    if advice := advise_on_torch_error(error):
        return advice, USAGE
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot write or read{where}: {error.strerror or error}; {remedy(error)}", DISK
    what = f"internal error ({type(error).__name__}: {error})"
    advice = "run again with --debug for the traceback"
    return f"{what}: this is a bug in depthmix, or in a mixer of your own, not in the command; {advice}", INTERNAL


def prepare_streams() -> None:
    """Make stdout and stderr safe to write to: discard output to a closed stream, and escape characters that it cannot
    encode.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A user's mistake prints one sentence to stderr."""
    argv = sys.argv[1:] if argv is None else argv
    prepare_streams()
    try:
        dispatch(argv)
        sys.stdout.flush()  # raises here for a full disk or a closed pipe
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return PIPE
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in argv:
            traceback.print_exc()
        message, code = explain(error)
        if this_rank() and getattr(error, "shared", False):  # the first process reports it
            return code
    which = "" if this_rank() is None else f"rank {this_rank()}: "
    with suppress(OSError):
        print(f"depthmix: {which}{' '.join(shorten(message).splitlines())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
