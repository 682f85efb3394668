"""Which files a run's numbers depend on, and what of them counts."""

import ast
import gc
import io
import tokenize
from contextlib import suppress

import pytest

from depthmix import list_mixers
from depthmix.mixers import mixer_class
from depthmix.runs.code_checksums import KERNELS, accepted, checksum, code_id, code_of, differences

SOURCE = '''"""What it is."""

A = 1  # why


def f(x):
    """Twice."""
    return 2 * x
'''


def of(tmp_path, text, name="a.py"):
    path = tmp_path / name
    path.write_text(text)
    found = checksum(path)
    from depthmix.runs import code_checksums

    code_checksums._checksum.cache_clear()
    code_checksums._outline.cache_clear()
    return found


TRICKY = (
    r'''
a = "# no" + '# no'  # yes "one" 'two'
b = """ # no
  " # no '' \""" # no
"""  # yes
c = r"\# no\\"  # yes: r"
d = f"{a!r:>{3}} # no {b['k']}"  # yes
e = ""  # yes
g = "it's"  # isn't
'''
    + "h = ''' # no \\''' # no '''  # yes\n"
)


NESTED = """
class A:
    if a:
        import b
    else:
        from c import d
    async def e(self):
        try:
            import f
        except E:
            import g
        else:
            import h
        finally:
            import i
        for j in k:
            with l: import m
        else:
            while n:
                import o
        match p:
            case q:
                def r(): import s
"""


def test_no_statement_is_passed_over():
    from depthmix.runs import code_checksums

    tree = ast.parse(NESTED)
    found = [node for node in code_checksums._statements(tree) if isinstance(node, ast.stmt)]
    assert {*found} == {node for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    assert sum(isinstance(node, ast.Import | ast.ImportFrom) for node in found) == 9


def test_comments_are_those_that_python_finds():
    from depthmix.runs import code_checksums

    lines = TRICKY.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(TRICKY).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            assert token.string.startswith(("# yes", "# isn't"))
            lines[row - 1] = lines[row - 1][:column]
    assert code_checksums._without_comments(TRICKY) == "\n".join(lines)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("What it is.", "What it\nwas.", True),
        ("# why", "# why not", True),
        ("Twice.", "Two times.", True),
        ("\n\ndef", "\n\n\ndef", True),
        ("2 * x", "3 * x", False),
        ("    return", "        return", False),  # where a line stands is what it does
        ("A = 1", 'A = "# why"', False),
    ],
)
def test_comments_and_docstrings_do_not_count(tmp_path, old, new, same):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    if "        return" in new:
        changed = changed.replace("        return", "    if x:\n        return")
    assert (of(tmp_path, SOURCE) == of(tmp_path, changed)) == same


@pytest.mark.parametrize("text", ["A = 1", "A ="])
@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_on_if_it_was(tmp_path, text, collects):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with suppress(SyntaxError):
            of(tmp_path, text)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("mixer", list_mixers())
def test_an_arm_depends_on_its_own_mechanism_and_on_what_all_share(mixer):
    table = code_of(mixer)
    shared = {"models/decoder.py", "models/layers.py", "mixers/base.py", "train/loop.py", "train/optim.py"}
    shared |= {"train/evaluate.py", "data/dataset.py", "ops/norm.py"}
    assert shared <= set(table)
    assert KERNELS + mixer in table
    own = {f"{base.__module__.removeprefix('depthmix.').replace('.', '/')}.py" for base in mixer_class(mixer).__mro__}
    assert {f"mixers/{other}.py" for other in list_mixers()} & set(table) == {
        name for name in own if name.startswith("mixers/") and name[7:-3] in list_mixers()
    }
    assert not [name for name in table if name.startswith(("runs/", "compare/", "cli", "train/progress", "ops/gpu"))]


def test_specifications_count_by_themselves_and_kernels_together():
    table = code_of("attnres")
    assert "ops/depth_attention/reference.py" in table
    assert not [name for name in table if "kernels/" in name or name.endswith("/op.py")]
    assert "ops/depth_sum/reference.py" in table  # of a fast path, which the rule names as a string
    assert "models/__init__.py" not in table  # what it imports is followed to its file
    assert code_id(table) != code_id(table | {"ops/norm.py": "x"})


def test_tables_differ_in_shared_files_and_in_files_that_come_and_go():
    one, other = {"a": "1", "b": "1", "kernels of x": "1"}, {"a": "2", "c": "1", "kernels of x": "2"}
    assert differences([("x", one), ("y", other)], kernels=False) == {"a": {"1", "2"}}
    assert set(differences([("x", one), ("x", other)], kernels=True)) == {"a", "b", "c", "kernels of x"}
    assert differences([("x", one), ("x", one)], kernels=True) == {}


def test_what_was_accepted_goes_on_being_accepted():
    said = [{"files": {"a": ["1", "2"]}}, {"files": {"a": ["2", "3"]}}, {"files": {"b": ["1", "2"]}}]
    said.append({"files": {"a": ["4", "5"]}})
    assert accepted("a", {"1", "2"}, said)
    assert accepted("a", {"1", "3"}, said)  # through what lies between
    assert not accepted("a", {"1", "4"}, said)
    assert not accepted("c", {"1", "2"}, said)
    assert not accepted("a", {"1", "2"}, [])
