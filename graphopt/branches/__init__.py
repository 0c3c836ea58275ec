"""Graphs that go on where an assumption of another one fails, from what that one has computed.

    first graph     x ─ forward ─ backward ─ norm ─ isfinite(norm)? ✗   hands out: loss, gradients
    its other branch                                                    ├─ copies, returns loss
                                                                        continuation

Both graphs are captured whole. What the other one computes of the same terms as the first one did
before the assumption is not computed again: `continuation_of` cuts it off, and shows that what the
first graph has done, followed by what is left, is what the other graph does. `course` keeps what a
call has done so far, over all graphs that it went through. `branch` runs a graph, or goes on with
another one from the values that the first one hands out (`handing`).
"""
