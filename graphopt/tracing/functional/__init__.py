"""From the raw trace, with its updates in place, to the functional graph of the captured
dialect."""
