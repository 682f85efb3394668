"""The command line: parse, validate, call. Every field of a command's dataclass is a flag and a line of a YAML recipe."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from depthmix.config import CompareConfig, DataConfig, EvalConfig, GenerateConfig, RetrofitConfig, TrainConfig
from depthmix.errors import DISK, DIVERGED, INTERNAL, INTERRUPTED, PIPE, USAGE, UserError
from depthmix.names import nearest as nearest_of

EXIT_CODES = "Exit codes: 0 done; 1 a bug (--debug shows where); 2 wrong option or recipe; 3 unusable data; 4 unusable checkpoint; 5 diverged; 6 disk full or not writable; 130 interrupted and saved."


nearest = functools.partial(nearest_of, cutoff=0.65)  # flags are many and alike: suggest only what is close


class Parser(argparse.ArgumentParser):
    """argparse with errors of one sentence."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message.strip()}; see `{self.prog} --help`")


def coerce(command: str, name: str, hint: Any, value: Any) -> Any:
    """A flag's text or a recipe's value as the field's type; UserError where it does not fit."""
    members = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    expected = describe(hint)
    if type(None) in members and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    for kind in members:
        if get_origin(kind) is Literal:
            value = "off" if value is False and "off" in get_args(kind) else value  # YAML reads off as false
            if value in get_args(kind):
                return value
        if get_origin(kind) is list and isinstance(value, list):
            return [coerce(command, name, get_args(kind)[0], v) for v in value]
        if get_origin(kind) is dict:
            return pairs(command, name, value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind is str and isinstance(value, str) and "\0" not in value:
            return value
        if kind in (int, float) and not isinstance(value, bool):
            try:
                number = kind(value)
            except (TypeError, ValueError, OverflowError):
                continue
            if isinstance(value, str) or number == value:
                return number
    near = nearest(str(value), [c for k in members if get_origin(k) is Literal for c in get_args(k)])
    raise UserError(f"{command}: {name} must be {expected}, got {value!r}{near}")


def pairs(command: str, name: str, value: Any) -> dict[str, Any]:
    """A dictionary, or a list of key=value as on the command line."""
    from depthmix.mixers.options import parse_value

    if isinstance(value, list) and all(isinstance(v, str) and "=" in v for v in value):
        given: dict[str, Any] = {}
        for key, _, text in ((part.strip() for part in item.partition("=")) for item in value):
            if key in given:
                raise UserError(f"{command}: {name} gives {key} twice")
            given[key] = text
        value = given
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: parse_value(v) if isinstance(v, str) else v for k, v in value.items()}
    raise UserError(f"{command}: {name} must be written as option=value option=value, got {value!r}")


def describe(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("none" if m is type(None) else describe(m) for m in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) is list:
        return "a list"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, "option=value pairs")


def add_flags(parser: argparse.ArgumentParser, config: type, completing: bool) -> None:
    """One flag per field; its default is left to the recipe and the dataclass."""
    hints, plain = typing.get_type_hints(config), config()
    recipe = parser.add_argument(
        "--recipe", metavar="FILE", help="YAML file with any of the options below; flags come on top of it"
    )
    actions: list[argparse.Action] = [recipe]
    for field in dataclasses.fields(config):
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
            how["action"] = argparse.BooleanOptionalAction
        elif get_origin(hint) in (list, dict):
            how["metavar"] = "OPTION=VALUE" if get_origin(hint) is dict else "VALUE"
            how |= {"nargs": "+", "action": "extend"}  # a second --input comes on top of the first
        else:
            how["metavar"] = "{" + ",".join(get_args(hint)) + "}" if get_origin(hint) is Literal else "VALUE"
        actions.append(parser.add_argument(flag, **how))
    for action in actions if completing else ():
        offer(action, hints.get(action.dest))


