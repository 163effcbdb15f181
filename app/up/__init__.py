"""`tinworks up`: the whole service on one machine, in the foreground, with nothing to configure."""


class CannotStart(Exception):
    """`tinworks up` cannot begin or go on; the text is a sentence for the terminal."""
