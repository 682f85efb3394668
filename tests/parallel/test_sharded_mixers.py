"""FSDP2 around mixers, with two processes."""


def test_with_two_processes(workers):
    """Neither of them this one: what other tests have done here is no part of it, and nobody hangs up on the other."""
    workers.run(2, "mixers.test_sharding:checks")
