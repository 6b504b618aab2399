"""The one exception for what a user can mend."""


class UserError(ValueError):
    """Something the user gave is wrong: names the thing, the value found and the cure.

    The command line prints it as one line and exits with status 2; anything else that is
    raised is a defect of Lathe and keeps its traceback.
    """

    def __init__(self, what: str, cure: str) -> None:
        super().__init__(f"{what}\n  cure: {cure}")
        self.what = what
        self.cure = cure
