"""The exceptions that end a stage with a message and no traceback, each with an exit status."""


class UserError(ValueError):
    """Something the user gave is wrong: names the thing, the value found and the cure.

    The command line prints it and exits with status 2.
    """

    kind, status = "error", 2

    def __init__(self, what: str, cure: str) -> None:
        super().__init__(f"{what}\n  cure: {cure}")
        self.what = what
        self.cure = cure


class StageError(RuntimeError):
    """The input was fine and the work still failed: the message says what and where to look.

    The command line prints it and exits with status 1; anything else that is raised is a defect
    of Lathe and keeps its traceback.
    """

    kind, status = "error", 1


class Preempted(StageError):
    """The run was asked to end (SIGTERM) and has saved its state: the same command goes on.

    Status 75 is sysexits.h's EX_TEMPFAIL: try again later.
    """

    kind, status = "preempted", 75
