"""`each`: many small cases in one test, where pytest's own 5 to 10 ms per test would be most of the time."""

import functools
import inspect

import torch


def each(names, cases, ids=None):
    """Decorate a test to run with every case, each with the seed that a test begins with.

    Args:
        names: As for pytest.mark.parametrize: the test's arguments, as a tuple or separated by commas.
        cases: A value per case, or a tuple of values for several names.
        ids: Names of cases for the note on a failure. Without them the values are told.

    Fixtures are made once for all cases, so nothing may depend on what a case does to them.
    """
    names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
    cases = [case if len(names) > 1 else (case,) for case in cases]
    assert cases, f"no cases of {names}"
    labels = [", ".join(map(_told, case)) for case in cases] if ids is None or callable(ids) else list(map(str, ids))

    def decorate(test):
        @functools.wraps(test)
        def with_every_case(**given):
            for label, case in zip(labels, cases, strict=True):
                torch.default_generator.manual_seed(0)
                try:
                    test(**given, **dict(zip(names, case, strict=True)))
                except BaseException as error:
                    error.add_note(f"in the case {', '.join(names)} = {label}")
                    raise

        asked = inspect.signature(test)
        rest = [p for p in asked.parameters.values() if p.name not in names]
        with_every_case.__signature__ = asked.replace(parameters=rest)
        return with_every_case

    return decorate


def _told(value):
    return getattr(value, "__name__", None) or str(value)
