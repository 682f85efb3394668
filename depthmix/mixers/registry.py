"""The registry of rules: names, options that are checked whenever a mixer is built, and `create_mixer`."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from depthmix.mixers.base import Mixer
from depthmix.mixers.layout import Layout, Sites
from depthmix.mixers.options import OptionError, check_options, options_of, plain_value
from depthmix.names import nearest

MixerType = TypeVar("MixerType", bound=type[Mixer])
_MIXERS: dict[str, type[Mixer]] = {}


def register(name: str) -> Callable[[MixerType], MixerType]:
    """Make a rule known under a name, as a class decorator.

    Args:
        name: letters, digits, _, - and . only.

    Raises:
        OptionError: the name is taken or malformed, or an option of the constructor has no default or no annotation.

    Examples:
        >>> @register("my_rule")
        ... class MyRule(Mixer): ...
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        rule = "a mixer's name is of letters, digits, _, - and ., and is given when it is registered"
        raise OptionError(f"{rule}, as in @register('my_rule'), got {name!r}")

    def decorate(cls: MixerType) -> MixerType:
        known = _MIXERS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise OptionError(f"there is a mixer {name!r} already, {known.__module__}.{known.__qualname__}")
        cls.name, cls.options = name, options_of(name, cls.__init__)
        build = cls.__init__

        @functools.wraps(build)
        def checked(
            self: Mixer, dim: int, n_blocks: int | None = None, *, sites: Sites | None = None, **options: Any
        ) -> None:
            dim, n_blocks = plain_value(dim), plain_value(n_blocks)
            options = {option: plain_value(value) for option, value in options.items()}
            check_options(name, cls.options, options)
            # A base class that is registered too finds the layout of the class that is built.
            layout = self.__dict__.get("layout")
            outermost = layout is None
            if layout is None:
                layout = Layout.of(name, n_blocks, sites)
                # nn.Module's own __setattr__ works only after its constructor.
                object.__setattr__(self, "layout", layout)
                object.__setattr__(self, "chosen", {n: options.get(n, o.default) for n, o in cls.options.items()})
            # A bf16 default must not reach a mixer's parameters.
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.promote_types(default, torch.float32))
            try:
                build(self, dim, layout.n_blocks, **options)
            finally:
                torch.set_default_dtype(default)
            if outermost:
                _check_built(self)
                self.signature = f"{name}({self.extra_repr()})"

        cls.__init__ = checked  # type: ignore[method-assign]
        _MIXERS[name] = cls
        return cls

    return decorate


def _check_built(mixer: Mixer) -> None:
    """Refuse an option that hides a method, and numbers of ways that no model knows."""
    for option in mixer.options:
        if option in mixer.__dict__ and callable(getattr(Mixer, option, None)):
            hides = f"option {option!r} is kept as self.{option}, which hides the method of that name"
            raise OptionError(f"{mixer.name}: {hides}; keep it under another")
    for site in range(mixer.n_sites):
        if mixer.ways(site) not in (1, 2, 3):
            raise OptionError(f"{mixer.name}: a site has 1, 2 or 3 ways, site {site} has {mixer.ways(site)}")


def list_mixers() -> list[str]:
    """Return the names of all rules, sorted."""
    return sorted(_MIXERS)


def mixer_class(name: str) -> type[Mixer]:
    """Return the class that is registered under a name; OptionError if there is none."""
    if name not in _MIXERS:
        rule, colon, _ = str(name).partition(":")
        # Tables and comparisons write a rule with its options.
        if colon and rule in _MIXERS:
            message = f"mixer {name!r} is a rule with its options, which are given apart here"
            raise OptionError(f"{message}: mixer {rule!r}, and each option by its name")
        hint = (
            nearest(str(name), _MIXERS)
            or "; one of your own is known once its file is imported, in a command with --modules FILE"
        )
        raise OptionError(f"unknown mixer {name!r}; there are {', '.join(list_mixers())}{hint}")
    return _MIXERS[name]


def rule_summary(name: str) -> str:
    """Return the first line of a rule's file, which says what the rule is; empty if the file begins without a docstring."""
    document = getattr(sys.modules[mixer_class(name).__module__], "__doc__", None) or ""
    return document.strip().partition("\n")[0]


def rule_title(name: str) -> str:
    """Return a rule's name in words: its summary as far as the first bracket or punctuation mark.

    Examples:
        >>> rule_title("attnres")
        'Attention Residuals'
    """
    title = re.split(r" \(|[:;.,]", rule_summary(name))[0]
    return re.sub(r"^The ", "the ", title)


def create_mixer(
    name: str, *, dim: int, n_blocks: int | None = None, sites: Sites | None = None, **options: Any
) -> Mixer:
    """Build a mixer.

    Args:
        name: a registered rule (`list_mixers`).
        dim: channels of the model.
        n_blocks: Transformer blocks.
        sites: the names of a block's sites, attention and an MLP by default, as in ("attention", "cross_attention", "mlp"); or a list
            of blocks, each with its own sites, which also says how many blocks there are.
        options: the rule's own options.

    Raises:
        OptionError: an unknown rule or option, or a value that it does not take.

    Examples:
        >>> depthmix.create_mixer("attnres", dim=64, n_blocks=4, block_size=2).n_sites
        8
    """
    build: Any = mixer_class(name)
    return build(dim=dim, n_blocks=n_blocks, sites=sites, **options)