def offer(action: argparse.Action, hint: Any) -> None:
    """Tell shell completion what a flag takes. Not for parsing, where argparse would refuse the rest in its own words."""
    import shtab

    from depthmix.mixers import list_mixers

    words = {"mixer": list_mixers(), "arms": list_mixers(), "device": ["auto", "cpu", "cuda", "mps"]}
    paths = dict.fromkeys(("data", "out", "run"), shtab.DIRECTORY)
    paths |= dict.fromkeys(("recipe", "input", "tokenizer"), shtab.FILE)
    action.choices = get_args(hint) if get_origin(hint) is Literal else words.get(action.dest)
    if action.dest in paths:
        action.complete = paths[action.dest]  # type: ignore[attr-defined]  # where shtab looks for it


def read_recipe(command: str, path: str) -> dict[str, Any]:
    """The lines of a YAML recipe."""
    import yaml

    class Once(yaml.SafeLoader):
        """Plain YAML lets the last of two lines with one name win, silently."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if (name := str(key.value)) in seen:
                    line = key.start_mark.line + 1
                    raise UserError(f"{command}: the recipe {path} gives {name} twice, again at line {line}")
                seen.add(name)
            return super().construct_mapping(node, deep)

    try:
        loaded = yaml.load(Path(path).read_text(encoding="utf-8"), Once)
    except OSError as error:
        raise UserError(f"{command}: cannot read the recipe {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{command}: the recipe {path} is not YAML{where}") from None
    if not isinstance(loaded, dict) or not all(isinstance(k, str) for k in loaded):
        raise UserError(f"{command}: the recipe {path} must hold lines of option: value")
    return loaded


def build_config(command: str, config: type, given: dict[str, Any]) -> Any:
    """The dataclass from its defaults, the recipe and the flags, in this order."""
    hints = typing.get_type_hints(config)
    recipe = given.pop("recipe", None)
    values = {**(read_recipe(command, recipe) if recipe is not None else {}), **given}
    for name in values:
        if name not in hints:
            raise UserError(f"{command}: unknown option {name!r} in the recipe {recipe}{nearest(name, list(hints))}")
    return config(**{name: coerce(command, name, hints[name], value) for name, value in values.items()})


def run_data(config: DataConfig) -> None:
    from depthmix.data.prepare import prepare, summary
    from depthmix.train.progress import phases

    with phases() as progress:
        folder = prepare(config, progress)
    print(summary(folder))


def run_train(config: TrainConfig) -> None:
    from depthmix.train.loop import train

    folder = train(config)
    result = folder.read_result()
    loss, perplexity, bits = (result[k] for k in ("val_loss", "perplexity", "bits_per_byte"))
    if loss is None:  # not finite: older versions let a run end so
        what = f"the run in {folder.path} ended in a loss that is not a number"
        raise UserError(f"{what}: its weights are not usable; start again in another folder, with a lower lr", DIVERGED)
    print(f"validation loss {loss:.4f}, perplexity {perplexity:.2f}, {bits:.4f} bits per byte; run in {folder.path}")


def run_compare(config: CompareConfig) -> None:
    from depthmix.study import compare

    compare(config).show()


def run_eval(config: EvalConfig) -> None:
    from depthmix.train.measure import measure

    measure(config)


def run_generate(config: GenerateConfig) -> None:
    from depthmix.train.generate import generate_stream

    c = config
    for piece in generate_stream(c.run, c.prompt, c.max_tokens, c.temperature, c.top_p, c.seed, c.device):
        print(piece, end="", flush=True)
    print()


def run_retrofit(config: RetrofitConfig) -> None:
    from depthmix.runs.retrofit import retrofit_folder

    print(retrofit_folder(config))


def run_list() -> None:
    from depthmix.mixers import list_mixers, mixer_class

    for name in list_mixers():
        cls = mixer_class(name)
        summary = (sys.modules[cls.__module__].__doc__ or "").strip().splitlines()[0]
        print(f"{name}: {summary}")
        for option in cls.options.values():
            print(f"    {option.name}: {option.describe()} (default: {option.default})")


def run_doctor() -> None:
    from depthmix.train.doctor import report

    print(report())


COMMANDS: dict[str, tuple[type | None, Callable[..., None], str]] = {
    "train": (TrainConfig, run_train, "train one language model"),
    "compare": (CompareConfig, run_compare, "train several mechanisms on the same data and compare them at equal cost"),
    "eval": (EvalConfig, run_eval, "loss, perplexity and bits per byte of a trained model on any text"),
    "generate": (GenerateConfig, run_generate, "continue a text with a trained model"),
    "retrofit": (
        RetrofitConfig,
        run_retrofit,
        "give a pretrained Hugging Face model a mechanism, with the same logits",
    ),
    "data": (DataConfig, run_data, "prepare a corpus"),
    "list": (None, run_list, "mechanisms and their options"),
    "doctor": (None, run_doctor, "versions, device, and what will be used"),
}


@functools.cache
def build_parser(completing: bool = False) -> argparse.ArgumentParser:
    """The whole program's parser, or the one that shell completion is made from."""
    import depthmix

    parser = Parser(
        prog="depthmix",
        description="Mixing over depth in Transformers: train, compare, look inside.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"depthmix {depthmix.__version__}")
    debug: Any = {"action": "store_true", "default": argparse.SUPPRESS, "help": "show the traceback of an error"}
    parser.add_argument("--debug", **debug)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (config, _, text) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=(config.__doc__ if config else text.capitalize() + "."), allow_abbrev=False
        )
        sub.add_argument("--debug", **debug)
        if config:
            add_flags(sub, config, completing)
    completion = commands.add_parser("completion", help='print shell completion: eval "$(depthmix completion bash)"')
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    return parser


