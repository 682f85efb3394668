"""Errors that a user can cause, with their exit codes."""

INTERNAL = 1  # a bug, in depthmix or in a user-defined rule
USAGE = 2  # a wrong option, recipe or combination
DATA = 3  # a corpus or prepared data that cannot be used
CHECKPOINT = 4  # a checkpoint or run folder that cannot be used
DIVERGED = 5  # a loss that is not a number, or exploded
DISK = 6  # a disk that is full or cannot be written
INTERRUPTED = 130  # a signal such as SIGINT or SIGTERM; everything is saved
PIPE = 141  # the reader of the output has gone, as a shell reports a program that SIGPIPE ended


class UserError(Exception):
    """A user's mistake in one clear sentence. The command line prints it and exits with the code."""

    # Whether all processes of a run raise the error, so that one of them may report it.
    shared = False

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
