"""The two ways a command ends badly. Messages are for the person who reads them and never quote a protected value."""


class InputError(Exception):
    """What was given is wrong: one line that says what, where and how to mend it. Exit status 2."""


class WorkError(Exception):
    """What was asked is right but could not be done (a full disk, a killed helper). Exit status 1."""
