"""Tables of addresses hold what their kernel is to read until it is launched, whoever else launches kernels meanwhile."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.ops import use_backend
from ops.helpers import assert_near
from ops.test_depth_attention_order import Results, Stack, plain, tokens

addresses = pytest.importorskip("depthmix.ops.gpu.addresses")
CPU = torch.device("cpu")
WAIT = 60  # seconds, after which a test that hangs fails


def test_kept_tables_lie_in_one_memory_that_begins_again_when_it_is_full() -> None:
    arena = addresses.Arena(CPU, room=64)
    (first,) = arena.tables(((1, 2, 3),))
    assert arena.tables(((1, 2, 3),))[0] is first
    others = [arena.tables(((k, 2**41, 7),))[0] for k in range(10, 13)]
    assert [t.tolist() for t in (first, *others)] == [[1, 2, 3], *([k, 2**41, 7] for k in range(10, 13))]
    (memory,) = arena.pieces
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    assert all(start <= t.data_ptr() < end and t.data_ptr() % 128 == start % 128 for t in others)
    (again,) = arena.tables(((5,),))  # the fifth of four
    assert again.data_ptr() == start
    assert arena.tables(((1, 2, 3),))[0].tolist() == [1, 2, 3]  # written anew
    assert arena.tables((tuple(range(100)),))[0].tolist() == list(range(100))  # more than there is room for


def test_the_second_table_of_a_launch_never_overwrites_the_first() -> None:
    """The first one is kept from before, and there is no room left for the second."""
    arena = addresses.Arena(CPU, room=64)
    for k in range(4):
        arena.tables(((k,),))
    both = arena.tables(((0,), (7, 8)))
    assert [t.tolist() for t in both] == [[0], [7, 8]]
    assert both[0].data_ptr() % 128 == both[1].data_ptr() % 128
    assert arena.tables(((0,), (7, 8))) is both
    assert [t.tolist() for t in arena.tables(tuple((k,) for k in range(9)))] == [
        [k] for k in range(9)
    ]  # too many for it


def test_an_arena_grows_up_to_its_room_and_then_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "FIRST_PIECE", 32)
    arena = addresses.Arena(CPU, room=100)
    made = {k: arena.tables(((k, k),))[0] for k in range(6)}  # 16 numbers each; 32, 32 and 36
    assert [len(piece) for piece in arena.pieces] == [32, 32, 36]
    assert {k: t.tolist() for k, t in made.items()} == {k: [k, k] for k in range(6)}
    assert arena.tables(((9, 9),))[0].data_ptr() == made[0].data_ptr()
    assert len(arena.pieces) == 3
    assert arena.cached.keys() == {((9, 9),)}


def in_threads(*jobs: Callable[[], None]) -> None:
    """Run each job in a thread of its own, and raise what one of them raised."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def new_arenas(patch: pytest.MonkeyPatch, room: int) -> None:
    """Forget the arenas there are, and give those to come room for so many numbers."""
    patch.setattr(addresses, "_idle", {})
    patch.setattr(addresses, "_thread_arenas", addresses._ThreadArenas())
    patch.setattr(addresses.Arena.__init__, "__defaults__", (room,))


def test_two_threads_on_one_stream_never_have_the_same_memory() -> None:
    """One asks for its table while the other fills its own, and fills it before the other launches."""
    found: dict[str, Tensor] = {}
    asked, filled = threading.Event(), threading.Event()

    def first() -> None:
        found["first"] = addresses.address_table((1, 2), CPU)
        asked.set()
        assert filled.wait(WAIT)
        found["seen"] = found["first"].clone()

    def second() -> None:
        assert asked.wait(WAIT)
        found["same"] = addresses.address_table((1, 2), CPU)
        for k in range(2 * 256 // addresses.ALIGNED):  # restarts its own arena
            addresses.address_table((k, -k), CPU)
        filled.set()

    with pytest.MonkeyPatch.context() as patch:
        new_arenas(patch, 256)
        in_threads(first, second)
    assert found["seen"].tolist() == [1, 2]
    assert found["first"].data_ptr() != found["same"].data_ptr()


def test_a_thread_that_ends_leaves_its_memory_to_the_next_one() -> None:
    """Ten requests, each in a thread of its own, one after the other: memory for one."""
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        new_arenas(patch, 64)
        create = addresses.Arena
        patch.setattr(addresses, "Arena", lambda device: made.append(device) or create(device, room=64))
        for k in range(10):
            in_threads(lambda k=k: addresses.address_table((k,), CPU))
            gc.collect()
        assert [len(arenas) for arenas in addresses._idle.values()] == [1]
    assert len(made) == 1


RULES: list[dict[str, Any]] = [
    {"n_blocks": 2},
    {"n_blocks": 4, "block_size": 3},
    {"n_blocks": 4, "block_size": 4, "ways": 2},
]


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(("options", "room"), [*((rule, 16) for rule in RULES), (RULES[1], addresses.ROOM)], ids=str)
def test_two_threads_train_two_models(options: dict[str, Any], room: int) -> None:
    """Before a table is filled, and again before its kernel is launched, the other thread goes on to such a place of its own.

    The gradients are those of each model alone. No two kernels run at once, which the interpreter does not allow.
    """
    make: list[Callable[[], Results]] = [
        lambda seed=seed: plain(Stack(norm=True, seed=seed, **options), tokens(seed, shape=(2, 24))) for seed in (1, 2)
    ]
    with use_backend("triton"):
        alone = [job() for job in make]
    turns = Turns(2)
    found: dict[int, Results] = {}

    def job(k: int) -> Callable[[], None]:
        def run() -> None:
            with turns.taken_by(k), use_backend("triton"):
                found[k] = make[k]()

        return run

    with pytest.MonkeyPatch.context() as patch:
        new_arenas(patch, room)
        fill = addresses.write
        patch.setattr(addresses, "write", lambda *given: (turns.give(), fill(*given))[1])
        give_turns_away_after_tables(patch, turns)
        in_threads(*(job(k) for k in range(2)))
    assert turns.given > 10
    for k in range(2):
        assert_near([t for t in found[k] if t is not None], [t for t in alone[k] if t is not None], 1e-7)


class Turns:
    """Lets one of several threads run at a time, until it gives the turn to the next."""

    def __init__(self, n: int) -> None:
        self.running, self.turn, self.given = list(range(n)), 0, 0
        self.changed = threading.Condition()
        self.number = threading.local()

    def taken_by(self, k: int) -> "Turns":
        self.number.k = k
        return self

    def __enter__(self) -> None:
        self._wait()

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self._next()
            self.running.remove(self.number.k)

    def give(self) -> None:
        """Let the next thread run, and wait for the turn to come back."""
        with self.changed:
            self._next()
            self.given += 1
        self._wait()

    def _next(self) -> None:
        at = self.running.index(self.number.k)
        self.turn = self.running[(at + 1) % len(self.running)]
        self.changed.notify_all()

    def _wait(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.turn == self.number.k, WAIT)


def give_turns_away_after_tables(patch: pytest.MonkeyPatch, turns: Turns) -> None:
    """Give the turn away whenever tables are there and their kernel is not launched yet."""
    from depthmix.ops.depth_attention.kernels import general_read, layer_backward, pair, read, source_backward, tiling

    for module in (layer_backward, general_read, pair, read, source_backward, tiling):
        for name in ("address_table", "address_tables"):
            if hasattr(module, name):
                ask = getattr(module, name)
                patch.setattr(module, name, lambda *given, ask=ask: (ask(*given), turns.give())[0])
