"""Calls made in threads at once, for tests of what threads share."""

import threading

LIMIT = 20  # seconds after which threads that wait for each other give up


def at_once(*calls):
    """Return what the calls return, each made in a thread of its own; raise the first error of one."""
    results, errors = [None] * len(calls), []

    def run(i, call):
        try:
            results[i] = call()
        except BaseException as error:  # for the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def meet_at(module, number):
    """Make `number` threads wait for each other before every call of a module; returns the handle of the hook."""
    barrier = threading.Barrier(number)

    def wait(*_):
        barrier.wait(LIMIT)

    return module.register_forward_pre_hook(wait)
