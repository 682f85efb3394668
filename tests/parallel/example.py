"""The paper's example of a depth state that grows by whole tensors."""


def bank_states(chunks: int, per_rank: int = 1) -> list[dict[int, float]]:
    """The paper's example: every stage adds `per_rank` tensors that never change, and a state is all of them."""
    return [dict.fromkeys(range(per_rank * i), 1.0) for i in range(chunks + 1)]
