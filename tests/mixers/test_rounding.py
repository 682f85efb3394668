"""One rounding: what a mixer reads and keeps in bf16 is what it would in fp32, rounded."""

import functools

import pytest
import torch
from torch.utils import _pytree as pytree

from depthmix.mixers.fast_path import plain_state
from harness import EVERY_VALUE, MIXERS, as_tuple, build, embedding, label


@pytest.mark.parametrize("name", MIXERS)
def test_what_is_read_and_kept_is_rounded_once(name):
    """Number by number it is what the same state gives in fp32, rounded; so all arithmetic is in fp32."""
    for choice in (choice for other, choice in EVERY_VALUE if other == name):
        # a mixture is rounded and then added to the stream; a sum of what leaves a window is rounded before it is read
        if choice.get("routing") == "add" or (choice.get("window") == 1 and name in ("dca", "grn")):
            continue
        # a block's outputs are added up one by one; an output times its gain is rounded before it is added
        kept_too = name not in ("denseformer", "mudd") and not choice.get("output_gain")
        mixer = build(name, 3, choice, random=True, dtype=torch.float32)
        check_rounded_once(mixer, kept_too, label(name, choice))


def check_rounded_once(mixer, kept_too, case):
    def near(narrow, wide):
        torch.testing.assert_close(narrow.float(), wide, rtol=2**-8, atol=1e-5, msg=lambda m: f"{case}: {m}")

    state = mixer.start(embedding(torch.bfloat16))
    for site in range(mixer.n_sites + 1):
        read = mixer.finish if site == mixer.n_sites else functools.partial(mixer.read, site=site)
        plain = plain_state(mixer, state)
        wide = pytree.tree_map(lambda t: t.float() if isinstance(t, torch.Tensor) else t, plain)
        for h, exact in zip(as_tuple(read(plain)), as_tuple(read(wide)), strict=True):
            near(h, exact)
        if site == mixer.n_sites:
            break
        y = embedding(torch.bfloat16)
        if kept_too:
            after = (plain_state(mixer, mixer.write(s, site, out)) for s, out in ((plain, y), (wide, y.float())))
            for kept, exact in zip(*map(pytree.tree_leaves, after), strict=True):
                if kept is not None:
                    near(kept, exact)
        state = mixer.write(state, site, y)
