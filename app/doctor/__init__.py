"""`tinworks doctor`: looks at everything that this host's processes will need, and says what to mend."""
