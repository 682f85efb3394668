"""`depthmix.check_mixer`: check that a user-defined mixer keeps the contract of the package's mixers."""

from __future__ import annotations

import copy
import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from depthmix.errors import UserError
from depthmix.mixers import Mixer, create_mixer, mixer_class
from depthmix.mixers.registry import list_mixers

DIM, N_BLOCKS = 24, 3
MARKS = {"passed": "✓", "failed": "✗", "skipped": "–"}


class MixerCheckError(AssertionError):
    """Error for a mixer that failed checks. The message lists them."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; `detail` says what is wrong, or why the check was skipped."""

    name: str
    status: Literal["passed", "failed", "skipped"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.status]} {self.name}" + (f": {self.detail}" if self.detail else "")


class MixerReport:
    """The result of `check_mixer`.

    `report["causality"]` is the result of one check, and `report.passed` is true if no check failed.
    """

    def __init__(self, mixer: str, results: Mapping[str, CheckResult]) -> None:
        self.mixer, self.results = mixer, dict(results)

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[CheckResult]:
        """The checks that failed."""
        return [result for result in self.results.values() if result.status == "failed"]

    def raise_if_failed(self) -> None:
        """Raise `MixerCheckError`, which lists every failure, if there is one."""
        if self.failures:
            raise MixerCheckError(
                "\n".join([f"{self.mixer} fails {len(self.failures)} checks:", *map(str, self.failures)])
            )

    def __getitem__(self, name: str) -> CheckResult:
        return self.results[name]

    def __repr__(self) -> str:
        return "\n".join([self.mixer, *(f"  {result}" for result in self.results.values())])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def check_mixer(
    mixer: Mixer | type[Mixer] | str, *, dim: int = DIM, n_blocks: int = N_BLOCKS, **options: Any
) -> MixerReport:
    """Check a mixer on small inputs on the CPU. Nothing is trained, and the mixer itself does not change.

    Args:
        mixer: A mixer, its class, or the name that the class is registered under.
        dim: Channels of the mixer that is built for a class or a name.
        n_blocks: Transformer blocks of that mixer.
        **options: Options of that mixer.

    Returns:
        The results by name:
            contract: shapes, ways and dtypes of start, read, write and finish.
            states: a state is a value, and inputs are not changed.
            causality: nothing depends on later tokens or on other rows of the batch.
            locality: every token is mixed independently of the others.
            inference: a pass under no_grad gives the same results.
            gradients: autograd agrees with finite differences in fp64.
            precision: bf16 is within rounding of fp32.
            parameters: reset_parameters sets all of them, and they stay fp32 in a bf16 model.
            copies: deep copies and state dicts.
            contributions: the contributions of a read's sources add up to the read.
            pipeline: two pipeline stages compute what the whole computes; skipped if the rule cannot be divided.

    Raises:
        UserError: The argument is not a mixer, or its class is not registered.
        OptionError: The options or sizes do not fit the mixer.

    Examples:
        >>> depthmix.check_mixer("my_rule", init=0.9).raise_if_failed()
    """
    # Slow to import.
    from depthmix.testing.mixer_checks import CHECKS, NotApplicable

    subject = _build(mixer, dim, n_blocks, options)
    results: dict[str, CheckResult] = {}
    for name, check in CHECKS.items():
        broken = results.get("contract")
        if broken is not None and broken.status == "failed":
            results[name] = CheckResult(name, "skipped", "the contract does not hold")
            continue
        try:
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(0)
                check(copy.deepcopy(subject))
            results[name] = CheckResult(name, "passed")
        except NotApplicable as error:
            results[name] = CheckResult(name, "skipped", str(error))
        # Any exception of a rule is a failure of the rule.
        except Exception as error:
            results[name] = CheckResult(name, "failed", _words(error))
    return MixerReport(_described(subject), results)


def _build(mixer: Any, dim: int, n_blocks: int, options: dict[str, Any]) -> Mixer:
    """Return a mixer on the CPU that the checks may copy."""
    if isinstance(mixer, Mixer):
        if options:
            raise UserError(
                f"check_mixer: options are for a class or a name, and this {mixer.name} is already built: leave them out"
            )
        return copy.deepcopy(mixer).cpu().eval()
    if isinstance(mixer, type) and issubclass(mixer, Mixer):
        name = mixer.__dict__.get("name")
        if name not in list_mixers() or mixer_class(name) is not mixer:
            raise UserError(f"check_mixer: {mixer.__name__} is not registered: decorate it with @register('its_name')")
        mixer = name
    if not isinstance(mixer, str):
        raise UserError(f"check_mixer takes a mixer, its class or its name, got {type(mixer).__name__}")
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        return create_mixer(mixer, dim=dim, n_blocks=n_blocks, **options).eval()


def _described(mixer: Mixer) -> str:
    return f"{mixer.name}({mixer.extra_repr()})"


def _words(error: Exception) -> str:
    """Format an error in one line, with its type unless this package raised it."""
    text = " ".join(str(error).split())
    is_ours = isinstance(error, AssertionError) or type(error).__module__.startswith("depthmix")
    return text if is_ours and text else f"{type(error).__name__}: {text}" if text else type(error).__name__