def dispatch(argv: Sequence[str]) -> None:
    parser = build_parser()
    namespace, unknown = parser.parse_known_args(argv)
    given = vars(namespace)
    command = given.pop("command")
    given.pop("debug", None)  # `main` looks for it, so that it also shows what goes wrong in here
    if unknown:
        config = COMMANDS[command][0] if command in COMMANDS else None
        flags = ["--" + f.name.replace("_", "-") for f in dataclasses.fields(config)] if config else []
        raise UserError(
            f"{command or 'depthmix'}: unknown argument {unknown[0]!r}{nearest(unknown[0], [*flags, '--recipe'])}"
        )
    if command is None:
        parser.print_help()
        raise UserError(f"expected a command: {', '.join(COMMANDS)}")
    if command == "completion":
        import shtab

        print(shtab.complete(build_parser(completing=True), given["shell"]))
        return
    config, run, _ = COMMANDS[command]
    run(build_config(command, config, given)) if config else run()


def of_the_machine(error: BaseException) -> str:
    """What a user can do about an error of torch; nothing for one that nobody foresaw."""
    text = str(error)
    words = ("out of memory", "not enough memory", "can't allocate memory", "size calculation overflowed")
    if isinstance(error, MemoryError) or any(w in text.lower() for w in words):
        return "out of memory: use a smaller model, batch_size, micro_batch_size or seq_len, or checkpoint_activations"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"torch.compile failed ({text.strip().splitlines()[0]}): use --compile off"
    return ""


def explain(error: BaseException) -> tuple[str, int]:
    """The sentence and the exit code an error ends in."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("depthmix"):
        return f"this needs the package {error.name}: pip install 'depthmix[train]'", USAGE
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot write or read{where}: {error.strerror or error}", DISK
    if known := of_the_machine(error):
        return known, USAGE
    what = f"internal error ({type(error).__name__}: {error})"
    advice = "run again with --debug for the traceback"
    return f"{what}: this is a bug in depthmix, or in a mixer of your own, not in the command; {advice}", INTERNAL


def prepare_streams() -> None:
    """Streams that can be written to whatever comes: a closed one swallows all, and what has no letters here is spelt out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; what a user got wrong ends in one sentence on stderr and a code that says which kind it was."""
    argv = sys.argv[1:] if argv is None else argv
    prepare_streams()
    try:
        dispatch(argv)
        sys.stdout.flush()  # here, where a full disk or a reader that has left is still noticed
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at its end
        return PIPE
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in argv:
            traceback.print_exc()
        message, code = explain(error)
    with suppress(OSError):
        print(f"depthmix: {' '.join(message.splitlines())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
